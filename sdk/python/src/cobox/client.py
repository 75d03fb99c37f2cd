"""The broker: `Cobox` and `AsyncCobox`, which negotiate sessions and look after sandboxes and keys."""

from __future__ import annotations

import os
import types
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from . import settings
from .answers import CreatedKey, KeyInfo, Page, SandboxInfo, SessionInfo
from .awaiting import AwaitingIO
from .blocking import BlockingIO
from .call import BrokerDoor, Call, perform, wanted
from .decode import decode, decode_page
from .flow import Awaiting, Blocking, Flow, method
from .grant import Grant, Negotiated, negotiation
from .network import Network
from .secret import Secret
from .session import AsyncSession, Session
from .session_api import timestamp


class BrokerApi:
    _door: BrokerDoor

    @property
    def url(self) -> str:
        return self._door.base

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @method
    def negotiate(
        self,
        thread_id: str | None = None,
        *,
        scope: tuple[str, str] | None = None,
        mode: str = "ensure",
        capabilities: Sequence[str] | None = None,
        actor: Mapping[str, str] | str | None = None,
        sandbox: str | None = None,
        name: str | None = None,
        keep: bool | None = None,
        access: str | None = None,
        ttl: int | None = None,
        tags: Mapping[str, str] | None = None,
        template: str | None = None,
        provider: str | None = None,
        token_format: str | None = None,
        wait: float | None = None,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Flow[Grant]:
        """What `session` begins with: a way into the sandbox of a thread (or another scope), not kept alive by anybody."""
        if (thread_id is None) == (scope is None):
            raise ValueError("give a thread_id, or a scope such as ('assistant', 'a-1')")
        body = wanted(
            thread_id=thread_id,
            scope={"type": scope[0], "id": scope[1]} if scope is not None else None,
            mode=mode,
            requested_capabilities=[*capabilities] if capabilities is not None else None,
            actor=actor,
            sandbox_hint=sandbox,
            name=name,
            keep=keep,
            access=access,
            ttl=ttl,
            tags=dict(tags) if tags is not None else None,
            template=template,
            provider_preference=provider,
            token_format=token_format,
        )
        if mode == "create_only" and idempotency_key is None:
            # So that a second try after a lost answer finds what the first one made.
            idempotency_key = os.urandom(16).hex()
        answer = yield from perform(self._door, negotiation(body, wait=wait, idempotency_key=idempotency_key, headers=headers))
        narrowed = None
        if capabilities is not None or actor is not None:
            kept = ("thread_id", "scope", "requested_capabilities", "actor", "ttl", "token_format")
            again = {key: value for key, value in body.items() if key in kept} | {"mode": "get"}
            narrowed = negotiation(again, wait=wait, idempotency_key=None, headers=headers)
        return Grant.of(decode(Negotiated, answer.body, self.url), self._door, headers, narrowed)

    @method
    def session_page(
        self,
        *,
        scope_type: str | None = None,
        scope_id: str | None = None,
        state: str | None = None,
        tags: Sequence[str] = (),
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Flow[Page[SessionInfo]]:
        """One page of the sessions you may use; `tags`: `key:value` or `key`."""
        query = wanted(scope_type=scope_type, scope_id=scope_id, state=state, limit=None if limit is None else str(limit), cursor=cursor)
        call = Call("GET", "/v1/sandbox/sessions", query=(*query.items(), *(("tag", tag) for tag in tags)))
        answer = yield from perform(self._door, call)
        return decode_page(SessionInfo, answer.body, self.url)

    @method
    def sandbox_page(self, *, tags: Sequence[str] = (), limit: int | None = None, cursor: str | None = None) -> Flow[Page[SandboxInfo]]:
        """One page of the sandboxes you may use."""
        query = wanted(limit=None if limit is None else str(limit), cursor=cursor)
        answer = yield from perform(self._door, Call("GET", "/v1/sandboxes", query=(*query.items(), *(("tag", tag) for tag in tags))))
        return decode_page(SandboxInfo, answer.body, self.url)

    @method
    def get_sandbox(self, sandbox: str) -> Flow[SandboxInfo]:
        """A sandbox by its id or name."""
        answer = yield from perform(self._door, Call("GET", f"/v1/sandboxes/{quote(sandbox, safe='')}"))
        return decode(SandboxInfo, answer.body, self.url)

    @method
    def create_sandbox(
        self,
        name: str | None = None,
        *,
        keep: bool | None = None,
        access: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Flow[SandboxInfo]:
        """Makes a sandbox without a session; `session(sandbox=…)` uses it."""
        body = wanted(name=name, keep=keep, access=access, tags=dict(tags) if tags is not None else None)
        answer = yield from perform(self._door, Call("POST", "/v1/sandboxes", json=body, is_repeatable=False))
        return decode(SandboxInfo, answer.body, self.url)

    @method
    def update_sandbox(self, sandbox: str, changes: Mapping[str, Any]) -> Flow[SandboxInfo]:
        """Changes its name, keep, access or tags; None takes a name or a tag away."""
        answer = yield from perform(self._door, Call("PATCH", f"/v1/sandboxes/{quote(sandbox, safe='')}", json=dict(changes)))
        return decode(SandboxInfo, answer.body, self.url)

    @method
    def delete_sandbox(self, sandbox: str) -> Flow[None]:
        """Ends a sandbox, and every session that uses it."""
        yield from perform(self._door, Call("DELETE", f"/v1/sandboxes/{quote(sandbox, safe='')}", is_repeatable=False))

    @method
    def key_page(self, *, limit: int | None = None, cursor: str | None = None) -> Flow[Page[KeyInfo]]:
        """One page of the API keys, for operators."""
        query = wanted(limit=None if limit is None else str(limit), cursor=cursor)
        answer = yield from perform(self._door, Call("GET", "/v1/keys", query=(*query.items(),)))
        return decode_page(KeyInfo, answer.body, self.url)

    @method
    def create_key(self, name: str, kind: str, *, workspace: str | None = None, expires_at: datetime | None = None) -> Flow[CreatedKey]:
        """Makes an API key for a `human`, an `agent` or an `operator`, for operators."""
        body = {"name": name, "kind": kind} | wanted(workspace=workspace, expires_at=timestamp(expires_at))
        answer = yield from perform(self._door, Call("POST", "/v1/keys", json=body, is_repeatable=False))
        return decode(CreatedKey, answer.body, self.url)

    @method
    def revoke_key(self, key_id: str) -> Flow[None]:
        """Ends a key and the tokens issued under it, for operators."""
        yield from perform(self._door, Call("DELETE", f"/v1/keys/{quote(key_id, safe='')}", is_repeatable=False))


class Cobox(BrokerApi, Blocking):
    """A broker. Safe to use from many threads; one for a program is enough, because it keeps connections.

    Without arguments it takes COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE), else the broker that `cobox up` runs here.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | Secret | None = None,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        ca_file: str | None = None,
    ) -> None:
        found = settings.find(url, key, data_dir)
        self._door = BrokerDoor(found.url, found.key)
        self._io = BlockingIO(Network(ca_file))

    def session(
        self,
        thread_id: str | None = None,
        *,
        scope: tuple[str, str] | None = None,
        mode: str = "ensure",
        capabilities: Sequence[str] | None = None,
        actor: Mapping[str, str] | str | None = None,
        sandbox: str | None = None,
        name: str | None = None,
        keep: bool | None = None,
        access: str | None = None,
        ttl: int | None = None,
        tags: Mapping[str, str] | None = None,
        template: str | None = None,
        provider: str | None = None,
        token_format: str | None = None,
        wait: float | None = None,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        release: bool = False,
        upkeep: bool = True,
    ) -> Session:
        """The sandbox of a thread, made if there is none; `mode="get"` only joins, `"create_only"` only makes. It is refreshed and kept
        alive in the background until it is closed (`with`), which leaves it as it is; `release=True` ends it then.

        `capabilities`: of fs_read fs_write exec shell shell_observe snapshot ports. `sandbox`: one that exists, by id or name; `name`:
        one of this name, made if need be. `headers`: sent with every request for a token, such as X-Thread-Authorization.
        """
        grant = self.negotiate(
            thread_id,
            scope=scope,
            mode=mode,
            capabilities=capabilities,
            actor=actor,
            sandbox=sandbox,
            name=name,
            keep=keep,
            access=access,
            ttl=ttl,
            tags=tags,
            template=template,
            provider=provider,
            token_format=token_format,
            wait=wait,
            idempotency_key=idempotency_key,
            headers=headers,
        )
        return Session(grant, self._io, upkeep=upkeep, release=release)

    def sessions(
        self, *, scope_type: str | None = None, scope_id: str | None = None, state: str | None = None, tags: Sequence[str] = ()
    ) -> Iterator[SessionInfo]:
        """All sessions you may use, page by page."""
        cursor = None
        while True:
            page = self.session_page(scope_type=scope_type, scope_id=scope_id, state=state, tags=tags, cursor=cursor)
            yield from page.items
            if not (cursor := page.next_cursor):
                return

    def sandboxes(self, *, tags: Sequence[str] = ()) -> Iterator[SandboxInfo]:
        """All sandboxes you may use, page by page."""
        cursor = None
        while True:
            page = self.sandbox_page(tags=tags, cursor=cursor)
            yield from page.items
            if not (cursor := page.next_cursor):
                return

    def close(self) -> None:
        """Closes the connections. Sandboxes are not concerned."""
        self._io.close()

    def __enter__(self) -> Cobox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class OpeningSession:
    """A session on its way: `await` it, or `async with` it."""

    def __init__(self, cobox: AsyncCobox, asked: Mapping[str, Any], release: bool, upkeep: bool) -> None:
        self._cobox, self._asked, self._release, self._upkeep = cobox, asked, release, upkeep
        self._session: AsyncSession | None = None

    async def _open(self) -> AsyncSession:
        grant = await self._cobox.negotiate(**self._asked)
        self._session = AsyncSession(grant, self._cobox._io, upkeep=self._upkeep, release=self._release)
        return self._session

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncSession:
        return await self._open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()


class AsyncCobox(BrokerApi, Awaiting):
    """A broker, for asyncio. Any number of tasks may use it, also of several event loops.

    Without arguments it takes COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE), else the broker that `cobox up` runs here.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | Secret | None = None,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        ca_file: str | None = None,
    ) -> None:
        found = settings.find(url, key, data_dir)
        self._door = BrokerDoor(found.url, found.key)
        self._io = AwaitingIO(Network(ca_file))

    def session(
        self,
        thread_id: str | None = None,
        *,
        scope: tuple[str, str] | None = None,
        mode: str = "ensure",
        capabilities: Sequence[str] | None = None,
        actor: Mapping[str, str] | str | None = None,
        sandbox: str | None = None,
        name: str | None = None,
        keep: bool | None = None,
        access: str | None = None,
        ttl: int | None = None,
        tags: Mapping[str, str] | None = None,
        template: str | None = None,
        provider: str | None = None,
        token_format: str | None = None,
        wait: float | None = None,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        release: bool = False,
        upkeep: bool = True,
    ) -> OpeningSession:
        """As `Cobox.session`: `async with` or `await` it."""
        asked = {
            "thread_id": thread_id,
            "scope": scope,
            "mode": mode,
            "capabilities": capabilities,
            "actor": actor,
            "sandbox": sandbox,
            "name": name,
            "keep": keep,
            "access": access,
            "ttl": ttl,
            "tags": tags,
            "template": template,
            "provider": provider,
            "token_format": token_format,
            "wait": wait,
            "idempotency_key": idempotency_key,
            "headers": headers,
        }
        return OpeningSession(self, asked, release, upkeep)

    async def sessions(
        self, *, scope_type: str | None = None, scope_id: str | None = None, state: str | None = None, tags: Sequence[str] = ()
    ) -> AsyncIterator[SessionInfo]:
        """All sessions you may use, page by page."""
        cursor = None
        while True:
            page = await self.session_page(scope_type=scope_type, scope_id=scope_id, state=state, tags=tags, cursor=cursor)
            for item in page.items:
                yield item
            if not (cursor := page.next_cursor):
                return

    async def sandboxes(self, *, tags: Sequence[str] = ()) -> AsyncIterator[SandboxInfo]:
        """All sandboxes you may use, page by page."""
        cursor = None
        while True:
            page = await self.sandbox_page(tags=tags, cursor=cursor)
            for item in page.items:
                yield item
            if not (cursor := page.next_cursor):
                return

    async def close(self) -> None:
        """Closes the connections. Sandboxes are not concerned."""
        await self._io.close()

    async def __aenter__(self) -> AsyncCobox:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()
