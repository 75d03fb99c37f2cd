"""`session.shells`: lists and joins shared shells, and runs a command in a shell that the human is watching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from . import shell
from .awaitable_context import AwaitableContext
from .call import Call, perform, without_none
from .decode import decode
from .effects import Flow, UsesAsyncIO, UsesBlockingIO, method
from .grant import Grant
from .responses import ShellInfo, ShellRunResult

# Default timeout in seconds of a command in a shell.
RUN_SECONDS = 600.0


@dataclass(frozen=True)
class _Shells:
    items: list[ShellInfo]


class ShellsApi:
    """A shell is identified by its name or its id; `main` is shared by people and agents."""

    _grant: Grant

    @method
    def list(self) -> Flow[list[ShellInfo]]:
        """Lists the shells."""
        response = yield from perform(self._grant, Call("GET", "/shells"))
        return decode(_Shells, response.body, self._grant.base).items

    @method
    def get(self, name: str = "main") -> Flow[ShellInfo]:
        """Returns one shell: its size, its controller, whether it is at its prompt."""
        response = yield from perform(self._grant, Call("GET", f"/shells/{quote(name, safe='')}"))
        return decode(ShellInfo, response.body, self._grant.base)

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
        """Creates a shell without joining it."""
        body = without_none(name=name, command=command, cwd=cwd, env=dict(env) if env is not None else None, cols=cols, rows=rows)
        response = yield from perform(self._grant, Call("POST", "/shells", json=body, is_repeatable=False))
        return decode(ShellInfo, response.body, self._grant.base)

    @method
    def hang_up(self, name: str) -> Flow[None]:
        """Ends a shell and the processes in it."""
        yield from perform(self._grant, Call("DELETE", f"/shells/{quote(name, safe='')}", is_repeatable=False))

    @method
    def run(
        self, command: str, *, shell: str = "main", timeout_seconds: float | None = None, max_output_bytes: int | None = None
    ) -> Flow[ShellRunResult]:
        """Runs a command in a shell that people watch. `ShellBusy` names the obstacle: an editor, a running program, a half-typed
        line."""
        body = without_none(command=command, timeout_seconds=timeout_seconds, max_output_bytes=max_output_bytes)
        timeout = (timeout_seconds or RUN_SECONDS) + 30
        response = yield from perform(
            self._grant, Call("POST", f"/shells/{quote(shell, safe='')}/run", json=body, is_repeatable=False, timeout=timeout)
        )
        return decode(ShellRunResult, response.body, self._grant.base)


class Shells(ShellsApi, UsesBlockingIO):
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
        """Joins a shell and creates it if there is none with this name. With `observe` it is read-only."""
        start = shell.shell_start(name, command=command, cwd=cwd, env=env, cols=cols, rows=rows, observe=observe, allow=allow)
        joined = shell.Shell(self._grant, self._io, start)
        joined.begin()
        return joined

    def observe(self, name: str = "main") -> shell.Shell:
        """Joins a shell read-only."""
        return self.attach(name, observe=True)


class AsyncShells(ShellsApi, UsesAsyncIO):
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
    ) -> AwaitableContext[shell.AsyncShell, shell.ShellEvent]:
        """Joins a shell and creates it if there is none with this name: use `async with`, `async for` or `await`."""
        start = shell.shell_start(name, command=command, cwd=cwd, env=env, cols=cols, rows=rows, observe=observe, allow=allow)
        joined = shell.AsyncShell(self._grant, self._io, start)
        return AwaitableContext(joined, joined.begin)

    def observe(self, name: str = "main") -> AwaitableContext[shell.AsyncShell, shell.ShellEvent]:
        """Joins a shell read-only."""
        return self.attach(name, observe=True)
