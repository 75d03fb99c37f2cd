"""Resolves symlinks of sandbox paths one by one: boxd reports a symlink's target, but not the final path."""

from __future__ import annotations

import os
import posixpath
from typing import Any

from . import errors
from .effects import Flow
from .fs import FsApi
from .responses import FileEntry

# Maximum symlinks followed for one path, the same as the kernel's limit.
MAX_FOLLOWED = 40
# Maximum path components looked up during one search.
MAX_STEPS = 2000


class SymlinkResolver:
    """Resolves paths and caches the lookups of one search."""

    def __init__(self, files: Any) -> None:
        self._files = files
        # Symlink target by path: empty if the path is not a symlink, None if it does not exist.
        self._known: dict[str, str | None] = {}

    def resolve(self, path: str) -> Flow[str | None]:
        """The path without symlinks; None if it does not exist, is circular, or exceeds the limits."""
        steps, at, followed = _steps(path), "/", 0
        while steps:
            step = steps.pop()
            if step == "..":
                at = posixpath.dirname(at)
                continue
            here = posixpath.join(at, step)
            target = yield from self._target(here)
            if target is None:
                return None
            if not target:
                at = here
                continue
            followed += 1
            if followed > MAX_FOLLOWED:
                return None
            if target.startswith("/"):
                at = "/"
            steps += _steps(target)
        return at

    def _target(self, path: str) -> Flow[str | None]:
        if path not in self._known:
            if len(self._known) >= MAX_STEPS:
                return None
            try:
                found: FileEntry = yield from FsApi.stat.flow(self._files, path)
                self._known[path] = os.fsdecode(found.target_bytes) if found.type == "symlink" else ""
            except errors.ApiError:
                self._known[path] = None
        return self._known[path]


def _steps(path: str) -> list[str]:
    """The components of a path in reverse order."""
    return [step for step in path.split("/") if step not in ("", ".")][::-1]


def is_beneath(path: str, root: str) -> bool:
    return path == root or path.startswith(root if root.endswith("/") else root + "/")
