"""Tests with connections that break: no byte lost or duplicated, no command run twice, tokens renewed in between."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from cobox import Cobox, errors, event_stream, resumable_stream
from cobox.call import BrokerEndpoint

# A random seed cuts at different positions in each run; a failure message contains it.
SEED = int(os.environ.get("COBOX_CUT_SEED") or random.SystemRandom().randrange(1 << 30))
PRINTS = "seq 1 60000; seq 1 60000 >&2"
PRINTED = "".join(f"{n}\n" for n in range(1, 60001)).encode()


@pytest.fixture
def cut(proxy: Any) -> Any:
    """A proxy whose `begin` cuts connections after a random number of bytes."""
    rng = random.Random(SEED)

    def begin(low: int, high: int, cuts: int) -> None:
        proxy.limit = lambda number: rng.randrange(low, high) if proxy.cuts < cuts else None

    proxy.begin = begin
    return proxy


def via_proxy(proxy: Any, broker: Any, session: Any) -> Any:
    """Routes the session's sandbox through the proxy; the broker always reports its own address."""
    grant = session._grant
    grant.base = grant.base.replace(broker.url, proxy.url)
    grant.ws_base = grant.ws_base.replace(broker.url.replace("http", "ws"), proxy.url.replace("http", "ws"))
    assert proxy.url.partition(":")[2] in grant.base and proxy.url.partition(":")[2] in grant.ws_base
    return session


@pytest.fixture
def proxied(broker: Any, kind: Any, thread: str, proxy: Any) -> Any:
    return via_proxy(proxy, broker, kind.session(kind.client(proxy.url, broker.agent_key), thread, release=True))


def test_output_arrives_once_over_broken_connections(kind: Any, cut: Any, proxied: Any) -> None:
    cut.begin(2_000, 60_000, cuts=20)
    stream = kind.do(proxied.stream(PRINTS))
    got: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    for piece in kind.each(stream):
        assert piece.offset == len(got[piece.stream]) and piece.lost == 0, f"seed {SEED}"
        got[piece.stream] += piece.data
    assert got["stdout"] == PRINTED and got["stderr"] == PRINTED, f"seed {SEED}"
    assert stream.exit.exit_code == 0
    assert cut.cuts == 20 and stream.reconnects >= 5, f"seed {SEED}"


def test_input_arrives_once_over_broken_connections(broker: Any, thread: str, cut: Any) -> None:
    data = random.Random(SEED).randbytes(1_500_000)
    with Cobox(cut.url, broker.agent_key) as client, client.session(thread, release=True) as session:
        proxied = via_proxy(cut, broker, session)
        cut.begin(3_000, 30_000, cuts=15)
        stream = proxied.stream("cat", stdin=True)

        def write() -> None:
            for at in range(0, len(data), 50_000):
                stream.write(data[at : at + 50_000])
            stream.close_stdin()

        writer = threading.Thread(target=write)
        writer.start()
        got = b"".join(piece.data for piece in stream)
        writer.join()
        assert hashlib.sha256(got).hexdigest() == hashlib.sha256(data).hexdigest(), f"seed {SEED}"
        assert cut.cuts == 15 and stream.reconnects > 0, f"seed {SEED}"


def test_a_lost_response_does_not_run_a_command_twice(kind: Any, cut: Any, proxied: Any) -> None:
    kind.do(proxied.exec("true"))
    cut.cut_all()
    # The response is cut off; only the next connection returns it.
    first = cut.connections
    cut.limit = lambda number: 40 if number == first else None
    result = kind.do(proxied.exec("echo ran >> /workspace/count; echo done"))
    assert result.stdout == "done\n" and cut.cuts == 1
    assert kind.do(proxied.files.read_text("/workspace/count")) == "ran\n"


def test_a_non_idempotent_request_is_not_repeated(kind: Any, cut: Any, proxied: Any) -> None:
    kind.do(proxied.files.write("/workspace/a", "one one"))
    cut.cut_all()
    first = cut.connections
    cut.limit = lambda number: 20 if number == first else None
    with pytest.raises(errors.Unreachable) as lost:
        kind.do(proxied.fs.edit("/workspace/a", "one", "two", replace_all=True))
    assert lost.value.was_sent and lost.value.retryable
    assert kind.do(proxied.files.read_text("/workspace/a")) == "two two"


