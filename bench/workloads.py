"""The workloads of the dataplane benchmark: contenders, number of measurements, and promises."""

import contextlib
import io
import json
import pathlib
import random
import socket
import statistics
import subprocess
import tarfile

from panel_plot import Group
from peers import first_line, program
from report import number

MIB, GIB = 2**20, 2**30
DIRECT, GATEWAY = "cobox, direct", "cobox, gateway"


class WorkloadResult:
    """The measured groups of a workload, lines about memory, and its promises."""

    def __init__(self, groups=(), memory=()):
        self.groups, self.memory, self.promises = list(groups), list(memory), []

    def promise(self, words, ratio, is_kept, form="{:.2f} ×"):
        self.promises.append((words, "–" if ratio is None else form.format(ratio), None if ratio is None else is_kept(ratio)))

    def at_most(self, words, ratio, limit):
        self.promise(words, ratio, lambda r: r <= limit)

    def ahead(self, words, ratio):
        self.promise(words, ratio, lambda r: r < 1, "{:.2f} × its time")

    def share(self, words, ratio, least):
        self.promise(words, None if ratio is None else 1 / ratio, lambda share: share >= least, "{:.2f}")

    def verdicts(self):
        return self.promises


def available(peer, spec):
    """A contender's spec, or the reason why it is unavailable."""
    return peer.why_not if peer.why_not else spec()


def ours(bench, make, only=("direct", "gateway")):
    """The two contenders of Cobox; `make` receives the endpoint's base path."""
    endpoints = bench.endpoints()
    labels = {"direct": DIRECT, "gateway": GATEWAY}
    for way in only:
        endpoint = endpoints[way]
        yield way, labels[way], True, {"at": endpoint["at"], "token": endpoint["token"], **make(endpoint["base"])}


def exec_true(bench):
    def run(base):
        return {"kind": "post", "path": f"{base}/exec", "body": {"argv": ["true"]}, "expect": '"exit_code":0'}

    group = Group("exec of `true`, one after another on a kept-alive connection", "floor", words=[
        "fork + exec + wait: `posix_spawn` of `true` with /dev/null for its standard I/O, by the load generator itself.",
        "ssh: a client process for each command on one shared connection (`ControlMaster`), which is how it is used; its server runs "
        "the command in a login shell with an empty profile.", "sandbox-agent: `POST /v1/processes/run`, without a token."])
    bench.measure(group, [
        ("floor", "fork + exec + wait", False, {"kind": "spawn", "argv": ["true"]}),
        ("piped", "the same with its output read", False, {"kind": "spawn_and_read", "argv": ["true"]}),
        *ours(bench, run),
        ("agent", "sandbox-agent", False, available(bench.agent, lambda: {
            "kind": "post", "at": bench.agent.address, "path": "/v1/processes/run", "body": {"command": "true", "args": []},
            "expect": '"exitCode":0'})),
        ("ssh", "ssh, shared connection", False, available(bench.ssh, lambda: {"kind": "spawn", "argv": bench.ssh.command("true")})),
    ], **({"rounds": 5, "each": 10, "warm_up": 5} if bench.is_quick else {"rounds": 50, "each": 20, "warm_up": 50}))
    done = WorkloadResult([group])
    done.at_most("exec of `true`, direct, takes at most 1.8 × fork + exec + wait", group.ratio("direct"), 1.8)
    done.ahead("exec of `true` through the gateway is ahead of sandbox-agent", group.ratio("gateway", "agent"))
    done.ahead("exec of `true` through the gateway is ahead of ssh", group.ratio("gateway", "ssh"))
    return done


