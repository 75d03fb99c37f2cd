"""A session in use: `Session` does its work before it returns, `AsyncSession` gives coroutines; both keep themselves alive."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime

from . import errors
from .answers import FileChange, SandboxEvent
from .awaiting import AwaitingIO
from .blocking import BlockingIO, Stopped
from .call import Call, wanted
from .exec_stream import AsyncExecStream, ExecStream, Output, start_of
from .feed import AsyncEvents, AsyncWatch, Events, Watch
from .files import AsyncFiles, Files
from .flow import Awaiting, Blocking
from .fs import AsyncFs, Fs
from .grant import Grant, Token
from .network import Network
from .opening import Opening
from .paths import SandboxPath, checked
from .secret import Secret
from .session_api import SessionApi
from .shells import AsyncShells, Shells


def grant_of(
    http_base_url: str,
    token: str | Secret,
    *,
    sandbox_id: str = "",
    ws_base_url: str | None = None,
    session_id: str | None = None,
    thread_id: str | None = None,
    expires_at: datetime | None = None,
) -> Grant:
    """A way into a sandbox that somebody else negotiated. It isn't renewed: without a broker there is nobody to ask."""
    secret = token if isinstance(token, Secret) else Secret(token)
    told = Token.told(secret, expires_at, None)
    return Grant(
        http_base_url=http_base_url, ws_base_url=ws_base_url, token=told, sandbox_id=sandbox_id, session_id=session_id, thread_id=thread_id
    )


def watch_call(path: SandboxPath | None, recursive: bool, after: str | None) -> Call:
    query = wanted(path=checked(path).decode("utf-8", "surrogateescape") if path is not None else None, cursor=after)
    return Call("GET", "/watch", query=(*query.items(), ("recursive", "true" if recursive else "false")))


class Session(SessionApi, Blocking):
    """A thread's sandbox. Safe to use from many threads; each stream and shell it opens has one reader at a time.

    `with` leaves it at the end: upkeep stops, nothing is ended. `release=True` or `.release()` ends it for everybody.
    """

    def __init__(self, grant: Grant, io: BlockingIO, *, upkeep: bool = True, release: bool = False, owns_io: bool = False) -> None:
        self._grant, self._io = grant, io
        self._releases, self._owns_io = release, owns_io
        self.files, self.fs, self.shells = Files(grant, io), Fs(grant, io), Shells(grant, io)
        self._stopping = threading.Event()
        if upkeep and grant.broker is not None:
            # The thread knows the grant and not this object, so that a session nobody holds any more ends its upkeep.
            weakref.finalize(self, self._stopping.set)
            name = f"cobox-upkeep-{grant.session_id}"
            threading.Thread(target=_keep, args=(io, grant, self._stopping), name=name, daemon=True).start()

    @classmethod
    def from_token(
        cls,
        http_base_url: str,
        token: str | Secret,
        *,
        sandbox_id: str = "",
        ws_base_url: str | None = None,
        session_id: str | None = None,
        thread_id: str | None = None,
        expires_at: datetime | None = None,
        ca_file: str | None = None,
    ) -> Session:
        """A session from a token that somebody else negotiated or delegated; it ends with that token."""
        grant = grant_of(
            http_base_url,
            token,
            sandbox_id=sandbox_id,
            ws_base_url=ws_base_url,
            session_id=session_id,
            thread_id=thread_id,
            expires_at=expires_at,
        )
        return cls(grant, BlockingIO(Network(ca_file)), upkeep=False, owns_io=True)

    def stream(
        self,
        command: str | None = None,
        *,
        argv: Sequence[str] | None = None,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        pty: bool = False,
        cols: int | None = None,
        rows: int | None = None,
        stdin: bool | str | None = None,
        timeout_seconds: float | None = None,
        kill_on_disconnect: bool = False,
        command_id: str | None = None,
        stdout_from: int = 0,
        stderr_from: int = 0,
    ) -> ExecStream:
        """Starts a command and gives its output as it comes, or joins the one that `command_id` names. `stdin=True` leaves its input
        open for `write`."""
        start = start_of(
            command,
            argv,
            shell=shell,
            cwd=cwd,
            env=env,
            pty=pty,
            cols=cols,
            rows=rows,
            stdin=stdin,
            timeout_seconds=timeout_seconds,
            kill_on_disconnect=kill_on_disconnect,
            command_id=command_id,
        )
        stream = ExecStream(self._grant, self._io, start, stdout_from, stderr_from)
        stream.begin()
        return stream

    def watch(self, path: SandboxPath | None = None, *, recursive: bool = True, after: str | None = None) -> Watch:
        """Changes of files from now on, or after a cursor of an earlier watch."""
        watch = Watch(self._io, self._grant, watch_call(path, recursive, after), None)
        watch.begin()
        return watch

    def events(self, *, after: str | None = None) -> Events:
        """What happens to the session: all that is kept, what comes after the event of an id, or with `after="now"` from now on."""
        call = Call("GET", self._grant.session_path("/events"), query=(("after", after),) if after else ())
        events = Events(self._io, self._grant.at_broker(), call, None)
        events.begin()
        return events

    def close(self) -> None:
        """Leaves: upkeep stops, nothing is ended (unless it was opened with `release=True`)."""
        self._stopping.set()
        if self._releases:
            self._releases = False
            # Released by somebody else meanwhile is released.
            with contextlib.suppress(errors.SessionNotFound, errors.SessionExpired):
                self.release()
        if self._owns_io:
            self._io.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


