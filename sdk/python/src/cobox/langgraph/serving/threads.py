"""Whether a thread is a caller's to see: the deployment itself is asked, in this process but by its front door."""

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

from ..belonging import Thread
from ..bootstrap import MAX_ID
from . import refusals

# As long as the deployment may take to say whether a thread is somebody's, in seconds.
ASK_SECONDS = 10.0
# As long as a yes is good for the same caller and thread, in seconds: a client's requests come in bursts, and each answer of the deployment
# has all of the thread in it. So much later a thread that was taken away is seen to be.
SEEN_SECONDS = 3.0
# Such answers at once; only memory counts.
MAX_SEEN = 4096
# Most that is kept of a thread, in bytes: its state is in it, with whatever an agent put there. Mostly the first few are enough.
MAX_THREAD_BYTES = 32 * 1024 * 1024
# Where a thread's id and age stand, in the servers we know.
_HEAD = re.compile(
    rb'\s*\{\s*"thread_id"\s*:\s*"([\x20\x21\x23-\x5b\x5d-\x7e]+)"\s*,\s*"created_at"\s*:\s*"([\x20\x21\x23-\x5b\x5d-\x7e]+)"'
)
# Of the question itself; the caller's credentials, whatever they are, stand in the others.
_NOT_COPIED = frozenset(
    {"accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host", "transfer-encoding"}
)


class Threads:
    """Asks about threads, and remembers a yes for a moment."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, tuple[float, Thread]] = OrderedDict()

    async def see(self, connection: HTTPConnection, thread_id: str) -> Thread:
        """The thread as the deployment has it, where it shows the thread to this caller; else `Refused`."""
        if not 1 <= len(thread_id) <= MAX_ID or thread_id in (".", "..") or not is_text(thread_id):
            raise refusals.no_such_thread()
        headers = [(n, v) for n, v in connection.headers.raw if n.decode("latin-1").lower() not in _NOT_COPIED]
        # Whatever the auth handler looks at, it sees nothing else of the caller than this.
        shown = hashlib.sha256(repr((thread_id, headers)).encode()).digest()
        until, thread = self._seen.get(shown, (0.0, None))
        if thread is None or until < time.monotonic():
            thread = await _ask(connection, thread_id, headers)
            self._seen[shown] = (time.monotonic() + SEEN_SECONDS, thread)
            self._seen.move_to_end(shown)
            while len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
        return thread


def is_text(word: str) -> bool:
    """Half a character, which JSON can write, is in no URL."""
    return not any("\ud800" <= char <= "\udfff" for char in word)


async def _ask(connection: HTTPConnection, thread_id: str, headers: list[tuple[bytes, bytes]]) -> Thread:
    # Not under `/noauth`, where the deployment asks nobody.
    brief = _Brief(connection.app)
    transport = httpx.ASGITransport(app=brief, raise_app_exceptions=False)
    question = httpx.Request("GET", f"http://deployment/threads/{quote(thread_id, safe='')}", headers=headers)
    # In a task of its own: what the deployment keeps about a caller is kept by task.
    asked = asyncio.create_task(transport.handle_async_request(question))
    try:
        answer = await asyncio.wait_for(asked, ASK_SECONDS)
        text = await answer.aread()
    except (asyncio.TimeoutError, httpx.HTTPError, OSError):
        raise refusals.unavailable("the deployment could not be asked about the thread; try again") from None
    if answer.status_code in (400, 404, 422):
        raise refusals.no_such_thread()
    if answer.status_code in (401, 403):
        raise refusals.forbidden("the deployment doesn't show you this thread")
    if answer.status_code != 200:
        raise refusals.unavailable("the deployment could not say whose the thread is; try again")
    if brief.is_cut:
        raise refusals.unavailable(f"the thread has more than {MAX_THREAD_BYTES} bytes, and its id is not the first of them")
    thread = brief.thread or _read(text)
    if thread is None or _plain(thread.id) != _plain(thread_id):
        # A page that greets everybody with 200 is no leave.
        raise refusals.unavailable("what answers for threads here is not a LangGraph server")
    return thread


class _Brief:
    """The deployment, of whose answer no more is kept than says which thread it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.thread: Thread | None = None
        self.is_cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept = 0

        async def brief(message: Message) -> None:
            nonlocal kept
            if message["type"] == "http.response.body":
                body = message.get("body", b"")
                if kept == 0 and (found := _HEAD.match(body)):
                    self.thread = Thread(found.group(1).decode(), found.group(2).decode())
                elif kept + len(body) > MAX_THREAD_BYTES:
                    self.is_cut = self.thread is None
                if self.thread is not None or self.is_cut:
                    body = b""
                kept += len(body)
                message = {**message, "body": body}
            await send(message)

        await self._app(scope, receive, brief)


def _read(text: bytes) -> Thread | None:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(told.get("thread_id"), str):
        return None
    created_at = told.get("created_at")
    return Thread(told["thread_id"], created_at if isinstance(created_at, str) else None)


def _plain(thread_id: str) -> str:
    """Ids of threads are UUIDs, which have several spellings."""
    return thread_id.lower().removeprefix("urn:uuid:").strip("{}").replace("-", "")
