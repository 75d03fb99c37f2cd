#!/usr/bin/env python3
"""Shows a human and an agent working in one sandbox, side by side.

`make demo` runs it. It starts a broker in a temporary directory, plays a short story (the human with the `cobox` command and a
terminal, the agent with examples/agent.py and HTTP), checks every step, and leaves no files behind. Standard library only;
COBOX_BIN names the program to use.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import time

sys.dont_write_bytecode = True  # leave no bytecode beside the examples
import agent  # noqa: E402

THREAD = "demo"
START_SECONDS = 60  # until the broker responds; milliseconds if its root file system is already prepared
END_SECONDS = 60  # until the broker has suspended its sandboxes
STEP_SECONDS = 60  # for one command of the story
MIN_COLUMNS, MAX_COLUMNS = 80, 120  # of the whole page: two columns need 80, and lines over 120 are hard to read
BROKER_LOG_LINES = 15  # lines of the broker's log shown after a failure

GREET = 'echo "hello, $2"\n'  # a bug: refers to the second argument, but there is only one
GREET_TEST = """\
got=$(sh greet.sh world)
if [ "$got" = "hello, world" ]; then
  echo "ok: $got"
else
  echo "FAIL: wanted 'hello, world', got '$got'"
  exit 1
fi
"""


class Unexpected(Exception):
    """A step of the story failed."""


# ---- the story ------------------------------------------------------------------------------------------------------


def story(human, robot):
    human.says("I leave a program and a note.")
    human.keeps("greet.sh", GREET)
    human.runs("cp", "greet.sh", ":")
    human.runs("exec", "-c", "echo 'please test greet.sh' > from-human.txt")

    robot.says("Same thread, so the same sandbox.")
    expect("please test greet.sh", robot.runs_agent_py(), "the agent did not find the human's note")
    expect("$2", robot.reads("greet.sh"), "the agent did not find the human's program")
    robot.says("I write a test and run it.")
    robot.writes("test.sh", GREET_TEST)
    robot.runs("sh test.sh | tee report.txt")

    human.says("What did it find?")
    expect("FAIL: wanted 'hello, world'", human.runs("exec", "--", "cat", "report.txt"), "the human did not find the agent's report")
    directory = human.runs("exec", "-c", "pwd; ls")

    robot.says("Am I in the same folder?")
    same(directory, robot.runs("pwd; ls"), "the two see different folders")
    robot.says("The bug is $2. I fix it.")
    robot.writes("greet.sh", GREET.replace("$2", "$1"))
    expect("ok: hello, world", robot.runs("sh test.sh | tee report.txt"), "the agent's fixed program fails its test")

    human.says("I open a shell and look around.")
    seen = human.opens_shell("pwd", "ls", "cat from-agent.txt", "sh greet.sh human", "echo 'well done' > thanks.txt", "exit")
    for wanted in ("/workspace", "test.sh", "hello from the agent", "hello, human"):
        expect(wanted, seen, "the human's shell does not show the agent's work")

    robot.says("Anything new?")
    expect("well done", robot.reads("thanks.txt"), "the agent did not find what the human wrote in the shell")

    human.says("I copy the report and release the sandbox.")
    human.runs("cp", ":report.txt", "report.txt")
    same("ok: hello, world\n", human.finds("report.txt"), "the copied report is not the agent's")
    expect("released", human.runs("session", "release", THREAD, "--yes"), "the session was not released")


def expect(wanted, text, otherwise):
    if wanted not in text:
        raise Unexpected(f"{otherwise}: {wanted!r} is not in {text!r}")


def same(wanted, text, otherwise):
    if text != wanted:
        raise Unexpected(f"{otherwise}: {wanted!r} and {text!r}")


# ---- the participants -----------------------------------------------------------------------------------------------


class Human:
    """A person at a terminal: types `cobox …` in their own folder."""

    def __init__(self, cobox, env, home, page):
        self.cobox, self.env, self.home, self.page = cobox, env, home, page

    def says(self, text):
        self.page.write(0, f"# {text}", "says")

    def keeps(self, name, text):
        (self.home / name).write_text(text)

    def finds(self, name):
        self.page.write(0, f"$ cat {name}", "types")
        text = (self.home / name).read_text()
        self.page.write(0, text)
        return text

    def runs(self, *arguments):
        self.page.write(0, "$ cobox " + " ".join(map(typed, arguments)), "types")
        done = subprocess.run([self.cobox, *arguments], env=self.env, cwd=self.home, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=STEP_SECONDS)
        self.page.write(0, done.stdout + done.stderr)
        if done.returncode != 0:
            raise Unexpected(f"`cobox {shlex.join(arguments)}` ended with {done.returncode}")
        return done.stdout

    def opens_shell(self, *lines):
        """Types each line into `cobox shell` at its prompt; returns everything shown on the screen."""
        self.page.write(0, "$ cobox shell", "types")
        screen, keyboard = pty.openpty()
        fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        shell = subprocess.Popen([self.cobox, "shell"], env=self.env | {"TERM": "dumb"}, cwd=self.home, stdin=keyboard, stdout=keyboard,
                                 stderr=keyboard, start_new_session=True)
        os.close(keyboard)
        seen = []
        try:
            for line in lines:
                seen.append(read_screen(screen, until_prompt=True))
                os.write(screen, line.encode() + b"\r")
            seen.append(read_screen(screen, until_prompt=False))
            code = shell.wait(STEP_SECONDS)
        finally:
            shell.kill()
            shell.wait()
            os.close(screen)
        text = "".join(seen)
        self.page.write(0, text, "shell")
        if code != 0:
            raise Unexpected(f"`cobox shell` ended with {code}")
        return text


def typed(argument):
    """Quotes an argument as a person would type it: shlex handles nested quotes correctly, but unreadably."""
    return f'"{argument}"' if "'" in argument and not set(argument) & set('"$`\\') else shlex.quote(argument)


def read_screen(screen, until_prompt):
    """Reads a terminal up to the shell's prompt or to the end, without carriage returns, escape sequences and NULs."""
    deadline, text = time.monotonic() + STEP_SECONDS, ""
    data = b""
    while not (until_prompt and re.search(r"(^|\n)[^\n]*[$#] $", text)):
        if not select.select([screen], [], [], max(0, deadline - time.monotonic()))[0]:
            raise Unexpected(f"the shell stopped answering after {text!r}")
        try:
            chunk = os.read(screen, 65536)
        except OSError:  # Linux reports a closed pty this way
            chunk = b""
        if not chunk:
            if until_prompt:
                raise Unexpected(f"the shell ended too early, after {text!r}")
            break
        data += chunk
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|[\r\x00]", "", data.decode(errors="replace"))
    return text


