"""Tests of flows without a network: the test inspects each requested effect and supplies its result."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from cobox import errors, settings
from cobox.call import BrokerEndpoint, Call, perform
from cobox.cursor import Cursor
from cobox.effects import AcquireLock, Flow, Response, SendRequest, Sleep
from cobox.grant import Grant, Token
from cobox.pending_input import FIRST_WINDOW_BYTES, MAX_UNACKED_BYTES, PendingInput
from cobox.request_body import RequestBody
from cobox.secret import Secret

ENDPOINT = BrokerEndpoint("http://broker", Secret("key"))


def run_flow(flow: Flow[Any], answer: Callable[[SendRequest], Any]) -> tuple[Any, list[float], list[SendRequest]]:
    """Runs a flow with the given responses; returns its result, the requested waits and the sent requests."""
    waits: list[float] = []
    sent: list[SendRequest] = []
    try:
        effect = next(flow)
        while True:
            if isinstance(effect, Sleep):
                waits.append(effect.seconds)
                effect = flow.send(None)
            elif isinstance(effect, AcquireLock):
                assert effect.lock.acquire(blocking=False)
                effect = flow.send(None)
            else:
                assert isinstance(effect, SendRequest)
                sent.append(effect)
                outcome = answer(effect)
                effect = flow.throw(outcome) if isinstance(outcome, Exception) else flow.send(outcome)
    except StopIteration as done:
        return done.value, waits, sent


def refusal(status: int, code: str, retry_after: str | None = None) -> Response:
    body = json.dumps({"error": {"code": code, "message": "m", "retryable": True, "request_id": "r"}}).encode()
    return Response(status, {} if retry_after is None else {"retry-after": retry_after}, body)


OK = Response(200, {}, b"{}")


@pytest.mark.parametrize(("status", "code"), [(423, "SANDBOX_STARTING"), (429, "RATE_LIMITED"), (503, "PROVIDER_UNAVAILABLE")])
def test_retry_after_is_honored_for_retryable_statuses(status: int, code: str) -> None:
    answers = iter([refusal(status, code, "3"), refusal(status, code, "0"), OK])
    _, waits, sent = run_flow(perform(ENDPOINT, Call("GET", "/x")), lambda send: next(answers))
    assert waits == [3.0, 0.1] and len(sent) == 3


def test_a_reached_quota_is_reported_without_retry() -> None:
    sent: list[SendRequest] = []

    def answer(send: SendRequest) -> Response:
        sent.append(send)
        return refusal(429, "QUOTA_EXCEEDED")

    with pytest.raises(errors.QuotaExceeded):
        run_flow(perform(ENDPOINT, Call("POST", "/x", json={})), answer)
    assert len(sent) == 1


def test_retries_are_limited_in_total_and_per_wait() -> None:
    flow, waits = perform(ENDPOINT, Call("POST", "/x", json={})), []

    def answer(send: SendRequest) -> Response:
        waits.append(send)
        return refusal(423, "SANDBOX_STARTING", "3600")

    with pytest.raises(errors.SandboxStarting):
        run_flow(flow, answer)
    # Ten seconds each, two minutes in all.
    assert len(waits) == 13


def test_requests_that_may_have_arrived_are_only_retried_if_idempotent() -> None:
    lost = errors.Unreachable("cut", was_sent=True)
    answers = iter([lost, lost, OK])
    assert len(run_flow(perform(ENDPOINT, Call("GET", "/x")), lambda send: next(answers))[2]) == 3
    with pytest.raises(errors.Unreachable):
        run_flow(perform(ENDPOINT, Call("POST", "/x", is_repeatable=False)), lambda send: lost)
    unsent = errors.Unreachable("refused", was_sent=False)
    answers = iter([unsent, OK])
    assert len(run_flow(perform(ENDPOINT, Call("POST", "/x", is_repeatable=False)), lambda send: next(answers))[2]) == 2
    with pytest.raises(errors.ProviderUnavailable):
        run_flow(perform(ENDPOINT, Call("POST", "/x", is_repeatable=False)), lambda send: refusal(503, "PROVIDER_UNAVAILABLE"))
    tries: list[int] = []
    with pytest.raises(errors.Unreachable):
        run_flow(perform(ENDPOINT, Call("GET", "/x")), lambda send: tries.append(1) or lost)
    assert len(tries) == 4
    with pytest.raises(errors.RateLimited):
        pieces = (piece for piece in [b"once"])
        run_flow(perform(ENDPOINT, Call("PUT", "/x", body=RequestBody(pieces))), lambda send: refusal(429, "RATE_LIMITED"))


def grant(**given: Any) -> Grant:
    token = Token(Secret("old"), float("inf"), float("inf"))
    return Grant(http_base_url="http://box/v1", ws_base_url=None, token=token, sandbox_id="sb", session_id="ssn", **given)


def test_an_expired_token_is_renewed_once_and_the_call_repeated() -> None:
    requests: list[tuple[str, str]] = []

    def answer(send: SendRequest) -> Response:
        secret = send.request.secret.expose() if send.request.secret else ""
        requests.append((send.request.url, secret))
        if send.request.url.endswith("/refresh"):
            tokens = {"token": "new", "expires_at": "2999-01-01T00:00:00Z", "refresh_before": "2999-01-01T00:00:00Z"}
            return Response(200, {}, json.dumps(tokens).encode())
        return OK if secret == "new" else refusal(401, "TOKEN_EXPIRED")

    box = grant(broker=ENDPOINT)
    run_flow(perform(box, Call("GET", "/x")), answer)
    assert requests == [
        ("http://box/v1/x", "old"),
        ("http://broker/v1/sandbox/sessions/ssn/refresh", "key"),
        ("http://box/v1/x", "new"),
    ]
    with pytest.raises(errors.TokenExpired):
        run_flow(perform(grant(), Call("GET", "/x")), lambda send: refusal(401, "TOKEN_EXPIRED"))
    forever: list[str] = []

    def refuse(send: SendRequest) -> Response:
        forever.append(send.request.url)
        return answer(send) if send.request.url.endswith("/refresh") else refusal(401, "TOKEN_EXPIRED")

    with pytest.raises(errors.TokenExpired):
        run_flow(perform(grant(broker=ENDPOINT), Call("GET", "/x")), refuse)
    assert len(forever) == 3


def test_an_expiring_token_is_still_used_while_the_broker_is_unreachable() -> None:
    import time

    box = grant(broker=ENDPOINT)
    box.token.expires = time.monotonic() + 5
    away = errors.Unreachable("away", was_sent=False)
    result, _, sent = run_flow(perform(box, Call("GET", "/x")), lambda send: away if "refresh" in send.request.url else OK)
    assert result is OK and sent[-1].request.secret == Secret("old")


def test_upkeep_continues_after_retryable_errors_and_stops_when_the_session_ends() -> None:
    box = grant(broker=ENDPOINT)
    box.token.refresh = 0.0
    answers = iter([refusal(500, "INTERNAL"), refusal(410, "SESSION_EXPIRED")])
    result, waits, _ = run_flow(box.keep_alive(), lambda send: next(answers))
    assert result is None and 5.0 in waits


def test_cursor_takes_each_byte_once_and_reports_unexplained_holes() -> None:
    cursor = Cursor("stdout", 0)
    assert [cursor.take(0, b"abc"), cursor.take(0, b"abc"), cursor.take(1, b"bcde")] == [b"abc", b"", b"de"]
    with pytest.raises(errors.OutputHole):
        cursor.take(6, b"g")
    assert (cursor.skip(5, 9), cursor.skip(3, 7), cursor.take(9, b"j"), cursor.at) == (4, 0, b"j", 10)


def test_input_is_kept_until_acknowledged_and_resent_with_a_small_window() -> None:
    pending = PendingInput()
    for _ in range(16):
        pending.push(bytes(FIRST_WINDOW_BYTES))

    def burst() -> list[int]:
        return [chunk[0] for chunk in iter(pending.next, None)]

    assert burst() == [1]
    pending.acknowledge(1)
    assert burst() == [2, 3]
    pending.acknowledge(3)
    assert burst() == [4, 5, 6, 7]
    assert pending.restart() == 0
    assert burst() == [4]
    pending.discard_refused()
    assert burst() == [5]
    pending.push(bytes(MAX_UNACKED_BYTES))
    assert not pending.has_capacity()
    pending.acknowledge(99)
    assert pending.has_capacity() and pending.is_all_sent()
    keys = PendingInput(max_age=-1)
    keys.push(b"old")
    assert keys.restart() == 3 and keys.next() is None


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    for name in list(os.environ):
        if name.startswith("COBOX_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def test_broker_discovery_prefers_arguments_then_environment_then_state_file(bare: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.SettingsMissing, match="cobox up"):
        settings.discover()
    folder = bare / "cobox"
    folder.mkdir()
    (folder / "agent_key").write_text("cbx_agent\n")
    state = {"url": "http://127.0.0.1:1", "api_key_file": str(folder / "api_key"), "agent_key_file": str(folder / "agent_key")}
    (folder / "broker.json").write_text(json.dumps(state))
    found = settings.discover()
    assert (found.url, found.key) == ("http://127.0.0.1:1", Secret("cbx_agent"))
    monkeypatch.setenv("COBOX_URL", "https://broker.example/")
    with pytest.raises(errors.SettingsMissing, match="API key is not set"):
        settings.discover()
    monkeypatch.setenv("COBOX_API_KEY_FILE", str(folder / "agent_key"))
    assert settings.discover().url == "https://broker.example"
    monkeypatch.setenv("COBOX_API_KEY", " cbx_env ")
    assert settings.discover().key == Secret("cbx_env")
    assert settings.discover("http://given:1", "cbx_given").key == Secret("cbx_given")
    assert settings.discover(data_dir=folder).key == Secret("cbx_agent")
    assert "cbx_" not in repr(settings.discover())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://user:pw@h", "http://h:0", "x", "http://h\n", "http://h?key=1"])
def test_invalid_urls_are_refused_without_quoting_them(bare: pathlib.Path, url: str) -> None:
    with pytest.raises(errors.SettingsMissing) as refused:
        settings.discover(url, "cbx_k")
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize("key", ["a b", "a\nb", "clé"])
def test_invalid_keys_are_refused_without_quoting_them(bare: pathlib.Path, key: str) -> None:
    with pytest.raises(errors.SettingsMissing) as refused:
        settings.discover("http://h", key)
    assert key not in str(refused.value)
