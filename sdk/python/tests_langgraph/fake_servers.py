"""Fake servers: a minimal app in place of a LangGraph server that serves the routes, and an upstream that records what a broker
would receive."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cobox.langgraph.app import Settings, create_app
from cobox.langgraph.serving.caller_identity import dataplane_visitor


class AuthenticatedUser(BaseUser):
    """The user object that LangGraph creates for an authenticated caller."""

    def __init__(self, identity: str, is_authenticated: bool = True) -> None:
        self._identity, self._is_authenticated = identity, is_authenticated

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def display_name(self) -> str:
        return self._identity

    @property
    def is_authenticated(self) -> bool:
        return self._is_authenticated


class StudioUser(AuthenticatedUser):
    pass


class TestHeaderAuth(AuthenticationBackend):
    """Authenticates by a header that only tests send."""

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser]:
        if dataplane_visitor(conn.url.path) is not None:
            return AuthCredentials(), AuthenticatedUser("cobox-dataplane", False)
        name = conn.headers.get("x-test-user", "")
        return AuthCredentials(), StudioUser("studio") if name == "studio" else AuthenticatedUser(name, bool(name))


THREAD = "11111111-2222-3333-4444-555555555555"


# The identities for which the visibility of a thread was checked.
visibility_checks: list[str] = []


async def long_thread(first: dict[str, Any]) -> AsyncIterator[bytes]:
    yield json.dumps(first)[:-1].encode() + b', "messages": ["'
    for _ in range(40):
        yield b"x" * 1024 * 1024
    yield b'"]}'


async def thread(request: Request) -> Response:
    """`GET /threads/{id}`; the only thread belongs to ann and dora."""
    bodies: dict[str, Any] = {"200": {"thread_id": THREAD}, "greeting": "hello everybody"}
    visibility_checks.append(request.user.identity)
    answer = request.headers.get("x-test-threads", "")
    if answer == "greeting":
        return JSONResponse(bodies["greeting"])
    if answer.startswith("20"):
        # The header is the creation time.
        return JSONResponse(bodies["200"] | {"created_at": answer})
    if answer in ("long", "endless"):
        first = {"thread_id": THREAD, "created_at": "2026-01-01T00:00:00Z"} if answer == "long" else {"values": 1}
        return StreamingResponse(long_thread(first))
    if answer:
        return Response(status_code=int(answer))
    is_anns = request.user.identity in ("ann", "dora") and request.path_params["thread_id"] == THREAD
    return JSONResponse(bodies["200"]) if is_anns else JSONResponse({"detail": "no"}, 404)


@contextmanager
def served(settings: Settings, *, has_auth: bool = True) -> Iterator[str]:
    app = create_app(settings)
    app.router.routes.append(Route("/threads/{thread_id}", thread))
    if has_auth:
        app.add_middleware(AuthenticationMiddleware, backend=TestHeaderAuth())
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", loop="asyncio"))
    running = threading.Thread(target=server.run, args=([listener],), daemon=True)
    running.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        running.join(20)
        listener.close()


@dataclass
class RecordingUpstream:
    """Sends configured responses and records the requests."""

    url: str = ""
    heads: list[str] = field(default_factory=list)
    # Responses by the start of the request.
    answers: dict[str, bytes] = field(default_factory=dict)
    # The start of requests that are never answered, and a count of those waiting.
    hangs: str | None = None
    hung: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    over: threading.Event = field(default_factory=threading.Event)

    def last(self) -> dict[str, str]:
        lines = self.heads[-1].split("\r\n")
        return {"": lines[0]} | {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}


def answer(status: str, body: Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(data)}", "connection: close", *headers]
    return "\r\n".join([*head, "", ""]).encode() + data


@contextmanager
def recording(tls: ssl.SSLContext | None = None) -> Iterator[RecordingUpstream]:
    upstream = RecordingUpstream()
    upstream.answers["GET /v1/keys"] = answer("403 Forbidden", {})
    upstream.answers["GET /v1/sandbox/sessions?"] = answer("200 OK", {"items": []})
    listener = socket.create_server(("127.0.0.1", 0))
    upstream.url = f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"

    def one(connection: socket.socket) -> None:
        try:
            connection = tls.wrap_socket(connection, server_side=True) if tls else connection
        except OSError:
            # The client rejected the certificate.
            connection.close()
            return
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            head = data.split(b"\r\n\r\n")[0].decode("latin-1")
            upstream.heads.append(head)
            if upstream.hangs is not None and head.startswith(upstream.hangs):
                upstream.hung.release()
                upstream.over.wait()
                return
            found = next((v for k, v in upstream.answers.items() if head.startswith(k)), answer("200 OK", {}))
            connection.sendall(found)

    def listen() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    running = threading.Thread(target=listen, daemon=True)
    running.start()
    try:
        yield upstream
    finally:
        upstream.over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        running.join(10)
