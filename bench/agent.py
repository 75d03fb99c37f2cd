#!/usr/bin/env python3
"""Benchmarks an agent's file tools: our deepagents backend against deepagents' own scripts, on the same sandbox.

`make bench-agent` runs it with the Python that has deepagents and the cobox package; COBOX_BIN names the program to measure. Both
are measured alternately in one run, in an order that changes every round. Writes results/agent.md and results/agent.svg, and
exits with 1 if a promise is missed.
"""

import datetime
import importlib.metadata
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sdk/python/tests/agents"))
from broker import Broker  # noqa: E402
from panel_plot import Group, panels  # noqa: E402
from report import Series, machine  # noqa: E402
from scripted_sandbox import ScriptedSandbox  # noqa: E402

from cobox import Cobox  # noqa: E402
from cobox.deepagents import CoboxBackend  # noqa: E402

ROUNDS = 60
WARM_UP_ROUNDS = 5
LEAST_TIMES_FASTER = 3  # promised: median over all operations
FILES, LINES = 400, 120  # of the sample project: about 2 MiB of text
RESULTS = HERE / "results"
ROOT = "/workspace/project"
WAYS = {"scripts": "deepagents' scripts", "cobox": "cobox backend"}


def project():
    """A typical source tree: modules in packages, with one word that only a few contain."""
    rng = random.Random(7)
    for number in range(FILES):
        lines = [f"def function_{number}_{n}(value):  # {rng.randrange(10**9)}" for n in range(LINES)]
        if number % 40 == 0:
            lines[LINES // 2] = "    return needle_in_the_haystack(value)"
        yield f"{ROOT}/package_{number % 20:02d}/module_{number:03d}.py", "\n".join(lines).encode() + b"\n"


def checked(result):
    if getattr(result, "error", None):
        raise RuntimeError(result.error)
    return result


class Bench:
    def __init__(self, box):
        ours = CoboxBackend(box)
        self.ways = {"scripts": ScriptedSandbox(ours), "cobox": ours}
        ours.upload_files(list(project()))
        self.order, self.number = random.Random(1), 0
        module = f"{ROOT}/package_07/module_127.py"
        text = "\n".join(f"line {n} of a new file" for n in range(200))
        self.works = {
            "read": ("read: 100 lines of a module", lambda backend: checked(backend.read(module, offset=10, limit=100))),
            "write": ("write: a new file of 5 KiB", lambda backend: checked(backend.write(f"/workspace/new-{self.next()}.txt", text))),
            "edit": ("edit: one line of a module", self.edit),
            "grep": (f"grep: a word in {FILES} files", self.grep),
            "glob": (f"glob: one module of {FILES} files", self.glob),
            "execute": ("execute: `true`", lambda backend: backend.execute("true")),
        }
        self.groups = {}
        for key, (title, _) in self.works.items():
            self.groups[key] = Group(title, "scripts")
            self.groups[key].series = {way: Series(way, label, is_ours=way == "cobox") for way, label in WAYS.items()}

    def next(self):
        self.number += 1
        return self.number

    def edit(self, backend):
        number = self.next()
        checked(backend.edit(f"{ROOT}/package_03/module_103.py", self.line, f"line {number}"))
        self.line = f"line {number}"

    line = "def function_103_50(value):"

    @staticmethod
    def grep(backend):
        found = checked(backend.grep("needle_in_the_haystack", path=ROOT)).matches
        if len(found) != FILES // 40:
            raise RuntimeError(f"grep found {len(found)}")

    @staticmethod
    def glob(backend):
        found = checked(backend.glob("**/module_12?.py", path=ROOT)).matches
        if len(found) != 10:
            raise RuntimeError(f"glob found {len(found)}")

    def run(self):
        for number in range(-WARM_UP_ROUNDS, ROUNDS):
            turn = [(key, way) for key in self.works for way in WAYS]
            self.order.shuffle(turn)
            for key, way in turn:
                began = time.perf_counter_ns()
                self.works[key][1](self.ways[way])
                if number >= 0:
                    self.groups[key].series[way].times.append((time.perf_counter_ns() - began) / 1e6)


def document(groups, faster, cobox):
    kept = faster >= LEAST_TIMES_FASTER
    lines = ["# An agent's tools, next to deepagents' own scripts", "", "Written by `make bench-agent`.", "", "| promise | measured | |",
             "|---|---|---|", f"| the backend is at least {LEAST_TIMES_FASTER} × faster than the scripts, in the median over all operations "
             f"| {faster:.1f} × | {'kept' if kept else '**missed**'} |", "", "| operation | scripts, ms | cobox, ms | times faster |",
             "|---|--:|--:|--:|"]
    for key, group in groups.items():
        theirs, ours = group.series["scripts"].median, group.series["cobox"].median
        lines.append(f"| {key} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.1f} |")
    lines += ["", "![](agent.svg)", ""]
    for group in groups.values():
        lines += [f"## {group.title}", "", group.table(), ""]
    lines += ["## Method",
              "- Both: the blocking methods of a deepagents backend on the same session and sandbox, through the gateway, until the result is "
              "available. A file written by `write` is on disk by then, in both; one written by `edit` only in ours.",
              "- scripts: deepagents' `BaseSandbox`, which runs a Python program or grep in the sandbox for each operation and uploads the "
              "written data. Its commands take the same path as ours.",
              "- cobox: `cobox.deepagents.CoboxBackend`, one request to the daemon in the sandbox.",
              "- execute is the same request in both: every provider implements it.",
              f"- {ROUNDS} rounds after {WARM_UP_ROUNDS} warm-up rounds, each with all of these once, in a changing order.",
              "", "## Where", f"{machine()}. {cobox}, deepagents {importlib.metadata.version('deepagents')}, Python "
              f"{sys.version.split()[0]}. {datetime.date.today():%Y-%m-%d}."]
    return "\n".join(lines) + "\n", kept


def main():
    cobox = os.environ.get("COBOX_BIN") or shutil.which("cobox")
    if not cobox or not os.access(cobox, os.X_OK):
        sys.exit("bench: no cobox program; build one with `make bench-agent`, or set COBOX_BIN to its path")
    cobox = os.path.abspath(cobox)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="cobox-bench-"))
    try:
        settings = "[rate_limits]\nrequests_per_second = 0\n"
        with Broker(cobox, directory, settings) as broker, Cobox(data_dir=broker.data_dir) as client:
            with client.session("bench", release=True) as box:
                bench = Bench(box)
                bench.run()
    except RuntimeError as problem:
        sys.exit(f"bench: {problem}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    ratios = [1 / group.ratio("cobox") for group in bench.groups.values()]
    name = subprocess.run([cobox, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    text, kept = document(bench.groups, statistics.median(ratios), name)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "agent.md").write_text(text)
    (RESULTS / "agent.svg").write_text(panels(list(bench.groups.values()), "An agent's tools", machine()))
    print(text, end="")
    if not kept:
        sys.exit("bench: a promise is missed")


if __name__ == "__main__":
    main()