class Robot:
    """The agent: first runs examples/agent.py unchanged, then takes a few more steps with the same plain HTTP."""

    def __init__(self, url, key, env, page):
        self.url, self.key, self.env, self.page = url, key, env, page
        self.sandbox = None

    def says(self, text):
        self.page.write(1, f"# {text}", "says")

    def runs_agent_py(self):
        self.page.write(1, f"$ python3 agent.py --thread {THREAD}", "types")
        script = [sys.executable, agent.__file__, "--thread", THREAD]
        done = subprocess.run(script, env=self.env, capture_output=True, text=True, timeout=STEP_SECONDS)
        self.page.write(1, done.stdout + done.stderr)
        if done.returncode != 0:
            raise Unexpected(f"agent.py ended with {done.returncode}")
        self.sandbox = agent.Sandbox(self.url, self.key, THREAD)
        expect(self.sandbox.id, done.stdout, "on the second request, the agent got another sandbox")
        return done.stdout

    def writes(self, name, text):
        self.page.write(1, f"> PUT /workspace/{name}", "types")
        self.sandbox.write(f"/workspace/{name}", text.encode())

    def reads(self, name):
        self.page.write(1, f"> GET /workspace/{name}", "types")
        text = self.sandbox.read(f"/workspace/{name}").decode()
        self.page.write(1, text)
        return text

    def runs(self, command):
        self.page.write(1, f"> EXEC {command}", "types")
        result = self.sandbox.run("sh", "-c", command)
        self.page.write(1, result["stdout"] + result["stderr"])
        if result["exit_code"] != 0:
            raise Unexpected(f"`{command}` ended with {result['exit_code']} in the sandbox")
        return result["stdout"]


# ---- the output -----------------------------------------------------------------------------------------------------


class Page:
    """Two columns, written line by line in chronological order."""

    COLOURS = {"title": "1", "says": "2", "types": "1", "good": "32", "bad": "31"}

    def __init__(self, out):
        self.out = out
        columns = shutil.get_terminal_size((MIN_COLUMNS, 24)).columns
        self.columns = max(MIN_COLUMNS, min(MAX_COLUMNS, columns))
        is_unicode = "utf" in (getattr(out, "encoding", None) or "").lower()
        self.wall, self.line = (" │ ", "─") if is_unicode else (" | ", "-")
        self.width = (self.columns - len(self.wall)) // 2
        self.has_colour = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.side = None

    def write(self, side, text, kind=""):
        """Writes lines into the left (0) or the right (1) column."""
        if self.side not in (None, side):
            self.row("", "")
        self.side = side
        for line in text.splitlines():
            # In a shell, lines with a prompt were typed.
            shown = "types" if kind == "shell" and re.match(r"[^\s$#]*[$#] ", line) else kind
            for part in self.fold(line):
                painted = self.paint(part, shown)
                self.row(*((painted + " " * (self.width - len(part)), "") if side == 0 else (" " * self.width, painted)))

    def fold(self, line):
        printable = "".join(c if c.isprintable() else "?" for c in line.expandtabs())
        return textwrap.wrap(printable, self.width, subsequent_indent="  ", break_on_hyphens=False, replace_whitespace=False) or [""]

    def row(self, left, right):
        self.tell((left or " " * self.width) + self.wall.rstrip() + (" " + right if right else ""))

    def titles(self, left, right):
        self.row(self.paint(left.ljust(self.width), "title"), self.paint(right, "title"))
        self.tell(self.line * self.columns)

    def tell(self, text="", kind=""):
        print(self.paint(text, kind), file=self.out, flush=True)

    def paint(self, text, kind):
        return f"\x1b[{self.COLOURS[kind]}m{text}\x1b[0m" if self.has_colour and text and kind in self.COLOURS else text


