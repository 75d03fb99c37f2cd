"""What crosses to the broker and what doesn't, and how the served routes fail: closed."""

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

import front
import httpx
import pytest
from front import THREAD, Upstream, answer, recording, served
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, serve
from world import Broker, bearer

from cobox import Secret
from cobox.langgraph.app import Settings, SettingsError, create_app
from cobox.langgraph.serving import broker as broker_module
from cobox.langgraph.serving import dataplane as dataplane_module
from cobox.langgraph.serving import refusals
from cobox.langgraph.serving.addresses import through
from cobox.langgraph.serving.callers import dataplane_visitor
from cobox.langgraph.serving.dataplane import is_sandbox_token, target

KEY = "cbx_the-deployments-own"
SANDBOX = "sb_" + "0" * 26


def token(kid: str = f"{SANDBOX}.1") -> str:
    head = base64.urlsafe_b64encode(json.dumps({"alg": "EdDSA", "kid": kid}).encode()).decode().rstrip("=")
    return f"{head}.e30.c2ln"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with recording() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def url(upstream: Upstream) -> Iterator[str]:
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


def test_the_broker_sees_the_deployments_key_and_nothing_of_its_callers(url: str, upstream: Upstream) -> None:
    assert ask(url, "GET", CAPABILITIES, headers=NOISE).status_code == 200
    head = upstream.last()
    assert head[""] == f"GET {CAPABILITIES} HTTP/1.1"
    assert head["authorization"] == f"Bearer {KEY}"
    assert not set(head) & (set(NOISE) - {"authorization"})
    assert "ann" not in json.dumps(head)


def test_a_sandbox_sees_the_token_and_nothing_else(url: str, upstream: Upstream) -> None:
    shown = {**NOISE, "authorization": f"Bearer {token()}", "if-match": '"a"', "x-anything": "b"}
    ask(url, "PUT", f"/dp/{SANDBOX}/v1/files/a%2Fb%20c?x=%2f&y", headers=shown, content=b"body")
    head = upstream.last()
    assert head[""] == f"PUT /dp/{SANDBOX}/v1/files/a%2Fb%20c?x=%2f&y HTTP/1.1"
    assert (head["authorization"], head["if-match"], head["content-length"]) == (f"Bearer {token()}", '"a"', "4")
    assert not set(head) & ((set(NOISE) | {"x-anything"}) - {"authorization"})


def test_no_credential_but_a_sandboxs_token_goes_that_way(url: str, upstream: Upstream) -> None:
    before = len(upstream.heads)
    for credential in ("ann-secret", KEY, token("https://id.example.com/key"), "eyJhbGciOiJub25lIn0.e30.", "Basic x"):
        refused = ask(url, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"authorization": f"Bearer {credential}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "UNAUTHENTICATED"), credential
    assert len(upstream.heads) == before
    assert is_sandbox_token("cbo_opaque")


def test_a_header_that_is_sent_twice_is_refused(url: str) -> None:
    twice = [("if-match", '"a"'), ("if-match", '"b"'), ("authorization", f"Bearer {token()}")]
    assert httpx.put(f"{url}/dp/{SANDBOX}/v1/files/a", headers=twice, content=b"", trust_env=False).status_code == 400


def test_cookies_and_rules_for_pages_are_not_handed_back(url: str, upstream: Upstream) -> None:
    loose = ("set-cookie: a=b", "access-control-allow-origin: *", "strict-transport-security: max-age=9", "x-request-id: req_1")
    upstream.answers["GET /capabilities"] = answer("200 OK", {}, *loose)
    try:
        for _ in range(2):
            told = ask(url, "GET", CAPABILITIES)
            assert "set-cookie" not in told.headers
            assert "access-control-allow-origin" not in told.headers
            assert "strict-transport-security" not in told.headers
            assert told.headers["x-request-id"] == "req_1"
        assert "cookie" not in upstream.last()
    finally:
        del upstream.answers["GET /capabilities"]


def test_an_answer_that_breaks_off_breaks_off_for_the_caller_too(url: str, upstream: Upstream) -> None:
    upstream.answers["GET /dp/"] = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this"
    try:
        with pytest.raises(httpx.RemoteProtocolError):
            ask(url, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"authorization": f"Bearer {token()}"})
    finally:
        del upstream.answers["GET /dp/"]