def test_a_download_resumes_at_its_offset_unless_the_file_changed(kind: Any, cut: Any, proxied: Any) -> None:
    data = random.Random(SEED).randbytes(3_000_000)
    kind.do(proxied.files.write("/workspace/big", data))
    cut.begin(50_000, 900_000, cuts=6)
    cut.cut_all()
    reader = kind.do(proxied.files.open("/workspace/big"))
    assert kind.do(reader.read()) == data, f"seed {SEED}"
    assert cut.cuts >= 3
    cut.limit = lambda number: None
    # Larger than all buffers in between, so that the rest must be requested again.
    kind.do(proxied.exec("truncate -s 200M /workspace/huge")).check()
    reader = kind.do(proxied.files.open("/workspace/huge"))
    kind.do(reader.piece())
    kind.do(proxied.exec("echo more >> /workspace/huge")).check()
    cut.cut_all()
    with pytest.raises(errors.FileChanged):
        kind.do(reader.read())


def test_events_arrive_once_over_broken_connections(kind: Any, cut: Any, proxied: Any) -> None:
    cut.begin(400, 4_000, cuts=8)
    cut.only = b"GET /v1/sandbox/sessions/"
    cut.cut_all()
    events = kind.do(proxied.events(after="now"))
    for number in range(40):
        kind.do(proxied.files.write(f"/workspace/{number}", str(number)))
    paths = []
    for event in kind.each(events):
        if event.type == "file_written":
            paths.append(event.data["path"])
            if len(paths) == 40:
                break
    assert paths == [f"/workspace/{number}" for number in range(40)], f"seed {SEED}"
    assert events.reconnects >= 3, f"seed {SEED}"
    kind.do(events.close())


def test_events_before_the_first_received_one_survive_a_lost_connection(kind: Any, broker: Any, proxy: Any, thread: str) -> None:
    near = kind.session(kind.client(broker.url, broker.agent_key), thread, release=True)
    proxied = kind.session(kind.client(broker.url, broker.agent_key), thread)
    proxied._grant.broker = BrokerEndpoint(proxy.url, proxied._grant.broker._key)
    events = kind.do(proxied.events(after="now"))
    proxy.cut_all()
    # No one is reading, and no event has been received yet.
    kind.do(near.files.write("/workspace/meanwhile", "x"))

    def write_after_reconnect() -> None:
        with Cobox(broker.url, broker.agent_key) as client, client.session(thread) as other:
            while not events.reconnects:
                time.sleep(0.02)
            other.files.write("/workspace/last", "x")

    advance_clock = threading.Thread(target=write_after_reconnect)
    advance_clock.start()
    paths = []
    for event in kind.each(events):
        if event.type == "file_written":
            paths.append(event.data["path"])
            if event.data["path"] == "/workspace/last":
                break
    advance_clock.join()
    assert paths == ["/workspace/meanwhile", "/workspace/last"]
    kind.do(events.close())


