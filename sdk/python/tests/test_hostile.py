"""What answers is a stranger: pages that aren't JSON, answers without end, wrong types, echoes of our credentials, redirects."""

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

from cobox import AsyncSession, Cobox, Secret, Session, answers, errors
from cobox.decode import decode

KEY = "cbx_a-key-that-nobody-may-see"
TOKEN = "a-token-that-nobody-may-see"


class Stranger:
    """An HTTP server that answers whatever it was told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 200, {"Content-Type": "application/json"}, b"{}"
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        stranger = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                stranger.asked.append((self.command, self.path, dict(self.headers.items())))
                body = stranger.body.replace(b"ECHO", (self.headers.get("Authorization") or "").encode())
                self.send_response(stranger.status)
                for name, value in stranger.headers.items():
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
def stranger() -> Iterator[Stranger]:
    stranger = Stranger()
    yield stranger
    stranger.server.shutdown()
    stranger.server.server_close()


@pytest.fixture
def theirs(kind: Any, stranger: Stranger) -> Any:
    session = (AsyncSession if kind.is_async else Session).from_token(stranger.url, TOKEN, sandbox_id="sb_x")
    kind._closing.append(session)
    return session


@pytest.mark.parametrize(
    "body",
    [b"<html>hello</html>", b"", b"[]", b"null", b'{"stdout": 1}', b'{"stdout": "x"}', b"[" * 100_000, b'{"exit_code": true}', b"\xff\xfe"],
)
def test_an_answer_that_is_none_of_ours_is_said_to_be(kind: Any, stranger: Stranger, theirs: Any, body: bytes) -> None:
    stranger.body = body
    with pytest.raises(errors.NotCobox) as refused:
        kind.do(theirs.exec("true"))
    assert "can't be read" in str(refused.value)
    client = kind.client(stranger.url, KEY)
    with pytest.raises(errors.NotCobox):
        kind.do(client.session("t"))


@pytest.mark.parametrize("status", [200, 302, 307, 400, 404, 418, 500])
def test_any_status_with_a_page_behind_it_is_an_error_of_ours(kind: Any, stranger: Stranger, theirs: Any, status: int) -> None:
    stranger.status, stranger.body = status, b"<h1>It works!</h1>"
    stranger.headers = {"Location": f"{stranger.url}/elsewhere", "Content-Type": "text/html"}
    with pytest.raises(errors.NotCobox):
        kind.do(theirs.fs.list("/workspace"))
    assert [path for _, path, _ in stranger.asked] == ["/fs/list"], "a redirect was followed, with the token"


def test_an_answer_without_end_is_not_taken(kind: Any, stranger: Stranger, theirs: Any) -> None:
    stranger.body = b"x" * 3_000_000
    with pytest.raises(errors.NotCobox, match="more than 1000000 bytes"):
        kind.do(theirs.files.read("/a", max_bytes=1_000_000))


def test_an_event_without_end_and_one_of_another_shape_are_not_taken(kind: Any, stranger: Stranger, theirs: Any) -> None:
    stranger.headers = {"Content-Type": "text/event-stream"}
    for body in (
        b"data: " + b"x" * 400_000,
        b"event: created\ndata: []\n\n",
        b"event: created\ndata: {\n\n",
        b"event: error\ndata: {}\n\n",
    ):
        stranger.body = body
        watch = kind.do(theirs.watch("/workspace"))
        with pytest.raises(errors.NotCobox):
            kind.do(watch.next())


def test_no_message_repeats_a_credential_or_speaks_to_a_terminal(kind: Any, stranger: Stranger, theirs: Any) -> None:
    stranger.status = 403
    told = {"code": "FORBIDDEN", "message": "no \x1b[31m to ECHO", "retryable": False, "request_id": "ECHO", "details": {"you": "ECHO"}}
    stranger.body = json.dumps({"error": told}).encode()
    with pytest.raises(errors.Forbidden) as refused:
        kind.do(theirs.exec("true"))
    with pytest.raises(errors.Forbidden) as by_key:
        kind.do(kind.client(stranger.url, KEY).session("t"))
    for error in (refused.value, by_key.value):
        shown = f"{error} {error!r} {error.__dict__}"
        assert TOKEN not in shown and KEY not in shown and "\x1b" not in shown


def test_uploads_and_downloads_that_are_answered_short_are_errors(kind: Any, stranger: Stranger, theirs: Any) -> None:
    stranger.body = b'{"files": []}'
    with pytest.raises(errors.NotCobox):
        kind.do(theirs.files.upload([("/a", b"x")]))
    stranger.headers = {"Content-Type": "multipart/mixed; boundary=b"}
    for body in (b"", b"--b--", b"--b\r\n\r\nx", b"--b\r\ncontent-length: 99999\r\n\r\nx\r\n--b--", b"--b\r\ncontent-length: -1\r\n\r\n"):
        stranger.body = body
        with pytest.raises(errors.NotCobox):
            kind.do(theirs.files.download(["/a"]))


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
def test_a_frame_that_is_none_of_ours_ends_the_stream(kind: Any, frames: list[str]) -> None:
    with socket_that_says(frames) as url:
        box = (AsyncSession if kind.is_async else Session).from_token(url, TOKEN)
        with pytest.raises(errors.NotCobox):
            stream = kind.do(box.stream("true"))
            while kind.do(stream.next()) is not None:
                pass
        kind.do(box.close())


def test_output_with_a_hole_is_not_passed_off_as_whole(kind: Any) -> None:
    frames = ["READY", '{"type": "stdout", "offset": 0, "data": "abc"}', '{"type": "stdout", "offset": 9, "data": "j"}']
    with socket_that_says(frames) as url:
        box = (AsyncSession if kind.is_async else Session).from_token(url, TOKEN)
        stream = kind.do(box.stream("true"))
        assert kind.do(stream.next()).text == "abc"
        with pytest.raises(errors.OutputHole, match="6 bytes of stdout are missing at 3"):
            kind.do(stream.next())
        assert kind.do(stream.next()) is None
        kind.do(box.close())


def test_bytes_that_are_said_to_be_gone_are_told(kind: Any) -> None:
    frames = ["READY", '{"type": "gap", "from": 0, "to": 5}', '{"type": "stdout", "offset": 3, "data": "defg"}']
    frames += ['{"type": "gap", "from": 7, "to": 9}', '{"type": "exit", "exit_code": 0}']
    with socket_that_says(frames) as url:
        box = (AsyncSession if kind.is_async else Session).from_token(url, TOKEN)
        stream = kind.do(box.stream("true"))
        pieces = [(p.data, p.offset, p.lost) for p in kind.each(stream)]
        assert pieces == [(b"fg", 5, 5), (b"", 9, 2)] and stream.exit.exit_code == 0
        kind.do(box.close())


class socket_that_says:  # noqa: N801
    """A WebSocket server that says these frames to whoever comes."""

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


def test_no_log_at_any_level_has_a_credential(kind: Any, broker: Any, thread: str, caplog: pytest.LogCaptureFixture) -> None:
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
    shown = caplog.text + repr([client, box, box._grant.__dict__, client._door.__dict__, box.files, events, box._grant.token])
    assert "HTTP Request" in caplog.text
    for secret in (broker.agent_key, *tokens):
        assert secret not in shown
        assert secret.rpartition(".")[2] not in shown


def test_a_secret_shows_itself_to_nobody() -> None:
    secret = Secret("hush")
    assert "hush" not in f"{secret} {secret!r} {secret!s} {secret:>10} {[secret]} {vars(Cobox('http://h', 'hush'))}"
    assert secret == Secret("hush") and secret != Secret("other") and secret != "hush"
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(secret)


def test_an_error_survives_a_process_border() -> None:
    error = errors.FileNotFound("gone", status=404, request_id="req_1", details={"a": 1})
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), str(again), again.details) == (errors.FileNotFound, str(error), {"a": 1})


def test_each_code_of_the_protocol_has_a_class_of_its_own() -> None:
    from conftest import REPO

    source = (REPO / "crates/protocol/src/error.rs").read_text()
    codes = {part.split('"')[1] for part in source.split("codes! {")[1].split("}\n")[0].splitlines() if '= "' in part}
    assert len(codes) > 30
    assert codes - set(errors.ApiError.by_code) == set(), "a new code needs a class in cobox/errors.py"
    unknown = errors.from_envelope({"error": {"code": "NEW_ONE", "message": "m", "retryable": True, "request_id": "r"}}, status=499)
    assert unknown is not None and (unknown.code, unknown.retryable, type(unknown)) == ("NEW_ONE", True, errors.ApiError)


def test_an_answer_may_have_more_than_we_know_but_nothing_else_than_it_says() -> None:
    body = {"lease_expires_at": "2026-01-01T00:00:00Z", "state": "active", "new": {"a": 1}}
    assert decode(answers.Heartbeat, json.dumps(body).encode(), "u").state == "active"
    for field, wrong in (
        ("state", 1),
        ("state", None),
        ("lease_expires_at", "soon"),
        ("lease_expires_at", "2026-01-01T00:00:00"),
        ("lease_expires_at", 5),
    ):
        with pytest.raises(errors.NotCobox, match=field):
            decode(answers.Heartbeat, json.dumps(body | {field: wrong}).encode(), "u")
