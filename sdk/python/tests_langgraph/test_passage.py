"""What crosses to the broker and what doesn't, and how the served routes fail: closed."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front import THREAD, Upstream, answer, recording, served
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve
from world import Broker, bearer

from cobox import Secret
from cobox.langgraph.app import Settings, SettingsError
from cobox.langgraph.serving.addresses import through
from cobox.langgraph.serving.callers import dataplane_visitor
from cobox.langgraph.serving.dataplane import is_sandbox_token

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


def test_the_thread_authoritys_credential_is_sent_only_when_told(upstream: Upstream) -> None:
    with served(Settings(upstream.url, Secret(KEY), is_thread_authority=True)) as url:
        ask(url, "GET", CAPABILITIES, headers={"authorization": "Bearer ann-secret"})
        assert upstream.last()["x-thread-authorization"] == "Bearer ann-secret"


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
