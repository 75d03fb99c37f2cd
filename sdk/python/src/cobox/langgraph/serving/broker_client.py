"""HTTP client of the broker for the served routes; sends credentials to the broker and nowhere else."""

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

from ...network_settings import Network
from ..run import USER_TAG, user_tag
from ..supplied_sandbox import MAX_ID
from ..thread_ownership import Thread, belongs_to, parse_time
from . import error_responses
from .caller_identity import User
from .header_filter import TO_BROKER, HeaderPairs, filter_request_headers, filter_response_headers
from .settings import SHARED, Settings
from .thread_access import ThreadAccess, is_url_encodable

# A control plane response is a few KiB; a full page of a list a few hundred.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
# Longer than the broker waits for a sandbox to start (55 s).
ANSWER_SECONDS = 75.0
CONNECT_SECONDS = 5.0
# Maximum concurrent requests to the broker, event streams included.
MAX_CONNECTIONS = 1024
# Maximum concurrent relayed requests. They have a pool of their own, so that clients with invalid tokens cannot use up the
# connections of others.
MAX_RELAYED = 512
# Maximum idle connections per pool.
MAX_IDLE_CONNECTIONS = 32
# Maximum cached sessions with their thread and tags; these never change, so the limit only bounds memory.
MAX_REMEMBERED = 4096
# Maximum ended sessions of a thread that are searched for one session.
MAX_ENDED = 100
# Seconds to check the deployment's key at the broker, and seconds for which a failed check counts for all callers.
KEY_CHECK_SECONDS, KEY_CHECK_FAILURE_SECONDS = 10.0, 1.0
# Prefix of the broker's API keys. Only a key with it is forwarded from `X-Api-Key`; keys of other services must not reach the
# broker.
BROKER_KEY_PREFIX = "cbx_"
# The header in which a broker with `[thread_authority]` expects a caller's credential for this deployment.
THREAD_CREDENTIAL = "x-thread-authorization"


@dataclass(frozen=True)
class BrokerResponse:
    """A complete response of the broker."""

    status: int
    headers: HeaderPairs
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise error_responses.not_a_broker() from None


@dataclass(frozen=True)
class SessionOrigin:
    """The thread, tags and creation time of a session; they never change."""

    session_id: str
    thread: str
    tags: Mapping[str, str]
    session_created_at: datetime


