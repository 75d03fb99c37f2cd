"""Where a path in a sandbox really leads, link by link: boxd tells of each link where it points, and nothing of where that ends."""

from __future__ import annotations

import os
import posixpath
from typing import Any

from . import errors
from .answers import FileEntry
from .flow import Flow
from .fs import FsApi

# Links on the way of one path; the kernel gives up there too.
MAX_FOLLOWED = 40
# Steps that one search asks about.
MAX_STEPS = 2000


class Links:
    """What is known of a sandbox's paths, for the time of one search."""

    def __init__(self, files: Any) -> None:
        self._files = files
        # Where each step points: empty where it is no link, None where it is nothing.
        self._known: dict[str, str | None] = {}

    def real(self, path: str) -> Flow[str | None]:
        """The path without links in it; None where it leads nowhere, in a circle, or too far to tell."""
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
    """Those of a path, the first one last."""
    return [step for step in path.split("/") if step not in ("", ".")][::-1]


def is_beneath(path: str, root: str) -> bool:
    return path == root or path.startswith(root if root.endswith("/") else root + "/")
