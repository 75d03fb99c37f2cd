"""Tests that an agent writing through this package and a person saving in a folder synced by `cobox sync` lose no changes."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Broker, program

SAVES = 40
SEED = 20


class Sync:
    """`cobox sync` of a folder with a thread's sandbox, with the agent's key."""

    def __init__(self, broker: Broker, thread: str, directory: pathlib.Path) -> None:
        self.folder = directory / "folder"
        self.folder.mkdir()
        env = {name: value for name, value in os.environ.items() if not name.startswith(("COBOX_", "XDG_"))}
        self.env = env | {"COBOX_URL": broker.url, "COBOX_API_KEY": broker.agent_key, "HOME": str(directory)}
        command = [program(), "--json", "sync", self.folder, f"{thread}:"]
        self.process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if json.loads(line).get("phase") == "watching":
                break
        # Drains the output so that the process never blocks on a full pipe.
        self.draining = threading.Thread(target=self.process.stdout.read)
        self.draining.start()

    def ask(self, *args: str) -> Any:
        command = [program(), "--json", "sync", *args, "--sync", self.folder]
        return json.loads(subprocess.run(command, env=self.env, check=True, capture_output=True, text=True).stdout)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)
        self.draining.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def sync(broker: Broker, box: Any, thread: str, tmp_path: pathlib.Path) -> Iterator[Sync]:
    sync = Sync(broker, thread, tmp_path)
    try:
        yield sync
    finally:
        sync.stop()


def test_concurrent_writes_of_agent_and_person_reach_both_sides(kind: Any, box: Any, sync: Sync) -> None:
    """Both write in the same folders, each to different files; the last save of each file must be on both sides."""
    rng = random.Random(SEED)
    person_files: dict[str, str] = {}

    def person() -> None:
        for number in range(SAVES):
            name = f"d{rng.randrange(3)}/person-{rng.randrange(6)}.txt"
            path = sync.folder / name
            path.parent.mkdir(exist_ok=True)
            person_files[name] = f"person {number}\n" * 200
            path.write_text(person_files[name])

    working = threading.Thread(target=person)
    working.start()
    agent, agent_files = random.Random(SEED + 1), {}
    for number in range(SAVES):
        name = f"d{agent.randrange(3)}/agent-{agent.randrange(6)}.txt"
        agent_files[name] = f"agent {number}\n" * 200
        kind.do(box.files.write(f"/workspace/{name}", agent_files[name]))
    working.join()
    status = sync.ask("flush", "--wait")
    assert status["conflicts"] == []
    for name, text in (person_files | agent_files).items():
        assert (sync.folder / name).read_text() == text, name
        assert kind.do(box.files.read_text(f"/workspace/{name}")) == text, name


def test_a_file_changed_on_both_sides_is_kept_in_both_versions(kind: Any, box: Any, sync: Sync) -> None:
    (sync.folder / "shared.txt").write_text("both have this\n")
    sync.ask("flush", "--wait")
    sync.ask("pause")
    (sync.folder / "shared.txt").write_text("the person's\n")
    kind.do(box.files.write("/workspace/shared.txt", "the agent's\n"))
    sync.ask("resume")
    status = sync.ask("flush", "--wait")
    assert [conflict["path"] for conflict in status["conflicts"]] == ["shared.txt"]
    assert (sync.folder / "shared.txt").read_text() == "the person's\n"
    assert kind.do(box.files.read_text("/workspace/shared.txt")) == "the agent's\n"
