"""Streams between a caller and the broker: bytes as they come, never more of them in memory than a few buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from . import refusals
from .broker import Broker
from .headers import Pairs, handed_back

_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})


class CallerGone(Exception):
    """Nobody waits for the answer any more."""


async def pass_on(
    request: Request, broker: Broker, url: httpx.URL, headers: Pairs, *, silence: float, life: float | None = None
) -> Response:
    """The broker's answer, streamed. `silence`: seconds without a byte; `life`: seconds after which the stream ends, whatever it is."""
    inbound = _Inbound(request.receive)
    has_body = request.method not in _BODILESS or "content-length" in request.headers or "transfer-encoding" in request.headers
    content = inbound.body() if has_body else None
    if not has_body:
        inbound.is_read.set()
    sending = asyncio.create_task(broker.open(request.method, url, headers, content, silence))
    leaving = asyncio.create_task(inbound.gone())
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            raise CallerGone
        answer = sending.result()
    except httpx.HTTPError:
        raise refusals.unavailable("the broker can't be reached, or said nothing in time; try again") from None
    except CallerGone:
        return Response(status_code=499)
    finally:
        leaving.cancel()
        if not sending.done():
            sending.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    return StreamingResponse(_pieces(answer, life), answer.status_code, dict(handed_back(answer.headers.items())))


async def _pieces(answer: httpx.Response, life: float | None) -> AsyncIterator[bytes]:
    """As they came, encoded or not. A stream that breaks off breaks off for the caller too, by the length or chunk that is missing."""
    loop = asyncio.get_running_loop()
    end = None if life is None else loop.time() + life
    pieces = answer.aiter_raw()
    try:
        while True:
            left = None if end is None else end - loop.time()
            try:
                yield await asyncio.wait_for(anext(pieces), left)
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                return
    finally:
        await answer.aclose()


class _Inbound:
    """A request's body, and after it the word that its caller went away."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_read = asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        is_more = True
        while is_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise httpx.ReadError("the caller went away in the middle of its request")
            is_more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece
        self.is_read.set()

    async def gone(self) -> None:
        await self.is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
