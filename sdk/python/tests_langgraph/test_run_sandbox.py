"""Tests of the sandbox of a run without a LangGraph server: in a script, a test, or a deployment without a broker."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_servers import Broker, bearer

from cobox import AsyncCobox, Cobox, Session
from cobox.errors import CoboxError, SettingsMissing
from cobox.langgraph import SandboxRefused, asandbox_for, emit, sandbox_for
from cobox.langgraph import run_sandbox as run_sandbox_module


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No broker in the environment and no `cobox up` on this machine."""
    for name in ("COBOX_URL", "COBOX_API_KEY", "COBOX_API_KEY_FILE", "COBOX_DATAPLANE_PREFIXES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run_sandbox_module._blocking_broker.cache_clear()
    run_sandbox_module._async_broker.cache_clear()
    yield
    if run_sandbox_module._blocking_broker.cache_info().currsize and (client := run_sandbox_module._blocking_broker()) is not None:
        client.close()


def run_of(thread: str | None = None, **configurable: Any) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread or str(uuid.uuid4()), **configurable}}


def claims(session: Session) -> dict[str, Any]:
    body = session.token.expose().split(".")[1]
    return dict(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))


def supplied_fields(session: Session) -> dict[str, Any]:
    sandbox = {"id": session.sandbox_id, "http_base_url": session.http_base_url, "ws_base_url": session.ws_base_url}
    return {"session_id": session.id, "thread_id": session.thread_id, "sandbox": sandbox, "token": session.token.expose()}


