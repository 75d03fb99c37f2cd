"""A command whose output comes as it is made, over as many connections as it takes: no byte lost or doubled, and never run twice."""

from __future__ import annotations

import os
import types
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import errors
from .answers import Exit
from .body import in_utf8
from .call import wanted
from .cursor import Cursor
from .flow import Awaiting, Blocking, Flow, method
from .grant import Grant
from .line import Line, natural


@dataclass(frozen=True)
class Output:
    """A piece of output. `lost`: bytes before it that are no longer kept, because nobody came for them in time."""

    # stdout or stderr
    stream: str
    data: bytes = field(repr=False)
    offset: int
    lost: int = 0

    @property
    def text(self) -> str:
        """For showing; a character cut in two by a piece's end shows as replaced. `data` is exact."""
        return self.data.decode("utf-8", "replace")


def start_of(
    command: str | None,
    argv: Sequence[str] | None,
    *,
    shell: str | None,
    cwd: str | None,
    env: Mapping[str, str] | None,
    pty: bool,
    cols: int | None,
    rows: int | None,
    stdin: bool | str | None,
    timeout_seconds: float | None,
    kill_on_disconnect: bool,
    command_id: str | None,
) -> dict[str, Any]:
    if command is not None and argv is not None:
        raise ValueError("give a command for a shell or an argv, not both")
    if command is None and argv is None and command_id is None:
        raise ValueError("give a command, an argv, or the command_id of one that runs")
    return wanted(
        command=command,
        argv=[*argv] if argv is not None else None,
        shell=shell,
        cwd=cwd,
        env=dict(env) if env is not None else None,
        pty=pty or None,
        cols=cols,
        rows=rows,
        stdin=stdin,
        timeout_seconds=timeout_seconds,
        kill_on_disconnect=kill_on_disconnect or None,
        command_id=command_id or f"cmd-{os.urandom(16).hex()}",
    )


class _ExecLine(Line[Output]):
    route = "/exec/ws"
    ack_bytes = 256 * 1024

    def __init__(self, grant: Grant, start: dict[str, Any], stdout_from: int, stderr_from: int) -> None:
        super().__init__(grant)
        self.start = start | {"binary": True, "client": self.client_id}
        self.cursors = {"stdout": Cursor("stdout", stdout_from), "stderr": Cursor("stderr", stderr_from)}
        self._has_started = False
        # Whether the command was sent, and nobody said what became of it; and whether it was on this very connection.
        self._was_sent, self._is_sent_here = False, False
        self._gaps = {"stdout": 0, "stderr": 0}
        self.pid: int | None = None
        self.exit: Exit | None = None

    def start_frame(self) -> dict[str, Any]:
        start = dict(self.start)
        self._is_sent_here = not self._has_started and not self._was_sent and ("command" in start or "argv" in start)
        if not self._is_sent_here:
            # An id alone only joins: in a sandbox that was started anew the command is gone, and must not be run again.
            start = {
                name: start[name] for name in ("command_id", "binary", "client", "cols", "rows", "kill_on_disconnect") if name in start
            }
        self._was_sent = self._was_sent or self._is_sent_here
        return start | {"stdout_from": self.cursors["stdout"].at, "stderr_from": self.cursors["stderr"].at}

    def not_started(self, error: errors.CoboxError) -> errors.CoboxError:
        if self._is_sent_here:
            # Refused, so nothing runs of it.
            self._was_sent = False
        elif self._was_sent and not self._has_started and isinstance(error, errors.CommandNotFound):
            return errors.MayHaveRun("the connection was lost as the command was started, and the sandbox doesn't know the command")
        return error

    def took_ready(self, frame: Mapping[str, Any]) -> None:
        if self._has_started:
            return
        self._has_started = True
        if not isinstance(frame["command_id"], str):
            raise ValueError("command_id is no text")
        self.start["command_id"] = frame["command_id"]
        self.pid = frame.get("pid") if type(frame.get("pid")) is int else None

    def took_output(self, kind: str, offset: int, data: bytes) -> None:
        if kind not in self.cursors:
            return
        cursor = self.cursors[kind]
        new = cursor.take(offset, data)
        end = cursor.at or 0
        if new:
            lost, self._gaps[kind] = self._gaps[kind], 0
            self.give(Output(kind, new, end - len(new), lost), kind, end, len(new))

    def took_frame(self, kind: str, frame: Mapping[str, Any]) -> None:
        if kind == "gap":
            stream = frame.get("stream") or "stdout"
            self._gaps[stream] += self.cursors[stream].skip(natural(frame["from"]), natural(frame["to"]))
        elif kind == "exit":
            code, signal = frame["exit_code"], frame.get("signal")
            if type(code) is not int or not (signal is None or type(signal) is int):
                raise ValueError("an exit without a code")
            self.exit = Exit(code, signal, frame.get("timed_out") is True)
            for stream, lost in self._gaps.items():
                if lost:
                    self.give(Output(stream, b"", self.cursors[stream].at or 0, lost))

    def received(self) -> dict[str, int]:
        if self.exit is None:
            return dict(self._used)
        return {name: cursor.at or 0 for name, cursor in self.cursors.items()}


