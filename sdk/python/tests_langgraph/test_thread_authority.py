"""Tests of a broker that asks the deployment for thread access, while the deployment's own agents and users keep theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_servers import Broker, Deployment, free_port, last_words, running_broker, running_deployment

SERVICE_KEY = "the broker's own, for questions"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Deployment]]:
    folder, port = tmp_path_factory.mktemp("authority"), free_port()
    (folder / "service").write_text(SERVICE_KEY)
    config = f"""
[thread_authority]
url = "http://127.0.0.1:{port}"
service_key_file = "{folder / "service"}"
user_header = "x-cobox-user"
"""
    with running_broker(folder, config) as broker:
        (folder / "key").write_text(broker.key("my-deployment", "human") + "\n")
        settings = {"COBOX_URL": broker.url, "COBOX_API_KEY_FILE": str(folder / "key"), "EXAMPLE_SERVICE_KEY": SERVICE_KEY}
        with running_deployment(folder / "example", port, **settings) as deployment:
            yield broker, deployment


def test_a_person_can_use_their_own_threads_at_the_broker(servers: tuple[Broker, Deployment]) -> None:
    broker, deployment = servers
    thread = deployment.thread("ann")
    assert "OK" in last_words(deployment.run("ann", thread, "fix the leap years"))
    ann, bob = broker.key("ann", "human"), broker.key("bob", "human")
    seen = broker.run("exec", "-t", thread, "--", "cat", "leap.py", key=ann)
    assert "year % 400 == 0" in seen.stdout, seen.stderr
    refused = broker.run("exec", "-t", thread, "--", "cat", "leap.py", key=bob)
    assert refused.returncode != 0
    assert "has no thread" in refused.stderr


def test_addresses_are_the_brokers_if_nothing_is_relayed(servers: tuple[Broker, Deployment]) -> None:
    broker, deployment = servers
    thread = deployment.thread("ann")
    with deployment.as_("ann") as ann:
        session = ann.post("/v1/sandbox/sessions", json={"thread_id": thread, "mode": "ensure"}).json()
    assert session["sandbox"]["http_base_url"].startswith(broker.url)
    done = broker.run("exec", "-t", thread, "--", "echo", "direct", url=deployment.url, key="ann-secret")
    assert done.stdout == "direct\n", done.stderr
    with deployment.as_("bob") as bob:
        assert bob.post("/v1/sandbox/sessions", json={"thread_id": thread, "mode": "ensure"}).status_code == 404