def test_last_words_arrive_though_the_caller_still_talks_and_both_sides_close_alike() -> None:
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
                heard = []
                try:
                    while True:
                        heard.append(caller.recv())
                        # More than the other side will ever read; what it said before it closed is still to be heard.
                        with contextlib.suppress(ConnectionClosed):
                            caller.send("more")
                except ConnectionClosed:
                    pass
            assert heard == [f"word {number}" for number in range(100)]
            assert (caller.close_code, caller.close_reason) == (4410, "over")
        sandbox.shutdown()


def test_a_socket_is_refused_as_the_broker_refuses_it(broker: Broker, deployment_key: str) -> None:
    with served(Settings(broker.url, Secret(deployment_key))) as url:
        where = f"ws{url.removeprefix('http')}/dp/{SANDBOX}/v1/shell/ws"
        for credential, status, code in ((token(), 404, "SANDBOX_NOT_FOUND"), ("ann-secret", 401, "UNAUTHENTICATED")):
            headers = {"authorization": f"Bearer {credential}"}
            with pytest.raises(InvalidStatus) as refused, connect(where, additional_headers=headers, proxy=None):
                pass
            assert refused.value.response.status_code == status
            assert json.loads(refused.value.response.body)["error"]["code"] == code


def test_redirects_are_not_followed(url: str, upstream: Upstream) -> None:
    upstream.answers["GET /capabilities"] = answer("302 Found", {}, "location: http://127.0.0.1:1/")
    try:
        assert ask(url, "GET", CAPABILITIES).status_code == 302
    finally:
        del upstream.answers["GET /capabilities"]


@pytest.fixture
def elsewhere() -> Iterator[tuple[str, list[bytes]]]:
    """A server that nobody may be sent to; what it hears is kept."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    heard.append(connection.recv(4096))

    running = threading.Thread(target=listen, daemon=True)
    running.start()
    yield f"ws://127.0.0.1:{listener.getsockname()[1]}/internal", heard
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    running.join(10)


def test_a_socket_is_not_redirected_and_its_token_is_in_no_log(
    url: str, upstream: Upstream, elsewhere: tuple[str, list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("", "websockets", "websockets.client", "cobox", "cobox.socket"):
        caplog.set_level(logging.DEBUG, logger=name)
    there, heard = elsewhere
    upstream.answers["GET /dp/"] = answer("302 Found", {}, f"location: {there}")
    shown = token()
    call = b"GET /dp/%b/v1/shell/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    try:
        # By hand: a client of the websockets library would log its own headers, and follow.
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as caller:
            key = b"Sec-WebSocket-Key: MvN1yV/KTHjuSGImuWUjKA==\r\nAuthorization: Bearer %b\r\n\r\n"
            caller.sendall(call % SANDBOX.encode() + key % shown.encode())
            assert caller.recv(64).startswith(b"HTTP/1.1 302 ")
    finally:
        del upstream.answers["GET /dp/"]
    assert upstream.last()["authorization"] == f"Bearer {shown}"
    assert heard == []
    assert shown not in caplog.text


def visit(app: Any, send: Any, path: str = f"/dp/{SANDBOX}/v1/files/a") -> Any:
    """A visit of somebody with a sandbox's token, without a server between."""
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
        "user": front.Known("cobox-dataplane", False),
    }

    async def receive() -> Any:
        await asyncio.Event().wait()

    return app(scope, receive, send)


def test_a_caller_who_leaves_as_the_answer_comes_takes_no_connection_along(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    begin = broker_module.Broker.__init__

    def init(self: Any, *given: Any) -> None:
        begin(self, *given)
        made.append(self)

    monkeypatch.setattr(broker_module.Broker, "__init__", init)

    async def gone(message: Any) -> None:
        raise OSError("the caller is gone")

    async def visits(url: str) -> int:
        app = create_app(Settings(url, Secret(KEY)))
        for _ in range(5):
            with contextlib.suppress(Exception):
                await visit(app, gone)
        left = len(made[0]._relaying._pool.connections)
        await made[0].close()
        return left

    with recording() as upstream:
        upstream.answers["GET /dp/"] = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\nonly this"
        assert asyncio.run(visits(upstream.url)) == 0
        assert len(upstream.heads) == 5


def test_visitors_with_anything_that_looks_like_a_token_leave_the_others_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MAX_RELAYED", 2)
    monkeypatch.setattr(broker_module, "CONNECT_SECONDS", 0.2)
    with recording() as upstream:
        # The head of an answer that never comes to its end, three times.
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


def test_so_many_sockets_are_relayed_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataplane_module, "MAX_SOCKETS", 1)

    def wait(connection: ServerConnection) -> None:
        for frame in connection:
            connection.send(frame)

    def let_in(where: str, headers: dict[str, str]) -> ClientConnection:
        """A place is free again when the deployment has noticed that its last connection is gone."""
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
                with let_in(where, headers) as first:
                    first.send("a")
                    assert first.recv() == "a"
                    with pytest.raises(InvalidStatus) as refused, connect(where, additional_headers=headers, proxy=None):
                        pass
                    assert refused.value.response.status_code == 503
        sandbox.shutdown()


