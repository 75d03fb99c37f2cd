"""Fixtures: one broker and one deployment for all tests; each test creates its own threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_servers import Broker, Deployment, running_broker, running_deployment


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running_broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(scope="session")
def deployment_key(broker: Broker) -> str:
    return broker.key("my-deployment", "human")


@pytest.fixture(scope="session")
def deployment(broker: Broker, deployment_key: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment that relays the dataplane, so that its users need no other address."""
    folder = tmp_path_factory.mktemp("deployment") / "example"
    settings = {"COBOX_URL": broker.url, "COBOX_API_KEY": deployment_key, "COBOX_LANGGRAPH_RELAY": "{url}"}
    with running_deployment(folder, **settings) as deployment:
        yield deployment
        # No test may cause an unhandled exception, however its clients disconnect.
        assert "Exception in ASGI application" not in deployment.log.read_text()
