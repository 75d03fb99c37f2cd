"""What the client does, apart from doing it: flows ask for effects, and two small interpreters carry them out.

A *flow* is a generator that yields an effect (send this request, wait that long, …), gets its result and goes on. Everything with a
decision in it (retries, refreshing, resuming a stream at a byte) is a flow, written and tested once. `BlockingIO` carries effects out
with threads and sockets that block, `AwaitingIO` with asyncio; neither decides anything. A public method is a flow under `@method`:
on a `Blocking` object calling it does the work, on an `Awaiting` one it gives a coroutine, and type checkers know which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Union, overload

from .body import Upload
from .secret import Secret

if TYPE_CHECKING:
    from .awaiting import AwaitingIO
    from .blocking import BlockingIO

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Request:
    """One HTTP request, whole."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    body: Upload | None = None
    secret: Secret | None = field(default=None, repr=False)
    # Seconds for all of it, the answer included.
    timeout: float = 60.0
    # Seconds of silence; None: as `timeout`.
    silence: float | None = None
    # Longest answer taken; more is no answer of ours.
    max_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Send:
    """Sends a request and reads its answer. Raises `Unreachable`, `NotCobox` for an answer without end."""

    request: Request


@dataclass(frozen=True)
class Open:
    """The same, but of a success only the head is read: gives an `Opened` to pull from, else an `Answer`."""

    request: Request


@dataclass(frozen=True)
class Opened:
    status: int
    headers: Mapping[str, str]
    source: Any = field(repr=False)


@dataclass(frozen=True)
class Pull:
    """The next bytes of an opened answer; `b""` at its end. Raises `Broken`."""

    opened: Opened


@dataclass(frozen=True)
class Drop:
    opened: Opened


@dataclass(frozen=True)
class Dial:
    """Opens a WebSocket. Raises `Unreachable`, or what an answer that is no 101 says."""

    url: str
    secret: Secret | None = field(repr=False)
    timeout: float


@dataclass(frozen=True)
class Hear:
    """The next message of a socket. Raises `Silence`, `Closed`."""

    socket: Any = field(repr=False)
    timeout: float


@dataclass(frozen=True)
class Say:
    socket: Any = field(repr=False)
    message: str = field(repr=False)


@dataclass(frozen=True)
class HangUp:
    socket: Any = field(repr=False)


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Acquire:
    """Takes a lock that threads and tasks share; the flow releases it itself."""

    lock: threading.Lock


Effect = Union[Send, Open, Pull, Drop, Dial, Hear, Say, HangUp, Pause, Acquire]
Flow = Generator[Effect, Any, T]


class Silence(Exception):
    """Nothing was heard in time."""


class Closed(Exception):
    """A socket is closed; 1006 where nobody said so."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class Blocking:
    """Whose methods do their work before they return."""

    _io: BlockingIO


class Awaiting:
    """Whose methods give coroutines."""

    _io: AwaitingIO


class method(Generic[P, T]):  # noqa: N801 -- used as a decorator
    """A flow as a public method: blocking or awaitable, as the object it is called on."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Flow[T]]) -> None:
        self.flow = flow
        self.__doc__ = flow.__doc__
        self.__name__ = flow.__name__
        self.__wrapped__ = flow

    @overload
    def __get__(self, obj: None, owner: Any) -> method[P, T]: ...
    @overload
    def __get__(self, obj: Blocking, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, obj: Awaiting, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        flow = self.flow

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return obj._io.run(flow(obj, *args, **kwargs))

        call.__doc__, call.__name__ = self.__doc__, self.__name__
        call.__wrapped__ = flow.__get__(obj)  # type: ignore[attr-defined]
        return call
