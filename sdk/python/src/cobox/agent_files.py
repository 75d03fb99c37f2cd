"""What agents' file tools ask of a sandbox, as flows over boxd's own routes: shared by the backends for deepagents and for older code.

Errors an agent can do something about are `Refusal`s, in the words its tools know; others (no connection, no leave) are raised.
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
from .answers import Edited, FileContent, FileEntry, GrepMatch
from .files import FilesApi
from .flow import Flow
from .fs import FsApi
from .globbing import BadPattern, Pattern
from .grant import Grant
from .links import Links, is_beneath
from .session_api import SessionApi

# Where relative paths begin: the folder that human and agent share.
WORK_DIR = "/workspace"
# Entries of one page of a directory, and of all pages.
LIST_PAGE, MAX_ENTRIES = 10_000, 200_000
# Most that a search finds: boxd's own limits.
MAX_GLOB_MATCHES, MAX_GREP_MATCHES, MAX_LINE_BYTES = 10_000, 100_000, 64 * 1024
# Links that a glob looks behind, to see whether they lead to files.
MAX_LINKS = 200
# Fetched at once of a file that is shown by lines; the first piece is all of most files.
FIRST_BYTES, NEXT_BYTES = 1024 * 1024, 8 * 1024 * 1024
# Longest file that isn't text and is shown, in base64; longest text shown at once. As deepagents has them.
MAX_BINARY_BYTES = MAX_TEXT_BYTES = 500 * 1024
# Of a file whose lines are only counted, to come to the one that is asked for: some seconds' worth, however long the file says it is.
MAX_SCAN_BYTES = 1024 * 1024 * 1024
# Looked at to tell text from other files.
SNIFF_BYTES = 8192


class Refusal(Exception):
    """An agent's mistake, or its bad luck: `code` is deepagents' word for it, such as `file_not_found`, where it has one."""

    def __init__(self, code: str, message: str | None = None) -> None:
        super().__init__(message or code)
        self.code, self.message = code, message or code


@dataclass(frozen=True)
class Binary:
    data: bytes


@dataclass(frozen=True)
class Lines:
    """Some lines of a text. `start` counts from 0; `total` is None where nobody looked so far."""

    lines: list[str]
    start: int
    total: int | None
    # The first line alone was longer than what is shown.
    is_cut: bool = False

    @property
    def has_more(self) -> bool:
        return self.total is None or self.start + len(self.lines) < self.total


def refusal(error: errors.CoboxError) -> Refusal:
    """What an error of boxd's means to an agent; the error itself is raised where it means nothing."""
    if isinstance(error, errors.FileNotFound):
        return Refusal("file_not_found")
    if isinstance(error, errors.CapabilityDenied):
        return Refusal("permission_denied", str(error))
    if isinstance(error, errors.Forbidden):
        return Refusal("permission_denied")
    if isinstance(error, errors.InvalidPath):
        return Refusal("invalid_path")
    if isinstance(error, errors.InvalidText):
        return Refusal("invalid_text", error.message)
    if isinstance(error, errors.InvalidRequest):
        kind = error.details.get("kind")
        if kind == "directory" or "it is a directory" in error.message:
            return Refusal("is_directory")
        if kind is not None:
            return Refusal("not_a_file")
        if "not a directory" in error.message:
            return Refusal("not_a_directory")
        return Refusal("invalid_path", error.message)
    if isinstance(error, (errors.FileChanged, errors.TooLarge, errors.DiskFull, errors.FileExists)):
        return Refusal(error.code.lower(), str(error))
    raise error


