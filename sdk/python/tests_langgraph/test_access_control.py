"""Tests of what a deployment refuses: another user's thread, sandbox or session, and forged claims of a run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from real_servers import Broker, Deployment, bearer, last_words, sandbox_events


def negotiate(client: httpx.Client, thread: str, **more: Any) -> httpx.Response:
    return client.post("/v1/sandbox/sessions", json={"thread_id": thread, "mode": "ensure"} | more)


@pytest.fixture(scope="module")
def anns(deployment: Deployment) -> dict[str, Any]:
    """The session of one of ann's threads."""
    thread = deployment.thread("ann")
    with deployment.as_("ann") as ann:
        answer = negotiate(ann, thread)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def routes_of(session: dict[str, Any]) -> list[tuple[str, str, dict[str, Any] | None]]:
    one, thread, sandbox = (
        f"/v1/sandbox/sessions/{session['session_id']}",
        f"/threads/{session['thread_id']}/sandbox",
        session["sandbox"]["id"],
    )
    return [
        ("GET", one, None),
        ("POST", f"{one}/refresh", {}),
        ("POST", f"{one}/refresh-token", {}),
        ("POST", f"{one}/heartbeat", {}),
        ("POST", f"{one}/delegate", {"capabilities": ["fs_read"]}),
        ("POST", f"{one}/file-links", {"path": "/workspace/a"}),
        ("GET", f"{one}/events", None),
        ("GET", f"{one}/share", None),
        ("POST", f"{one}/share", {"principal": "my-deployment", "capabilities": ["fs_read"]}),
        ("DELETE", f"{one}/share/my-deployment", None),
        ("DELETE", one, None),
        ("POST", thread, {}),
        ("GET", thread, None),
        ("POST", f"{thread}/refresh", {}),
        ("POST", f"{thread}/heartbeat", {}),
        ("DELETE", thread, None),
        ("GET", f"/capabilities?thread_id={session['thread_id']}", None),
        ("GET", f"/v1/sandbox/sessions?scope_type=thread&scope_id={session['thread_id']}", None),
        ("POST", f"/sandbox/{sandbox}/delegate", {"capabilities": ["fs_read"]}),
        ("GET", f"/v1/sandboxes/{sandbox}", None),
        ("PATCH", f"/v1/sandboxes/{sandbox}", {"keep": True}),
        ("DELETE", f"/v1/sandboxes/{sandbox}", None),
    ]


def test_another_users_thread_and_sandbox_do_not_exist(deployment: Deployment, anns: dict[str, Any]) -> None:
    with deployment.as_("bob") as bob:
        for method, path, body in routes_of(anns):
            answer = bob.request(method, path, json=body)
            assert answer.status_code == 404, f"{method} {path}: {answer.status_code} {answer.text}"
            assert answer.json()["error"]["code"] in ("SESSION_NOT_FOUND", "SANDBOX_NOT_FOUND")
        assert negotiate(bob, anns["thread_id"]).status_code == 404
        assert bob.post(f"/threads/{anns['thread_id']}/runs/wait", json={"assistant_id": "agent", "input": {}}).status_code == 404
    with deployment.as_("ann") as ann:
        assert ann.get(f"/v1/sandbox/sessions/{anns['session_id']}").status_code == 200


def test_requests_without_a_credential_or_with_studios_bypass_are_refused(deployment: Deployment, anns: dict[str, Any]) -> None:
    with httpx.Client(base_url=deployment.url, trust_env=False) as stranger:
        for method, path, body in routes_of(anns):
            for headers in ({}, bearer("nobody's"), {"x-auth-scheme": "langsmith"}):
                answer = stranger.request(method, path, json=body, headers=headers)
                assert answer.status_code in (401, 403), f"{method} {path}: {answer.status_code}"
        # The relay accepts only a sandbox's token.
        for credential in ({}, bearer("ann-secret"), bearer("cbx_not-for-here"), {"x-api-key": "ann-secret"}):
            relay = f"/v1/sandbox/relay/{anns['session_id']}/v1/exec"
            assert stranger.post(relay, json={"command": "true"}, headers=credential).status_code == 401


