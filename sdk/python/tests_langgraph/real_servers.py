"""Starts a real broker with local sandboxes and a real `langgraph dev` server with the example."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "langgraph"
# Seconds for a program to start, on a busy machine with a debug build.
START_SECONDS = 60.0


def clean_env(**extra: str) -> dict[str, str]:
    """The environment without variables that refer to another broker or to the network."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("COBOX_", "LANGSMITH_", "LANGCHAIN_", "LANGGRAPH_"))}
    return inherited | {"LANGSMITH_TRACING": "false", "LANGGRAPH_CLI_NO_ANALYTICS": "1", "NO_PROXY": "127.0.0.1"} | extra


@dataclass
class Program:
    """A child process that ends with the tests."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_until(self, is_up: Any, what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not is_up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come up:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _start(argv: list[str], log: Path, env: dict[str, str], cwd: Path) -> Program:
    with log.open("wb") as out:
        return Program(subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, cwd=cwd), log)


@dataclass
class Broker:
    url: str
    operator_key: str
    cobox: str
    folder: Path
    log: Path

    def key(self, name: str, kind: str) -> str:
        answer = httpx.post(f"{self.url}/v1/keys", headers=bearer(self.operator_key), json={"name": name, "kind": kind}, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["api_key"])

    def run(self, *argv: str, url: str | None = None, key: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Runs the `cobox` command with a person's key."""
        env = clean_env(COBOX_URL=url or self.url, COBOX_API_KEY=key, XDG_DATA_HOME=str(self.folder / "nobody"))
        return subprocess.run([self.cobox, *argv], env=env, capture_output=True, text=True, timeout=60, **kwargs)


@contextmanager
def running_broker(folder: Path, config: str = "") -> Iterator[Broker]:
    cobox = os.environ.get("COBOX_BIN") or shutil.which("cobox")
    if not cobox:
        raise AssertionError("COBOX_BIN must name a built `cobox`, with `boxd` beside it")
    data = folder / "data"
    data.mkdir(mode=0o700)
    (data / "config.toml").write_text(config)
    # `up` rather than `serve`, because it stops its sandboxes on exit.
    argv = [cobox, "up", "--data-dir", str(data), "--listen", "127.0.0.1:0"]
    boxd = os.environ.get("COBOX_BOXD") or str(Path(cobox).parent / "boxd")
    program = _start(argv, folder / "log", clean_env(COBOX_BOXD=boxd, HOME=str(folder)), folder)
    try:
        state_file = data / "broker.json"
        program.wait_until(state_file.exists, "the broker")
        state = json.loads(state_file.read_text())
        yield Broker(state["url"], Path(state["api_key_file"]).read_text().strip(), cobox, folder, program.log)
    finally:
        program.stop()


def bearer(credential: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential}"}


@dataclass
class Deployment:
    """The example, served by `langgraph dev`."""

    url: str
    log: Path
    pid: int
    people: dict[str, str] = field(repr=False, default_factory=dict)

    def as_(self, name: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=bearer(self.people[name]), timeout=60, trust_env=False)

    def thread(self, name: str) -> str:
        with self.as_(name) as client:
            answer = client.post("/threads", json={})
            answer.raise_for_status()
            return str(answer.json()["thread_id"])

    def stream(
        self, name: str, thread: str | None, prompt: str, configurable: dict[str, Any] | None = None, **more: Any
    ) -> Iterator[tuple[str, Any]]:
        """Starts a run and yields its events as (name, data)."""
        body = {
            "assistant_id": "agent",
            "input": {"messages": [{"role": "user", "content": prompt}]},
            "stream_mode": ["custom", "values"],
            "config": {"configurable": configurable or {}},
        } | more
        path = f"/threads/{thread}/runs/stream" if thread else "/runs/stream"
        with self.as_(name) as client, client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
            kind = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: "):
                    yield kind, json.loads(line[6:])

    def run(self, *args: Any, **more: Any) -> list[tuple[str, Any]]:
        return list(self.stream(*args, **more))


def sandbox_events(events: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The sandbox events on a run's stream."""
    return [data["event"] for kind, data in events if kind == "custom" and data["type"] == "sandbox"]


def last_words(events: list[tuple[str, Any]]) -> str:
    """The agent's last message; empty if the run failed."""
    errors = [data for kind, data in events if kind == "error"]
    assert not errors, errors
    values = [data for kind, data in events if kind == "values"]
    content = values[-1]["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PEOPLE = {"ann": "ann-secret", "bob": "bob-secret"}


@contextmanager
def running_deployment(folder: Path, port: int | None = None, **settings: str) -> Iterator[Deployment]:
    """Serves a copy of the example: the server keeps its state in its working directory."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns(".langgraph_api", "__pycache__", ".env"))
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {name: value.replace("{url}", url) for name, value in settings.items()}
    argv = [str(Path(sys.executable).parent / "langgraph"), "dev", "--host", "127.0.0.1", "--port", str(port)]
    program = _start([*argv, "--no-browser", "--no-reload"], folder / "log", clean_env(**settings), folder)

    def is_up() -> bool:
        try:
            return httpx.get(f"{url}/ok", trust_env=False, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        program.wait_until(is_up, "langgraph dev")
        yield Deployment(url, program.log, program.process.pid, PEOPLE)
    finally:
        program.stop()
