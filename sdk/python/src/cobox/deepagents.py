"""A deepagents backend for a shared sandbox. Every method uses boxd's own routes, so the image needs neither Python nor grep.

from cobox import Cobox
from cobox.deepagents import agent_backend
from deepagents import create_deep_agent

with Cobox().session(thread_id="demo") as box:
    agent = create_deep_agent(model=…, backend=agent_backend(box))

It follows the rules of the installed deepagents: 0.6 (`write` only creates, `glob` returns paths relative to its root) or 0.7
(`write` replaces, `glob` matches names at any depth and returns absolute paths of files).
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

from .agent_files import MAX_TEXT_BYTES, WORK_DIR, AgentFiles, Binary, FileToolError, Lines, encode_base64
from .async_io import AsyncIO
from .blocking_io import BlockingIO
from .client import Cobox
from .effects import Flow
from .responses import ExecResult, FileEntry
from .session import AsyncSession, Session

# Default timeout of a command in seconds.
EXECUTE_SECONDS = 1800
# Where middleware stores output that is too long for the model. Its default, the root directory, is not writable for the
# sandbox's user.
ARTIFACTS_ROOT = "/tmp/deepagents"  # noqa: S108 -- a directory in the sandbox
EMPTY = "System reminder: File exists but has empty contents"
EMPTY_OLD_STRING_ERROR = "Error: old_string cannot be empty. Provide the exact text to replace."
BASH = "/bin/bash"
# Binary file types that are missing in deepagents' extension map.
MORE_BINARY = (".mkv",)


def _installed() -> tuple[int, int]:
    numbers = re.findall(r"\d+", importlib.metadata.version("deepagents"))
    return int(numbers[0]), int(numbers[1])


IS_07 = _installed() >= (0, 7)
DeleteResult: Any = getattr(deepagents_protocol, "DeleteResult", None)


class CoboxBackend(SandboxBackendProtocol):
    """The file tools and `execute` of an agent, in the sandbox of a session. Accepts a blocking or an async session; blocking and
    async methods both talk to the sandbox directly and may be used from any thread and any event loop.

    The caller keeps the session: closing the backend closes connections, not the session.
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
        """`shell`: used by `execute`; defaults to bash if the sandbox has it. `durable`: writes are on disk before the call
        returns."""
        self._session = session
        self._files = AgentFiles(session._grant, work_dir)
        self._work_dir, self._timeout, self._env, self._shell = work_dir, timeout, env, shell
        self._max_output_bytes, self._durable = max_output_bytes, durable
        self.grep_exclude_dirs = grep_exclude_dirs
        self._owned: list[Any] = []
        io = session._io
        self._blocking = io if isinstance(io, BlockingIO) else BlockingIO(io.net)
        self._awaiting = io if isinstance(io, AsyncIO) else AsyncIO(io.net)

    @classmethod
    def for_thread(cls, thread_id: str, cobox: Cobox | None = None, **options: Any) -> CoboxBackend:
        """Opens a backend on a thread's sandbox, with `cobox` or the broker from the environment. Closing the backend closes that
        session without ending it."""
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
        """Closes what this backend opened itself."""
        owned, self._owned = self._owned, []
        for owned_object in owned:
            owned_object.close()
        if self._blocking is not self._session._io:
            self._blocking.close()

    async def aclose(self) -> None:
        """Closes what this backend opened itself, in this event loop."""
        self.close()
        if self._awaiting is not self._session._io:
            await self._awaiting.close()

    # The protocol has each method twice; the flows below do the work.
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
        """Deletes a path with everything below it. Exists in deepagents since 0.7."""
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
            entries = yield from self._files.list_directory(path)
        except FileToolError as refused:
            return LsResult(error=f"Path '{path}': {_search_error(refused)}")
        return LsResult(entries=[_info(entry, _join(path, entry.name)) for entry in entries])

    def _read(self, file_path: str, offset: int, limit: int) -> Flow[ReadResult]:
        is_text = _get_file_type(file_path) == "text" and not file_path.lower().endswith(MORE_BINARY)
        try:
            page = yield from self._files.read_lines(file_path, offset, limit, is_text)
        except FileToolError as refused:
            code = "not_a_file" if refused.code == "is_directory" else refused.message
            return ReadResult(error=f"File '{file_path}': {code}")
        if page is None:
            return ReadResult(file_data=file_data(EMPTY))
        if isinstance(page, Binary):
            return ReadResult(file_data=file_data(encode_base64(page.data), "base64"))
        return _read_result(file_path, page, limit)

    def _write(self, file_path: str, content: str) -> Flow[WriteResult]:
        try:
            yield from self._files.write(file_path, content, overwrite=IS_07, sync=self._durable)
        except FileToolError as refused:
            if refused.code == "file_exists":
                return WriteResult(error=f"Error: File already exists: {file_path!r}")
            return WriteResult(error=f"Failed to write file '{file_path}': {refused.message}")
        return WriteResult(path=file_path)

    def _edit(self, file_path: str, old: str, new: str, replace_all: bool) -> Flow[EditResult]:
        if not old:
            return EditResult(error=EMPTY_OLD_STRING_ERROR)
        try:
            count = yield from self._files.edit(file_path, old, new, replace_all)
        except FileToolError as refused:
            messages = {
                "file_not_found": f"Error: File '{file_path}' not found",
                "permission_denied": f"Error: Permission denied editing file '{file_path}'",
                "is_directory": f"Error: '{file_path}' is not a regular file",
                "not_a_file": f"Error: '{file_path}' is not a regular file",
                "string_not_found": f"Error: String not found in file: '{old}'",
                "multiple_occurrences": f"Error: String '{old}' appears multiple times. Use replace_all=True to replace all occurrences.",
            }
            return EditResult(error=messages.get(refused.code, f"Error editing file '{file_path}': {refused.message}"))
        return EditResult(path=file_path, occurrences=count)

    def _grep(self, pattern: str, path: str | None, glob: str | None, max_count: int | None) -> Flow[GrepResult]:
        try:
            found, stopped = yield from self._files.grep(pattern, path, glob, limit=max_count, exclude_dirs=self.grep_exclude_dirs)
        except FileToolError as refused:
            return GrepResult(error=f"Path '{path or '.'}': {_search_error(refused)}")
        matches: Any = [{"path": match.path, "line": match.line_number, "text": match.text} for match in found]
        if IS_07:
            more: Any = {"truncated": stopped is not None}
            return GrepResult(matches=matches, **more)
        if stopped == "timeout":
            return GrepResult(error="Error: grep timed out. Try a more specific pattern or a narrower path.")
        return GrepResult(matches=matches)

    def _glob(self, pattern: str, path: str | None) -> Flow[GlobResult]:
        try:
            found, is_partial = yield from self._files.glob(pattern, path, is_basename=IS_07)
        except FileToolError as refused:
            return GlobResult(error=f"Path '{path or '/'}': {_search_error(refused)}")
        if not IS_07:
            is_absolute = pattern.startswith("/")
            return GlobResult(matches=[_info(entry, f"/{relative}" if is_absolute else relative) for relative, entry in found])
        matches = [_info(entry, entry.path, is_dir=False) for _, entry in found]
        more: Any = {"truncated": is_partial, "truncation_reason": "budget" if is_partial else None}
        return GlobResult(matches=matches, **more)

    def _delete(self, file_path: str) -> Flow[Any]:
        if DeleteResult is None:
            raise NotImplementedError("deepagents supports `delete` since 0.7; session.fs.remove works with any version")
        try:
            yield from self._files.remove(file_path)
        except FileToolError as refused:
            if refused.code == "file_not_found":
                return DeleteResult(error=f"Error: '{file_path}' not found")
            return DeleteResult(error=f"Error deleting file '{file_path}': {refused.message}")
        return DeleteResult(path=file_path)

    def _upload(self, files: list[tuple[str, bytes]]) -> Flow[list[FileUploadResponse]]:
        results = yield from self._files.upload(files, self._durable)
        return [FileUploadResponse(path=path, error=error) for (path, _), error in zip(files, results, strict=True)]

    def _download(self, paths: list[str]) -> Flow[list[FileDownloadResponse]]:
        results = yield from self._files.download(paths)
        return [
            FileDownloadResponse(path=path, content=got) if isinstance(got, bytes) else FileDownloadResponse(path=path, error=got)
            for path, got in zip(paths, results, strict=True)
        ]

    def _execute(self, command: str, timeout: int | None) -> Flow[ExecuteResponse]:
        if self._shell is None:
            # Models mostly write commands for bash; checked once per backend.
            self._shell = BASH if (yield from self._files.has_program(BASH)) else "/bin/sh"
        seconds = self._timeout if timeout is None else timeout
        result: ExecResult = yield from self._files.execute(
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
    """The backend for `create_deep_agent`: a `CoboxBackend` that stores what middleware offloads where the sandbox's user can
    write."""
    return CompositeBackend(default=CoboxBackend(session, **options), routes={}, artifacts_root=artifacts_root)


def file_data(content: str, encoding: str = "utf-8") -> Any:
    """deepagents' `FileData`."""
    return {"content": content, "encoding": encoding}


def _join(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}"


def _info(entry: FileEntry, path: str, is_dir: bool | None = None) -> FileInfo:
    return FileInfo(path=path, is_dir=entry.is_dir if is_dir is None else is_dir, size=entry.size, modified_at=entry.mtime.isoformat())


def _search_error(refused: FileToolError) -> str:
    """deepagents' error code for a directory that can't be searched."""
    return {"file_not_found": "path_not_found", "not_a_file": "not_a_directory"}.get(refused.code, refused.message)


def _read_result(file_path: str, page: Lines, limit: int) -> ReadResult:
    """Formats lines for the model; since 0.7 with their position in the file."""
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
        # A truncated line is read again from its beginning, unless it alone exceeds the limit.
        whole = max(1, data[:room].count(b"\n"))
    if not IS_07:
        return ReadResult(file_data=file_data(content))
    end = page.start + whole
    position: Any = {"total_lines": page.total, "start_line": page.start + 1, "end_line": end}
    position["next_offset"] = end if page.total is None or end < page.total else None
    return ReadResult(file_data=file_data(content), **position)
