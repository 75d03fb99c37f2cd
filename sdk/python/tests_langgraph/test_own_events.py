"""Tests that a run's own actions are recognized once, and those of other agents are not."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone
from typing import Any

from cobox import Secret
from cobox.langgraph.own_events import MAX_EXPECTED, OwnEvents, unverified_principal
from cobox.responses import SandboxEvent


def token(**claims: Any) -> Secret:
    return Secret(f"e30.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.c2ln")


def event(kind: str, principal: str = "bot", actor: str = "agent", **data: Any) -> SandboxEvent:
    return SandboxEvent("evt_1", kind, datetime.now(timezone.utc), "ssn_1", "sb_1", "sandbox", principal, actor, data)


def test_each_action_of_a_run_matches_one_event() -> None:
    own = OwnEvents(token(sub="bot"))
    own.expect("exec", "make")
    own.expect("exec", "make")
    own.expect("file_written", "/workspace/./a//b")
    assert own.claim(event("exec", command="make"))
    assert own.claim(event("exec", command="make"))
    assert not own.claim(event("exec", command="make")), "another run of the same principal did it"
    assert own.claim(event("file_written", path="/workspace/a/b"))
    assert not own.claim(event("file_removed", path="/workspace/a/b"))
    assert own.claim(event("connected"))


def test_the_same_action_by_another_principal_is_not_the_runs() -> None:
    own = OwnEvents(token(sub="bot"))
    own.expect("exec", "make")
    assert not own.claim(event("exec", principal="another-bot", command="make"))
    assert not own.claim(event("exec", actor="human", command="make"))
    assert not own.claim(event("connected", principal="another-bot"))
    assert not own.claim(event("idle", principal=""))
    assert own.claim(event("exec", command="make"))


def test_failed_actions_are_not_expected_and_the_number_is_bounded() -> None:
    own = OwnEvents(token(sub="bot"))
    own.expect("file_written", "/a")
    own.cancel("file_written", "/a")
    assert not own.claim(event("file_written", path="/a"))
    for number in range(MAX_EXPECTED + 10):
        own.expect("exec", str(number))
    assert not own.claim(event("exec", command="9"))
    assert own.claim(event("exec", command="10"))


def test_a_long_command_is_recognized_after_truncation() -> None:
    own = OwnEvents(token(sub="bot"))
    long = "echo " + "é" * 5000
    own.expect("exec", long)
    assert own.claim(event("exec", command=long.encode()[:1024].decode("utf-8", "ignore"), truncated=True))


def test_a_token_without_a_principal_matches_any() -> None:
    assert unverified_principal(token(sub="bot")) == "bot"
    for other in (Secret("cbo_opaque"), Secret("a.b.c"), Secret("e30.e30.c2ln"), token(sub=1)):
        assert unverified_principal(other) is None
    own = OwnEvents(Secret("cbo_opaque"))
    own.expect("exec", "make")
    assert own.claim(event("exec", principal="whoever", command="make"))
