"""Decisions without a network: flows are asked what they want done and told what came of it."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from cobox import errors, settings
from cobox.body import Upload
from cobox.call import BrokerDoor, Call, perform
from cobox.cursor import FIRST_WINDOW_BYTES, MAX_UNACKED_BYTES, Cursor, Typing
from cobox.flow import Acquire, Answer, Flow, Pause, Send
from cobox.grant import Grant, Token
from cobox.secret import Secret

DOOR = BrokerDoor("http://broker", Secret("key"))


def drive(flow: Flow[Any], answer: Callable[[Send], Any]) -> tuple[Any, list[float], list[Send]]:
    """Runs a flow on answers made up here; gives its result, the waits it asked for and what it sent."""
    waits: list[float] = []
    sent: list[Send] = []
    try:
        effect = next(flow)
        while True:
            if isinstance(effect, Pause):
                waits.append(effect.seconds)
                effect = flow.send(None)
            elif isinstance(effect, Acquire):
                assert effect.lock.acquire(blocking=False)
                effect = flow.send(None)
            else:
                assert isinstance(effect, Send)
                sent.append(effect)
                came = answer(effect)
                effect = flow.throw(came) if isinstance(came, Exception) else flow.send(came)
    except StopIteration as done:
        return done.value, waits, sent


def refusal(status: int, code: str, retry_after: str | None = None) -> Answer:
    body = json.dumps({"error": {"code": code, "message": "m", "retryable": True, "request_id": "r"}}).encode()
    return Answer(status, {} if retry_after is None else {"retry-after": retry_after}, body)


OK = Answer(200, {}, b"{}")


@pytest.mark.parametrize(("status", "code"), [(423, "SANDBOX_STARTING"), (429, "RATE_LIMITED"), (503, "PROVIDER_UNAVAILABLE")])
def test_not_now_is_waited_out_as_long_as_it_was_said(status: int, code: str) -> None:
    answers = iter([refusal(status, code, "3"), refusal(status, code, "0"), OK])
    _, waits, sent = drive(perform(DOOR, Call("GET", "/x")), lambda send: next(answers))
    assert waits == [3.0, 0.1] and len(sent) == 3


def test_a_reached_limit_is_reported_at_once() -> None:
    sent: list[Send] = []

    def answer(send: Send) -> Answer:
        sent.append(send)
        return refusal(429, "QUOTA_EXCEEDED")

    with pytest.raises(errors.QuotaExceeded):
        drive(perform(DOOR, Call("POST", "/x", json={})), answer)
    assert len(sent) == 1


def test_waiting_has_an_end_and_an_absurd_wait_is_cut() -> None:
    flow, waits = perform(DOOR, Call("POST", "/x", json={})), []

    def answer(send: Send) -> Answer:
        waits.append(send)
        return refusal(423, "SANDBOX_STARTING", "3600")

    with pytest.raises(errors.SandboxStarting):
        drive(flow, answer)
    # Ten seconds each, two minutes in all.
    assert len(waits) == 13


def test_what_may_have_been_done_is_only_repeated_where_that_is_safe() -> None:
    lost = errors.Unreachable("cut", was_sent=True)
    answers = iter([lost, lost, OK])
    assert len(drive(perform(DOOR, Call("GET", "/x")), lambda send: next(answers))[2]) == 3
    with pytest.raises(errors.Unreachable):
        drive(perform(DOOR, Call("POST", "/x", is_repeatable=False)), lambda send: lost)
    unsent = errors.Unreachable("refused", was_sent=False)
    answers = iter([unsent, OK])
    assert len(drive(perform(DOOR, Call("POST", "/x", is_repeatable=False)), lambda send: next(answers))[2]) == 2
    with pytest.raises(errors.ProviderUnavailable):
        drive(perform(DOOR, Call("POST", "/x", is_repeatable=False)), lambda send: refusal(503, "PROVIDER_UNAVAILABLE"))
    tries: list[int] = []
    with pytest.raises(errors.Unreachable):
        drive(perform(DOOR, Call("GET", "/x")), lambda send: tries.append(1) or lost)
    assert len(tries) == 4
    with pytest.raises(errors.RateLimited):
        pieces = (piece for piece in [b"once"])
        drive(perform(DOOR, Call("PUT", "/x", body=Upload(pieces))), lambda send: refusal(429, "RATE_LIMITED"))


def grant(**given: Any) -> Grant:
    token = Token(Secret("old"), float("inf"), float("inf"))
    return Grant(http_base_url="http://box/v1", ws_base_url=None, token=token, sandbox_id="sb", session_id="ssn", **given)


def test_an_expired_token_is_replaced_once_and_the_call_made_again() -> None:
    asked: list[tuple[str, str]] = []

    def answer(send: Send) -> Answer:
        secret = send.request.secret.expose() if send.request.secret else ""
        asked.append((send.request.url, secret))
        if send.request.url.endswith("/refresh"):
            told = {"token": "new", "expires_at": "2999-01-01T00:00:00Z", "refresh_before": "2999-01-01T00:00:00Z"}
            return Answer(200, {}, json.dumps(told).encode())
        return OK if secret == "new" else refusal(401, "TOKEN_EXPIRED")

    box = grant(broker=DOOR)
    drive(perform(box, Call("GET", "/x")), answer)
    assert asked == [
        ("http://box/v1/x", "old"),
        ("http://broker/v1/sandbox/sessions/ssn/refresh", "key"),
        ("http://box/v1/x", "new"),
    ]
    with pytest.raises(errors.TokenExpired):
        drive(perform(grant(), Call("GET", "/x")), lambda send: refusal(401, "TOKEN_EXPIRED"))
    forever: list[str] = []

    def refuse(send: Send) -> Answer:
        forever.append(send.request.url)
        return answer(send) if send.request.url.endswith("/refresh") else refusal(401, "TOKEN_EXPIRED")

    with pytest.raises(errors.TokenExpired):
        drive(perform(grant(broker=DOOR), Call("GET", "/x")), refuse)
    assert len(forever) == 3


def test_a_token_is_worth_a_try_while_the_broker_is_away() -> None:
    import time

    box = grant(broker=DOOR)
    box.token.expires = time.monotonic() + 5
    away = errors.Unreachable("away", was_sent=False)
    result, _, sent = drive(perform(box, Call("GET", "/x")), lambda send: away if "refresh" in send.request.url else OK)
    assert result is OK and sent[-1].request.secret == Secret("old")


def test_upkeep_goes_on_after_passing_failures_and_stops_when_the_session_is_over() -> None:
    box = grant(broker=DOOR)
    box.token.refresh = 0.0
    answers = iter([refusal(500, "INTERNAL"), refusal(410, "SESSION_EXPIRED")])
    result, waits, _ = drive(box.keep(), lambda send: next(answers))
    assert result is None and 5.0 in waits


def test_each_byte_is_taken_once_and_a_hole_is_an_error_unless_a_gap_explained_it() -> None:
    cursor = Cursor("stdout", 0)
    assert [cursor.take(0, b"abc"), cursor.take(0, b"abc"), cursor.take(1, b"bcde")] == [b"abc", b"", b"de"]
    with pytest.raises(errors.OutputHole):
        cursor.take(6, b"g")
    assert (cursor.skip(5, 9), cursor.skip(3, 7), cursor.take(9, b"j"), cursor.at) == (4, 0, b"j", 10)


def test_input_is_kept_until_acknowledged_and_a_new_connection_gets_a_little_first() -> None:
    typing = Typing()
    for _ in range(16):
        typing.push(bytes(FIRST_WINDOW_BYTES))

    def burst() -> list[int]:
        return [typed[0] for typed in iter(typing.next, None)]

    assert burst() == [1]
    typing.acked(1)
    assert burst() == [2, 3]
    typing.acked(3)
    assert burst() == [4, 5, 6, 7]
    assert typing.start_over() == 0
    assert burst() == [4]
    typing.refused()
    assert burst() == [5]
    typing.push(bytes(MAX_UNACKED_BYTES))
    assert not typing.has_room()
    typing.acked(99)
    assert typing.has_room() and typing.is_all_sent()
    keys = Typing(max_age=-1)
    keys.push(b"old")
    assert keys.start_over() == 3 and keys.next() is None


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    for name in list(os.environ):
        if name.startswith("COBOX_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_the_broker_is_found_where_it_was_named_in_that_order(bare: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.SettingsMissing, match="cobox up"):
        settings.find()
    folder = bare / "cobox"
    folder.mkdir()
    (folder / "agent_key").write_text("cbx_agent\n")
    note = {"url": "http://127.0.0.1:1", "api_key_file": str(folder / "api_key"), "agent_key_file": str(folder / "agent_key")}
    (folder / "broker.json").write_text(json.dumps(note))
    found = settings.find()
    assert (found.url, found.key) == ("http://127.0.0.1:1", Secret("cbx_agent"))
    monkeypatch.setenv("COBOX_URL", "https://broker.example/")
    with pytest.raises(errors.SettingsMissing, match="API key is not set"):
        settings.find()
    monkeypatch.setenv("COBOX_API_KEY_FILE", str(folder / "agent_key"))
    assert settings.find().url == "https://broker.example"
    monkeypatch.setenv("COBOX_API_KEY", " cbx_env ")
    assert settings.find().key == Secret("cbx_env")
    assert settings.find("http://given:1", "cbx_given").key == Secret("cbx_given")
    assert settings.find(data_dir=folder).key == Secret("cbx_agent")
    assert "cbx_" not in repr(settings.find())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://user:pw@h", "http://h:0", "x", "http://h\n", "http://h?key=1"])
def test_what_is_no_url_is_refused_without_repeating_it(bare: pathlib.Path, url: str) -> None:
    with pytest.raises(errors.SettingsMissing) as refused:
        settings.find(url, "cbx_k")
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize("key", ["a b", "a\nb", "clé"])
def test_what_is_no_key_is_refused_without_repeating_it(bare: pathlib.Path, key: str) -> None:
    with pytest.raises(errors.SettingsMissing) as refused:
        settings.find("http://h", key)
    assert key not in str(refused.value)
