"""`session.shells`: which shared shells there are, joining one, and running a command where the human is looking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from . import shell
from .answers import ShellInfo, ShellRunResult
from .call import Call, perform, wanted
from .decode import decode
from .flow import Awaiting, Blocking, Flow, method
from .grant import Grant
from .opening import Opening

# Seconds for a command in a shell that gives no limit of its own.
RUN_SECONDS = 600.0


@dataclass(frozen=True)
class _Shells:
    items: list[ShellInfo]


class ShellsApi:
    """A shell is known by its name or its id; `main` is where people and agents meet."""

    _grant: Grant

    @method
    def list(self) -> Flow[list[ShellInfo]]:
        """The shells there are."""
        answer = yield from perform(self._grant, Call("GET", "/shells"))
        return decode(_Shells, answer.body, self._grant.base).items

    @method
    def get(self, name: str = "main") -> Flow[ShellInfo]:
        """One shell: its size, who types, whether it is at its prompt."""
        answer = yield from perform(self._grant, Call("GET", f"/shells/{quote(name, safe='')}"))
        return decode(ShellInfo, answer.body, self._grant.base)

    @method
    def create(
        self,
        name: str | None = None,
        *,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        cols: int | None = None,
        rows: int | None = None,
    ) -> Flow[ShellInfo]:
        """Makes a shell without joining it."""
        body = wanted(name=name, command=command, cwd=cwd, env=dict(env) if env is not None else None, cols=cols, rows=rows)
        answer = yield from perform(self._grant, Call("POST", "/shells", json=body, is_repeatable=False))
        return decode(ShellInfo, answer.body, self._grant.base)

    @method
    def hang_up(self, name: str) -> Flow[None]:
        """Ends a shell and what runs in it."""
        yield from perform(self._grant, Call("DELETE", f"/shells/{quote(name, safe='')}", is_repeatable=False))

    @method
    def run(
        self, command: str, *, shell: str = "main", timeout_seconds: float | None = None, max_output_bytes: int | None = None
    ) -> Flow[ShellRunResult]:
        """Runs a command in a shell that people watch. `ShellBusy` says what is in the way: an editor, a program, a half-typed line."""
        body = wanted(command=command, timeout_seconds=timeout_seconds, max_output_bytes=max_output_bytes)
        timeout = (timeout_seconds or RUN_SECONDS) + 30
        answer = yield from perform(
            self._grant, Call("POST", f"/shells/{quote(shell, safe='')}/run", json=body, is_repeatable=False, timeout=timeout)
        )
        return decode(ShellRunResult, answer.body, self._grant.base)


class Shells(ShellsApi, Blocking):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io

    def attach(
        self,
        name: str = "main",
        *,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        cols: int | None = None,
        rows: int | None = None,
        observe: bool = False,
        allow: Sequence[str] = (),
    ) -> shell.Shell:
        """Joins a shell, and makes it where there is none of that name yet. `observe` only looks."""
        start = shell.start_of(name, command=command, cwd=cwd, env=env, cols=cols, rows=rows, observe=observe, allow=allow)
        joined = shell.Shell(self._grant, self._io, start)
        joined.begin()
        return joined

    def observe(self, name: str = "main") -> shell.Shell:
        """Watches a shell and can do nothing else."""
        return self.attach(name, observe=True)


class AsyncShells(ShellsApi, Awaiting):
    def __init__(self, grant: Grant, io: Any) -> None:
        self._grant, self._io = grant, io

    def attach(
        self,
        name: str = "main",
        *,
        command: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        cols: int | None = None,
        rows: int | None = None,
        observe: bool = False,
        allow: Sequence[str] = (),
    ) -> Opening[shell.AsyncShell, shell.ShellEvent]:
        """Joins a shell, and makes it where there is none of that name yet: `async with`, `async for` or `await` it."""
        start = shell.start_of(name, command=command, cwd=cwd, env=env, cols=cols, rows=rows, observe=observe, allow=allow)
        joined = shell.AsyncShell(self._grant, self._io, start)
        return Opening(joined, joined.begin)

    def observe(self, name: str = "main") -> Opening[shell.AsyncShell, shell.ShellEvent]:
        """Watches a shell and can do nothing else."""
        return self.attach(name, observe=True)
