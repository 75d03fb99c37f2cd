"""Sans-IO core: the effects that a flow can request, and the decorator that turns a flow into a public method.

A *flow* is a generator that yields an effect (send this request, sleep, …) and receives its result. Everything that decides
something (retries, token renewal, resuming a stream at an offset) is a flow, written and tested once. `BlockingIO` executes
effects with threads and blocking sockets, `AsyncIO` with asyncio; neither makes decisions. A public method is a flow under
`@method`: on an object that uses blocking I/O, calling it does the work; on one that uses async I/O, it returns a coroutine. Type
checkers infer which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Union, overload

from .request_body import RequestBody
from .secret import Secret

if TYPE_CHECKING:
    from .async_io import AsyncIO
    from .blocking_io import BlockingIO

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Request:
    """A complete HTTP request."""

    method: str
    url: str
    headers: tuple[tuple[str, str], ...] = ()
    body: RequestBody | None = None
    secret: Secret | None = field(default=None, repr=False)
    # Timeout in seconds for the whole exchange, including the response body.
    timeout: float = 60.0
    # Maximum seconds between two received chunks; None means `timeout`.
    read_timeout: float | None = None
    # Maximum response size; a longer response is rejected.
    max_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True)
class Response:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class SendRequest:
    """Sends a request and reads the whole response. Raises `Unreachable`, or `TooLong` for a body above `max_bytes`."""

    request: Request


@dataclass(frozen=True)
class OpenResponse:
    """Like `SendRequest`, but reads only the head of a successful response: returns an `OpenedResponse` to read chunks from,
    otherwise a complete `Response`."""

    request: Request


@dataclass(frozen=True)
class OpenedResponse:
    status: int
    headers: Mapping[str, str]
    source: Any = field(repr=False)


@dataclass(frozen=True)
class ReadChunk:
    """Reads the next bytes of an opened response; `b""` at the end. Raises `Broken`."""

    opened: OpenedResponse


@dataclass(frozen=True)
class CloseResponse:
    opened: OpenedResponse


@dataclass(frozen=True)
class OpenSocket:
    """Opens a WebSocket. Raises `Unreachable`, or the error in a response other than 101."""

    url: str
    secret: Secret | None = field(repr=False)
    timeout: float


@dataclass(frozen=True)
class ReceiveMessage:
    """Receives the next message of a socket. Raises `ReceiveTimeout`, `SocketClosed`."""

    socket: Any = field(repr=False)
    timeout: float


@dataclass(frozen=True)
class SendMessage:
    socket: Any = field(repr=False)
    message: str = field(repr=False)


@dataclass(frozen=True)
class CloseSocket:
    socket: Any = field(repr=False)


@dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclass(frozen=True)
class AcquireLock:
    """Acquires a lock shared by threads and tasks; the flow releases it itself."""

    lock: threading.Lock


Effect = Union[
    SendRequest, OpenResponse, ReadChunk, CloseResponse, OpenSocket, ReceiveMessage, SendMessage, CloseSocket, Sleep, AcquireLock
]
Flow = Generator[Effect, Any, T]


class ReceiveTimeout(Exception):
    """No message arrived within the timeout."""


class SocketClosed(Exception):
    """The socket is closed; code 1006 if no close frame was received."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class UsesBlockingIO:
    """Marks a class whose `@method` calls block until the work is done."""

    _io: BlockingIO


class UsesAsyncIO:
    """Marks a class whose `@method` calls return coroutines."""

    _io: AsyncIO


class method(Generic[P, T]):  # noqa: N801 -- used as a decorator
    """Exposes a flow as a public method: blocking or awaitable, depending on the object."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Flow[T]]) -> None:
        self.flow = flow
        self.__doc__ = flow.__doc__
        self.__name__ = flow.__name__
        self.__wrapped__ = flow

    @overload
    def __get__(self, obj: None, owner: Any) -> method[P, T]: ...
    @overload
    def __get__(self, obj: UsesBlockingIO, owner: Any) -> Callable[P, T]: ...
    @overload
    def __get__(self, obj: UsesAsyncIO, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        flow = self.flow

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return obj._io.run(flow(obj, *args, **kwargs))

        call.__doc__, call.__name__ = self.__doc__, self.__name__
        call.__wrapped__ = flow.__get__(obj)  # type: ignore[attr-defined]
        return call
