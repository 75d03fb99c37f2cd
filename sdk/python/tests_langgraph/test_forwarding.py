"""Tests of what is forwarded to the broker and what is not, and that the served routes fail closed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_servers
import httpx
import pytest
from fake_servers import THREAD, RecordingUpstream, answer, recording, served
from real_servers import Broker, bearer
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, serve

from cobox import Secret
from cobox.langgraph.app import Settings, SettingsError, create_app
from cobox.langgraph.serving import broker_client as broker_module
from cobox.langgraph.serving import dataplane_routes as dataplane_module
from cobox.langgraph.serving import error_responses
from cobox.langgraph.serving.address_rewriting import address_rewriter
from cobox.langgraph.serving.caller_identity import dataplane_visitor
from cobox.langgraph.serving.dataplane_routes import is_sandbox_token, relay_target

KEY = "cbx_the-deployments-own"
SANDBOX = "sb_" + "0" * 26


def token(kid: str = f"{SANDBOX}.1") -> str:
    head = base64.urlsafe_b64encode(json.dumps({"alg": "EdDSA", "kid": kid}).encode()).decode().rstrip("=")
    return f"{head}.e30.c2ln"


@pytest.fixture(scope="module")
def upstream() -> Iterator[RecordingUpstream]:
    with recording() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def url(upstream: RecordingUpstream) -> Iterator[str]:
    with served(Settings(upstream.url, Secret(KEY))) as url:
        yield url


def ask(url: str, method: str, path: str, user: str = "ann", headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return httpx.request(method, url + path, headers={"x-test-user": user} | (headers or {}), trust_env=False, **more)


CAPABILITIES = f"/capabilities?thread_id={THREAD}"
NOISE = {
    "authorization": "Bearer ann-secret",
    "cookie": "session=ann",
    "x-thread-authorization": "Bearer stolen",
    "x-forwarded-for": "10.0.0.1",
    "forwarded": "for=10.0.0.1",
    "proxy-authorization": "Basic eA==",
    "x-tenant-id": "t",
    "te": "trailers",
    "origin": "https://page.example",
}


def test_the_broker_sees_the_deployments_key_and_no_caller_headers(url: str, upstream: RecordingUpstream) -> None:
    assert ask(url, "GET", CAPABILITIES, headers=NOISE).status_code == 200
    head = upstream.last()
    assert head[""] == f"GET {CAPABILITIES} HTTP/1.1"
    assert head["authorization"] == f"Bearer {KEY}"
    assert not set(head) & (set(NOISE) - {"authorization"})
    assert "ann" not in json.dumps(head)


def test_a_sandbox_sees_the_token_and_only_allowed_headers(url: str, upstream: RecordingUpstream) -> None:
    shown = {**NOISE, "authorization": f"Bearer {token()}", "if-match": '"a"', "x-anything": "b"}
    ask(url, "PUT", f"/dp/{SANDBOX}/v1/files/a%2Fb%20c?x=%2f&y", headers=shown, content=b"body")
    head = upstream.last()
    assert head[""] == f"PUT /dp/{SANDBOX}/v1/files/a%2Fb%20c?x=%2f&y HTTP/1.1"
    assert (head["authorization"], head["if-match"], head["content-length"]) == (f"Bearer {token()}", '"a"', "4")
    assert not set(head) & ((set(NOISE) | {"x-anything"}) - {"authorization"})


def test_only_sandbox_tokens_are_forwarded_to_a_sandbox(url: str, upstream: RecordingUpstream) -> None:
    before = len(upstream.heads)
    for credential in ("ann-secret", KEY, token("https://id.example.com/key"), "eyJhbGciOiJub25lIn0.e30.", "Basic x"):
        refused = ask(url, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"authorization": f"Bearer {credential}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "UNAUTHENTICATED"), credential
    assert len(upstream.heads) == before
    assert is_sandbox_token("cbo_opaque")


def test_a_duplicate_header_is_refused(url: str) -> None:
    twice = [("if-match", '"a"'), ("if-match", '"b"'), ("authorization", f"Bearer {token()}")]
    assert httpx.put(f"{url}/dp/{SANDBOX}/v1/files/a", headers=twice, content=b"", trust_env=False).status_code == 400


def test_cookies_and_page_policies_are_not_returned(url: str, upstream: RecordingUpstream) -> None:
    loose = ("set-cookie: a=b", "access-control-allow-origin: *", "strict-transport-security: max-age=9", "x-request-id: req_1")
    upstream.answers["GET /capabilities"] = answer("200 OK", {}, *loose)
    try:
        for _ in range(2):
            response = ask(url, "GET", CAPABILITIES)
            assert "set-cookie" not in response.headers
            assert "access-control-allow-origin" not in response.headers
            assert "strict-transport-security" not in response.headers
            assert response.headers["x-request-id"] == "req_1"
        assert "cookie" not in upstream.last()
    finally:
        del upstream.answers["GET /capabilities"]


def test_a_truncated_response_is_truncated_for_the_caller_too(url: str, upstream: RecordingUpstream) -> None:
    upstream.answers["GET /dp/"] = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this"
    try:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(url, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"authorization": f"Bearer {token()}"})
    finally:
        del upstream.answers["GET /dp/"]


def test_websocket_relay_delivers_last_frames_and_the_close_code() -> None:
    def last_words(connection: ServerConnection) -> None:
        connection.recv()
        for number in range(100):
            connection.send(f"word {number}")
        connection.close(4410, "over")

    with serve(last_words, "127.0.0.1", 0, close_timeout=1) as sandbox:
        threading.Thread(target=sandbox.serve_forever, daemon=True).start()
        broker = f"http://127.0.0.1:{sandbox.socket.getsockname()[1]}"
        with served(Settings(broker, Secret(KEY))) as url:
            where = f"ws{url.removeprefix('http')}/dp/{SANDBOX}/v1/shell/ws"
            with connect(where, additional_headers={"authorization": f"Bearer {token()}"}, proxy=None) as caller:
                caller.send("begin")
                received = []
                try:
                    while True:
                        received.append(caller.recv())
                        # The sandbox never reads these; its frames sent before closing must still arrive.
                        with contextlib.suppress(ConnectionClosed):
                            caller.send("more")
                except ConnectionClosed:
                    pass
            assert received == [f"word {number}" for number in range(100)]
            assert (caller.close_code, caller.close_reason) == (4410, "over")
        sandbox.shutdown()


def test_websocket_refusals_of_the_broker_are_passed_on(broker: Broker, deployment_key: str) -> None:
    with served(Settings(broker.url, Secret(deployment_key))) as url:
        where = f"ws{url.removeprefix('http')}/dp/{SANDBOX}/v1/shell/ws"
        for credential, status, code in ((token(), 404, "SANDBOX_NOT_FOUND"), ("ann-secret", 401, "UNAUTHENTICATED")):
            headers = {"authorization": f"Bearer {credential}"}
            with pytest.raises(InvalidStatus) as refused, connect(where, additional_headers=headers, proxy=None):
                pass
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body)["error"]["code"] == code


def test_redirects_are_not_followed(url: str, upstream: RecordingUpstream) -> None:
    upstream.answers["GET /capabilities"] = answer("302 Found", {}, "location: http://127.0.0.1:1/")
    try:
        assert ask(url, "GET", CAPABILITIES).status_code == 302
    finally:
        del upstream.answers["GET /capabilities"]


@pytest.fixture
def other_server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that must not be contacted; records what it receives."""
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    received.append(connection.recv(4096))

    running = threading.Thread(target=listen, daemon=True)
    running.start()
    yield f"ws://127.0.0.1:{listener.getsockname()[1]}/internal", received
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    running.join(10)


