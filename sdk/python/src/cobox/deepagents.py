"""A deepagents backend on a shared sandbox: every method by boxd's own routes, so the image needs neither Python nor grep.

    from cobox import Cobox
    from cobox.deepagents import agent_backend
    from deepagents import create_deep_agent

    with Cobox().session(thread_id="demo") as box:
        agent = create_deep_agent(model=…, backend=agent_backend(box))

The rules are those of the installed deepagents: 0.6 (`write` only creates, `glob` gives paths from its root) or 0.7 (`write` replaces,
`glob` finds names at any depth and gives absolute paths of files).
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

from deepagents.backends import CompositeBackend
from deepagents.backends import protocol as deepagents_protocol
from deepagents.backends.protocol import (
    EditResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileInfo,
    FileUploadResponse,
    GlobResult,
    GrepResult,
    LsResult,
    ReadResult,
    SandboxBackendProtocol,
    WriteResult,
)
from deepagents.backends.sandbox import TRUNCATION_MSG
from deepagents.backends.utils import _get_file_type

from .agent_files import MAX_TEXT_BYTES, WORK_DIR, AgentFiles, Binary, Lines, Refusal, in_base64
from .answers import ExecResult, FileEntry
from .awaiting import AwaitingIO
from .blocking import BlockingIO
from .client import Cobox
from .flow import Flow
from .session import AsyncSession, Session

# Seconds a command may take unless told.
EXECUTE_SECONDS = 1800
# Where middleware puts what is too long for the model. The root, where it would put it otherwise, is not the sandbox's user's.
ARTIFACTS_ROOT = "/tmp/deepagents"  # noqa: S108 -- a directory in the sandbox
EMPTY = "System reminder: File exists but has empty contents"
EMPTY_OLD = "Error: old_string cannot be empty. Provide the exact text to replace."
BASH = "/bin/bash"
# Not in the extension map, and no text either.
MORE_BINARY = (".mkv",)


def _installed() -> tuple[int, int]:
    numbers = re.findall(r"\d+", importlib.metadata.version("deepagents"))
    return int(numbers[0]), int(numbers[1])


IS_07 = _installed() >= (0, 7)
DeleteResult: Any = getattr(deepagents_protocol, "DeleteResult", None)


class CoboxBackend(SandboxBackendProtocol):
    """The file tools and `execute` of an agent, in the sandbox of a session. Blocking and async methods both go straight to the wire,
    whichever kind of session it was made from; any thread and any event loop may use it.

    The session stays its owner's: closing the backend closes connections, not the session.
    """

    def __init__(
        self,
        session: Session | AsyncSession,
        *,
        work_dir: str = WORK_DIR,
        timeout: int = EXECUTE_SECONDS,
        env: dict[str, str] | None = None,
        shell: str | None = None,
        max_output_bytes: int | None = None,
        grep_exclude_dirs: tuple[str, ...] = (".git",) if IS_07 else (),
        durable: bool = True,
    ) -> None:
        """`shell`: for `execute`; bash where there is one unless told. `durable`: writes are on the disk when they are answered."""
        self._session = session
        self._files = AgentFiles(session._grant, work_dir)
        self._work_dir, self._timeout, self._env, self._shell = work_dir, timeout, env, shell
        self._max_output_bytes, self._durable = max_output_bytes, durable
        self.grep_exclude_dirs = grep_exclude_dirs
        self._owned: list[Any] = []
        io = session._io
        self._blocking = io if isinstance(io, BlockingIO) else BlockingIO(io.net)
        self._awaiting = io if isinstance(io, AwaitingIO) else AwaitingIO(io.net)

    @classmethod
    def for_thread(cls, thread_id: str, cobox: Cobox | None = None, **options: Any) -> CoboxBackend:
        """A backend on a thread's sandbox, with the broker of the environment unless one is given; closing it leaves that session."""
        used = cobox or Cobox()
        backend = cls(used.session(thread_id), **options)
        backend._owned = [backend.session] if cobox is not None else [backend.session, used]
        return backend

    @property
    def id(self) -> str:
        return self._session.sandbox_id

    @property
    def session(self) -> Session | AsyncSession:
        return self._session

    def close(self) -> None:
        """Closes what this backend made for itself."""
        owned, self._owned = self._owned, []
        for thing in owned:
            thing.close()
        if self._blocking is not self._session._io:
            self._blocking.close()

    async def aclose(self) -> None:
        """Closes what this backend made for itself, in this event loop."""
        self.close()
        if self._awaiting is not self._session._io:
            await self._awaiting.close()

    # Each method twice, as the protocol has them; what it does is a flow below.
    def ls(self, path: str) -> LsResult:
        return self._blocking.run(self._ls(path))

    async def als(self, path: str) -> LsResult:
        return await self._awaiting.run(self._ls(path))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return self._blocking.run(self._read(file_path, offset, limit))

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return await self._awaiting.run(self._read(file_path, offset, limit))

    def write(self, file_path: str, content: str) -> WriteResult:
        return self._blocking.run(self._write(file_path, content))

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return await self._awaiting.run(self._write(file_path, content))

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return self._blocking.run(self._edit(file_path, old_string, new_string, replace_all))

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return await self._awaiting.run(self._edit(file_path, old_string, new_string, replace_all))

    def grep(self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None) -> GrepResult:
        return self._blocking.run(self._grep(pattern, path, glob, max_count))

    async def agrep(self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None) -> GrepResult:
        return await self._awaiting.run(self._grep(pattern, path, glob, max_count))

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        return self._blocking.run(self._glob(pattern, path))

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        return await self._awaiting.run(self._glob(pattern, path))

    def delete(self, file_path: str) -> Any:
        """A path with all beneath it. deepagents has it since 0.7."""
        return self._blocking.run(self._delete(file_path))

    async def adelete(self, file_path: str) -> Any:
        return await self._awaiting.run(self._delete(file_path))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return self._blocking.run(self._upload(files))

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await self._awaiting.run(self._upload(files))

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return self._blocking.run(self._download(paths))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await self._awaiting.run(self._download(paths))

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return self._blocking.run(self._execute(command, timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return await self._awaiting.run(self._execute(command, timeout))

    def _ls(self, path: str) -> Flow[LsResult]:
        try:
            entries = yield from self._files.entries(path)
        except Refusal as refused:
            return LsResult(error=f"Path '{path}': {_of_a_path(refused)}")
        return LsResult(entries=[_info(entry, _join(path, entry.name)) for entry in entries])

    def _read(self, file_path: str, offset: int, limit: int) -> Flow[ReadResult]:
        is_text = _get_file_type(file_path) == "text" and not file_path.lower().endswith(MORE_BINARY)
        try:
            page = yield from self._files.page(file_path, offset, limit, is_text)
        except Refusal as refused:
            code = "not_a_file" if refused.code == "is_directory" else refused.message
            return ReadResult(error=f"File '{file_path}': {code}")
        if page is None:
            return ReadResult(file_data=file_data(EMPTY))
        if isinstance(page, Binary):
            return ReadResult(file_data=file_data(in_base64(page.data), "base64"))
        return _shown(file_path, page, limit)

    def _write(self, file_path: str, content: str) -> Flow[WriteResult]:
        try:
            yield from self._files.create(file_path, content, overwrite=IS_07, sync=self._durable)
        except Refusal as refused:
            if refused.code == "file_exists":
                return WriteResult(error=f"Error: File already exists: {file_path!r}")
            return WriteResult(error=f"Failed to write file '{file_path}': {refused.message}")
        return WriteResult(path=file_path)

    def _edit(self, file_path: str, old: str, new: str, replace_all: bool) -> Flow[EditResult]:
        if not old:
            return EditResult(error=EMPTY_OLD)
        try:
            count = yield from self._files.replace(file_path, old, new, replace_all)
        except Refusal as refused:
            told = {
                "file_not_found": f"Error: File '{file_path}' not found",
                "permission_denied": f"Error: Permission denied editing file '{file_path}'",
                "is_directory": f"Error: '{file_path}' is not a regular file",
                "not_a_file": f"Error: '{file_path}' is not a regular file",
                "string_not_found": f"Error: String not found in file: '{old}'",
                "multiple_occurrences": f"Error: String '{old}' appears multiple times. Use replace_all=True to replace all occurrences.",
            }
            return EditResult(error=told.get(refused.code, f"Error editing file '{file_path}': {refused.message}"))
        return EditResult(path=file_path, occurrences=count)

    def _grep(self, pattern: str, path: str | None, glob: str | None, max_count: int | None) -> Flow[GrepResult]:
        try:
            found, stopped = yield from self._files.search(pattern, path, glob, limit=max_count, exclude_dirs=self.grep_exclude_dirs)
        except Refusal as refused:
            return GrepResult(error=f"Path '{path or '.'}': {_of_a_path(refused)}")
        matches: Any = [{"path": match.path, "line": match.line_number, "text": match.text} for match in found]
        if IS_07:
            more: Any = {"truncated": stopped is not None}
            return GrepResult(matches=matches, **more)
        if stopped == "timeout":
            return GrepResult(error="Error: grep timed out. Try a more specific pattern or a narrower path.")
        return GrepResult(matches=matches)

    def _glob(self, pattern: str, path: str | None) -> Flow[GlobResult]:
        try:
            found, is_partial = yield from self._files.find(pattern, path, is_basename=IS_07)
        except Refusal as refused:
            return GlobResult(error=f"Path '{path or '/'}': {_of_a_path(refused)}")
        if not IS_07:
            is_absolute = pattern.startswith("/")
            return GlobResult(matches=[_info(entry, f"/{relative}" if is_absolute else relative) for relative, entry in found])
        matches = [_info(entry, entry.path, is_dir=False) for _, entry in found]
        more: Any = {"truncated": is_partial, "truncation_reason": "budget" if is_partial else None}
        return GlobResult(matches=matches, **more)

    def _delete(self, file_path: str) -> Flow[Any]:
        if DeleteResult is None:
            raise NotImplementedError("deepagents has `delete` since 0.7; session.fs.remove does it with any version")
        try:
            yield from self._files.remove(file_path)
        except Refusal as refused:
            if refused.code == "file_not_found":
                return DeleteResult(error=f"Error: '{file_path}' not found")
            return DeleteResult(error=f"Error deleting file '{file_path}': {refused.message}")
        return DeleteResult(path=file_path)

    def _upload(self, files: list[tuple[str, bytes]]) -> Flow[list[FileUploadResponse]]:
        results = yield from self._files.put(files, self._durable)
        return [FileUploadResponse(path=path, error=error) for (path, _), error in zip(files, results, strict=True)]

    def _download(self, paths: list[str]) -> Flow[list[FileDownloadResponse]]:
        results = yield from self._files.take(paths)
        return [
            FileDownloadResponse(path=path, content=got) if isinstance(got, bytes) else FileDownloadResponse(path=path, error=got)
            for path, got in zip(paths, results, strict=True)
        ]

    def _execute(self, command: str, timeout: int | None) -> Flow[ExecuteResponse]:
        if self._shell is None:
            # What models write is mostly for bash; one look decides, for the life of this backend.
            self._shell = BASH if (yield from self._files.has_program(BASH)) else "/bin/sh"
        seconds = self._timeout if timeout is None else timeout
        result: ExecResult = yield from self._files.run(
            command,
            shell=self._shell,
            cwd=self._work_dir,
            env=self._env,
            timeout_seconds=seconds,
            max_output_bytes=self._max_output_bytes,
        )
        output = "\n".join(part for part in (result.stdout, result.stderr) if part)
        if result.timed_out:
            output += f"\nError: Command timed out after {seconds} seconds."
        return ExecuteResponse(output=output, exit_code=result.exit_code, truncated=result.truncated)


def agent_backend(session: Session | AsyncSession, *, artifacts_root: str = ARTIFACTS_ROOT, **options: Any) -> CompositeBackend:
    """What to give `create_deep_agent`: a `CoboxBackend`, with what middleware offloads put where the sandbox's user may write it."""
    return CompositeBackend(default=CoboxBackend(session, **options), routes={}, artifacts_root=artifacts_root)


def file_data(content: str, encoding: str = "utf-8") -> Any:
    """deepagents' `FileData`."""
    return {"content": content, "encoding": encoding}


def _join(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}"


def _info(entry: FileEntry, path: str, is_dir: bool | None = None) -> FileInfo:
    return FileInfo(path=path, is_dir=entry.is_dir if is_dir is None else is_dir, size=entry.size, modified_at=entry.mtime.isoformat())


def _of_a_path(refused: Refusal) -> str:
    """deepagents' words for a directory that can't be searched."""
    return {"file_not_found": "path_not_found", "not_a_file": "not_a_directory"}.get(refused.code, refused.message)


def _shown(file_path: str, page: Lines, limit: int) -> ReadResult:
    """Lines as the model sees them, and from 0.7 on where they are in the file."""
    if IS_07 and limit <= 0:
        more: Any = {"no_lines_requested": True}
        return ReadResult(file_data=file_data(""), **more)
    if not page.lines:
        return ReadResult(error=f"File '{file_path}': Line offset {page.start} exceeds file length ({page.total} lines)")
    room = MAX_TEXT_BYTES - len(TRUNCATION_MSG.encode())
    content, whole = "\n".join(page.lines), len(page.lines)
    data = content.encode("utf-8", "surrogatepass")
    if len(data) > room or page.is_cut:
        content = data[:room].decode("utf-8", "ignore") + TRUNCATION_MSG
        # A line that is cut is read again from its beginning, but for one that is longer than all that is shown.
        whole = max(1, data[:room].count(b"\n"))
    if not IS_07:
        return ReadResult(file_data=file_data(content))
    end = page.start + whole
    where: Any = {"total_lines": page.total, "start_line": page.start + 1, "end_line": end}
    where["next_offset"] = end if page.total is None or end < page.total else None
    return ReadResult(file_data=file_data(content), **where)
