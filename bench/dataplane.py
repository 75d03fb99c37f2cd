#!/usr/bin/env python3
"""Benchmarks a sandbox's dataplane against the tools people would use instead, on the same machine in the same run.

`make bench-dataplane` runs it; COBOX_BIN names the program to measure and COBOX_BENCH_BIN the load generator. Cobox is measured
twice: directly at boxd's socket, and through the gateway as users reach it. All contenders are measured alternately, in rounds
with a changing order. Writes results/dataplane.md and results/dataplane.svg, and exits with 1 if a promise is missed.
BENCH_QUICK=1 runs small versions and BENCH_ONLY=exec,files only some workloads; both write below target/ and check no promises.
Standard library only.
"""

import contextlib
import datetime
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import workloads  # noqa: E402
from broker import Broker  # noqa: E402
from panel_plot import panels  # noqa: E402
from peers import ROOT, Nginx, NginxProxy, OpenSsh, SandboxAgent, Sshx, first_line  # noqa: E402
from report import machine  # noqa: E402
from storage import Storage  # noqa: E402

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
TRIAL_RESULTS = ROOT / "target" / "bench"
# Where the broker's sandboxes listen; the first that exists, the same order as in the provider.
RUNTIME_DIRS = ["/run/cobox", f"/tmp/cobox-{os.geteuid()}"]


