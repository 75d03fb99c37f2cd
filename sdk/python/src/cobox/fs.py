"""`session.fs`: lists, searches and changes the sandbox's file system through boxd's own routes, without programs from the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .call import Call, perform, without_none
from .decode import decode
from .effects import Flow, UsesAsyncIO, UsesBlockingIO, method
from .grant import Grant
from .paths import SandboxPath, json_field
from .responses import Changed, Edited, FileEntry, GlobResult, GrepResult, Listing

T = TypeVar("T")
# Default timeout of a search in seconds; the server's maximum is 300.
SEARCH_SECONDS = 30.0


class FsApi:
    """Paths are absolute; where the path is optional, it defaults to the shared folder `/workspace`."""

    _grant: Grant

    def _call(self, kind: type[T], verb: str, body: Mapping[str, Any], *, is_repeatable: bool, timeout: float = 60.0) -> Flow[T]:
        call = Call("POST", f"/fs/{verb}", json=body, is_repeatable=is_repeatable, timeout=timeout)
        response = yield from perform(self._grant, call)
        return decode(kind, response.body, self._grant.base)

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
        """One page of a directory; pass `next_cursor` for the next one. `sort`: name, mtime or size."""
        body = json_field(path) | without_none(limit=limit, cursor=cursor, sort=sort, max_depth=max_depth)
        return (yield from self._call(Listing, "list", body | {"descending": descending, "recursive": recursive}, is_repeatable=True))

    @method
    def stat(self, path: SandboxPath, *, follow: bool = False) -> Flow[FileEntry]:
        """Returns one entry; with `follow`, the target of a symlink instead of the symlink."""
        return (yield from self._call(FileEntry, "stat", json_field(path) | {"follow": follow}, is_repeatable=True))

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
        """Finds entries by a path pattern: `*` and `?` do not match `/`, `**` does. Sorted by name, or by mtime with the newest
        first."""
        body = json_field(path) | without_none(limit=limit, ignore=_many(ignore), hidden=hidden, sort=sort)
        body |= {"pattern": pattern, "respect_ignore": respect_ignore, "case_insensitive": case_insensitive}
        body["timeout_seconds"] = timeout_seconds
        return (yield from self._call(GlobResult, "glob", body, is_repeatable=True, timeout=timeout_seconds + 30))

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
        """Searches the text of files with a regular expression, or a fixed string with `literal`. `output`: content, files or
        count."""
        body = json_field(path) | without_none(
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
        return (yield from self._call(GrepResult, "grep", body, is_repeatable=True, timeout=timeout_seconds + 30))

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
        """Replaces text exactly and atomically: `old` must occur exactly once unless `replace_all`. `edits`: several (old, new)
        pairs."""
        body = json_field(path) | without_none(old=old, new=new, if_match=if_match)
        if edits is not None:
            body["edits"] = [{"old": o, "new": n, "replace_all": replace_all} for o, n in edits]
        else:
            body["replace_all"] = replace_all
        return (yield from self._call(Edited, "edit", body, is_repeatable=False))

    @method
    def mkdir(self, path: SandboxPath, *, parents: bool = False, exist_ok: bool = False, mode: str | None = None) -> Flow[Changed]:
        """Creates a directory."""
        body = json_field(path) | {"parents": parents, "exist_ok": exist_ok} | without_none(mode=mode)
        return (yield from self._call(Changed, "mkdir", body, is_repeatable=exist_ok))

    @method
    def move(self, source: SandboxPath, target: SandboxPath, *, overwrite: bool = False) -> Flow[Changed]:
        """Renames or moves; `target` is the new path itself, never a directory to move into."""
        body = json_field(source, "from") | json_field(target, "to") | {"overwrite": overwrite}
        return (yield from self._call(Changed, "move", body, is_repeatable=False))

    @method
    def copy(self, source: SandboxPath, target: SandboxPath, *, overwrite: bool = False, recursive: bool = False) -> Flow[Changed]:
        """Copies a file, or a directory with `recursive`."""
        body = json_field(source, "from") | json_field(target, "to") | {"overwrite": overwrite, "recursive": recursive}
        return (yield from self._call(Changed, "copy", body, is_repeatable=overwrite and not recursive, timeout=600))

    @method
    def remove(self, path: SandboxPath, *, recursive: bool = False, missing_ok: bool = False) -> Flow[Changed]:
        """Removes a file, a symlink itself, an empty directory, or a directory with its contents with `recursive`."""
        body = json_field(path) | {"recursive": recursive, "missing_ok": missing_ok}
        return (yield from self._call(Changed, "remove", body, is_repeatable=missing_ok, timeout=600))


def _many(patterns: str | Sequence[str] | None) -> str | list[str] | None:
    return patterns if patterns is None or isinstance(patterns, str) else [*patterns]


class Fs(FsApi, UsesBlockingIO):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io


class AsyncFs(FsApi, UsesAsyncIO):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io
