"""File operations for agents' tools, as flows over boxd's own routes. The deepagents backend and the older backend protocol share
them.

Errors that an agent can react to are `FileToolError`s with the codes its tools know; others (no connection, no permission) are
raised.
"""

from __future__ import annotations

import base64
import codecs
import dataclasses
import posixpath
import re
from dataclasses import dataclass
from typing import Any

from . import errors
from .effects import Flow
from .files import FilesApi
from .fs import FsApi
from .glob_pattern import GlobPattern, InvalidPattern
from .grant import Grant
from .responses import Edited, FileContent, FileEntry, GrepMatch
from .session_api import SessionApi
from .symlinks import SymlinkResolver, is_beneath

# Base directory of relative paths: the folder that human and agent share.
WORK_DIR = "/workspace"
# Maximum directory entries of one page, and of all pages together.
LIST_PAGE, MAX_ENTRIES = 10_000, 200_000
# Search limits, the same as boxd's.
MAX_GLOB_MATCHES, MAX_GREP_MATCHES, MAX_LINE_BYTES = 10_000, 100_000, 64 * 1024
# Maximum number of symlinks that a glob resolves to find out whether they lead to files.
MAX_LINKS = 200
# Bytes fetched at once of a file that is read by lines; most files fit into the first chunk.
FIRST_BYTES, NEXT_BYTES = 1024 * 1024, 8 * 1024 * 1024
# Maximum size of a binary file that is returned in base64, and of the text returned at once. The same limits as in deepagents.
MAX_BINARY_BYTES = MAX_TEXT_BYTES = 500 * 1024
# Maximum bytes scanned to count the lines before the requested one: a few seconds' worth, no matter how large the file claims to
# be.
MAX_SCAN_BYTES = 1024 * 1024 * 1024
# Bytes inspected to tell text files from binary files.
SNIFF_BYTES = 8192


class FileToolError(Exception):
    """A file operation failed in a way the agent can react to. `code` is deepagents' error code, such as `file_not_found`, if it
    has one."""

    def __init__(self, code: str, message: str | None = None) -> None:
        super().__init__(message or code)
        self.code, self.message = code, message or code


@dataclass(frozen=True)
class Binary:
    data: bytes


@dataclass(frozen=True)
class Lines:
    """A range of lines of a text. `start` counts from 0; `total` is None if the end of the file was not reached."""

    lines: list[str]
    start: int
    total: int | None
    # Whether the first line alone exceeds the size limit.
    is_cut: bool = False

    @property
    def has_more(self) -> bool:
        return self.total is None or self.start + len(self.lines) < self.total


def to_tool_error(error: errors.CoboxError) -> FileToolError:
    """Maps an error from boxd to a tool error; an error that an agent cannot react to is raised."""
    if isinstance(error, errors.FileNotFound):
        return FileToolError("file_not_found")
    if isinstance(error, errors.CapabilityDenied):
        return FileToolError("permission_denied", str(error))
    if isinstance(error, errors.Forbidden):
        return FileToolError("permission_denied")
    if isinstance(error, errors.InvalidPath):
        return FileToolError("invalid_path")
    if isinstance(error, errors.InvalidText):
        return FileToolError("invalid_text", error.message)
    if isinstance(error, errors.InvalidRequest):
        kind = error.details.get("kind")
        if kind == "directory" or "it is a directory" in error.message:
            return FileToolError("is_directory")
        if kind is not None:
            return FileToolError("not_a_file")
        if "not a directory" in error.message:
            return FileToolError("not_a_directory")
        return FileToolError("invalid_path", error.message)
    if isinstance(error, (errors.FileChanged, errors.TooLarge, errors.DiskFull, errors.FileExists)):
        return FileToolError(error.code.lower(), str(error))
    raise error


