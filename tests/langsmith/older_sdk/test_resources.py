"""Templates, volumes and pools through the unmodified langsmith 0.7.30, a version before snapshots."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from langsmith.sandbox import (
    ResourceAlreadyExistsError,
    ResourceInUseError,
    ResourceNameConflictError,
    ResourceNotFoundError,
    ResourceTimeoutError,
    SandboxClient,
    ValidationError,
    VolumeMountSpec,
)

URL = os.environ["COBOX_URL"]
IMAGE = "python:3.12-slim"


@pytest.fixture(scope="module")
def client() -> Iterator[SandboxClient]:
    with SandboxClient(api_endpoint=f"{URL}/v2/sandboxes", api_key=os.environ["COBOX_API_KEY"]) as client:
        yield client


def test_a_box_is_created_from_a_template_with_a_volume(client: SandboxClient) -> None:
    volume = client.create_volume("old-data", "64Mi")
    assert (volume.name, volume.size) == ("old-data", "64Mi")
    mounts = [VolumeMountSpec(volume_name="old-data", mount_path="/data")]
    template = client.create_template("old-python", IMAGE, cpu="500m", memory="512Mi", storage="1Gi", volume_mounts=mounts)
    assert (template.image, template.resources.cpu, template.resources.memory, template.resources.storage) == (IMAGE, "500m", "512Mi", "1Gi")
    assert template.volume_mounts == mounts
    try:
        with client.sandbox(template_name="old-python") as box:
            assert box.run("echo kept > /data/f && cat /data/f").stdout == "kept\n"
            with pytest.raises(ResourceInUseError):
                client.delete_volume("old-data")
            with client.sandbox(template_name="old-python") as other:
                assert other.run("cat /data/f").stdout == "kept\n"
        renamed = client.update_template("old-python", new_name="older-python")
        assert renamed.name == "older-python"
        assert "older-python" in [each.name for each in client.list_templates()]
        with pytest.raises(ResourceNotFoundError):
            client.get_template("old-python")
        with pytest.raises(ResourceNotFoundError):
            client.create_sandbox("old-python")
        assert client.update_volume("old-data", new_name="older-data").name == "older-data"
        with pytest.raises(ValidationError):
            client.update_volume("older-data", size="1Gi")
        assert "older-data" in [each.name for each in client.list_volumes()]
    finally:
        client.delete_template("older-python")
        client.delete_volume("older-data")
    for look in (lambda: client.get_template("older-python"), lambda: client.get_volume("older-data"), lambda: client.get_pool("none")):
        with pytest.raises(ResourceNotFoundError):
            look()


def test_invalid_values_are_refused_with_their_field(client: SandboxClient) -> None:
    with pytest.raises(ValidationError) as refused:
        client.create_template("no-image", "nobody/has:this")
    assert refused.value.field == "image" and "no container engine" in str(refused.value)
    with pytest.raises(ValidationError):
        client.create_template("too-large", IMAGE, memory="1000Gi")
    with pytest.raises(ValidationError):
        client.create_volume("odd", "lots")


def test_a_pool_hands_out_waiting_boxes(client: SandboxClient) -> None:
    client.create_template("pooled", IMAGE)
    pool = client.create_pool("warm", "pooled", replicas=2, timeout=60)
    try:
        assert (pool.name, pool.template_name, pool.replicas) == ("warm", "pooled", 2)
        with pytest.raises(ResourceAlreadyExistsError):
            client.create_pool("warm", "pooled", replicas=1)
        with pytest.raises(ResourceNotFoundError):
            client.create_pool("other", "no-such-template", replicas=1)
        with pytest.raises(ResourceInUseError):
            client.delete_template("pooled")
        with pytest.raises(ResourceTimeoutError):
            client.create_pool("late", "pooled", replicas=40, timeout=0)
        with pytest.raises(ResourceNotFoundError):
            client.get_pool("late")
        before = {each.name for each in client.list_sandboxes()}
        with client.sandbox(template_name="pooled") as box:
            assert box.name not in before
            assert box.run("echo warm").stdout == "warm\n"
        assert client.update_pool("warm", new_name="warmer", replicas=1).replicas == 1
        client.create_pool("second", "pooled", replicas=0)
        with pytest.raises(ResourceNameConflictError):
            client.update_pool("warmer", new_name="second")
        assert [each.name for each in client.list_pools()] == ["second", "warmer"]
    finally:
        for each in client.list_pools():
            client.delete_pool(each.name)
        client.delete_template("pooled")
