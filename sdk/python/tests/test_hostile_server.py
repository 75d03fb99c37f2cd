"""Tests against a hostile server: invalid JSON, oversized responses, wrong types, echoed credentials, redirects."""

from __future__ import annotations

import http.server
import json
import logging
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.server import serve

from cobox import AsyncSession, Cobox, Secret, Session, errors, responses
from cobox.decode import decode

KEY = "cbx_a-key-that-nobody-may-see"
TOKEN = "a-token-that-nobody-may-see"


class HostileServer:
    """An HTTP server that sends a configured response and records the requests."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 200, {"Content-Type": "application/json"}, b"{}"
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.requests.append((self.command, self.path, dict(self.headers.items())))
                body = server.body.replace(b"ECHO", (self.headers.get("Authorization") or "").encode())
                self.send_response(server.status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def session(kind: Any, server: HostileServer) -> Any:
    session = (AsyncSession if kind.is_async else Session).from_token(server.url, TOKEN, sandbox_id="sb_x")
    kind._closing.append(session)
    return session


@pytest.mark.parametrize(
    "body",
    [b"<html>hello</html>", b"", b"[]", b"null", b'{"stdout": 1}', b'{"stdout": "x"}', b"[" * 100_000, b'{"exit_code": true}', b"\xff\xfe"],
)
def test_an_invalid_response_is_reported_as_not_cobox(kind: Any, server: HostileServer, session: Any, body: bytes) -> None:
    server.body = body
    with pytest.raises(errors.NotCobox) as refused:
        kind.do(session.exec("true"))
    assert "can't be read" in str(refused.value)
    client = kind.client(server.url, KEY)
    with pytest.raises(errors.NotCobox):
        kind.do(client.session("t"))


@pytest.mark.parametrize("status", [200, 302, 307, 400, 404, 418, 500])
def test_an_html_page_is_an_error_with_any_status(kind: Any, server: HostileServer, session: Any, status: int) -> None:
    server.status, server.body = status, b"<h1>It works!</h1>"
    server.headers = {"Location": f"{server.url}/elsewhere", "Content-Type": "text/html"}
    with pytest.raises(errors.NotCobox):
        kind.do(session.fs.list("/workspace"))
    assert [path for _, path, _ in server.requests] == ["/fs/list"], "a redirect was followed, with the token"


def test_an_oversized_response_is_refused(kind: Any, server: HostileServer, session: Any) -> None:
    server.body = b"x" * 3_000_000
    with pytest.raises(errors.NotCobox, match="more than 1000000 bytes"):
        kind.do(session.files.read("/a", max_bytes=1_000_000))


def test_oversized_and_malformed_events_are_refused(kind: Any, server: HostileServer, session: Any) -> None:
    server.headers = {"Content-Type": "text/event-stream"}
    for body in (
        b"data: " + b"x" * 400_000,
        b"event: created\ndata: []\n\n",
        b"event: created\ndata: {\n\n",
        b"event: error\ndata: {}\n\n",
    ):
        server.body = body
        watch = kind.do(session.watch("/workspace"))
        with pytest.raises(errors.NotCobox):
            kind.do(watch.next())


def test_error_messages_contain_no_credentials_and_no_control_characters(kind: Any, server: HostileServer, session: Any) -> None:
    server.status = 403
    error = {"code": "FORBIDDEN", "message": "no \x1b[31m to ECHO", "retryable": False, "request_id": "ECHO", "details": {"you": "ECHO"}}
    server.body = json.dumps({"error": error}).encode()
    with pytest.raises(errors.Forbidden) as refused:
        kind.do(session.exec("true"))
    with pytest.raises(errors.Forbidden) as by_key:
        kind.do(kind.client(server.url, KEY).session("t"))
    for error in (refused.value, by_key.value):
        shown = f"{error} {error!r} {error.__dict__}"
        assert TOKEN not in shown and KEY not in shown and "\x1b" not in shown


def test_incomplete_upload_and_download_responses_are_errors(kind: Any, server: HostileServer, session: Any) -> None:
    server.body = b'{"files": []}'
    with pytest.raises(errors.NotCobox):
        kind.do(session.files.upload([("/a", b"x")]))
    server.headers = {"Content-Type": "multipart/mixed; boundary=b"}
    for body in (b"", b"--b--", b"--b\r\n\r\nx", b"--b\r\ncontent-length: 99999\r\n\r\nx\r\n--b--", b"--b\r\ncontent-length: -1\r\n\r\n"):
        server.body = body
        with pytest.raises(errors.NotCobox):
            kind.do(session.files.download(["/a"]))


@pytest.mark.parametrize(
    "frames",
    [
        ["not json"],
        ["[]"],
        ["null"],
        ['{"type": 1}', '{"type": "ready"}'],
        ['{"type": "ready", "command_id": 7}'],
        ["READY", '{"type": "stdout", "offset": -1, "data": "x"}'],
        ["READY", '{"type": "stdout", "offset": true, "data": "x"}'],
        ["READY", '{"type": "stdout", "offset": 0, "data_b64": "%%%"}'],
        ["READY", '{"type": "exit"}'],
        ["READY", '{"type": "exit", "exit_code": "0"}'],
        ["READY", '{"type": "gap", "from": 0, "to": 9, "stream": "elsewhere"}'],
        ["READY", '{"type": "error"}'],
        ["READY", "[" * 50_000],
    ],
)
def test_an_invalid_frame_ends_the_stream(kind: Any, frames: list[str]) -> None:
    with frame_server(frames) as url:
        box = (AsyncSession if kind.is_async else Session).from_token(url, TOKEN)
        with pytest.raises(errors.NotCobox):
            stream = kind.do(box.stream("true"))
            while kind.do(stream.next()) is not None:
                pass
        kind.do(box.close())


def test_a_hole_in_the_output_is_an_error(kind: Any) -> None:
    frames = ["READY", '{"type": "stdout", "offset": 0, "data": "abc"}', '{"type": "stdout", "offset": 9, "data": "j"}']
    with frame_server(frames) as url:
        box = (AsyncSession if kind.is_async else Session).from_token(url, TOKEN)
        stream = kind.do(box.stream("true"))
        assert kind.do(stream.next()).text == "abc"
        with pytest.raises(errors.OutputHole, match="6 bytes of stdout are missing at offset 3"):
            kind.do(stream.next())
        assert kind.do(stream.next()) is None
        kind.do(box.close())


def test_bytes_that_are_no_longer_kept_are_reported_as_lost(kind: Any) -> None:
    frames = ["READY", '{"type": "gap", "from": 0, "to": 5}', '{"type": "stdout", "offset": 3, "data": "defg"}']
    frames += ['{"type": "gap", "from": 7, "to": 9}', '{"type": "exit", "exit_code": 0}']
    with frame_server(frames) as url:
        box = (AsyncSession if kind.is_async else Session).from_token(url, TOKEN)
        stream = kind.do(box.stream("true"))
        pieces = [(p.data, p.offset, p.lost) for p in kind.each(stream)]
        assert pieces == [(b"fg", 5, 5), (b"", 9, 2)] and stream.exit.exit_code == 0
        kind.do(box.close())


class frame_server:  # noqa: N801
    """A WebSocket server that sends these frames to every client."""

    def __init__(self, frames: list[str]) -> None:
        self._frames = [
            f.replace("READY", '{"type": "ready", "command_id": "c", "pid": 1, "stdout_offset": 0, "stderr_offset": 0}') for f in frames
        ]

    def __enter__(self) -> str:
        def talk(connection: Any) -> None:
            connection.recv()
            for frame in self._frames:
                connection.send(frame)
            for _ in connection:
                pass

        self._server = serve(talk, "127.0.0.1", 0)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def __exit__(self, *of: object) -> None:
        self._server.shutdown()


def test_no_log_at_any_level_contains_a_credential(kind: Any, broker: Any, thread: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("cobox", "cobox.socket", "websockets", "httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, logger=name)
    client = kind.client(broker.url, broker.agent_key)
    box = kind.session(client, thread, release=True)
    kind.do(kind.do(box.stream("echo x")).wait())
    tokens = [box.token.expose()]
    kind.do(box.refresh())
    tokens.append(box.token.expose())
    kind.do(box.exec("true"))
    events = kind.do(box.events())
    kind.do(events.next())
    kind.do(events.close())
    shown = caplog.text + repr([client, box, box._grant.__dict__, client._endpoint.__dict__, box.files, events, box._grant.token])
    assert "HTTP Request" in caplog.text
    for secret in (broker.agent_key, *tokens):
        assert secret not in shown
        assert secret.rpartition(".")[2] not in shown


def test_a_secret_is_never_displayed() -> None:
    secret = Secret("hush")
    assert "hush" not in f"{secret} {secret!r} {secret!s} {secret:>10} {[secret]} {vars(Cobox('http://h', 'hush'))}"
    assert secret == Secret("hush") and secret != Secret("other") and secret != "hush"
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(secret)


def test_an_error_survives_pickling() -> None:
    error = errors.FileNotFound("gone", status=404, request_id="req_1", details={"a": 1})
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), str(again), again.details) == (errors.FileNotFound, str(error), {"a": 1})


def test_every_protocol_error_code_has_a_class() -> None:
    from conftest import REPO

    source = (REPO / "crates/protocol/src/error.rs").read_text()
    codes = {part.split('"')[1] for part in source.split("codes! {")[1].split("}\n")[0].splitlines() if '= "' in part}
    assert len(codes) > 30
    assert codes - set(errors.ApiError.by_code) == set(), "a new code needs a class in cobox/errors.py"
    unknown = errors.from_envelope({"error": {"code": "NEW_ONE", "message": "m", "retryable": True, "request_id": "r"}}, status=499)
    assert unknown is not None and (unknown.code, unknown.retryable, type(unknown)) == ("NEW_ONE", True, errors.ApiError)


def test_unknown_response_fields_are_ignored_and_wrong_types_refused() -> None:
    body = {"lease_expires_at": "2026-01-01T00:00:00Z", "state": "active", "new": {"a": 1}}
    assert decode(responses.Heartbeat, json.dumps(body).encode(), "u").state == "active"
    for field, wrong in (
        ("state", 1),
        ("state", None),
        ("lease_expires_at", "soon"),
        ("lease_expires_at", "2026-01-01T00:00:00"),
        ("lease_expires_at", 5),
    ):
        with pytest.raises(errors.NotCobox, match=field):
            decode(responses.Heartbeat, json.dumps(body | {field: wrong}).encode(), "u")
