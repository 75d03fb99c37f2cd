#!/usr/bin/env python3
"""Benchmarks `cobox sync` against rsync over ssh and unison, on the same trees in the same run.

`make bench-sync` runs it; COBOX_BIN names the program to measure. All contenders are measured alternately, in rounds with a
changing order. Writes results/sync.md and results/sync.svg, and exits with 1 if a promise is missed. With --quick or
BENCH_QUICK=1 the trees are small; such a run writes below target/ and checks no promises. Standard library only. Needs root,
because files in a sandbox are read through its boxd's /proc.
"""

import contextlib
import datetime
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import trees  # noqa: E402
from broker import Broker  # noqa: E402
from panel_plot import Group, panels  # noqa: E402
from peers import ROOT, OpenSsh  # noqa: E402
from report import Series, machine, number  # noqa: E402
from storage import Storage  # noqa: E402
from sync_tools import Cobox, Rsync, Unison  # noqa: E402

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
TRIAL_RESULTS = ROOT / "target" / "bench"
LEAST_SHARE_OF_RSYNC = 0.9  # promised: share of its speed on the first copy, with every file durable in both
LEAST_TIMES_UNISON = 5  # promised: how many times faster one change arrives
AIM_MS = 100  # from a save until it is visible
SAVES, THEIR_SAVES = 50, 8
# Key, title, generator, size, size with --quick, rounds.
TREES = [
    ("small", "10,000 files of 4 KiB", trees.small, 10_000, 300, 5),
    ("large", "one file of 1 GiB", trees.large, 1 << 30, 8 << 20, 3),
    ("kernel", "60,000 files like a kernel's sources", trees.kernel, 60_000, 1_000, 3),
]
WAYS = {"rsync": "rsync -a", "durable": "rsync -a --fsync", "unison": "unison", "cobox": "cobox sync"}


class Bench:
    def __init__(self, directory, ways, is_quick):
        self.directory, self.ways, self.is_quick = directory, ways, is_quick
        self.order, self.groups, self.memory = random.Random(1), {}, {}

    def group(self, key, title, yardstick, ways, **kind):
        self.groups[key] = group = Group(title, yardstick, **kind)
        for way in ways:
            group.series[way] = Series(way, WAYS.get(way, way), is_ours=way.startswith("cobox"))
            if way in self.ways and self.ways[way].why_not:
                group.why_not[way] = self.ways[way].why_not
        return group

    def able(self):
        return [way for way, syncer in self.ways.items() if not syncer.why_not]

    def one_tree(self, key, title, make, size, rounds):
        """The first copy, then the same command again with nothing changed, into a fresh folder each round."""
        source = self.directory / key
        make(source, size)
        files, total = trees.measure(source)
        first = self.group(f"{key}-first", f"First copy: {title}", "durable", self.ways, unit_bytes=total, is_share=True)
        again = self.group(f"{key}-again", f"Nothing changed: {title}", "rsync", self.ways)
        for turn in range(rounds):
            ways = self.able()
            self.order.shuffle(ways)
            for way in ways:
                syncer = self.ways[way]
                run = f"{key}-{turn}"
                # Flushes the writes of other contenders, so that they do not slow down this one.
                os.sync()
                first.series[way].times.append(syncer.copy(source, run))
                arrived = trees.measure(syncer.seen(run))
                if arrived != (files, total):
                    raise RuntimeError(f"{way} copied {arrived[0]} files and {arrived[1]} bytes of {files} and {total}")
                self.memory.setdefault(key, {}).setdefault(way, []).append(syncer.peaks)
                os.sync()
                again.series[way].times.append(syncer.copy(source, run))
                syncer.forget(run)
        return source

    def saves(self, source):
        """Saves one file repeatedly in the largest tree and waits until the other side has it."""
        there = {"cobox": "cobox sync, from here", "cobox-back": "cobox sync, from the sandbox"}
        repeat, once = self.ways["unison"].watching(), "unison, one run for that file, started with the save"
        names = {"unison-watch": repeat, "unison-once": once, **there}
        group = self.group("save", "One save until it is visible on the other side, in that tree", "unison-watch", names)
        for key, label in names.items():
            group.series[key].label = label
        rng = random.Random(3)
        few = 2 if self.is_quick else THEIR_SAVES
        if self.ways["unison"].why_not:
            group.why_not |= {key: self.ways["unison"].why_not for key in ("unison-watch", "unison-once")}
        else:
            self.ways["unison"].copy(source, "live")
            group.series["unison-once"].times += self.ways["unison"].saves_by_hand(source, "live", few)
            group.series["unison-watch"].times += self.ways["unison"].saves(source, "live", few, rng)
            self.ways["unison"].forget("live")
        cobox = self.ways["cobox"]
        with cobox.live(source, "live") as live:
            count = 5 if self.is_quick else SAVES
            group.series["cobox"].times += live.saves(source, cobox.seen("live"), count, rng)
            group.series["cobox-back"].times += live.saves(cobox.seen("live"), source, count, rng)
        cobox.forget("live")

    def promises(self):
        verdicts = []
        for key, title, *_ in TREES:
            ratio = self.groups[f"{key}-first"].ratio("cobox")
            share = 1 / ratio if ratio else None
            words = f"at least {LEAST_SHARE_OF_RSYNC} of the speed of `rsync -a --fsync` on the first copy: {title}"
            verdicts.append((words, f"{share:.2f}" if share else "not measured", share is not None and share >= LEAST_SHARE_OF_RSYNC))
        save = self.groups["save"]
        theirs = [save.series[key].median for key in ("unison-watch", "unison-once") if save.series[key].times]
        faster = min(theirs) / save.series["cobox"].median if theirs else None
        verdicts.append((f"a save is visible at least {LEAST_TIMES_UNISON} × sooner than with unison, in the median",
                     f"{faster:.1f} ×" if faster else "not measured", faster is not None and faster >= LEAST_TIMES_UNISON))
        return verdicts