class AgentFiles:
    def __init__(self, grant: Grant, work_dir: str = WORK_DIR) -> None:
        self._grant = grant
        self._work_dir = work_dir

    def absolute(self, path: str | None) -> str:
        """The absolute path: relative paths start in the working directory, and `..` is folded because URLs cannot carry it."""
        joined = posixpath.join(self._work_dir, path or "")
        return posixpath.normpath(joined) if ".." in joined.split("/") else joined.rstrip("/") or "/"

    def list_directory(self, path: str) -> Flow[list[FileEntry]]:
        found: list[FileEntry] = []
        cursor = None
        try:
            while True:
                page = yield from FsApi.list.flow(self, self.absolute(path), limit=LIST_PAGE, cursor=cursor)
                found += page.entries
                cursor = page.next_cursor
                if cursor is None or len(found) >= MAX_ENTRIES:
                    return found
        except errors.CoboxError as error:
            raise to_tool_error(error) from None

    def read_lines(self, path: str, offset: int, limit: int, is_text: bool) -> Flow[Lines | Binary | None]:
        """Returns lines of a text file, or all of a binary file; None for an empty file. `is_text`: whether the file name
        suggests text."""
        offset, limit, path = max(0, int(offset)), max(0, int(limit)), self.absolute(path)
        try:
            first: FileContent | None = yield from FilesApi.get.flow(self, path, end=FIRST_BYTES)
        except errors.RangeNotSatisfiable:
            return None  # An empty file has no first byte.
        except errors.CoboxError as error:
            raise to_tool_error(error) from None
        if first is None or not first.data:
            return None
        size = max(first.head.size, len(first.data))
        if not is_text or not _is_utf8(first.data[:SNIFF_BYTES], is_whole=size <= SNIFF_BYTES):
            return _binary(first.data, size)
        if size <= len(first.data):
            try:
                lines = _split_lines(first.data.decode())
            except UnicodeDecodeError:
                return _binary(first.data, size)
            return Lines(lines[offset : offset + limit], offset, len(lines))
        return (yield from self._read_far_lines(path, first, size, offset, limit))

    def _read_far_lines(self, path: str, first: FileContent, size: int, offset: int, limit: int) -> Flow[Lines]:
        """Reads lines from a large file, fetching no further than the last requested line and keeping only the lines that are
        returned."""
        decoder = _Decoder()
        lines: list[str] = []
        shown_chars = 0
        count, at, data, rest = 0, len(first.data), first.data, ""
        # Of the lines before the first requested one, only whether the current one has begun is kept.
        is_begun = False
        while True:
            text = decoder.decode(data, is_last=at >= size)
            if (ends := text.count("\n")) < offset - count:
                count += ends
                is_begun = not text.endswith("\n") if text else is_begun
            else:
                text, count = _after(text, offset - count), max(count, offset)
                *whole, last = text.split("\n")
                if whole:
                    whole[0], rest = rest + whole[0], ""
                for line in whole:
                    if len(lines) < limit and shown_chars <= MAX_TEXT_BYTES:
                        lines.append(line)
                        shown_chars += len(line)
                    count += 1
                rest += last
                is_begun = bool(rest)
            if at >= size:
                if is_begun and count >= offset and len(lines) < limit and shown_chars <= MAX_TEXT_BYTES:
                    lines.append(rest)
                return Lines(lines, offset, count + is_begun)
            if count < offset and at >= MAX_SCAN_BYTES:
                message = f"the file's first {MAX_SCAN_BYTES} bytes have {count} lines; use a command such as sed or tail to read further"
                raise FileToolError("too_large", message)
            if len(lines) >= limit or shown_chars > MAX_TEXT_BYTES or (count >= offset and len(rest) > MAX_TEXT_BYTES):
                if not lines and limit:
                    return Lines([rest], offset, None, is_cut=True)
                return Lines(lines, offset, None)
            try:
                piece = yield from FilesApi.get.flow(self, path, start=at, end=at + NEXT_BYTES)
            except errors.RangeNotSatisfiable:
                piece = None
            except errors.CoboxError as error:
                raise to_tool_error(error) from None
            if piece is None or piece.head.etag != first.head.etag:
                raise FileToolError("file_changed", "the file changed while it was being read; read it again")
            data, at = piece.data, at + len(piece.data)

    def write(self, path: str, text: str, *, overwrite: bool, sync: bool) -> Flow[None]:
        try:
            yield from FilesApi.write.flow(self, self.absolute(path), text, create_only=not overwrite, sync=sync)
        except errors.FileChanged:
            raise FileToolError("file_exists") from None
        except errors.CoboxError as error:
            raise to_tool_error(error) from None

    def edit(self, path: str, old: str, new: str, replace_all: bool) -> Flow[int]:
        """Replaces text and returns the number of replacements. The file's line endings are kept, whichever the agent uses."""
        tries = [(old, new)]
        if "\r\n" in old:
            tries.append((old.replace("\r\n", "\n"), new.replace("\r\n", "\n")))
        for one, other in tries:
            try:
                edited: Edited = yield from FsApi.edit.flow(self, self.absolute(path), one, other, replace_all=replace_all)
                return edited.replacements
            except errors.InvalidRequest as error:
                reason = error.details.get("reason")
                if reason == "no_match":
                    continue
                if reason == "not_unique":
                    raise FileToolError("multiple_occurrences") from None
                raise to_tool_error(error) from None
            except errors.CoboxError as error:
                raise to_tool_error(error) from None
        raise FileToolError("string_not_found")

    def glob(self, pattern: str, path: str | None, *, is_basename: bool) -> Flow[tuple[list[tuple[str, FileEntry]], bool]]:
        """Returns the matches with their paths relative to the search root, and whether the result is incomplete. `is_basename`:
        use the rules of deepagents 0.7."""
        # Before 0.7, an absolute pattern starts at the file system root.
        root = "/" if not is_basename and pattern.startswith("/") else self.absolute(path or "/")
        try:
            glob_pattern = GlobPattern(pattern, is_basename=is_basename, expands_braces=is_basename)
        except InvalidPattern as error:
            raise FileToolError(str(error)) from None
        if not glob_pattern.boxd_pattern:
            return [], False
        try:
            hidden = None if glob_pattern.includes_hidden else False
            found = yield from FsApi.glob.flow(self, glob_pattern.boxd_pattern, root, limit=MAX_GLOB_MATCHES, hidden=hidden)
        except errors.CoboxError as error:
            raise to_tool_error(error) from None
        base = root if root.endswith("/") else root + "/"
        matches = []
        links, resolver, real_root = 0, SymlinkResolver(self), None
        for entry in found.matches:
            relative = entry.path[len(base) :] if entry.path.startswith(base) else entry.path.lstrip("/")
            if not relative or not glob_pattern.matches(relative, entry.is_dir):
                continue
            kind = entry.type
            if kind == "symlink":
                links += 1
                kind = (yield from self._kind_behind(entry)) if links <= MAX_LINKS else "unknown"
                if is_basename and kind == "file":
                    # As in 0.7, a symlink to a file outside the search root does not match.
                    real_root = real_root or (yield from resolver.resolve(root))
                    real = yield from resolver.resolve(entry.path_bytes.decode("utf-8", "surrogateescape"))
                    if real_root is None or real is None or not is_beneath(real, real_root):
                        kind = "unknown"
                entry = dataclasses.replace(entry, type=kind)
            if kind == "file" or (not is_basename and kind != "unknown"):
                matches.append((relative, entry))
        return matches, found.truncated or links > MAX_LINKS

    def _kind_behind(self, link: FileEntry) -> Flow[str]:
        """The type of a symlink's target; `unknown` if there is none."""
        try:
            target: FileEntry = yield from FsApi.stat.flow(self, link.path_bytes, follow=True)
        except errors.CoboxError as error:
            to_tool_error(error)
            return "unknown"
        return target.type

    def grep(
        self,
        pattern: str,
        path: str | None,
        glob: str | None,
        *,
        literal: bool = True,
        limit: int | None = None,
        exclude_dirs: tuple[str, ...] = (),
    ) -> Flow[tuple[list[GrepMatch], str | None]]:
        """Returns the lines that match, and the reason if the search stopped early."""
        root = self.absolute(path)
        globs = [f"\\{glob}" if glob.startswith(("!", "#")) else glob] if glob else []
        globs += [f"!**/{name}/" for name in exclude_dirs if name != posixpath.basename(root)]
        if not pattern:
            # As in grep, the empty pattern matches every line.
            pattern, literal = "^", False
        if literal and "\n" in pattern:
            # As in grep, several lines are several patterns.
            pattern, literal = "|".join(re.escape(one) for one in pattern.split("\n")), False
        options: dict[str, Any] = {"literal": literal, "glob": globs or None, "max_line_bytes": MAX_LINE_BYTES}
        # Zero is not a valid limit for boxd; asking for one match shows whether there is any.
        options["max_matches"] = max(1, min(limit, MAX_GREP_MATCHES)) if limit is not None else MAX_GREP_MATCHES
        try:
            found = yield from FsApi.grep.flow(self, pattern, root, **options)
        except errors.InvalidRequest as error:
            if "pattern" in error.message or "glob" in error.message:
                raise FileToolError("invalid_pattern", error.message) from None
            raise to_tool_error(error) from None
        except errors.CoboxError as error:
            raise to_tool_error(error) from None
        if limit is not None and limit <= 0:
            return [], "max_matches" if found.matches else None
        return found.matches, (found.stopped_by or "max_matches") if found.truncated else None

    def remove(self, path: str) -> Flow[None]:
        try:
            yield from FsApi.remove.flow(self, self.absolute(path), recursive=True)
        except errors.CoboxError as error:
            raise to_tool_error(error) from None

    def upload(self, files: list[tuple[str, bytes]], sync: bool) -> Flow[list[str | None]]:
        """Writes files; returns the error code or None for each."""
        results: list[str | None] = [None if _is_plain(path) else "invalid_path" for path, _ in files]
        good = [at for at, result in enumerate(results) if result is None]
        if good:
            try:
                done = yield from FilesApi.upload.flow(self, [files[at] for at in good], sync=sync)
            except errors.CoboxError as error:
                code = to_tool_error(error).message
                return [result or code for result in results]
            for at, one in zip(good, done, strict=True):
                results[at] = None if one.failure is None else to_tool_error(one.failure).code
        return results

    def download(self, paths: list[str]) -> Flow[list[bytes | str]]:
        """Reads files; returns the content or the error code for each."""
        results: list[bytes | str] = ["" if _is_plain(path) else "invalid_path" for path in paths]
        good = [at for at, result in enumerate(results) if not result]
        if good:
            try:
                done = yield from FilesApi.download.flow(self, [paths[at] for at in good])
            except errors.TooLong:
                # Together, or one of them alone, they exceed the memory limit.
                for at in good:
                    results[at] = "too_large" if len(good) == 1 else (yield from self.download([paths[at]]))[0]
                return results
            except errors.CoboxError as error:
                code = to_tool_error(error).message
                return [result or code for result in results]
            for at, one in zip(good, done, strict=True):
                results[at] = to_tool_error(one.failure).code if one.failure is not None else one.data or b""
        return results

    def execute(self, command: str, **options: Any) -> Flow[Any]:
        return SessionApi.exec.flow(self, command, **options)

    def has_program(self, path: str) -> Flow[bool]:
        try:
            found: FileEntry = yield from FsApi.stat.flow(self, path, follow=True)
        except errors.CoboxError as error:
            to_tool_error(error)
            return False
        return found.type == "file"

    # The public flows only need an object with a `_grant`.
    _call = FsApi._call


def _is_plain(path: str) -> bool:
    return path.startswith("/") and "\0" not in path and ".." not in path.split("/")


def _is_utf8(data: bytes, is_whole: bool) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final=is_whole)
    except UnicodeDecodeError:
        return False
    return True


def _binary(data: bytes, size: int) -> Binary:
    if size > MAX_BINARY_BYTES:
        raise FileToolError("too_large", f"Binary file exceeds maximum preview size of {MAX_BINARY_BYTES} bytes")
    return Binary(data)


class _Decoder:
    """Decodes chunks of bytes to text with uniform line endings; a chunk may end within a character or a line ending."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = ""

    def decode(self, data: bytes, *, is_last: bool) -> str:
        text, self._half = self._half + self._decoder.decode(data, final=is_last), ""
        if text.endswith("\r") and not is_last:
            text, self._half = text[:-1], "\r"
        return text.replace("\r\n", "\n").replace("\r", "\n")


def _after(text: str, ends: int) -> str:
    """The text after the given number of line endings."""
    at = 0
    for _ in range(ends):
        at = text.index("\n", at) + 1
    return text[at:]


def _split_lines(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
