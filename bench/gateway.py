#!/usr/bin/env python3
"""Benchmarks the gateway: the same requests directly at boxd's socket, through the gateway, and through nginx in front of that
socket.

`make bench-gateway` runs it; COBOX_BIN names the program to measure and COBOX_BENCH_BIN the load generator. All contenders are
measured alternately, in rounds with a changing order. Writes results/gateway.md and results/gateway.svg, and exits with 1 if a
promise is missed. BENCH_QUICK=1 runs small versions, writes below target/ and checks no promises. Standard library only.
"""

import contextlib
import datetime
import os
import pathlib
import shutil
import signal
import sys
import tempfile

sys.dont_write_bytecode = True
from broker import Broker  # noqa: E402
from dataplane import RESULTS, TRIAL_RESULTS, Bench, executable, progress  # noqa: E402
from panel_plot import Group, panels  # noqa: E402
from peers import NginxProxy, first_line  # noqa: E402
from report import machine  # noqa: E402
from workloads import DIRECT, GATEWAY, GIB, MIB, WorkloadResult, available  # noqa: E402

SMALL_BYTES, CROWD = 4096, 64
LEAST_SHARE = 0.5  # of the direct speed
TITLE = "The gateway, compared with no gateway and with nginx"


class Ways:
    """The three routes to the same boxd; the paths of a spec differ only in their base."""

    def __init__(self, bench, nginx):
        self.bench, self.nginx = bench, nginx

    def contenders(self, make):
        endpoints = self.bench.endpoints()
        direct = endpoints["direct"]
        for way, label in (("direct", DIRECT), ("gateway", GATEWAY)):
            endpoint = endpoints[way]
            yield way, label, True, {"at": endpoint["at"], "token": endpoint["token"], **make(way, endpoint["base"])}
        yield "nginx", "nginx as a proxy", False, available(
            self.nginx, lambda: {"at": self.nginx.address, "token": direct["token"], **make("nginx", direct["base"])})

    def measure(self, group, make, **plan):
        return self.bench.measure(group, list(self.contenders(make)), **plan)


def file(kind, name, **more):
    return lambda way, base: {"kind": kind, "path": f"{base}/files/workspace/{name}", **more}


def measure(bench, ways):
    quick = bench.is_quick
    size = 64 * MIB if quick else GIB
    of_big = {"rounds": 2 if quick else 9, "each": 1, "warm_up": 1}
    of_small = {"rounds": 5 if quick else 30, "each": 20 if quick else 100, "warm_up": 20}
    big = {"bytes": size, "names": 1}
    groups = {
        "upload": ways.measure(
            Group(f"PUT of {size // MIB} MiB, without waiting for the disk", "direct", unit_bytes=size, is_share=True),
            file("put", "big-", suffix="?sync=false", **big), settle=True, **of_big),
        "download": ways.measure(Group(f"GET of {size // MIB} MiB", "direct", unit_bytes=size, is_share=True), file("get", "big-", **big), **of_big),
    }
    # Written by the first contender, read by all.
    put_small = Group("", "direct")
    ways.measure(put_small, file("put", "small-", suffix="?sync=false", bytes=SMALL_BYTES, names=1), rounds=1, each=1, warm_up=0)
    groups["small requests on 1 connection"] = ways.measure(
        Group("GET of 4 KiB, one after another on 1 connection", "direct", unit_requests=1, is_share=True),
        file("get", "small-", bytes=SMALL_BYTES, names=1), **of_small)
    groups[f"small requests on {CROWD} connections"] = ways.measure(
        Group(f"GET of 4 KiB, {CROWD} at once on {CROWD} connections", "direct", unit_requests=CROWD, is_share=True,
              words=["The time until the last of them is answered; then all send again."]),
        file("crowd", "small-0", bytes=SMALL_BYTES, connections=CROWD), **of_small)

    def echo(way, base):
        return {"kind": "echo_shell", "path": f"{base}/shell/ws",
                "start": {"type": "start", "shell": f"echo-{way}", "command": "cat", "binary": True}}

    socket = ways.measure(Group("a key until its echo, over a WebSocket", "direct"), echo, **of_small)
    done = WorkloadResult([*groups.values(), socket])
    for what, group in groups.items():
        done.share(f"{what}: the gateway has at least {LEAST_SHARE} of direct", group.ratio("gateway"), LEAST_SHARE)
    against = [f"| {what} | {share(group, 'gateway', 'direct')} | {share(group, 'nginx', 'direct')} | {share(group, 'gateway', 'nginx')} |"
               for what, group in [*groups.items(), ("echo over a WebSocket", socket)]]
    return done, against


