"""Glob patterns of agents' tools: matches paths with the rules of a deepagents version, and builds a pattern for boxd that finds
a superset.

In 0.6, patterns follow Python's `glob` with `recursive`: `*.py` is one directory deep, and directories match. In 0.7, `*.py` is a
name at any depth, a pattern with `/` is a path relative to the search root, only files match, and braces expand. In both, a
leading dot must be matched explicitly.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable

# Maximum number of alternatives a pattern may expand to; a legitimate pattern has far fewer.
MAX_ALTERNATIVES = 1000


class InvalidPattern(ValueError):
    """A pattern that is not supported; the message is the error code that agents know."""


class GlobPattern:
    """A parsed pattern. `boxd_pattern` is the search sent to boxd, `includes_hidden` whether hidden names are included in it;
    `matches` decides about each result."""

    def __init__(self, pattern: str, *, is_basename: bool, expands_braces: bool) -> None:
        if ".." in pattern.replace("\\", "/").split("/"):
            raise InvalidPattern("invalid_pattern")
        alternatives = expand_braces(pattern) if expands_braces else [pattern]
        self._is_basename = is_basename and "/" not in pattern
        self._alternatives = [[p for p in one.split("/") if p] for one in alternatives]
        self._only_directories = not expands_braces and pattern.endswith("/")
        # A trailing slash means a directory, and 0.7 returns files only.
        self._matches_nothing = expands_braces and pattern.endswith("/") and not pattern.rstrip("/").endswith("**")
        boxd_patterns = [escape_for_boxd(one, expands_braces).lstrip("/") for one in alternatives]
        if expands_braces:
            boxd_patterns = [one.rstrip("/") for one in boxd_patterns]
        joined = boxd_patterns[0] if len(boxd_patterns) == 1 else "{" + ",".join(one.replace(",", "[,]") for one in boxd_patterns) + "}"
        self.boxd_pattern = f"**/{joined}" if self._is_basename else joined
        has_dot = any(part.startswith((".", "[.")) for one in self._alternatives for part in one)
        # A name at any depth is also searched below hidden directories.
        self.includes_hidden = has_dot or self._is_basename

    def matches(self, relative: str, is_dir: bool) -> bool:
        if self._matches_nothing or (self._only_directories and not is_dir):
            return False
        parts = relative.split("/")
        if self._is_basename:
            return any(len(one) == 1 and _name_matches(parts[-1], one[0]) for one in self._alternatives)
        return any(_parts_match(parts, one) for one in self._alternatives)


def expand_braces(pattern: str) -> list[str]:
    """Expands `a{b,c}` to `ab` and `ac`; a group with one element is literal."""
    done: list[str] = []
    pending = [("", pattern)]
    while pending:
        before, rest = pending.pop(0)
        start = rest.find("{")
        end = _group_end(rest, start) if start >= 0 else -1
        if end < 0:
            done.append(before + rest)
        else:
            options = _options(rest[start + 1 : end])
            if len(options) == 1:
                pending.insert(0, (before + rest[: end + 1], rest[end + 1 :]))
            else:
                pending[:0] = [(before + rest[:start], option + rest[end + 1 :]) for option in options]
        if len(done) + len(pending) > MAX_ALTERNATIVES:
            raise InvalidPattern("pattern_too_broad")
    return done


def escape_for_boxd(pattern: str, expands_braces: bool) -> str:
    """Escapes braces and backslashes, which are always special for boxd."""
    text = pattern.replace("\\", "\\\\")
    text = re.sub(r"[{}]", lambda m: f"[{m.group()}]", text)
    return text if expands_braces else re.sub(r"\[\^", "[\\^", text)


def _group_end(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return -1


def _options(body: str) -> list[str]:
    options, depth = [""], 0
    for char in body:
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            options.append("")
        else:
            options[-1] += char
    return options


def _name_matches(name: str, pattern: str) -> bool:
    if name.startswith(".") and not pattern.startswith((".", "[.")):
        return False
    return _compiled(pattern)(name) is not None


@functools.lru_cache(maxsize=512)
def _compiled(pattern: str) -> Callable[[str], re.Match[str] | None]:
    # Everywhere else `[^a]` means `[!a]`; fnmatch does not know it.
    return re.compile(fnmatch.translate(re.sub(r"\[\^", "[!", pattern))).match


def _parts_match(parts: list[str], pattern: list[str]) -> bool:
    """Matches component by component; `**` matches any number of components that are not hidden. Tracks the set of reachable
    positions, so the run time is never exponential."""
    reachable = {0}
    for at, component in enumerate(pattern):
        if component == "**":
            next_reachable = set(reachable)
            for position in reachable:
                while position < len(parts) and not parts[position].startswith("."):
                    position += 1
                    next_reachable.add(position)
            # At the end, it matches at least one component.
            reachable = next_reachable - reachable if at == len(pattern) - 1 and at > 0 else next_reachable
        else:
            reachable = {position + 1 for position in reachable if position < len(parts) and _name_matches(parts[position], component)}
    return len(parts) in reachable
