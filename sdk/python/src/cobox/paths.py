"""Encodes sandbox paths for URLs and JSON: any bytes are preserved, and paths that a URL library would normalize are refused."""

from __future__ import annotations

import base64
import os
from typing import Any, Union
from urllib.parse import quote

from .errors import InvalidPath

# Text (with surrogate escapes for bytes that are not UTF-8), bytes, or a PurePosixPath.
SandboxPath = Union[str, bytes, "os.PathLike[str]"]


def as_bytes(path: SandboxPath) -> bytes:
    raw = os.fspath(path)
    return raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogateescape")


def checked_bytes(path: SandboxPath) -> bytes:
    raw = as_bytes(path)
    shown = raw.decode("utf-8", "replace")[:200]
    if not raw.startswith(b"/"):
        raise InvalidPath(f"{shown!r} is not absolute; write it as /workspace/{shown.lstrip('./')}")
    if b"\0" in raw:
        raise InvalidPath(f"{shown!r} contains a NUL byte")
    return raw


def url_path(path: SandboxPath) -> str:
    """Percent-encodes a path without empty and `.` components. `..` is refused: URL libraries resolve it before the kernel could."""
    parts = [part for part in checked_bytes(path).split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise InvalidPath(f"{as_bytes(path).decode('utf-8', 'replace')[:200]!r} contains `..`; write the path it leads to")
    return "/" + "/".join(quote(part, safe="-._~") for part in parts)


def query_value(path: SandboxPath) -> str:
    return quote(checked_bytes(path), safe="-._~/")


def json_field(path: SandboxPath | None, name: str = "path") -> dict[str, Any]:
    """The JSON field for a path: as text, or in base64 if it is not valid UTF-8."""
    if path is None:
        return {}
    raw = checked_bytes(path)
    try:
        return {name: raw.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_b64": base64.b64encode(raw).decode()}
