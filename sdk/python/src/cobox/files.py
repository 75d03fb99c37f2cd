"""`session.files`: the bytes of files, whole, in part, as a stream, many at once, or a directory as an archive."""

from __future__ import annotations

import asyncio
import os
import types
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from . import errors, multipart
from .answers import Downloaded, FileContent, FileHead, FileWritten, Unpacked, Uploaded, UploadResult
from .body import Content, Upload, in_utf8
from .call import Backoff, Call, open_stream, perform, wanted
from .decode import decode
from .flow import Awaiting, Blocking, Drop, Flow, Opened, Pause, Pull, method
from .grant import Grant
from .opening import Opening
from .paths import SandboxPath, as_bytes, in_query, in_url

T = TypeVar("T")
# Largest file that `read` holds in memory unless told; `open` streams any.
MAX_READ_BYTES = 256 * 1024 * 1024
# Of one request for many files: paths stand in its head, files in its body.
MAX_PATHS, MAX_PATHS_CHARS = 500, 6000
MAX_UPLOAD_FILES, MAX_UPLOAD_BYTES = 1000, 64 * 1024 * 1024
# Seconds: a disk may be slow, an archive large.
TRANSFER_TIMEOUT, ARCHIVE_TIMEOUT = 600.0, 3600.0
SILENCE = 60.0
# Tries to go on with a stream that broke off, each from the byte it had come to.
RESUMES = 8
TAR, TAR_ZSTD = "application/x-tar", "application/x-tar+zstd"


def head_of(path: str, headers: Mapping[str, str], size: int) -> FileHead:
    return FileHead(path, size, headers.get("etag", ""), headers.get("x-file-mode"), headers.get("last-modified"))


def size_of(headers: Mapping[str, str]) -> int:
    """Of the whole file, also where a part of it is answered."""
    total = headers.get("content-range", "").rpartition("/")[2] or headers.get("content-length", "")
    return int(total) if total.isdigit() and len(total) < 20 else 0


def in_range(start: int, end: int | None) -> tuple[tuple[str, str], ...]:
    """Bytes from `start` up to but without `end`."""
    if start == 0 and end is None:
        return ()
    if start < 0 or (end is not None and end <= start):
        raise ValueError("a range has a start of 0 or more, and an end behind it")
    return (("range", f"bytes={start}-{'' if end is None else end - 1}"),)


