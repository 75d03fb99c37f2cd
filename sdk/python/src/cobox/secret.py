"""A wrapper that keeps keys and tokens out of logs and messages; they are exposed only when a request is sent."""

from __future__ import annotations

import hmac


class Secret:
    """Text that `repr`, `str`, `format`, logs and tracebacks show as `***`; `expose()` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def expose(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> str | tuple[object, ...]:
        # Pickles end up in files, queues and caches, where a credential must not be.
        raise TypeError("a Secret can't be pickled; pass the settings it came from instead")
