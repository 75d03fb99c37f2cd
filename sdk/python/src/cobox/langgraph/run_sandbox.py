"""Opens the sandbox of a run: the one of its thread, as the broker decides, or without a broker the one that the run supplies."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ..call import Call, perform
from ..client import AsyncCobox, BrokerApi, Cobox
from ..decode import decode
from ..effects import Flow
from ..errors import SessionNotFound, SettingsMissing
from ..grant import Grant, Token
from ..responses import Delegated
from ..session import AsyncSession, Session
from .run import Run
from .supplied_sandbox import AllowedPrefixes, SandboxRefused, SuppliedSandbox
from .thread_ownership import Thread, belongs_to

log = logging.getLogger("cobox")

# Maximum seconds to ask the LangGraph server for a thread's age.
ASK_SECONDS = 10.0
# Environment variable for deployments without a broker: URL prefixes to which a supplied token may be sent, separated by commas
# or spaces.
PREFIXES = "COBOX_DATAPLANE_PREFIXES"
# Requested capabilities for a supplied sandbox; limited to those of the supplied token.
AGENT_CAPABILITIES = ("fs_read", "fs_write", "exec", "shell_observe")


@dataclass(frozen=True)
class SessionParams:
    """Parameters of the session, besides the run itself."""

    mode: str = "ensure"
    capabilities: Sequence[str] | None = None
    template: str | None = None
    access: str | None = None
    headers: Mapping[str, str] | None = None
    # Whether to accept a session that was created for another user.
    shares_thread: bool = False


class _OwnedByAnotherUser(Exception):
    """The sandbox of the run's thread id was created for another user, possibly for a deleted thread with the same id."""

    def to_error(self) -> SandboxRefused:
        return SandboxRefused(
            "the sandbox of this thread's id was created for another user, whose thread was deleted; start a new thread, or pass "
            "shares_thread=True if several users share their threads"
        )


def sandbox_for(
    config: Mapping[str, Any] | None,
    *,
    cobox: Cobox | None = None,
    prefixes: Sequence[str] | None = None,
    mode: str = "ensure",
    capabilities: Sequence[str] | None = None,
    template: str | None = None,
    access: str | None = None,
    headers: Mapping[str, str] | None = None,
    shares_thread: bool = False,
    upkeep: bool = True,
) -> Session:
    """Opens the sandbox of the run that `config` belongs to.

    With a broker (`cobox`, otherwise COBOX_URL and COBOX_API_KEY, otherwise a running `cobox up`) this is the sandbox of the
    run's thread, created if needed. A sandbox supplied in `configurable.sandbox` must be the thread's, or come with a token that
    the broker accepts for it; the URL is always the broker's. Without a broker, only a supplied sandbox is possible, and only at
    URLs under `prefixes` (otherwise COBOX_DATAPLANE_PREFIXES). Anything else raises `SandboxRefused`. Closing the session leaves
    the sandbox as it is.

    After a thread was deleted, another user can create a thread with the same id. A sandbox that was created for another user is
    therefore refused, unless `shares_thread=True` states that several users share this thread and its sandbox.
    """
    run, params = Run.of(config), SessionParams(mode, capabilities, template, access, headers, shares_thread)
    if (broker := cobox or _blocking_broker()) is not None:
        try:
            return Session(broker._io.run(resolve(broker, run, params)), broker._io, upkeep=upkeep)
        except _OwnedByAnotherUser as another:
            raise another.to_error() from None
    supplied, http = _require_supplied(run, prefixes)
    return Session.from_token(http, _token(supplied), **_session_identity(supplied, run))


async def asandbox_for(
    config: Mapping[str, Any] | None,
    *,
    cobox: AsyncCobox | None = None,
    prefixes: Sequence[str] | None = None,
    mode: str = "ensure",
    capabilities: Sequence[str] | None = None,
    template: str | None = None,
    access: str | None = None,
    headers: Mapping[str, str] | None = None,
    shares_thread: bool = False,
    upkeep: bool = True,
) -> AsyncSession:
    """Like `sandbox_for`, for asyncio. In a LangGraph server, it asks the server for the thread's age if the sandbox was created
    for another user, so that users who share a thread need no `shares_thread`."""
    run, params = Run.of(config), SessionParams(mode, capabilities, template, access, headers, shares_thread)
    # Reading settings from files would block the event loop.
    if (broker := cobox or await asyncio.to_thread(_async_broker)) is not None:
        try:
            grant = await broker._io.run(resolve(broker, run, params))
        except _OwnedByAnotherUser as another:
            grant = await _join_shared_thread(broker, run, params, another)
        return AsyncSession(grant, broker._io, upkeep=upkeep)
    supplied, http = _require_supplied(run, prefixes)
    return AsyncSession.from_token(http, _token(supplied), **_session_identity(supplied, run))


def resolve(broker: BrokerApi, run: Run, params: SessionParams, thread: Thread | None = None) -> Flow[Grant]:
    """Resolves a run's sandbox with a broker, which verifies what the run supplies. `thread`: as its server reports it."""
    if run.supplied is None:
        if run.thread_id is None:
            raise SandboxRefused("the run has no thread and therefore no sandbox; start it on a thread")
        return (yield from _join_thread(broker, run, params, thread))
    grant = None
    if run.thread_id is not None:
        try:
            joining = SessionParams("get", params.capabilities, headers=params.headers, shares_thread=params.shares_thread)
            grant = yield from _join_thread(broker, run, joining, thread)
        except SessionNotFound:
            grant = None
    if grant is None:
        return (yield from _delegated_grant(broker, run.supplied, params))
    if grant.sandbox_id != run.supplied.sandbox_id:
        raise SandboxRefused("configurable.sandbox: the thread has another sandbox")
    return grant