class ExecStreamApi:
    """Iterating gives `Output` pieces until the command has ended; then `exit` says how."""

    def __init__(self, grant: Grant, io: Any, start: dict[str, Any], stdout_from: int = 0, stderr_from: int = 0) -> None:
        self._io = io
        self._line = _ExecLine(grant, start, stdout_from, stderr_from)

    @property
    def command_id(self) -> str:
        """To come back with from another process: `session.stream(command_id=…, stdout_from=…)`."""
        return str(self._line.start["command_id"])

    @property
    def pid(self) -> int | None:
        """In the sandbox's own numbering."""
        return self._line.pid

    @property
    def exit(self) -> Exit | None:
        """How it ended; None while it runs."""
        return self._line.exit

    @property
    def offsets(self) -> tuple[int, int]:
        """How far stdout and stderr have been read, in bytes."""
        return self._line.cursors["stdout"].at or 0, self._line.cursors["stderr"].at or 0

    @property
    def reconnects(self) -> int:
        """How often the connection was lost and made again."""
        return self._line.reconnects

    @method
    def begin(self) -> Flow[None]:
        """Starts the command; done by whoever opens the stream."""
        yield from self._line.opened()

    @method
    def next(self) -> Flow[Output | None]:
        """The next piece; None when the command has ended."""
        return (yield from self._line.next())

    @method
    def wait(self) -> Flow[Exit]:
        """Reads on to the end, drops the output, and says how it ended."""
        while (yield from self._line.next()) is not None:
            pass
        if self._line.exit is None:
            raise errors.Broken("the stream was closed before the command ended")
        return self._line.exit

    @method
    def write(self, data: bytes | str) -> Flow[None]:
        """Input for a command started with `stdin=True` or a terminal."""
        yield from self._line.write(in_utf8(data) if isinstance(data, str) else bytes(data))

    @method
    def close_stdin(self) -> Flow[None]:
        """The end of its input."""
        yield from self._line.close_stdin()

    @method
    def signal(self, signal: str) -> Flow[None]:
        """Sends it a signal: INT, TERM, KILL, …"""
        yield from self._line.tell({"type": "signal", "signal": signal})

    @method
    def resize(self, cols: int, rows: int) -> Flow[None]:
        """The size of its terminal."""
        self._line.start |= {"cols": cols, "rows": rows}
        yield from self._line.tell({"type": "resize", "cols": cols, "rows": rows})

    @method
    def close(self) -> Flow[None]:
        """Leaves; the command goes on unless it was started with `kill_on_disconnect`."""
        yield from self._line.closed()


class ExecStream(ExecStreamApi, Blocking):
    """A running command. One thread may read while another writes."""

    def __iter__(self) -> Iterator[Output]:
        while (piece := self.next()) is not None:
            yield piece

    def __enter__(self) -> ExecStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class AsyncExecStream(ExecStreamApi, Awaiting):
    """A running command. One task may read while another writes."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        while (piece := await self.next()) is not None:
            yield piece

    async def __aenter__(self) -> AsyncExecStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()