def test_lists_contain_only_the_users_own_items(deployment: Deployment, anns: dict[str, Any]) -> None:
    for path, field, wanted in (
        ("/v1/sandbox/sessions", "session_id", anns["session_id"]),
        ("/v1/sandboxes", "id", anns["sandbox"]["id"]),
    ):
        for query in ("", "?tag=langgraph_user:ann", "?tag=created_by", "?scope_type=thread", f"?scope_id={anns['thread_id']}"):
            with deployment.as_("bob") as bob:
                shown = [item[field] for item in bob.get(path + query).json().get("items", [])]
                assert wanted not in shown, path + query
        with deployment.as_("ann") as ann:
            assert wanted in [item[field] for item in ann.get(f"{path}?limit=100").json()["items"]]


def test_a_hint_can_only_name_the_users_own_sandbox(deployment: Deployment, anns: dict[str, Any]) -> None:
    anns_sandbox = anns["sandbox"]["id"]
    with deployment.as_("bob") as bob:
        for field in ("sandbox_hint", "sandbox_id", "preferred_sandbox_id", "name"):
            answer = negotiate(bob, deployment.thread("bob"), **{field: anns_sandbox})
            assert answer.status_code in (400, 404), f"{field}: {answer.status_code} {answer.text}"
            answer = bob.post(f"/threads/{deployment.thread('bob')}/sandbox", json={field: anns_sandbox})
            assert answer.status_code in (400, 404), f"{field}: {answer.status_code} {answer.text}"
        own = negotiate(bob, deployment.thread("bob"), name="bobs-own", tags={"langgraph_user": "ann", "note": "x"})
        assert own.status_code == 200, own.text
        again = negotiate(bob, deployment.thread("bob"), sandbox_hint="bobs-own")
        assert again.json()["sandbox"]["id"] == own.json()["sandbox"]["id"]
        info = bob.get("/v1/sandboxes/bobs-own").json()
        assert (info["tags"]["langgraph_user"], info["tags"]["note"]) == ("bob", "x")
        stolen = bob.patch("/v1/sandboxes/bobs-own", json={"tags": {"langgraph_user": "ann"}})
        assert stolen.status_code == 400
    with deployment.as_("ann") as ann:
        assert negotiate(ann, deployment.thread("ann"), name="bobs-own").status_code == 404
        assert negotiate(ann, deployment.thread("ann"), sandbox_hint="bobs-own").status_code == 404


def test_a_recreated_thread_id_does_not_inherit_the_deleted_threads_sandbox(deployment: Deployment) -> None:
    with deployment.as_("ann") as ann, deployment.as_("bob") as bob:
        thread = deployment.thread("ann")
        session = negotiate(ann, thread).json()
        assert "kept" in last_words(deployment.run("ann", thread, "run echo kept > secret; cat secret"))
        assert ann.delete(f"/threads/{thread}").status_code == 204
        assert bob.post("/threads", json={"thread_id": thread}).status_code == 200
        for method, path, body in routes_of(session):
            answer = bob.request(method, path, json=body)
            shown = [] if answer.status_code == 200 else None
            assert answer.status_code == 404 or answer.json().get("items") == shown, f"{method} {path}: {answer.status_code} {answer.text}"
        assert negotiate(bob, thread).status_code == 404
        assert "earlier thread" in negotiate(bob, thread, mode="get").json()["error"]["message"]
        assert refused(deployment.run("bob", thread, "run cat secret"))
        # Bob's run with this thread id has no access either, and the sandbox still belongs to ann.
        own = [item["id"] for item in ann.get("/v1/sandboxes?limit=100").json()["items"]]
        assert session["sandbox"]["id"] in own


def test_users_who_share_a_thread_share_its_sandbox(deployment: Deployment, broker: Broker, deployment_key: str) -> None:
    thread = deployment.thread("ann")
    # As another replica would create it, for another user of a thread that ann may see.
    body = {"thread_id": thread, "mode": "ensure", "tags": {"langgraph_user": "carol"}}
    made = httpx.post(f"{broker.url}/v1/sandbox/sessions", json=body, headers=bearer(deployment_key), trust_env=False).json()
    with deployment.as_("ann") as ann:
        assert negotiate(ann, thread).json()["session_id"] == made["session_id"]
    used = {event["sandbox_id"] for event in sandbox_events(deployment.run("ann", thread, "run true"))}
    assert used == {made["sandbox"]["id"]}


