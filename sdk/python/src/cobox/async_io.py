"""Executes effects with asyncio, for `AsyncCobox`.

Connections belong to the event loop in which they were opened, so each event loop gets its own connection pool. Any number of
tasks of a loop may use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from . import errors, network_settings
from .blocking_io import UNSENT_ERRORS, socket_closed
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
)

T = TypeVar("T")
# Seconds between attempts to acquire a lock that another thread or task holds, usually for one token renewal.
LOCK_POLL = 0.005


class Connect(connect):
    """A WebSocket client that does not follow redirects: a redirect would forward the token."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class AsyncIO:
    def __init__(self, net: network_settings.Network) -> None:
        self.net = net
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[bool, bool], httpx.AsyncClient]] = (
            weakref.WeakKeyDictionary()
        )
        self._is_closed = False

    async def run(self, flow: Flow[T]) -> T:
        """Runs a flow to its end. An error in an effect, including cancellation, is raised at the flow's `yield`."""
        try:
            effect = next(flow)
            while True:
                try:
                    result = await self._carry_out(effect)
                except BaseException as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(result)
        except StopIteration as done:
            value: T = done.value
            return value

    async def close(self) -> None:
        """Closes the connections of the running event loop; those of other loops are closed with their loops."""
        self._is_closed = True
        for client in self._clients.pop(asyncio.get_running_loop(), {}).values():
            await client.aclose()

    async def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, SendRequest):
            return await self._send(effect.request)
        if isinstance(effect, ReceiveMessage):
            return await self._receive_message(effect)
        if isinstance(effect, SendMessage):
            return await self._send_message(effect)
        if isinstance(effect, Sleep):
            return await asyncio.sleep(max(0.0, effect.seconds))
        if isinstance(effect, AcquireLock):
            # The holder may be a thread, so an asyncio lock cannot be used. It is held for one token renewal at most.
            while not effect.lock.acquire(blocking=False):  # noqa: ASYNC110 -- see above
                await asyncio.sleep(LOCK_POLL)
            return None
        if isinstance(effect, OpenResponse):
            return await self._open_response(effect.request)
        if isinstance(effect, ReadChunk):
            return await self._read_chunk(effect.opened)
        if isinstance(effect, CloseResponse):
            return await self._close_response(effect.opened)
        if isinstance(effect, OpenSocket):
            return await self._open_socket(effect)
        if isinstance(effect, CloseSocket):
            return await effect.socket.close()
        raise TypeError(f"unknown effect: {effect!r}")

    async def _tls(self) -> ssl.SSLContext:
        # The first call reads certificate files, which would block the event loop.
        return self.net.tls() if self.net.has_tls else await asyncio.to_thread(self.net.tls)

    async def _client(self, url: str) -> httpx.AsyncClient:
        local, is_https = network_settings.is_local(url), url.startswith("https:")
        verify = await self._tls() if is_https else False  # without TLS, loading certificates would be wasted work
        if self._is_closed:
            raise errors.CoboxError("this AsyncCobox is closed; create another one", code="CLOSED")
        clients = self._clients.setdefault(asyncio.get_running_loop(), {})
        client = clients.get((local, is_https))
        if client is None:
            limits = httpx.Limits(
                max_connections=network_settings.MAX_CONNECTIONS, max_keepalive_connections=network_settings.MAX_CONNECTIONS
            )
            client = httpx.AsyncClient(verify=verify, trust_env=not local, limits=limits, follow_redirects=False)
            clients[local, is_https] = client
        return client

    async def _start(self, request: Request) -> httpx.Response:
        client, timeout = await self._client(request.url), network_settings.timeouts(request)
        content = request.body.async_content() if request.body is not None else None
        try:
            built = client.build_request(
                request.method, request.url, headers=network_settings.request_headers(request), content=content, timeout=timeout
            )
            return await client.send(built, stream=True)
        except UNSENT_ERRORS as error:
            raise network_settings.unreachable(request.url, error, was_sent=False) from None
        except httpx.HTTPError as error:
            raise network_settings.unreachable(request.url, error, was_sent=True) from None

    async def _send(self, request: Request) -> Response:
        deadline = time.monotonic() + request.timeout
        response = await self._start(request)
        try:
            return await self._read(request, response, request.max_bytes, deadline)
        finally:
            await response.aclose()

    async def _read(self, request: Request, response: httpx.Response, max_bytes: int, deadline: float) -> Response:
        body = bytearray()
        pieces: Any = response.aiter_raw()
        try:
            async for piece in pieces:
                body += piece
                if len(body) > max_bytes:
                    raise network_settings.too_long(request.url, max_bytes)
                if time.monotonic() > deadline:
                    raise network_settings.unreachable(request.url, TimeoutError("the response took too long"), was_sent=True)
        except httpx.HTTPError as error:
            raise network_settings.unreachable(request.url, error, was_sent=True) from None
        finally:
            # Otherwise the event loop would finalize the unfinished generator at some later time.
            await pieces.aclose()
        return network_settings.to_response(response.status_code, response.headers, bytes(body))

    async def _open_response(self, request: Request) -> OpenedResponse | Response:
        response = await self._start(request)
        if response.is_success:
            head = network_settings.to_response(response.status_code, response.headers, b"")
            return OpenedResponse(head.status, head.headers, (response, response.aiter_raw()))
        try:
            return await self._read(request, response, network_settings.MAX_ERROR_BYTES, time.monotonic() + request.timeout)
        finally:
            await response.aclose()

    async def _read_chunk(self, opened: OpenedResponse) -> bytes:
        pieces: AsyncIterator[bytes] = opened.source[1]
        try:
            async for piece in pieces:
                if piece:
                    return piece
            return b""
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise errors.Broken(errors.clean(str(error)) or type(error).__name__) from None

    async def _close_response(self, opened: OpenedResponse) -> None:
        response, pieces = opened.source
        # If another task is waiting for a chunk, closing the response wakes it.
        with contextlib.suppress(RuntimeError):
            await pieces.aclose()
        await response.aclose()

    async def _open_socket(self, effect: OpenSocket) -> Any:
        local = network_settings.is_local(effect.url)
        headers = {"Authorization": f"Bearer {effect.secret.expose()}"} if effect.secret is not None else {}
        try:
            return await Connect(
                effect.url,
                additional_headers=headers,
                user_agent_header=network_settings.USER_AGENT,
                open_timeout=effect.timeout,
                close_timeout=1,
                ping_interval=None,
                compression=None,
                max_size=network_settings.MAX_FRAME_BYTES + 64 * 1024,
                ssl=await self._tls() if effect.url.startswith("wss:") else None,
                proxy=None if local else True,
                logger=network_settings.websocket_log,
            )
        except InvalidStatus as error:
            raise network_settings.upgrade_refused(effect.url, error.response) from None
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
            raise network_settings.unreachable(effect.url, error, was_sent=True) from None

    async def _receive_message(self, effect: ReceiveMessage) -> str | bytes:
        try:
            message: str | bytes = await asyncio.wait_for(effect.socket.recv(), effect.timeout)
            return message
        except (TimeoutError, asyncio.TimeoutError):
            raise ReceiveTimeout from None
        except ConnectionClosed as error:
            raise socket_closed(error) from None

    async def _send_message(self, effect: SendMessage) -> None:
        try:
            await effect.socket.send(effect.message)
        except ConnectionClosed as error:
            raise socket_closed(error) from None