def test_a_websocket_redirect_is_not_followed_and_its_token_not_logged(
    url: str, upstream: RecordingUpstream, other_server: tuple[str, list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("", "websockets", "websockets.client", "cobox", "cobox.socket"):
        caplog.set_level(logging.DEBUG, logger=name)
    address, received = other_server
    upstream.answers["GET /dp/"] = answer("302 Found", {}, f"location: {address}")
    shown = token()
    call = b"GET /dp/%b/v1/shell/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    try:
        # A raw socket, because the websockets client would log its own headers and follow the redirect.
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as caller:
            key = b"Sec-WebSocket-Key: MvN1yV/KTHjuSGImuWUjKA==\r\nAuthorization: Bearer %b\r\n\r\n"
            caller.sendall(call % SANDBOX.encode() + key % shown.encode())
            assert caller.recv(64).startswith(b"HTTP/1.1 302 ")
    finally:
        del upstream.answers["GET /dp/"]
    assert upstream.last()["authorization"] == f"Bearer {shown}"
    assert received == []
    assert shown not in caplog.text


def visit(app: Any, send: Any, path: str = f"/dp/{SANDBOX}/v1/files/a") -> Any:
    """Sends a request with a sandbox's token directly to the app, without a server."""
    shown = f"Bearer {token()}".encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"authorization", shown)],
        "server": ("x", 1),
        "client": ("y", 1),
        "user": fake_servers.AuthenticatedUser("cobox-dataplane", False),
    }

    async def receive() -> Any:
        await asyncio.Event().wait()

    return app(scope, receive, send)


