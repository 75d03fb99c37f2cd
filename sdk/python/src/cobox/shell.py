"""A shared shell, watched and typed into over as many connections as it takes; one types, many watch."""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from . import errors
from .answers import Controller, Exit
from .cursor import Cursor
from .flow import Awaiting, Blocking, Flow, method
from .grant import Grant
from .line import Line, data_of, natural


@dataclass(frozen=True)
class ShellOutput:
    """What the terminal printed. NUL bytes stand where something was hidden from viewers."""

    data: bytes = field(repr=False)
    offset: int

    @property
    def text(self) -> str:
        return self.data.replace(b"\0", b"").decode("utf-8", "replace")


@dataclass(frozen=True)
class Screen:
    """The screen as it was, in place of bytes that are no longer kept: to be drawn on an empty terminal of this size."""

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
    """Somebody else types now; None: nobody."""

    controller: Controller | None


@dataclass(frozen=True)
class Refused:
    """Something that was sent was not taken: an agent's keys while a human types, for instance."""

    error: errors.CoboxError


ShellEvent = Union[ShellOutput, Screen, Resized, ControlChanged, Refused]


class _ShellLine(Line[ShellEvent]):
    route = "/shell/ws"
    # A quarter of what a shell keeps: its controller is never waited for because an acknowledgement is late.
    ack_bytes = 64 * 1024
    is_keys = True

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
            # By now it names the shell by its id: if that has ended, another of its name must not be started in its place.
            start = {name: value for name, value in start.items() if name not in ("command", "cwd", "env")}
        if "epoch" in start and self.cursor.at is not None:
            start["from"] = self.cursor.at
        return start

    def took_ready(self, frame: Mapping[str, Any]) -> None:
        epoch, shell_id = frame["epoch"], frame["shell_id"]
        if not isinstance(epoch, str) or not isinstance(shell_id, str):
            raise ValueError("ready without an epoch")
        if self.start.get("epoch") != epoch:
            # Offsets of another epoch mean nothing.
            self.cursor.at = natural(frame["offset"])
        self.start |= {"epoch": epoch, "shell": shell_id}
        self.id, self.size = shell_id, (natural(frame["cols"]), natural(frame["rows"]))
        self._now_controlled_by(frame.get("controller"), is_told=self._has_started)
        self._has_started = True

    def took_output(self, kind: str, offset: int, data: bytes) -> None:
        if kind == "keyframe":
            self._keyframe(offset, data)
        elif kind == "stdout" and (new := self.cursor.take(offset, data)):
            end = self.cursor.at or 0
            self.give(ShellOutput(new, end - len(new)), "stdout", end, len(new))

    def _keyframe(self, offset: int, data: bytes) -> None:
        self.cursor.at = offset
        self.give(Screen(data, *self.size, offset), "stdout", offset, len(data))

    def took_frame(self, kind: str, frame: Mapping[str, Any]) -> None:
        if kind == "keyframe":
            self.size = (natural(frame["cols"]), natural(frame["rows"]))
            self._keyframe(natural(frame["offset"]), data_of(frame))
        elif kind == "resized":
            # Before a binary keyframe this tells its size.
            before, self.size = self.size, (natural(frame["cols"]), natural(frame["rows"]))
            if before != self.size:
                self.give(Resized(*self.size))
        elif kind == "gap":
            self.cursor.skip(natural(frame["from"]), natural(frame["to"]))
        elif kind == "control":
            self._now_controlled_by(frame.get("controller"), is_told=True)
        elif kind == "exit":
            code = frame["exit_code"]
            if type(code) is not int:
                raise ValueError("an exit without a code")
            self.exit = Exit(code, frame.get("signal"))

    def _now_controlled_by(self, told: Any, is_told: bool) -> None:
        before = self.controller
        self.controller = None if told is None else Controller(str(told["principal"]), str(told["actor"]))
        if is_told and before != self.controller:
            self.give(ControlChanged(self.controller))

    def refused(self, error: errors.CoboxError) -> None:
        self.give(Refused(error))


class ShellApi:
    """Iterating gives what happens in the shell until it ends. Leaving ends nothing: a shell outlives its viewers."""

    def __init__(self, grant: Grant, io: Any, start: dict[str, Any]) -> None:
        self._io = io
        self._line = _ShellLine(grant, start)

    @property
    def id(self) -> str | None:
        return self._line.id

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows: those of whoever types."""
        return self._line.size

    @property
    def controller(self) -> Controller | None:
        """Who types."""
        return self._line.controller

    @property
    def exit(self) -> Exit | None:
        """How the shell ended; None while it lives."""
        return self._line.exit

    @property
    def reconnects(self) -> int:
        return self._line.reconnects

    @method
    def begin(self) -> Flow[None]:
        """Joins; done by whoever opens it."""
        yield from self._line.opened()

    @method
    def next(self) -> Flow[ShellEvent | None]:
        """What happens next; None when the shell has ended or was left."""
        return (yield from self._line.next())

    @method
    def read_until(self, text: str | bytes) -> Flow[bytes]:
        """Output up to and with the piece in which `text` has appeared; raises `Broken` where the shell ends before."""
        needle, seen = text.encode() if isinstance(text, str) else text, bytearray()
        while needle not in seen:
            event = yield from self._line.next()
            if event is None:
                raise errors.Broken("the shell ended before the text appeared")
            if isinstance(event, (ShellOutput, Screen)):
                seen += event.data.replace(b"\0", b"")
        return bytes(seen)

    @method
    def write(self, data: bytes | str) -> Flow[None]:
        """Types. Who isn't in control is refused, and hears of it as `Refused`."""
        yield from self._line.write(data.encode() if isinstance(data, str) else bytes(data))

    @method
    def resize(self, cols: int, rows: int) -> Flow[None]:
        """The terminal's size, while in control."""
        self._line.start |= {"cols": cols, "rows": rows}
        yield from self._line.tell({"type": "resize", "cols": cols, "rows": rows})

    @method
    def signal(self, signal: str) -> Flow[None]:
        """Sends what runs in front a signal."""
        yield from self._line.tell({"type": "signal", "signal": signal})

    @method
    def take_control(self) -> Flow[None]:
        """Takes the keyboard at once, as a human may. Everyone hears of it as `ControlChanged`."""
        yield from self._line.tell({"type": "control", "action": "take"})

    @method
    def request_control(self) -> Flow[None]:
        """Asks for the keyboard, as agents do; granted where no human types."""
        yield from self._line.tell({"type": "control", "action": "request"})

    @method
    def release_control(self) -> Flow[None]:
        """Lets go of the keyboard."""
        yield from self._line.tell({"type": "control", "action": "release"})

    @method
    def close(self) -> Flow[None]:
        """Leaves the shell, which lives on."""
        yield from self._line.closed()


class Shell(ShellApi, Blocking):
    """A joined shell. One thread may read while another types."""

    def __iter__(self) -> Iterator[ShellEvent]:
        while (event := self.next()) is not None:
            yield event

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class AsyncShell(ShellApi, Awaiting):
    """A joined shell. One task may read while another types."""

    async def __aiter__(self) -> AsyncIterator[ShellEvent]:
        while (event := await self.next()) is not None:
            yield event

    async def __aenter__(self) -> AsyncShell:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()


def start_of(
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
