"""A full-screen program that redraws like htop: bars, colours, a table, whatever size; `n` is the next picture, `q` the end."""

import curses
import locale


def draw(screen, step):
    rows, cols = screen.getmaxyx()
    screen.erase()
    screen.addnstr(0, 0, f" step {step}  {cols}x{rows}  µ漢字 ".ljust(cols - 1), cols - 1, curses.A_REVERSE | curses.A_BOLD)
    for row in range(1, min(rows - 2, 12)):
        filled = (row * 7 + step * 5) % max(cols - 10, 1)
        screen.addstr(row, 0, f"cpu{row:2}[", curses.color_pair(0))
        screen.addnstr(row, 6, "|" * filled, cols - 8, curses.color_pair(1 + (row + step) % 200))
        screen.addstr(row, cols - 2, "]")
    for row in range(13, rows - 1):
        attribute = curses.A_UNDERLINE if row % 3 == step % 3 else curses.A_DIM
        screen.addnstr(row, 0, f"{row * 100 + step:6} user  {'x' * (row % 9)} process number {row}", cols - 1, attribute)
    screen.addnstr(rows - 1, 0, "n next  q quit", cols - 1, curses.A_STANDOUT)
    screen.move(min(step % rows, rows - 1), 0)
    screen.refresh()


def main(screen):
    curses.use_default_colors()
    for pair in range(1, min(201, curses.COLOR_PAIRS)):
        curses.init_pair(pair, pair % curses.COLORS, (pair * 3) % curses.COLORS)
    curses.curs_set(0)
    step = 0
    while True:
        draw(screen, step)
        key = screen.getch()
        if key == ord("q"):
            return
        if key == ord("n"):
            step += 1


locale.setlocale(locale.LC_ALL, "")
curses.wrapper(main)
