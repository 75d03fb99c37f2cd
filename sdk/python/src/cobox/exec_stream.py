"""Streams a command's output over any number of connections: no byte is lost or duplicated, and the command never runs twice."""

from __future__ import annotations

import os
import types
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import errors
from .call import without_none
from .cursor import Cursor
from .effects import Flow, UsesAsyncIO, UsesBlockingIO, method
from .grant import Grant
from .request_body import encode_utf8
from .responses import Exit
from .resumable_stream import ResumableStream, parse_uint64


@dataclass(frozen=True)
class Output:
    """A piece of output. `lost`: number of bytes before it that the sandbox no longer keeps, because they were not read in time."""

    # `stdout` or `stderr`.
    stream: str
    data: bytes = field(repr=False)
    offset: int
    lost: int = 0

    @property
    def text(self) -> str:
        """Text for display. A character split between two pieces shows as a replacement character; `data` is exact."""
        return self.data.decode("utf-8", "replace")


def exec_start(
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
        raise ValueError("give a command, an argv, or the command_id of a running command")
    return without_none(
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


class _ResumableExec(ResumableStream[Output]):
    route = "/exec/ws"
    ack_bytes = 256 * 1024

    def __init__(self, grant: Grant, start: dict[str, Any], stdout_from: int, stderr_from: int) -> None:
        super().__init__(grant)
        self.start = start | {"binary": True, "client": self.client_id}
        self.cursors = {"stdout": Cursor("stdout", stdout_from), "stderr": Cursor("stderr", stderr_from)}
        self._has_started = False
        # Whether the command was sent without a known outcome, and whether on the current connection.
        self._was_start_sent, self._sends_start = False, False
        self._gaps = {"stdout": 0, "stderr": 0}
        self.pid: int | None = None
        self.exit: Exit | None = None

    def start_frame(self) -> dict[str, Any]:
        start = dict(self.start)
        self._sends_start = not self._has_started and not self._was_start_sent and ("command" in start or "argv" in start)
        if not self._sends_start:
            # An id alone only joins a command. In a restarted sandbox the command is gone and must not run again.
            start = {
                name: start[name] for name in ("command_id", "binary", "client", "cols", "rows", "kill_on_disconnect") if name in start
            }
        self._was_start_sent = self._was_start_sent or self._sends_start
        return start | {"stdout_from": self.cursors["stdout"].at, "stderr_from": self.cursors["stderr"].at}

    def start_error(self, error: errors.CoboxError) -> errors.CoboxError:
        if self._sends_start:
            # The command was refused, so it is not running.
            self._was_start_sent = False
        elif self._was_start_sent and not self._has_started and isinstance(error, errors.CommandNotFound):
            return errors.MayHaveRun("the connection was lost while the command was starting, and the sandbox doesn't know the command")
        return error

    def on_ready(self, frame: Mapping[str, Any]) -> None:
        if self._has_started:
            return
        self._has_started = True
        if not isinstance(frame["command_id"], str):
            raise ValueError("command_id is no text")
        self.start["command_id"] = frame["command_id"]
        self.pid = frame.get("pid") if type(frame.get("pid")) is int else None

    def on_output(self, kind: str, offset: int, data: bytes) -> None:
        if kind not in self.cursors:
            return
        cursor = self.cursors[kind]
        new = cursor.take(offset, data)
        end = cursor.at or 0
        if new:
            lost, self._gaps[kind] = self._gaps[kind], 0
            self.queue_event(Output(kind, new, end - len(new), lost), kind, end, len(new))

    def on_frame(self, kind: str, frame: Mapping[str, Any]) -> None:
        if kind == "gap":
            stream = frame.get("stream") or "stdout"
            self._gaps[stream] += self.cursors[stream].skip(parse_uint64(frame["from"]), parse_uint64(frame["to"]))
        elif kind == "exit":
            code, signal = frame["exit_code"], frame.get("signal")
            if type(code) is not int or not (signal is None or type(signal) is int):
                raise ValueError("an exit frame without a code")
            self.exit = Exit(code, signal, frame.get("timed_out") is True)
            for stream, lost in self._gaps.items():
                if lost:
                    self.queue_event(Output(stream, b"", self.cursors[stream].at or 0, lost))

    def received(self) -> dict[str, int]:
        if self.exit is None:
            return dict(self._consumed)
        return {name: cursor.at or 0 for name, cursor in self.cursors.items()}


class ExecStreamApi:
    """Iterating yields `Output` pieces until the command ends; then `exit` holds its outcome."""

    def __init__(self, grant: Grant, io: Any, start: dict[str, Any], stdout_from: int = 0, stderr_from: int = 0) -> None:
        self._io = io
        self._stream = _ResumableExec(grant, start, stdout_from, stderr_from)

    @property
    def command_id(self) -> str:
        """Resumes the stream from another process: `session.stream(command_id=…, stdout_from=…)`."""
        return str(self._stream.start["command_id"])

    @property
    def pid(self) -> int | None:
        """The process id in the sandbox's pid namespace."""
        return self._stream.pid

    @property
    def exit(self) -> Exit | None:
        """The command's outcome; None while it runs."""
        return self._stream.exit

    @property
    def offsets(self) -> tuple[int, int]:
        """The offsets in bytes up to which stdout and stderr have been read."""
        return self._stream.cursors["stdout"].at or 0, self._stream.cursors["stderr"].at or 0

    @property
    def reconnects(self) -> int:
        """Number of times the connection was reestablished."""
        return self._stream.reconnects

    @method
    def begin(self) -> Flow[None]:
        """Starts the command; called by the method that opens the stream."""
        yield from self._stream.wait_until_ready()

    @method
    def next(self) -> Flow[Output | None]:
        """The next piece; None when the command has ended."""
        return (yield from self._stream.next())

    @method
    def wait(self) -> Flow[Exit]:
        """Reads and discards the remaining output and returns the command's outcome."""
        while (yield from self._stream.next()) is not None:
            pass
        if self._stream.exit is None:
            raise errors.Broken("the stream was closed before the command ended")
        return self._stream.exit

    @method
    def write(self, data: bytes | str) -> Flow[None]:
        """Writes input to a command that was started with `stdin=True` or a terminal."""
        yield from self._stream.write(encode_utf8(data) if isinstance(data, str) else bytes(data))

    @method
    def close_stdin(self) -> Flow[None]:
        """Closes the command's input."""
        yield from self._stream.close_stdin()

    @method
    def signal(self, signal: str) -> Flow[None]:
        """Sends the command a signal: INT, TERM, KILL, …"""
        yield from self._stream.send_if_connected({"type": "signal", "signal": signal})

    @method
    def resize(self, cols: int, rows: int) -> Flow[None]:
        """Changes the size of the command's terminal."""
        self._stream.start |= {"cols": cols, "rows": rows}
        yield from self._stream.send_if_connected({"type": "resize", "cols": cols, "rows": rows})

    @method
    def close(self) -> Flow[None]:
        """Disconnects; the command keeps running unless it was started with `kill_on_disconnect`."""
        yield from self._stream.close()


class ExecStream(ExecStreamApi, UsesBlockingIO):
    """A running command. One thread may read while another writes."""

    def __iter__(self) -> Iterator[Output]:
        while (piece := self.next()) is not None:
            yield piece

    def __enter__(self) -> ExecStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class AsyncExecStream(ExecStreamApi, UsesAsyncIO):
    """A running command. One task may read while another writes."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        while (piece := await self.next()) is not None:
            yield piece

    async def __aenter__(self) -> AsyncExecStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()
