r"""The first backend protocol for agents' file tools, for code written against it: `ls_info`, `read`, `write` (only creates
files), `edit`, `glob_info`, `grep_raw` (takes a regular expression), each with an async counterpart. Does not need deepagents.

from cobox.backend_protocol import CoboxFiles

files = CoboxFiles(session)
print(files.read("/workspace/a.py"))          # with line numbers
files.grep_raw(r"def \w+", path="/workspace", glob="*.py")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from .agent_files import WORK_DIR, AgentFiles, Binary, FileToolError
from .async_io import AsyncIO
from .blocking_io import BlockingIO
from .effects import Flow
from .session import AsyncSession, Session

T = TypeVar("T")
# Longer lines are split into numbered parts: `5`, `5.1`, `5.2`.
MAX_LINE_CHARS = 2000
# Column width of line numbers.
NUMBER_WIDTH = 6
EMPTY = "System reminder: File exists but has empty contents"


class FileInfo(TypedDict):
    path: str
    is_dir: bool
    size: int
    modified_at: str


class GrepMatch(TypedDict):
    path: str
    line: int
    text: str


@dataclass
class WriteResult:
    error: str | None = None
    path: str | None = None
    # Always None: the file is in the sandbox, not in the agent's state.
    files_update: Mapping[str, Any] | None = None


@dataclass
class EditResult:
    error: str | None = None
    path: str | None = None
    files_update: Mapping[str, Any] | None = None
    occurrences: int | None = None


class CoboxFiles:
    """Accepts a blocking or an async session; blocking and async methods both talk to the sandbox directly."""

    def __init__(self, session: Session | AsyncSession, *, work_dir: str = WORK_DIR) -> None:
        self._files = AgentFiles(session._grant, work_dir)
        io = session._io
        self._blocking = io if isinstance(io, BlockingIO) else BlockingIO(io.net)
        self._awaiting = io if isinstance(io, AsyncIO) else AsyncIO(io.net)

    def ls_info(self, path: str) -> list[FileInfo]:
        """The entries of a directory, subdirectories with a trailing slash; empty if there is no such directory."""
        return self._blocking.run(self._ls(path))

    async def als_info(self, path: str) -> list[FileInfo]:
        return await self._awaiting.run(self._ls(path))

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> str:
        """Returns numbered lines, or a message that begins with `Error:`."""
        return self._blocking.run(self._read(file_path, offset, limit))

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> str:
        return await self._awaiting.run(self._read(file_path, offset, limit))

    def write(self, file_path: str, content: str) -> WriteResult:
        """Creates a file; an existing one is left unchanged and reported in `error`."""
        return self._blocking.run(self._write(file_path, content))

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return await self._awaiting.run(self._write(file_path, content))

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replaces text that occurs exactly once, or every occurrence with `replace_all`."""
        return self._blocking.run(self._edit(file_path, old_string, new_string, replace_all))

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return await self._awaiting.run(self._edit(file_path, old_string, new_string, replace_all))

    def glob_info(self, pattern: str, path: str = "/") -> list[FileInfo]:
        """Finds files by a path pattern with the rules of Python's `glob`; returns absolute paths."""
        return self._blocking.run(self._glob(pattern, path))

    async def aglob_info(self, pattern: str, path: str = "/") -> list[FileInfo]:
        return await self._awaiting.run(self._glob(pattern, path))

    def grep_raw(self, pattern: str, path: str | None = None, glob: str | None = None) -> list[GrepMatch] | str:
        """Returns the lines that match a regular expression, or an error message."""
        return self._blocking.run(self._grep(pattern, path, glob))

    async def agrep_raw(self, pattern: str, path: str | None = None, glob: str | None = None) -> list[GrepMatch] | str:
        return await self._awaiting.run(self._grep(pattern, path, glob))

    def _ls(self, path: str) -> Flow[list[FileInfo]]:
        try:
            entries = yield from self._files.list_directory(path)
        except FileToolError:
            return []
        return [_info(e.path + ("/" if e.is_dir else ""), e) for e in entries]

    def _read(self, file_path: str, offset: int, limit: int) -> Flow[str]:
        try:
            page = yield from self._files.read_lines(file_path, offset, limit, True)
        except FileToolError as refused:
            message = (
                f"Error: File '{file_path}' not found"
                if refused.code == "file_not_found"
                else f"Error: File '{file_path}': {refused.message}"
            )
            return message
        if page is None:
            return EMPTY
        if isinstance(page, Binary):
            return f"Error: File '{file_path}' is not a text file"
        if not page.lines:
            return f"Error: Line offset {page.start} exceeds file length ({page.total} lines)"
        return "\n".join(numbered(line, number) for number, line in enumerate(page.lines, page.start + 1))

    def _write(self, file_path: str, content: str) -> Flow[WriteResult]:
        try:
            yield from self._files.write(file_path, content, overwrite=False, sync=True)
        except FileToolError as refused:
            if refused.code == "file_exists":
                message = f"Cannot write to {file_path} because it already exists. Read and then make an edit, or write to a new path."
                return WriteResult(error=message)
            return WriteResult(error=f"Error writing file '{file_path}': {refused.message}")
        return WriteResult(path=file_path)

    def _edit(self, file_path: str, old: str, new: str, replace_all: bool) -> Flow[EditResult]:
        if not old:
            return EditResult(error="Error: old_string cannot be empty")
        try:
            count = yield from self._files.edit(file_path, old, new, replace_all)
        except FileToolError as refused:
            messages = {
                "file_not_found": f"Error: File '{file_path}' not found",
                "string_not_found": f"Error: String not found in file: '{old}'",
                "multiple_occurrences": f"Error: String '{old}' appears multiple times. Use replace_all=True to replace all occurrences.",
            }
            return EditResult(error=messages.get(refused.code, f"Error editing file '{file_path}': {refused.message}"))
        return EditResult(path=file_path, occurrences=count)

    def _glob(self, pattern: str, path: str) -> Flow[list[FileInfo]]:
        try:
            found, _ = yield from self._files.glob(pattern, path, is_basename=False)
        except FileToolError:
            return []
        return [_info(entry.path, entry) for _, entry in found if not entry.is_dir]

    def _grep(self, pattern: str, path: str | None, glob: str | None) -> Flow[list[GrepMatch] | str]:
        try:
            found, _ = yield from self._files.grep(pattern, path, glob, literal=False)
        except FileToolError as refused:
            if refused.code == "invalid_pattern":
                return f"Invalid regex pattern: {refused.message}"
            return [] if refused.code == "file_not_found" else f"Error: {refused.message}"
        return [GrepMatch(path=match.path, line=match.line_number, text=match.text) for match in found]


def _info(path: str, entry: Any) -> FileInfo:
    return FileInfo(path=path, is_dir=entry.is_dir, size=entry.size, modified_at=entry.mtime.isoformat())


def numbered(line: str, number: int) -> str:
    """Formats a line like `cat -n`; a long line is split into parts."""
    pieces = [line[at : at + MAX_LINE_CHARS] for at in range(0, len(line), MAX_LINE_CHARS)] or [""]
    return "\n".join(f"{str(number) if at == 0 else f'{number}.{at}':>{NUMBER_WIDTH}}\t{piece}" for at, piece in enumerate(pieces))
