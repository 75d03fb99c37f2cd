#!/usr/bin/env python3
"""What a sync costs, next to rsync over ssh and unison, on the same trees in the same run.

`make bench-sync` runs it; COBOX_BIN names the program to measure. Everybody is measured in turns, in rounds whose order changes. Writes
results/sync.md and results/sync.svg, and ends with 1 where a promise is missed. With --quick, or BENCH_QUICK=1, the trees are small; that
writes below target/ and promises nothing. Standard library only. Needs root: what arrives in a sandbox is seen through its boxd's /proc.
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
LEAST_SHARE_OF_RSYNC = 0.9  # promised: of its speed on the first copy, both making every file durable
LEAST_TIMES_UNISON = 5  # promised: faster until one change is seen
AIM_MS = 100  # from a save to its being seen
SAVES, THEIR_SAVES = 50, 8
# Key, title, how it is made, how large it is, and how small with --quick; rounds.
TREES = [
    ("small", "10,000 files of 4 KiB", trees.small, 10_000, 300, 5),
    ("large", "one file of 1 GiB", trees.large, 1 << 30, 8 << 20, 3),
    ("kernel", "60,000 files like a kernel's sources", trees.kernel, 60_000, 1_000, 3),
]
WAYS = {"rsync": "rsync -a", "durable": "rsync -a --fsync", "unison": "unison", "cobox": "cobox sync"}


class Bench:
    def __init__(self, place, ways, is_quick):
        self.place, self.ways, self.is_quick = place, ways, is_quick
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
        """The first copy, then the same again with nothing changed, into a fresh folder each round."""
        source = self.place / key
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
                # What others wrote is not written at this one's cost.
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
        """One file is saved again and again in the largest tree, until the other side has it."""
        there = {"cobox": "cobox sync, from here", "cobox-back": "cobox sync, from the sandbox"}
        repeat, once = self.ways["unison"].watching(), "unison, one run for that file, started with the save"
        names = {"unison-watch": repeat, "unison-once": once, **there}
        group = self.group("save", "One save until it is seen on the other side, in that tree", "unison-watch", names)
        for key, label in names.items():
            group.series[key].label = label
        dice = random.Random(3)
        few = 2 if self.is_quick else THEIR_SAVES
        if self.ways["unison"].why_not:
            group.why_not |= {key: self.ways["unison"].why_not for key in ("unison-watch", "unison-once")}
        else:
            self.ways["unison"].copy(source, "live")
            group.series["unison-once"].times += self.ways["unison"].saves_by_hand(source, "live", few)
            group.series["unison-watch"].times += self.ways["unison"].saves(source, "live", few, dice)
            self.ways["unison"].forget("live")
        cobox = self.ways["cobox"]
        with cobox.live(source, "live") as live:
            count = 5 if self.is_quick else SAVES
            group.series["cobox"].times += live.saves(source, cobox.seen("live"), count, dice)
            group.series["cobox-back"].times += live.saves(cobox.seen("live"), source, count, dice)
        cobox.forget("live")

    def promises(self):
        told = []
        for key, title, *_ in TREES:
            ratio = self.groups[f"{key}-first"].ratio("cobox")
            share = 1 / ratio if ratio else None
            words = f"at least {LEAST_SHARE_OF_RSYNC} of the speed of `rsync -a --fsync` on the first copy: {title}"
            told.append((words, f"{share:.2f}" if share else "not measured", share is not None and share >= LEAST_SHARE_OF_RSYNC))
        save = self.groups["save"]
        theirs = [save.series[key].median for key in ("unison-watch", "unison-once") if save.series[key].times]
        faster = min(theirs) / save.series["cobox"].median if theirs else None
        told.append((f"a save is seen at least {LEAST_TIMES_UNISON} × sooner than with unison, in the median",
                     f"{faster:.1f} ×" if faster else "not measured", faster is not None and faster >= LEAST_TIMES_UNISON))
        return told


def document(bench, promises, storage, cobox):
    save = bench.groups["save"].series["cobox"]
    lines = ["# Sync, next to rsync and unison", "", "Written by `make bench-sync`.", "", "| promise | measured | |", "|---|---|---|"]
    lines += [f"| {words} | {value} | {'kept' if kept else '**missed**'} |" for words, value, kept in promises]
    lines += ["", f"From a save to its being seen in the sandbox: {number(save.median)} ms in the median, {number(save.p99)} ms at the 99th "
              f"percentile; the aim is {AIM_MS} ms.", "", "![](sync.svg)", ""]
    for group in bench.groups.values():
        lines += [f"## {group.title}", "", group.table(), ""]
    lines += ["## Memory", "", "The most each side had at once during the first copy, in MiB: here / there.", "",
              "| tree | " + " | ".join(WAYS.values()) + " |", "|---|" + "--:|" * len(WAYS)]
    for key, title, *_ in TREES:
        peaks = bench.memory.get(key, {})
        most = {way: [max(side) for side in zip(*peaks[way])] for way in peaks}
        cells = [" / ".join(f"{kib / 1024:.0f}" for kib in most[way]) if way in most else "–" for way in WAYS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += ["", "## What is measured",
              "- First copy: from the start of the program to its end, into an empty folder. rsync and unison go over ssh on loopback, on a "
              "connection that is open already; cobox over its gateway, the sandbox running. `rsync -a` leaves it to the system when files "
              "get to the disk; `--fsync` makes each durable before it ends, and so does cobox.",
              "- Nothing changed: the same command again. unison and cobox look at both sides, rsync at names, sizes and times.",
              f"- One save: a file of 4 KiB is written in place; {SAVES} times with cobox, {THEIR_SAVES} with unison, in random pauses. It is "
              "seen when a reader on the other side has the new content.",
              f"- {bench.ways['unison'].watch_words()}",
              "- Memory: of rsync and unison the largest process of each side; of cobox the command here and boxd there.",
              f"- The others' files are {storage}.", "", "## Where",
              f"{machine()}. {cobox}, {', '.join(filter(None, (syncer.version for syncer in bench.ways.values())))}. "
              f"{datetime.date.today():%Y-%m-%d}."]
    return "\n".join(lines) + "\n"


def main():
    is_quick = "--quick" in sys.argv[1:] or os.environ.get("BENCH_QUICK") == "1"
    program = os.environ.get("COBOX_BIN") or shutil.which("cobox")
    if not program or not os.access(program, os.X_OK):
        sys.exit("bench: there is no cobox program; `make bench-sync` builds one, or name yours with COBOX_BIN")
    if os.geteuid() != 0:
        sys.exit("bench: what arrives in a sandbox can be seen by root only; run it as root")
    program = os.path.abspath(program)
    place = pathlib.Path(tempfile.mkdtemp(prefix="cobox-bench-"))
    try:
        with contextlib.ExitStack() as started:
            broker = started.enter_context(Broker(program, place / "broker", "[rate_limits]\nrequests_per_second = 0\n"))
            storage = started.enter_context(Storage(place / "files", broker))
            ssh = started.enter_context(OpenSsh(place / "ssh"))
            ways = {"rsync": Rsync(storage.place / "rsync", ssh), "durable": Rsync(storage.place / "durable", ssh, "--fsync"),
                    "unison": Unison(storage.place / "unison", ssh, place / "unison"), "cobox": Cobox(program, broker, place / "cobox")}
            bench = Bench(place, ways, is_quick)
            for key, title, make, size, little, rounds in TREES:
                source = bench.one_tree(key, title, make, little if is_quick else size, 1 if is_quick else rounds)
                if key != TREES[-1][0]:
                    shutil.rmtree(source)
            bench.saves(source)
    except RuntimeError as problem:
        sys.exit(f"bench: {problem}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
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
