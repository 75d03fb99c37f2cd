"""What a run does itself, told apart from what others do in the same sandbox: the broker tells of both, and the run tells of its own."""

from __future__ import annotations

import base64
import json
import posixpath
import threading
from collections import OrderedDict

from ..answers import SandboxEvent
from ..secret import Secret

# Deeds of which the broker's word is still to come; one that never comes must not be kept for ever.
MAX_EXPECTED = 1024
# Compared of a path or command, in bytes: the broker cuts them a little later.
COMPARED_BYTES = 1000
# Where an event of this type says what it is about.
_ABOUT = {"exec": "command", "file_written": "path", "file_removed": "path"}


class Own:
    """The deeds of one run. Used from the threads of its tools and from its event loop."""

    def __init__(self, token: Secret) -> None:
        self._principal = principal_of(token)
        self._expected: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._lock = threading.Lock()

    def expect(self, kind: str, subject: str) -> None:
        """Before it is done: the broker may tell of it before its answer is here."""
        with self._lock:
            key = _key(kind, subject)
            self._expected[key] = self._expected.get(key, 0) + 1
            while len(self._expected) > MAX_EXPECTED:
                self._expected.popitem(last=False)

    def failed(self, kind: str, subject: str) -> None:
        """It was not done, so nobody tells of it."""
        with self._lock:
            self._take(_key(kind, subject))

    def has(self, event: SandboxEvent) -> bool:
        """Whether the event is of this run's doing; each of its deeds is so once."""
        if event.actor != "agent" or (self._principal is not None and event.principal != self._principal):
            return False
        if event.type == "connected":
            # The run has told of that itself, and the broker tells of it once for all of a principal's.
            return True
        about = event.data.get(_ABOUT.get(event.type, ""))
        if not isinstance(about, str):
            return False
        with self._lock:
            return self._take(_key(event.type, about))

    def _take(self, key: tuple[str, bytes]) -> bool:
        left = self._expected.get(key, 0)
        if left > 1:
            self._expected[key] = left - 1
        else:
            self._expected.pop(key, None)
        return left > 0


def principal_of(token: Secret) -> str | None:
    """Whose a token is, by its own word; None where it says nothing."""
    parts = token.expose().split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except ValueError:
        return None
    name = claims.get("sub") if isinstance(claims, dict) else None
    return name if isinstance(name, str) else None


def _key(kind: str, subject: str) -> tuple[str, bytes]:
    plain = posixpath.normpath(subject) if kind != "exec" else subject
    return kind, plain.encode("utf-8", "surrogatepass")[:COMPARED_BYTES]
