"""The trees that a sync is measured with, made anew from a seed: the same bytes on every machine."""

import math
import os
import pathlib
import random

SEED = 20
TEXT_BYTES = 4 << 20  # of which every text file is a part
PIECE_BYTES = 16 << 20
LINE_WORDS = 9
SMALL_BYTES = 4096
# A kernel's sources: most files are a few kilobytes, a few are very long.
MEDIAN_BYTES, SPREAD, MOST_BYTES = 5000, 1.3, 1 << 20
FILES_OF_A_FOLDER = 15


def words(dice):
    """Text that shrinks as source code does."""
    known = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz_", k=dice.randint(2, 12))) for _ in range(4000)]
    lines, size = [], 0
    while size < TEXT_BYTES:
        line = "\t" * dice.randint(0, 3) + " ".join(dice.choices(known, k=LINE_WORDS)) + ";\n"
        lines.append(line)
        size += len(line)
    return "".join(lines).encode()


def small(place, files):
    """Many small files, a hundred in a folder."""
    dice = random.Random(SEED)
    text = words(dice)
    for number in range(files):
        write(place / f"d{number // 100:03d}" / f"f{number:05d}.txt", text, dice, SMALL_BYTES, number)


def kernel(place, files):
    """Folders in folders, as deep and as full as a kernel's sources."""
    dice = random.Random(SEED + 1)
    text = words(dice)
    folder = pathlib.Path(".")
    for number in range(files):
        if number % FILES_OF_A_FOLDER == 0:
            folder = pathlib.Path(*(f"{level}{dice.randrange(12):02d}" for level in "abcd"[:dice.randint(1, 4)]))
        size = min(MOST_BYTES, int(dice.lognormvariate(math.log(MEDIAN_BYTES), SPREAD)) + 1)
        write(place / folder / f"s{number:05d}.c", text, dice, size, number)


def large(place, size):
    """One file that nothing shrinks."""
    dice = random.Random(SEED + 2)
    place.mkdir(parents=True)
    with (place / "large.bin").open("wb") as file:
        for at in range(0, size, PIECE_BYTES):
            file.write(dice.randbytes(min(PIECE_BYTES, size - at)))


def write(path, text, dice, size, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    at = dice.randrange(len(text) - min(size, len(text) - 1))
    # No two are the same, so that none can be copied from another.
    path.write_bytes((b"/* %d */\n" % number + text[at:at + size])[:size])


def measure(place):
    """Files and bytes of a tree, without what a sync that just ended is about to take away."""
    found = (pathlib.Path(top) / name for top, _, names in os.walk(place) if ".cobox-sync" not in top for name in names)
    sizes = [path.stat().st_size for path in found]
    return len(sizes), sum(sizes)
