"""Carries effects out with sockets that block: the interpreter behind `Cobox`. Safe to use from many threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import connect

from . import errors, network
from .flow import (
    Acquire,
    Answer,
    Closed,
    Dial,
    Drop,
    Effect,
    Flow,
    HangUp,
    Hear,
    Open,
    Opened,
    Pause,
    Pull,
    Request,
    Say,
    Send,
    Silence,
)

T = TypeVar("T")
# Seconds for somebody else's refresh.
LOCK_TIMEOUT = 60.0
# Before these nothing of a request has left.
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)


class Stopped(Exception):
    """A flow that runs in the background is no longer wanted."""


class BlockingIO:
    def __init__(self, net: network.Network) -> None:
        self.net = net
        self._clients: dict[tuple[bool, bool], httpx.Client] = {}
        self._making = threading.Lock()
        self._is_closed = False

    def run(self, flow: Flow[T], stopping: threading.Event | None = None) -> T:
        """Runs a flow to its end. An effect's error is raised where the flow asked for it."""
        try:
            effect = next(flow)
            while True:
                try:
                    result = self._carry_out(effect, stopping)
                except BaseException as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as done:
            value: T = done.value
            return value

    def close(self) -> None:
        with self._making:
            clients, self._clients, self._is_closed = self._clients, {}, True
        for client in clients.values():
            client.close()

    def _carry_out(self, effect: Effect, stopping: threading.Event | None) -> Any:
        if isinstance(effect, Send):
            return self._send(effect.request)
        if isinstance(effect, Hear):
            return self._hear(effect)
        if isinstance(effect, Say):
            return self._say(effect)
        if isinstance(effect, Pause):
            return self._pause(effect.seconds, stopping)
        if isinstance(effect, Acquire):
            if not effect.lock.acquire(timeout=LOCK_TIMEOUT):
                # A blocking call in the very thread whose event loop holds it would wait for itself.
                raise errors.Busy(
                    "somebody else has been at it for a minute; a stream has one reader, and an event loop must not be blocked"
                )
            return None
        if isinstance(effect, Open):
            return self._open(effect.request)
        if isinstance(effect, Pull):
            return self._pull(effect.opened)
        if isinstance(effect, Drop):
            return effect.opened.source[0].close()
        if isinstance(effect, Dial):
            return self._dial(effect)
        if isinstance(effect, HangUp):
            return effect.socket.close()
        raise TypeError(f"no such effect: {effect!r}")

    def _client(self, url: str) -> httpx.Client:
        local, is_https = network.is_local(url), url.startswith("https:")
        client = self._clients.get((local, is_https))
        if client is None:
            with self._making:
                if self._is_closed:
                    raise errors.CoboxError("this Cobox is closed; make another", code="CLOSED")
                client = self._clients.get((local, is_https))
                if client is None:
                    limits = httpx.Limits(max_connections=network.MAX_CONNECTIONS, max_keepalive_connections=network.MAX_CONNECTIONS)
                    verify = self.net.tls() if is_https else False  # without TLS there is nothing to load certificates for
                    client = httpx.Client(verify=verify, trust_env=not local, limits=limits, follow_redirects=False)
                    self._clients[local, is_https] = client
        return client

    def _begin(self, request: Request) -> httpx.Response:
        client, timeout = self._client(request.url), network.timeouts(request)
        content = request.body.blocking() if request.body is not None else None
        try:
            built = client.build_request(request.method, request.url, headers=network.head(request), content=content, timeout=timeout)
            return client.send(built, stream=True)
        except UNSENT as error:
            raise network.unreachable(request.url, error, was_sent=False) from None
        except httpx.HTTPError as error:
            raise network.unreachable(request.url, error, was_sent=True) from None

    def _send(self, request: Request) -> Answer:
        deadline = time.monotonic() + request.timeout
        response = self._begin(request)
        try:
            return self._read(request, response, request.max_bytes, deadline)
        finally:
            response.close()

    def _read(self, request: Request, response: httpx.Response, max_bytes: int, deadline: float) -> Answer:
        body = bytearray()
        try:
            for piece in response.iter_raw():
                body += piece
                if len(body) > max_bytes:
                    raise network.endless(request.url, max_bytes)
                if time.monotonic() > deadline:
                    raise network.unreachable(request.url, TimeoutError("the answer took too long"), was_sent=True)
        except httpx.HTTPError as error:
            raise network.unreachable(request.url, error, was_sent=True) from None
        return network.answer_of(response.status_code, response.headers, bytes(body))

    def _open(self, request: Request) -> Opened | Answer:
        response = self._begin(request)
        if response.is_success:
            answer = network.answer_of(response.status_code, response.headers, b"")
            return Opened(answer.status, answer.headers, (response, response.iter_raw()))
        try:
            return self._read(request, response, network.MAX_ERROR_BYTES, time.monotonic() + request.timeout)
        finally:
            response.close()

    def _pull(self, opened: Opened) -> bytes:
        pieces: Iterator[bytes] = opened.source[1]
        try:
            return next((piece for piece in pieces if piece), b"")
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise errors.Broken(errors.clean(str(error)) or type(error).__name__) from None

    def _dial(self, dial: Dial) -> Any:
        local = network.is_local(dial.url)
        headers = {"Authorization": f"Bearer {dial.secret.expose()}"} if dial.secret is not None else {}
        try:
            opened = connect(
                dial.url,
                additional_headers=headers,
                user_agent_header=network.USER_AGENT,
                open_timeout=dial.timeout,
                close_timeout=1,
                ping_interval=None,
                compression=None,
                max_size=network.MAX_FRAME_BYTES + 64 * 1024,
                ssl=self.net.tls() if dial.url.startswith("wss:") else None,
                proxy=None if local else True,
                logger=network.socket_log,
            )
            # Entered by hand: newer versions want that, older ones give themselves, and HangUp closes it.
            return opened.__enter__()
        except InvalidStatus as error:
            raise network.refused_upgrade(dial.url, error.response) from None
        except (OSError, EOFError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
            raise network.unreachable(dial.url, error, was_sent=True) from None

    def _hear(self, hear: Hear) -> str | bytes:
        try:
            message: str | bytes = hear.socket.recv(timeout=hear.timeout)
            return message
        except TimeoutError:
            raise Silence from None
        except ConnectionClosed as error:
            raise closed(error) from None

    def _say(self, say: Say) -> None:
        try:
            say.socket.send(say.message)
        except ConnectionClosed as error:
            raise closed(error) from None

    def _pause(self, seconds: float, stopping: threading.Event | None) -> None:
        if stopping is None:
            time.sleep(max(0.0, seconds))
        elif stopping.wait(max(0.0, seconds)):
            raise Stopped


def closed(error: ConnectionClosed) -> Closed:
    """How the other side ended it; 1006 where it didn't say."""
    if error.rcvd is None:
        return Closed(1006, "")
    return Closed(error.rcvd.code, errors.clean(error.rcvd.reason))
