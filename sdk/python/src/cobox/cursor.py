"""Counting bytes of a stream that comes over several connections, and keeping input until it has arrived: each once, none lost."""

from __future__ import annotations

import threading
import time
from collections import deque

from .errors import OutputHole

# Most that is kept of input nobody has acknowledged, in bytes; beyond it whoever writes waits.
MAX_UNACKED_BYTES = 256 * 1024
# How much of it a new connection gets before it has acknowledged anything; each acknowledgement doubles it. Over a network on which no
# connection lasts, more would be lost each time together with the acknowledgements of what went before.
FIRST_WINDOW_BYTES = 16 * 1024


class Cursor:
    """Where one stream of output is."""

    def __init__(self, stream: str, at: int | None) -> None:
        self.stream, self.at = stream, at

    def take(self, offset: int, data: bytes) -> bytes:
        """What is new in these bytes. A hole that nothing explained is an error: the caller would take one end for the other."""
        at = offset if self.at is None else self.at
        if offset > at:
            raise OutputHole(f"{offset - at} bytes of {self.stream} are missing at {at}")
        new = data[at - offset :]
        self.at = at + len(new)
        return new

    def skip(self, start: int, end: int) -> int:
        """Bytes that are said to be gone; gives how many of them were still wanted."""
        begin = max(start if self.at is None else self.at, start)
        if end <= begin:
            return 0
        self.at = end
        return end - begin


class Typing:
    """Input on its way: numbered, kept until the other side has it, and sent again over a new connection."""

    def __init__(self, max_age: float | None = None) -> None:
        # Seconds after which keys are not sent any more: the screen they were meant for is another one.
        self._max_age = max_age
        self._lock = threading.Lock()
        self._unacked: deque[tuple[int, bytes, float]] = deque()
        self._last, self._bytes = 0, 0
        self._sent, self._sent_bytes, self._window = 0, 0, FIRST_WINDOW_BYTES

    def has_room(self) -> bool:
        return self._bytes < MAX_UNACKED_BYTES

    def push(self, data: bytes) -> None:
        with self._lock:
            self._last += 1
            self._bytes += len(data)
            self._unacked.append((self._last, data, time.monotonic()))

    def start_over(self) -> int:
        """A new connection has nothing yet. Gives how many bytes were too old to be sent again."""
        with self._lock:
            self._sent, self._sent_bytes, self._window = 0, 0, FIRST_WINDOW_BYTES
            before, now = self._bytes, time.monotonic()
            while self._max_age is not None and self._unacked and now - self._unacked[0][2] > self._max_age:
                self._forget_first()
            return before - self._bytes

    def next(self) -> tuple[int, bytes] | None:
        """What this connection may be sent next, and under which number."""
        with self._lock:
            if self._sent >= len(self._unacked) or self._sent_bytes >= self._window:
                return None
            seq, data, _ = self._unacked[self._sent]
            self._sent += 1
            self._sent_bytes += len(data)
            return seq, data

    def is_all_sent(self) -> bool:
        with self._lock:
            return self._sent >= len(self._unacked)

    def acked(self, seq: int) -> None:
        """Everything up to `seq` has arrived."""
        with self._lock:
            while self._unacked and self._unacked[0][0] <= seq:
                self._forget_first()
            self._window = min(self._window * 2, MAX_UNACKED_BYTES)

    def refused(self) -> None:
        """The first that was sent was not taken, and would not be if it were sent again."""
        with self._lock:
            if self._sent > 0:
                self._forget_first()

    def _forget_first(self) -> None:
        _, data, _ = self._unacked.popleft()
        self._bytes -= len(data)
        if self._sent > 0:
            self._sent -= 1
            self._sent_bytes -= len(data)