class Bench:
    """What every workload needs: the two endpoints of a sandbox, the peers, and the load generator."""

    def __init__(self, broker, load, is_quick):
        self.broker, self.load, self.is_quick = broker, load, is_quick
        self.sandbox = broker.ensure("bench")
        self.sandbox.run_true()

    def endpoints(self, thread="bench"):
        """Both endpoints with a fresh token, as `{at, token, base}`."""
        self.broker.reconnect()
        session = self.broker.ensure(thread)
        socket = next((s for d in RUNTIME_DIRS for s in pathlib.Path(d).glob(f"*/{session.sandbox}.c")), None)
        if not socket:
            raise RuntimeError(f"the socket of {session.sandbox} is in none of {', '.join(RUNTIME_DIRS)}")
        connection = self.broker.connection
        return {"direct": {"at": f"unix:{socket}", "token": session.token, "base": "/v1"},
                "gateway": {"at": f"tcp:{connection.host}:{connection.port}", "token": session.token, "base": session.base}}

    def measure(self, group, contenders, **plan):
        """Runs a plan and stores the measured times; a contender is `(key, label, is_ours, spec or reason why it is
        unavailable)`."""
        from report import Series
        specs = []
        for key, label, is_ours, spec in contenders:
            group.series[key] = Series(key, label, is_ours)
            if isinstance(spec, str):
                group.why_not[key] = spec
            else:
                specs.append({"name": key, **spec})
        progress(group.title)
        done = subprocess.run([self.load, "measure"], input=json.dumps({**plan, "contenders": specs}), capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the load generator failed in {group.title}: {done.stderr.strip()}")
        measured = json.loads(done.stdout)
        for key, times in measured["times"].items():
            group.series[key].times = times
        group.why_not |= {key: " ".join(why.split()).replace("|", "/") for key, why in measured["failed"].items()}
        return group


def document(groups, memory, found, versions, storage, busy, is_whole):
    words = {True: "kept", False: "**missed**", None: "not measured"}
    lines = ["# The dataplane, compared with other tools", "", "Written by `make bench-dataplane`."
             + ("" if is_whole else " **A partial or quick run: do not quote these numbers.**"), "",
             "| promise | measured | |", "|---|---|---|"]
    lines += [f"| {promise} | {measured} | {words[is_kept]} |" for promise, measured, is_kept in found]
    lines += ["", "![](dataplane.svg)"]
    for group in groups:
        lines += ["", f"## {group.title}", "", group.table(), *([""] if group.words else []), *(f"- {w}" for w in group.words)]
    if memory:
        lines += ["", "## Memory", "", *memory]
    who = "root" if os.geteuid() == 0 else "an ordinary user"
    lines += ["", "## How",
              "- direct: straight to boxd's UNIX socket. gateway: over TCP on loopback through the broker, as users reach it. Both with a "
              "token from a negotiation, which is checked on every request.",
              "- All contenders are measured alternately, in rounds with a changing order; ratios are of medians. p99 by nearest rank: with few "
              "measurements it is the slowest one.",
              "- The load generator (`bench/load`) is one blocking client with hand-written HTTP and WebSocket framing.",
              f"- Files of nginx and sandbox-agent are {storage}.",
              "", "## Where", f"{machine()}. As {who}. {', '.join(versions)}. "
              f"Load average before: {busy:.1f}. {datetime.date.today():%Y-%m-%d}."]
    return "\n".join(lines) + "\n"


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def executable(variable, default):
    path = os.environ.get(variable) or shutil.which(default)
    if not path or not os.access(path, os.X_OK):
        sys.exit(f"bench: no {default} program; build one with `make bench-dataplane`, or set {variable} to its path")
    return os.path.abspath(path)


def main():
    cobox, load = executable("COBOX_BIN", "cobox"), executable("COBOX_BENCH_BIN", "cobox-bench")
    is_quick = bool(os.environ.get("BENCH_QUICK"))
    only = [w for w in os.environ.get("BENCH_ONLY", "").split(",") if w]
    if unknown := [w for w in only if w not in workloads.ALL]:
        sys.exit(f"bench: BENCH_ONLY contains {', '.join(unknown)}; available are {', '.join(workloads.ALL)}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    directory = pathlib.Path(tempfile.mkdtemp(prefix="cobox-bench-"))
    groups, memory, found = [], [], []
    busy = os.getloadavg()[0]  # on a busy machine, times are not representative
    try:
        with contextlib.ExitStack() as started:
            broker = started.enter_context(Broker(cobox, directory / "broker"))
            bench = Bench(broker, load, is_quick)
            storage = started.enter_context(Storage(directory / "files", broker))
            bench.ssh = started.enter_context(OpenSsh(directory / "ssh"))
            bench.agent = started.enter_context(SandboxAgent(directory / "sandbox-agent"))
            bench.sshx = started.enter_context(Sshx(directory / "sshx"))
            bench.nginx = started.enter_context(Nginx(directory / "nginx", storage.directory / "nginx"))
            bench.hop = started.enter_context(NginxProxy(directory / "hop", bench.nginx.socket))
            bench.durable = started.enter_context(Nginx(directory / "durable", storage.directory / "durable", is_durable=True))
            bench.storage = storage.directory
            for name, work in workloads.ALL.items():
                if not only or name in only:
                    made = work(bench)
                    groups += made.groups
                    memory += made.memory
                    found += made.verdicts()
            progress("")
            versions = [first_line([cobox, "--version"])] + [
                f"{name} {peer.version}" if peer.version else f"{name}: not available ({peer.why_not})" for name, peer in
                [("OpenSSH", bench.ssh), ("nginx", bench.nginx), ("sandbox-agent", bench.agent), ("sshx", bench.sshx)]]
            versions.append(workloads.ripgrep_version())
    except RuntimeError as problem:
        sys.exit(f"bench: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    is_whole = not (is_quick or only)
    text = document(groups, memory, found, versions, storage.words, busy, is_whole)
    results = RESULTS if is_whole else TRIAL_RESULTS
    results.mkdir(parents=True, exist_ok=True)
    (results / "dataplane.md").write_text(text)
    drawn = [g for g in groups if g.measured()]
    (results / "dataplane.svg").write_text(panels(drawn, "The dataplane, compared with other tools", machine()))
    print(text, end="")
    if is_whole and any(is_kept is False for _, _, is_kept in found):
        sys.exit("bench: a promise is missed")


if __name__ == "__main__":
    main()