def document(bench, promises, storage, cobox):
    save = bench.groups["save"].series["cobox"]
    lines = ["# Sync, compared with rsync and unison", "", "Written by `make bench-sync`.", "", "| promise | measured | |", "|---|---|---|"]
    lines += [f"| {words} | {value} | {'kept' if kept else '**missed**'} |" for words, value, kept in promises]
    lines += ["", f"From a save until it is visible in the sandbox: {number(save.median)} ms in the median, {number(save.p99)} ms at the 99th "
              f"percentile; the aim is {AIM_MS} ms.", "", "![](sync.svg)", ""]
    for group in bench.groups.values():
        lines += [f"## {group.title}", "", group.table(), ""]
    lines += ["## Memory", "", "The peak memory of each side during the first copy, in MiB: local / remote.", "",
              "| tree | " + " | ".join(WAYS.values()) + " |", "|---|" + "--:|" * len(WAYS)]
    for key, title, *_ in TREES:
        peaks = bench.memory.get(key, {})
        most = {way: [max(side) for side in zip(*peaks[way])] for way in peaks}
        cells = [" / ".join(f"{kib / 1024:.0f}" for kib in most[way]) if way in most else "–" for way in WAYS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += ["", "## Method",
              "- First copy: from the start of the program to its end, into an empty folder. rsync and unison go over ssh on loopback, on a "
              "connection that is already open; cobox over its gateway, with the sandbox running. `rsync -a` leaves it to the system when files "
              "are written to disk; `--fsync` makes each durable before it ends, and so does cobox.",
              "- Nothing changed: the same command again. unison and cobox scan both sides, rsync compares names, sizes and times.",
              f"- One save: a file of 4 KiB is written in place; {SAVES} times with cobox, {THEIR_SAVES} with unison, with random pauses. It is "
              "visible when a reader on the other side gets the new content.",
              f"- {bench.ways['unison'].watch_words()}",
              "- Memory: for rsync and unison the largest process of each side; for cobox the local command and the remote boxd.",
              f"- The files of the others are {storage}.", "", "## Where",
              f"{machine()}. {cobox}, {', '.join(filter(None, (syncer.version for syncer in bench.ways.values())))}. "
              f"{datetime.date.today():%Y-%m-%d}."]
    return "\n".join(lines) + "\n"


def main():
    is_quick = "--quick" in sys.argv[1:] or os.environ.get("BENCH_QUICK") == "1"
    program = os.environ.get("COBOX_BIN") or shutil.which("cobox")
    if not program or not os.access(program, os.X_OK):
        sys.exit("bench: no cobox program; build one with `make bench-sync`, or set COBOX_BIN to its path")
    if os.geteuid() != 0:
        sys.exit("bench: reading files in a sandbox from outside needs root; run it as root")
    program = os.path.abspath(program)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="cobox-bench-"))
    try:
        with contextlib.ExitStack() as started:
            broker = started.enter_context(Broker(program, directory / "broker", "[rate_limits]\nrequests_per_second = 0\n"))
            storage = started.enter_context(Storage(directory / "files", broker))
            ssh = started.enter_context(OpenSsh(directory / "ssh"))
            ways = {"rsync": Rsync(storage.directory / "rsync", ssh), "durable": Rsync(storage.directory / "durable", ssh, "--fsync"),
                    "unison": Unison(storage.directory / "unison", ssh, directory / "unison"), "cobox": Cobox(program, broker, directory / "cobox")}
            bench = Bench(directory, ways, is_quick)
            for key, title, make, size, little, rounds in TREES:
                source = bench.one_tree(key, title, make, little if is_quick else size, 1 if is_quick else rounds)
                if key != TREES[-1][0]:
                    shutil.rmtree(source)
            bench.saves(source)
    except RuntimeError as problem:
        sys.exit(f"bench: {problem}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    promises = bench.promises()
    text = document(bench, promises, storage.words, version)
    where = TRIAL_RESULTS if is_quick else RESULTS
    where.mkdir(parents=True, exist_ok=True)
    (where / "sync.md").write_text(text)
    (where / "sync.svg").write_text(panels(list(bench.groups.values()), "Sync", machine()))
    print(text, end="")
    if not is_quick and not all(kept for *_, kept in promises):
        sys.exit("bench: a promise is missed")


if __name__ == "__main__":
    main()
