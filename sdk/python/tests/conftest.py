"""Fixtures: a real broker with the local provider, and a wrapper that lets one test cover the blocking and the async client."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cutting_proxy import CuttingProxy

from cobox import AsyncCobox, Cobox

REPO = pathlib.Path(__file__).resolve().parents[3]
START_SECONDS = 60
_numbers = itertools.count()


def program() -> pathlib.Path:
    if named := os.environ.get("COBOX_BIN"):
        return pathlib.Path(named)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or REPO / "target")
    built = [p for p in (*target.glob("*/debug/cobox"), *target.glob("*/release/cobox")) if (p.parent / "boxd").exists()]
    if not built:
        pytest.exit("no cobox to test with: build it (`cargo build -p cobox-cli -p cobox-boxd`) or set COBOX_BIN to its path", returncode=2)
    return max(built, key=lambda p: p.stat().st_mtime)


class Broker:
    """`cobox up` in a temporary directory."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # All tests share a few principals, which would exceed the rate limits.
        (folder / "config.toml").write_text("[rate_limits]\nrequests_per_second = 0\nupkeep_per_second = 0\nfailures_per_minute = 0\n")
        env = {name: value for name, value in os.environ.items() if not name.startswith("COBOX_")}
        boxd = program().parent / "boxd"
        command = [program(), "up", "--data-dir", folder, "--listen", "127.0.0.1:0"]
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(command, env=env | {"COBOX_BOXD": str(boxd), "HOME": str(folder)}, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        state_file = folder / "broker.json"
        while not state_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the broker did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)
        self.url: str = json.loads(state_file.read_text())["url"]
        self.operator_key = (folder / "api_key").read_text().strip()
        self.agent_key = (folder / "agent_key").read_text().strip()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    # Not pytest's own directory: socket paths are limited to 108 bytes.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="cobox-py-"))
    running = None
    try:
        running = Broker(folder)
        yield running
    finally:
        if running is not None:
            running.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def thread() -> str:
    return f"thread-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(scope="session")
def operator(broker: Broker) -> Iterator[Cobox]:
    with Cobox(broker.url, broker.operator_key) as client:
        yield client


@pytest.fixture
def human(operator: Cobox) -> Any:
    """The key of a new human principal."""
    return operator.create_key(f"human-{next(_numbers)}", "human").api_key


class ClientKind:
    """One of the two clients. `do` waits for an awaitable and returns other values unchanged, so that a test reads the same for
    both."""

    def __init__(self, name: str) -> None:
        self.name, self.is_async = name, name == "asyncio"
        self._loop = asyncio.new_event_loop() if self.is_async else None
        self._closing: list[Any] = []

    def client(self, url: str, key: Any) -> Any:
        client = AsyncCobox(url, key) if self.is_async else Cobox(url, key)
        self._closing.append(client)
        return client

    def session(self, client: Any, thread_id: str, **options: Any) -> Any:
        session = self.do(client.session(thread_id, **options))
        self._closing.append(session)
        return session

    def do(self, value: Any) -> Any:
        if self._loop is None:
            return value

        async def wait() -> Any:
            return await value

        return self._loop.run_until_complete(wait())

    def each(self, stream: Any) -> Iterator[Any]:
        while (item := self.do(stream.next())) is not None:
            yield item

    def finish(self) -> None:
        for value in reversed(self._closing):
            self.do(value.close())
        if self._loop is not None:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> Iterator[ClientKind]:
    kind = ClientKind(request.param)
    try:
        yield kind
    finally:
        kind.finish()


@pytest.fixture
def client(broker: Broker, kind: ClientKind) -> Any:
    return kind.client(broker.url, broker.agent_key)


@pytest.fixture
def box(kind: ClientKind, client: Any, thread: str) -> Any:
    """A session of the agent with its own sandbox, released after the test."""
    return kind.session(client, thread, release=True)


@pytest.fixture
def proxy(broker: Broker) -> Iterator[CuttingProxy]:
    """A proxy to the broker that cuts connections."""
    proxy = CuttingProxy(broker.url)
    try:
        yield proxy
    finally:
        proxy.close()
