"""The sync tools that are compared: rsync and unison over the benchmark's sshd, and cobox into a sandbox.

Each has `copy`, which copies a folder to the other side and returns the time in ms; `seen`, the folder's path there; `forget`,
which deletes it; and `peaks`, the peak memory of the last copy on either side in KiB. `why_not` is the reason if a tool is
unavailable.
"""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time

from peak_memory import most_memory, watched
from peers import END_SECONDS, first_line, program

WAIT_SECONDS = 60
POLL_SECONDS = 0.0002
SAVE_BYTES = 4096
# Runs a command and writes its peak memory to a file; the remote side has no other way to report it.
PEAK = """\
#!/usr/bin/env python3
import os, subprocess, sys
sys.path.insert(0, {here!r})
from peak_memory import watched
process = subprocess.Popen([{command!r}] + sys.argv[1:])
most = watched(process)
open({out!r} + ".new", "w").write(str(most))
os.rename({out!r} + ".new", {out!r})
sys.exit(process.returncode)
"""


def timed(argv, env=None):
    """Runs a program; returns the time in ms and its peak memory in KiB."""
    began = time.perf_counter_ns()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([os.fspath(a) for a in argv], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        most = watched(process)
        took = (time.perf_counter_ns() - began) / 1e6
        if process.returncode != 0:
            out.seek(0)
            raise RuntimeError(f"{argv[0]} ended with {process.returncode}: {out.read()[-600:]}")
    return took, most


def save(path, content):
    with open(path, "wb") as file:
        file.write(content)


def until_seen(path, content):
    """Waits until a reader gets the new content; returns the time in ms."""
    began = time.perf_counter_ns()
    while True:
        try:
            if pathlib.Path(path).read_bytes() == content:
                return (time.perf_counter_ns() - began) / 1e6
        except OSError:
            pass
        if time.perf_counter_ns() - began > WAIT_SECONDS * 1e9:
            raise RuntimeError(f"{path} was not seen within {WAIT_SECONDS} s")
        time.sleep(POLL_SECONDS)


def saves(here, there, count, dice, name="saved.txt"):
    """Saves a file repeatedly and waits each time until the other side has it."""
    times = []
    for _ in range(count):
        # Avoids saving in step with a tool that polls.
        time.sleep(0.3 + dice.random())
        content = dice.randbytes(SAVE_BYTES)
        save(here / name, content)
        times.append(until_seen(there / name, content))
    return times


class Rsync:
    def __init__(self, directory, ssh, *options):
        self.directory, self.options, self.why_not, self.version, self.peaks = directory, options, ssh.why_not, None, (0, 0)
        try:
            self.rsync = program("rsync")
            self.version = " ".join(first_line([self.rsync, "--version"]).split()[:3]) if not options else None
        except (RuntimeError, OSError) as problem:
            self.why_not = str(problem)
            return
        directory.mkdir(parents=True)
        if not self.why_not:
            self.shell = shlex.join([*ssh.base, *ssh.shared])
            self.peak = wrapper(directory.parent / f"{directory.name}-peak", self.rsync)

    def copy(self, source, run):
        command, out = self.peak
        took, here = timed([self.rsync, "-a", *self.options, "-e", self.shell, f"--rsync-path={command}", f"{source}/",
                            f"127.0.0.1:{self.directory}/{run}/"])
        self.peaks = (here, left_word(out))
        return took

    def seen(self, run):
        return self.directory / run

    def forget(self, run):
        shutil.rmtree(self.directory / run)


class Unison:
    def __init__(self, directory, ssh, home):
        self.directory, self.home, self.why_not, self.version, self.peaks = directory, home, ssh.why_not, None, (0, 0)
        try:
            self.unison = program("unison")
            self.version = " ".join(first_line([self.unison, "-version"]).split()[:3])
        except (RuntimeError, OSError) as problem:
            self.why_not = str(problem)
            return
        # From the project's own releases; Debian's package does not contain it.
        self.has_monitor = shutil.which("unison-fsmonitor") is not None
        directory.mkdir(parents=True)
        home.mkdir(parents=True)
        if not self.why_not:
            self.ssh = ssh
            self.peak = wrapper(home / "peak", self.unison)

    def watching(self):
        if self.why_not:
            return "unison"
        return "unison -repeat watch" if self.has_monitor else "unison -repeat 1"

    def watch_words(self):
        if self.why_not or self.has_monitor:
            return "unison watches with its unison-fsmonitor."
        return ("unison is measured with `-repeat 1`, its shortest polling interval: `-repeat watch` needs unison-fsmonitor, which this "
                "machine's package doesn't have. In addition, one run for the saved file alone is started at the moment of the save; watching could "
                "only be faster than that by its start-up time. The promise counts the faster of the two.")

    def command(self, source, run, *more):
        program_, *options = [*self.ssh.base, *self.ssh.shared]
        return [self.unison, source, f"ssh://127.0.0.1/{self.directory}/{run}", "-batch", "-auto", "-confirmbigdel=false", "-perms", "0",
                "-sshcmd", program_, "-sshargs", " ".join(options), "-servercmd", self.peak[0], *more]

    def env(self, run):
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), "UNISON": str(self.home / run), "LANG": "C.UTF-8"}

    def copy(self, source, run):
        (self.directory / run).mkdir(exist_ok=True)
        took, here = timed(self.command(source, run), self.env(run))
        self.peaks = (here, left_word(self.peak[1]))
        return took

    def saves_by_hand(self, source, run, count):
        """One run per save for that file only, started with the save; measures until it ends."""
        times = []
        for turn in range(count):
            content = os.urandom(SAVE_BYTES)
            save(source / "by-hand.txt", content)
            took, _ = timed(self.command(source, run, "-path", "by-hand.txt"), self.env(run))
            if (self.seen(run) / "by-hand.txt").read_bytes() != content:
                raise RuntimeError(f"unison did not copy the save of turn {turn}")
            times.append(took)
        return times

    def saves(self, source, run, count, dice):
        how = "watch" if self.has_monitor else "1"
        with (self.home / "watch.log").open("w") as log:
            process = subprocess.Popen([os.fspath(a) for a in self.command(source, run, "-repeat", how)], env=self.env(run),
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            save(source / "first.txt", b"first")
            until_seen(self.seen(run) / "first.txt", b"first")
            return saves(source, self.seen(run), count, dice)
        finally:
            end(process)

    def seen(self, run):
        return self.directory / run

    def forget(self, run):
        shutil.rmtree(self.directory / run)
        shutil.rmtree(self.home / run, ignore_errors=True)


class Cobox:
    why_not = None
    version = None

    def __init__(self, cobox, broker, home):
        self.cobox, self.broker, self.home, self.peaks = cobox, broker, home, (0, 0)
        home.mkdir(parents=True)
        self.session = broker.ensure("bench")
        self.session.run_true()
        address = broker.connection
        self.url = f"http://{address.host}:{address.port}"

    def env(self):
        return {"PATH": os.environ["PATH"], "HOME": str(self.home), "COBOX_URL": self.url, "COBOX_API_KEY": self.broker.key}

    def run(self, *words):
        subprocess.run([self.cobox, *words], env=self.env(), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def sync(self, source, run, *more):
        return [self.cobox, "sync", *more, source, f"bench:/workspace/{run}"]

    def copy(self, source, run):
        boxd = pathlib.Path(f"/proc/{self.session.boxd()}")
        (boxd / "clear_refs").write_text("5")
        took, here = timed(self.sync(source, run, "--until-synced"), self.env())
        self.peaks = (here, most_memory(self.session.boxd()))
        return took

    def live(self, source, run):
        return Live(self.sync(source, run, "--json"), self.env())

    def seen(self, run):
        return pathlib.Path(f"/proc/{self.session.boxd()}/root/workspace/{run}")

    def forget(self, run):
        self.run("exec", "--thread", "bench", "--no-flush", "--", "rm", "-rf", f"/workspace/{run}")


class Live:
    """A `cobox sync` that keeps running until the end of a `with`."""

    def __init__(self, command, env):
        self.command, self.env = [os.fspath(word) for word in command], env

    def __enter__(self):
        self.process = subprocess.Popen(self.command, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            event = json.loads(line)
            if event.get("event") == "phase" and event["phase"] == "watching":
                # Drains the output so that the process never blocks on a full pipe.
                threading.Thread(target=self.process.stdout.read, daemon=True).start()
                return self
        raise RuntimeError("the sync ended before both sides were the same")

    def saves(self, here, there, count, dice):
        return saves(here, there, count, dice)

    def __exit__(self, *_):
        end(self.process)


def wrapper(path, command):
    """Writes a script that runs a command and stores its peak memory; returns the script and the file with the result."""
    out = path.with_suffix(".kib")
    path.write_text(PEAK.format(here=str(pathlib.Path(__file__).resolve().parent), command=os.fspath(command), out=str(out)))
    path.chmod(0o755)
    return path, out


def left_word(out):
    """The peak memory stored by the remote wrapper, which ends after the local command."""
    deadline = time.monotonic() + END_SECONDS
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    most = int(out.read_text())
    out.unlink()
    return most


def end(process):
    process.send_signal(signal.SIGINT)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