def test_users_cannot_start_from_other_users_snapshots_or_volumes(deployment: Deployment, broker: Broker, anns: dict[str, Any]) -> None:
    carol = broker.key("carol-with-files", "human")
    headers = {"headers": {"x-api-key": carol}, "trust_env": False}
    httpx.post(f"{broker.url}/v2/sandboxes/volumes", json={"name": "carols-volume", "size": "10Mi"}, **headers)
    with deployment.as_("bob") as bob:
        for params in (
            {"snapshot": "anybodys"},
            {"mounts": [{"volume": "carols-volume", "path": "/carols"}]},
            {"resources": {"memory_bytes": 1 << 40}},
        ):
            answers = [
                bob.post("/v1/sandboxes", json=params),
                negotiate(bob, deployment.thread("bob"), **params),
                bob.post(f"/threads/{deployment.thread('bob')}/sandbox", json=params),
            ]
            for answer in answers:
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN"), answer.text
                assert next(iter(params)) in answer.json()["error"]["message"]
        own = bob.post("/v1/sandboxes", json={"env": {"A": "b"}, "tags": {"note": "x"}, "a_newer_word": 1})
        assert own.status_code == 201, own.text
        assert bob.delete(f"/v1/sandboxes/{own.json()['id']}").status_code == 204


def test_a_failed_negotiation_with_a_name_leaves_no_sandbox_behind(deployment: Deployment) -> None:
    with deployment.as_("bob") as bob:
        no_template = negotiate(bob, deployment.thread("bob"), name="bobs-templated", template="nope")
        assert (no_template.status_code, "there is no template `nope`" in no_template.text) == (404, True)
        both = negotiate(bob, deployment.thread("bob"), name="bobs-preferred", provider_preference="local")
        assert both.status_code == 400
        closed = negotiate(bob, deployment.thread("bob"), name="bobs-closed", access="owner")
        assert closed.status_code == 200, closed.text
        assert bob.get("/v1/sandboxes/bobs-closed").json()["access"] == "owner"
        # A thread has only one sandbox, so the one created for the name is deleted again.
        taken = negotiate(bob, closed.json()["thread_id"], name="bobs-second")
        assert taken.status_code == 409, taken.text
        for name in ("bobs-templated", "bobs-preferred", "bobs-second"):
            assert bob.get(f"/v1/sandboxes/{name}").status_code == 404


def test_only_threads_have_sandboxes_in_a_deployment(deployment: Deployment) -> None:
    with deployment.as_("ann") as ann:
        for kind in ("workspace", "assistant", "deployment"):
            body = {"scope": {"type": kind, "id": "x"}, "mode": "ensure"}
            assert ann.post("/v1/sandbox/sessions", json=body).status_code == 403
        own, other = deployment.thread("ann"), deployment.thread("ann")
        two = {"thread_id": own, "scope": {"type": "thread", "id": other}, "mode": "ensure"}
        assert ann.post("/v1/sandbox/sessions", json=two).status_code == 400
        for thread in ("..", ".", "", "not-a-uuid", "a/b", "%2e%2e"):
            assert negotiate(ann, thread).status_code in (400, 404)


def test_every_spelling_of_a_thread_id_has_the_same_sandbox(deployment: Deployment) -> None:
    thread = deployment.thread("ann")
    with deployment.as_("ann") as ann:
        first, second = negotiate(ann, thread), negotiate(ann, thread.upper())
        assert first.json()["session_id"] == second.json()["session_id"]
        assert second.json()["thread_id"] == thread


def test_a_user_who_can_only_read_a_thread_cannot_end_or_share_its_sandbox(
    deployment: Deployment, broker: Broker, deployment_key: str
) -> None:
    thread = deployment.thread("ann")
    # As another replica would create it, for another user of a thread that ann may see.
    body = {"thread_id": thread, "mode": "ensure", "tags": {"langgraph_user": "carol"}}
    made = httpx.post(f"{broker.url}/v1/sandbox/sessions", json=body, headers=bearer(deployment_key), trust_env=False).json()
    one = f"/v1/sandbox/sessions/{made['session_id']}"
    with deployment.as_("ann") as ann:
        assert ann.get(one).status_code == 200
        assert ann.delete(one).status_code == 403
        assert ann.delete(f"/threads/{thread}/sandbox").status_code == 403
        assert ann.post(f"{one}/share", json={"principal": "my-deployment", "capabilities": ["fs_read"]}).status_code == 403


