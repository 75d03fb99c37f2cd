"""Losses that are far apart, and commands whose fate nobody knows: decisions on a clock of the test's own, without a network."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest

from cobox import errors, feed, line
from cobox.call import BrokerDoor, Call
from cobox.exec_stream import ExecStreamApi, _ExecLine
from cobox.feed import EventsApi
from cobox.flow import Acquire, Answer, Closed, Dial, Drop, Flow, HangUp, Hear, Open, Opened, Pause, Pull, Say, Send
from cobox.grant import Grant, Token
from cobox.secret import Secret
from cobox.session_api import SessionApi

DOOR = BrokerDoor("http://broker", Secret("key"))
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
    for module in (feed, line):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=clock.monotonic))
    return clock


def drive(flow: Flow[Any], clock: Clock, do: Callable[[Any], Any]) -> Any:
    """Runs a flow to its end; waiting takes no time but the clock's."""
    try:
        effect = next(flow)
        while True:
            try:
                if isinstance(effect, Pause):
                    clock.now += effect.seconds
                    result = None
                elif isinstance(effect, Acquire):
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


class Feed:
    """A broker whose connections say these pieces, each an hour after the one before, and then break off."""

    def __init__(self, clock: Clock, *connections: list[bytes]) -> None:
        self.clock, self.connections = clock, list(connections)
        self.asked: list[tuple[str, str | None]] = []
        self.events = EventsApi(None, DOOR, Call("GET", "/e", query=(("after", "now"),)), None)
        self.rest: list[bytes] = []

    def do(self, effect: Any) -> Any:
        if isinstance(effect, Open):
            self.asked.append((effect.request.url, dict(effect.request.headers).get("last-event-id")))
            if not self.connections:
                raise errors.Unreachable("away", was_sent=False)
            self.rest = self.connections.pop(0)
            return Opened(200, {}, None)
        if isinstance(effect, Pull):
            self.clock.now += HOUR
            return self.rest.pop(0) if self.rest else b""
        assert isinstance(effect, Drop)
        return None


EVENT = (
    b'event: sandbox\nid: evt_9\ndata: {"id": "evt_9", "type": "idle", "at": "2026-01-01T00:00:00Z", "session_id": "s", '
    b'"sandbox_id": "b", "source": "broker"}\n\n'
)


def test_a_quiet_stream_of_events_outlives_any_number_of_losses(clock: Clock) -> None:
    beats = [b"retry: 1000\n\n", b":\n\n", b":\n\n"]
    told = Feed(clock, *([*beats] for _ in range(5)), [*beats, EVENT])
    drive(EventsApi.begin.flow(told.events), clock, told.do)
    event = drive(EventsApi.next.flow(told.events), clock, told.do)
    assert (event.id, told.events.reconnects) == ("evt_9", 5)


def test_events_without_a_connection_are_given_up_after_two_minutes(clock: Clock) -> None:
    told = Feed(clock, [b"retry: 1000\n\n"])
    drive(EventsApi.begin.flow(told.events), clock, told.do)
    with pytest.raises(errors.GaveUp):
        drive(EventsApi.next.flow(told.events), clock, told.do)


def test_a_broker_that_ends_every_stream_at_once_is_asked_less_and_less_often(clock: Clock) -> None:
    waits: list[float] = []
    told = Feed(clock, *([b"retry: 1000\n\n"] for _ in range(12)), [EVENT])

    def do(effect: Any) -> Any:
        if isinstance(effect, Pull):
            return told.rest.pop(0) if told.rest else b""
        if isinstance(effect, Open):
            waits.append(clock.now)
        return told.do(effect)

    drive(EventsApi.begin.flow(told.events), clock, do)
    drive(EventsApi.next.flow(told.events), clock, do)
    assert waits[-1] - waits[-2] >= 2.5


def test_who_comes_back_before_the_first_event_is_told_of_all_since_the_stream_began(clock: Clock) -> None:
    told = Feed(clock, [b"id: evt_7\nretry: 1000\n\n"], [EVENT])
    drive(EventsApi.begin.flow(told.events), clock, told.do)
    drive(EventsApi.next.flow(told.events), clock, told.do)
    assert told.asked == [("http://broker/e?after=now", None), ("http://broker/e", "evt_7")]


