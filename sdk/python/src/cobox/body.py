"""What is uploaded: bytes, text, a local file, a file object or pieces, and whether it can be sent a second time."""

from __future__ import annotations

import asyncio
import json as json_module
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import IO, Any, Union

from .errors import InvalidText

# What may be given to a method that uploads. A path means the local file, text is sent as UTF-8.
Content = Union[bytes, bytearray, memoryview, str, "os.PathLike[str]", IO[bytes], Iterable[bytes], AsyncIterable[bytes]]

# Read at once of a local file: many times a packet, little of the memory.
PIECE_BYTES = 256 * 1024


def in_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # What it is is not repeated: it may be long, and can't be shown either.
        raise InvalidText("the text has half a character in it (a lone surrogate), which no file and no request can hold") from None


class Upload:
    """A request's body. `is_replayable`: a first try that met a starting sandbox or an expired token can be followed by another."""

    def __init__(self, content: Content) -> None:
        self._content: Any = content
        self._start = 0
        self.length: int | None = None
        self.is_replayable = True
        if isinstance(content, str):
            self._content = in_utf8(content)
        elif isinstance(content, (bytearray, memoryview)):
            self._content = bytes(content)
        if isinstance(self._content, bytes):
            self.length = len(self._content)
        elif isinstance(content, os.PathLike):
            self.length = os.stat(content).st_size
        elif hasattr(content, "read"):
            file: Any = content
            self.is_replayable = hasattr(file, "seekable") and bool(file.seekable())
            if self.is_replayable:
                self._start = file.tell()
        elif isinstance(content, (list, tuple)):
            self.length = sum(len(piece) for piece in content)
        elif isinstance(content, (Iterable, AsyncIterable)):
            self.is_replayable = False
        else:
            raise TypeError(f"content must be bytes, text, a path, a binary file or pieces of bytes, not {type(content).__name__}")

    @classmethod
    def json(cls, value: Any) -> Upload:
        return cls(in_utf8(json_module.dumps(value, ensure_ascii=False, separators=(",", ":"))))

    def blocking(self) -> bytes | Iterator[bytes]:
        """For a connection that blocks."""
        if isinstance(self._content, bytes):
            return self._content
        if isinstance(self._content, AsyncIterable) and not isinstance(self._content, Iterable):
            raise TypeError("pieces that are awaited need AsyncCobox")
        return self._pieces()

    def awaiting(self) -> bytes | AsyncIterator[bytes]:
        """For asyncio; what would block is read in a thread."""
        if isinstance(self._content, bytes):
            return self._content
        if isinstance(self._content, AsyncIterable) and not isinstance(self._content, Iterable):
            return self._content.__aiter__()
        return self._in_a_thread()

    def _pieces(self) -> Iterator[bytes]:
        content = self._content
        if isinstance(content, os.PathLike):
            with open(content, "rb") as file:
                yield from iter(lambda: file.read(PIECE_BYTES), b"")
        elif hasattr(content, "read"):
            if self.is_replayable:
                content.seek(self._start)
            yield from iter(lambda: content.read(PIECE_BYTES), b"")
        else:
            yield from content

    async def _in_a_thread(self) -> AsyncIterator[bytes]:
        pieces = self._pieces()
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
