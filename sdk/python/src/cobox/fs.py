"""`session.fs`: looking at, searching and rearranging the sandbox's files, by boxd's own routes and not by programs in the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .answers import Changed, Edited, FileEntry, GlobResult, GrepResult, Listing
from .call import Call, perform, wanted
from .decode import decode
from .flow import Awaiting, Blocking, Flow, method
from .grant import Grant
from .paths import SandboxPath, in_json

T = TypeVar("T")
# Seconds a search may take unless told; the server's own limit is 300.
SEARCH_SECONDS = 30.0


class FsApi:
    """Paths are absolute in the sandbox; where one may be left out, it is the shared folder `/workspace`."""

    _grant: Grant

    def _ask(self, kind: type[T], verb: str, body: Mapping[str, Any], *, is_repeatable: bool, timeout: float = 60.0) -> Flow[T]:
        call = Call("POST", f"/fs/{verb}", json=body, is_repeatable=is_repeatable, timeout=timeout)
        answer = yield from perform(self._grant, call)
        return decode(kind, answer.body, self._grant.base)

    @method
    def list(
        self,
        path: SandboxPath | None = None,
        *,
        limit: int | None = None,
        cursor: str | None = None,
        sort: str | None = None,
        descending: bool = False,
        recursive: bool = False,
        max_depth: int | None = None,
    ) -> Flow[Listing]:
        """One page of a directory; `next_cursor` leads to the next. `sort`: name, mtime or size."""
        body = in_json(path) | wanted(limit=limit, cursor=cursor, sort=sort, max_depth=max_depth)
        return (yield from self._ask(Listing, "list", body | {"descending": descending, "recursive": recursive}, is_repeatable=True))

    @method
    def stat(self, path: SandboxPath, *, follow: bool = False) -> Flow[FileEntry]:
        """One thing; with `follow`, what a link leads to instead of the link."""
        return (yield from self._ask(FileEntry, "stat", in_json(path) | {"follow": follow}, is_repeatable=True))

    @method
    def glob(
        self,
        pattern: str,
        path: SandboxPath | None = None,
        *,
        limit: int | None = None,
        ignore: str | Sequence[str] | None = None,
        respect_ignore: bool = False,
        hidden: bool | None = None,
        case_insensitive: bool = False,
        sort: str | None = None,
        timeout_seconds: float = SEARCH_SECONDS,
    ) -> Flow[GlobResult]:
        """Finds by a pattern of the path: `*` and `?` stop at `/`, `**` doesn't. Sorted by name, or by mtime, newest first."""
        body = in_json(path) | wanted(limit=limit, ignore=_many(ignore), hidden=hidden, sort=sort)
        body |= {"pattern": pattern, "respect_ignore": respect_ignore, "case_insensitive": case_insensitive}
        body["timeout_seconds"] = timeout_seconds
        return (yield from self._ask(GlobResult, "glob", body, is_repeatable=True, timeout=timeout_seconds + 30))

    @method
    def grep(
        self,
        pattern: str,
        path: SandboxPath | None = None,
        *,
        literal: bool = False,
        glob: str | Sequence[str] | None = None,
        case_insensitive: bool = False,
        word: bool = False,
        multiline: bool = False,
        respect_ignore: bool = False,
        hidden: bool | None = None,
        before: int | None = None,
        after: int | None = None,
        context: int | None = None,
        max_matches: int | None = None,
        max_per_file: int | None = None,
        max_line_bytes: int | None = None,
        output: str | None = None,
        timeout_seconds: float = SEARCH_SECONDS,
    ) -> Flow[GrepResult]:
        """Searches the text of files, by a regular expression unless `literal`. `output`: content, files or count."""
        body = in_json(path) | wanted(
            glob=_many(glob),
            hidden=hidden,
            before=before,
            after=after,
            context=context,
            max_matches=max_matches,
            max_per_file=max_per_file,
            max_line_bytes=max_line_bytes,
            output=output,
        )
        body |= {"pattern": pattern, "literal": literal, "case_insensitive": case_insensitive, "word": word, "multiline": multiline}
        body |= {"respect_ignore": respect_ignore, "timeout_seconds": timeout_seconds}
        return (yield from self._ask(GrepResult, "grep", body, is_repeatable=True, timeout=timeout_seconds + 30))

    @method
    def edit(
        self,
        path: SandboxPath,
        old: str | None = None,
        new: str | None = None,
        *,
        replace_all: bool = False,
        edits: Sequence[tuple[str, str]] | None = None,
        if_match: str | None = None,
    ) -> Flow[Edited]:
        """Replaces text exactly, all of it or nothing: `old` must be there once unless `replace_all`. `edits`: several (old, new)."""
        body = in_json(path) | wanted(old=old, new=new, if_match=if_match)
        if edits is not None:
            body["edits"] = [{"old": o, "new": n, "replace_all": replace_all} for o, n in edits]
        else:
            body["replace_all"] = replace_all
        return (yield from self._ask(Edited, "edit", body, is_repeatable=False))

    @method
    def mkdir(self, path: SandboxPath, *, parents: bool = False, exist_ok: bool = False, mode: str | None = None) -> Flow[Changed]:
        """Makes a directory."""
        body = in_json(path) | {"parents": parents, "exist_ok": exist_ok} | wanted(mode=mode)
        return (yield from self._ask(Changed, "mkdir", body, is_repeatable=exist_ok))

    @method
    def move(self, source: SandboxPath, target: SandboxPath, *, overwrite: bool = False) -> Flow[Changed]:
        """Renames or moves; `target` is the new name itself, never a directory to put it into."""
        body = in_json(source, "from") | in_json(target, "to") | {"overwrite": overwrite}
        return (yield from self._ask(Changed, "move", body, is_repeatable=False))

    @method
    def copy(self, source: SandboxPath, target: SandboxPath, *, overwrite: bool = False, recursive: bool = False) -> Flow[Changed]:
        """Copies a file, or with `recursive` a directory."""
        body = in_json(source, "from") | in_json(target, "to") | {"overwrite": overwrite, "recursive": recursive}
        return (yield from self._ask(Changed, "copy", body, is_repeatable=overwrite and not recursive, timeout=600))

    @method
    def remove(self, path: SandboxPath, *, recursive: bool = False, missing_ok: bool = False) -> Flow[Changed]:
        """Removes a file, a link itself, an empty directory, or with `recursive` all that is in one."""
        body = in_json(path) | {"recursive": recursive, "missing_ok": missing_ok}
        return (yield from self._ask(Changed, "remove", body, is_repeatable=missing_ok, timeout=600))


def _many(patterns: str | Sequence[str] | None) -> str | list[str] | None:
    return patterns if patterns is None or isinstance(patterns, str) else [*patterns]


class Fs(FsApi, Blocking):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io


class AsyncFs(FsApi, Awaiting):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io