@pytest.mark.parametrize("query", [b"x=\xe9", b"x=\x00", b"x=\x7f", b"x= y", b"x=\xff\xfe"])
def test_a_query_that_is_none_is_refused(query: bytes) -> None:
    path = f"/dp/{SANDBOX}/v1/files/a"
    visitor: Any = type("Visitor", (), {"scope": {"raw_path": path.encode(), "path": path, "query_string": query}})
    with pytest.raises(refusals.Refused) as refused:
        target(visitor)
    assert refused.value.status == 400


def test_words_that_no_url_can_hold_are_refused_and_not_a_fault_of_ours(url: str) -> None:
    half = b'{"thread_id": "\\ud800", "mode": "ensure"}'
    assert ask(url, "POST", "/v1/sandbox/sessions", content=half).status_code == 404
    named = json.dumps({"thread_id": THREAD, "mode": "ensure", "name": "\ud800"}).encode()
    assert ask(url, "POST", "/v1/sandbox/sessions", content=named).status_code == 404
    assert ask(url, "GET", f"/v1/sandboxes/{'x' * 20_000}").status_code == 404
    assert ask(url, "GET", f"/v1/sandboxes?tag={'%25' * 15_000}").status_code in (200, 400)


def test_a_broker_that_says_nothing_is_waited_for_once_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "FITNESS_SECONDS", 0.5)
    monkeypatch.setattr(broker_module, "UNFIT_SECONDS", 60.0)
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


def test_a_thread_is_asked_about_once_in_a_burst_and_for_each_caller(url: str) -> None:
    before = len(front.asked)
    for _ in range(5):
        assert ask(url, "GET", CAPABILITIES, headers={"x-burst": "1"}).status_code == 200
    assert front.asked[before:] == ["ann"]
    assert ask(url, "GET", CAPABILITIES, user="dora", headers={"x-burst": "1"}).status_code == 200
    assert ask(url, "GET", CAPABILITIES, user="bob", headers={"x-burst": "1"}).status_code == 404
    assert ask(url, "GET", CAPABILITIES, user="bob", headers={"x-burst": "1"}).status_code == 404
    assert front.asked[before:] == ["ann", "dora", "bob", "bob"]


def test_of_a_long_thread_no_more_is_kept_than_says_which_it_is(url: str) -> None:
    assert ask(url, "GET", CAPABILITIES, headers={"x-test-threads": "long"}).status_code == 200
    endless = ask(url, "GET", CAPABILITIES, headers={"x-test-threads": "endless"})
    assert endless.status_code == 503
    assert "bytes" in endless.json()["error"]["message"]


SESSION = {"session_id": "ssn_1", "created_at": "2026-02-02T02:02:02Z", "tags": {"langgraph_user": "ann"}}
OF_A_THREAD = {"binding": {"scope": {"type": "thread", "id": THREAD}}, "session_id": "ssn_1"}


@pytest.mark.parametrize(
    ("user", "thread_made", "tag", "is_shown"),
    [
        # Another's, of a thread that was there before it: they share the thread.
        ("dora", "2026-02-02T02:02:02.5+00:00", None, True),
        ("dora", "2026-01-01T00:00:00Z", None, True),
        # Of a thread that was made after it: the one it was made for is gone.
        ("dora", "2026-02-02T02:02:03Z", None, False),
        # The very thread, whatever the clocks say, and another one.
        ("dora", "2027-01-01T00:00:00Z", "2027-01-01T00:00:00Z", True),
        ("dora", "2026-01-01T00:00:00Z", "2025-01-01T00:00:00Z", False),
        # A server that doesn't say how old its threads are.
        ("dora", "", None, False),
        # Whoever made it.
        ("ann", "2027-01-01T00:00:00Z", None, True),
    ],
)
def test_a_session_of_an_earlier_thread_is_only_for_whom_it_was_made(user: str, thread_made: str, tag: str | None, is_shown: bool) -> None:
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
                told = ask(url, method, path, user=user, headers={"x-test-threads": thread_made}, json=body)
                assert told.status_code == (200 if is_shown else 404), f"{method} {path}: {told.text}"
            shown = ask(
                url, "GET", f"/v1/sandbox/sessions?scope_type=thread&scope_id={THREAD}", user=user, headers={"x-test-threads": thread_made}
            )
            assert len(shown.json()["items"]) == is_shown


