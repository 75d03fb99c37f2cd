#!/usr/bin/env python3
"""Benchmarks how long a new sandbox takes to run its first command, compared with bubblewrap and podman on the same machine.

`make bench` runs it; COBOX_BIN names the program to measure. All contenders are measured alternately in one run, in an order that
changes every round, so that disturbances affect all of them. Writes results/start.md and results/start.svg, and exits with 1 if a
promise is missed. Standard library only.
"""

import contextlib
import datetime
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
from broker import Broker  # noqa: E402
from podman import Podman, version  # noqa: E402
from report import Series, machine, plot, table  # noqa: E402

ROUNDS = 60
WARM_UP_ROUNDS = 5
PODMAN_EVERY = 5  # rounds; it takes as long as all others together
PAUSE_SECONDS = 0.03  # after each measurement, while the kernel removes namespaces
MEMORY_SANDBOXES = 20
MOST_TIMES_BWRAP = 6  # promised: maximum time of a new sandbox's first response, as a multiple of bwrap's /bin/true
LEAST_TIMES_FASTER_THAN_PODMAN = 10  # promised
RESULTS = pathlib.Path(__file__).resolve().parent / "results"

BWRAP = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "/bin/true"]


def milliseconds(work):
    began = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began) / 1e6


class Programs:
    """Runs a program to its end with no overhead other than vfork."""

    def __init__(self, env):
        self.env, self.null = env, os.open(os.devnull, os.O_RDWR)

    def run(self, argv):
        path = shutil.which(argv[0])
        argv = [os.fspath(a) for a in argv]
        to_null = [(os.POSIX_SPAWN_DUP2, self.null, fd) for fd in (0, 1, 2)]

        def work():
            pid = os.posix_spawn(path, argv, self.env, file_actions=to_null)
            _, status = os.waitpid(pid, 0)
            if status != 0:
                raise RuntimeError(f"{argv[0]} ended with {os.waitstatus_to_exitcode(status)}")

        return milliseconds(work)


class Bench:
    def __init__(self, brokers, podman, seed=1):
        self.programs, self.podman, self.order = Programs(dict(os.environ)), podman, random.Random(seed)
        self.threads = 0
        self.series, self.work = {}, []
        for broker, name in brokers:
            self.add(f"new-{name}", f"cobox, new sandbox{of(name)}", self.new(broker, name), is_ours=True)
            self.add(f"ensure-{name}", f"… of which until it exists{of(name)}", None, is_ours=True)
        broker, name = brokers[0]
        self.resting = broker.ensure("resumed again and again")
        self.warm = broker.ensure("warm")
        self.add("resume", "cobox, suspended sandbox", self.resume(broker), is_ours=True)
        self.add("warm", "cobox, running sandbox", self.exec_warm, is_ours=True)
        self.add("bwrap", "bwrap, all namespaces, /bin/true", lambda: self.programs.run(BWRAP))
        if not podman.why_not:
            self.add("podman", "podman run, /bin/true", self.run_podman)
        self.add("floor", "fork + exec, /bin/true", lambda: self.programs.run(["/bin/true"]))

    def add(self, key, label, measure, is_ours=False):
        self.series[key] = Series(key, label, is_ours)
        if measure:
            self.work.append((key, measure))

    def new(self, broker, name):
        def measure():
            self.threads += 1
            began = time.perf_counter_ns()
            session = broker.ensure(f"bench-{self.threads}")
            ensured = time.perf_counter_ns()
            session.run_true()
            answered = time.perf_counter_ns()
            session.release()
            self.series[f"ensure-{name}"].times.append((ensured - began) / 1e6)
            return (answered - began) / 1e6

        return measure

    def resume(self, broker):
        def measure():
            self.resting.crash()
            time.sleep(PAUSE_SECONDS)
            return milliseconds(lambda: broker.ensure("resumed again and again").run_true())

        return measure

    def exec_warm(self):
        return milliseconds(self.warm.run_true)

    def run_podman(self):
        programs = Programs(self.podman.env)
        try:
            return programs.run(self.podman.command)
        finally:
            os.close(programs.null)

    def round(self, number):
        turn = [w for w in self.work if w[0] != "podman" or number % PODMAN_EVERY == 0]
        self.order.shuffle(turn)
        for key, measure in turn:
            self.series[key].times.append(measure())
            time.sleep(PAUSE_SECONDS)

    def run(self):
        for number in range(-WARM_UP_ROUNDS, ROUNDS):
            progress(f"round {max(number + 1, 0)} of {ROUNDS}")
            if number == 0:
                for series in self.series.values():
                    series.times.clear()
            self.round(number)
        self.resting.release()
        self.warm.release()


def of(name):
    return f" ({name})" if name else ""


def has_hard_limit(broker):
    session = broker.ensure("what kind")
    try:
        return (session.dir / "disk.img").exists()
    finally:
        session.release()


def memory(broker):
    """Private memory of boxd and its init, for each of several sandboxes that ran one command and are idle."""
    sessions = [broker.ensure(f"idle-{n}") for n in range(MEMORY_SANDBOXES)]
    for session in sessions:
        session.run_true()
    try:
        each = []
        for session in sessions:
            boxd = session.boxd()
            children = pathlib.Path(f"/proc/{boxd}/task/{boxd}/children").read_text().split()
            each.append((private_kib(boxd), sum(private_kib(child) for child in children)))
        return each
    except PermissionError:
        return None  # no permission to read boxd's memory maps
    finally:
        for session in sessions:
            session.release()


