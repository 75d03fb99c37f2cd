"""Snapshots through the unmodified Python SDK: of a running box, and of an image provided by the operator."""

from __future__ import annotations

import pytest
from langsmith.sandbox import ResourceNotFoundError, Sandbox, SandboxClient, SandboxClientError, ValidationError


def test_a_box_starts_from_a_snapshot_of_another(client: SandboxClient, box: Sandbox) -> None:
    box.write("/workspace/tree/leaf.txt", "from before")
    snapshot = client.capture_snapshot(box.name, "of-a-box")
    try:
        assert (snapshot.status, snapshot.source_sandbox_id, snapshot.tags) == ("ready", box.id, ["latest"])
        box.write("/workspace/tree/leaf.txt", "changed since")
        for made in (
            client.create_sandbox(snapshot_id=snapshot.id),
            client.create_sandbox(snapshot_name="of-a-box", mem_bytes=512 << 20, vcpus=1),
        ):
            try:
                assert made.snapshot_id == snapshot.id
                assert made.read("/workspace/tree/leaf.txt") == b"from before"
            finally:
                client.delete_sandbox(made.name)
        assert snapshot.id in [each.id for each in client.list_snapshots(name_contains="a-box")]
        tagged = client.capture_snapshot(box.name, "of-a-box", tag="v2")
        assert client.get_snapshot("of-a-box:v2").id == tagged.id
        client.delete_snapshot(tagged.id)
    finally:
        client.delete_snapshot(snapshot.id)
    with pytest.raises((ResourceNotFoundError, SandboxClientError)):
        client.create_sandbox(snapshot_id=snapshot.id)


def test_a_snapshot_of_an_image_needs_one_the_operator_provides(client: SandboxClient) -> None:
    snapshot = client.create_snapshot("python-three", "python:3", 1 << 30)
    try:
        assert (snapshot.status, snapshot.docker_image, snapshot.fs_capacity_bytes) == ("ready", "python:3", 1 << 30)
        assert snapshot.tags == ["3"]
        assert client.get_snapshot("python-three:3").id == snapshot.id
        box = client.create_sandbox(snapshot_name="python-three")
        try:
            assert box.run("echo it runs").stdout == "it runs\n"
        finally:
            client.delete_sandbox(box.name)
    finally:
        client.delete_snapshot(snapshot.id)
    with pytest.raises(ValidationError, match="no container engine"):
        client.create_snapshot("nothing", "nobody/has:this", 1 << 30)


def test_missing_and_oversized_resources_are_refused(client: SandboxClient) -> None:
    with pytest.raises(ResourceNotFoundError):
        client.get_snapshot("no-such-snapshot")
    with pytest.raises(ResourceNotFoundError):
        client.delete_snapshot("no-such-snapshot")
    with pytest.raises(ResourceNotFoundError):
        client.create_sandbox(snapshot_name="no-such-snapshot")
    with pytest.raises(ValidationError, match="resources.cpus"):
        client.create_sandbox(vcpus=1000)