def test_a_caller_that_disconnects_during_the_response_leaks_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    begin = broker_module.BrokerClient.__init__

    def init(self: Any, *given: Any) -> None:
        begin(self, *given)
        made.append(self)

    monkeypatch.setattr(broker_module.BrokerClient, "__init__", init)

    async def gone(message: Any) -> None:
        raise OSError("the caller is gone")

    async def visits(url: str) -> int:
        app = create_app(Settings(url, Secret(KEY)))
        for _ in range(5):
            with contextlib.suppress(Exception):
                await visit(app, gone)
        left = len(made[0]._relay_transport._pool.connections)
        await made[0].close()
        return left

    with recording() as upstream:
        upstream.answers["GET /dp/"] = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\nonly this"
        assert asyncio.run(visits(upstream.url)) == 0
        assert len(upstream.heads) == 5


def test_relayed_requests_with_bad_tokens_do_not_exhaust_other_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MAX_RELAYED", 2)
    monkeypatch.setattr(broker_module, "CONNECT_SECONDS", 0.2)
    with recording() as upstream:
        # Responses that never complete.
        upstream.answers["GET /dp/"] = b""
        upstream.hangs = "GET /dp/"
        with served(Settings(upstream.url, Secret(KEY))) as url, contextlib.ExitStack() as visitors:
            port = int(url.rpartition(":")[2])
            for _ in range(2):
                visitor = visitors.enter_context(socket.create_connection(("127.0.0.1", port)))
                visitor.sendall(f"GET /dp/{SANDBOX}/v1/files/a HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token()}\r\n\r\n".encode())
                upstream.hung.acquire()
            third = ask(url, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"authorization": f"Bearer {token()}"})
            assert third.status_code == 503
            assert ask(url, "GET", CAPABILITIES).status_code == 200


def test_the_number_of_relayed_websockets_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataplane_module, "MAX_SOCKETS", 1)

    def wait(connection: ServerConnection) -> None:
        for frame in connection:
            connection.send(frame)

    def connect_when_free(where: str, headers: dict[str, str]) -> ClientConnection:
        """Retries until the deployment has noticed that its previous connection is closed."""
        deadline = time.monotonic() + 10
        while True:
            try:
                return connect(where, additional_headers=headers, proxy=None)
            except InvalidStatus as refused:
                if refused.response.status_code != 503 or time.monotonic() > deadline:
                    raise

    with serve(wait, "127.0.0.1", 0, close_timeout=1) as sandbox:
        threading.Thread(target=sandbox.serve_forever, daemon=True).start()
        with served(Settings(f"http://127.0.0.1:{sandbox.socket.getsockname()[1]}", Secret(KEY))) as url:
            where, headers = f"ws{url.removeprefix('http')}/dp/{SANDBOX}/v1/shell/ws", {"authorization": f"Bearer {token()}"}
            for _ in range(2):
                with connect_when_free(where, headers) as first:
                    first.send("a")
                    assert first.recv() == "a"
                    with pytest.raises(InvalidStatus) as refused, connect(where, additional_headers=headers, proxy=None):
                        pass
                    assert refused.value.response.status_code == 503
        sandbox.shutdown()