class AgentFiles:
    def __init__(self, grant: Grant, work_dir: str = WORK_DIR) -> None:
        self._grant = grant
        self._work_dir = work_dir

    def absolute(self, path: str | None) -> str:
        """As it is meant: from the shared folder where it is relative, and without `..`, which no URL carries."""
        joined = posixpath.join(self._work_dir, path or "")
        return posixpath.normpath(joined) if ".." in joined.split("/") else joined.rstrip("/") or "/"

    def entries(self, path: str) -> Flow[list[FileEntry]]:
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
            raise refusal(error) from None

    def page(self, path: str, offset: int, limit: int, is_text: bool) -> Flow[Lines | Binary | None]:
        """Lines of a text, or all of another file; None where it is empty. `is_text`: by its name it should be."""
        offset, limit, path = max(0, int(offset)), max(0, int(limit)), self.absolute(path)
        try:
            first: FileContent | None = yield from FilesApi.get.flow(self, path, end=FIRST_BYTES)
        except errors.RangeNotSatisfiable:
            return None  # Of an empty file there is no first byte.
        except errors.CoboxError as error:
            raise refusal(error) from None
        if first is None or not first.data:
            return None
        size = max(first.head.size, len(first.data))
        if not is_text or not _is_utf8(first.data[:SNIFF_BYTES], is_whole=size <= SNIFF_BYTES):
            return _binary(first.data, size)
        if size <= len(first.data):
            try:
                lines = _split(first.data.decode())
            except UnicodeDecodeError:
                return _binary(first.data, size)
            return Lines(lines[offset : offset + limit], offset, len(lines))
        return (yield from self._far_page(path, first, size, offset, limit))

    def _far_page(self, path: str, first: FileContent, size: int, offset: int, limit: int) -> Flow[Lines]:
        """Of a long file no more is fetched than up to the last line asked for, and no more is kept than is shown."""
        decoder = _Decoder()
        lines: list[str] = []
        shown = 0
        count, at, data, rest = 0, len(first.data), first.data, ""
        # Of a line before the first one asked for nothing is kept but that it has begun.
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
                    if len(lines) < limit and shown <= MAX_TEXT_BYTES:
                        lines.append(line)
                        shown += len(line)
                    count += 1
                rest += last
                is_begun = bool(rest)
            if at >= size:
                if is_begun and count >= offset and len(lines) < limit and shown <= MAX_TEXT_BYTES:
                    lines.append(rest)
                return Lines(lines, offset, count + is_begun)
            if count < offset and at >= MAX_SCAN_BYTES:
                told = f"the file's first {MAX_SCAN_BYTES} bytes have {count} lines; look further with a command such as sed or tail"
                raise Refusal("too_large", told)
            if len(lines) >= limit or shown > MAX_TEXT_BYTES or (count >= offset and len(rest) > MAX_TEXT_BYTES):
                if not lines and limit:
                    return Lines([rest], offset, None, is_cut=True)
                return Lines(lines, offset, None)
            try:
                piece = yield from FilesApi.get.flow(self, path, start=at, end=at + NEXT_BYTES)
            except errors.RangeNotSatisfiable:
                piece = None
            except errors.CoboxError as error:
                raise refusal(error) from None
            if piece is None or piece.head.etag != first.head.etag:
                raise Refusal("file_changed", "the file was changed while it was read; read it again")
            data, at = piece.data, at + len(piece.data)

    def create(self, path: str, text: str, *, overwrite: bool, sync: bool) -> Flow[None]:
        try:
            yield from FilesApi.write.flow(self, self.absolute(path), text, create_only=not overwrite, sync=sync)
        except errors.FileChanged:
            raise Refusal("file_exists") from None
        except errors.CoboxError as error:
            raise refusal(error) from None

    def replace(self, path: str, old: str, new: str, replace_all: bool) -> Flow[int]:
        """How many were replaced. A file's own line ends are kept, however the agent writes them."""
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
                    raise Refusal("multiple_occurrences") from None
                raise refusal(error) from None
            except errors.CoboxError as error:
                raise refusal(error) from None
        raise Refusal("string_not_found")

    def find(self, pattern: str, path: str | None, *, is_basename: bool) -> Flow[tuple[list[tuple[str, FileEntry]], bool]]:
        """What matches, with its path from the search root, and whether that is not all. `is_basename`: by the rules of 0.7."""
        # An absolute pattern of old times began at the root of everything.
        root = "/" if not is_basename and pattern.startswith("/") else self.absolute(path or "/")
        try:
            meant = Pattern(pattern, is_basename=is_basename, expands=is_basename)
        except BadPattern as error:
            raise Refusal(str(error)) from None
        if not meant.asked:
            return [], False
        try:
            hidden = None if meant.hidden else False
            found = yield from FsApi.glob.flow(self, meant.asked, root, limit=MAX_GLOB_MATCHES, hidden=hidden)
        except errors.CoboxError as error:
            raise refusal(error) from None
        base = root if root.endswith("/") else root + "/"
        matches = []
        links, ways, real_root = 0, Links(self), None
        for entry in found.matches:
            relative = entry.path[len(base) :] if entry.path.startswith(base) else entry.path.lstrip("/")
            if not relative or not meant.matches(relative, entry.is_dir):
                continue
            kind = entry.type
            if kind == "symlink":
                links += 1
                kind = (yield from self._kind_behind(entry)) if links <= MAX_LINKS else "unknown"
                if is_basename and kind == "file":
                    # As 0.7 has it, what lies elsewhere is not found here by a link to it.
                    real_root = real_root or (yield from ways.real(root))
                    real = yield from ways.real(entry.path_bytes.decode("utf-8", "surrogateescape"))
                    if real_root is None or real is None or not is_beneath(real, real_root):
                        kind = "unknown"
                entry = dataclasses.replace(entry, type=kind)
            if kind == "file" or (not is_basename and kind != "unknown"):
                matches.append((relative, entry))
        return matches, found.truncated or links > MAX_LINKS

    def _kind_behind(self, link: FileEntry) -> Flow[str]:
        """What a link leads to; `unknown` where that is nothing."""
        try:
            target: FileEntry = yield from FsApi.stat.flow(self, link.path_bytes, follow=True)
        except errors.CoboxError as error:
            refusal(error)
            return "unknown"
        return target.type

    def search(
        self,
        pattern: str,
        path: str | None,
        glob: str | None,
        *,
        literal: bool = True,
        limit: int | None = None,
        exclude_dirs: tuple[str, ...] = (),
    ) -> Flow[tuple[list[GrepMatch], str | None]]:
        """Lines with the pattern in them, and what stopped the search before its end, if anything did."""
        root = self.absolute(path)
        globs = [f"\\{glob}" if glob.startswith(("!", "#")) else glob] if glob else []
        globs += [f"!**/{name}/" for name in exclude_dirs if name != posixpath.basename(root)]
        if not pattern:
            # As grep has it: nothing is in every line.
            pattern, literal = "^", False
        if literal and "\n" in pattern:
            # As grep has it: several lines are several patterns.
            pattern, literal = "|".join(re.escape(one) for one in pattern.split("\n")), False
        asked: dict[str, Any] = {"literal": literal, "glob": globs or None, "max_line_bytes": MAX_LINE_BYTES}
        # None at all is not a number to ask for: one more tells whether there is any.
        asked["max_matches"] = max(1, min(limit, MAX_GREP_MATCHES)) if limit is not None else MAX_GREP_MATCHES
        try:
            found = yield from FsApi.grep.flow(self, pattern, root, **asked)
        except errors.InvalidRequest as error:
            if "pattern" in error.message or "glob" in error.message:
                raise Refusal("invalid_pattern", error.message) from None
            raise refusal(error) from None
        except errors.CoboxError as error:
            raise refusal(error) from None
        if limit is not None and limit <= 0:
            return [], "max_matches" if found.matches else None
        return found.matches, (found.stopped_by or "max_matches") if found.truncated else None

    def remove(self, path: str) -> Flow[None]:
        try:
            yield from FsApi.remove.flow(self, self.absolute(path), recursive=True)
        except errors.CoboxError as error:
            raise refusal(error) from None

    def put(self, files: list[tuple[str, bytes]], sync: bool) -> Flow[list[str | None]]:
        """For each file why it was not written, or None."""
        results: list[str | None] = [None if _is_plain(path) else "invalid_path" for path, _ in files]
        good = [at for at, result in enumerate(results) if result is None]
        if good:
            try:
                done = yield from FilesApi.upload.flow(self, [files[at] for at in good], sync=sync)
            except errors.CoboxError as error:
                code = refusal(error).message
                return [result or code for result in results]
            for at, one in zip(good, done, strict=True):
                results[at] = None if one.failure is None else refusal(one.failure).code
        return results

    def take(self, paths: list[str]) -> Flow[list[bytes | str]]:
        """For each file its bytes, or why it could not be read."""
        results: list[bytes | str] = ["" if _is_plain(path) else "invalid_path" for path in paths]
        good = [at for at, result in enumerate(results) if not result]
        if good:
            try:
                done = yield from FilesApi.download.flow(self, [paths[at] for at in good])
            except errors.TooLong:
                # All of them, or one alone, are more than fits into memory.
                for at in good:
                    results[at] = "too_large" if len(good) == 1 else (yield from self.take([paths[at]]))[0]
                return results
            except errors.CoboxError as error:
                code = refusal(error).message
                return [result or code for result in results]
            for at, one in zip(good, done, strict=True):
                results[at] = refusal(one.failure).code if one.failure is not None else one.data or b""
        return results

    def run(self, command: str, **asked: Any) -> Flow[Any]:
        return SessionApi.exec.flow(self, command, **asked)

    def has_program(self, path: str) -> Flow[bool]:
        try:
            found: FileEntry = yield from FsApi.stat.flow(self, path, follow=True)
        except errors.CoboxError as error:
            refusal(error)
            return False
        return found.type == "file"

    # The public flows are functions of anything that has a grant.
    _ask = FsApi._ask


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
        raise Refusal("too_large", f"Binary file exceeds maximum preview size of {MAX_BINARY_BYTES} bytes")
    return Binary(data)


class _Decoder:
    """Bytes as they come, as text whose lines all end alike; a character or a line's end may be cut in two by a piece's end."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = ""

    def decode(self, data: bytes, *, is_last: bool) -> str:
        text, self._half = self._half + self._decoder.decode(data, final=is_last), ""
        if text.endswith("\r") and not is_last:
            text, self._half = text[:-1], "\r"
        return text.replace("\r\n", "\n").replace("\r", "\n")


def _after(text: str, ends: int) -> str:
    """What comes after so many ends of lines."""
    at = 0
    for _ in range(ends):
        at = text.index("\n", at) + 1
    return text[at:]


def _split(text: str) -> list[str]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