def stream(bench):
    size = 64 * MIB if bench.is_quick else GIB
    argv = ["dd", "if=/dev/zero", "bs=128k", f"count={size // (128 * 1024)}", "status=none"]

    def run(base):
        start = {"type": "start", "argv": argv, "binary": True}
        return {"kind": "exec_stream", "path": f"{base}/exec/ws", "start": start, "bytes": size}

    group = Group(f"output of a command, {size // MIB} MiB", "pipe", unit_bytes=size, is_share=True,
                  words=[f"`{' '.join(argv)}`, from its start until its last byte and its exit are received; ours in binary frames, acknowledged "
                         "every 4 MiB.", "ssh: on the shared connection, with its default cipher.",
                         "The plain pipe has the kernel's 64 KiB; boxd gives a command that prints a lot a pipe of 1 MiB. "
                         "The two aren't equivalent: a share above 1 doesn't mean faster than a pipe of the same size."])
    bench.measure(group, [
        ("pipe", "a plain pipe", False, {"kind": "command_stream", "argv": argv, "bytes": size}), *ours(bench, run),
        ("ssh", "ssh, shared connection", False, available(
            bench.ssh, lambda: {"kind": "command_stream", "argv": bench.ssh.command(*argv), "bytes": size})),
    ], rounds=2 if bench.is_quick else 7, each=1, warm_up=1)
    done = WorkloadResult([group])
    done.share("streamed output, direct, is at least 0.4 of a plain pipe", group.ratio("direct"), 0.4)
    done.ahead("streamed output through the gateway is ahead of ssh", group.ratio("gateway", "ssh"))
    return done


def echo(bench):
    def run(way):
        return lambda base: {"kind": "echo_shell", "path": f"{base}/shell/ws",
                             "start": {"type": "start", "shell": f"echo-{way}", "command": "cat", "binary": True}}

    group = Group("a key until its echo, one client", "ssh", words=[
        "The program is `cat` for all contenders, so the kernel's terminal echoes and no shell's line editor is measured.",
        "ssh: `ssh -tt` on its own connection. sshx: its server and client on this machine, observed by a client of its protocol.",
        "raw pty: no server at all, the floor."])
    bench.measure(group, [
        ("pty", "raw pty", False, {"kind": "echo_pty", "argv": ["cat"]}),
        *ours(bench, run("direct"), ["direct"]), *ours(bench, run("gateway"), ["gateway"]),
        ("ssh", "ssh -tt", False, available(bench.ssh, lambda: {"kind": "echo_command", "argv": bench.ssh.terminal("cat")})),
        ("sshx", "sshx", False, available(bench.sshx, lambda: {
            "kind": "echo_sshx", "at": bench.sshx.address, "session": bench.sshx.session, "key": bench.sshx.key})),
    ], **({"rounds": 5, "each": 20, "warm_up": 20} if bench.is_quick else {"rounds": 50, "each": 60, "warm_up": 120}))
    done = WorkloadResult([group])
    done.at_most("a key's echo, direct, takes at most 1.2 × `ssh -tt`", group.ratio("direct"), 1.2)
    done.ahead("a key's echo through the gateway is ahead of sshx", group.ratio("gateway", "sshx"))
    return done


def observers(bench):
    # Waits for a line, so that all observers are connected when the output starts; then it echoes.
    command = f"sh -c 'read go; yes 0123456789 | head -c {8 * MIB}; echo flooded; exec cat'"
    count, stalled = (20, 2) if bench.is_quick else (200, 20)
    done = WorkloadResult()
    for way in ("direct", "gateway"):
        def run(name, watched):
            return lambda base: {"kind": "echo_shell", "path": f"{base}/shell/ws", "flood": True, "observers": count if watched else 0,
                                 "stalled": stalled if watched else 0,
                                 "start": {"type": "start", "shell": f"{name}-{way}", "command": command, "binary": True}}

        (_, label, _, alone), = ours(bench, run("alone", False), [way])
        (_, _, _, watched), = ours(bench, run("watched", True), [way])
        group = Group(f"the controller's echo with {count} observers, {stalled} of them stalled ({way})", "alone", words=[
            f"A key every 10 ms. {8 * MIB // MIB} MiB were printed after the observers had connected, so that those who don't read are really "
            "stalled; the others read everything, on the same cores of this machine."])
        bench.measure(group, [("alone", f"{label}, no observers", True, alone), ("watched", f"{label}, {count} observers", True, watched)],
                      rounds=5 if bench.is_quick else 30, each=20 if bench.is_quick else 50, warm_up=20, pause_ms=10)
        done.groups.append(group)
        done.at_most(f"the controller's echo with {count} observers: p99 at most 2 × itself with none ({way})",
                     group.ratio("watched", of=lambda s: s.p99), 2)
    return done


