"""Boxes through the unmodified Python SDK: created, listed, stopped, started, changed and deleted, with one exception class per
error."""

from __future__ import annotations

import asyncio

import pytest
from conftest import KEY, URL, fetch
from langsmith.sandbox import (
    AsyncSandboxClient,
    ResourceNameConflictError,
    ResourceNotFoundError,
    Sandbox,
    SandboxAuthenticationError,
    SandboxClient,
    SandboxClientError,
    ValidationError,
)


def test_a_box_is_created_found_listed_and_deleted(client: SandboxClient) -> None:
    box = client.create_sandbox(name="from-python", timeout=60, idle_ttl_seconds=300, delete_after_stop_seconds=600)
    try:
        assert (box.name, box.status) == ("from-python", "ready")
        assert (box.idle_ttl_seconds, box.delete_after_stop_seconds) == (300, 600)
        assert box.dataplane_url and not box.dataplane_url.endswith("/")
        assert box.id
        for which in (box.name, box.id):
            assert client.get_sandbox(which).id == box.id
            assert client.get_sandbox_status(which).status == "ready"
        assert box.id in [each.id for each in client.list_sandboxes()]
        renamed = client.update_sandbox(box.name, new_name="renamed-by-python", idle_ttl_seconds=0)
        assert (renamed.name, renamed.idle_ttl_seconds) == ("renamed-by-python", None)
    finally:
        client.delete_sandbox(box.id or box.name)
    with pytest.raises(ResourceNotFoundError):
        client.get_sandbox("renamed-by-python")


def test_a_box_created_without_waiting_becomes_ready(client: SandboxClient) -> None:
    box = client.create_sandbox(wait_for_ready=False)
    try:
        assert client.wait_for_sandbox(box.name, timeout=60).status == "ready"
    finally:
        client.delete_sandbox(box.name)


def test_a_stopped_box_keeps_its_files_and_starts_on_request_or_use(box: Sandbox, client: SandboxClient) -> None:
    box.write("kept.txt", "still here")
    client.stop_sandbox(box.name)
    assert client.get_sandbox_status(box.name).status == "stopped"
    started = client.start_sandbox(box.name, timeout=60)
    assert (started.status, started.dataplane_url) == ("ready", box.dataplane_url)
    client.stop_sandbox(box.name)
    # Running the command starts the box.
    assert box.run("cat kept.txt").stdout == "still here"
    assert client.get_sandbox_status(box.name).status == "ready"


def test_each_error_has_its_own_class(client: SandboxClient, box: Sandbox) -> None:
    for missing in (client.get_sandbox, client.delete_sandbox, client.stop_sandbox, client.get_sandbox_status):
        with pytest.raises(ResourceNotFoundError):
            missing("no-such-box")
    with pytest.raises(ValidationError) as refused:
        client.create_sandbox(name="no spaces in it")
    assert refused.value.field == "name"
    with pytest.raises(ValidationError) as refused:
        client.create_sandbox(proxy_config={"rules": [{"name": "x", "match_hosts": ["a"]}]})  # type: ignore[typeddict-item]
    assert refused.value.field == "proxy_config"
    # The id does not change, and the fixture deletes by id.
    client.update_sandbox(box.name, new_name="taken-by-python")
    with client.sandbox() as other, pytest.raises(ResourceNameConflictError):
        client.update_sandbox(other.name, new_name="taken-by-python")
    with pytest.raises(SandboxClientError, match="taken-by-python is taken"):
        client.create_sandbox(name="taken-by-python")
    with SandboxClient(api_endpoint=f"{URL}/v2/sandboxes", api_key="cbx_nobody") as stranger, pytest.raises(SandboxAuthenticationError):
        stranger.list_sandboxes()


def test_the_older_prefix_serves_the_same_api(client: SandboxClient, box: Sandbox) -> None:
    with SandboxClient(api_endpoint=f"{URL}/v2/sandboxes", api_key=KEY) as older:
        found = older.get_sandbox(box.name)
        assert found.dataplane_url == box.dataplane_url
        assert found.run("echo same").stdout == "same\n"


def test_a_download_url_needs_no_other_credential(client: SandboxClient, box: Sandbox) -> None:
    box.write("/workspace/report.txt", "for the browser")
    link = client.generate_download_url(box.name, "/workspace/report.txt", expires_in_seconds=60)
    assert fetch(link.download_url) == (200, b"for the browser")
    assert link.expires_at


def test_ports_are_reported_as_unsupported(client: SandboxClient, box: Sandbox) -> None:
    with pytest.raises(SandboxClientError, match="ports of a sandbox can't be reached"):
        client.service(box.name, 8080)


def test_the_async_client_behaves_the_same() -> None:
    async def life() -> None:
        async with AsyncSandboxClient() as client, await client.sandbox() as box:
            await box.write("a.txt", "async")
            result = await box.run("cat a.txt; exit 3")
            assert (result.stdout, result.exit_code) == ("async", 3)
            handle = await box.run("for i in 1 2 3; do echo $i; done", wait=False)
            assert "".join([chunk.data async for chunk in handle]) == "1\n2\n3\n"
            assert (await client.get_sandbox(box.name)).status == "ready"

    asyncio.run(life())