def grant(**given: Any) -> Grant:
    token = Token(Secret("old"), float("inf"), float("inf"))
    return Grant(http_base_url="http://box/v1", ws_base_url=None, token=token, sandbox_id="sb", session_id="ssn", **given)


class Sockets:
    """A sandbox whose connections say these frames, each `apart` seconds after the one before, and then close with a code."""

    def __init__(self, clock: Clock, *connections: tuple[list[str], int], apart: float = HOUR) -> None:
        self.clock, self.connections, self.apart = clock, list(connections), apart
        self.starts: list[dict[str, Any]] = []
        self.dialled: list[float] = []
        self.talk: tuple[list[str], int] = ([], 1006)

    def do(self, effect: Any) -> Any:
        if isinstance(effect, Dial):
            self.dialled.append(self.clock.now)
            if not self.connections:
                raise errors.Unreachable("away", was_sent=False)
            frames, code = self.connections.pop(0)
            self.talk = [*frames], code
            return object()
        if isinstance(effect, Hear):
            if self.talk[0]:
                frame = self.talk[0].pop(0)
                self.clock.now += 0.0 if "ready" in frame else self.apart
                return frame
            raise Closed(self.talk[1], "")
        if isinstance(effect, Say):
            said = json.loads(effect.message)
            if said["type"] == "start":
                self.starts.append(said)
            return None
        if isinstance(effect, Send):
            assert effect.request.url.endswith("/refresh")
            told = {"token": f"new-{self.clock.now}", "expires_at": "2999-01-01T00:00:00Z", "refresh_before": "2999-01-01T00:00:00Z"}
            return Answer(200, {}, json.dumps(told).encode())
        assert isinstance(effect, HangUp)
        return None


def stream(start: dict[str, Any], **given: Any) -> ExecStreamApi:
    return ExecStreamApi(grant(**given), None, {"command_id": "c"} | start)


def to_the_end(one: ExecStreamApi, clock: Clock, sockets: Sockets) -> Any:
    drive(ExecStreamApi.begin.flow(one), clock, sockets.do)
    return drive(ExecStreamApi.wait.flow(one), clock, sockets.do)


QUIET = ([READY, '{"type": "pong"}', '{"type": "pong"}'], 1006)
EXIT = ([READY, '{"type": "exit", "exit_code": 0}'], 1000)


def test_a_quiet_command_outlives_any_number_of_losses(clock: Clock) -> None:
    one, sockets = stream({"command": "sleep"}), Sockets(clock, QUIET, QUIET, QUIET, QUIET, EXIT)
    assert to_the_end(one, clock, sockets).exit_code == 0
    assert one.reconnects == 4


def test_a_quiet_command_outlives_tokens_that_expire_far_apart(clock: Clock) -> None:
    expired = (QUIET[0], 4401)
    one, sockets = stream({"command": "sleep"}, broker=DOOR), Sockets(clock, expired, expired, expired, EXIT)
    assert to_the_end(one, clock, sockets).exit_code == 0


def test_a_token_that_is_refused_again_at_once_stays_refused(clock: Clock) -> None:
    expired = ([READY], 4401)
    one, sockets = stream({"command": "sleep"}, broker=DOOR), Sockets(clock, expired, expired, expired, EXIT)
    with pytest.raises(errors.TokenExpired):
        to_the_end(one, clock, sockets)
    assert len(sockets.dialled) == 2


def test_a_sandbox_that_closes_every_connection_at_once_is_dialled_less_and_less_often(clock: Clock) -> None:
    one, sockets = stream({"command": "sleep"}), Sockets(clock, *([([READY], 1006)] * 12), EXIT, apart=0.0)
    to_the_end(one, clock, sockets)
    assert sockets.dialled[-1] - sockets.dialled[-2] >= 2.5


def test_a_command_whose_start_nobody_answered_is_joined_and_not_started_again(clock: Clock) -> None:
    one, sockets = stream({"command": "rm a", "env": {"A": "b"}}), Sockets(clock, ([], 1006), ([], 1006), EXIT)
    assert to_the_end(one, clock, sockets).exit_code == 0
    assert ["command" in start for start in sockets.starts] == [True, False, False]
    assert all(start["command_id"] == "c" and "env" not in start for start in sockets.starts[1:])


