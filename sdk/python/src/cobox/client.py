"""Client of the broker: `Cobox` and `AsyncCobox`, which negotiate sessions and manage sandboxes and keys."""

from __future__ import annotations

import os
import types
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from . import settings
from .async_io import AsyncIO
from .blocking_io import BlockingIO
from .call import BrokerEndpoint, Call, perform, without_none
from .decode import decode, decode_page
from .effects import Flow, UsesAsyncIO, UsesBlockingIO, method
from .grant import Grant, NegotiationResponse, negotiation_call
from .network_settings import Network
from .responses import CreatedKey, KeyInfo, Page, SandboxInfo, SessionInfo
from .secret import Secret
from .session import AsyncSession, Session
from .session_api import timestamp


class BrokerApi:
    _endpoint: BrokerEndpoint

    @property
    def url(self) -> str:
        return self._endpoint.base

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
        """Negotiates access to the sandbox of a thread (or another scope) without keeping it alive; `session` starts with this."""
        if (thread_id is None) == (scope is None):
            raise ValueError("give a thread_id, or a scope such as ('assistant', 'a-1')")
        body = without_none(
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
            # A retry after a lost response must find the session that the first attempt created.
            idempotency_key = os.urandom(16).hex()
        response = yield from perform(self._endpoint, negotiation_call(body, wait=wait, idempotency_key=idempotency_key, headers=headers))
        renegotiation_call = None
        if capabilities is not None or actor is not None:
            renewable = ("thread_id", "scope", "requested_capabilities", "actor", "ttl", "token_format")
            again = {key: value for key, value in body.items() if key in renewable} | {"mode": "get"}
            renegotiation_call = negotiation_call(again, wait=wait, idempotency_key=None, headers=headers)
        return Grant.from_negotiation(decode(NegotiationResponse, response.body, self.url), self._endpoint, headers, renegotiation_call)

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
        """One page of the sessions you have access to; `tags`: `key:value` or `key`."""
        query = without_none(
            scope_type=scope_type, scope_id=scope_id, state=state, limit=None if limit is None else str(limit), cursor=cursor
        )
        call = Call("GET", "/v1/sandbox/sessions", query=(*query.items(), *(("tag", tag) for tag in tags)))
        response = yield from perform(self._endpoint, call)
        return decode_page(SessionInfo, response.body, self.url)

    @method
    def sandbox_page(self, *, tags: Sequence[str] = (), limit: int | None = None, cursor: str | None = None) -> Flow[Page[SandboxInfo]]:
        """One page of the sandboxes you have access to."""
        query = without_none(limit=None if limit is None else str(limit), cursor=cursor)
        response = yield from perform(self._endpoint, Call("GET", "/v1/sandboxes", query=(*query.items(), *(("tag", tag) for tag in tags))))
        return decode_page(SandboxInfo, response.body, self.url)

    @method
    def get_sandbox(self, sandbox: str) -> Flow[SandboxInfo]:
        """Returns a sandbox by id or name."""
        response = yield from perform(self._endpoint, Call("GET", f"/v1/sandboxes/{quote(sandbox, safe='')}"))
        return decode(SandboxInfo, response.body, self.url)

    @method
    def create_sandbox(
        self,
        name: str | None = None,
        *,
        keep: bool | None = None,
        access: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Flow[SandboxInfo]:
        """Creates a sandbox without a session; `session(sandbox=…)` uses it."""
        body = without_none(name=name, keep=keep, access=access, tags=dict(tags) if tags is not None else None)
        response = yield from perform(self._endpoint, Call("POST", "/v1/sandboxes", json=body, is_repeatable=False))
        return decode(SandboxInfo, response.body, self.url)

    @method
    def update_sandbox(self, sandbox: str, changes: Mapping[str, Any]) -> Flow[SandboxInfo]:
        """Changes the name, keep, access or tags; None removes a name or a tag."""
        response = yield from perform(self._endpoint, Call("PATCH", f"/v1/sandboxes/{quote(sandbox, safe='')}", json=dict(changes)))
        return decode(SandboxInfo, response.body, self.url)

    @method
    def delete_sandbox(self, sandbox: str) -> Flow[None]:
        """Deletes a sandbox and ends every session that uses it."""
        yield from perform(self._endpoint, Call("DELETE", f"/v1/sandboxes/{quote(sandbox, safe='')}", is_repeatable=False))

    @method
    def key_page(self, *, limit: int | None = None, cursor: str | None = None) -> Flow[Page[KeyInfo]]:
        """One page of the API keys, for operators."""
        query = without_none(limit=None if limit is None else str(limit), cursor=cursor)
        response = yield from perform(self._endpoint, Call("GET", "/v1/keys", query=(*query.items(),)))
        return decode_page(KeyInfo, response.body, self.url)

    @method
    def create_key(self, name: str, kind: str, *, workspace: str | None = None, expires_at: datetime | None = None) -> Flow[CreatedKey]:
        """Creates an API key for a `human`, an `agent` or an `operator`. For operators."""
        body = {"name": name, "kind": kind} | without_none(workspace=workspace, expires_at=timestamp(expires_at))
        response = yield from perform(self._endpoint, Call("POST", "/v1/keys", json=body, is_repeatable=False))
        return decode(CreatedKey, response.body, self.url)

    @method
    def revoke_key(self, key_id: str) -> Flow[None]:
        """Revokes a key and the tokens issued under it, for operators."""
        yield from perform(self._endpoint, Call("DELETE", f"/v1/keys/{quote(key_id, safe='')}", is_repeatable=False))


class Cobox(BrokerApi, UsesBlockingIO):
    """A broker. Thread-safe; one object per program is enough, because it pools connections.

    Without arguments it uses COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE), otherwise the broker that `cobox up` runs on
    this machine.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | Secret | None = None,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        ca_file: str | None = None,
    ) -> None:
        found = settings.discover(url, key, data_dir)
        self._endpoint = BrokerEndpoint(found.url, found.key)
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
        """Opens the sandbox of a thread and creates it if needed; `mode="get"` only joins, `"create_only"` only creates. Its
        token and lease are renewed in the background until the session is closed (`with`). Closing does not end it, unless
        `release=True`.

        `capabilities`: any of fs_read fs_write exec shell shell_observe snapshot ports. `sandbox`: an existing one, by id or
        name; `name`: the sandbox with this name, created if needed. `headers`: sent with every token request, such as
        X-Thread-Authorization.
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
        """All sessions you have access to; fetches page by page."""
        cursor = None
        while True:
            page = self.session_page(scope_type=scope_type, scope_id=scope_id, state=state, tags=tags, cursor=cursor)
            yield from page.items
            if not (cursor := page.next_cursor):
                return

    def sandboxes(self, *, tags: Sequence[str] = ()) -> Iterator[SandboxInfo]:
        """All sandboxes you have access to; fetches page by page."""
        cursor = None
        while True:
            page = self.sandbox_page(tags=tags, cursor=cursor)
            yield from page.items
            if not (cursor := page.next_cursor):
                return

    def close(self) -> None:
        """Closes the connections. Does not affect sandboxes."""
        self._io.close()

    def __enter__(self) -> Cobox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class PendingSession:
    """A session being opened: `await` it, or use it with `async with`."""

    def __init__(self, cobox: AsyncCobox, options: Mapping[str, Any], release: bool, upkeep: bool) -> None:
        self._cobox, self._options, self._release, self._upkeep = cobox, options, release, upkeep
        self._session: AsyncSession | None = None

    async def _open(self) -> AsyncSession:
        grant = await self._cobox.negotiate(**self._options)
        self._session = AsyncSession(grant, self._cobox._io, upkeep=self._upkeep, release=self._release)
        return self._session

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncSession:
        return await self._open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()


class AsyncCobox(BrokerApi, UsesAsyncIO):
    """A broker, for asyncio. Any number of tasks may use it, also of several event loops.

    Without arguments it uses COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE), otherwise the broker that `cobox up` runs on
    this machine.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | Secret | None = None,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        ca_file: str | None = None,
    ) -> None:
        found = settings.discover(url, key, data_dir)
        self._endpoint = BrokerEndpoint(found.url, found.key)
        self._io = AsyncIO(Network(ca_file))

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
    ) -> PendingSession:
        """Like `Cobox.session`: use it with `async with` or `await`."""
        options = {
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
        return PendingSession(self, options, release, upkeep)

    async def sessions(
        self, *, scope_type: str | None = None, scope_id: str | None = None, state: str | None = None, tags: Sequence[str] = ()
    ) -> AsyncIterator[SessionInfo]:
        """All sessions you have access to; fetches page by page."""
        cursor = None
        while True:
            page = await self.session_page(scope_type=scope_type, scope_id=scope_id, state=state, tags=tags, cursor=cursor)
            for item in page.items:
                yield item
            if not (cursor := page.next_cursor):
                return

    async def sandboxes(self, *, tags: Sequence[str] = ()) -> AsyncIterator[SandboxInfo]:
        """All sandboxes you have access to; fetches page by page."""
        cursor = None
        while True:
            page = await self.sandbox_page(tags=tags, cursor=cursor)
            for item in page.items:
                yield item
            if not (cursor := page.next_cursor):
                return

    async def close(self) -> None:
        """Closes the connections. Does not affect sandboxes."""
        await self._io.close()

    async def __aenter__(self) -> AsyncCobox:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()
