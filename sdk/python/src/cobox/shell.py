"""A shared shell over any number of connections: one participant types, the others watch."""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from . import errors
from .cursor import Cursor
from .effects import Flow, UsesAsyncIO, UsesBlockingIO, method
from .grant import Grant
from .responses import Controller, Exit
from .resumable_stream import ResumableStream, decode_data, parse_uint64


@dataclass(frozen=True)
class ShellOutput:
    """Output of the terminal. NUL bytes replace output hidden from observers."""

    data: bytes = field(repr=False)
    offset: int

    @property
    def text(self) -> str:
        return self.data.replace(b"\0", b"").decode("utf-8", "replace")


@dataclass(frozen=True)
class Screen:
    """A keyframe that replaces output no longer kept: draw it on an empty terminal of this size."""

    data: bytes = field(repr=False)
    cols: int
    rows: int
    offset: int


@dataclass(frozen=True)
class Resized:
    cols: int
    rows: int


@dataclass(frozen=True)
class ControlChanged:
    """Control changed to another participant; None if no participant has it."""

    controller: Controller | None


@dataclass(frozen=True)
class Refused:
    """A frame was refused: an agent's input while a human is typing, for instance."""

    error: errors.CoboxError


ShellEvent = Union[ShellOutput, Screen, Resized, ControlChanged, Refused]


class _ResumableShell(ResumableStream[ShellEvent]):
    route = "/shell/ws"
    # A quarter of what the sandbox buffers per shell, so that the controller never waits for a late acknowledgement.
    ack_bytes = 64 * 1024
    is_keyboard_input = True

    def __init__(self, grant: Grant, start: dict[str, Any]) -> None:
        super().__init__(grant)
        self.start = start | {"binary": True, "client": self.client_id}
        self.cursor = Cursor("the shell", start.get("from"))
        self._has_started = False
        self.id: str | None = None
        self.size = (80, 24)
        self.controller: Controller | None = None
        self.exit: Exit | None = None

    def start_frame(self) -> dict[str, Any]:
        start = dict(self.start)
        if self._has_started:
            # From now on the shell is identified by its id: if it has ended, a reconnect must not start another with the same
            # name.
            start = {name: value for name, value in start.items() if name not in ("command", "cwd", "env")}
        if "epoch" in start and self.cursor.at is not None:
            start["from"] = self.cursor.at
        return start

    def on_ready(self, frame: Mapping[str, Any]) -> None:
        epoch, shell_id = frame["epoch"], frame["shell_id"]
        if not isinstance(epoch, str) or not isinstance(shell_id, str):
            raise ValueError("a ready frame without an epoch")
        if self.start.get("epoch") != epoch:
            # Offsets of another epoch are invalid.
            self.cursor.at = parse_uint64(frame["offset"])
        self.start |= {"epoch": epoch, "shell": shell_id}
        self.id, self.size = shell_id, (parse_uint64(frame["cols"]), parse_uint64(frame["rows"]))
        self._set_controller(frame.get("controller"), is_notified=self._has_started)
        self._has_started = True

    def on_output(self, kind: str, offset: int, data: bytes) -> None:
        if kind == "keyframe":
            self._keyframe(offset, data)
        elif kind == "stdout" and (new := self.cursor.take(offset, data)):
            end = self.cursor.at or 0
            self.queue_event(ShellOutput(new, end - len(new)), "stdout", end, len(new))

    def _keyframe(self, offset: int, data: bytes) -> None:
        self.cursor.at = offset
        self.queue_event(Screen(data, *self.size, offset), "stdout", offset, len(data))

    def on_frame(self, kind: str, frame: Mapping[str, Any]) -> None:
        if kind == "keyframe":
            self.size = (parse_uint64(frame["cols"]), parse_uint64(frame["rows"]))
            self._keyframe(parse_uint64(frame["offset"]), decode_data(frame))
        elif kind == "resized":
            # Announces the size of the binary keyframe that follows.
            before, self.size = self.size, (parse_uint64(frame["cols"]), parse_uint64(frame["rows"]))
            if before != self.size:
                self.queue_event(Resized(*self.size))
        elif kind == "gap":
            self.cursor.skip(parse_uint64(frame["from"]), parse_uint64(frame["to"]))
        elif kind == "control":
            self._set_controller(frame.get("controller"), is_notified=True)
        elif kind == "exit":
            code = frame["exit_code"]
            if type(code) is not int:
                raise ValueError("an exit frame without a code")
            self.exit = Exit(code, frame.get("signal"))

    def _set_controller(self, controller: Any, is_notified: bool) -> None:
        before = self.controller
        self.controller = None if controller is None else Controller(str(controller["principal"]), str(controller["actor"]))
        if is_notified and before != self.controller:
            self.queue_event(ControlChanged(self.controller))

    def on_refused(self, error: errors.CoboxError) -> None:
        self.queue_event(Refused(error))


