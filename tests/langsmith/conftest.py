"""A running broker for the unmodified LangSmith SDKs: where it is, and boxes that are gone after the test that made them."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator

import pytest
from langsmith.sandbox import Sandbox, SandboxClient

URL = os.environ["COBOX_URL"]
KEY = os.environ["COBOX_API_KEY"]


@pytest.fixture(scope="session")
def client() -> Iterator[SandboxClient]:
    # As the SDK finds it: the endpoint in the environment, and nothing else changed.
    os.environ["LANGSMITH_ENDPOINT"] = URL
    os.environ["LANGSMITH_API_KEY"] = KEY
    with SandboxClient() as client:
        yield client


@pytest.fixture
def box(client: SandboxClient) -> Iterator[Sandbox]:
    with client.sandbox() as box:
        yield box


@pytest.fixture(scope="module")
def shared_box(client: SandboxClient) -> Iterator[Sandbox]:
    with client.sandbox() as box:
        yield box


def fetch(url: str, method: str = "GET") -> tuple[int, bytes]:
    """A URL with no credential but what it carries itself."""
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.status, answer.read()
