"""Request bodies from bytes, text, a local file, a file object or an iterable, and whether they can be sent a second time."""

from __future__ import annotations

import asyncio
import json as json_module
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import IO, Any, Union

from .errors import InvalidText

# Accepted by upload methods. A path means the local file; text is sent as UTF-8.
Content = Union[bytes, bytearray, memoryview, str, "os.PathLike[str]", IO[bytes], Iterable[bytes], AsyncIterable[bytes]]

# Chunk size for local files: large compared to a packet, small compared to memory.
PIECE_BYTES = 256 * 1024


def encode_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # The text itself is left out of the message: it may be long and is not printable.
        raise InvalidText("the text contains an unpaired surrogate, which can't be encoded as UTF-8") from None


class RequestBody:
    """A request body. `is_replayable`: it can be sent again after an attempt that met a starting sandbox or an expired token."""

    def __init__(self, content: Content) -> None:
        self._content: Any = content
        self._start = 0
        self.length: int | None = None
        self.is_replayable = True
        if isinstance(content, str):
            self._content = encode_utf8(content)
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
            raise TypeError(f"content must be bytes, text, a path, a binary file or an iterable of bytes, not {type(content).__name__}")

    @classmethod
    def json(cls, value: Any) -> RequestBody:
        return cls(encode_utf8(json_module.dumps(value, ensure_ascii=False, separators=(",", ":"))))

    def sync_content(self) -> bytes | Iterator[bytes]:
        """The content for blocking I/O."""
        if isinstance(self._content, bytes):
            return self._content
        if isinstance(self._content, AsyncIterable) and not isinstance(self._content, Iterable):
            raise TypeError("an async iterable needs AsyncCobox")
        return self._pieces()

    def async_content(self) -> bytes | AsyncIterator[bytes]:
        """The content for asyncio; blocking reads run in a thread."""
        if isinstance(self._content, bytes):
            return self._content
        if isinstance(self._content, AsyncIterable) and not isinstance(self._content, Iterable):
            return self._content.__aiter__()
        return self._read_in_thread()

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

    async def _read_in_thread(self) -> AsyncIterator[bytes]:
        pieces = self._pieces()
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