def test_a_command_that_the_sandbox_does_not_know_after_a_loss_may_have_run(clock: Clock) -> None:
    gone = ([json.dumps(envelope("COMMAND_NOT_FOUND", type="error"))], 4404)
    one, sockets = stream({"command": "rm a"}), Sockets(clock, ([], 1006), gone, EXIT)
    with pytest.raises(errors.MayHaveRun) as told:
        to_the_end(one, clock, sockets)
    assert told.value.was_sent and not told.value.retryable
    # Who only joins is told that there is none.
    with pytest.raises(errors.CommandNotFound):
        to_the_end(stream({}), clock, Sockets(clock, ([], 1006), gone))


def test_a_command_that_was_refused_for_now_is_started_again(clock: Clock) -> None:
    busy = ([json.dumps(envelope("RATE_LIMITED", type="error"))], 1013)
    one, sockets = stream({"command": "rm a"}), Sockets(clock, busy, busy, EXIT, apart=0.0)
    assert to_the_end(one, clock, sockets).exit_code == 0
    assert ["command" in start for start in sockets.starts] == [True, True, True]


class Runs(SessionApi):
    def __init__(self) -> None:
        self._grant = grant()


RESULT = {"stdout": "", "stderr": "", "exit_code": 0, "timed_out": False, "truncated": False, "duration_ms": 1, "command_id": "c"}
OK = Answer(200, {}, json.dumps(RESULT).encode())
LOST = errors.Unreachable("cut", was_sent=True)
UNSENT = errors.Unreachable("refused", was_sent=False)


def refusal(status: int, code: str) -> Answer:
    return Answer(status, {}, json.dumps(envelope(code)).encode())


def exec_with(clock: Clock, *answers: Any, **asked: Any) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    left = list(answers)

    def do(effect: Any) -> Any:
        sent.append(json.loads(effect.request.body.blocking()))
        came = left.pop(0)
        if isinstance(came, BaseException):
            raise came
        return came

    try:
        drive(SessionApi.exec.flow(Runs(), "rm a", **asked), clock, do)
    finally:
        assert len({body["command_id"] for body in sent}) == 1
        clock.sent = sent  # type: ignore[attr-defined]
    return sent


@pytest.mark.parametrize("lost", [LOST, refusal(503, "PROVIDER_UNAVAILABLE"), Answer(502, {}, b"<html>")])
def test_a_lost_answer_is_asked_for_by_the_commands_id_alone(clock: Clock, lost: Any) -> None:
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


def test_an_interrupted_command_is_ended_with_one_try_that_waits_for_nothing(clock: Clock) -> None:
    flow = SessionApi.exec.flow(Runs(), "sleep 9", command_id="a/b c")
    assert isinstance(next(flow), Send)
    ending = flow.throw(Interrupted())
    assert isinstance(ending, Send)
    assert (ending.request.method, ending.request.url) == ("DELETE", "http://box/v1/processes/a%2Fb%20c")
    assert ending.request.timeout == 5.0
    with pytest.raises(Interrupted):
        flow.send(refusal(429, "RATE_LIMITED"))


def test_a_command_that_is_dropped_half_way_asks_for_nothing_more() -> None:
    flow = SessionApi.exec.flow(Runs(), "sleep 9")
    next(flow)
    flow.close()


@pytest.mark.parametrize("text", ["half \ud800 of one", "\udcff"])
def test_half_a_character_is_said_to_be_one_wherever_it_is_sent(text: str) -> None:
    from cobox.body import Upload

    with pytest.raises(errors.InvalidText, match="half a character") as refused:
        Upload.json({"text": text})
    assert isinstance(refused.value, ValueError)
    with pytest.raises(errors.InvalidText, match="half a character"):
        Upload(text)


def test_the_first_frame_of_a_stream_is_whole() -> None:
    talk = _ExecLine(grant(), {"command": "ls", "cwd": "/", "command_id": "c"}, 0, 0)
    assert talk.start_frame()["cwd"] == "/"
