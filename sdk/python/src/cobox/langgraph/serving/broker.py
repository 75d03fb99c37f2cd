"""The way to the broker: one client for all requests, which sends a credential there and nowhere else."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

import httpx
from starlette.requests import HTTPConnection

from ...network import Network
from ..belonging import Thread, is_for, read_time
from ..bootstrap import MAX_ID
from ..run import USER_TAG, tag_of
from . import refusals
from .callers import User
from .headers import TO_BROKER, Pairs, handed_back, passed_on
from .settings import SHARED, Settings
from .threads import Threads, is_text

# An answer of the control plane is a few KiB; a full page of a list a few hundred.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
# Longer than the broker makes anybody wait for a start (55 s).
ANSWER_SECONDS = 75.0
CONNECT_SECONDS = 5.0
# Requests to the broker under way at once, streams of events included.
MAX_CONNECTIONS = 1024
# Relayed ones, which have connections of their own: whoever shows something that looks like a token gets so far, and no further.
MAX_RELAYED = 512
# Of those that wait for the next request.
MAX_IDLE_CONNECTIONS = 32
# Sessions whose thread and tags are remembered; they never change, so only memory counts.
MAX_REMEMBERED = 4096
# Ended sessions of a thread that are looked through for one.
MAX_ENDED = 100
# As long as the broker may take to say what the deployment's key is, in seconds; and so long a failure of that counts for everybody.
FITNESS_SECONDS, UNFIT_SECONDS = 10.0, 1.0
# How the broker's keys begin. In `X-Api-Key` they go on to it; another service's key there is not for the broker to see.
OUR_KEYS = "cbx_"
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
            raise refusals.not_a_broker() from None


@dataclass(frozen=True)
class Made:
    """What a session was made for, which never changes."""

    session_id: str
    thread: str
    tags: Mapping[str, str]
    made_at: datetime


class Broker:
    """Speaks to the broker as the deployment, or as its caller, whichever the settings say."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # None where there is no TLS.
        self.tls = Network().tls() if settings.broker_url.startswith("https:") else None
        self._transport, self._relaying = self._connections(MAX_CONNECTIONS), self._connections(MAX_RELAYED)
        self.threads = Threads()
        self._made: OrderedDict[str, Made] = OrderedDict()
        self._is_fit = False
        # The one question under way, or its answer: until when that counts.
        self._fitness: asyncio.Task[refusals.Refused | None] | None = None
        self._unfit_until = 0.0

    def _connections(self, most: int) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=MAX_IDLE_CONNECTIONS)
        # The transport alone: no cookies kept for the next caller, no redirect, no proxy, no netrc, and no URL in anybody's log.
        return httpx.AsyncHTTPTransport(verify=self.tls or False, trust_env=False, limits=limits)

    def url(self, path: str, query: str = "") -> httpx.URL:
        try:
            return httpx.URL(self.settings.broker_url + path + (f"?{query}" if query else ""))
        except httpx.InvalidURL:
            raise refusals.invalid("the path and query are too long, or have characters that no URL has") from None

    async def headers(self, caller: HTTPConnection) -> Pairs:
        """What goes with a request in somebody's name."""
        credential = caller.headers.get("authorization")
        if self.settings.identity == SHARED:
            await self._must_be_fit()
            shown = self._own_credential()
        elif credential is not None:
            shown = credential
        elif (key := caller.headers.get("x-api-key", "")).startswith(OUR_KEYS):
            shown = f"Bearer {key}"
        else:
            raise refusals.unauthenticated("send `Authorization: Bearer …`: the broker is shown the same")
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
            try:
                content = json.dumps(body).encode()
            except RecursionError:
                raise refusals.invalid("the body must be JSON that is less deep") from None
            headers.append(("content-type", "application/json"))
        reply = await self._send(method, self.url(path, query), headers, content)
        if reply.status == 401 and self.settings.identity == SHARED:
            # The caller's own credential is good: it was let in here.
            raise refusals.unavailable("the broker doesn't accept the deployment's key; its operator must set a valid COBOX_API_KEY")
        return reply

    async def made(self, caller: HTTPConnection, session_id: str) -> Made:
        """What a session was made for. What isn't a thread's isn't served here; the broker's refusals are handed on."""
        if (known := self._made.get(session_id)) is not None:
            self._made.move_to_end(session_id)
            return known
        reply = await self.ask(caller, "GET", session_path(session_id))
        if reply.status != 200:
            raise Handed(reply)
        scope = ((reply.json() or {}).get("binding") or {}).get("scope") or {}
        if scope.get("type") != "thread" or not isinstance(scope.get("id"), str):
            raise refusals.no_such_session()
        return await self._listed(caller, session_id, str(scope["id"]))

    async def must_be_for(self, caller: HTTPConnection, user: User, thread: Thread, session_id: str | None = None) -> None:
        """The thread's session must be of this very thread, not of an earlier one of the same id; `Refused` where it isn't."""
        if self.settings.identity != SHARED:
            return
        found = await self._listed(caller, session_id, thread.id) if session_id is not None else await self._living(caller, thread.id)
        if found is not None and not is_for(user.identity, thread, found.tags, found.made_at):
            raise refusals.of_an_earlier_thread()

    async def must_own(self, caller: HTTPConnection, user: User, session_id: str, thread: str) -> None:
        """Ending and sharing are the owner's. Under a shared key the broker has one owner for all: the session's tag says who."""
        if self.settings.identity != SHARED:
            return
        if (await self._listed(caller, session_id, thread)).tags.get(USER_TAG) != tag_of(user.identity):
            raise refusals.forbidden("only the user for whom the session was made may end or share it")

    async def _living(self, caller: HTTPConnection, thread: str) -> Made | None:
        """The session that a thread has now."""
        found = await self._list(caller, thread)
        return found[0] if found else None

    async def _listed(self, caller: HTTPConnection, session_id: str, thread: str) -> Made:
        if (known := self._made.get(session_id)) is not None:
            return known
        for state in (None, "terminated", "failed"):
            for found in await self._list(caller, thread, state):
                if found.session_id == session_id:
                    self._made[session_id] = found
                    while len(self._made) > MAX_REMEMBERED:
                        self._made.popitem(last=False)
                    return found
        raise refusals.no_such_session()

    async def _list(self, caller: HTTPConnection, thread: str, state: str | None = None) -> list[Made]:
        asked = {"scope_type": "thread", "scope_id": thread} | ({"state": state, "limit": str(MAX_ENDED)} if state else {})
        reply = await self.ask(caller, "GET", "/v1/sandbox/sessions", query=urlencode(asked))
        if reply.status != 200:
            raise Handed(reply)
        told = reply.json()
        items = told.get("items") if isinstance(told, dict) else None
        if not isinstance(items, list):
            raise refusals.not_a_broker()
        return [_made(item, thread) for item in items]

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
        """An operator's key opens everybody's sandboxes: no user may borrow one. Asked once for all who wait, and again where it failed."""
        if self._is_fit:
            return
        task = self._fitness
        if task is None or (task.done() and self._unfit_until < time.monotonic()):
            task = self._fitness = asyncio.create_task(self._ask_fitness())
        # Who leaves doesn't take the question along.
        if (refused := await asyncio.shield(task)) is not None:
            raise refusals.Refused(refused.status, refused.code, refused.message, retryable=refused.retryable)

    async def _ask_fitness(self) -> refusals.Refused | None:
        try:
            headers = [("authorization", self._own_credential())]
            reply = await self._send("GET", self.url("/v1/keys", "limit=1"), headers, None, FITNESS_SECONDS)
        except refusals.Refused as refused:
            # Nobody answered: whoever comes now needn't wait for the same.
            self._unfit_until = time.monotonic() + UNFIT_SECONDS
            return refused
        if reply.status == 401:
            return refusals.unavailable("the broker doesn't accept the deployment's key; its operator must set a valid COBOX_API_KEY")
        if reply.status != 403:
            return refusals.unavailable(
                "the deployment's key must be a human's (`cobox keys create my-deployment --kind human`), not an operator's"
            )
        self._is_fit = True
        return None

    async def open(
        self,
        method: str,
        url: httpx.URL,
        headers: Pairs,
        content: bytes | AsyncIterator[bytes] | None,
        silence: float,
        *,
        is_relayed: bool = False,
    ) -> httpx.Response:
        """An answer whose body is still to be read, and closed. Raises `httpx.HTTPError`."""
        timeout = httpx.Timeout(silence, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS)
        request = httpx.Request(method, url, headers=headers, content=content, extensions={"timeout": timeout.as_dict()})
        return await (self._relaying if is_relayed else self._transport).handle_async_request(request)

    async def close(self) -> None:
        await self._transport.aclose()
        await self._relaying.aclose()

    async def _send(self, method: str, url: httpx.URL, headers: Pairs, content: bytes | None, silence: float = ANSWER_SECONDS) -> Reply:
        try:
            answer = await self.open(method, url, headers, content, silence)
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


def _made(item: Any, thread: str) -> Made:
    if isinstance(item, dict) and isinstance(item.get("session_id"), str) and isinstance(item.get("tags", {}), dict):
        made_at = read_time(item.get("created_at"))
        if made_at is not None:
            return Made(item["session_id"], thread, item.get("tags", {}), made_at)
    raise refusals.not_a_broker()


def session_path(session_id: str, *rest: str) -> str:
    return "/v1/sandbox/sessions/" + "/".join(segment(word) for word in (session_id, *rest))


def sandbox_path(reference: str) -> str:
    return "/v1/sandboxes/" + segment(reference)


def segment(word: str) -> str:
    """One step of a path, whatever is in it."""
    if word in ("", ".", "..") or len(word) > MAX_ID or not is_text(word):
        raise refusals.Refused(404, "ROUTE_NOT_FOUND", "a path has no empty steps, none back and none without end")
    return quote(word, safe="")