class ShellApi:
    """Iterating yields events until the shell ends. Closing does not end it: a shell outlives its participants."""

    def __init__(self, grant: Grant, io: Any, start: dict[str, Any]) -> None:
        self._io = io
        self._stream = _ResumableShell(grant, start)

    @property
    def id(self) -> str | None:
        return self._stream.id

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows, set by the controller."""
        return self._stream.size

    @property
    def controller(self) -> Controller | None:
        """The participant that can type."""
        return self._stream.controller

    @property
    def exit(self) -> Exit | None:
        """The shell's outcome; None while it is running."""
        return self._stream.exit

    @property
    def reconnects(self) -> int:
        return self._stream.reconnects

    @method
    def begin(self) -> Flow[None]:
        """Joins the shell; called by the method that opens it."""
        yield from self._stream.wait_until_ready()

    @method
    def next(self) -> Flow[ShellEvent | None]:
        """The next event; None when the shell has ended or was closed here."""
        return (yield from self._stream.next())

    @method
    def read_until(self, text: str | bytes) -> Flow[bytes]:
        """Reads output up to and including the piece in which `text` appears; raises `Broken` if the shell ends first."""
        needle, seen = text.encode() if isinstance(text, str) else text, bytearray()
        while needle not in seen:
            event = yield from self._stream.next()
            if event is None:
                raise errors.Broken("the shell ended before the text appeared")
            if isinstance(event, (ShellOutput, Screen)):
                seen += event.data.replace(b"\0", b"")
        return bytes(seen)

    @method
    def write(self, data: bytes | str) -> Flow[None]:
        """Types input. Without control it is refused, reported as `Refused`."""
        yield from self._stream.write(data.encode() if isinstance(data, str) else bytes(data))

    @method
    def resize(self, cols: int, rows: int) -> Flow[None]:
        """Resizes the terminal; needs control."""
        self._stream.start |= {"cols": cols, "rows": rows}
        yield from self._stream.send_if_connected({"type": "resize", "cols": cols, "rows": rows})

    @method
    def signal(self, signal: str) -> Flow[None]:
        """Sends a signal to the foreground process group."""
        yield from self._stream.send_if_connected({"type": "signal", "signal": signal})

    @method
    def take_control(self) -> Flow[None]:
        """Takes control immediately, as a human may. All participants receive `ControlChanged`."""
        yield from self._stream.send_if_connected({"type": "control", "action": "take"})

    @method
    def request_control(self) -> Flow[None]:
        """Requests control, as agents do; granted unless a human is typing."""
        yield from self._stream.send_if_connected({"type": "control", "action": "request"})

    @method
    def release_control(self) -> Flow[None]:
        """Gives up control."""
        yield from self._stream.send_if_connected({"type": "control", "action": "release"})

    @method
    def close(self) -> Flow[None]:
        """Disconnects; the shell keeps running."""
        yield from self._stream.close()


class Shell(ShellApi, UsesBlockingIO):
    """A joined shell. One thread may read while another types."""

    def __iter__(self) -> Iterator[ShellEvent]:
        while (event := self.next()) is not None:
            yield event

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class AsyncShell(ShellApi, UsesAsyncIO):
    """A joined shell. One task may read while another types."""

    async def __aiter__(self) -> AsyncIterator[ShellEvent]:
        while (event := await self.next()) is not None:
            yield event

    async def __aenter__(self) -> AsyncShell:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()


def shell_start(
    name: str | None,
    *,
    command: str | None,
    cwd: str | None,
    env: Mapping[str, str] | None,
    cols: int | None,
    rows: int | None,
    observe: bool,
    allow: Sequence[str],
) -> dict[str, Any]:
    start: dict[str, Any] = {"shell": name, "command": command, "cwd": cwd, "cols": cols, "rows": rows}
    start = {key: value for key, value in start.items() if value is not None}
    if env is not None:
        start["env"] = dict(env)
    if observe:
        start["observe"] = True
    if allow:
        start["allow"] = [*allow]
    return start