def _keep(io: BlockingIO, grant: Grant, stopping: threading.Event) -> None:
    with contextlib.suppress(Stopped):
        io.run(grant.keep(), stopping)


class AsyncSession(SessionApi, Awaiting):
    """A thread's sandbox, for asyncio. Any number of tasks may use it; each stream and shell it opens has one reader at a time.

    `async with` leaves it at the end: upkeep stops, nothing is ended. `release=True` or `.release()` ends it for everybody.
    """

    def __init__(self, grant: Grant, io: AwaitingIO, *, upkeep: bool = True, release: bool = False, owns_io: bool = False) -> None:
        self._grant, self._io = grant, io
        self._releases, self._owns_io = release, owns_io
        self.files, self.fs, self.shells = AsyncFiles(grant, io), AsyncFs(grant, io), AsyncShells(grant, io)
        self._keeping: asyncio.Task[None] | None = None
        if upkeep and grant.broker is not None:
            self._keeping = asyncio.get_running_loop().create_task(io.run(grant.keep()), name=f"cobox-upkeep-{grant.session_id}")

    @classmethod
    def from_token(
        cls,
        http_base_url: str,
        token: str | Secret,
        *,
        sandbox_id: str = "",
        ws_base_url: str | None = None,
        session_id: str | None = None,
        thread_id: str | None = None,
        expires_at: datetime | None = None,
        ca_file: str | None = None,
    ) -> AsyncSession:
        """A session from a token that somebody else negotiated or delegated; it ends with that token."""
        grant = grant_of(
            http_base_url,
            token,
            sandbox_id=sandbox_id,
            ws_base_url=ws_base_url,
            session_id=session_id,
            thread_id=thread_id,
            expires_at=expires_at,
        )
        return cls(grant, AwaitingIO(Network(ca_file)), upkeep=False, owns_io=True)

    def stream(
        self,
        command: str | None = None,
        *,
        argv: Sequence[str] | None = None,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        pty: bool = False,
        cols: int | None = None,
        rows: int | None = None,
        stdin: bool | str | None = None,
        timeout_seconds: float | None = None,
        kill_on_disconnect: bool = False,
        command_id: str | None = None,
        stdout_from: int = 0,
        stderr_from: int = 0,
    ) -> Opening[AsyncExecStream, Output]:
        """Starts a command and gives its output as it comes, or joins the one that `command_id` names: `async with`, `async for` or
        `await` it. `stdin=True` leaves its input open for `write`."""
        start = start_of(
            command,
            argv,
            shell=shell,
            cwd=cwd,
            env=env,
            pty=pty,
            cols=cols,
            rows=rows,
            stdin=stdin,
            timeout_seconds=timeout_seconds,
            kill_on_disconnect=kill_on_disconnect,
            command_id=command_id,
        )
        stream = AsyncExecStream(self._grant, self._io, start, stdout_from, stderr_from)
        return Opening(stream, stream.begin)

    def watch(
        self, path: SandboxPath | None = None, *, recursive: bool = True, after: str | None = None
    ) -> Opening[AsyncWatch, FileChange]:
        """Changes of files from now on, or after a cursor of an earlier watch: `async with`, `async for` or `await` it."""
        watch = AsyncWatch(self._io, self._grant, watch_call(path, recursive, after), None)
        return Opening(watch, watch.begin)

    def events(self, *, after: str | None = None) -> Opening[AsyncEvents, SandboxEvent]:
        """What happens to the session: all that is kept, what comes after the event of an id, or with `after="now"` from now on."""
        call = Call("GET", self._grant.session_path("/events"), query=(("after", after),) if after else ())
        events = AsyncEvents(self._io, self._grant.at_broker(), call, None)
        return Opening(events, events.begin)

    async def close(self) -> None:
        """Leaves: upkeep stops, nothing is ended (unless it was opened with `release=True`)."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            # Not awaited itself: its end would look like ours, and ours, when this is cancelled, like its.
            await asyncio.wait({keeping})
            if not keeping.cancelled():
                keeping.result()
        if self._releases:
            self._releases = False
            # Released by somebody else meanwhile is released.
            with contextlib.suppress(errors.SessionNotFound, errors.SessionExpired):
                await self.release()
        if self._owns_io:
            await self._io.close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()
