"""Relays a WebSocket to a sandbox: one frame at a time in each direction, with the same close code on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import cast

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ...async_io import Connect
from ...network_settings import websocket_log
from . import error_responses
from .header_filter import HeaderPairs, filter_response_headers

# Frames of the protocol have at most 1 MiB, plus their overhead.
MAX_FRAME_BYTES = 1024 * 1024 + 4096
# Maximum frames buffered for a caller that does not read them.
MAX_WAITING = 4
OPEN_SECONDS = 15.0
CLOSE_SECONDS = 5.0
# A ping is sent after half a minute of silence; without a pong within another, the connection ends.
PING_SECONDS = 30.0
# Maximum size of an error response that is passed on.
MAX_REFUSAL_BYTES = 64 * 1024

# Codes that only report how a connection ended and must not be sent.
_UNSENDABLE = {1005: 1000, 1006: 1001, 1015: 1001}


async def relay_websocket(socket: WebSocket, url: str, headers: HeaderPairs, tls: ssl.SSLContext | None) -> None:
    """Connects to the sandbox before accepting the caller, so that a refusal can still be an HTTP response."""
    try:
        upstream = await Connect(
            url,
            additional_headers=headers,
            max_size=MAX_FRAME_BYTES,
            max_queue=MAX_WAITING,
            compression=None,
            proxy=None,
            ssl=tls,
            # The library's own logger would log the token at DEBUG.
            logger=websocket_log,
            open_timeout=OPEN_SECONDS,
            close_timeout=CLOSE_SECONDS,
            ping_interval=PING_SECONDS,
            ping_timeout=PING_SECONDS,
        )
    except InvalidStatus as refused:
        response = refused.response
        body = bytes(response.body or b"")[:MAX_REFUSAL_BYTES]
        kept = [(n, v) for n, v in filter_response_headers(response.headers.raw_items()) if n != "content-length"]
        await _reject_websocket(socket, Response(body, response.status_code, dict(kept)))
        return
    except (OSError, WebSocketException, asyncio.TimeoutError):
        await _reject_websocket(socket, error_responses.unavailable("the broker can't be reached; try again").response())
        return
    try:
        await socket.accept()
        await _relay_both_ways(socket, upstream)
    except WebSocketDisconnect:
        # The caller has disconnected.
        pass
    finally:
        await upstream.close()


async def _relay_both_ways(socket: WebSocket, upstream: ClientConnection) -> None:
    tasks = {asyncio.create_task(_to_sandbox(socket, upstream)), asyncio.create_task(_to_caller(socket, upstream))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    code, reason = upstream.close_code, upstream.close_reason or ""
    if socket.client_state == WebSocketState.CONNECTED and socket.application_state == WebSocketState.CONNECTED:
        await socket.close(_UNSENDABLE.get(code or 1006, code or 1001), reason)


async def _to_sandbox(socket: WebSocket, upstream: ClientConnection) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            code = message.get("code") or 1005
            await upstream.close(_UNSENDABLE.get(code, code), message.get("reason") or "")
            return
        frame = message.get("text")
        # The sandbox may have closed already while its last frames are still in transit; the other direction determines the end.
        with contextlib.suppress(ConnectionClosed):
            await upstream.send(cast("str | bytes", frame if frame is not None else message.get("bytes") or b""))


async def _to_caller(socket: WebSocket, upstream: ClientConnection) -> None:
    # Ends with the connection, whose close code is read afterwards.
    async for frame in upstream:
        if isinstance(frame, str):
            await socket.send_text(frame)
        else:
            await socket.send_bytes(frame)


async def _reject_websocket(socket: WebSocket, response: Response) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(response)
    else:
        await socket.close(4401 if response.status_code == 401 else 1013)