def test_a_key_that_the_broker_refuses_is_not_the_callers_fault(upstream: Upstream) -> None:
    with served(Settings(upstream.url, Secret(KEY))) as url:
        upstream.answers["GET /v1/keys"], kept = answer("401 Unauthorized", {}), upstream.answers["GET /v1/keys"]
        try:
            assert ask(url, "GET", CAPABILITIES).status_code == 503
        finally:
            upstream.answers["GET /v1/keys"] = kept
        assert ask(url, "GET", CAPABILITIES).status_code == 200


def test_an_operators_key_is_refused(broker: Broker) -> None:
    with served(Settings(broker.url, Secret(broker.operator_key))) as url:
        refused = ask(url, "POST", "/v1/sandbox/sessions", json={"thread_id": THREAD, "mode": "ensure"})
        assert refused.status_code == 503
        assert "--kind human" in refused.json()["error"]["message"]


def test_a_broker_that_is_away_is_told_as_such() -> None:
    with served(Settings("http://127.0.0.1:1", Secret(KEY))) as url:
        away = ask(url, "GET", CAPABILITIES)
        assert (away.status_code, away.json()["error"]["retryable"]) == (503, True)
        relayed = ask(url, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"authorization": f"Bearer {token()}"})
        assert relayed.status_code == 503


@pytest.mark.parametrize(("threads", "status"), [("401", 403), ("403", 403), ("404", 404), ("422", 404), ("500", 503), ("greeting", 503)])
def test_a_thread_that_the_deployment_does_not_show_is_not_there(url: str, upstream: Upstream, threads: str, status: int) -> None:
    before = len(upstream.heads)
    assert ask(url, "GET", CAPABILITIES, headers={"x-test-threads": threads}).status_code == status
    assert len(upstream.heads) == before


def test_who_is_not_known_gets_nowhere(url: str, upstream: Upstream) -> None:
    before = len(upstream.heads)
    assert ask(url, "GET", CAPABILITIES, user="").status_code == 401
    assert ask(url, "GET", CAPABILITIES, user="studio").status_code == 403
    with served(Settings(upstream.url, Secret(KEY)), has_auth=False) as bare:
        # A deployment that forgot `enable_custom_route_auth`.
        assert ask(bare, "GET", CAPABILITIES).status_code == 403
        assert ask(bare, "GET", f"/dp/{SANDBOX}/v1/files/a", headers={"x-api-key": token()}).status_code == 403
    assert len(upstream.heads) == before


def test_a_body_is_bounded_and_must_be_an_object(url: str) -> None:
    assert ask(url, "POST", "/v1/sandbox/sessions", content=b"x" * 70_000).status_code == 413
    for body in (b"[]", b"{", b'"a"', b"[" * 5000):
        assert ask(url, "POST", "/v1/sandbox/sessions", content=body).status_code == 400


def test_callers_that_the_broker_knows_are_themselves_there(broker: Broker) -> None:
    ann, dora = broker.key("ann-herself", "human"), broker.key("dora-herself", "human")
    with served(Settings(broker.url, identity="caller")) as url:
        body = {"thread_id": THREAD, "mode": "ensure", "access": "owner"}
        mine = ask(url, "POST", "/v1/sandbox/sessions", headers=bearer(ann), json=body)
        assert mine.status_code == 200, mine.text
        # Who may see the thread here may still not have what is another's there.
        theirs = ask(url, "POST", "/v1/sandbox/sessions", user="dora", headers=bearer(dora), json=body)
        assert (theirs.status_code, theirs.json()["error"]["code"]) == (403, "FORBIDDEN")
        assert ask(url, "POST", "/v1/sandbox/sessions", json=body).status_code == 401
        assert ask(url, "DELETE", f"/v1/sandbox/sessions/{mine.json()['session_id']}", headers=bearer(ann)).status_code == 204


