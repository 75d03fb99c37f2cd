"""Streams requests and responses between a caller and the broker; memory is limited to a few buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from . import error_responses
from .broker_client import BrokerClient
from .header_filter import HeaderPairs, filter_response_headers

# Seconds after which a caller that sends no more of its request body is disconnected.
BODY_SILENCE_SECONDS = 60.0
_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})


class CallerDisconnected(Exception):
    """The caller disconnected before the response."""


async def relay_http(
    request: Request,
    broker: BrokerClient,
    url: httpx.URL,
    headers: HeaderPairs,
    *,
    silence: float,
    max_duration: float | None = None,
    is_relayed: bool = False,
) -> Response:
    """Streams the broker's response. `silence`: maximum seconds without data; `max_duration`: seconds after which the stream ends
    in any case."""
    inbound = _InboundRequest(request.receive)
    has_body = request.method not in _BODILESS or "content-length" in request.headers or "transfer-encoding" in request.headers
    content = inbound.body() if has_body else None
    if not has_body:
        inbound.is_read.set()
    sending = asyncio.create_task(broker.open(request.method, url, headers, content, silence, is_relayed=is_relayed))
    leaving = asyncio.create_task(inbound.wait_for_disconnect())
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            raise CallerDisconnected
        relayed = _RelayedResponse(sending.result(), max_duration)
    except httpx.HTTPError:
        raise error_responses.unavailable("the broker can't be reached or did not respond in time; try again") from None
    except CallerDisconnected:
        return Response(status_code=499)
    except asyncio.CancelledError:
        # Cancelled just as the response arrived; without this, it would never be closed.
        if sending.done() and not sending.cancelled() and sending.exception() is None:
            await sending.result().aclose()
        raise
    finally:
        leaving.cancel()
        if not sending.done():
            sending.cancel()
    try:
        # Starlette's response listens for the same disconnect message.
        await asyncio.gather(leaving, return_exceptions=True)
    except BaseException:
        await relayed.close()
        raise
    return relayed


class _RelayedResponse(StreamingResponse):
    """The broker's response. It is always closed, even if the caller disconnects before the first chunk is read."""

    def __init__(self, response: httpx.Response, max_duration: float | None) -> None:
        super().__init__(_chunks(response, max_duration), response.status_code, dict(filter_response_headers(response.headers.items())))
        self._upstream = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.close()

    async def close(self) -> None:
        await self._upstream.aclose()


async def _chunks(response: httpx.Response, max_duration: float | None) -> AsyncIterator[bytes]:
    """The raw chunks, encoded or not. If the broker's stream is truncated, the caller's is truncated too and can detect it by the
    length or the missing last chunk."""
    loop = asyncio.get_running_loop()
    end = None if max_duration is None else loop.time() + max_duration
    pieces = response.aiter_raw()
    while True:
        left = None if end is None else end - loop.time()
        try:
            yield await asyncio.wait_for(anext(pieces), left)
        except (StopAsyncIteration, asyncio.TimeoutError):
            return


class _InboundRequest:
    """A request's body, followed by the notification that its caller disconnected."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_read = asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        is_more = True
        while is_more:
            try:
                message = await asyncio.wait_for(self._receive(), BODY_SILENCE_SECONDS)
            except asyncio.TimeoutError:
                raise httpx.ReadTimeout("the caller stopped sending its request") from None
            if message["type"] == "http.disconnect":
                raise httpx.ReadError("the caller disconnected while sending its request")
            is_more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece
        self.is_read.set()

    async def wait_for_disconnect(self) -> None:
        await self.is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