def private_kib(pid):
    rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in rollup if line.startswith(("Private_Clean:", "Private_Dirty:")))


def verdicts(series, podman):
    """The promises: text, measured value, and whether they are kept; None if that is unknown."""
    ours = next(s for s in series.values() if s.key.startswith("new-"))
    times_bwrap = ours.median / series["bwrap"].median
    yield (f"a new sandbox answers its first command within {MOST_TIMES_BWRAP} × `bwrap`", f"{times_bwrap:.2f} ×",
           times_bwrap <= MOST_TIMES_BWRAP)
    promise = f"that is at least {LEAST_TIMES_FASTER_THAN_PODMAN} × faster than `podman run`"
    if podman.why_not:
        yield promise, podman.why_not, None
    else:
        faster = series["podman"].median / ours.median
        yield promise, f"{faster:.1f} × faster", faster >= LEAST_TIMES_FASTER_THAN_PODMAN


def document(series, podman, used, found, cobox):
    words = {True: "kept", False: "**missed**", None: "not measured"}
    lines = ["# Time until a new sandbox has answered its first command", "", "Written by `make bench`.", "",
             table(series.values(), series["bwrap"]), "", "| promise | measured | |", "|---|---|---|"]
    lines += [f"| {promise} | {measured} | {words[is_kept]} |" for promise, measured, is_kept in found]
    lines += ["", "![](start.svg)", "", "## Method",
              "- cobox: `POST /v1/sandbox/sessions` with mode `ensure` for a thread that has no sandbox, until the response to `POST …/exec` of "
              "`true` is read, both over one kept-alive connection, through the gateway. Every acknowledged change is on disk by then. "
              "Release is not counted.",
              "- suspended: the same for a thread whose sandbox was suspended and kept its files. Running: the `exec` alone."]
    if "new-soft disk limit" in series:
        lines.append("- hard disk limit: the default for root, a filesystem of its own for each sandbox. Soft: `[local] disk = \"soft\"`.")
    lines.append(f"- bwrap: `{' '.join(BWRAP)}`, until it has ended.")
    if podman.why_not:
        lines.append(f"- podman: {podman.why_not}.")
    else:
        lines.append(f"- podman: `podman run --rm` with `{podman.options}`, of an image that holds /bin/true and its libraries, until it "
                     "has ended.")
    lines.append("- fork + exec: /bin/true without any isolation, the lower bound on this machine.")
    lines += [f"- {ROUNDS} rounds after {WARM_UP_ROUNDS} warm-up rounds, each with all of these once (podman in every {PODMAN_EVERY}th), in a "
              "changing order.", "", "## Memory"]
    if used:
        boxd, init = (statistics.median(column) / 1024 for column in zip(*used))
        lines.append(f"An idle sandbox uses {boxd + init:.1f} MiB of private memory (median of {len(used)}): boxd {boxd:.1f}, "
                     f"its init {init:.1f}.")
    else:
        lines.append("Not measured: this user may not read boxd's memory.")
    who = "root" if os.geteuid() == 0 else "an ordinary user"
    versions = f"{cobox}, bwrap {version('bwrap')}" + (f", podman {podman.version}" if podman.version else "")
    lines += ["", "## Where", f"{machine()}. As {who}. {versions}. {datetime.date.today():%Y-%m-%d}."]
    return "\n".join(lines) + "\n"


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main():
    cobox = os.environ.get("COBOX_BIN") or shutil.which("cobox")
    if not cobox or not os.access(cobox, os.X_OK):
        sys.exit("bench: no cobox program; build one with `make bench`, or set COBOX_BIN to its path")
    if not shutil.which("bwrap"):
        sys.exit("bench: bwrap is not installed; `scripts/setup bench` does that")
    cobox = os.path.abspath(cobox)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    directory = pathlib.Path(tempfile.mkdtemp(prefix="cobox-bench-"))
    try:
        with contextlib.ExitStack() as started:
            default = started.enter_context(Broker(cobox, directory / "default"))
            brokers = [(default, "")]
            if has_hard_limit(default):
                soft = started.enter_context(Broker(cobox, directory / "soft", '[local]\ndisk = "soft"\n'))
                brokers = [(default, "hard disk limit"), (soft, "soft disk limit")]
            podman = started.enter_context(Podman(directory / "podman"))
            bench = Bench(brokers, podman)
            bench.run()
            progress("memory")
            used = memory(default)
            progress("")
    except RuntimeError as problem:
        sys.exit(f"bench: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        shutil.rmtree(directory)
    series = bench.series
    found = list(verdicts(series, podman))
    name = subprocess.run([cobox, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    text = document(series, podman, used, found, name)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "start.md").write_text(text)
    drawn = sorted((s for s in series.values() if not s.key.startswith("ensure-")), key=lambda s: s.median)
    (RESULTS / "start.svg").write_text(plot(drawn, "Time until the first command is answered", machine()))
    print(text, end="")
    if any(is_kept is False for _, _, is_kept in found):
        sys.exit("bench: a promise is missed")


if __name__ == "__main__":
    main()