def test_the_broker_finds_the_sandbox_of_a_thread(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COBOX_URL", broker.url)
    monkeypatch.setenv("COBOX_API_KEY", broker.key("finder", "agent"))
    config = run_of(langgraph_auth_user_id="ann", user_id="root")
    with sandbox_for(config) as box:
        box.files.write("/workspace/a", b"shared")

    async def again() -> tuple[str, bytes]:
        async with AsyncCobox() as cobox, await asandbox_for(config, cobox=cobox) as same:
            return same.sandbox_id, await same.files.read("/workspace/a")

    assert asyncio.run(again()) == (box.sandbox_id, b"shared")
    with Cobox() as cobox:
        tags = cobox.get_sandbox(box.sandbox_id).tags
    assert (tags["langgraph_user"], tags["scope"]) == ("ann", f"thread:{box.thread_id}")


def test_a_run_stays_an_agent_after_its_token_is_renewed(broker: Broker) -> None:
    with Cobox(broker.url, broker.key("person", "human")) as cobox, sandbox_for(run_of(), cobox=cobox) as box:
        before = claims(box)
        box.refresh()
        after = claims(box)
    assert before["jti"] != after["jti"]
    assert before["act"]["type"] == after["act"]["type"] == "agent"
    assert before["scope"] == after["scope"] == "fs:rw process shell:ro"


def test_a_run_stays_an_agent_after_its_token_was_revoked(broker: Broker) -> None:
    with Cobox(broker.url, broker.key("person", "human")) as cobox, sandbox_for(run_of(), cobox=cobox) as box:
        before = claims(box)
        revoke = f"{broker.url}/internal/tokens/revoke"
        httpx.post(revoke, json={"jti": before["jti"]}, headers=bearer(broker.operator_key), trust_env=False).raise_for_status()
        box.refresh()
        after = claims(box)
        assert box.exec("echo back").stdout == "back\n"
    assert before["jti"] != after["jti"]
    assert (after["act"]["type"], after["scope"]) == ("agent", before["scope"])


def test_another_users_sandbox_is_refused_unless_the_thread_is_shared(broker: Broker) -> None:
    config = run_of(langgraph_auth_user_id="ann")
    other_user = {"configurable": config["configurable"] | {"langgraph_auth_user_id": "bob"}}
    no_user = {"configurable": {"thread_id": config["configurable"]["thread_id"]}}
    key = broker.key("finder", "agent")

    async def awaited() -> None:
        async with AsyncCobox(broker.url, key) as cobox:
            with pytest.raises(SandboxRefused, match="another user"):
                await asandbox_for(other_user, cobox=cobox)

    with Cobox(broker.url, key) as cobox, sandbox_for(config, cobox=cobox) as box:
        with sandbox_for(config, cobox=cobox) as again:
            assert again.sandbox_id == box.sandbox_id
        with pytest.raises(SandboxRefused, match="another user"):
            sandbox_for(other_user, cobox=cobox)
        with pytest.raises(SandboxRefused, match="another user"):
            sandbox_for({"configurable": other_user["configurable"] | {"sandbox": {"sandbox_id": box.sandbox_id}}}, cobox=cobox)
        asyncio.run(awaited())
        with sandbox_for(other_user, cobox=cobox, shares_thread=True) as shared:
            assert shared.sandbox_id == box.sandbox_id
        # Without authenticated users there is nothing to distinguish.
        with sandbox_for(no_user, cobox=cobox) as same:
            assert same.sandbox_id == box.sandbox_id


def test_a_session_opened_by_a_person_at_the_broker_is_the_threads(broker: Broker) -> None:
    config = run_of(langgraph_auth_user_id="ann")
    with Cobox(broker.url, broker.key("person", "human")) as person, person.session(config["configurable"]["thread_id"]) as owner:
        with Cobox(broker.url, broker.key("finder", "agent")) as cobox, sandbox_for(config, cobox=cobox) as box:
            assert box.sandbox_id == owner.sandbox_id


def test_a_run_without_a_thread_has_no_sandbox(broker: Broker) -> None:
    with Cobox(broker.url, broker.key("finder", "agent")) as cobox:
        for config in (None, {}, {"configurable": {}}):
            with pytest.raises(SandboxRefused):
                sandbox_for(config, cobox=cobox)


def test_incomplete_settings_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COBOX_URL", "http://127.0.0.1:1")
    with pytest.raises(SettingsMissing):
        sandbox_for(run_of())


def test_without_a_broker_a_supplied_sandbox_must_be_under_a_prefix(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cobox(broker.url, broker.key("person", "human")) as cobox, cobox.session(str(uuid.uuid4())) as owner:
        supplied = supplied_fields(owner)
        config = run_of(owner.thread_id, sandbox=supplied)
        with pytest.raises(SandboxRefused, match="prefixes"):
            sandbox_for(config)
        with pytest.raises(SandboxRefused, match="prefixes"):
            sandbox_for(config, prefixes=[f"{broker.url}/dp/sb_another"])
        monkeypatch.setenv("COBOX_DATAPLANE_PREFIXES", f"https://other.example/v1 {broker.url}/dp")
        with sandbox_for(config) as box:
            assert box.exec("echo $((6 * 7))").stdout == "42\n"
        older = {"sandbox_id": owner.sandbox_id, "credential": supplied["token"], "dataplane_url": owner.http_base_url.removesuffix("/v1")}

        async def awaited() -> str:
            async with await asandbox_for(run_of(owner.thread_id, sandbox=older)) as box:
                return (await box.exec("echo older")).stdout

        assert asyncio.run(awaited()) == "older\n"
        for wrong in (
            run_of(sandbox=supplied),  # negotiated for another thread
            run_of(owner.thread_id, sandbox=supplied | {"expires_at": "2020-01-01T00:00:00Z"}),
            run_of(owner.thread_id, sandbox={"sandbox_id": owner.sandbox_id}),
            run_of(owner.thread_id),
        ):
            with pytest.raises(SandboxRefused):
                sandbox_for(wrong)


def test_with_a_broker_a_supplied_token_must_be_for_that_sandbox(broker: Broker) -> None:
    person = Cobox(broker.url, broker.key("person", "human"))
    agent = Cobox(broker.url, broker.key("finder", "agent"))
    with person, agent, person.session(str(uuid.uuid4())) as owner, person.session(str(uuid.uuid4())) as other:
        supplied = {"sandbox_id": owner.sandbox_id, "credential": owner.token.expose(), "dataplane_url": "http://127.0.0.1:1/"}
        with sandbox_for(run_of(sandbox=supplied), cobox=agent) as box:
            assert (box.sandbox_id, box.exec("echo handed over").stdout) == (owner.sandbox_id, "handed over\n")
            assert box.http_base_url == owner.http_base_url
            assert claims(box)["act"]["type"] == "agent"
        with pytest.raises(CoboxError):
            sandbox_for(run_of(sandbox=supplied | {"sandbox_id": other.sandbox_id}), cobox=agent)
        with pytest.raises(SandboxRefused):
            sandbox_for(run_of(sandbox={"sandbox_id": owner.sandbox_id}), cobox=agent)


def test_emit_outside_a_run_does_nothing() -> None:
    emit("exec", command="true", exit_code=0)