def test_langsmiths_api_is_for_callers_that_the_broker_knows(broker: Broker) -> None:
    key = {"x-api-key": broker.key("ann-with-boxes", "human")}
    with served(Settings(broker.url, identity="caller", relay_url="https://deployment.example")) as url:
        for place in ("/v2/sandboxes", "/api/v2/sandboxes"):
            made = ask(url, "POST", f"{place}/boxes", headers=key, json={"name": "through", "wait_for_ready": True, "timeout": 60})
            assert made.status_code == 201, made.text
            assert made.json()["dataplane_url"].startswith("https://deployment.example/dp/sb_")
            listed = ask(url, "GET", f"{place}/boxes?limit=10", headers=key).json()["sandboxes"]
            assert "through" in [box["name"] for box in listed]
            link = ask(url, "POST", f"{place}/boxes/through/download-url", headers=key, json={"path": "/etc/passwd"})
            # A credential in a URL, which this server would write into its log.
            assert link.status_code in (200, 201), link.text
            assert broker.url in link.text
            assert "deployment.example" not in link.text
            assert ask(url, "DELETE", f"{place}/boxes/through", headers=key).status_code == 204
            missing = ask(url, "GET", f"{place}/boxes/through", headers=key)
            assert (missing.status_code, missing.json()["detail"]["error"]) == (404, "NotFound")
            # Another service's key is not the broker's to see.
            for headers in ({}, {"x-api-key": "lsv2_somebody-elses"}):
                refused = ask(url, "GET", f"{place}/boxes", headers=headers)
                assert (refused.status_code, refused.json()["detail"]["error"]) == (401, "Unauthorized")


def test_users_of_a_shared_key_find_no_boxes_of_one_another(url: str, upstream: Upstream) -> None:
    before = len(upstream.heads)
    for method, where in (("GET", "/v2/sandboxes/boxes"), ("POST", "/api/v2/sandboxes/snapshots"), ("DELETE", "/v2/sandboxes/volumes/x")):
        refused = ask(url, method, where)
        assert (refused.status_code, refused.json()["detail"]["error"]) == (403, "PermissionDenied")
        assert ask(url, method, where, user="").status_code == 401
    assert len(upstream.heads) == before


def test_the_thread_authoritys_credential_is_sent_only_when_told(upstream: Upstream) -> None:
    with served(Settings(upstream.url, Secret(KEY), is_thread_authority=True)) as url:
        ask(url, "GET", CAPABILITIES, headers={"authorization": "Bearer ann-secret"})
        assert upstream.last()["x-thread-authorization"] == "Bearer ann-secret"


def test_a_private_authority_counts_for_requests_and_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_addresses_at_the_broker_become_the_deployments() -> None:
    rewrite = through("http://broker:1/base", "https://deployment.example/x")
    told = {"sandbox": {"http_base_url": "http://broker:1/base/dp/sb_1/v1", "ws_base_url": "ws://broker:1/base/dp/sb_1/v1"}}
    assert rewrite(told)["sandbox"] == {
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


def test_only_the_way_to_sandboxes_has_visitors() -> None:
    assert dataplane_visitor("/dp/sb_1/v1/exec") is not None
    assert dataplane_visitor("/v1/sandbox/relay/ssn_1/v1/exec") is not None
    assert dataplane_visitor("/x/dp/sb_1/v1/exec", "/x") is not None
    for path in ("/threads", "/v1/sandbox/sessions", "/dpx/", "/dp", "", "/x/dp/sb_1", "/threads/dp/"):
        assert dataplane_visitor(path) is None


def test_settings_say_what_is_missing() -> None:
    env = {"COBOX_URL": "http://broker:1/", "COBOX_API_KEY": " k \n", "COBOX_LANGGRAPH_RELAY": "https://d.example/"}
    settings = Settings.from_environment(env)
    assert (settings.broker_url, settings.relay_url) == ("http://broker:1", "https://d.example")
    assert settings.api_key == Secret("k")
    assert "k " not in repr(settings)
    for changed in ({"COBOX_URL": ""}, {"COBOX_API_KEY": ""}, {"COBOX_URL": "http://u:p@broker"}, {"COBOX_LANGGRAPH_IDENTITY": "root"}):
        with pytest.raises(SettingsError):
            Settings.from_environment(env | changed)
