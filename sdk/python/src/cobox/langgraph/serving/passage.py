"""Streams between a caller and the broker: bytes as they come, never more of them in memory than a few buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from . import refusals
from .broker import Broker
from .headers import Pairs, handed_back

# A caller that sends nothing of its request's body for so long, in seconds, sends the rest to nobody.
BODY_SILENCE_SECONDS = 60.0
_BODILESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})


class CallerGone(Exception):
    """Nobody waits for the answer any more."""


async def pass_on(
    request: Request, broker: Broker, url: httpx.URL, headers: Pairs, *, silence: float, life: float | None = None, is_relayed: bool = False
) -> Response:
    """The broker's answer, streamed. `silence`: seconds without a byte; `life`: seconds after which the stream ends, whatever it is."""
    inbound = _Inbound(request.receive)
    has_body = request.method not in _BODILESS or "content-length" in request.headers or "transfer-encoding" in request.headers
    content = inbound.body() if has_body else None
    if not has_body:
        inbound.is_read.set()
    sending = asyncio.create_task(broker.open(request.method, url, headers, content, silence, is_relayed=is_relayed))
    leaving = asyncio.create_task(inbound.gone())
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            raise CallerGone
        passed = _Passed(sending.result(), life)
    except httpx.HTTPError:
        raise refusals.unavailable("the broker can't be reached, or said nothing in time; try again") from None
    except CallerGone:
        return Response(status_code=499)
    except asyncio.CancelledError:
        # Ended from outside just as the answer came, which nobody would close.
        if sending.done() and not sending.cancelled() and sending.exception() is None:
            await sending.result().aclose()
        raise
    finally:
        leaving.cancel()
        if not sending.done():
            sending.cancel()
    try:
        # The answer listens for the same word.
        await asyncio.gather(leaving, return_exceptions=True)
    except BaseException:
        await passed.close()
        raise
    return passed


class _Passed(StreamingResponse):
    """The broker's answer, which is closed however this one ends: a caller may be gone before the first piece is asked for."""

    def __init__(self, answer: httpx.Response, life: float | None) -> None:
        super().__init__(_pieces(answer, life), answer.status_code, dict(handed_back(answer.headers.items())))
        self._passed = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.close()

    async def close(self) -> None:
        await self._passed.aclose()


async def _pieces(answer: httpx.Response, life: float | None) -> AsyncIterator[bytes]:
    """As they came, encoded or not. A stream that breaks off breaks off for the caller too, by the length or chunk that is missing."""
    loop = asyncio.get_running_loop()
    end = None if life is None else loop.time() + life
    pieces = answer.aiter_raw()
    while True:
        left = None if end is None else end - loop.time()
        try:
            yield await asyncio.wait_for(anext(pieces), left)
        except (StopAsyncIteration, asyncio.TimeoutError):
            return


class _Inbound:
    """A request's body, and after it the word that its caller went away."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.is_read = asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        is_more = True
        while is_more:
            try:
                message = await asyncio.wait_for(self._receive(), BODY_SILENCE_SECONDS)
            except asyncio.TimeoutError:
                raise httpx.ReadTimeout("the caller sends nothing more of its request") from None
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