@pytest.fixture
def advance_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advances the clock used by streams."""
    passed = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    for module in (event_stream, resumable_stream):
        monkeypatch.setattr(module, "time", clock)

    def move(seconds: float) -> None:
        passed[0] += seconds

    return move


def start_listener(stream: Any, matches: Callable[[Any], bool] = lambda results: True) -> tuple[threading.Thread, list[Any]]:
    """Starts a thread that waits for the next matching event; returns it with the list of results."""
    results: list[Any] = []

    def wait() -> None:
        try:
            while not matches(event := stream.next()):
                pass
            results.append(event)
        except errors.CoboxError as error:
            results.append(error)

    listener = threading.Thread(target=wait)
    listener.start()
    return listener, results


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_connected(stream: Any) -> bool:
    return stream._opened is not None if hasattr(stream, "_opened") else stream._stream._is_ready


def cut_far_apart(proxy: Any, stream: Any, advance_clock: Callable[[float], None]) -> None:
    for number in range(1, 4):
        wait_until(lambda: is_connected(stream))
        advance_clock(3600.0)
        proxy.cut_all()
        wait_until(lambda number=number: stream.reconnects >= number)


def test_a_quiet_command_outlives_cuts_hours_apart(broker: Any, thread: str, proxy: Any, advance_clock: Callable[[float], None]) -> None:
    with Cobox(proxy.url, broker.agent_key) as client, client.session(thread, release=True) as session:
        stream = via_proxy(proxy, broker, session).stream("read line; echo got $line", stdin=True)
        listener, results = start_listener(stream)
        cut_far_apart(proxy, stream, advance_clock)
        stream.write("it\n")
        listener.join(60)
        assert [getattr(piece, "text", piece) for piece in results] == ["got it\n"]
        stream.close()


def test_a_quiet_shell_outlives_cuts_hours_apart(
    broker: Any, thread: str, proxy: Any, human: Any, advance_clock: Callable[[float], None]
) -> None:
    with Cobox(proxy.url, human) as client, client.session(thread, release=True) as session:
        shell = via_proxy(proxy, broker, session).shells.attach()
        shell.write("stty -echo; PS1=; echo beg''un\r")
        shell.read_until("begun")
        cut_far_apart_while_read(proxy, shell, advance_clock)
        shell.write("echo still he''re\r")
        shell.read_until("still here")
        shell.close()


def cut_far_apart_while_read(proxy: Any, shell: Any, advance_clock: Callable[[float], None]) -> None:
    """Like `cut_far_apart`, with a reader that can be stopped."""
    is_over = threading.Event()
    failed: list[errors.CoboxError] = []

    def read() -> None:
        try:
            while not is_over.is_set():
                if b"that is all" in (getattr(shell.next(), "data", None) or b""):
                    return
        except errors.CoboxError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        cut_far_apart(proxy, shell, advance_clock)
    finally:
        is_over.set()
        if not failed:
            shell.write("echo that is a''ll\r")
        reader.join(60)
    assert failed == []


def test_a_quiet_event_stream_outlives_cuts_hours_apart(
    broker: Any, thread: str, proxy: Any, advance_clock: Callable[[float], None]
) -> None:
    with Cobox(broker.url, broker.agent_key) as client, client.session(thread, release=True) as session:
        session._grant.broker = BrokerEndpoint(proxy.url, session._grant.broker._key)
        events = session.events(after="now")
        # The `connected` event arrives a moment later and does not count.
        listener, results = start_listener(events, lambda event: event is None or event.type == "file_written")
        cut_far_apart(proxy, events, advance_clock)
        session.files.write("/workspace/a", "x")
        listener.join(60)
        assert [getattr(event, "type", event) for event in results] == ["file_written"]
        events.close()


def kill_boxd(broker: Any, sandbox_id: str) -> None:
    """Kills boxd the way the kernel does when memory runs out."""
    [record] = broker.folder.rglob(f"{sandbox_id}/run.json")
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)


@pytest.mark.parametrize("way", ["exec", "stream"])
def test_a_command_is_not_run_again_after_its_sandbox_died(kind: Any, broker: Any, box: Any, way: str) -> None:
    with Cobox(broker.url, broker.agent_key) as other, other.session(box.thread_id) as near:

        def kill() -> None:
            while not near.exec("cat /workspace/count").stdout:
                time.sleep(0.05)
            kill_boxd(broker, box.sandbox_id)

        killer = threading.Thread(target=kill)
        killer.start()
        command = "echo ran >> /workspace/count; sleep 1000"
        if way == "exec":
            with pytest.raises(errors.MayHaveRun):
                kind.do(box.exec(command))
        else:
            # The command had started, so its outcome is known: it ended with its sandbox.
            with pytest.raises(errors.CommandNotFound):
                kind.do(kind.do(box.stream(command)).wait())
        killer.join()
        assert near.files.read_text("/workspace/count") == "ran\n"


def test_a_shell_continues_over_broken_connections(kind: Any, broker: Any, cut: Any, human: Any, thread: str) -> None:
    box = via_proxy(cut, broker, kind.session(kind.client(cut.url, human), thread, release=True))
    cut.begin(500, 9_000, cuts=6)
    shell = kind.do(box.shells.attach())
    for number in range(20):
        # Input sent just before a cut may be refused or dropped, so each command waits for the output of the previous one.
        kind.do(shell.write(f"seq -s, {number}000 {number}400; echo end-$(({number}+0))-of-it\r"))
        kind.do(shell.read_until(f"end-{number}-of-it"))
    assert shell.reconnects >= 3, f"seed {SEED}"
    kind.do(shell.close())


def test_closing_a_stream_from_another_thread_ends_its_reader(broker: Any, thread: str) -> None:
    with Cobox(broker.url, broker.agent_key) as client, client.session(thread, release=True) as box:
        stream = box.stream("echo begun; exec sleep 1000")
        first, seen = threading.Event(), []

        def read() -> None:
            for piece in stream:
                seen.append(piece.text)
                first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(30)
        stream.close()
        reader.join(30)
        assert not reader.is_alive()
        assert seen == ["begun\n"]
        # Closing a stream does not end the command, so it can be joined again.
        assert [p.state for p in box.processes()] == ["running"]
        with box.stream(command_id=stream.command_id, stdout_from=stream.offsets[0]) as again:
            again.signal("TERM")
            assert again.wait().signal == 15


def test_a_stream_continues_after_its_token_was_renewed(kind: Any, box: Any) -> None:
    stream = kind.do(box.stream("read a; echo got $a; read b; echo got $b", stdin=True))
    kind.do(stream.write("1\n"))
    assert kind.do(stream.next()).text == "got 1\n"
    before = box.token
    kind.do(box.refresh())
    assert box.token != before
    kind.do(stream.write("2\n"))
    assert kind.do(stream.next()).text == "got 2\n"
    assert kind.do(stream.wait()).exit_code == 0 and stream.reconnects == 0


def test_an_expiring_token_is_renewed_before_use(kind: Any, box: Any) -> None:
    before = box.token
    box._grant.token.expires = 0.0
    assert kind.do(box.exec("echo still")).stdout == "still\n"
    assert box.token != before


def test_upkeep_renews_the_token_in_the_background(broker: Any, thread: str) -> None:
    with Cobox(broker.url, broker.agent_key) as client:
        grant = client.negotiate(thread)
        grant.token.refresh = 0.0
        grant.heartbeat_interval = 0.0
        before, replaced = grant.token.secret, threading.Event()
        original = type(grant).heartbeat

        def heartbeat(self: Any) -> Any:
            replaced.set()
            return original(self)

        type(grant).heartbeat = heartbeat  # type: ignore[method-assign]
        try:
            from cobox import Session

            with Session(grant, client._io, release=True) as box:
                assert replaced.wait(30)
                assert box.token != before
        finally:
            type(grant).heartbeat = original  # type: ignore[method-assign]


def test_a_revoked_token_ends_open_streams_with_token_revoked(kind: Any, broker: Any, operator: Cobox, box: Any) -> None:
    import httpx

    stream = kind.do(box.stream("echo begun; sleep 1000"))
    assert kind.do(stream.next()).text == "begun\n"
    headers = {"Authorization": f"Bearer {broker.operator_key}"}
    claims = box.token.expose().split(".")[1]
    jti = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["jti"]
    httpx.post(f"{broker.url}/internal/tokens/revoke", headers=headers, json={"jti": jti}, trust_env=False).raise_for_status()
    with pytest.raises(errors.TokenRevoked):
        while kind.do(stream.next()) is not None:
            pass
    with pytest.raises(errors.TokenRevoked) as refused:
        kind.do(box.exec("true"))
    assert "refresh()" in str(refused.value)
    kind.do(box.refresh())
    assert kind.do(box.exec("echo back")).stdout == "back\n"
