"""An open session: `Session` blocks, `AsyncSession` returns coroutines; both keep the session alive."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime

from . import errors
from .async_io import AsyncIO
from .awaitable_context import AwaitableContext
from .blocking_io import BlockingIO, Stopped
from .call import Call, without_none
from .effects import UsesAsyncIO, UsesBlockingIO
from .event_stream import AsyncEvents, AsyncWatch, Events, Watch
from .exec_stream import AsyncExecStream, ExecStream, Output, exec_start
from .files import AsyncFiles, Files
from .fs import AsyncFs, Fs
from .grant import Grant, Token
from .network_settings import Network
from .paths import SandboxPath, checked_bytes
from .responses import FileChange, SandboxEvent
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
    """Access to a sandbox through a token that was negotiated elsewhere. It cannot be renewed without a broker."""
    secret = token if isinstance(token, Secret) else Secret(token)
    issued = Token.from_expiry(secret, expires_at, None)
    return Grant(
        http_base_url=http_base_url,
        ws_base_url=ws_base_url,
        token=issued,
        sandbox_id=sandbox_id,
        session_id=session_id,
        thread_id=thread_id,
    )


def watch_call(path: SandboxPath | None, recursive: bool, after: str | None) -> Call:
    query = without_none(path=checked_bytes(path).decode("utf-8", "surrogateescape") if path is not None else None, cursor=after)
    return Call("GET", "/watch", query=(*query.items(), ("recursive", "true" if recursive else "false")))


class Session(SessionApi, UsesBlockingIO):
    """A thread's sandbox. Thread-safe; each stream and shell opened from it has one reader at a time.

    Leaving the `with` block stops the upkeep but does not end the session. `release=True` or `.release()` ends it for all
    participants.
    """

    def __init__(self, grant: Grant, io: BlockingIO, *, upkeep: bool = True, release: bool = False, owns_io: bool = False) -> None:
        self._grant, self._io = grant, io
        self._releases, self._owns_io = release, owns_io
        self.files, self.fs, self.shells = Files(grant, io), Fs(grant, io), Shells(grant, io)
        self._stopping = threading.Event()
        if upkeep and grant.broker is not None:
            # The upkeep thread references the grant, not this object, so that a garbage-collected session stops its upkeep.
            weakref.finalize(self, self._stopping.set)
            name = f"cobox-upkeep-{grant.session_id}"
            threading.Thread(target=_run_upkeep, args=(io, grant, self._stopping), name=name, daemon=True).start()

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
        """Opens a session from a token that was negotiated or delegated elsewhere; it ends with that token."""
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
        """Starts a command and streams its output, or joins the command with this `command_id`. `stdin=True` keeps its input open
        for `write`."""
        start = exec_start(
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
        """Watches file changes from now on, or since the cursor of an earlier watch."""
        watch = Watch(self._io, self._grant, watch_call(path, recursive, after), None)
        watch.begin()
        return watch

    def events(self, *, after: str | None = None) -> Events:
        """Events of the session: all that are stored, those after the event with an id, or with `after="now"` new ones only."""
        call = Call("GET", self._grant.session_path("/events"), query=(("after", after),) if after else ())
        events = Events(self._io, self._grant.require_broker(), call, None)
        events.begin()
        return events

    def close(self) -> None:
        """Stops the upkeep without ending the session (unless it was opened with `release=True`)."""
        self._stopping.set()
        if self._releases:
            self._releases = False
            # Already released by another participant.
            with contextlib.suppress(errors.SessionNotFound, errors.SessionExpired):
                self.release()
        if self._owns_io:
            self._io.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


def _run_upkeep(io: BlockingIO, grant: Grant, stopping: threading.Event) -> None:
    with contextlib.suppress(Stopped):
        io.run(grant.keep_alive(), stopping)


class AsyncSession(SessionApi, UsesAsyncIO):
    """A thread's sandbox, for asyncio. Any number of tasks may use it; each stream and shell opened from it has one reader at a
    time.

    Leaving the `async with` block stops the upkeep but does not end the session. `release=True` or `.release()` ends it for all
    participants.
    """

    def __init__(self, grant: Grant, io: AsyncIO, *, upkeep: bool = True, release: bool = False, owns_io: bool = False) -> None:
        self._grant, self._io = grant, io
        self._releases, self._owns_io = release, owns_io
        self.files, self.fs, self.shells = AsyncFiles(grant, io), AsyncFs(grant, io), AsyncShells(grant, io)
        self._upkeep_task: asyncio.Task[None] | None = None
        if upkeep and grant.broker is not None:
            self._upkeep_task = asyncio.get_running_loop().create_task(io.run(grant.keep_alive()), name=f"cobox-upkeep-{grant.session_id}")

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
        """Opens a session from a token that was negotiated or delegated elsewhere; it ends with that token."""
        grant = grant_of(
            http_base_url,
            token,
            sandbox_id=sandbox_id,
            ws_base_url=ws_base_url,
            session_id=session_id,
            thread_id=thread_id,
            expires_at=expires_at,
        )
        return cls(grant, AsyncIO(Network(ca_file)), upkeep=False, owns_io=True)

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
    ) -> AwaitableContext[AsyncExecStream, Output]:
        """Starts a command and streams its output, or joins the command with this `command_id`: use `async with`, `async for` or
        `await`. `stdin=True` keeps its input open for `write`."""
        start = exec_start(
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
        return AwaitableContext(stream, stream.begin)

    def watch(
        self, path: SandboxPath | None = None, *, recursive: bool = True, after: str | None = None
    ) -> AwaitableContext[AsyncWatch, FileChange]:
        """Watches file changes from now on, or since the cursor of an earlier watch: use `async with`, `async for` or `await`."""
        watch = AsyncWatch(self._io, self._grant, watch_call(path, recursive, after), None)
        return AwaitableContext(watch, watch.begin)

    def events(self, *, after: str | None = None) -> AwaitableContext[AsyncEvents, SandboxEvent]:
        """Events of the session: all that are stored, those after the event with an id, or with `after="now"` new ones only."""
        call = Call("GET", self._grant.session_path("/events"), query=(("after", after),) if after else ())
        events = AsyncEvents(self._io, self._grant.require_broker(), call, None)
        return AwaitableContext(events, events.begin)

    async def close(self) -> None:
        """Stops the upkeep without ending the session (unless it was opened with `release=True`)."""
        upkeep, self._upkeep_task = self._upkeep_task, None
        if upkeep is not None:
            upkeep.cancel()
            # Waiting for the task instead of awaiting it keeps its cancellation apart from the cancellation of this method.
            await asyncio.wait({upkeep})
            if not upkeep.cancelled():
                upkeep.result()
        if self._releases:
            self._releases = False
            # Already released by another participant.
            with contextlib.suppress(errors.SessionNotFound, errors.SessionExpired):
                await self.release()
        if self._owns_io:
            await self._io.close()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()