@pytest.mark.parametrize("query", [b"x=\xe9", b"x=\x00", b"x=\x7f", b"x= y", b"x=\xff\xfe"])
def test_an_invalid_query_is_refused(query: bytes) -> None:
    path = f"/dp/{SANDBOX}/v1/files/a"
    visitor: Any = type("Visitor", (), {"scope": {"raw_path": path.encode(), "path": path, "query_string": query}})
    with pytest.raises(error_responses.RequestError) as refused:
        relay_target(visitor)
    assert refused.value.status == 400


def test_input_that_no_url_can_contain_is_a_client_error(url: str) -> None:
    half = b'{"thread_id": "\\ud800", "mode": "ensure"}'
    assert ask(url, "POST", "/v1/sandbox/sessions", content=half).status_code == 404
    named = json.dumps({"thread_id": THREAD, "mode": "ensure", "name": "\ud800"}).encode()
    assert ask(url, "POST", "/v1/sandbox/sessions", content=named).status_code == 404
    assert ask(url, "GET", f"/v1/sandboxes/{'x' * 20_000}").status_code == 404
    assert ask(url, "GET", f"/v1/sandboxes?tag={'%25' * 15_000}").status_code in (200, 400)


def test_concurrent_callers_share_one_wait_for_an_unresponsive_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "KEY_CHECK_SECONDS", 0.5)
    monkeypatch.setattr(broker_module, "KEY_CHECK_FAILURE_SECONDS", 60.0)
    with recording() as upstream:
        upstream.hangs = "GET /v1/keys"
        with served(Settings(upstream.url, Secret(KEY))) as url:
            answers: list[int] = []
            callers = [threading.Thread(target=lambda: answers.append(ask(url, "GET", CAPABILITIES).status_code)) for _ in range(8)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
            assert answers == [503] * 8
            assert len(upstream.heads) == 1


def test_thread_access_is_checked_once_per_burst_and_caller(url: str) -> None:
    before = len(fake_servers.visibility_checks)
    for _ in range(5):
        assert ask(url, "GET", CAPABILITIES, headers={"x-burst": "1"}).status_code == 200
    assert fake_servers.visibility_checks[before:] == ["ann"]
    assert ask(url, "GET", CAPABILITIES, user="dora", headers={"x-burst": "1"}).status_code == 200
    assert ask(url, "GET", CAPABILITIES, user="bob", headers={"x-burst": "1"}).status_code == 404
    assert ask(url, "GET", CAPABILITIES, user="bob", headers={"x-burst": "1"}).status_code == 404
    assert fake_servers.visibility_checks[before:] == ["ann", "dora", "bob", "bob"]


def test_a_long_thread_is_not_buffered_beyond_its_identity(url: str) -> None:
    assert ask(url, "GET", CAPABILITIES, headers={"x-test-threads": "long"}).status_code == 200
    endless = ask(url, "GET", CAPABILITIES, headers={"x-test-threads": "endless"})
    assert endless.status_code == 503
    assert "bytes" in endless.json()["error"]["message"]


SESSION = {"session_id": "ssn_1", "created_at": "2026-02-02T02:02:02Z", "tags": {"langgraph_user": "ann"}}
OF_A_THREAD = {"binding": {"scope": {"type": "thread", "id": THREAD}}, "session_id": "ssn_1"}


@pytest.mark.parametrize(
    ("user", "thread_made", "tag", "is_shown"),
    [
        # Another user's session, created after the thread: they share the thread.
        ("dora", "2026-02-02T02:02:02.5+00:00", None, True),
        ("dora", "2026-01-01T00:00:00Z", None, True),
        # A session created before the thread: its own thread is gone.
        ("dora", "2026-02-02T02:02:03Z", None, False),
        # The tag identifies the thread, regardless of the clocks.
        ("dora", "2027-01-01T00:00:00Z", "2027-01-01T00:00:00Z", True),
        ("dora", "2026-01-01T00:00:00Z", "2025-01-01T00:00:00Z", False),
        # A server that does not report creation times.
        ("dora", "", None, False),
        # The session's own user.
        ("ann", "2027-01-01T00:00:00Z", None, True),
    ],
)
def test_a_session_of_an_earlier_thread_is_only_for_its_own_user(user: str, thread_made: str, tag: str | None, is_shown: bool) -> None:
    session = SESSION | {"tags": SESSION["tags"] | ({"langgraph_thread": tag} if tag else {})}  # type: ignore[operator]
    with recording() as upstream:
        upstream.answers["GET /v1/sandbox/sessions?"] = answer("200 OK", {"items": [session]})
        upstream.answers["GET /v1/sandbox/sessions/ssn_1 "] = answer("200 OK", OF_A_THREAD)
        upstream.answers["POST /v1/sandbox/sessions "] = answer("200 OK", OF_A_THREAD)
        with served(Settings(upstream.url, Secret(KEY))) as url:
            one, thread = "/v1/sandbox/sessions/ssn_1", f"/threads/{THREAD}/sandbox"
            routes: list[tuple[str, str, Any]] = [
                ("POST", "/v1/sandbox/sessions", {"thread_id": THREAD, "mode": "get"}),
                ("POST", "/v1/sandbox/sessions", {"thread_id": THREAD, "mode": "ensure", "tags": {"langgraph_thread": thread_made}}),
                ("GET", CAPABILITIES, None),
                ("GET", one, None),
                ("POST", f"{one}/refresh", {}),
                ("POST", f"{one}/delegate", {"capabilities": ["fs_read"]}),
                ("GET", f"{one}/events", None),
                ("GET", thread, None),
                ("POST", f"{thread}/refresh", {}),
                ("POST", f"{thread}/heartbeat", {}),
            ]
            for method, path, body in routes:
                response = ask(url, method, path, user=user, headers={"x-test-threads": thread_made}, json=body)
                assert response.status_code == (200 if is_shown else 404), f"{method} {path}: {response.text}"
            shown = ask(
                url, "GET", f"/v1/sandbox/sessions?scope_type=thread&scope_id={THREAD}", user=user, headers={"x-test-threads": thread_made}
            )
            assert len(shown.json()["items"]) == is_shown


def test_a_key_rejected_by_the_broker_is_a_server_error(upstream: RecordingUpstream) -> None:
    with served(Settings(upstream.url, Secret(KEY))) as url:
        upstream.answers["GET /v1/keys"], original = answer("401 Unauthorized", {}), upstream.answers["GET /v1/keys"]
        try:
            assert ask(url, "GET", CAPABILITIES).status_code == 503
        finally:
            upstream.answers["GET /v1/keys"] = original
        assert ask(url, "GET", CAPABILITIES).status_code == 200


def test_an_operators_key_is_refused(broker: Broker) -> None:
    with served(Settings(broker.url, Secret(broker.operator_key))) as url:
        refused = ask(url, "POST", "/v1/sandbox/sessions", json={"thread_id": THREAD, "mode": "ensure"})
        assert refused.status_code == 503
        assert "--kind human" in refused.json()["error"]["message"]


def test_an_unreachable_broker_is_reported_as_retryable() -> None:
    with served(Settings("http://127.0.0.1:1", Secret(KEY))) as url:
        away = ask(url, "GET", CAPABILITIES)
        assert (away.status_code, away.json()["error"]["retryable"]) == (503, True)
        relayed = ask(url, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"authorization": f"Bearer {token()}"})
        assert relayed.status_code == 503


