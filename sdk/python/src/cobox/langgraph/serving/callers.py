"""Who calls: the user that the deployment's own auth handler let in, and whether a thread is theirs to see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from starlette.requests import HTTPConnection

from ..bootstrap import MAX_ID
from . import refusals

# The one way in that has no user: the sandbox's token is the credential, and the broker checks it.
DATAPLANE_VISITOR = "cobox-dataplane"
DATAPLANE_PATHS = ("/dp/", "/v1/sandbox/relay/")
# As long as the deployment may take to say whether a thread is somebody's, in seconds.
ASK_SECONDS = 10.0
# Of the question itself; the caller's credentials, whatever they are, stand in the others.
_NOT_COPIED = frozenset(
    {"accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host", "transfer-encoding"}
)


def dataplane_visitor(path: str, mount_prefix: str = "") -> dict[str, Any] | None:
    """For a deployment's `@auth.authenticate`: the user to return for paths whose credential is a sandbox's token.

    Whoever comes there has no leave to anything else; `None` for every other path. Without it, clients of the relay send the
    deployment's credential as always, and the token as `X-Api-Key`.
    """
    beneath = path[len(mount_prefix) :] if path.startswith(mount_prefix) else ""
    if not beneath.startswith(DATAPLANE_PATHS):
        return None
    return {"identity": DATAPLANE_VISITOR, "is_authenticated": False, "permissions": []}


@dataclass(frozen=True)
class User:
    """Somebody whom the deployment knows."""

    identity: str

    @classmethod
    def of(cls, connection: HTTPConnection) -> User:
        """Fails closed: no auth handler, no user, or a bypass of it, is nobody."""
        user = _shown(connection)
        if user is None:
            raise refusals.forbidden(
                'nobody was authenticated: the deployment needs "auth" and "http": {"enable_custom_route_auth": true} in langgraph.json'
            )
        identity = getattr(user, "identity", None)
        if not getattr(user, "is_authenticated", False) or not isinstance(identity, str) or not identity:
            raise refusals.unauthenticated("these routes need a user whom the deployment's auth handler knows")
        if _is_studio(user):
            raise refusals.forbidden('studio comes in without showing who it is: set "disable_studio_auth": true in langgraph.json')
        return cls(identity)


def is_visitor(connection: HTTPConnection) -> bool:
    return getattr(_shown(connection), "identity", None) == DATAPLANE_VISITOR


def _shown(connection: HTTPConnection) -> Any:
    return connection.scope.get("user")


def _is_studio(user: Any) -> bool:
    kinds = {kind.__name__ for kind in type(user).__mro__}
    return "StudioUser" in kinds or (isinstance(user, Mapping) and user.get("kind") == "StudioUser")


async def see_thread(connection: HTTPConnection, thread_id: str) -> str:
    """The thread's id as the deployment writes it, where it shows the thread to this caller; else `Refused`.

    The deployment itself is asked, in this process but by its front door: with the caller's own headers, through its own auth.
    """
    if not 1 <= len(thread_id) <= MAX_ID or thread_id in (".", ".."):
        raise refusals.no_such_thread()
    headers = [(n, v) for n, v in connection.headers.raw if n.decode("latin-1").lower() not in _NOT_COPIED]
    # Not under `/noauth`, where the deployment asks nobody.
    transport = httpx.ASGITransport(app=connection.app, raise_app_exceptions=False)
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
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    canonical = told.get("thread_id") if isinstance(told, dict) else None
    if not isinstance(canonical, str) or _plain(canonical) != _plain(thread_id):
        # A page that greets everybody with 200 is no leave.
        raise refusals.unavailable("what answers for threads here is not a LangGraph server")
    return canonical


def _plain(thread_id: str) -> str:
    """Ids of threads are UUIDs, which have several spellings."""
    return thread_id.lower().removeprefix("urn:uuid:").strip("{}").replace("-", "")
