"""Streaming routes: the relay to sandboxes, and a session's events."""

from __future__ import annotations

import base64
import json
import re
from urllib.parse import unquote

import httpx
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from ..supplied_sandbox import MAX_TOKEN
from . import error_responses
from .broker_client import BrokerClient, session_path
from .caller_identity import User, is_visitor
from .control_plane_routes import with_error_responses
from .header_filter import TO_SANDBOX, HeaderPairs, filter_request_headers
from .http_relay import relay_http
from .websocket_relay import relay_websocket

_METHODS = ["GET", "HEAD", "PUT", "POST", "PATCH", "DELETE"]
# A command may be silent for its whole default timeout (1800 s); plus a margin.
RELAY_SILENCE_SECONDS = 1860.0
# The broker sends a heartbeat every 15 seconds.
EVENTS_SILENCE_SECONDS = 60.0
# The lifetime of a token. Then the caller reconnects with `Last-Event-ID`, and access is checked again.
EVENTS_LIFE_SECONDS = 900.0
# Maximum relayed WebSockets: shells and commands of a few hundred people, each with two connections and a few buffers of 1 MiB.
MAX_SOCKETS = 512
# Maximum length of a relayed path and query in bytes.
MAX_TARGET_BYTES = 16 * 1024

_BEARER = re.compile(r"bearer +([\x21-\x7e]+)", re.IGNORECASE)
# Format of a sandbox's key id; a token for any other service does not match and is not forwarded.
_KEY_ID = re.compile(r"sb_[0-9a-z]{26}\.[0-9]+")
_OPAQUE_TOKEN = re.compile(r"cbo_[A-Za-z0-9_-]+")
# A file link, which is a credential.
_LINK = re.compile(r"(?:^|&)link=")
_QUERY = re.compile(r"[\x21-\x7e]*")
_RELAYED = re.compile(r"/(?:dp|v1/sandbox/relay)/[A-Za-z0-9_-]{1,64}(?:/[\x21-\x7e]*)?")


class DataplaneRoutes:
    """The dataplane routes, for one broker."""

    def __init__(self, broker: BrokerClient) -> None:
        self.broker = broker
        self._sockets = 0

    def routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route("/v1/sandbox/sessions/{session_id}/events", with_error_responses(self.events), methods=["GET"], include_in_schema=False)
        ]
        for path in ("/v1/sandbox/relay/{place}/{rest:path}", "/dp/{place}/{rest:path}"):
            routes.append(Route(path, with_error_responses(self.http), methods=_METHODS, include_in_schema=False))
            routes.append(WebSocketRoute(path, self.socket))
        return routes

    async def events(self, request: Request) -> Response:
        user, session_id = User.of(request), request.path_params["session_id"]
        thread = await self.broker.thread_access.require_visible(request, (await self.broker.session_origin(request, session_id)).thread)
        await self.broker.require_current_thread(request, user, thread, session_id)
        after = request.query_params.get("after")
        url = self.broker.url(session_path(session_id, "events"), str(httpx.QueryParams({"after": after})) if after is not None else "")
        headers = await self.broker.headers(request)
        return await relay_http(request, self.broker, url, headers, silence=EVENTS_SILENCE_SECONDS, max_duration=EVENTS_LIFE_SECONDS)

    async def http(self, request: Request) -> Response:
        headers = [*filter_request_headers(request.headers.raw, TO_SANDBOX), *_credential(request)]
        url = self.broker.url(relay_target(request))
        return await relay_http(request, self.broker, url, headers, silence=RELAY_SILENCE_SECONDS, is_relayed=True)

    async def socket(self, socket: WebSocket) -> None:
        try:
            headers, path_and_query = _credential(socket), relay_target(socket)
        except error_responses.RequestError as refused:
            await _reject_websocket(socket, refused)
            return
        if self._sockets >= MAX_SOCKETS:
            await _reject_websocket(socket, error_responses.unavailable("too many relayed connections; try again"))
            return
        self._sockets += 1
        try:
            await relay_websocket(
                socket, "ws" + self.broker.settings.broker_url.removeprefix("http") + path_and_query, headers, self.broker.tls
            )
        finally:
            self._sockets -= 1


def relay_target(connection: HTTPConnection) -> str:
    """The path and query exactly as sent, restricted to relayed paths."""
    scope = connection.scope
    raw = scope.get("raw_path") or scope["path"].encode("ascii", "replace")
    path = raw.split(b"?", 1)[0].decode("latin-1")
    root = scope.get("root_path") or ""
    path = path.removeprefix(root)
    # A `..` would be resolved on the way and reach another route with the same credential.
    is_straight = all(unquote(step) not in (".", "..") for step in path.split("/"))
    if not is_straight or not _RELAYED.fullmatch(path):
        raise error_responses.RequestError(400, "INVALID_REQUEST", "the path can't be relayed: write it without `.`, `..` and spaces")
    query = scope.get("query_string", b"").decode("latin-1")
    if not _QUERY.fullmatch(query):
        raise error_responses.invalid("the query contains characters that are invalid in a URL; encode them as %XX")
    if _LINK.search(query):
        # Servers log queries, and so does this one.
        raise error_responses.invalid("use file links at the broker's own address; here, send the sandbox's token in a header")
    path_and_query = f"{path}?{query}" if query else path
    if len(path_and_query) > MAX_TARGET_BYTES or "#" in path_and_query:
        raise error_responses.RequestError(400, "INVALID_REQUEST", "the path and query are too long to be relayed")
    return path_and_query


def _credential(connection: HTTPConnection) -> HeaderPairs:
    """The sandbox's token, without any credential that was meant for this deployment.

    It is in `X-Api-Key`, or in `Authorization` if the deployment does not need that header (`dataplane_visitor`). With neither, a
    WebSocket client sends it in its first frame.
    """
    token = connection.headers.get("x-api-key")
    if not is_visitor(connection):
        # Raises unless an auth handler authenticated the caller.
        User.of(connection)
    elif token is None and (authorization := connection.headers.get("authorization")) is not None:
        match = _BEARER.fullmatch(authorization.strip())
        token = match.group(1) if match else ""
    if token is None:
        return []
    if not is_sandbox_token(token):
        raise error_responses.unauthenticated(
            "send the sandbox's token: `Authorization: Bearer <token>`, or `X-Api-Key: <token>` in addition to your own credential"
        )
    return [("authorization", f"Bearer {token}")]


def is_sandbox_token(text: str) -> bool:
    """Whether the text has the format of a sandbox token; the broker verifies it."""
    if len(text) > MAX_TOKEN:
        return False
    if _OPAQUE_TOKEN.fullmatch(text):
        return True
    head, *rest = text.split(".")
    if len(rest) != 2 or not all(rest):
        return False
    try:
        header = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except ValueError:
        return False
    key_id = header.get("kid") if isinstance(header, dict) else None
    return isinstance(key_id, str) and _KEY_ID.fullmatch(key_id) is not None


async def _reject_websocket(socket: WebSocket, refused: error_responses.RequestError) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(refused.response())
    else:
        await socket.close({401: 4401, 503: 1013}.get(refused.status, 4403))