class FilesApi:
    """Paths are absolute in the sandbox. A write is whole or not at all, and on the disk when it is answered."""

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
        """A file with its etag, or the bytes from `start` up to `end`; None where it still is the one of `if_none_match`."""
        headers = in_range(start, end) + ((("if-none-match", if_none_match),) if if_none_match else ())
        call = Call(
            "GET", f"/files{in_url(path)}", headers=headers, timeout=TRANSFER_TIMEOUT, silence=SILENCE, max_bytes=max_bytes, takes=(304,)
        )
        answer = yield from perform(self._grant, call)
        if answer.status == 304:
            return None
        return FileContent(head_of(os.fsdecode(as_bytes(path)), answer.headers, size_of(answer.headers)), answer.body)

    @method
    def read(self, path: SandboxPath, *, start: int = 0, end: int | None = None, max_bytes: int = MAX_READ_BYTES) -> Flow[bytes]:
        """A file's bytes, or those from `start` up to `end`."""
        content = yield from FilesApi.get.flow(self, path, start=start, end=end, max_bytes=max_bytes)
        return content.data if content is not None else b""

    @method
    def read_text(self, path: SandboxPath, *, encoding: str = "utf-8", errors: str = "strict") -> Flow[str]:
        """A file's text."""
        data = yield from FilesApi.read.flow(self, path)
        return data.decode(encoding, errors)

    @method
    def head(self, path: SandboxPath) -> Flow[FileHead]:
        """A file's size, etag, mode and time."""
        answer = yield from perform(self._grant, Call("HEAD", f"/files{in_url(path)}", takes=(400, 403, 404)))
        if answer.status >= 400:
            # A HEAD's refusal has no body to say why; the same question with a body has.
            answer = yield from perform(self._grant, Call("GET", f"/files{in_url(path)}", headers=(("range", "bytes=0-0"),), takes=(416,)))
        return head_of(os.fsdecode(as_bytes(path)), answer.headers, size_of(answer.headers))

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
        """Writes a file and makes the directories above it. `if_match`: only over that version; `create_only`: only where none is
        (`FileChanged` otherwise). `sync=False` doesn't wait for the disk."""
        headers = [*wanted_headers({"x-file-mode": mode, "if-match": if_match, "if-none-match": "*" if create_only else None})]
        headers.append(("content-type", "application/octet-stream"))
        call = Call(
            "PUT",
            f"/files{in_url(path)}",
            body=Upload(content),
            query=() if sync else (("sync", "false"),),
            headers=tuple(headers),
            # With a condition the second try would meet the first one's work.
            is_repeatable=if_match is None and not create_only,
            timeout=TRANSFER_TIMEOUT,
        )
        answer = yield from perform(self._grant, call)
        return decode(FileWritten, answer.body, self._grant.base)

    @method
    def delete(self, path: SandboxPath, *, if_match: str | None = None) -> Flow[None]:
        """Deletes a file, a link itself, or an empty directory. `fs.remove` takes whole trees."""
        headers = tuple(wanted_headers({"if-match": if_match}))
        yield from perform(self._grant, Call("DELETE", f"/files{in_url(path)}", headers=headers, is_repeatable=False))

    @method
    def upload(self, files: Sequence[tuple[SandboxPath, bytes | str]], *, sync: bool = True) -> Flow[list[Uploaded]]:
        """Writes many files, in few requests. One result each, in order; `failure` says why one was not written."""
        waiting = [(as_bytes(path), in_utf8(content) if isinstance(content, str) else bytes(content)) for path, content in files]
        results: list[Uploaded] = []
        while waiting:
            batch = [waiting.pop(0)]
            size = len(batch[0][1])
            while waiting and len(batch) < MAX_UPLOAD_FILES and size + len(waiting[0][1]) <= MAX_UPLOAD_BYTES:
                size += len(waiting[0][1])
                batch.append(waiting.pop(0))
            content_type, pieces = multipart.written(batch)
            query = () if sync else (("sync", "false"),)
            call = Call(
                "POST",
                "/files/upload",
                body=Upload(pieces),
                query=query,
                headers=(("content-type", content_type),),
                timeout=TRANSFER_TIMEOUT,
            )
            answer = yield from perform(self._grant, call)
            told = decode(UploadResult, answer.body, self._grant.base).files
            if len(told) != len(batch):
                raise errors.NotCobox(f"of {len(batch)} uploaded files {len(told)} were answered")
            results += told
        return results

    @method
    def download(self, paths: Sequence[SandboxPath], *, max_bytes: int = MAX_READ_BYTES) -> Flow[list[Downloaded]]:
        """Reads many files, in few requests. One result each, in order; `failure` says why one could not be read."""
        waiting = [in_query(path) for path in paths]
        results: list[Downloaded] = []
        while waiting:
            batch = [waiting.pop(0)]
            while waiting and len(batch) < MAX_PATHS and sum(map(len, batch)) + len(waiting[0]) < MAX_PATHS_CHARS:
                batch.append(waiting.pop(0))
            query = "&".join(f"path={path}" for path in batch)
            call = Call("GET", f"/files/download?{query}", timeout=TRANSFER_TIMEOUT, silence=SILENCE, max_bytes=max_bytes)
            answer = yield from perform(self._grant, call)
            told = multipart.read(answer.headers.get("content-type", ""), answer.body)
            if len(told) != len(batch):
                raise errors.NotCobox(f"of {len(batch)} files {len(told)} were answered")
            results += told
        return results

    @method
    def unpack(
        self, path: SandboxPath, archive: Content, *, zstd: bool = False, links: Literal["inside", "any"] = "inside"
    ) -> Flow[Unpacked]:
        """Unpacks a tar beneath a directory. One with symbolic links that lead out of it is refused, unless `links` is `any`."""
        headers = (("content-type", TAR_ZSTD if zstd else TAR),)
        target = f"/archive?path={in_query(path)}" + ("" if links == "inside" else f"&links={links}")
        call = Call("PUT", target, body=Upload(archive), headers=headers, is_repeatable=False, timeout=ARCHIVE_TIMEOUT)
        answer = yield from perform(self._grant, call)
        return decode(Unpacked, answer.body, self._grant.base)


