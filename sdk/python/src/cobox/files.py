"""`session.files`: reads and writes files, whole, in part, as a stream, in batches, or a directory as an archive."""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from . import errors, multipart
from .awaitable_context import AwaitableContext
from .call import Backoff, Call, open_stream, perform, without_none
from .decode import decode
from .effects import CloseResponse, Flow, OpenedResponse, ReadChunk, Sleep, UsesAsyncIO, UsesBlockingIO, method
from .grant import Grant
from .paths import SandboxPath, as_bytes, query_value, url_path
from .request_body import Content, RequestBody, encode_utf8
from .responses import Downloaded, FileContent, FileHead, FileWritten, Unpacked, Uploaded, UploadResult

T = TypeVar("T")
# Default limit of a file read into memory; `open` streams files of any size.
MAX_READ_BYTES = 256 * 1024 * 1024
# Limits of one batch request: paths are in its URL, files in its body.
MAX_PATHS, MAX_PATHS_CHARS = 500, 6000
MAX_UPLOAD_FILES, MAX_UPLOAD_BYTES = 1000, 64 * 1024 * 1024
# Seconds; disks may be slow and archives large.
TRANSFER_TIMEOUT, ARCHIVE_TIMEOUT = 600.0, 3600.0
READ_TIMEOUT = 60.0
# Maximum number of times an interrupted download is resumed, each time at the current offset.
RESUMES = 8
TAR, TAR_ZSTD = "application/x-tar", "application/x-tar+zstd"


def file_head(path: str, headers: Mapping[str, str], size: int) -> FileHead:
    return FileHead(path, size, headers.get("etag", ""), headers.get("x-file-mode"), headers.get("last-modified"))


def total_size(headers: Mapping[str, str]) -> int:
    """The size of the whole file, also in a partial response."""
    total = headers.get("content-range", "").rpartition("/")[2] or headers.get("content-length", "")
    return int(total) if total.isdigit() and len(total) < 20 else 0


def range_header(start: int, end: int | None) -> tuple[tuple[str, str], ...]:
    """The Range header for bytes from `start` up to but excluding `end`."""
    if start == 0 and end is None:
        return ()
    if start < 0 or (end is not None and end <= start):
        raise ValueError("the range must start at 0 or more and end after its start")
    return (("range", f"bytes={start}-{'' if end is None else end - 1}"),)


