"""A WebSocket to a sandbox, relayed: frames as they come, one at a time in each direction, closed on both sides as on one."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import cast

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from ...awaiting import Connect
from ...network import socket_log
from . import refusals
from .headers import Pairs, handed_back

# Frames of the protocol have at most 1 MiB; a little for what is around them.
MAX_FRAME_BYTES = 1024 * 1024 + 4096
# Frames read ahead of a caller that doesn't take them.
MAX_WAITING = 4
OPEN_SECONDS = 15.0
CLOSE_SECONDS = 5.0
# Half a minute of silence is asked about; no answer within another ends the connection.
PING_SECONDS = 30.0
# As much of a refusal as is handed on.
MAX_REFUSAL_BYTES = 64 * 1024

# Codes that say how a connection broke, and are never sent.
_UNSENDABLE = {1005: 1000, 1006: 1001, 1015: 1001}


async def relay(socket: WebSocket, url: str, headers: Pairs, tls: ssl.SSLContext | None) -> None:
    """First the other side, so that its refusal can still be an answer; then this one."""
    try:
        upstream = await Connect(
            url,
            additional_headers=headers,
            max_size=MAX_FRAME_BYTES,
            max_queue=MAX_WAITING,
            compression=None,
            proxy=None,
            ssl=tls,
            # The library's own would have the token in it, at DEBUG.
            logger=socket_log,
            open_timeout=OPEN_SECONDS,
            close_timeout=CLOSE_SECONDS,
            ping_interval=PING_SECONDS,
            ping_timeout=PING_SECONDS,
        )
    except InvalidStatus as refused:
        answer = refused.response
        body = bytes(answer.body or b"")[:MAX_REFUSAL_BYTES]
        kept = [(n, v) for n, v in handed_back(answer.headers.raw_items()) if n != "content-length"]
        await _deny(socket, Response(body, answer.status_code, dict(kept)))
        return
    except (OSError, WebSocketException, asyncio.TimeoutError):
        await _deny(socket, refusals.unavailable("the broker can't be reached; try again").response())
        return
    try:
        await socket.accept()
        await _both_ways(socket, upstream)
    except WebSocketDisconnect:
        # It went away in the middle of something: there is nobody to tell.
        pass
    finally:
        await upstream.close()


async def _both_ways(socket: WebSocket, upstream: ClientConnection) -> None:
    tasks = {asyncio.create_task(_up(socket, upstream)), asyncio.create_task(_down(socket, upstream))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    code, reason = upstream.close_code, upstream.close_reason or ""
    if socket.client_state == WebSocketState.CONNECTED and socket.application_state == WebSocketState.CONNECTED:
        await socket.close(_UNSENDABLE.get(code or 1006, code or 1001), reason)


async def _up(socket: WebSocket, upstream: ClientConnection) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            code = message.get("code") or 1005
            await upstream.close(_UNSENDABLE.get(code, code), message.get("reason") or "")
            return
        frame = message.get("text")
        # The other side may have closed already, with its last words still on their way down: they decide when this is over.
        with contextlib.suppress(ConnectionClosed):
            await upstream.send(cast("str | bytes", frame if frame is not None else message.get("bytes") or b""))


async def _down(socket: WebSocket, upstream: ClientConnection) -> None:
    # Ends with the connection; how, is read from it afterwards.
    async for frame in upstream:
        if isinstance(frame, str):
            await socket.send_text(frame)
        else:
            await socket.send_bytes(frame)


async def _deny(socket: WebSocket, answer: Response) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(answer)
    else:
        await socket.close(4401 if answer.status_code == 401 else 1013)
