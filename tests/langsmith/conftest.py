"""Fixtures for the unmodified LangSmith SDKs: a client of the running broker, and boxes that are deleted after their test."""

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
    # The SDK reads its endpoint from the environment; nothing else is changed.
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
    """Fetches a URL without a credential other than the one in the URL."""
    request = urllib.request.Request(url, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.status, answer.read()
