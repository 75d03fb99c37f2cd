"""Which sandbox a run works in: its thread's, by the broker's word; or, where there is no broker, one that the run brings along."""

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

from ..answers import Delegated
from ..call import Call, perform
from ..client import AsyncCobox, BrokerApi, Cobox
from ..decode import decode
from ..errors import SessionNotFound, SettingsMissing
from ..flow import Flow
from ..grant import Grant, Token
from ..session import AsyncSession, Session
from .belonging import Thread, is_for
from .bootstrap import Bootstrap, Prefixes, SandboxRefused
from .run import Run

log = logging.getLogger("cobox")

# As long as the server may take to say how old a thread is, in seconds.
ASK_SECONDS = 10.0
# URLs that tokens may be sent to which a run brings, for deployments without a broker; commas or spaces between.
PREFIXES = "COBOX_DATAPLANE_PREFIXES"
# What an agent asks for of a sandbox that was handed to it; it gets what the token shown allows of that.
AGENT_CAPABILITIES = ("fs_read", "fs_write", "exec", "shell_observe")


@dataclass(frozen=True)
class Wish:
    """What is asked for, beside the run itself."""

    mode: str = "ensure"
    capabilities: Sequence[str] | None = None
    template: str | None = None
    access: str | None = None
    headers: Mapping[str, str] | None = None
    # Whether a session that was made for another user is for this run too.
    shares_thread: bool = False


