"""Tests that a person and an agent of a real deployment work in one sandbox."""

from __future__ import annotations

import threading

import httpx
import pytest
from real_servers import Broker, Deployment, bearer, clean_env, last_words, sandbox_events
from terminal import Terminal


def test_the_agents_file_appears_in_the_persons_shell(deployment: Deployment, broker: Broker) -> None:
    thread, key = deployment.thread("ann"), broker.key("ann", "human")
    with Terminal([broker.cobox, "shell", "-t", thread], clean_env(COBOX_URL=broker.url, COBOX_API_KEY=key)) as shell:
        shell.wait_for("workspace")
        events = deployment.run("ann", thread, "fix the leap years")
        assert "OK" in last_words(events)
        shell.type("cat leap.py; echo shown-$((6 * 7))\n")
        shell.wait_for("shown-42")
        assert "year % 400 == 0" in shell.shown


def test_the_agent_reads_the_persons_edit(deployment: Deployment, broker: Broker) -> None:
    thread, key = deployment.thread("ann"), broker.key("ann", "human")
    deployment.run("ann", thread, "write /workspace/plan.txt the agent's plan")
    edited = broker.run("exec", "-t", thread, "--", "sed", "-i", "s/agent's/person's/", "/workspace/plan.txt", key=key)
    assert edited.returncode == 0, edited.stderr
    assert "the person's plan" in last_words(deployment.run("ann", thread, "read /workspace/plan.txt"))


def test_each_agent_action_is_on_the_runs_stream_once(deployment: Deployment) -> None:
    thread = deployment.thread("ann")
    reported = [e for e in sandbox_events(deployment.run("ann", thread, "fix the leap years")) if e["actor"] == "agent"]
    assert [(e["type"], e.get("path") or e.get("command"), e.get("exit_code")) for e in reported] == [
        ("connected", None, None),
        ("file_written", "/workspace/leap.py", None),
        ("file_written", "/workspace/test_leap.py", None),
        ("exec", "cd /workspace && python3 test_leap.py", 1),
        ("file_written", "/workspace/leap.py", None),
        ("exec", "cd /workspace && python3 test_leap.py", 0),
    ]
    assert len({(e["sandbox_id"], e["session_id"]) for e in reported}) == 1


@pytest.mark.parametrize(("name", "kind"), [("bystander", "human"), ("another-bot", "agent")])
def test_actions_of_others_during_a_run_are_on_its_stream(deployment: Deployment, broker: Broker, name: str, kind: str) -> None:
    thread, key = deployment.thread("ann"), broker.key(name, kind)
    is_seen = threading.Event()

    def work() -> None:
        # Repeated until the run's stream shows it: following starts a moment after the run.
        while not is_seen.is_set():
            broker.run("exec", "-t", thread, "--", "true", key=key)
        broker.run("exec", "-t", thread, "--", "touch", "/workspace/go", key=key)

    person = threading.Thread(target=work)
    try:
        events = []
        for event in deployment.stream("ann", thread, "run while [ ! -e /workspace/go ]; do sleep 0.05; done; echo gone on"):
            events.append(event)
            for reported in sandbox_events([event]):
                if reported["type"] == "connected" and "principal" not in reported:
                    person.start()
                if reported["type"] == "exec" and reported.get("principal") == name:
                    is_seen.set()
        assert is_seen.is_set()
        assert "gone on" in last_words(events)
    finally:
        is_seen.set()
        person.join(60)


def test_a_run_is_an_agent_even_if_the_key_is_a_persons(deployment: Deployment, broker: Broker) -> None:
    thread = deployment.thread("ann")
    deployment.run("ann", thread, "run true")
    records = httpx.get(f"{broker.url}/v1/audit?limit=200", headers=bearer(broker.operator_key), trust_env=False).json()["items"]
    issued = [r for r in records if r["action"] == "token.issued" and r.get("thread_id") == thread]
    assert {(r["principal"], r["actor"]) for r in issued} == {("my-deployment", "agent")}


def test_a_graph_can_be_inspected_without_a_sandbox(deployment: Deployment, broker: Broker) -> None:
    with deployment.as_("ann") as ann:
        found = ann.post("/assistants/search", json={}).json()
        schemas = ann.get(f"/assistants/{found[0]['assistant_id']}/schemas")
    assert schemas.status_code == 200, schemas.text