def files(bench):
    big = 64 * MIB if bench.is_quick else GIB
    small, count = 4096, 200 if bench.is_quick else 10_000
    rounds = 10

    def path(name, suffix=""):
        # Each workload has its own directory, as each nginx has: creating a file takes longer in a directory with ten thousand
        # others.
        return lambda base: {"path": f"{base}/files/workspace/{name}/{name}-", "suffix": suffix}

    def mixed(spec, kind, size, names):
        return {**spec, "kind": kind, "bytes": size, "names": names}

    def group(title, kind, name, size, names, suffix, peer, plan, with_agent=True):
        made = Group(title, "nginx", unit_bytes=size if size > MIB else None, is_share=True)
        all_ours = [(way, label, True, mixed(spec, kind, size, names)) for way, label, _, spec in ours(bench, path(name, suffix))]
        others = [("nginx", "nginx" if peer is bench.nginx else "nginx, made durable", False, available(
            peer, lambda: mixed({"at": peer.address, "path": f"/{name}-"}, kind, size, names)))]
        if peer is bench.nginx and size <= MIB:
            others.append(("hop", "nginx behind nginx", False, available(bench.hop, lambda: mixed(
                {"at": bench.hop.address, "path": f"/{name}-"}, kind, size, names))))
        if with_agent:
            others.append(("agent", "sandbox-agent", False, available(bench.agent, lambda: mixed(
                {"at": bench.agent.address, "path": f"/v1/fs/file?path={bench.storage}/{name}-"}, kind, size, names))))
        return bench.measure(made, all_ours + others, **plan)

    if bench.agent.why_not is None:
        # It refuses an upload of this size, but serves a download.
        with (bench.storage / "lazy-0").open("wb") as file:
            file.writelines([bytes(range(256)) * 4096] * (big // MIB))
    of_big = {"rounds": 2 if bench.is_quick else 7, "each": 1, "warm_up": 1, "settle": True}
    of_small = {"rounds": rounds, "each": count // rounds, "warm_up": 20}
    put = f"PUT of {big // MIB} MiB"
    puts = f"PUT of {count:,} files of 4 KiB"
    made = {
        f"{put}, on disk before the answer": group(f"{put}, on disk before the answer", "put", "big", big, 1, "", bench.durable, of_big, False),
        put: group(f"{put}, without waiting for the disk", "put", "lazy", big, 1, "?sync=false", bench.nginx, of_big),
        f"GET of {big // MIB} MiB": group(f"GET of {big // MIB} MiB", "get", "lazy", big, 1, "", bench.nginx, of_big),
        f"{puts}, on disk before the answer": group(f"{puts}, on disk before the answer", "put", "small", small, count, "", bench.durable,
                                                    of_small, False),
        puts: group(f"{puts}, without waiting for the disk", "put", "quick", small, count, "?sync=false", bench.nginx, of_small),
        f"GET of {count:,} files of 4 KiB": group(f"GET of {count:,} files of 4 KiB", "get", "quick", small, count // rounds, "", bench.nginx,
                                                 of_small),
    }
    next(iter(made.values())).words.append(
        "nginx stores a body in a temporary file and renames it, and has no setting to wait for the disk; made durable means that a "
        "preloaded `rename` syncs the file before and its directory after, as boxd does.")
    made[f"GET of {count:,} files of 4 KiB"].words.append(
        "nginx behind nginx: the same nginx, reached through another as a proxy on its UNIX socket. It shows the minimum cost of one more "
        "process on the way, and cobox's gateway is one more process.")
    done = WorkloadResult(made.values())
    for what, g in made.items():
        done.share(f"{what}, direct: at least 0.7 of nginx", g.ratio("direct"), 0.7)
        done.share(f"{what}, gateway: at least 0.5 of nginx", g.ratio("gateway"), 0.5)
    return done


NEEDLE = "the needle in this haystack"


def grep(bench):
    size = 32 * MIB if bench.is_quick else GIB
    fill_tree(bench, size)
    body = {"path": "/workspace/tree", "pattern": NEEDLE, "literal": True}

    def search(base):
        return {"kind": "post", "path": f"{base}/fs/grep", "body": body, "expect": NEEDLE}

    argv = ["rg", "--no-config", "--no-ignore", "--hidden", "--line-number", "--fixed-strings", NEEDLE, "/workspace/tree"]

    def itself(base):
        return {"kind": "post", "path": f"{base}/exec", "body": {"argv": argv}, "expect": NEEDLE}

    group = Group(f"grep over a tree of {size // MIB} MiB", "rg", words=[
        f"{size // TREE_FILE_BYTES:,} files of words, a match in every {MATCH_EVERY}th, all in the page cache. ripgrep runs in the same "
        f"sandbox, by exec: `{' '.join(argv[:-2])} …`."])
    rg = [(("rg"), "ripgrep in the sandbox", False, spec) for _, _, _, spec in ours(bench, itself, ["direct"])]
    bench.measure(group, [*ours(bench, search), *rg], rounds=3 if bench.is_quick else 11, each=1, warm_up=2)
    done = WorkloadResult([group])
    done.at_most("grep, direct, takes at most 1.3 × ripgrep", group.ratio("direct"), 1.3)
    done.at_most("grep through the gateway takes at most 1.3 × ripgrep", group.ratio("gateway"), 1.3)
    return done


TREE_FILE_BYTES = 64 * 1024
TREE_FILES_PER_DIRECTORY = 100
MATCH_EVERY = 20


def fill_tree(bench, size):
    """Writes text files below /workspace/tree, sent as one archive with the same content every time."""
    chance = random.Random(1)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 9))) for _ in range(5000)]
    pages = []
    for _ in range(64):
        lines, length = [], 0
        while length < TREE_FILE_BYTES:
            lines.append(" ".join(chance.choices(words, k=10)))
            length += len(lines[-1]) + 1
        pages.append("\n".join(lines).encode()[:TREE_FILE_BYTES - 1] + b"\n")
    endpoint = bench.endpoints()["direct"]
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(endpoint["at"].removeprefix("unix:"))
        s.sendall(f"PUT {endpoint['base']}/archive?path=/workspace/tree HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {endpoint['token']}\r\n"
                  "content-type: application/x-tar\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode())
        with tarfile.open(fileobj=Chunks(s), mode="w|", bufsize=256 * 1024) as tar:
            for number_ in range(size // TREE_FILE_BYTES):
                page = pages[number_ % len(pages)]
                if number_ % MATCH_EVERY == 0:
                    page = page[:len(page) // 2] + f"\n{NEEDLE}\n".encode() + page[len(page) // 2 + len(NEEDLE) + 2:]
                entry = tarfile.TarInfo(f"{number_ // TREE_FILES_PER_DIRECTORY:03}/{number_}.txt")
                entry.size, entry.mode = len(page), 0o644
                tar.addfile(entry, io.BytesIO(page))
        s.sendall(b"0\r\n\r\n")
        with s.makefile("rb") as answer:
            status = answer.readline().split()[1]
            if not status.startswith(b"2"):
                raise RuntimeError(f"the tree could not be sent: {answer.read()[-500:].decode(errors='replace')}")


class Chunks(io.RawIOBase):
    """Writes data as chunks of an HTTP body."""

    def __init__(self, to):
        self.to = to

    def writable(self):
        return True

    def write(self, data):
        self.to.sendall(b"%x\r\n%b\r\n" % (len(data), bytes(data)))
        return len(data)


IDLE_MIB, SHELL_MIB, GROWTH_MIB = 8, 0.6, 1
PEAK_ROUNDS = 3
HELD_SHELLS = 200


def memory(bench):
    done, shells, size = WorkloadResult(), 20 if bench.is_quick else HELD_SHELLS, 64 * MIB if bench.is_quick else GIB
    bench.broker.reconnect()
    session = bench.broker.ensure("memory")
    session.run_true()
    boxd = session.boxd()
    try:
        idle = resident(boxd)
    except PermissionError:
        done.memory = ["Not measured: this user may not read boxd's memory."]
        return done
    rows = ["| what | MiB |", "|---|--:|", f"| boxd, idle after one command (resident) | {number(idle)} |"]
    done.promise(f"an idle boxd is at most {IDLE_MIB} MiB", idle, lambda mib: mib <= IDLE_MIB, "{:.1f} MiB")

    growth = []
    for way, endpoint in bench.endpoints("memory").items():
        for kind in ("put", "get"):
            watched = {"boxd": boxd} if way == "direct" else {"boxd": boxd, "the broker": bench.broker.process.pid}
            # The second size is large enough to fill every buffer; beyond it, memory must not grow.
            sizes = (16 * MIB, size // 4, size)
            rounds = [[peaks(bench, watched.values(), endpoint, kind, n) for n in sizes] for _ in range(PEAK_ROUNDS)]
            for at, who in enumerate(watched):
                of_each = [statistics.median(turn[size_at][at] for turn in rounds) for size_at in range(len(sizes))]
                growth.append(of_each[2] - of_each[1])
                told = ", ".join(f"{n // MIB} MiB: {number(mib)}" for n, mib in zip(sizes[:2], of_each))
                rows.append(f"| {who} at most, during {kind.upper()} of {size // MIB} MiB, {way} (of {told}) | {number(of_each[2])} |")
    done.promise(f"a transfer of {size // MIB} MiB takes no more memory than one of {size // 4 // MIB} (at most {GROWTH_MIB} MiB apart)",
                 max(growth), lambda mib: mib <= GROWTH_MIB, "{:.1f} MiB")

    endpoint, before = bench.endpoints("memory")["direct"], resident(boxd)
    order = {"at": endpoint["at"], "token": endpoint["token"], "path": f"{endpoint['base']}/shell/ws", "count": shells,
             "command": "sh -c 'seq 1 60000; exec cat'", "until": "60000"}
    with subprocess.Popen([bench.load, "hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as holder:
        holder.stdin.write(json.dumps(order) + "\n")
        holder.stdin.flush()
        is_held = holder.stdout.readline().strip() == "held"
        each = (resident(boxd) - before) / shells if is_held else None
        holder.stdin.close()
        why = holder.stderr.read().strip()
    if each is None:
        rows.append(f"| one of {shells} shells | not available: {' '.join(why.split())[:300]} |")
    else:
        rows.append(f"| one of {shells} shells, each after 400 KiB of output, so that its ring is full | {each:.2f} |")
    done.promise(f"a shell takes at most {SHELL_MIB} MiB of boxd's ({shells} at once)", each, lambda mib: mib <= SHELL_MIB, "{:.2f} MiB")
    done.memory = [*rows, "", "Resident memory (`VmRSS`, `VmHWM`), without the programs in the sandbox. Of transfers the median of "
                   f"{PEAK_ROUNDS}, with all sizes alternating."]
    bench.broker.reconnect()
    session.release()
    return done


def peaks(bench, pids, endpoint, kind, size):
    """The peak resident memory of each process during one transfer, in MiB. A downloaded file was uploaded just before."""
    for pid in pids:
        with contextlib.suppress(PermissionError):
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the high-water mark
    spec = {"name": "it", "kind": kind, "at": endpoint["at"], "token": endpoint["token"], "path": f"{endpoint['base']}/files/workspace/peak-{size}-",
            "bytes": size, "names": 1}
    plan = {"rounds": 1, "each": 1, "warm_up": 0, "contenders": [spec]}
    done = subprocess.run([bench.load, "measure"], input=json.dumps(plan), capture_output=True, text=True, check=True)
    failed = json.loads(done.stdout)["failed"]
    if failed:
        raise RuntimeError(f"{kind.upper()} of {size} bytes: {failed['it']}")
    return [resident(pid, "VmHWM") for pid in pids]


def resident(pid, field="VmRSS"):
    """Resident memory in MiB."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(f"{field}:"))


def ripgrep_version():
    try:
        return first_line([program("rg"), "--version"]).split(" (")[0]
    except RuntimeError as problem:
        return f"ripgrep: not available ({problem})"


ALL = {"exec": exec_true, "stream": stream, "echo": echo, "observers": observers, "files": files, "grep": grep, "memory": memory}
