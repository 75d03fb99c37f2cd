"""Patterns of agents' tools: what a pattern means by the rules of a deepagents version, and how to ask boxd for a superset of it.

0.6: as Python's `glob` with `recursive`, so `*.py` is one directory deep and directories match. 0.7: `*.py` is a name at any depth, a
pattern with `/` is a path from the search root, only files match, braces expand. In both a leading dot must be written.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable

# Alternatives a pattern may expand to; beyond it nobody wrote it by hand.
MAX_ALTERNATIVES = 1000


class BadPattern(ValueError):
    """A pattern that isn't searched for; its text is the code agents know."""


class Pattern:
    """`asked` is what boxd is asked for, `hidden` whether names with a leading dot are wanted at all, `matches` decides."""

    def __init__(self, pattern: str, *, is_basename: bool, expands: bool) -> None:
        if ".." in pattern.replace("\\", "/").split("/"):
            raise BadPattern("invalid_pattern")
        alternatives = expanded(pattern) if expands else [pattern]
        self._is_basename = is_basename and "/" not in pattern
        self._alternatives = [[p for p in one.split("/") if p] for one in alternatives]
        self._only_directories = not expands and pattern.endswith("/")
        # A slash at the end means a directory, and 0.7 gives files only.
        self._is_void = expands and pattern.endswith("/") and not pattern.rstrip("/").endswith("**")
        asked = [escaped(one, expands).lstrip("/") for one in alternatives]
        if expands:
            asked = [one.rstrip("/") for one in asked]
        joined = asked[0] if len(asked) == 1 else "{" + ",".join(one.replace(",", "[,]") for one in asked) + "}"
        self.asked = f"**/{joined}" if self._is_basename else joined
        has_dot = any(part.startswith((".", "[.")) for one in self._alternatives for part in one)
        # A name at any depth is looked for beneath hidden directories too.
        self.hidden = has_dot or self._is_basename

    def matches(self, relative: str, is_dir: bool) -> bool:
        if self._is_void or (self._only_directories and not is_dir):
            return False
        parts = relative.split("/")
        if self._is_basename:
            return any(len(one) == 1 and _name_matches(parts[-1], one[0]) for one in self._alternatives)
        return any(_parts_match(parts, one) for one in self._alternatives)


def expanded(pattern: str) -> list[str]:
    """`a{b,c}` as `ab` and `ac`; a group of one is literal."""
    done: list[str] = []
    waiting = [("", pattern)]
    while waiting:
        before, rest = waiting.pop(0)
        start = rest.find("{")
        end = _group_end(rest, start) if start >= 0 else -1
        if end < 0:
            done.append(before + rest)
        else:
            options = _options(rest[start + 1 : end])
            if len(options) == 1:
                waiting.insert(0, (before + rest[: end + 1], rest[end + 1 :]))
            else:
                waiting[:0] = [(before + rest[:start], option + rest[end + 1 :]) for option in options]
        if len(done) + len(waiting) > MAX_ALTERNATIVES:
            raise BadPattern("pattern_too_broad")
    return done


def escaped(pattern: str, expands: bool) -> str:
    """For boxd, to which braces and backslashes always mean something."""
    text = pattern.replace("\\", "\\\\")
    text = re.sub(r"[{}]", lambda m: f"[{m.group()}]", text)
    return text if expands else re.sub(r"\[\^", "[\\^", text)


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
    # `[^a]` means the same as `[!a]` to everybody but fnmatch.
    return re.compile(fnmatch.translate(re.sub(r"\[\^", "[!", pattern))).match


def _parts_match(parts: list[str], pattern: list[str]) -> bool:
    """Part by part; `**` stands for any number of parts, none of them hidden. By the set of places reached, so never exponential."""
    places = {0}
    for at, wanted in enumerate(pattern):
        if wanted == "**":
            reached = set(places)
            for place in places:
                while place < len(parts) and not parts[place].startswith("."):
                    place += 1
                    reached.add(place)
            # At the end it stands for at least one.
            places = reached - places if at == len(pattern) - 1 and at > 0 else reached
        else:
            places = {place + 1 for place in places if place < len(parts) and _name_matches(parts[place], wanted)}
    return len(parts) in places