# ---- the broker -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def broker(cobox, directory, env):
    """`cobox up` in a temporary directory; stopped as if by Ctrl-C in any case."""
    data_dir, log = directory / "data", directory / "broker.log"
    with log.open("w") as out:
        # In its own session: Ctrl-C must only reach this script, which stops the broker after its clients.
        process = subprocess.Popen([cobox, "up", "--data-dir", data_dir, "--listen", "127.0.0.1:0"], env=env, stdin=subprocess.DEVNULL,
                                   stdout=out, stderr=out, start_new_session=True)
    try:
        state, deadline = data_dir / "broker.json", time.monotonic() + START_SECONDS
        while not state.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise Unexpected(f"the broker did not start:\n{tail(log)}")
            time.sleep(0.01)
        yield json.loads(state.read_text())
        if process.poll() is not None:
            raise Unexpected(f"the broker exited unexpectedly:\n{tail(log)}")
    finally:
        ignore_signals()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"demo: the broker did not end within {END_SECONDS} s and was killed:\n{tail(log)}", file=sys.stderr)


def tail(log):
    return "\n".join(log.read_text(errors="replace").splitlines()[-BROKER_LOG_LINES:])


def make_key(cobox, env, name, kind):
    made = subprocess.run([cobox, "--json", "keys", "create", name, "--kind", kind], env=env, capture_output=True, text=True,
                          timeout=STEP_SECONDS)
    if made.returncode != 0:
        raise Unexpected(f"could not create a key for the {kind}: {made.stderr.strip()}")
    return json.loads(made.stdout)["api_key"]


def find_cobox():
    named = os.environ.get("COBOX_BIN") or shutil.which("cobox")
    if not named or not os.access(named, os.X_OK):
        sys.exit("demo: no cobox program; build one with `make demo`, or set COBOX_BIN to its path")
    return os.path.abspath(named)


def play(directory, page):
    cobox = find_cobox()
    # Does not read or write the user's configuration, keys and threads.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("COBOX_", "XDG_")) or k == "COBOX_BOXD"}
    env |= {"HOME": str(directory), "XDG_CONFIG_HOME": str(directory / "config"), "XDG_DATA_HOME": str(directory / "share")}
    with broker(cobox, directory, env) as state:
        operator = env | {"COBOX_URL": state["url"], "COBOX_API_KEY_FILE": state["api_key_file"]}
        keys = {kind: make_key(cobox, operator, name, kind) for name, kind in (("mira", "human"), ("scout", "agent"))}
        envs = {kind: env | {"COBOX_URL": state["url"], "COBOX_API_KEY": key, "COBOX_THREAD": THREAD} for kind, key in keys.items()}
        home = directory / "home"
        home.mkdir()
        human = Human(cobox, envs["human"], home, page)
        robot = Robot(state["url"], keys["agent"], envs["agent"], page)

        page.tell("One sandbox, shared: a human and an agent, each with their own key, request")
        page.tell(f"the sandbox of thread \"{THREAD}\". Time runs downwards; all of this is really executed.")
        page.tell()
        page.titles("HUMAN, with cobox in a terminal", "AGENT, with plain HTTP")
        began = time.monotonic()
        story(human, robot)
        page.tell(page.line * page.columns)
        return time.monotonic() - began


def ignore_signals():
    """Ignores signals from here on: an interrupted cleanup would leave files and processes behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main():
    def stop(number, _frame):
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    page = Page(sys.stdout)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="cobox-demo-"))
    try:
        seconds = play(directory, page)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader is gone, and Python would report an error on exit
        return 128 + signal.SIGPIPE
    except (Unexpected, agent.Refused, OSError, subprocess.TimeoutExpired) as problem:
        page.tell()
        page.tell(f"demo: failed: {problem}", "bad")
        return 1
    except KeyboardInterrupt:
        page.tell()
        page.tell("demo: stopped")
        return 130
    finally:
        ignore_signals()
        shutil.rmtree(directory, onerror=lambda _call, path, why: print(f"demo: could not delete {path}: {why[1]}", file=sys.stderr))
    page.tell(f"Each saw what the other did; it took {seconds:.1f} s.", "good")
    page.tell("The sandbox, the broker and their files are deleted. To keep a broker running: make run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
