"""Tests of reconnects hours apart and of commands with an unknown outcome, with a simulated clock and without a network."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest

from cobox import errors, event_stream, resumable_stream
from cobox.call import BrokerEndpoint, Call
from cobox.effects import (
    AcquireLock,
    CloseResponse,
    CloseSocket,
    Flow,
    OpenedResponse,
    OpenResponse,
    OpenSocket,
    ReadChunk,
    ReceiveMessage,
    Response,
    SendMessage,
    SendRequest,
    Sleep,
    SocketClosed,
)
from cobox.event_stream import EventsApi
from cobox.exec_stream import ExecStreamApi, _ResumableExec
from cobox.grant import Grant, Token
from cobox.secret import Secret
from cobox.session_api import SessionApi

ENDPOINT = BrokerEndpoint("http://broker", Secret("key"))
READY = '{"type": "ready", "command_id": "c", "pid": 1, "stdout_offset": 0, "stderr_offset": 0}'
HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (event_stream, resumable_stream):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    return clock


def run_flow(flow: Flow[Any], clock: Clock, do: Callable[[Any], Any]) -> Any:
    """Runs a flow to its end; waiting only advances the simulated clock."""
    try:
        effect = next(flow)
        while True:
            try:
                if isinstance(effect, Sleep):
                    clock.now += effect.seconds
                    result = None
                elif isinstance(effect, AcquireLock):
                    assert effect.lock.acquire(blocking=False)
                    result = None
                else:
                    result = do(effect)
            except Exception as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as done:
        return done.value


def envelope(code: str, **more: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": "m", "retryable": False, "request_id": "r"}} | more


class FakeFeed:
    """A broker whose connections deliver these chunks, one per hour, and then break."""

    def __init__(self, clock: Clock, *connections: list[bytes]) -> None:
        self.clock, self.connections = clock, list(connections)
        self.requests: list[tuple[str, str | None]] = []
        self.events = EventsApi(None, ENDPOINT, Call("GET", "/e", query=(("after", "now"),)), None)
        self.rest: list[bytes] = []

    def do(self, effect: Any) -> Any:
        if isinstance(effect, OpenResponse):
            self.requests.append((effect.request.url, dict(effect.request.headers).get("last-event-id")))
            if not self.connections:
                raise errors.Unreachable("away", was_sent=False)
            self.rest = self.connections.pop(0)
            return OpenedResponse(200, {}, None)
        if isinstance(effect, ReadChunk):
            self.clock.now += HOUR
            return self.rest.pop(0) if self.rest else b""
        assert isinstance(effect, CloseResponse)
        return None


EVENT = (
    b'event: sandbox\nid: evt_9\ndata: {"id": "evt_9", "type": "idle", "at": "2026-01-01T00:00:00Z", "session_id": "s", '
    b'"sandbox_id": "b", "source": "broker"}\n\n'
)


def test_a_quiet_event_stream_outlives_any_number_of_lost_connections(clock: Clock) -> None:
    beats = [b"retry: 1000\n\n", b":\n\n", b":\n\n"]
    feed = FakeFeed(clock, *([*beats] for _ in range(5)), [*beats, EVENT])
    run_flow(EventsApi.begin.flow(feed.events), clock, feed.do)
    event = run_flow(EventsApi.next.flow(feed.events), clock, feed.do)
    assert (event.id, feed.events.reconnects) == ("evt_9", 5)


def test_events_give_up_after_two_minutes_without_a_connection(clock: Clock) -> None:
    feed = FakeFeed(clock, [b"retry: 1000\n\n"])
    run_flow(EventsApi.begin.flow(feed.events), clock, feed.do)
    with pytest.raises(errors.GaveUp):
        run_flow(EventsApi.next.flow(feed.events), clock, feed.do)


def test_event_stream_backs_off_if_every_connection_ends_at_once(clock: Clock) -> None:
    waits: list[float] = []
    feed = FakeFeed(clock, *([b"retry: 1000\n\n"] for _ in range(12)), [EVENT])

    def do(effect: Any) -> Any:
        if isinstance(effect, ReadChunk):
            return feed.rest.pop(0) if feed.rest else b""
        if isinstance(effect, OpenResponse):
            waits.append(clock.now)
        return feed.do(effect)

    run_flow(EventsApi.begin.flow(feed.events), clock, do)
    run_flow(EventsApi.next.flow(feed.events), clock, do)
    assert waits[-1] - waits[-2] >= 2.5


def test_a_reconnect_before_the_first_event_resumes_at_the_streams_start(clock: Clock) -> None:
    feed = FakeFeed(clock, [b"id: evt_7\nretry: 1000\n\n"], [EVENT])
    run_flow(EventsApi.begin.flow(feed.events), clock, feed.do)
    run_flow(EventsApi.next.flow(feed.events), clock, feed.do)
    assert feed.requests == [("http://broker/e?after=now", None), ("http://broker/e", "evt_7")]


def grant(**given: Any) -> Grant:
    token = Token(Secret("old"), float("inf"), float("inf"))
    return Grant(http_base_url="http://box/v1", ws_base_url=None, token=token, sandbox_id="sb", session_id="ssn", **given)


class Sockets:
    """A sandbox whose connections deliver these frames, `apart` seconds between them, and then close with a code."""

    def __init__(self, clock: Clock, *connections: tuple[list[str], int], apart: float = HOUR) -> None:
        self.clock, self.connections, self.apart = clock, list(connections), apart
        self.starts: list[dict[str, Any]] = []
        self.dialled: list[float] = []
        self.script: tuple[list[str], int] = ([], 1006)

    def do(self, effect: Any) -> Any:
        if isinstance(effect, OpenSocket):
            self.dialled.append(self.clock.now)
            if not self.connections:
                raise errors.Unreachable("away", was_sent=False)
            frames, code = self.connections.pop(0)
            self.script = [*frames], code
            return object()
        if isinstance(effect, ReceiveMessage):
            if self.script[0]:
                frame = self.script[0].pop(0)
                self.clock.now += 0.0 if "ready" in frame else self.apart
                return frame
            raise SocketClosed(self.script[1], "")
        if isinstance(effect, SendMessage):
            frame = json.loads(effect.message)
            if frame["type"] == "start":
                self.starts.append(frame)
            return None
        if isinstance(effect, SendRequest):
            assert effect.request.url.endswith("/refresh")
            tokens = {"token": f"new-{self.clock.now}", "expires_at": "2999-01-01T00:00:00Z", "refresh_before": "2999-01-01T00:00:00Z"}
            return Response(200, {}, json.dumps(tokens).encode())
        assert isinstance(effect, CloseSocket)
        return None


def stream(start: dict[str, Any], **given: Any) -> ExecStreamApi:
    return ExecStreamApi(grant(**given), None, {"command_id": "c"} | start)


def to_the_end(one: ExecStreamApi, clock: Clock, sockets: Sockets) -> Any:
    run_flow(ExecStreamApi.begin.flow(one), clock, sockets.do)
    return run_flow(ExecStreamApi.wait.flow(one), clock, sockets.do)


QUIET = ([READY, '{"type": "pong"}', '{"type": "pong"}'], 1006)
EXIT = ([READY, '{"type": "exit", "exit_code": 0}'], 1000)


def test_a_quiet_command_outlives_any_number_of_lost_connections(clock: Clock) -> None:
    one, sockets = stream({"command": "sleep"}), Sockets(clock, QUIET, QUIET, QUIET, QUIET, EXIT)
    assert to_the_end(one, clock, sockets).exit_code == 0
    assert one.reconnects == 4


def test_a_quiet_command_outlives_tokens_that_expire_hours_apart(clock: Clock) -> None:
    expired = (QUIET[0], 4401)
    one, sockets = stream({"command": "sleep"}, broker=ENDPOINT), Sockets(clock, expired, expired, expired, EXIT)
    assert to_the_end(one, clock, sockets).exit_code == 0


def test_a_renewed_token_that_is_refused_at_once_is_an_error(clock: Clock) -> None:
    expired = ([READY], 4401)
    one, sockets = stream({"command": "sleep"}, broker=ENDPOINT), Sockets(clock, expired, expired, expired, EXIT)
    with pytest.raises(errors.TokenExpired):
        to_the_end(one, clock, sockets)
    assert len(sockets.dialled) == 2


def test_exec_stream_backs_off_if_every_connection_closes_at_once(clock: Clock) -> None:
    one, sockets = stream({"command": "sleep"}), Sockets(clock, *([([READY], 1006)] * 12), EXIT, apart=0.0)
    to_the_end(one, clock, sockets)
    assert sockets.dialled[-1] - sockets.dialled[-2] >= 2.5


def test_a_command_with_an_unanswered_start_is_joined_not_restarted(clock: Clock) -> None:
    one, sockets = stream({"command": "rm a", "env": {"A": "b"}}), Sockets(clock, ([], 1006), ([], 1006), EXIT)
    assert to_the_end(one, clock, sockets).exit_code == 0
    assert ["command" in start for start in sockets.starts] == [True, False, False]
    assert all(start["command_id"] == "c" and "env" not in start for start in sockets.starts[1:])


def test_a_command_unknown_to_the_sandbox_after_a_loss_may_have_run(clock: Clock) -> None:
    gone = ([json.dumps(envelope("COMMAND_NOT_FOUND", type="error"))], 4404)
    one, sockets = stream({"command": "rm a"}), Sockets(clock, ([], 1006), gone, EXIT)
    with pytest.raises(errors.MayHaveRun) as raised:
        to_the_end(one, clock, sockets)
    assert raised.value.was_sent and not raised.value.retryable
    # A client that only joins gets the plain error.
    with pytest.raises(errors.CommandNotFound):
        to_the_end(stream({}), clock, Sockets(clock, ([], 1006), gone))


def test_a_command_refused_with_retry_later_is_started_again(clock: Clock) -> None:
    busy = ([json.dumps(envelope("RATE_LIMITED", type="error"))], 1013)
    one, sockets = stream({"command": "rm a"}), Sockets(clock, busy, busy, EXIT, apart=0.0)
    assert to_the_end(one, clock, sockets).exit_code == 0
    assert ["command" in start for start in sockets.starts] == [True, True, True]


class Runs(SessionApi):
    def __init__(self) -> None:
        self._grant = grant()


RESULT = {"stdout": "", "stderr": "", "exit_code": 0, "timed_out": False, "truncated": False, "duration_ms": 1, "command_id": "c"}
OK = Response(200, {}, json.dumps(RESULT).encode())
LOST = errors.Unreachable("cut", was_sent=True)
UNSENT = errors.Unreachable("refused", was_sent=False)


def refusal(status: int, code: str) -> Response:
    return Response(status, {}, json.dumps(envelope(code)).encode())


def exec_with(clock: Clock, *answers: Any, **options: Any) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    left = list(answers)

    def do(effect: Any) -> Any:
        sent.append(json.loads(effect.request.body.sync_content()))
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    try:
        run_flow(SessionApi.exec.flow(Runs(), "rm a", **options), clock, do)
    finally:
        assert len({body["command_id"] for body in sent}) == 1
        clock.sent = sent  # type: ignore[attr-defined]
    return sent


@pytest.mark.parametrize("lost", [LOST, refusal(503, "PROVIDER_UNAVAILABLE"), Response(502, {}, b"<html>")])
def test_a_lost_response_is_requested_by_command_id_alone(clock: Clock, lost: Any) -> None:
    sent = exec_with(clock, UNSENT, refusal(423, "SANDBOX_STARTING"), lost, refusal(429, "RATE_LIMITED"), UNSENT, OK, max_output_bytes=9)
    assert ["command" in body for body in sent] == [True, True, True, False, False, False]
    assert sent[-1] == {"command_id": sent[0]["command_id"], "max_output_bytes": 9}


@pytest.mark.parametrize("lost", [LOST, refusal(503, "PROVIDER_UNAVAILABLE")])
def test_a_command_is_not_sent_again_to_a_sandbox_that_lost_it(clock: Clock, lost: Any) -> None:
    with pytest.raises(errors.MayHaveRun, match="doesn't know the command"):
        exec_with(clock, lost, refusal(404, "COMMAND_NOT_FOUND"), OK)
    assert len(clock.sent) == 2  # type: ignore[attr-defined]


class Interrupted(BaseException):
    pass


def test_an_interrupted_command_is_killed_with_a_single_attempt(clock: Clock) -> None:
    flow = SessionApi.exec.flow(Runs(), "sleep 9", command_id="a/b c")
    assert isinstance(next(flow), SendRequest)
    ending = flow.throw(Interrupted())
    assert isinstance(ending, SendRequest)
    assert (ending.request.method, ending.request.url) == ("DELETE", "http://box/v1/processes/a%2Fb%20c")
    assert ending.request.timeout == 5.0
    with pytest.raises(Interrupted):
        flow.send(refusal(429, "RATE_LIMITED"))


def test_an_abandoned_exec_flow_requests_no_more_effects() -> None:
    flow = SessionApi.exec.flow(Runs(), "sleep 9")
    next(flow)
    flow.close()


@pytest.mark.parametrize("text", ["half \ud800 of one", "\udcff"])
def test_an_unpaired_surrogate_is_refused_in_every_body(text: str) -> None:
    from cobox.request_body import RequestBody

    with pytest.raises(errors.InvalidText, match="unpaired surrogate") as refused:
        RequestBody.json({"text": text})
    assert isinstance(refused.value, ValueError)
    with pytest.raises(errors.InvalidText, match="unpaired surrogate"):
        RequestBody(text)


def test_the_first_frame_of_a_stream_contains_all_fields() -> None:
    stream_state = _ResumableExec(grant(), {"command": "ls", "cwd": "/", "command_id": "c"}, 0, 0)
    assert stream_state.start_frame()["cwd"] == "/"
