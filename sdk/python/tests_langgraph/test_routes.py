"""Tests of the protocol's routes through a deployment: `cobox` and the Python client use only its address and their own
credential."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_servers import Broker, Deployment, bearer, clean_env
from terminal import Terminal

from cobox import Cobox, Session
from cobox.errors import NotFound

# Larger than all buffers in between together.
LARGE_BYTES = 96 * 1024 * 1024
# Maximum growth of the server's memory during such a transfer.
GROWTH_BYTES = 24 * 1024 * 1024


@pytest.fixture(scope="module")
def session(deployment: Deployment) -> dict[str, Any]:
    thread = deployment.thread("ann")
    with deployment.as_("ann") as ann:
        body = {"scope": {"type": "thread", "id": thread}, "mode": "ensure"}
        answer = ann.post("/v1/sandbox/sessions", json=body, headers={"idempotency-key": "once"})
        assert answer.status_code == 200, answer.text
        again = ann.post("/v1/sandbox/sessions", json=body, headers={"idempotency-key": "once"})
        assert again.json()["session_id"] == answer.json()["session_id"]
        return dict(answer.json())


def test_addresses_are_the_deployments_own(deployment: Deployment, session: dict[str, Any]) -> None:
    assert session["sandbox"]["http_base_url"].startswith(f"{deployment.url}/dp/")
    assert session["dataplane"]["ws_base_url"].startswith(deployment.url.replace("http", "ws") + "/dp/")


def test_the_control_plane_is_served(deployment: Deployment, broker: Broker, session: dict[str, Any]) -> None:
    broker.key("carol", "human")
    one, thread = f"/v1/sandbox/sessions/{session['session_id']}", session["thread_id"]
    with deployment.as_("ann") as ann:
        assert ann.get(one).json()["session_id"] == session["session_id"]
        for verb in ("refresh", "refresh-token"):
            assert ann.post(f"{one}/{verb}", json={"current_token": session["token"]}).json()["token"] != session["token"]
        assert ann.post(f"{one}/heartbeat").json()["state"] == "active"
        delegated = ann.post(f"{one}/delegate", json={"capabilities": ["fs_read"], "ttl": 60}).json()
        assert delegated["granted_capabilities"] == ["fs_read"]
        assert ann.get(f"/threads/{thread}/sandbox").json()["endpoints"]["http"].startswith(deployment.url)
        assert ann.post(f"/threads/{thread}/sandbox/refresh").status_code == 200
        assert ann.post(f"/threads/{thread}/sandbox/heartbeat").status_code == 200
        assert ann.get("/capabilities", params={"thread_id": thread}).json()["services"]["sandbox"]["url"].startswith(deployment.url)
        shared = ann.post(f"{one}/share", json={"principal": "carol", "capabilities": ["fs_read"]})
        assert shared.status_code in (200, 201), shared.text
        assert [s["principal"] for s in ann.get(f"{one}/share").json()["items"]] == ["carol"]
        assert ann.delete(f"{one}/share/carol").status_code == 204
        listed = ann.get("/v1/sandbox/sessions", params={"scope_type": "thread", "scope_id": thread}).json()["items"]
        assert [s["session_id"] for s in listed] == [session["session_id"]]


def test_broker_errors_are_passed_on_unchanged(deployment: Deployment) -> None:
    with deployment.as_("ann") as ann:
        thread = deployment.thread("ann")
        missing = ann.post("/v1/sandbox/sessions", json={"thread_id": thread, "mode": "get"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "SESSION_NOT_FOUND")
        full = ann.post("/v1/sandbox/sessions", json={"scope": {"type": "thread", "id": thread}, "mode": "attach_only"})
        assert (full.status_code, full.json()["error"]["code"]) == (404, "BINDING_NOT_FOUND")
        wrong = ann.post("/v1/sandbox/sessions", json={"thread_id": thread, "mode": "sometimes"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "INVALID_REQUEST")
        assert ann.get("/v1/sandbox/sessions/ssn_nonsense").status_code == 404


def test_operations_and_keys_are_not_served(deployment: Deployment) -> None:
    with deployment.as_("ann") as ann:
        for path in ("/v1/keys", "/v1/audit", "/v1/principals", "/internal/tokens/introspect", "/readyz", "/webhooks/threads"):
            assert ann.get(path).status_code == 404, path


def test_a_released_session_is_gone(deployment: Deployment) -> None:
    thread = deployment.thread("ann")
    with deployment.as_("ann") as ann:
        made = ann.post(f"/threads/{thread}/sandbox").json()
        assert ann.delete(f"/threads/{thread}/sandbox").status_code == 204
        assert ann.get(f"/v1/sandbox/sessions/{made['session_id']}").status_code == 410


def test_events_are_streamed_and_resumed(deployment: Deployment, session: dict[str, Any]) -> None:
    path = f"/v1/sandbox/sessions/{session['session_id']}/events"

    def first(count: int, headers: dict[str, str]) -> list[str]:
        ids: list[str] = []
        with deployment.as_("ann") as ann, ann.stream("GET", path, headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    ids.append(line[4:])
                if len(ids) == count:
                    return ids
        return ids

    ids = first(2, {})
    assert first(1, {"last-event-id": ids[0]}) == ids[1:]


def test_a_sandbox_token_suffices_for_the_relay(deployment: Deployment, session: dict[str, Any]) -> None:
    relay = f"/v1/sandbox/relay/{session['session_id']}/v1"
    with httpx.Client(base_url=deployment.url, headers=bearer(session["token"]), trust_env=False, timeout=60) as holder:
        done = holder.post(f"{relay}/exec", json={"command": "echo out; echo err >&2; exit 3"}).json()
        assert (done["stdout"], done["stderr"], done["exit_code"]) == ("out\n", "err\n", 3)
        written = holder.put(f"{relay}/files/workspace/a%20b", content=b"text", headers={"if-none-match": "*"})
        assert written.status_code == 201
        assert holder.put(f"{relay}/files/workspace/a%20b", content=b"more", headers={"if-none-match": "*"}).status_code == 412
        read = holder.get(f"{relay}/files/workspace/a%20b", headers={"range": "bytes=1-2"})
        assert (read.status_code, read.content, read.headers["content-range"]) == (206, b"ex", "bytes 1-2/4")
        assert holder.head(f"{relay}/files/workspace/a%20b").headers["content-length"] == "4"
        assert read.headers["content-security-policy"].startswith("sandbox")
    # In addition to the deployment's own credential, for deployments that require it on every request.
    with deployment.as_("ann") as ann:
        done = ann.post(f"{relay}/exec", json={"command": "echo both"}, headers={"x-api-key": session["token"]}).json()
        assert done["stdout"] == "both\n"


def test_a_file_link_points_to_the_broker(deployment: Deployment, broker: Broker, session: dict[str, Any]) -> None:
    with deployment.as_("ann") as ann:
        path = f"/v1/sandbox/sessions/{session['session_id']}/file-links"
        link = ann.post(path, json={"path": "/workspace/linked", "method": "PUT"}).json()["url"]
    assert link.startswith(broker.url)
    here = link.replace(broker.url, deployment.url)
    assert httpx.put(here, content=b"x", trust_env=False).status_code == 400
    assert httpx.put(link, content=b"x", trust_env=False).status_code == 201


def test_a_path_cannot_leave_the_relay(deployment: Deployment, session: dict[str, Any]) -> None:
    for rest in ("../../../v1/keys", "%2e%2e/%2e%2e/%2e%2e/v1/keys", "./v1/exec", "v1/files/../../../../keys"):
        argv = ["curl", "-s", "--path-as-is", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"X-Api-Key: {session['token']}"]
        url = f"{deployment.url}/v1/sandbox/relay/{session['session_id']}/{rest}"
        done = subprocess.run([*argv, url], capture_output=True, text=True, timeout=30)
        assert done.stdout == "400", f"{rest}: {done.stdout}"


def test_the_python_client_works_through_the_deployment(deployment: Deployment) -> None:
    thread = deployment.thread("ann")
    with Cobox(deployment.url, "ann-secret") as broker, broker.session(thread) as box:
        assert box.http_base_url.startswith(deployment.url)
        assert box.exec("echo $((6 * 7))").stdout == "42\n"
        box.files.write("/workspace/f", b"content")
        assert box.files.read("/workspace/f") == b"content"
        with box.stream("for i in 1 2 3; do echo line $i; done") as stream:
            assert b"".join(piece.data for piece in stream) == b"line 1\nline 2\nline 3\n"
        box.refresh()
        with box.events() as events:
            assert next(iter(events)).type == "created"
    with Cobox(deployment.url, "bob-secret") as broker, pytest.raises(NotFound):
        broker.session(thread)


def test_cobox_works_through_the_deployment(deployment: Deployment, broker: Broker) -> None:
    thread = deployment.thread("ann")
    done = broker.run("exec", "-t", thread, "--", "sh", "-c", "cat; exit 4", url=deployment.url, key="ann-secret", input="through\n")
    assert (done.stdout, done.returncode) == ("through\n", 4), done.stderr
    stranger = broker.run("exec", "-t", thread, "--", "true", url=deployment.url, key="bob-secret")
    assert stranger.returncode != 0
    assert "no such thread" in stranger.stderr
    env = clean_env(COBOX_URL=deployment.url, COBOX_API_KEY="ann-secret")
    with Terminal([broker.cobox, "shell", "-t", thread], env) as shell:
        shell.wait_for("workspace")
        shell.type("echo typed-$((6 * 7))\n")
        shell.wait_for("typed-42")


def peak_bytes(deployment: Deployment) -> int:
    """The server's peak memory."""
    lines = Path(f"/proc/{deployment.pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def test_relayed_transfers_are_never_buffered_whole(deployment: Deployment, session: dict[str, Any]) -> None:
    base = session["sandbox"]["http_base_url"]
    piece = b"\0" * 65536
    with httpx.Client(headers=bearer(session["token"]), trust_env=False, timeout=120) as holder:
        # Warm up, so that caches are filled.
        holder.put(f"{base}/files/workspace/large", content=piece)
        before = peak_bytes(deployment)
        sent = holder.put(f"{base}/files/workspace/large", content=(piece for _ in range(LARGE_BYTES // len(piece))))
        assert sent.status_code == 200, sent.text
        with holder.stream("GET", f"{base}/files/workspace/large") as answer:
            assert sum(len(part) for part in answer.iter_raw()) == LARGE_BYTES
    with Session.from_token(base, session["token"], ws_base_url=session["sandbox"]["ws_base_url"]) as box:
        with box.stream("cat /workspace/large; rm /workspace/large") as stream:
            assert sum(len(piece.data) for piece in stream) == LARGE_BYTES
        assert box.exec("ls").ok
    assert peak_bytes(deployment) - before < GROWTH_BYTES


def test_no_credential_is_in_the_deployments_log(deployment: Deployment, deployment_key: str, session: dict[str, Any]) -> None:
    log = deployment.log.read_text()
    for secret in (deployment_key, session["token"], "ann-secret"):
        assert secret not in log