def share(group, of, to):
    ratio = group.ratio(of, to)
    return "–" if ratio is None else f"{1 / ratio:.2f}"


def document(done, against, versions, busy, is_whole):
    words = {True: "kept", False: "**missed**", None: "not measured"}
    lines = [f"# {TITLE}", "", "Written by `make bench-gateway`."
             + ("" if is_whole else " **A quick run: do not quote these numbers.**"), "",
             "| promise | measured | |", "|---|---|---|"]
    lines += [f"| {promise} | {measured} | {words[is_kept]} |" for promise, measured, is_kept in done.verdicts()]
    lines += ["", "| speed, as a share | gateway of direct | nginx of direct | gateway of nginx |", "|---|--:|--:|--:|", *against,
              "", "![](gateway.svg)"]
    for group in done.groups:
        lines += ["", f"## {group.title}", "", group.table(), *([""] if group.words else []), *(f"- {w}" for w in group.words)]
    who = "root" if os.geteuid() == 0 else "an ordinary user"
    lines += ["", "## How",
              "- direct: straight to boxd's UNIX socket. gateway: over TCP on loopback through the broker. nginx: over TCP on loopback, "
              "proxied to the same UNIX socket, streaming, with kept connections.",
              "- boxd checks the token on every request on all three routes. The gateway checks it too, checks whether sandbox and session may "
              "be used, counts, and records each use; nginx does none of that.",
              "- All contenders are measured alternately, in rounds with a changing order; ratios are of medians. p99 by nearest rank.",
              "- The load generator (`bench/load`) is one blocking client with hand-written HTTP and WebSocket framing, on the same cores.",
              "", "## Where", f"{machine()}. As {who}. {', '.join(versions)}. "
              f"Load average before: {busy:.1f}. {datetime.date.today():%Y-%m-%d}."]
    return "\n".join(lines) + "\n"


def main():
    cobox, load = executable("COBOX_BIN", "cobox"), executable("COBOX_BENCH_BIN", "cobox-bench")
    is_quick = bool(os.environ.get("BENCH_QUICK"))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    directory = pathlib.Path(tempfile.mkdtemp(prefix="cobox-bench-"))
    busy = os.getloadavg()[0]  # on a busy machine, times are not representative
    try:
        with contextlib.ExitStack() as started:
            bench = Bench(started.enter_context(Broker(cobox, directory / "broker")), load, is_quick)
            socket = bench.endpoints()["direct"]["at"].removeprefix("unix:")
            nginx = started.enter_context(NginxProxy(directory / "nginx", socket))
            done, against = measure(bench, Ways(bench, nginx))
            progress("")
            versions = [first_line([cobox, "--version"]), f"nginx {nginx.version}" if nginx.version else f"nginx: not available ({nginx.why_not})"]
    except RuntimeError as problem:
        sys.exit(f"bench: {problem}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    text = document(done, against, versions, busy, not is_quick)
    results = TRIAL_RESULTS if is_quick else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    (results / "gateway.md").write_text(text)
    (results / "gateway.svg").write_text(panels([g for g in done.groups if g.measured()], TITLE, machine()))
    print(text, end="")
    if not is_quick and any(is_kept is False for _, _, is_kept in done.verdicts()):
        sys.exit("bench: a promise is missed")


if __name__ == "__main__":
    main()
