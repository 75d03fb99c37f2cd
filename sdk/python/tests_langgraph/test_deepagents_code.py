"""Tests of the sandbox provider that deepagents-code loads through its entry point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deepagents_code.integrations.sandbox_provider import SandboxNotFoundError
from deepagents_code.integrations.sandbox_registry import SandboxRegistry
from real_servers import Broker

from cobox import Cobox
from cobox.deepagents_code import CoboxProvider
from cobox.errors import NotFound


@pytest.fixture
def provider(broker: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CoboxProvider]:
    monkeypatch.setenv("COBOX_URL", broker.url)
    monkeypatch.setenv("COBOX_API_KEY", broker.key("coder", "agent"))
    found = SandboxRegistry.load(tmp_path / "config.toml").create_provider("cobox")
    assert isinstance(found, CoboxProvider)
    yield found
    if found._cobox is not None:
        found._cobox.close()


def test_a_sandbox_is_created_and_deleted(provider: CoboxProvider) -> None:
    backend = provider.get_or_create()
    assert backend.execute("echo $((6 * 7))").output.strip() == "42"
    provider.delete(sandbox_id=backend.id)
    with Cobox() as cobox, pytest.raises(NotFound):
        cobox.get_sandbox(backend.id)
    with pytest.raises(SandboxNotFoundError):
        provider.get_or_create(sandbox_id=backend.id)


def test_a_sandbox_is_found_again_by_its_id(provider: CoboxProvider) -> None:
    first = provider.get_or_create(name="coders-own")
    first.execute("echo kept > /workspace/kept")
    second = provider.get_or_create(sandbox_id=first.id)
    assert (second.id, second.execute("cat /workspace/kept").output.strip()) == (first.id, "kept")


def test_an_existing_sandbox_is_not_deleted_with_its_last_use(provider: CoboxProvider) -> None:
    with Cobox() as cobox:
        there = cobox.create_sandbox()
        first, second = provider.get_or_create(sandbox_id=there.id), provider.get_or_create(sandbox_id=there.id)
        assert first.execute("echo a > a").exit_code == 0
        provider.delete(sandbox_id=there.id)
        # The second user still has it.
        assert second.execute("cat a").output.strip() == "a"
        provider.delete(sandbox_id=there.id)
        assert cobox.get_sandbox(there.id).id == there.id
        # Without a use by this provider, the deletion is intended.
        provider.delete(sandbox_id=there.id)
        with pytest.raises(NotFound):
            cobox.get_sandbox(there.id)


def test_a_created_sandbox_is_deleted_with_its_last_use(provider: CoboxProvider) -> None:
    made = provider.get_or_create()
    joined = provider.get_or_create(sandbox_id=made.id)
    provider.delete(sandbox_id=made.id)
    assert (made.execute("true").exit_code, joined.execute("true").exit_code) == (0, 0)
    provider.delete(sandbox_id=made.id)
    with Cobox() as cobox, pytest.raises(NotFound):
        cobox.get_sandbox(made.id)


def test_a_joined_thread_keeps_its_sandbox(provider: CoboxProvider, broker: Broker) -> None:
    with Cobox(broker.url, broker.key("dan", "human")) as cobox, cobox.session("dans-thread") as dan:
        backend = provider.get_or_create(thread="dans-thread")
        assert backend.id == dan.sandbox_id
        provider.delete(sandbox_id=backend.id)
        assert dan.exec("echo still here").ok


def test_unknown_parameters_are_refused(provider: CoboxProvider) -> None:
    with pytest.raises(TypeError):
        provider.get_or_create(gpus=8)
