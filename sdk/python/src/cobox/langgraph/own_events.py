"""Recognizes a run's own actions among the broker's events. The run reports them on its stream itself, so they must not appear
twice."""

from __future__ import annotations

import base64
import json
import posixpath
import threading
from collections import OrderedDict

from ..responses import SandboxEvent
from ..secret import Secret

# Maximum number of actions whose event is outstanding; the event of some actions never arrives.
MAX_EXPECTED = 1024
# Compared length of a path or command in bytes; the broker truncates at a slightly larger length.
COMPARED_BYTES = 1000
# The event field with the subject, by event type.
_SUBJECT_FIELDS = {"exec": "command", "file_written": "path", "file_removed": "path"}


class OwnEvents:
    """The actions of one run. Used from the threads of its tools and from its event loop."""

    def __init__(self, token: Secret) -> None:
        self._principal = unverified_principal(token)
        self._expected: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._lock = threading.Lock()

    def expect(self, kind: str, subject: str) -> None:
        """Called before an action: the broker's event may arrive before the action's response."""
        with self._lock:
            key = _key(kind, subject)
            self._expected[key] = self._expected.get(key, 0) + 1
            while len(self._expected) > MAX_EXPECTED:
                self._expected.popitem(last=False)

    def cancel(self, kind: str, subject: str) -> None:
        """The action failed, so there will be no event."""
        with self._lock:
            self._consume(_key(kind, subject))

    def claim(self, event: SandboxEvent) -> bool:
        """Whether the event was caused by this run; each expected action matches one event."""
        if event.actor != "agent" or (self._principal is not None and event.principal != self._principal):
            return False
        if event.type == "connected":
            # The run reports its connection itself, and the broker reports it once for all connections of a principal.
            return True
        about = event.data.get(_SUBJECT_FIELDS.get(event.type, ""))
        if not isinstance(about, str):
            return False
        with self._lock:
            return self._consume(_key(event.type, about))

    def _consume(self, key: tuple[str, bytes]) -> bool:
        left = self._expected.get(key, 0)
        if left > 1:
            self._expected[key] = left - 1
        else:
            self._expected.pop(key, None)
        return left > 0


def unverified_principal(token: Secret) -> str | None:
    """The principal in a token's unverified claims; None if it contains none."""
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