@pytest.mark.parametrize(("threads", "status"), [("401", 403), ("403", 403), ("404", 404), ("422", 404), ("500", 503), ("greeting", 503)])
def test_a_thread_hidden_by_the_deployment_does_not_exist(url: str, upstream: RecordingUpstream, threads: str, status: int) -> None:
    before = len(upstream.heads)
    assert ask(url, "GET", CAPABILITIES, headers={"x-test-threads": threads}).status_code == status
    assert len(upstream.heads) == before


def test_unauthenticated_callers_are_refused(url: str, upstream: RecordingUpstream) -> None:
    before = len(upstream.heads)
    assert ask(url, "GET", CAPABILITIES, user="").status_code == 401
    assert ask(url, "GET", CAPABILITIES, user="studio").status_code == 403
    with served(Settings(upstream.url, Secret(KEY)), has_auth=False) as bare:
        # A deployment without `enable_custom_route_auth`.
        assert ask(bare, "GET", CAPABILITIES).status_code == 403
        assert ask(bare, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"x-api-key": token()}).status_code == 403
    assert len(upstream.heads) == before


def test_a_body_is_bounded_and_must_be_an_object(url: str) -> None:
    assert ask(url, "POST", "/v1/sandbox/sessions", content=b"x" * 70_000).status_code == 413
    for body in (b"[]", b"{", b'"a"', b"[" * 5000):
        assert ask(url, "POST", "/v1/sandbox/sessions", content=body).status_code == 400


