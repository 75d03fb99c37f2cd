"""Checks whether a caller may see a thread, by asking the deployment in-process with the caller's own headers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from urllib.parse import quote

import httpx
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..supplied_sandbox import MAX_ID
from ..thread_ownership import Thread
from . import error_responses

# Maximum seconds for the deployment's response about a thread.
ASK_SECONDS = 10.0
# Seconds for which a positive result is cached per caller and thread. Clients send requests in bursts, and each response contains
# the whole thread. A revoked access takes effect after this time.
ALLOWED_SECONDS = 3.0
# Maximum cached results, to bound memory.
MAX_ALLOWED = 4096
# Maximum bytes buffered of a thread, whose state an agent can make arbitrarily large. Usually the first bytes suffice.
MAX_THREAD_BYTES = 32 * 1024 * 1024
# The thread's id and creation time at the start of the response, in the known servers.
_HEAD = re.compile(
    rb'\s*\{\s*"thread_id"\s*:\s*"([\x20\x21\x23-\x5b\x5d-\x7e]+)"\s*,\s*"created_at"\s*:\s*"([\x20\x21\x23-\x5b\x5d-\x7e]+)"'
)
# Headers set for the check itself. All others are copied, because any of them may contain the caller's credentials.
_NOT_COPIED = frozenset(
    {"accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host", "transfer-encoding"}
)


class ThreadAccess:
    """Checks access to threads; positive results are cached briefly."""

    def __init__(self) -> None:
        self._allowed: OrderedDict[bytes, tuple[float, Thread]] = OrderedDict()

    async def require_visible(self, connection: HTTPConnection, thread_id: str) -> Thread:
        """The thread as the deployment reports it to this caller; raises `RequestError` if the caller has no access."""
        if not 1 <= len(thread_id) <= MAX_ID or thread_id in (".", "..") or not is_url_encodable(thread_id):
            raise error_responses.no_such_thread()
        headers = [(n, v) for n, v in connection.headers.raw if n.decode("latin-1").lower() not in _NOT_COPIED]
        # The cache key covers everything the auth handler can see of the caller.
        cache_key = hashlib.sha256(repr((thread_id, headers)).encode()).digest()
        until, thread = self._allowed.get(cache_key, (0.0, None))
        if thread is None or until < time.monotonic():
            thread = await _ask_deployment(connection, thread_id, headers)
            self._allowed[cache_key] = (time.monotonic() + ALLOWED_SECONDS, thread)
            self._allowed.move_to_end(cache_key)
            while len(self._allowed) > MAX_ALLOWED:
                self._allowed.popitem(last=False)
        return thread


def is_url_encodable(word: str) -> bool:
    """Whether the text can be part of a URL; JSON can contain unpaired surrogates, which cannot be encoded."""
    return not any("\ud800" <= char <= "\udfff" for char in word)


async def _ask_deployment(connection: HTTPConnection, thread_id: str, headers: list[tuple[bytes, bytes]]) -> Thread:
    # Not below `/noauth`, where the deployment does not authenticate.
    head_only = _ThreadHeadOnly(connection.app)
    transport = httpx.ASGITransport(app=head_only, raise_app_exceptions=False)
    question = httpx.Request("GET", f"http://deployment/threads/{quote(thread_id, safe='')}", headers=headers)
    # In a separate task, because the deployment stores the caller in a context variable.
    request_task = asyncio.create_task(transport.handle_async_request(question))
    try:
        response = await asyncio.wait_for(request_task, ASK_SECONDS)
        text = await response.aread()
    except (asyncio.TimeoutError, httpx.HTTPError, OSError):
        raise error_responses.unavailable("the deployment could not be asked about the thread; try again") from None
    if response.status_code in (400, 404, 422):
        raise error_responses.no_such_thread()
    if response.status_code in (401, 403):
        raise error_responses.forbidden("you have no access to this thread in the deployment")
    if response.status_code != 200:
        raise error_responses.unavailable("the deployment's response about the thread failed; try again")
    if head_only.is_cut:
        raise error_responses.unavailable(f"the thread has more than {MAX_THREAD_BYTES} bytes and does not start with its id")
    thread = head_only.thread or _parse_thread(text)
    if thread is None or _normalized_id(thread.id) != _normalized_id(thread_id):
        # A server that responds to every request with 200 does not grant access.
        raise error_responses.unavailable("the server that responds for threads is not a LangGraph server")
    return thread


class _ThreadHeadOnly:
    """Wraps the deployment and buffers no more of its response than is needed to identify the thread."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.thread: Thread | None = None
        self.is_cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        buffered = 0

        async def head_only(message: Message) -> None:
            nonlocal buffered
            if message["type"] == "http.response.body":
                body = message.get("body", b"")
                if buffered == 0 and (found := _HEAD.match(body)):
                    self.thread = Thread(found.group(1).decode(), found.group(2).decode())
                elif buffered + len(body) > MAX_THREAD_BYTES:
                    self.is_cut = self.thread is None
                if self.thread is not None or self.is_cut:
                    body = b""
                buffered += len(body)
                message = {**message, "body": body}
            await send(message)

        await self._app(scope, receive, head_only)


def _parse_thread(text: bytes) -> Thread | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("thread_id"), str):
        return None
    created_at = fields.get("created_at")
    return Thread(fields["thread_id"], created_at if isinstance(created_at, str) else None)


def _normalized_id(thread_id: str) -> str:
    """Thread ids are UUIDs, which have several spellings."""
    return thread_id.lower().removeprefix("urn:uuid:").strip("{}").replace("-", "")