class FilesApi:
    """Paths are absolute. A write is atomic, and on disk before the call returns."""

    _grant: Grant

    @method
    def get(
        self,
        path: SandboxPath,
        *,
        start: int = 0,
        end: int | None = None,
        if_none_match: str | None = None,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Flow[FileContent | None]:
        """Returns a file with its etag, or its bytes from `start` to `end`; None if it still matches `if_none_match`."""
        headers = range_header(start, end) + ((("if-none-match", if_none_match),) if if_none_match else ())
        call = Call(
            "GET",
            f"/files{url_path(path)}",
            headers=headers,
            timeout=TRANSFER_TIMEOUT,
            read_timeout=READ_TIMEOUT,
            max_bytes=max_bytes,
            accepted_statuses=(304,),
        )
        response = yield from perform(self._grant, call)
        if response.status == 304:
            return None
        return FileContent(file_head(os.fsdecode(as_bytes(path)), response.headers, total_size(response.headers)), response.body)

    @method
    def read(self, path: SandboxPath, *, start: int = 0, end: int | None = None, max_bytes: int = MAX_READ_BYTES) -> Flow[bytes]:
        """Returns a file's bytes, or those from `start` to `end`."""
        content = yield from FilesApi.get.flow(self, path, start=start, end=end, max_bytes=max_bytes)
        return content.data if content is not None else b""

    @method
    def read_text(self, path: SandboxPath, *, encoding: str = "utf-8", errors: str = "strict") -> Flow[str]:
        """Returns a file's text."""
        data = yield from FilesApi.read.flow(self, path)
        return data.decode(encoding, errors)

    @method
    def head(self, path: SandboxPath) -> Flow[FileHead]:
        """Returns a file's size, etag, mode and modification time."""
        response = yield from perform(self._grant, Call("HEAD", f"/files{url_path(path)}", accepted_statuses=(400, 403, 404)))
        if response.status >= 400:
            # The error response to HEAD has no body; a GET of the first byte returns the reason.
            response = yield from perform(
                self._grant, Call("GET", f"/files{url_path(path)}", headers=(("range", "bytes=0-0"),), accepted_statuses=(416,))
            )
        return file_head(os.fsdecode(as_bytes(path)), response.headers, total_size(response.headers))

    @method
    def write(
        self,
        path: SandboxPath,
        content: Content,
        *,
        mode: str | None = None,
        if_match: str | None = None,
        create_only: bool = False,
        sync: bool = True,
    ) -> Flow[FileWritten]:
        """Writes a file and creates its parent directories. `if_match`: only if this is the current version; `create_only`: only
        if the file does not exist (`FileChanged` otherwise). `sync=False` does not wait for the disk."""
        headers = [*present_headers({"x-file-mode": mode, "if-match": if_match, "if-none-match": "*" if create_only else None})]
        headers.append(("content-type", "application/octet-stream"))
        call = Call(
            "PUT",
            f"/files{url_path(path)}",
            body=RequestBody(content),
            query=() if sync else (("sync", "false"),),
            headers=tuple(headers),
            # With a condition, a retry would conflict with the first attempt's own write.
            is_repeatable=if_match is None and not create_only,
            timeout=TRANSFER_TIMEOUT,
        )
        response = yield from perform(self._grant, call)
        return decode(FileWritten, response.body, self._grant.base)

    @method
    def delete(self, path: SandboxPath, *, if_match: str | None = None) -> Flow[None]:
        """Deletes a file, a symlink itself, or an empty directory. `fs.remove` deletes whole trees."""
        headers = tuple(present_headers({"if-match": if_match}))
        yield from perform(self._grant, Call("DELETE", f"/files{url_path(path)}", headers=headers, is_repeatable=False))

    @method
    def upload(self, files: Sequence[tuple[SandboxPath, bytes | str]], *, sync: bool = True) -> Flow[list[Uploaded]]:
        """Writes many files in few requests. Returns one result per file, in order; `failure` is set if a file was not written."""
        remaining = [(as_bytes(path), encode_utf8(content) if isinstance(content, str) else bytes(content)) for path, content in files]
        results: list[Uploaded] = []
        while remaining:
            batch = [remaining.pop(0)]
            size = len(batch[0][1])
            while remaining and len(batch) < MAX_UPLOAD_FILES and size + len(remaining[0][1]) <= MAX_UPLOAD_BYTES:
                size += len(remaining[0][1])
                batch.append(remaining.pop(0))
            content_type, pieces = multipart.encode(batch)
            query = () if sync else (("sync", "false"),)
            call = Call(
                "POST",
                "/files/upload",
                body=RequestBody(pieces),
                query=query,
                headers=(("content-type", content_type),),
                timeout=TRANSFER_TIMEOUT,
            )
            response = yield from perform(self._grant, call)
            uploaded = decode(UploadResult, response.body, self._grant.base).files
            if len(uploaded) != len(batch):
                raise errors.NotCobox(f"{len(batch)} files were uploaded, but the response lists {len(uploaded)}")
            results += uploaded
        return results

    @method
    def download(self, paths: Sequence[SandboxPath], *, max_bytes: int = MAX_READ_BYTES) -> Flow[list[Downloaded]]:
        """Reads many files in few requests. Returns one result per file, in order; `failure` is set if a file could not be read."""
        remaining = [query_value(path) for path in paths]
        results: list[Downloaded] = []
        while remaining:
            batch = [remaining.pop(0)]
            while remaining and len(batch) < MAX_PATHS and sum(map(len, batch)) + len(remaining[0]) < MAX_PATHS_CHARS:
                batch.append(remaining.pop(0))
            query = "&".join(f"path={path}" for path in batch)
            call = Call("GET", f"/files/download?{query}", timeout=TRANSFER_TIMEOUT, read_timeout=READ_TIMEOUT, max_bytes=max_bytes)
            response = yield from perform(self._grant, call)
            downloaded = multipart.decode(response.headers.get("content-type", ""), response.body)
            if len(downloaded) != len(batch):
                raise errors.NotCobox(f"{len(batch)} files were requested, but the response contains {len(downloaded)}")
            results += downloaded
        return results

    @method
    def unpack(
        self, path: SandboxPath, archive: Content, *, zstd: bool = False, links: Literal["inside", "any"] = "inside"
    ) -> Flow[Unpacked]:
        """Unpacks a tar archive into a directory. An archive with symlinks that lead out of it is refused, unless `links` is
        `any`."""
        headers = (("content-type", TAR_ZSTD if zstd else TAR),)
        target = f"/archive?path={query_value(path)}" + ("" if links == "inside" else f"&links={links}")
        call = Call("PUT", target, body=RequestBody(archive), headers=headers, is_repeatable=False, timeout=ARCHIVE_TIMEOUT)
        response = yield from perform(self._grant, call)
        return decode(Unpacked, response.body, self._grant.base)


def present_headers(headers: Mapping[str, str | None]) -> list[tuple[str, str]]:
    return [*without_none(**headers).items()]


class ReaderApi:
    """A stream of bytes. For a file, a lost connection is resumed at the current offset if the file has not changed."""

    def __init__(self, grant: Grant, io: Any, call: Call, path: SandboxPath, start: int, end: int | None, is_file: bool) -> None:
        self._grant, self._io, self._call = grant, io, call
        self._path, self._at, self._end, self._is_file = path, start, end, is_file
        self._opened: OpenedResponse | None = None
        self._left: int | None = None
        self.head: FileHead | None = None

    @method
    def begin(self) -> Flow[None]:
        """Sends the request; called by the method that opens the stream."""
        headers = self._call.headers
        if self._is_file:
            headers += range_header(self._at, self._end)
            if self.head is not None:
                headers += (("if-match", self.head.etag),)
        call = Call(self._call.method, self._call.path, headers=headers, timeout=self._call.timeout, read_timeout=READ_TIMEOUT)
        self._opened = yield from open_stream(self._grant, call)
        length = self._opened.headers.get("content-length", "")
        self._left = int(length) if length.isdigit() and len(length) < 20 else None
        if self.head is None:
            self.head = file_head(os.fsdecode(as_bytes(self._path)), self._opened.headers, total_size(self._opened.headers))

    @method
    def piece(self) -> Flow[bytes]:
        """The next bytes; `b""` at the end."""
        waits, tries = Backoff(), 0
        while self._opened is not None:
            try:
                piece: bytes = yield ReadChunk(self._opened)
                if not piece and self._left:
                    raise errors.Broken(f"the connection ended {self._left} bytes early")
            except errors.Broken as lost:
                tries += 1
                yield CloseResponse(self._opened)
                if not self._is_file or tries > RESUMES:
                    self._opened = None
                    raise lost
                yield Sleep(waits.next())
                yield from ReaderApi.begin.flow(self)
                continue
            self._at += len(piece)
            if self._left is not None:
                self._left -= len(piece)
            if not piece:
                yield from ReaderApi.close.flow(self)
            return piece
        return b""

    @method
    def close(self) -> Flow[None]:
        """Stops reading."""
        opened, self._opened = self._opened, None
        if opened is not None:
            yield CloseResponse(opened)


class Reader(ReaderApi, UsesBlockingIO):
    """A file or an archive as a stream: iterate over it, or `read()` the rest."""

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.piece():
            yield piece

    def read(self) -> bytes:
        return b"".join(self)

    def save(self, file: str | os.PathLike[str]) -> int:
        """Saves to a local file; returns the number of bytes."""
        with open(file, "wb") as opened:
            return sum(opened.write(piece) for piece in self)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class AsyncReader(ReaderApi, UsesAsyncIO):
    """A file or an archive as a stream: iterate over it, or `await read()` the rest."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self.piece():
            yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self])

    async def save(self, file: str | os.PathLike[str]) -> int:
        """Saves to a local file; returns the number of bytes."""
        size = 0
        opened = await asyncio.to_thread(open, file, "wb")
        with opened:
            async for piece in self:
                size += await asyncio.to_thread(opened.write, piece)
        return size

    async def __aenter__(self) -> AsyncReader:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()


def file_call(path: SandboxPath) -> Call:
    return Call("GET", f"/files{url_path(path)}", timeout=TRANSFER_TIMEOUT)


def archive_call(path: SandboxPath, zstd: bool) -> Call:
    return Call("GET", f"/archive?path={query_value(path)}", headers=(("accept", TAR_ZSTD if zstd else TAR),), timeout=ARCHIVE_TIMEOUT)


class Files(FilesApi, UsesBlockingIO):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io

    def open(self, path: SandboxPath, *, start: int = 0, end: int | None = None) -> Reader:
        """Opens a file as a stream, which survives lost connections."""
        reader = Reader(self._grant, self._io, file_call(path), path, start, end, is_file=True)
        reader.begin()
        return reader

    def archive(self, path: SandboxPath, *, zstd: bool = False) -> Reader:
        """Streams a directory or a file as a tar archive."""
        reader = Reader(self._grant, self._io, archive_call(path, zstd), path, 0, None, is_file=False)
        reader.begin()
        return reader


class AsyncFiles(FilesApi, UsesAsyncIO):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io

    def open(self, path: SandboxPath, *, start: int = 0, end: int | None = None) -> AwaitableContext[AsyncReader, bytes]:
        """Opens a file as a stream, which survives lost connections: use `async with`, `async for` or `await`."""
        reader = AsyncReader(self._grant, self._io, file_call(path), path, start, end, is_file=True)
        return AwaitableContext(reader, reader.begin)

    def archive(self, path: SandboxPath, *, zstd: bool = False) -> AwaitableContext[AsyncReader, bytes]:
        """Streams a directory or a file as a tar archive."""
        reader = AsyncReader(self._grant, self._io, archive_call(path, zstd), path, 0, None, is_file=False)
        return AwaitableContext(reader, reader.begin)
