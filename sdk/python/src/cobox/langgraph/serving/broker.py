"""The way to the broker: one client for all requests, which sends a credential there and nowhere else."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpx
from starlette.requests import HTTPConnection

from ..run import USER_TAG, tag_of
from . import refusals
from .callers import User
from .headers import TO_BROKER, Pairs, handed_back, passed_on
from .settings import SHARED, Settings

# An answer of the control plane is a few KiB; a full page of a list a few hundred.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
# Longer than the broker makes anybody wait for a start (55 s).
ANSWER_SECONDS = 75.0
CONNECT_SECONDS = 5.0
# Requests to the broker under way at once, streams and relayed ones included.
MAX_CONNECTIONS = 1024
# Of those that wait for the next request.
MAX_IDLE_CONNECTIONS = 32
# Sessions whose thread is remembered; it never changes, so only memory counts.
MAX_REMEMBERED = 4096
# Where a broker with `[thread_authority]` looks for a caller's credential for this deployment.
THREAD_CREDENTIAL = "x-thread-authorization"


@dataclass(frozen=True)
class Reply:
    """The broker's answer, whole."""

    status: int
    headers: Pairs
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise refusals.unavailable("what answers for the broker is not one; see COBOX_URL") from None


class Broker:
    """Speaks to the broker as the deployment, or as its caller, whichever the settings say."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_IDLE_CONNECTIONS)
        # The transport alone: no cookies kept for the next caller, no redirect, no proxy, no netrc, and no URL in anybody's log.
        self._transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits)
        self._threads: OrderedDict[str, str] = OrderedDict()
        self._is_fit = False
        self._fitness = asyncio.Lock()

    def url(self, path: str, query: str = "") -> httpx.URL:
        return httpx.URL(self.settings.broker_url + path + (f"?{query}" if query else ""))

    async def headers(self, caller: HTTPConnection) -> Pairs:
        """What goes with a request in somebody's name."""
        credential = caller.headers.get("authorization")
        if self.settings.identity == SHARED:
            await self._must_be_fit()
            shown = self._own_credential()
        elif credential is None:
            raise refusals.unauthenticated("send `Authorization: Bearer …`: the broker is shown the same")
        else:
            shown = credential
        headers = [*passed_on(caller.headers.raw, TO_BROKER), ("authorization", shown)]
        if self.settings.is_thread_authority and credential is not None:
            headers.append((THREAD_CREDENTIAL, credential))
        return headers

    async def ask(
        self, caller: HTTPConnection, method: str, path: str, *, query: str = "", body: Any = None, extra: Mapping[str, str] | None = None
    ) -> Reply:
        headers = [h for h in await self.headers(caller) if h[0] != "content-type" and (extra is None or h[0] not in extra)]
        headers += list((extra or {}).items())
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers.append(("content-type", "application/json"))
        reply = await self._send(method, self.url(path, query), headers, content)
        if reply.status == 401 and self.settings.identity == SHARED:
            # The caller's own credential is good: it was let in here.
            raise refusals.unavailable("the broker doesn't accept the deployment's key; its operator must set a valid COBOX_API_KEY")
        return reply

    async def thread_of(self, caller: HTTPConnection, session_id: str) -> str:
        """The thread a session belongs to. What isn't a thread's isn't served here; the broker's refusals are handed on."""
        if (known := self._threads.get(session_id)) is not None:
            self._threads.move_to_end(session_id)
            return known
        reply = await self.ask(caller, "GET", session_path(session_id))
        if reply.status != 200:
            raise Handed(reply)
        scope = ((reply.json() or {}).get("binding") or {}).get("scope") or {}
        if scope.get("type") != "thread" or not isinstance(scope.get("id"), str):
            raise refusals.Refused(404, "SESSION_NOT_FOUND", "no thread here has such a session")
        self._threads[session_id] = scope["id"]
        while len(self._threads) > MAX_REMEMBERED:
            self._threads.popitem(last=False)
        return str(scope["id"])

    async def must_own(self, caller: HTTPConnection, user: User, session_id: str, thread: str) -> None:
        """Ending and sharing are the owner's. Under a shared key the broker has one owner for all: the session's tag says who."""
        if self.settings.identity != SHARED:
            return
        query = urlencode({"scope_type": "thread", "scope_id": thread, "tag": f"{USER_TAG}:{tag_of(user.identity)}"})
        reply = await self.ask(caller, "GET", "/v1/sandbox/sessions", query=query)
        items = reply.json().get("items") if reply.status == 200 else None
        if not isinstance(items, list) or not any(isinstance(i, dict) and i.get("session_id") == session_id for i in items):
            raise refusals.forbidden("only the user for whom the session was made may end or share it")

    async def sandbox(self, caller: HTTPConnection, user: User, reference: str) -> str:
        """The id of a sandbox that is the user's, by id or name."""
        reply = await self.ask(caller, "GET", sandbox_path(reference))
        if reply.status != 200:
            raise Handed(reply)
        told = reply.json()
        tags = told.get("tags") or {}
        is_theirs = self.settings.identity != SHARED or tags.get(USER_TAG) == tag_of(user.identity)
        if not is_theirs or not isinstance(told.get("id"), str):
            raise refusals.no_such_sandbox()
        return str(told["id"])

    def _own_credential(self) -> str:
        key = self.settings.api_key
        if key is None:
            raise refusals.unavailable("the deployment has no key for the broker")
        return f"Bearer {key.expose()}"

    async def _must_be_fit(self) -> None:
        """An operator's key opens everybody's sandboxes: no user may borrow one."""
        async with self._fitness:
            if self._is_fit:
                return
            headers = [("authorization", self._own_credential())]
            reply = await self._send("GET", self.url("/v1/keys", "limit=1"), headers, None)
            if reply.status == 401:
                raise refusals.unavailable("the broker doesn't accept the deployment's key; its operator must set a valid COBOX_API_KEY")
            if reply.status != 403:
                raise refusals.unavailable(
                    "the deployment's key must be a human's (`cobox keys create my-deployment --kind human`), not an operator's"
                )
            self._is_fit = True

    async def open(
        self, method: str, url: httpx.URL, headers: Pairs, content: bytes | AsyncIterator[bytes] | None, silence: float
    ) -> httpx.Response:
        """An answer whose body is still to be read, and closed. Raises `httpx.HTTPError`."""
        timeout = httpx.Timeout(silence, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS)
        request = httpx.Request(method, url, headers=headers, content=content, extensions={"timeout": timeout.as_dict()})
        return await self._transport.handle_async_request(request)

    async def close(self) -> None:
        await self._transport.aclose()

    async def _send(self, method: str, url: httpx.URL, headers: Pairs, content: bytes | None) -> Reply:
        try:
            answer = await self.open(method, url, headers, content, ANSWER_SECONDS)
            try:
                body = bytearray()
                async for piece in answer.aiter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise refusals.unavailable("the broker's answer is too long to be one")
            finally:
                await answer.aclose()
        except httpx.HTTPError:
            # Its words may have the URL in it, which is nobody's business outside.
            raise refusals.unavailable("the broker can't be reached; try again") from None
        kept = [(n, v) for n, v in handed_back(answer.headers.items()) if n not in ("content-length", "content-encoding")]
        return Reply(answer.status_code, kept, bytes(body))


class Handed(Exception):
    """The broker's own refusal, which its caller gets as it is."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def session_path(session_id: str, *rest: str) -> str:
    return "/v1/sandbox/sessions/" + "/".join(segment(word) for word in (session_id, *rest))


def sandbox_path(reference: str) -> str:
    return "/v1/sandboxes/" + segment(reference)


def segment(word: str) -> str:
    """One step of a path, whatever is in it."""
    if word in ("", ".", ".."):
        raise refusals.Refused(404, "ROUTE_NOT_FOUND", "a path has no empty steps and none back")
    return quote(word, safe="")