def wanted_headers(headers: Mapping[str, str | None]) -> list[tuple[str, str]]:
    return [*wanted(**headers).items()]


class ReaderApi:
    """Bytes as they come. Of a file a lost connection is taken up at the byte it broke off, if the file is still the same."""

    def __init__(self, grant: Grant, io: Any, call: Call, path: SandboxPath, start: int, end: int | None, is_file: bool) -> None:
        self._grant, self._io, self._call = grant, io, call
        self._path, self._at, self._end, self._is_file = path, start, end, is_file
        self._opened: Opened | None = None
        self._left: int | None = None
        self.head: FileHead | None = None

    @method
    def begin(self) -> Flow[None]:
        """Asks for the bytes; done by whoever opens."""
        headers = self._call.headers
        if self._is_file:
            headers += in_range(self._at, self._end)
            if self.head is not None:
                headers += (("if-match", self.head.etag),)
        call = Call(self._call.method, self._call.path, headers=headers, timeout=self._call.timeout, silence=SILENCE)
        self._opened = yield from open_stream(self._grant, call)
        told = self._opened.headers.get("content-length", "")
        self._left = int(told) if told.isdigit() and len(told) < 20 else None
        if self.head is None:
            self.head = head_of(os.fsdecode(as_bytes(self._path)), self._opened.headers, size_of(self._opened.headers))

    @method
    def piece(self) -> Flow[bytes]:
        """The next bytes; `b""` at the end."""
        waits, tries = Backoff(), 0
        while self._opened is not None:
            try:
                piece: bytes = yield Pull(self._opened)
                if not piece and self._left:
                    raise errors.Broken(f"{self._left} bytes before the end")
            except errors.Broken as lost:
                tries += 1
                yield Drop(self._opened)
                if not self._is_file or tries > RESUMES:
                    self._opened = None
                    raise lost
                yield Pause(waits.next())
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
            yield Drop(opened)


class Reader(ReaderApi, Blocking):
    """A file or an archive as it comes: iterate over it, or `read()` the rest."""

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.piece():
            yield piece

    def read(self) -> bytes:
        return b"".join(self)

    def save(self, file: str | os.PathLike[str]) -> int:
        """Into a local file; gives how many bytes."""
        with open(file, "wb") as opened:
            return sum(opened.write(piece) for piece in self)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class AsyncReader(ReaderApi, Awaiting):
    """A file or an archive as it comes: iterate over it, or `await read()` the rest."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self.piece():
            yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self])

    async def save(self, file: str | os.PathLike[str]) -> int:
        """Into a local file; gives how many bytes."""
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
    return Call("GET", f"/files{in_url(path)}", timeout=TRANSFER_TIMEOUT)


def archive_call(path: SandboxPath, zstd: bool) -> Call:
    return Call("GET", f"/archive?path={in_query(path)}", headers=(("accept", TAR_ZSTD if zstd else TAR),), timeout=ARCHIVE_TIMEOUT)


class Files(FilesApi, Blocking):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io

    def open(self, path: SandboxPath, *, start: int = 0, end: int | None = None) -> Reader:
        """A file as a stream, which survives lost connections."""
        reader = Reader(self._grant, self._io, file_call(path), path, start, end, is_file=True)
        reader.begin()
        return reader

    def archive(self, path: SandboxPath, *, zstd: bool = False) -> Reader:
        """A directory, or a file, as a tar."""
        reader = Reader(self._grant, self._io, archive_call(path, zstd), path, 0, None, is_file=False)
        reader.begin()
        return reader


class AsyncFiles(FilesApi, Awaiting):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io

    def open(self, path: SandboxPath, *, start: int = 0, end: int | None = None) -> Opening[AsyncReader, bytes]:
        """A file as a stream, which survives lost connections: `async with`, `async for` or `await` it."""
        reader = AsyncReader(self._grant, self._io, file_call(path), path, start, end, is_file=True)
        return Opening(reader, reader.begin)

    def archive(self, path: SandboxPath, *, zstd: bool = False) -> Opening[AsyncReader, bytes]:
        """A directory, or a file, as a tar."""
        reader = AsyncReader(self._grant, self._io, archive_call(path, zstd), path, 0, None, is_file=False)
        return Opening(reader, reader.begin)
