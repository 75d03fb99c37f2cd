"""The way to a sandbox through the deployment, and a session's events: what is long, and is streamed."""

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

from ..bootstrap import MAX_TOKEN
from . import refusals
from .broker import Broker, session_path
from .callers import User, is_visitor
from .control import answered
from .headers import TO_SANDBOX, Pairs, passed_on
from .passage import pass_on
from .sockets import relay

_METHODS = ["GET", "HEAD", "PUT", "POST", "PATCH", "DELETE"]
# A command may say nothing for as long as it may run by default (1800 s), and a little.
RELAY_SILENCE_SECONDS = 1860.0
# The broker beats every 15 seconds.
EVENTS_SILENCE_SECONDS = 60.0
# As long as a token lives: then the caller comes back with `Last-Event-ID`, and is asked about again.
EVENTS_LIFE_SECONDS = 900.0
# WebSockets relayed at once: shells and commands of some hundred people, each with two connections and a few buffers of a MiB.
MAX_SOCKETS = 512
# Longest path and query passed on, in bytes.
MAX_TARGET_BYTES = 16 * 1024

_BEARER = re.compile(r"bearer +([\x21-\x7e]+)", re.IGNORECASE)
# Names the key of one sandbox, so that a credential for anybody else is known and stays here.
_KEY_ID = re.compile(r"sb_[0-9a-z]{26}\.[0-9]+")
_OPAQUE_TOKEN = re.compile(r"cbo_[A-Za-z0-9_-]+")
# A file link, which is a credential.
_LINK = re.compile(r"(?:^|&)link=")
_QUERY = re.compile(r"[\x21-\x7e]*")
_RELAYED = re.compile(r"/(?:dp|v1/sandbox/relay)/[A-Za-z0-9_-]{1,64}(?:/[\x21-\x7e]*)?")


class Dataplane:
    """The routes, for one broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._sockets = 0

    def routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route("/v1/sandbox/sessions/{session_id}/events", answered(self.events), methods=["GET"], include_in_schema=False)
        ]
        for path in ("/v1/sandbox/relay/{place}/{rest:path}", "/dp/{place}/{rest:path}"):
            routes.append(Route(path, answered(self.http), methods=_METHODS, include_in_schema=False))
            routes.append(WebSocketRoute(path, self.socket))
        return routes

    async def events(self, request: Request) -> Response:
        user, session_id = User.of(request), request.path_params["session_id"]
        thread = await self.broker.threads.see(request, (await self.broker.made(request, session_id)).thread)
        await self.broker.must_be_for(request, user, thread, session_id)
        after = request.query_params.get("after")
        url = self.broker.url(session_path(session_id, "events"), str(httpx.QueryParams({"after": after})) if after is not None else "")
        headers = await self.broker.headers(request)
        return await pass_on(request, self.broker, url, headers, silence=EVENTS_SILENCE_SECONDS, life=EVENTS_LIFE_SECONDS)

    async def http(self, request: Request) -> Response:
        headers = [*passed_on(request.headers.raw, TO_SANDBOX), *_credential(request)]
        url = self.broker.url(target(request))
        return await pass_on(request, self.broker, url, headers, silence=RELAY_SILENCE_SECONDS, is_relayed=True)

    async def socket(self, socket: WebSocket) -> None:
        try:
            headers, where = _credential(socket), target(socket)
        except refusals.Refused as refused:
            await _deny(socket, refused)
            return
        if self._sockets >= MAX_SOCKETS:
            await _deny(socket, refusals.unavailable("too many connections are relayed here at once; try again"))
            return
        self._sockets += 1
        try:
            await relay(socket, "ws" + self.broker.settings.broker_url.removeprefix("http") + where, headers, self.broker.tls)
        finally:
            self._sockets -= 1


def target(connection: HTTPConnection) -> str:
    """Path and query as they were sent, beneath the paths that are passed on and nowhere else."""
    scope = connection.scope
    raw = scope.get("raw_path") or scope["path"].encode("ascii", "replace")
    path = raw.split(b"?", 1)[0].decode("latin-1")
    root = scope.get("root_path") or ""
    path = path.removeprefix(root)
    # A step back would be taken on the way, and end at another route with the same credential.
    is_straight = all(unquote(step) not in (".", "..") for step in path.split("/"))
    if not is_straight or not _RELAYED.fullmatch(path):
        raise refusals.Refused(400, "INVALID_REQUEST", "the path can't be passed on: write it without `.`, `..` and blanks")
    query = scope.get("query_string", b"").decode("latin-1")
    if not _QUERY.fullmatch(query):
        raise refusals.invalid("the query has characters that no URL has; write them as %XX")
    if _LINK.search(query):
        # Servers write queries into their logs, and so does this one.
        raise refusals.invalid("a file link is for the broker's own address; here the sandbox's token is shown in a header")
    where = f"{path}?{query}" if query else path
    if len(where) > MAX_TARGET_BYTES or "#" in where:
        raise refusals.Refused(400, "INVALID_REQUEST", "the path and query are too long to be passed on")
    return where


def _credential(connection: HTTPConnection) -> Pairs:
    """The sandbox's token, and nothing that was meant for this deployment.

    It stands in `X-Api-Key`, or in `Authorization` where the caller needs that for nothing else (`dataplane_visitor`). With neither,
    a socket shows one in its first frame.
    """
    shown = connection.headers.get("x-api-key")
    if not is_visitor(connection):
        # Fails where no auth handler let anybody in.
        User.of(connection)
    elif shown is None and (authorization := connection.headers.get("authorization")) is not None:
        match = _BEARER.fullmatch(authorization.strip())
        shown = match.group(1) if match else ""
    if shown is None:
        return []
    if not is_sandbox_token(shown):
        raise refusals.unauthenticated(
            "here the sandbox's token is shown: `Authorization: Bearer <token>`, or `X-Api-Key: <token>` beside your own credential"
        )
    return [("authorization", f"Bearer {shown}")]


def is_sandbox_token(text: str) -> bool:
    """Whether it can be one, by its look: whether it is good is the broker's to say."""
    if len(text) > MAX_TOKEN:
        return False
    if _OPAQUE_TOKEN.fullmatch(text):
        return True
    head, *rest = text.split(".")
    if len(rest) != 2 or not all(rest):
        return False
    try:
        told = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    except ValueError:
        return False
    key_id = told.get("kid") if isinstance(told, dict) else None
    return isinstance(key_id, str) and _KEY_ID.fullmatch(key_id) is not None


async def _deny(socket: WebSocket, refused: refusals.Refused) -> None:
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(refused.response())
    else:
        await socket.close({401: 4401, 503: 1013}.get(refused.status, 4403))
