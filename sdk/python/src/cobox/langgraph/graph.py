"""Graphs that work in their thread's sandbox: a factory for `langgraph.json`, and a deepagents backend that reports to the run's
stream."""

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
from .own_events import OwnEvents
from .run_sandbox import asandbox_for
from .run_stream import emit, follow, stream_writer
from .supplied_sandbox import SandboxRefused

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
    """A `make_graph(config)` for langgraph.json: each run gets the graph that `build` creates with a backend for its thread's
    sandbox.

    make_graph = graph_factory(lambda backend: create_deep_agent(model=…, backend=backend))

    The agent's actions are reported on the run's stream (`custom`); with `follow`, also the actions of other participants during
    the run. The other parameters are those of `sandbox_for`. A refused sandbox fails the run before it starts; the end of a run
    leaves the sandbox as it is.
    """

    @asynccontextmanager
    async def make_graph(config: Any) -> AsyncIterator[Any]:
        if not _is_run(config):
            # The server only wants the graph's structure: a schema, a drawing, a thread's history.
            yield build(_as_composite(NoSandbox()))
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
        async with session, _RunEventReporter(session, follow) as reporter:
            backend = RunBackend(session, reporter)
            try:
                yield build(_as_composite(backend))
            finally:
                await backend.aclose()

    return make_graph


def _as_composite(backend: SandboxBackendProtocol) -> CompositeBackend:
    return CompositeBackend(default=backend, routes={}, artifacts_root=ARTIFACTS_ROOT)


def _is_run(config: Mapping[str, Any] | None) -> bool:
    configurable = (config or {}).get("configurable") or {}
    return bool(configurable.get("__is_for_execution__", True))


class _RunEventReporter:
    """Sends events to the stream of one run: the agent's own actions and, while the run lasts, those of other participants."""

    def __init__(self, session: AsyncSession, is_following: bool) -> None:
        self._session = session
        self._is_following = is_following and session.id is not None
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._is_begun = False
        self.own = OwnEvents(session.token)

    async def __aenter__(self) -> _RunEventReporter:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_begun = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self) -> None:
        """Called in a node or tool, where a stream exists, before the first action."""
        if self._is_begun or stream_writer() is None:
            return
        self._is_begun = True
        self.report("connected")
        if self._is_following:
            # A tool may run in a thread, but the writer is looked up in the context of its node.
            self._loop.call_soon_threadsafe(self._follow, context=contextvars.copy_context())

    def _follow(self) -> None:
        writer = stream_writer()
        if writer is not None and self._task is None:
            self._task = self._loop.create_task(follow(self._session, writer, self.own))

    def report(self, kind: str, **fields: Any) -> None:
        emit(kind, **fields, sandbox_id=self._session.sandbox_id, session_id=self._session.id, actor="agent")


class RunBackend(CoboxBackend):
    """The deepagents backend of one run; reports file changes and commands on the run's stream."""

    def __init__(self, session: AsyncSession, reporter: _RunEventReporter) -> None:
        super().__init__(session)
        self._reporter = reporter

    def write(self, file_path: str, content: str) -> WriteResult:
        with self._expecting_events("file_written", file_path):
            return self._report_result(super().write(file_path, content), "file_written", file_path)

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        with self._expecting_events("file_written", file_path):
            return self._report_result(await super().awrite(file_path, content), "file_written", file_path)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        with self._expecting_events("file_written", file_path):
            return self._report_result(super().edit(file_path, old_string, new_string, replace_all), "file_written", file_path)

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        with self._expecting_events("file_written", file_path):
            return self._report_result(await super().aedit(file_path, old_string, new_string, replace_all), "file_written", file_path)

    def delete(self, file_path: str) -> Any:
        with self._expecting_events("file_removed", file_path):
            return self._report_result(super().delete(file_path), "file_removed", file_path)

    async def adelete(self, file_path: str) -> Any:
        with self._expecting_events("file_removed", file_path):
            return self._report_result(await super().adelete(file_path), "file_removed", file_path)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        with self._expecting_events("file_written", *(path for path, _ in files)):
            return [self._report_result(result, "file_written", result.path) for result in super().upload_files(files)]

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        with self._expecting_events("file_written", *(path for path, _ in files)):
            return [self._report_result(result, "file_written", result.path) for result in await super().aupload_files(files)]

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        with self._expecting_events("exec", command):
            return self._report_exec(command, super().execute(command, timeout=timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        with self._expecting_events("exec", command):
            return self._report_exec(command, await super().aexecute(command, timeout=timeout))

    @contextmanager
    def _expecting_events(self, kind: str, *subjects: str) -> Iterator[None]:
        """Expects the broker's events for an action while it runs. If the action fails, a matching event is from another
        participant."""
        self._reporter.begin()
        for subject in subjects:
            self._reporter.own.expect(kind, self._subject(kind, subject))
        try:
            yield
        except BaseException:
            for subject in subjects:
                self._reporter.own.cancel(kind, self._subject(kind, subject))
            raise

    def _subject(self, kind: str, subject: str) -> str:
        return subject if kind == "exec" else self._files.absolute(subject)

    def _report_result(self, result: Result, kind: str, path: str) -> Result:
        """Reports an action unless the result's `error` is set."""
        if getattr(result, "error", None) is None:
            self._reporter.report(kind, path=path)
        else:
            self._reporter.own.cancel(kind, self._subject(kind, path))
        return result

    def _report_exec(self, command: str, result: ExecuteResponse) -> ExecuteResponse:
        self._reporter.report("exec", command=command, exit_code=result.exit_code)
        return result


class NoSandbox(SandboxBackendProtocol):
    """The backend of a graph that is only inspected: it has every tool, and none of them does anything."""

    @property
    def id(self) -> str:
        return "none"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        raise SandboxRefused("there is no sandbox outside a run")
