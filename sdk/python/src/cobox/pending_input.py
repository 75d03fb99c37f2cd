"""Buffers input until the sandbox has acknowledged it, and resends it after a reconnect."""

from __future__ import annotations

import threading
import time
from collections import deque

# Maximum unacknowledged input in bytes; beyond it, writers wait.
MAX_UNACKED_BYTES = 256 * 1024
# Input sent on a new connection before the first acknowledgement, in bytes; each acknowledgement doubles it. With a larger
# window, a network that keeps dropping connections would lose more input each time, together with the acknowledgements of earlier
# input.
FIRST_WINDOW_BYTES = 16 * 1024


class PendingInput:
    """Numbered chunks of input that are kept until acknowledged and resent over a new connection."""

    def __init__(self, max_age: float | None = None) -> None:
        # Seconds after which keyboard input is dropped instead of resent: the screen it was typed for has changed.
        self._max_age = max_age
        self._lock = threading.Lock()
        self._unacked: deque[tuple[int, bytes, float]] = deque()
        self._last, self._bytes = 0, 0
        self._sent, self._sent_bytes, self._window = 0, 0, FIRST_WINDOW_BYTES

    def has_capacity(self) -> bool:
        return self._bytes < MAX_UNACKED_BYTES

    def push(self, data: bytes) -> None:
        with self._lock:
            self._last += 1
            self._bytes += len(data)
            self._unacked.append((self._last, data, time.monotonic()))

    def restart(self) -> int:
        """Starts over on a new connection. Returns how many bytes were dropped because they were too old."""
        with self._lock:
            self._sent, self._sent_bytes, self._window = 0, 0, FIRST_WINDOW_BYTES
            before, now = self._bytes, time.monotonic()
            while self._max_age is not None and self._unacked and now - self._unacked[0][2] > self._max_age:
                self._forget_first()
            return before - self._bytes

    def next(self) -> tuple[int, bytes] | None:
        """The next chunk to send on this connection, with its sequence number."""
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

    def acknowledge(self, seq: int) -> None:
        """Forgets all chunks up to and including `seq`."""
        with self._lock:
            while self._unacked and self._unacked[0][0] <= seq:
                self._forget_first()
            self._window = min(self._window * 2, MAX_UNACKED_BYTES)

    def discard_refused(self) -> None:
        """Forgets the oldest chunk that was sent: it was refused, and would be refused again."""
        with self._lock:
            if self._sent > 0:
                self._forget_first()

    def _forget_first(self) -> None:
        _, data, _ = self._unacked.popleft()
        self._bytes -= len(data)
        if self._sent > 0:
            self._sent -= 1
            self._sent_bytes -= len(data)