def test_forged_run_claims_about_users_threads_and_sandboxes_are_ignored(deployment: Deployment, anns: dict[str, Any]) -> None:
    thread = deployment.thread("bob")
    anns_sandbox = anns["sandbox"]["id"]
    lies = {
        "thread_id": anns["thread_id"],
        "user_id": "ann",
        "langgraph_auth_user_id": "ann",
        "langgraph_auth_user": {"identity": "ann"},
        "sandbox_id": anns_sandbox,
    }
    events = deployment.run("bob", thread, "run pwd", lies)
    assert "/workspace" in last_words(events)
    used = {event["sandbox_id"] for event in sandbox_events(events)}
    assert len(used) == 1
    assert anns_sandbox not in used
    with deployment.as_("bob") as bob:
        assert bob.get(f"/threads/{thread}/sandbox").json()["sandbox_id"] in used
        assert bob.get(f"/v1/sandboxes/{next(iter(used))}").json()["tags"]["langgraph_user"] == "bob"
    # A run without a thread gets one from the server, not the one it claims.
    alone = deployment.run("bob", None, "run pwd", lies)
    assert anns_sandbox not in {event["sandbox_id"] for event in sandbox_events(alone)}


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[bytes]]]:
    """A server that must not receive a token; records what is sent to it."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received.append(connection.recv(4096))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", received
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def refused(events: list[tuple[str, Any]]) -> bool:
    return any(kind == "error" and data["error"] == "SandboxRefused" for kind, data in events)


def test_a_supplied_sandbox_must_be_the_threads_or_come_with_its_token(
    deployment: Deployment, anns: dict[str, Any], stranger: tuple[str, list[bytes]]
) -> None:
    url, received = stranger
    anns_sandbox = anns["sandbox"]["id"]

    def bring(thread: str, sandbox: dict[str, Any]) -> list[tuple[str, Any]]:
        return deployment.run("bob", thread, "run echo in-$HOSTNAME", {"sandbox": sandbox})

    assert refused(bring(deployment.thread("bob"), {"sandbox_id": anns_sandbox, "dataplane_url": url}))
    forged = bring(deployment.thread("bob"), {"sandbox_id": anns_sandbox, "credential": "eyJ.a.b", "dataplane_url": url})
    assert any(kind == "error" for kind, _ in forged)
    with deployment.as_("bob") as bob:
        own = negotiate(bob, deployment.thread("bob")).json()
    # The thread's own sandbox with a forged URL: the broker's URL is used.
    del own["dataplane"]
    own["sandbox"] |= {"http_base_url": url, "ws_base_url": url.replace("http", "ws")}
    assert "in-" in last_words(bring(own["thread_id"], own))
    # Negotiated for another thread than the run's, and a sandbox other than the thread's.
    assert refused(bring(deployment.thread("bob"), own))
    assert refused(bring(own["thread_id"], {"sandbox_id": anns_sandbox, "credential": anns["token"], "dataplane_url": url}))
    # The holder of a token may pass it on; it is used at the broker's URL.
    supplied = bring(deployment.thread("bob"), {"sandbox_id": anns_sandbox, "sandbox_credential": anns["token"], "dataplane_url": url})
    assert {event["sandbox_id"] for event in sandbox_events(supplied)} == {anns_sandbox}
    assert received == []


def test_a_supplied_token_grants_a_run_no_more_than_its_holder(deployment: Deployment, anns: dict[str, Any]) -> None:
    with deployment.as_("ann") as ann:
        narrow = ann.post(f"/v1/sandbox/sessions/{anns['session_id']}/delegate", json={"capabilities": ["fs_read"]}).json()["token"]
    supplied = {"sandbox": {"sandbox_id": anns["sandbox"]["id"], "credential": narrow}}
    thread = deployment.thread("bob")
    output = str(deployment.run("bob", thread, "run echo hello", supplied))
    assert "CAPABILITY_DENIED" in output or "CapabilityDenied" in output
    # The sandbox is not bound to the thread.
    later = deployment.run("bob", thread, "run echo hello")
    assert anns["sandbox"]["id"] not in {event["sandbox_id"] for event in sandbox_events(later)}
