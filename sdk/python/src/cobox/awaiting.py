"""Carries effects out with asyncio: the interpreter behind `AsyncCobox`.

Connections belong to the event loop they were made in, so there is a pool for each loop that uses this object. Within a loop any
number of tasks may.
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

from . import errors, network
from .blocking import UNSENT, closed
from .flow import (
    Acquire,
    Answer,
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
# Seconds between looks at a lock that another thread or task holds, for as long as one refresh takes.
LOCK_POLL = 0.005


class Connect(connect):
    """Goes nowhere but where it was sent: a redirect would take the token along."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class AwaitingIO:
    def __init__(self, net: network.Network) -> None:
        self.net = net
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[bool, bool], httpx.AsyncClient]] = (
            weakref.WeakKeyDictionary()
        )
        self._is_closed = False

    async def run(self, flow: Flow[T]) -> T:
        """Runs a flow to its end. An effect's error, a cancellation too, is raised where the flow asked for it."""
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
        """Closes the connections of this loop; those of others go with their loops."""
        self._is_closed = True
        for client in self._clients.pop(asyncio.get_running_loop(), {}).values():
            await client.aclose()

    async def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return await self._send(effect.request)
        if isinstance(effect, Hear):
            return await self._hear(effect)
        if isinstance(effect, Say):
            return await self._say(effect)
        if isinstance(effect, Pause):
            return await asyncio.sleep(max(0.0, effect.seconds))
        if isinstance(effect, Acquire):
            # Held for a refresh at most, maybe by a thread: no loop's own lock would do.
            while not effect.lock.acquire(blocking=False):  # noqa: ASYNC110 -- see above
                await asyncio.sleep(LOCK_POLL)
            return None
        if isinstance(effect, Open):
            return await self._open(effect.request)
        if isinstance(effect, Pull):
            return await self._pull(effect.opened)
        if isinstance(effect, Drop):
            return await self._drop(effect.opened)
        if isinstance(effect, Dial):
            return await self._dial(effect)
        if isinstance(effect, HangUp):
            return await effect.socket.close()
        raise TypeError(f"no such effect: {effect!r}")

    async def _tls(self) -> ssl.SSLContext:
        # Certificates are read from files the first time, which an event loop must not wait for.
        return self.net.tls() if self.net.has_tls else await asyncio.to_thread(self.net.tls)

    async def _client(self, url: str) -> httpx.AsyncClient:
        local, is_https = network.is_local(url), url.startswith("https:")
        verify = await self._tls() if is_https else False  # without TLS there is nothing to load certificates for
        if self._is_closed:
            raise errors.CoboxError("this AsyncCobox is closed; make another", code="CLOSED")
        clients = self._clients.setdefault(asyncio.get_running_loop(), {})
        client = clients.get((local, is_https))
        if client is None:
            limits = httpx.Limits(max_connections=network.MAX_CONNECTIONS, max_keepalive_connections=network.MAX_CONNECTIONS)
            client = httpx.AsyncClient(verify=verify, trust_env=not local, limits=limits, follow_redirects=False)
            clients[local, is_https] = client
        return client

    async def _begin(self, request: Request) -> httpx.Response:
        client, timeout = await self._client(request.url), network.timeouts(request)
        content = request.body.awaiting() if request.body is not None else None
        try:
            built = client.build_request(request.method, request.url, headers=network.head(request), content=content, timeout=timeout)
            return await client.send(built, stream=True)
        except UNSENT as error:
            raise network.unreachable(request.url, error, was_sent=False) from None
        except httpx.HTTPError as error:
            raise network.unreachable(request.url, error, was_sent=True) from None

    async def _send(self, request: Request) -> Answer:
        deadline = time.monotonic() + request.timeout
        response = await self._begin(request)
        try:
            return await self._read(request, response, request.max_bytes, deadline)
        finally:
            await response.aclose()

    async def _read(self, request: Request, response: httpx.Response, max_bytes: int, deadline: float) -> Answer:
        body = bytearray()
        pieces: Any = response.aiter_raw()
        try:
            async for piece in pieces:
                body += piece
                if len(body) > max_bytes:
                    raise network.endless(request.url, max_bytes)
                if time.monotonic() > deadline:
                    raise network.unreachable(request.url, TimeoutError("the answer took too long"), was_sent=True)
        except httpx.HTTPError as error:
            raise network.unreachable(request.url, error, was_sent=True) from None
        finally:
            # Left half-way it would be ended by the loop, some time later.
            await pieces.aclose()
        return network.answer_of(response.status_code, response.headers, bytes(body))

    async def _open(self, request: Request) -> Opened | Answer:
        response = await self._begin(request)
        if response.is_success:
            answer = network.answer_of(response.status_code, response.headers, b"")
            return Opened(answer.status, answer.headers, (response, response.aiter_raw()))
        try:
            return await self._read(request, response, network.MAX_ERROR_BYTES, time.monotonic() + request.timeout)
        finally:
            await response.aclose()

    async def _pull(self, opened: Opened) -> bytes:
        pieces: AsyncIterator[bytes] = opened.source[1]
        try:
            async for piece in pieces:
                if piece:
                    return piece
            return b""
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise errors.Broken(errors.clean(str(error)) or type(error).__name__) from None

    async def _drop(self, opened: Opened) -> None:
        response, pieces = opened.source
        # Where another task waits for a piece just now, closing the answer is what wakes it.
        with contextlib.suppress(RuntimeError):
            await pieces.aclose()
        await response.aclose()

    async def _dial(self, dial: Dial) -> Any:
        local = network.is_local(dial.url)
        headers = {"Authorization": f"Bearer {dial.secret.expose()}"} if dial.secret is not None else {}
        try:
            return await Connect(
                dial.url,
                additional_headers=headers,
                user_agent_header=network.USER_AGENT,
                open_timeout=dial.timeout,
                close_timeout=1,
                ping_interval=None,
                compression=None,
                max_size=network.MAX_FRAME_BYTES + 64 * 1024,
                ssl=await self._tls() if dial.url.startswith("wss:") else None,
                proxy=None if local else True,
                logger=network.socket_log,
            )
        except InvalidStatus as error:
            raise network.refused_upgrade(dial.url, error.response) from None
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
            raise network.unreachable(dial.url, error, was_sent=True) from None

    async def _hear(self, hear: Hear) -> str | bytes:
        try:
            message: str | bytes = await asyncio.wait_for(hear.socket.recv(), hear.timeout)
            return message
        except (TimeoutError, asyncio.TimeoutError):
            raise Silence from None
        except ConnectionClosed as error:
            raise closed(error) from None

    async def _say(self, say: Say) -> None:
        try:
            await say.socket.send(say.message)
        except ConnectionClosed as error:
            raise closed(error) from None
