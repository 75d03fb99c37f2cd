"""Tracks the offset of an output stream across connections, so that each byte is delivered exactly once."""

from __future__ import annotations

from .errors import OutputHole


class Cursor:
    """The current offset of one output stream."""

    def __init__(self, stream: str, at: int | None) -> None:
        self.stream, self.at = stream, at

    def take(self, offset: int, data: bytes) -> bytes:
        """Returns the bytes not seen before. An unexplained hole is an error: the caller would join output that does not belong
        together."""
        at = offset if self.at is None else self.at
        if offset > at:
            raise OutputHole(f"{offset - at} bytes of {self.stream} are missing at offset {at}")
        new = data[at - offset :]
        self.at = at + len(new)
        return new

    def skip(self, start: int, end: int) -> int:
        """Skips bytes that the server reports as no longer available; returns how many of them had not been received."""
        begin = max(start if self.at is None else self.at, start)
        if end <= begin:
            return 0
        self.at = end
        return end - begin