def test_with_caller_identity_users_are_themselves_at_the_broker(broker: Broker) -> None:
    ann, dora = broker.key("ann-herself", "human"), broker.key("dora-herself", "human")
    with served(Settings(broker.url, identity="caller")) as url:
        body = {"thread_id": THREAD, "mode": "ensure", "access": "owner"}
        own = ask(url, "POST", "/v1/sandbox/sessions", headers=bearer(ann), json=body)
        assert own.status_code == 200, own.text
        # Access to the thread in the deployment does not grant access to another user's session at the broker.
        other = ask(url, "POST", "/v1/sandbox/sessions", user="dora", headers=bearer(dora), json=body)
        assert (other.status_code, other.json()["error"]["code"]) == (403, "FORBIDDEN")
        assert ask(url, "POST", "/v1/sandbox/sessions", json=body).status_code == 401
        assert ask(url, "DELETE", f"/v1/sandbox/sessions/{own.json()['session_id']}", headers=bearer(ann)).status_code == 204


def test_langsmith_api_is_served_to_callers_known_to_the_broker(broker: Broker) -> None:
    key = {"x-api-key": broker.key("ann-with-boxes", "human")}
    with served(Settings(broker.url, identity="caller", relay_url="https://deployment.example")) as url:
        for prefix in ("/v2/sandboxes", "/api/v2/sandboxes"):
            made = ask(url, "POST", f"{prefix}/boxes", headers=key, json={"name": "through", "wait_for_ready": True, "timeout": 60})
            assert made.status_code == 201, made.text
            assert made.json()["dataplane_url"].startswith("https://deployment.example/dp/sb_")
            listed = ask(url, "GET", f"{prefix}/boxes?limit=10", headers=key).json()["sandboxes"]
            assert "through" in [box["name"] for box in listed]
            link = ask(url, "POST", f"{prefix}/boxes/through/download-url", headers=key, json={"path": "/etc/passwd"})
            # A credential in a URL, which this server would log.
            assert link.status_code in (200, 201), link.text
            assert broker.url in link.text
            assert "deployment.example" not in link.text
            assert ask(url, "DELETE", f"{prefix}/boxes/through", headers=key).status_code == 204
            missing = ask(url, "GET", f"{prefix}/boxes/through", headers=key)
            assert (missing.status_code, missing.json()["detail"]["error"]) == (404, "NotFound")
            # A key of another service must not reach the broker.
            for headers in ({}, {"x-api-key": "lsv2_somebody-elses"}):
                refused = ask(url, "GET", f"{prefix}/boxes", headers=headers)
                assert (refused.status_code, refused.json()["detail"]["error"]) == (401, "Unauthorized")