class BrokerClient:
    """Sends requests to the broker as the deployment or as the caller, depending on the settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # None without TLS.
        self.tls = Network().tls() if settings.broker_url.startswith("https:") else None
        self._transport, self._relay_transport = self._new_transport(MAX_CONNECTIONS), self._new_transport(MAX_RELAYED)
        self.thread_access = ThreadAccess()
        self._origins: OrderedDict[str, SessionOrigin] = OrderedDict()
        self._is_key_suitable = False
        # The running check or its result, and until when a failed result counts.
        self._key_check: asyncio.Task[error_responses.RequestError | None] | None = None
        self._key_check_failed_until = 0.0

    def _new_transport(self, most: int) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=MAX_IDLE_CONNECTIONS)
        # Only the transport: a client would keep cookies for the next caller, follow redirects, use proxies and netrc, and log
        # URLs.
        return httpx.AsyncHTTPTransport(verify=self.tls or False, trust_env=False, limits=limits)

    def url(self, path: str, query: str = "") -> httpx.URL:
        try:
            return httpx.URL(self.settings.broker_url + path + (f"?{query}" if query else ""))
        except httpx.InvalidURL:
            raise error_responses.invalid("the path and query are too long or contain characters that are invalid in a URL") from None

    async def headers(self, caller: HTTPConnection) -> HeaderPairs:
        """The headers of a request on behalf of a caller."""
        credential = caller.headers.get("authorization")
        if self.settings.identity == SHARED:
            await self._require_suitable_key()
            authorization = self._own_credential()
        elif credential is not None:
            authorization = credential
        elif (key := caller.headers.get("x-api-key", "")).startswith(BROKER_KEY_PREFIX):
            authorization = f"Bearer {key}"
        else:
            raise error_responses.unauthenticated("send `Authorization: Bearer …`; the same credential is sent to the broker")
        headers = [*filter_request_headers(caller.headers.raw, TO_BROKER), ("authorization", authorization)]
        if self.settings.is_thread_authority and credential is not None:
            headers.append((THREAD_CREDENTIAL, credential))
        return headers

    async def send(
        self, caller: HTTPConnection, method: str, path: str, *, query: str = "", body: Any = None, extra: Mapping[str, str] | None = None
    ) -> BrokerResponse:
        headers = [h for h in await self.headers(caller) if h[0] != "content-type" and (extra is None or h[0] not in extra)]
        headers += list((extra or {}).items())
        content = None
        if body is not None:
            try:
                content = json.dumps(body).encode()
            except RecursionError:
                raise error_responses.invalid("the JSON body is nested too deeply") from None
            headers.append(("content-type", "application/json"))
        reply = await self._send(method, self.url(path, query), headers, content)
        if reply.status == 401 and self.settings.identity == SHARED:
            # The caller's own credential is valid: the deployment has authenticated the caller.
            raise error_responses.unavailable("the broker rejects the deployment's key; its operator must set a valid COBOX_API_KEY")
        return reply

    async def session_origin(self, caller: HTTPConnection, session_id: str) -> SessionOrigin:
        """The origin of a session. Sessions that do not belong to a thread are not served here; errors of the broker are passed
        on."""
        if (known := self._origins.get(session_id)) is not None:
            self._origins.move_to_end(session_id)
            return known
        reply = await self.send(caller, "GET", session_path(session_id))
        if reply.status != 200:
            raise BrokerRefusal(reply)
        scope = ((reply.json() or {}).get("binding") or {}).get("scope") or {}
        if scope.get("type") != "thread" or not isinstance(scope.get("id"), str):
            raise error_responses.no_such_session()
        return await self._find_session(caller, session_id, str(scope["id"]))

    async def require_current_thread(self, caller: HTTPConnection, user: User, thread: Thread, session_id: str | None = None) -> None:
        """Raises `RequestError` if the session was created for an earlier thread with the same id."""
        if self.settings.identity != SHARED:
            return
        found = (
            await self._find_session(caller, session_id, thread.id)
            if session_id is not None
            else await self._active_session(caller, thread.id)
        )
        if found is not None and not belongs_to(user.identity, thread, found.tags, found.session_created_at):
            raise error_responses.session_of_earlier_thread()

    async def require_owner(self, caller: HTTPConnection, user: User, session_id: str, thread: str) -> None:
        """Only the owner may end and share a session. With a shared key, the broker sees one owner for all users, so the
        session's tag decides."""
        if self.settings.identity != SHARED:
            return
        if (await self._find_session(caller, session_id, thread)).tags.get(USER_TAG) != user_tag(user.identity):
            raise error_responses.forbidden("only the user for whom the session was created may end or share it")

    async def _active_session(self, caller: HTTPConnection, thread: str) -> SessionOrigin | None:
        """The thread's current session."""
        found = await self._list_sessions(caller, thread)
        return found[0] if found else None

    async def _find_session(self, caller: HTTPConnection, session_id: str, thread: str) -> SessionOrigin:
        if (known := self._origins.get(session_id)) is not None:
            return known
        for state in (None, "terminated", "failed"):
            for found in await self._list_sessions(caller, thread, state):
                if found.session_id == session_id:
                    self._origins[session_id] = found
                    while len(self._origins) > MAX_REMEMBERED:
                        self._origins.popitem(last=False)
                    return found
        raise error_responses.no_such_session()

    async def _list_sessions(self, caller: HTTPConnection, thread: str, state: str | None = None) -> list[SessionOrigin]:
        params = {"scope_type": "thread", "scope_id": thread} | ({"state": state, "limit": str(MAX_ENDED)} if state else {})
        reply = await self.send(caller, "GET", "/v1/sandbox/sessions", query=urlencode(params))
        if reply.status != 200:
            raise BrokerRefusal(reply)
        page = reply.json()
        items = page.get("items") if isinstance(page, dict) else None
        if not isinstance(items, list):
            raise error_responses.not_a_broker()
        return [_parse_session(item, thread) for item in items]

    async def owned_sandbox_id(self, caller: HTTPConnection, user: User, reference: str) -> str:
        """The id of one of the user's sandboxes, by id or name."""
        reply = await self.send(caller, "GET", sandbox_path(reference))
        if reply.status != 200:
            raise BrokerRefusal(reply)
        sandbox = reply.json()
        tags = sandbox.get("tags") or {}
        is_theirs = self.settings.identity != SHARED or tags.get(USER_TAG) == user_tag(user.identity)
        if not is_theirs or not isinstance(sandbox.get("id"), str):
            raise error_responses.no_such_sandbox()
        return str(sandbox["id"])

    def _own_credential(self) -> str:
        key = self.settings.api_key
        if key is None:
            raise error_responses.unavailable("the deployment has no key for the broker")
        return f"Bearer {key.expose()}"

    async def _require_suitable_key(self) -> None:
        """An operator's key gives access to all sandboxes, so it must not act for users. All waiting callers share one check; a
        failed check is repeated."""
        if self._is_key_suitable:
            return
        task = self._key_check
        if task is None or (task.done() and self._key_check_failed_until < time.monotonic()):
            task = self._key_check = asyncio.create_task(self._check_key())
        # A caller that disconnects must not cancel the check for the others.
        if (refused := await asyncio.shield(task)) is not None:
            raise error_responses.RequestError(refused.status, refused.code, refused.message, retryable=refused.retryable)

    async def _check_key(self) -> error_responses.RequestError | None:
        try:
            headers = [("authorization", self._own_credential())]
            reply = await self._send("GET", self.url("/v1/keys", "limit=1"), headers, None, KEY_CHECK_SECONDS)
        except error_responses.RequestError as refused:
            # The broker did not respond, so for a moment other callers fail immediately instead of waiting as well.
            self._key_check_failed_until = time.monotonic() + KEY_CHECK_FAILURE_SECONDS
            return refused
        if reply.status == 401:
            return error_responses.unavailable("the broker rejects the deployment's key; its operator must set a valid COBOX_API_KEY")
        if reply.status != 403:
            return error_responses.unavailable(
                "the deployment's key must be of kind human (`cobox keys create my-deployment --kind human`), not an operator's"
            )
        self._is_key_suitable = True
        return None

    async def open(
        self,
        method: str,
        url: httpx.URL,
        headers: HeaderPairs,
        content: bytes | AsyncIterator[bytes] | None,
        silence: float,
        *,
        is_relayed: bool = False,
    ) -> httpx.Response:
        """Sends a request and returns a response whose body the caller must read and close. Raises `httpx.HTTPError`."""
        timeout = httpx.Timeout(silence, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS)
        request = httpx.Request(method, url, headers=headers, content=content, extensions={"timeout": timeout.as_dict()})
        return await (self._relay_transport if is_relayed else self._transport).handle_async_request(request)

    async def close(self) -> None:
        await self._transport.aclose()
        await self._relay_transport.aclose()

    async def _send(
        self, method: str, url: httpx.URL, headers: HeaderPairs, content: bytes | None, silence: float = ANSWER_SECONDS
    ) -> BrokerResponse:
        try:
            response = await self.open(method, url, headers, content, silence)
            try:
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise error_responses.unavailable("the broker's response is too long")
            finally:
                await response.aclose()
        except httpx.HTTPError:
            # The exception text may contain the URL, which must not be disclosed.
            raise error_responses.unavailable("the broker can't be reached; try again") from None
        headers = [(n, v) for n, v in filter_response_headers(response.headers.items()) if n not in ("content-length", "content-encoding")]
        return BrokerResponse(response.status_code, headers, bytes(body))


class BrokerRefusal(Exception):
    """An error response of the broker, passed on unchanged."""

    def __init__(self, response: BrokerResponse) -> None:
        super().__init__(response.status)
        self.response = response


def _parse_session(item: Any, thread: str) -> SessionOrigin:
    if isinstance(item, dict) and isinstance(item.get("session_id"), str) and isinstance(item.get("tags", {}), dict):
        session_created_at = parse_time(item.get("created_at"))
        if session_created_at is not None:
            return SessionOrigin(item["session_id"], thread, item.get("tags", {}), session_created_at)
    raise error_responses.not_a_broker()


def session_path(session_id: str, *rest: str) -> str:
    return "/v1/sandbox/sessions/" + "/".join(path_segment(word) for word in (session_id, *rest))


def sandbox_path(reference: str) -> str:
    return "/v1/sandboxes/" + path_segment(reference)


def path_segment(word: str) -> str:
    """Encodes one component of a path."""
    if word in ("", ".", "..") or len(word) > MAX_ID or not is_url_encodable(word):
        raise error_responses.RequestError(404, "ROUTE_NOT_FOUND", "a path component must not be empty, `.`, `..` or too long")
    return quote(word, safe="")
