"""Graphs that work in their thread's sandbox: a factory for `langgraph.json`, and a deepagents backend that tells the run's stream."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from deepagents.backends import CompositeBackend
from deepagents.backends.protocol import EditResult, ExecuteResponse, FileUploadResponse, SandboxBackendProtocol, WriteResult

from ..client import AsyncCobox
from ..deepagents import ARTIFACTS_ROOT, CoboxBackend
from ..session import AsyncSession
from .bootstrap import SandboxRefused
from .finding import asandbox_for
from .own import Own
from .stream import emit, follow, stream_writer

GraphFactory = Callable[[Any], AbstractAsyncContextManager[Any]]
Result = TypeVar("Result")


def graph_factory(
    build: Callable[[CompositeBackend], Any],
    *,
    follow: bool = False,
    cobox: AsyncCobox | None = None,
    prefixes: Sequence[str] | None = None,
    mode: str = "ensure",
    capabilities: Sequence[str] | None = None,
    template: str | None = None,
    access: str | None = None,
    headers: Mapping[str, str] | None = None,
    shares_thread: bool = False,
) -> GraphFactory:
    """A `make_graph(config)` for langgraph.json: each run gets the graph that `build` makes of its thread's sandbox.

        make_graph = graph_factory(lambda backend: create_deep_agent(model=…, backend=backend))

    What the agent does there is told on the run's stream (`custom`); with `follow`, what others do meanwhile too. The rest is
    `sandbox_for`'s. A sandbox that is refused fails the run before anything of it happens; leaving a run leaves the sandbox as it is.
    """

    @asynccontextmanager
    async def make_graph(config: Any) -> AsyncIterator[Any]:
        if not _is_run(config):
            # The server wants the graph's shape: a schema, a drawing, a thread's history.
            yield build(_composed(NoSandbox()))
            return
        session = await asandbox_for(
            config,
            cobox=cobox,
            prefixes=prefixes,
            mode=mode,
            capabilities=capabilities,
            template=template,
            access=access,
            headers=headers,
            shares_thread=shares_thread,
        )
        async with session, _Telling(session, follow) as telling:
            backend = RunBackend(session, telling)
            try:
                yield build(_composed(backend))
            finally:
                await backend.aclose()

    return make_graph


def _composed(backend: SandboxBackendProtocol) -> CompositeBackend:
    return CompositeBackend(default=backend, routes={}, artifacts_root=ARTIFACTS_ROOT)


def _is_run(config: Mapping[str, Any] | None) -> bool:
    configurable = (config or {}).get("configurable") or {}
    return bool(configurable.get("__is_for_execution__", True))


class _Telling:
    """What reaches the stream of one run: the agent's own doings, and, while the run lasts, those of others."""

    def __init__(self, session: AsyncSession, is_following: bool) -> None:
        self._session = session
        self._is_following = is_following and session.id is not None
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._is_begun = False
        self.own = Own(session.token)

    async def __aenter__(self) -> _Telling:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_begun = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self) -> None:
        """In a node or tool, where there is a stream, before the first thing is done."""
        if self._is_begun or stream_writer() is None:
            return
        self._is_begun = True
        self.tell("connected")
        if self._is_following:
            # A tool may run in a thread; the writer finds its way by the context of the node it was asked for in.
            self._loop.call_soon_threadsafe(self._follow, context=contextvars.copy_context())

    def _follow(self) -> None:
        writer = stream_writer()
        if writer is not None and self._task is None:
            self._task = self._loop.create_task(follow(self._session, writer, self.own))

    def tell(self, kind: str, **said: Any) -> None:
        emit(kind, **said, sandbox_id=self._session.sandbox_id, session_id=self._session.id, actor="agent")


class RunBackend(CoboxBackend):
    """The deepagents backend of one run, which tells its stream what was written and run."""

    def __init__(self, session: AsyncSession, telling: _Telling) -> None:
        super().__init__(session)
        self._telling = telling

    def write(self, file_path: str, content: str) -> WriteResult:
        with self._doing("file_written", file_path):
            return self._told(super().write(file_path, content), "file_written", file_path)

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        with self._doing("file_written", file_path):
            return self._told(await super().awrite(file_path, content), "file_written", file_path)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        with self._doing("file_written", file_path):
            return self._told(super().edit(file_path, old_string, new_string, replace_all), "file_written", file_path)

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        with self._doing("file_written", file_path):
            return self._told(await super().aedit(file_path, old_string, new_string, replace_all), "file_written", file_path)

    def delete(self, file_path: str) -> Any:
        with self._doing("file_removed", file_path):
            return self._told(super().delete(file_path), "file_removed", file_path)

    async def adelete(self, file_path: str) -> Any:
        with self._doing("file_removed", file_path):
            return self._told(await super().adelete(file_path), "file_removed", file_path)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        with self._doing("file_written", *(path for path, _ in files)):
            return [self._told(result, "file_written", result.path) for result in super().upload_files(files)]

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        with self._doing("file_written", *(path for path, _ in files)):
            return [self._told(result, "file_written", result.path) for result in await super().aupload_files(files)]

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        with self._doing("exec", command):
            return self._executed(command, super().execute(command, timeout=timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        with self._doing("exec", command):
            return self._executed(command, await super().aexecute(command, timeout=timeout))

    @contextmanager
    def _doing(self, kind: str, *subjects: str) -> Iterator[None]:
        """While it is done; where that fails, nobody will tell of it, or whoever does tells what nobody knew."""
        self._telling.begin()
        for subject in subjects:
            self._telling.own.expect(kind, self._subject(kind, subject))
        try:
            yield
        except BaseException:
            for subject in subjects:
                self._telling.own.failed(kind, self._subject(kind, subject))
            raise

    def _subject(self, kind: str, subject: str) -> str:
        return subject if kind == "exec" else self._files.absolute(subject)

    def _told(self, result: Result, kind: str, path: str) -> Result:
        """Of whatever says by `error` how it went."""
        if getattr(result, "error", None) is None:
            self._telling.tell(kind, path=path)
        else:
            self._telling.own.failed(kind, self._subject(kind, path))
        return result

    def _executed(self, command: str, result: ExecuteResponse) -> ExecuteResponse:
        self._telling.tell("exec", command=command, exit_code=result.exit_code)
        return result


class NoSandbox(SandboxBackendProtocol):
    """Stands where a graph is only looked at: it has every tool, and none of them does anything."""

    @property
    def id(self) -> str:
        return "none"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        raise SandboxRefused("there is no sandbox outside a run")
