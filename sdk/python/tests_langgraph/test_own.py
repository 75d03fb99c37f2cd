"""What a run did itself is told once, and what any other agent did is told too."""

from __future__ import annotations

import base64
import json
from datetime import datetime, timezone
from typing import Any

from cobox import Secret
from cobox.answers import SandboxEvent
from cobox.langgraph.own import MAX_EXPECTED, Own, principal_of


def token(**claims: Any) -> Secret:
    return Secret(f"e30.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.c2ln")


def event(kind: str, principal: str = "bot", actor: str = "agent", **data: Any) -> SandboxEvent:
    return SandboxEvent("evt_1", kind, datetime.now(timezone.utc), "ssn_1", "sb_1", "sandbox", principal, actor, data)


def test_each_deed_of_the_run_is_its_own_once() -> None:
    own = Own(token(sub="bot"))
    own.expect("exec", "make")
    own.expect("exec", "make")
    own.expect("file_written", "/workspace/./a//b")
    assert own.has(event("exec", command="make"))
    assert own.has(event("exec", command="make"))
    assert not own.has(event("exec", command="make")), "another run of the same principal did it"
    assert own.has(event("file_written", path="/workspace/a/b"))
    assert not own.has(event("file_removed", path="/workspace/a/b"))
    assert own.has(event("connected"))


def test_what_another_agent_or_a_person_does_is_theirs_though_it_is_the_same() -> None:
    own = Own(token(sub="bot"))
    own.expect("exec", "make")
    assert not own.has(event("exec", principal="another-bot", command="make"))
    assert not own.has(event("exec", actor="human", command="make"))
    assert not own.has(event("connected", principal="another-bot"))
    assert not own.has(event("idle", principal=""))
    assert own.has(event("exec", command="make"))


def test_what_was_not_done_is_not_waited_for_and_no_more_than_so_much_is() -> None:
    own = Own(token(sub="bot"))
    own.expect("file_written", "/a")
    own.failed("file_written", "/a")
    assert not own.has(event("file_written", path="/a"))
    for number in range(MAX_EXPECTED + 10):
        own.expect("exec", str(number))
    assert not own.has(event("exec", command="9"))
    assert own.has(event("exec", command="10"))


def test_a_long_command_is_known_again_though_the_broker_cuts_it() -> None:
    own = Own(token(sub="bot"))
    long = "echo " + "é" * 5000
    own.expect("exec", long)
    assert own.has(event("exec", command=long.encode()[:1024].decode("utf-8", "ignore"), truncated=True))


def test_a_token_that_says_nothing_is_nobodys() -> None:
    assert principal_of(token(sub="bot")) == "bot"
    for other in (Secret("cbo_opaque"), Secret("a.b.c"), Secret("e30.e30.c2ln"), token(sub=1)):
        assert principal_of(other) is None
    own = Own(Secret("cbo_opaque"))
    own.expect("exec", "make")
    assert own.has(event("exec", principal="whoever", command="make"))