class _OfAnotherUser(Exception):
    """The sandbox of the run's thread id was made for another user: of an earlier thread of that id, for all that is known so far."""

    def refusal(self) -> SandboxRefused:
        return SandboxRefused(
            "the sandbox of this thread's id was made for another user, whose thread was deleted; start a new thread, or say "
            "shares_thread=True where several users share their threads"
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
    """The sandbox of the run that `config` belongs to.

    With a broker (`cobox`, else COBOX_URL and COBOX_API_KEY, else a running `cobox up`) it is the one of the run's thread, made if there
    is none. A sandbox that the run names in `configurable.sandbox` must be the thread's, or come with a token that the broker knows
    for it; its URL is the broker's. Without a broker only that sandbox is left, and only at URLs under `prefixes`
    (else COBOX_DATAPLANE_PREFIXES). `SandboxRefused` for everything else. Closing the session leaves the sandbox as it is.

    A thread's id can be made again by somebody else after the thread was deleted, so a sandbox that was made for another user is
    refused. `shares_thread=True`: several users run on this thread and share its sandbox, as you know.
    """
    run, wish = Run.of(config), Wish(mode, capabilities, template, access, headers, shares_thread)
    if (broker := cobox or _blocking_broker()) is not None:
        try:
            return Session(broker._io.run(finding(broker, run, wish)), broker._io, upkeep=upkeep)
        except _OfAnotherUser as another:
            raise another.refusal() from None
    brought, http = _brought(run, prefixes)
    return Session.from_token(http, _token(brought), **_naming(brought, run))


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
    """As `sandbox_for`, for asyncio. In a LangGraph server it asks that how old the thread is, where another user's sandbox is there: users
    who share a thread need say nothing."""
    run, wish = Run.of(config), Wish(mode, capabilities, template, access, headers, shares_thread)
    # Settings may be in files, which an event loop must not wait for.
    if (broker := cobox or await asyncio.to_thread(_awaiting_broker)) is not None:
        try:
            grant = await broker._io.run(finding(broker, run, wish))
        except _OfAnotherUser as another:
            grant = await _of_a_shared_thread(broker, run, wish, another)
        return AsyncSession(grant, broker._io, upkeep=upkeep)
    brought, http = _brought(run, prefixes)
    return AsyncSession.from_token(http, _token(brought), **_naming(brought, run))


def finding(broker: BrokerApi, run: Run, wish: Wish, thread: Thread | None = None) -> Flow[Grant]:
    """With a broker: its word counts, and a run's only as far as the broker bears it out. `thread`: as its server has it."""
    if run.bootstrap is None:
        if run.thread_id is None:
            raise SandboxRefused("the run has no thread, so there is no sandbox for it: start it on a thread")
        return (yield from _of_thread(broker, run, wish, thread))
    grant = None
    if run.thread_id is not None:
        try:
            joining = Wish("get", wish.capabilities, headers=wish.headers, shares_thread=wish.shares_thread)
            grant = yield from _of_thread(broker, run, joining, thread)
        except SessionNotFound:
            grant = None
    if grant is None:
        return (yield from _handed_over(broker, run.bootstrap, wish))
    if grant.sandbox_id != run.bootstrap.sandbox_id:
        raise SandboxRefused("configurable.sandbox: the thread has another sandbox than the one it names")
    return grant


def _of_thread(broker: BrokerApi, run: Run, wish: Wish, thread: Thread | None) -> Flow[Grant]:
    # As an agent, also where the key is a person's or a deployment's own: it narrows what the key may.
    negotiate = BrokerApi.negotiate.flow
    grant: Grant = yield from negotiate(
        broker,
        run.thread_id,
        mode=wish.mode,
        capabilities=wish.capabilities,
        actor="agent",
        template=wish.template,
        access=wish.access,
        tags=run.tags() or None,
        headers=wish.headers,
    )
    if run.user is not None and run.thread_id is not None and not wish.shares_thread:
        # After it, so that nobody else's comes between; a token that was issued is not handed out.
        page = yield from BrokerApi.session_page.flow(broker, scope_type="thread", scope_id=run.thread_id)
        known = [s for s in page.items if s.session_id == grant.session_id]
        if not known or not is_for(run.user, thread or Thread(run.thread_id), known[0].tags, known[0].created_at):
            raise _OfAnotherUser
    return grant


async def _of_a_shared_thread(broker: AsyncCobox, run: Run, wish: Wish, another: _OfAnotherUser) -> Grant:
    thread = None if run.thread_id is None else await this_servers_thread(run.thread_id)
    if thread is None:
        raise another.refusal() from None
    try:
        return await broker._io.run(finding(broker, run, wish, thread))
    except _OfAnotherUser:
        raise another.refusal() from None


async def this_servers_thread(thread_id: str) -> Thread | None:
    """A thread of the LangGraph server that this runs in; None where it runs in none, or it doesn't say."""
    if "langgraph_api.server" not in sys.modules:
        return None
    # Not needed before, and not there without LangGraph.
    from langgraph_sdk import get_client

    try:
        async with get_client() as client:
            told = await asyncio.wait_for(client.threads.get(thread_id), ASK_SECONDS)
    except Exception:
        # Whatever it is: not knowing is refusing.
        log.info("the server could not be asked about thread %r", thread_id, exc_info=True)
        return None
    # Its client has read times as what they are; here they are compared as the server writes them.
    created_at = told.get("created_at")
    return Thread(thread_id, created_at if isinstance(created_at, str) else created_at.isoformat() if created_at else None)


def _handed_over(broker: BrokerApi, brought: Bootstrap, wish: Wish) -> Flow[Grant]:
    """A sandbox that isn't the thread's: who started the run must hold a token of it, and the agent gets no more than that allows.

    Nothing is bound to the thread by this, so a later run without the token doesn't inherit it.
    """
    if brought.token is None:
        raise SandboxRefused(
            "configurable.sandbox: isn't this thread's sandbox; negotiate the thread with it as `sandbox_hint`, or send its token along"
        )
    brought.must_be_fresh()
    body = {
        "capabilities": [*(wish.capabilities or AGENT_CAPABILITIES)],
        "actor": "agent",
        "parent_token": brought.token.expose(),
    }
    path = f"/sandbox/{quote(brought.sandbox_id, safe='')}/delegate"
    answer = yield from perform(broker._door, Call("POST", path, json=body, headers=tuple((wish.headers or {}).items())))
    told = decode(Delegated, answer.body, broker.url)
    found = yield from BrokerApi.get_sandbox.flow(broker, brought.sandbox_id)
    if found.id != brought.sandbox_id:
        raise SandboxRefused("configurable.sandbox: name the sandbox by its id")
    return Grant(
        http_base_url=found.http_base_url,
        ws_base_url=found.ws_base_url,
        token=Token.told(told.token, told.expires_at, None),
        sandbox_id=found.id,
        session_id=None,
        capabilities=frozenset(told.granted_capabilities),
    )


def _brought(run: Run, prefixes: Sequence[str] | None) -> tuple[Bootstrap, str]:
    """Without a broker: what the run brings, if it may be used, and where it is."""
    allowed = Prefixes.of(prefixes) if prefixes is not None else Prefixes.from_text(os.environ.get(PREFIXES, ""))
    brought = run.bootstrap
    if brought is None or brought.token is None or brought.http_base_url is None:
        raise SandboxRefused(
            "there is no broker (set COBOX_URL and COBOX_API_KEY), and the run brings no sandbox with URL and token in configurable.sandbox"
        )
    brought.must_be_fresh()
    allowed.must_have(brought.http_base_url, "http_base_url")
    if brought.ws_base_url is not None:
        allowed.must_have(brought.ws_base_url, "ws_base_url")
    return brought, brought.http_base_url


def _token(brought: Bootstrap) -> Any:
    return brought.token


def _naming(brought: Bootstrap, run: Run) -> dict[str, Any]:
    return {
        "sandbox_id": brought.sandbox_id,
        "ws_base_url": brought.ws_base_url,
        "session_id": brought.session_id,
        "thread_id": run.thread_id,
        "expires_at": brought.expires_at,
    }


def _is_configured() -> bool:
    return any(os.environ.get(name) for name in ("COBOX_URL", "COBOX_API_KEY", "COBOX_API_KEY_FILE"))


@functools.lru_cache(maxsize=1)
def _blocking_broker() -> Cobox | None:
    """One for the process, because it keeps connections. None where there is no broker; half a setting is no such thing."""
    try:
        return Cobox()
    except SettingsMissing:
        if _is_configured():
            raise
        return None


@functools.lru_cache(maxsize=1)
def _awaiting_broker() -> AsyncCobox | None:
    try:
        return AsyncCobox()
    except SettingsMissing:
        if _is_configured():
            raise
        return None