def _join_thread(broker: BrokerApi, run: Run, params: SessionParams, thread: Thread | None) -> Flow[Grant]:
    # As an agent, even if the key belongs to a person or a deployment: this narrows the capabilities.
    negotiate = BrokerApi.negotiate.flow
    grant: Grant = yield from negotiate(
        broker,
        run.thread_id,
        mode=params.mode,
        capabilities=params.capabilities,
        actor="agent",
        template=params.template,
        access=params.access,
        tags=run.tags() or None,
        headers=params.headers,
    )
    if run.user is not None and run.thread_id is not None and not params.shares_thread:
        # Checked after negotiating, so that no other session can be created in between. The issued token is discarded if the
        # check fails.
        page = yield from BrokerApi.session_page.flow(broker, scope_type="thread", scope_id=run.thread_id)
        known = [s for s in page.items if s.session_id == grant.session_id]
        if not known or not belongs_to(run.user, thread or Thread(run.thread_id), known[0].tags, known[0].created_at):
            raise _OwnedByAnotherUser
    return grant


async def _join_shared_thread(broker: AsyncCobox, run: Run, params: SessionParams, another: _OwnedByAnotherUser) -> Grant:
    thread = None if run.thread_id is None else await fetch_own_thread(run.thread_id)
    if thread is None:
        raise another.to_error() from None
    try:
        return await broker._io.run(resolve(broker, run, params, thread))
    except _OwnedByAnotherUser:
        raise another.to_error() from None


async def fetch_own_thread(thread_id: str) -> Thread | None:
    """A thread of the LangGraph server in this process; None if there is no server or it does not respond."""
    if "langgraph_api.server" not in sys.modules:
        return None
    # Only needed here, and LangGraph may not be installed.
    from langgraph_sdk import get_client

    try:
        async with get_client() as client:
            fields = await asyncio.wait_for(client.threads.get(thread_id), ASK_SECONDS)
    except Exception:
        # Any failure leaves the age unknown, and an unknown age means refusal.
        log.info("could not ask the server about thread %r", thread_id, exc_info=True)
        return None
    # The client parses timestamps; the comparison needs the server's text format.
    created_at = fields.get("created_at")
    return Thread(thread_id, created_at if isinstance(created_at, str) else created_at.isoformat() if created_at else None)


def _delegated_grant(broker: BrokerApi, supplied: SuppliedSandbox, params: SessionParams) -> Flow[Grant]:
    """Access to a sandbox other than the thread's: the run must supply a token for it, and the agent gets no more than that token
    allows.

    This does not bind the sandbox to the thread, so a later run without the token has no access.
    """
    if supplied.token is None:
        raise SandboxRefused(
            "configurable.sandbox: not this thread's sandbox; negotiate the thread with it as `sandbox_hint`, or supply its token"
        )
    supplied.require_unexpired()
    body = {
        "capabilities": [*(params.capabilities or AGENT_CAPABILITIES)],
        "actor": "agent",
        "parent_token": supplied.token.expose(),
    }
    path = f"/sandbox/{quote(supplied.sandbox_id, safe='')}/delegate"
    response = yield from perform(broker._endpoint, Call("POST", path, json=body, headers=tuple((params.headers or {}).items())))
    delegated = decode(Delegated, response.body, broker.url)
    found = yield from BrokerApi.get_sandbox.flow(broker, supplied.sandbox_id)
    if found.id != supplied.sandbox_id:
        raise SandboxRefused("configurable.sandbox: identify the sandbox by its id")
    return Grant(
        http_base_url=found.http_base_url,
        ws_base_url=found.ws_base_url,
        token=Token.from_expiry(delegated.token, delegated.expires_at, None),
        sandbox_id=found.id,
        session_id=None,
        capabilities=frozenset(delegated.granted_capabilities),
    )


def _require_supplied(run: Run, prefixes: Sequence[str] | None) -> tuple[SuppliedSandbox, str]:
    """Without a broker: validates the supplied sandbox and returns it with its URL."""
    allowed = AllowedPrefixes.of(prefixes) if prefixes is not None else AllowedPrefixes.from_text(os.environ.get(PREFIXES, ""))
    supplied = run.supplied
    if supplied is None or supplied.token is None or supplied.http_base_url is None:
        raise SandboxRefused(
            "there is no broker (set COBOX_URL and COBOX_API_KEY), and configurable.sandbox supplies no sandbox with URL and token"
        )
    supplied.require_unexpired()
    allowed.require_allowed(supplied.http_base_url, "http_base_url")
    if supplied.ws_base_url is not None:
        allowed.require_allowed(supplied.ws_base_url, "ws_base_url")
    return supplied, supplied.http_base_url


def _token(supplied: SuppliedSandbox) -> Any:
    return supplied.token


def _session_identity(supplied: SuppliedSandbox, run: Run) -> dict[str, Any]:
    return {
        "sandbox_id": supplied.sandbox_id,
        "ws_base_url": supplied.ws_base_url,
        "session_id": supplied.session_id,
        "thread_id": run.thread_id,
        "expires_at": supplied.expires_at,
    }


def _is_configured() -> bool:
    return any(os.environ.get(name) for name in ("COBOX_URL", "COBOX_API_KEY", "COBOX_API_KEY_FILE"))


@functools.lru_cache(maxsize=1)
def _blocking_broker() -> Cobox | None:
    """One client per process, because it pools connections. None without a broker; incomplete settings are an error."""
    try:
        return Cobox()
    except SettingsMissing:
        if _is_configured():
            raise
        return None


@functools.lru_cache(maxsize=1)
def _async_broker() -> AsyncCobox | None:
    try:
        return AsyncCobox()
    except SettingsMissing:
        if _is_configured():
            raise
        return None