def test_langsmith_api_is_refused_with_a_shared_key(url: str, upstream: RecordingUpstream) -> None:
    before = len(upstream.heads)
    for method, where in (("GET", "/v2/sandboxes/boxes"), ("POST", "/api/v2/sandboxes/snapshots"), ("DELETE", "/v2/sandboxes/volumes/x")):
        refused = ask(url, method, where)
        assert (refused.status_code, refused.json()["detail"]["error"]) == (403, "PermissionDenied")
        assert ask(url, method, where, user="").status_code == 401
    assert len(upstream.heads) == before


def test_the_thread_authority_credential_is_only_sent_if_configured(upstream: RecordingUpstream) -> None:
    with served(Settings(upstream.url, Secret(KEY), is_thread_authority=True)) as url:
        ask(url, "GET", CAPABILITIES, headers={"authorization": "Bearer ann-secret"})
        assert upstream.last()["x-thread-authorization"] == "Bearer ann-secret"


def test_a_private_ca_is_used_for_requests_and_websockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test -keyout {key} -out {cert}"
    subprocess.run(["openssl", *made.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    where, headers = f"/dp/{SANDBOX}/v1/shell/ws", {"authorization": f"Bearer {token()}"}
    with recording(tls) as upstream:
        upstream.answers["GET /dp/"] = answer("418 Teapot", {})
        for ca_file, status, code in ((None, 503, 503), (str(cert), 200, 418)):
            monkeypatch.setenv("COBOX_CA_FILE", ca_file) if ca_file else monkeypatch.delenv("COBOX_CA_FILE", raising=False)
            with served(Settings(upstream.url, Secret(KEY))) as url:
                assert ask(url, "GET", CAPABILITIES).status_code == status
                there = f"ws{url.removeprefix('http')}{where}"
                with pytest.raises(InvalidStatus) as refused, connect(there, additional_headers=headers, proxy=None):
                    pass
                assert refused.value.response.status_code == code


def test_broker_addresses_are_rewritten_to_the_deployments() -> None:
    rewrite = address_rewriter("http://broker:1/base", "https://deployment.example/x")
    response = {"sandbox": {"http_base_url": "http://broker:1/base/dp/sb_1/v1", "ws_base_url": "ws://broker:1/base/dp/sb_1/v1"}}
    assert rewrite(response)["sandbox"] == {
        "http_base_url": "https://deployment.example/x/dp/sb_1/v1",
        "ws_base_url": "wss://deployment.example/x/dp/sb_1/v1",
    }
    for other in (
        "http://broker:10/base/dp/sb_1",
        "https://sb_1.box.example/v1",
        "http://broker:1/base/v1/keys",
        "http://broker:1/base-dp/",
    ):
        assert rewrite({"url": other}) == {"url": other}
    assert rewrite([{"name": "http://broker:1/base/dp/sb_1"}]) == [{"name": "http://broker:1/base/dp/sb_1"}]


def test_only_relay_paths_have_dataplane_visitors() -> None:
    assert dataplane_visitor("/dp/sb_1/v1/exec") is not None
    assert dataplane_visitor("/v1/sandbox/relay/ssn_1/v1/exec") is not None
    assert dataplane_visitor("/x/dp/sb_1/v1/exec", "/x") is not None
    for path in ("/threads", "/v1/sandbox/sessions", "/dpx/", "/dp", "", "/x/dp/sb_1", "/threads/dp/"):
        assert dataplane_visitor(path) is None


def test_invalid_settings_are_refused() -> None:
    env = {"COBOX_URL": "http://broker:1/", "COBOX_API_KEY": " k \n", "COBOX_LANGGRAPH_RELAY": "https://d.example/"}
    settings = Settings.from_environment(env)
    assert (settings.broker_url, settings.relay_url) == ("http://broker:1", "https://d.example")
    assert settings.api_key == Secret("k")
    assert "k " not in repr(settings)
    for changed in ({"COBOX_URL": ""}, {"COBOX_API_KEY": ""}, {"COBOX_URL": "http://u:p@broker"}, {"COBOX_LANGGRAPH_IDENTITY": "root"}):
        with pytest.raises(SettingsError):
            Settings.from_environment(env | changed)
