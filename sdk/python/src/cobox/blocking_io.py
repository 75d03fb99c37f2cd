"""Executes effects with blocking sockets, for `Cobox`. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.sync.client import connect

from . import errors, network_settings
from .effects import (
    AcquireLock,
    CloseResponse,
    CloseSocket,
    Effect,
    Flow,
    OpenedResponse,
    OpenResponse,
    OpenSocket,
    ReadChunk,
    ReceiveMessage,
    ReceiveTimeout,
    Request,
    Response,
    SendMessage,
    SendRequest,
    Sleep,
    SocketClosed,
)

T = TypeVar("T")
# Seconds to wait for a lock, such as one held during another thread's token renewal.
LOCK_TIMEOUT = 60.0
# Errors after which no byte of the request has left this machine.
UNSENT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)


class Stopped(Exception):
    """A background flow was asked to stop."""


class BlockingIO:
    def __init__(self, net: network_settings.Network) -> None:
        self.net = net
        self._clients: dict[tuple[bool, bool], httpx.Client] = {}
        self._clients_lock = threading.Lock()
        self._is_closed = False

    def run(self, flow: Flow[T], stopping: threading.Event | None = None) -> T:
        """Runs a flow to its end. An error in an effect is raised at the flow's `yield`."""
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
        with self._clients_lock:
            clients, self._clients, self._is_closed = self._clients, {}, True
        for client in clients.values():
            client.close()

    def _carry_out(self, effect: Effect, stopping: threading.Event | None) -> Any:
        if isinstance(effect, SendRequest):
            return self._send(effect.request)
        if isinstance(effect, ReceiveMessage):
            return self._receive_message(effect)
        if isinstance(effect, SendMessage):
            return self._send_message(effect)
        if isinstance(effect, Sleep):
            return self._sleep(effect.seconds, stopping)
        if isinstance(effect, AcquireLock):
            if not effect.lock.acquire(timeout=LOCK_TIMEOUT):
                # A blocking call on the thread whose event loop holds the lock would deadlock.
                raise errors.Busy(
                    "the lock was held for a minute; a stream has one reader at a time, and an event loop must not be blocked"
                )
            return None
        if isinstance(effect, OpenResponse):
            return self._open_response(effect.request)
        if isinstance(effect, ReadChunk):
            return self._read_chunk(effect.opened)
        if isinstance(effect, CloseResponse):
            return effect.opened.source[0].close()
        if isinstance(effect, OpenSocket):
            return self._open_socket(effect)
        if isinstance(effect, CloseSocket):
            return effect.socket.close()
        raise TypeError(f"unknown effect: {effect!r}")

    def _client(self, url: str) -> httpx.Client:
        local, is_https = network_settings.is_local(url), url.startswith("https:")
        client = self._clients.get((local, is_https))
        if client is None:
            with self._clients_lock:
                if self._is_closed:
                    raise errors.CoboxError("this Cobox is closed; create another one", code="CLOSED")
                client = self._clients.get((local, is_https))
                if client is None:
                    limits = httpx.Limits(
                        max_connections=network_settings.MAX_CONNECTIONS, max_keepalive_connections=network_settings.MAX_CONNECTIONS
                    )
                    verify = self.net.tls() if is_https else False  # without TLS, loading certificates would be wasted work
                    client = httpx.Client(verify=verify, trust_env=not local, limits=limits, follow_redirects=False)
                    self._clients[local, is_https] = client
        return client

    def _start(self, request: Request) -> httpx.Response:
        client, timeout = self._client(request.url), network_settings.timeouts(request)
        content = request.body.sync_content() if request.body is not None else None
        try:
            built = client.build_request(
                request.method, request.url, headers=network_settings.request_headers(request), content=content, timeout=timeout
            )
            return client.send(built, stream=True)
        except UNSENT_ERRORS as error:
            raise network_settings.unreachable(request.url, error, was_sent=False) from None
        except httpx.HTTPError as error:
            raise network_settings.unreachable(request.url, error, was_sent=True) from None

    def _send(self, request: Request) -> Response:
        deadline = time.monotonic() + request.timeout
        response = self._start(request)
        try:
            return self._read(request, response, request.max_bytes, deadline)
        finally:
            response.close()

    def _read(self, request: Request, response: httpx.Response, max_bytes: int, deadline: float) -> Response:
        body = bytearray()
        try:
            for piece in response.iter_raw():
                body += piece
                if len(body) > max_bytes:
                    raise network_settings.too_long(request.url, max_bytes)
                if time.monotonic() > deadline:
                    raise network_settings.unreachable(request.url, TimeoutError("the response took too long"), was_sent=True)
        except httpx.HTTPError as error:
            raise network_settings.unreachable(request.url, error, was_sent=True) from None
        return network_settings.to_response(response.status_code, response.headers, bytes(body))

    def _open_response(self, request: Request) -> OpenedResponse | Response:
        response = self._start(request)
        if response.is_success:
            head = network_settings.to_response(response.status_code, response.headers, b"")
            return OpenedResponse(head.status, head.headers, (response, response.iter_raw()))
        try:
            return self._read(request, response, network_settings.MAX_ERROR_BYTES, time.monotonic() + request.timeout)
        finally:
            response.close()

    def _read_chunk(self, opened: OpenedResponse) -> bytes:
        pieces: Iterator[bytes] = opened.source[1]
        try:
            return next((piece for piece in pieces if piece), b"")
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise errors.Broken(errors.clean(str(error)) or type(error).__name__) from None

    def _open_socket(self, effect: OpenSocket) -> Any:
        local = network_settings.is_local(effect.url)
        headers = {"Authorization": f"Bearer {effect.secret.expose()}"} if effect.secret is not None else {}
        try:
            opened = connect(
                effect.url,
                additional_headers=headers,
                user_agent_header=network_settings.USER_AGENT,
                open_timeout=effect.timeout,
                close_timeout=1,
                ping_interval=None,
                compression=None,
                max_size=network_settings.MAX_FRAME_BYTES + 64 * 1024,
                ssl=self.net.tls() if effect.url.startswith("wss:") else None,
                proxy=None if local else True,
                logger=network_settings.websocket_log,
            )
            # Newer versions of websockets require entering the context, older ones return themselves. `CloseSocket` closes it.
            return opened.__enter__()
        except InvalidStatus as error:
            raise network_settings.upgrade_refused(effect.url, error.response) from None
        except (OSError, EOFError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
            raise network_settings.unreachable(effect.url, error, was_sent=True) from None

    def _receive_message(self, effect: ReceiveMessage) -> str | bytes:
        try:
            message: str | bytes = effect.socket.recv(timeout=effect.timeout)
            return message
        except TimeoutError:
            raise ReceiveTimeout from None
        except ConnectionClosed as error:
            raise socket_closed(error) from None

    def _send_message(self, effect: SendMessage) -> None:
        try:
            effect.socket.send(effect.message)
        except ConnectionClosed as error:
            raise socket_closed(error) from None

    def _sleep(self, seconds: float, stopping: threading.Event | None) -> None:
        if stopping is None:
            time.sleep(max(0.0, seconds))
        elif stopping.wait(max(0.0, seconds)):
            raise Stopped


def socket_closed(error: ConnectionClosed) -> SocketClosed:
    """The close code and reason from the peer; 1006 if it sent none."""
    if error.rcvd is None:
        return SocketClosed(1006, "")
    return SocketClosed(error.rcvd.code, errors.clean(error.rcvd.reason))
