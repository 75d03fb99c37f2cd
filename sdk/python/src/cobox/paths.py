"""Paths in a sandbox, made fit for a URL or for JSON: any bytes survive, and what a URL library would fold away is refused."""

from __future__ import annotations

import base64
import os
from typing import Any, Union
from urllib.parse import quote

from .errors import InvalidPath

# As text (with surrogate escapes for what isn't UTF-8), bytes, or a PurePosixPath.
SandboxPath = Union[str, bytes, "os.PathLike[str]"]


def as_bytes(path: SandboxPath) -> bytes:
    raw = os.fspath(path)
    return raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogateescape")


def checked(path: SandboxPath) -> bytes:
    raw = as_bytes(path)
    shown = raw.decode("utf-8", "replace")[:200]
    if not raw.startswith(b"/"):
        raise InvalidPath(f"{shown!r} is not absolute; write it as /workspace/{shown.lstrip('./')}")
    if b"\0" in raw:
        raise InvalidPath(f"{shown!r} has a NUL byte in it")
    return raw


def in_url(path: SandboxPath) -> str:
    """Percent-encoded, without empty and `.` parts. `..` is refused: URL libraries fold it before the kernel could resolve it."""
    parts = [part for part in checked(path).split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise InvalidPath(f"{as_bytes(path).decode('utf-8', 'replace')[:200]!r} has `..` in it; write the path it leads to")
    return "/" + "/".join(quote(part, safe="-._~") for part in parts)


def in_query(path: SandboxPath) -> str:
    return quote(checked(path), safe="-._~/")


def in_json(path: SandboxPath | None, name: str = "path") -> dict[str, Any]:
    """The field that names the path: as text, or its exact bytes where they are no text."""
    if path is None:
        return {}
    raw = checked(path)
    try:
        return {name: raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_b64": base64.b64encode(raw).decode()}
