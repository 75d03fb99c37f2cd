"""A conversation over as many WebSockets as it takes: what exec streams and shells have in common, as flows.

One flow at a time listens (`next`); another may write meanwhile, from another thread or task. A lost connection is dialled again by
whoever listens, from the byte that was reached; input that was not acknowledged is sent again under the same numbers.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from . import errors
from .call import Backoff, redacted
from .cursor import Typing
from .flow import Acquire, Closed, Dial, Flow, HangUp, Hear, Pause, Say, Silence
from .grant import Grant
from .secret import Secret

log = logging.getLogger("cobox")

E = TypeVar("E")
# Seconds: for one try to dial; without a success after which a stream ends; between two acknowledgements; until an unheard-of connection
# is asked whether it lives, and until it counts as dead; between two looks at whether the token is a new one.
DIAL_WITHIN, GIVE_UP_AFTER, ACK_WITHIN, PING_AFTER, DEAD_AFTER, LOOK_EVERY = 30.0, 120.0, 0.1, 15.0, 45.0, 5.0
# Seconds a connection must have stood for its loss to count as the first again: of one that is lost at once, waits go on growing.
STOOD_FOR = 10.0
# Largest piece of input in one frame, in bytes.
INPUT_PIECE_BYTES = 64 * 1024
# What is kept for a caller who writes and doesn't read, in bytes.
MAX_UNREAD_BYTES = 16 * 1024 * 1024
# Closed for a reason that may pass: going away, no code, broken off, errors, restart, try later, and no auth in time.
PASSING = (1001, 1005, 1006, 1011, 1012, 1013, 1014, 4408)
UNAUTHENTICATED = 4401
CLOSED_BECAUSE: dict[int, tuple[type[errors.CoboxError], str]] = {
    4403: (errors.CapabilityDenied, "the token doesn't allow this"),
    4409: (errors.Conflict, "another connection of this client took over"),
    4410: (errors.TokenRevoked, "it was ended: the session is over or the token was revoked"),
}
KINDS = {1: "stdout", 2: "stderr", 3: "keyframe"}


class Line(Generic[E]):
    """Subclasses say what is started and what frames mean."""

    route: str
    # Acknowledged at the latest after so many bytes.
    ack_bytes: int
    # Whether input is keys, which are not sent any more when they are old, and can be refused.
    is_keys = False

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self._socket: Any = None
        self._is_first, self._is_ready, self._is_over = True, False, False
        self._pending: deque[tuple[E, str | None, int]] = deque()
        self._pending_bytes = 0
        self._typing = Typing(5.0 if self.is_keys else None)
        self._is_stdin_closed, self._has_closed_stdin = False, False
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._used: dict[str, int] = {}
        self._acked: dict[str, int] = {}
        self._acked_at = 0.0
        self._told: errors.CoboxError | None = None
        self._shown: Secret | None = None
        self._heard_at, self._pinged = 0.0, False
        self._lost_since: float | None = None
        self._ready_at = 0.0
        self._has_retried_token = False
        self._waits = Backoff()
        self.client_id = os.urandom(12).hex()
        self.reconnects = 0

    # What a subclass knows.
    def start_frame(self) -> dict[str, Any]:
        raise NotImplementedError

    def took_ready(self, frame: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def took_output(self, kind: str, offset: int, data: bytes) -> None:
        raise NotImplementedError

    def took_frame(self, kind: str, frame: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def give(self, event: E, stream: str | None = None, end: int = 0, size: int = 0) -> None:
        """An event for the caller; with a stream, its bytes are used up to `end` once the caller comes for the next."""
        self._pending.append((event, stream, end))
        self._pending_bytes += size

    # What callers do.
    def opened(self) -> Flow[None]:
        """Connects and waits until the other side is ready."""
        yield Acquire(self._receiving)
        try:
            while not self._is_ready and not self._is_over:
                yield from self._receive()
        finally:
            self._receiving.release()

    def next(self) -> Flow[E | None]:
        """What happens next; None after the end. Coming back for more says that the last bytes have been used."""
        yield Acquire(self._receiving)
        try:
            while True:
                if self._pending:
                    event, stream, end = self._pending.popleft()
                    if not self._pending:
                        self._pending_bytes = 0
                    if stream is not None:
                        self._used[stream] = end
                    return event
                if self._is_over:
                    return None
                yield from self._receive()
        finally:
            self._receiving.release()

    def write(self, data: bytes) -> Flow[None]:
        """Input; waits while the other side doesn't take what it was given before."""
        for at in range(0, len(data), INPUT_PIECE_BYTES):
            yield from self._make_room()
            self._typing.push(data[at : at + INPUT_PIECE_BYTES])
            yield from self._flush()

    def close_stdin(self) -> Flow[None]:
        self._is_stdin_closed = True
        yield from self._flush()

    def tell(self, frame: Mapping[str, Any]) -> Flow[None]:
        """A frame that is only worth sending now; `Unreachable` where there is no connection."""
        yield Acquire(self._sending)
        try:
            # Looked at once: whoever listens may drop it meanwhile, and a closed one says so.
            socket = self._socket
            if socket is None or not self._is_ready:
                raise errors.Unreachable("there is no connection now; it is made again while somebody listens", was_sent=False)
            try:
                yield Say(socket, json.dumps(frame))
            except Closed:
                raise errors.Unreachable("the connection was lost just now", was_sent=True) from None
        finally:
            self._sending.release()

    def closed(self) -> Flow[None]:
        """Says good-bye; what was started goes on unless it was started otherwise."""
        self._is_over = True
        yield from self._farewell()

    # What happens beneath.
    def _make_room(self) -> Flow[None]:
        while not self._typing.has_room():
            if self._is_over:
                raise errors.CoboxError("it has ended; nothing takes input any more", code="ENDED")
            if not self._receiving.acquire(blocking=False):
                # Somebody listens, and hears what is acknowledged.
                yield Pause(0.01)
                continue
            try:
                if self._pending_bytes > MAX_UNREAD_BYTES:
                    raise errors.Busy("much output waits to be read before more input is taken; read it first")
                yield from self._receive()
            finally:
                self._receiving.release()

    def _flush(self) -> Flow[None]:
        """Sends what this connection may have of the input. A connection that fails here is noticed by whoever listens."""
        yield Acquire(self._sending)
        try:
            socket = self._socket
            if socket is None or not self._is_ready:
                return
            while (typed := self._typing.next()) is not None:
                yield Say(socket, json.dumps({"type": "stdin", "seq": typed[0]} | as_data(typed[1])))
            if self._is_stdin_closed and not self._has_closed_stdin and self._typing.is_all_sent():
                self._has_closed_stdin = True
                yield Say(socket, '{"type":"close_stdin"}')
        except Closed:
            return
        finally:
            self._sending.release()

    def _receive(self) -> Flow[None]:
        """One message, or one look at the clock; dials where there is no connection."""
        if self._socket is None:
            yield from self._connect()
        socket = self._socket
        if socket is None:
            return  # It broke at once, or somebody closed it: look again.
        try:
            # Where nothing can be said any more, what was said to us before is still to be heard, and the end after it.
            with contextlib.suppress(Closed):
                yield from self._keep_up(socket)
            message = yield Hear(socket, self._patience())
            self._heard_at, self._pinged = time.monotonic(), False
            yield from self._take(message)
        except Silence:
            if time.monotonic() - self._heard_at > DEAD_AFTER:
                yield from self._lost(Closed(1006, "nothing was heard for too long"))
        except Closed as end:
            yield from self._lost(end)

    def _patience(self) -> float:
        if any(self._used[s] > self._acked.get(s, 0) for s in self._used):
            return ACK_WITHIN
        return LOOK_EVERY

    def _keep_up(self, socket: Any) -> Flow[None]:
        """What is due on this connection: acknowledgements, a fresh token, a question whether it lives."""
        now = time.monotonic()
        due = [s for s, end in self._used.items() if end > self._acked.get(s, 0)]
        if due and (now - self._acked_at >= ACK_WITHIN or any(self._used[s] - self._acked.get(s, 0) >= self.ack_bytes for s in due)):
            self._acked_at = now
            for stream in due:
                self._acked[stream] = self._used[stream]
                yield Say(socket, json.dumps({"type": "ack", "offset": self._used[stream], "stream": stream}))
        if self._shown != self._grant.token.secret:
            self._shown = self._grant.token.secret
            yield Say(socket, json.dumps({"type": "auth", "token": self._shown.expose()}))
        if now - self._heard_at > PING_AFTER and not self._pinged:
            self._pinged = True
            yield Say(socket, '{"type":"ping"}')

    def _connect(self) -> Flow[None]:
        """Dials until it answers, or for as long as that makes sense."""
        while True:
            secret = yield from self._grant.secret()
            try:
                socket = yield Dial(self._grant.ws_base + self.route, secret, DIAL_WITHIN)
                break
            except errors.CoboxError as error:
                self._shown = secret
                yield from self._wait_or_raise(redacted(error, secret))
        if self._is_over:
            yield HangUp(socket)  # Closed by somebody while it was dialled.
            return
        self._socket, self._shown, self._told = socket, secret, None
        self._is_ready, self._has_closed_stdin = False, False
        self._heard_at, self._pinged = time.monotonic(), False
        try:
            yield Say(socket, json.dumps({"type": "start"} | self.start_frame()))
        except Closed as end:
            yield from self._lost(end)

    def _lost(self, end: Closed) -> Flow[None]:
        """The connection is no more: dial again, or raise what ended it."""
        if self._is_ready and time.monotonic() - self._ready_at >= STOOD_FOR:
            self._progressed()
        yield from self._drop()
        if self._is_over:
            return
        told = self._told
        if end.code == UNAUTHENTICATED:
            yield from self._wait_or_raise(told or errors.TokenExpired("the token has expired"))
        elif end.code in PASSING:
            log.debug("a connection of %s is lost (%s); dialling again", self.route, end.code)
            yield from self._wait_or_raise(errors.Broken(f"the connection closed with {end.code}"), told)
        else:
            self._is_over = True
            kind, words = CLOSED_BECAUSE.get(end.code, (errors.CoboxError, f"the connection was closed with {end.code}: {end.reason}"))
            raise told or kind(words)

    def _wait_or_raise(self, error: errors.CoboxError, told: errors.CoboxError | None = None) -> Flow[None]:
        now = time.monotonic()
        self._lost_since = now if self._lost_since is None else self._lost_since
        if isinstance(error, errors.TokenExpired) and not self._has_retried_token:
            # A token refused twice stays refused.
            self._has_retried_token = True
            if self._shown is not None:
                yield from self._replace(self._shown)
        elif not error.retryable or isinstance(error, errors.TokenExpired):
            self._is_over = True
            raise error
        wait = max(self._waits.next(), min(error.retry_after or 0.0, 10.0))
        if now + wait > self._lost_since + GIVE_UP_AFTER:
            self._is_over = True
            raise errors.GaveUp(f"no connection for {GIVE_UP_AFTER:.0f} s: {told or error}")
        if self._is_first and isinstance(error, errors.Unreachable) and now - self._lost_since > DIAL_WITHIN:
            self._is_over = True
            raise error
        yield Pause(wait)

    def _replace(self, token: Secret) -> Flow[None]:
        try:
            yield from self._grant.replace(token)
        except errors.CoboxError as error:
            # A broker that can't be reached now is what the coming tries are for.
            if not error.retryable:
                self._is_over = True
                raise

    def _progressed(self) -> None:
        self._lost_since, self._has_retried_token = None, False
        self._waits.reset()

    def _take(self, message: str | bytes) -> Flow[None]:
        if isinstance(message, bytes):
            kind = KINDS.get(message[0]) if len(message) >= 9 else None
            if kind is not None:
                yield from self._took_output(kind, int.from_bytes(message[1:9], "big"), message[9:])
            return
        try:
            frame = json.loads(message)
            kind = frame["type"]
            if kind in ("stdout", "stderr"):
                yield from self._took_output(kind, natural(frame["offset"]), data_of(frame))
            elif kind == "ready":
                self.took_ready(frame)
                yield from self._came_back()
            elif kind == "stdin_ack":
                self._progressed()
                self._typing.acked(natural(frame["seq"]))
                yield from self._flush()
            elif kind == "error":
                self._took_error(frame)
            elif kind == "exit":
                self._is_over = True
                self.took_frame(kind, frame)
                yield from self._farewell()
            elif isinstance(kind, str):
                self.took_frame(kind, frame)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._is_over = True
            yield from self._drop()
            raise errors.NotCobox(f"{self._grant.ws_base}{self.route} sent a frame that can't be read") from None

    def _took_output(self, kind: str, offset: int, data: bytes) -> Flow[None]:
        self._progressed()
        try:
            self.took_output(kind, offset, data)
        except errors.OutputHole:
            self._is_over = True
            yield from self._drop()
            raise

    def _took_error(self, frame: Mapping[str, Any]) -> None:
        error = errors.from_envelope(frame, status=None)
        if error is None:
            raise ValueError("no envelope")
        self._told = error if self._shown is None else redacted(error, self._shown)
        if not self._is_ready:
            self._told = self.not_started(self._told)
        else:
            if self.is_keys and isinstance(error, errors.Forbidden):
                self._typing.refused()
            self.refused(error)

    def not_started(self, error: errors.CoboxError) -> errors.CoboxError:
        """What an error means that came in place of `ready`."""
        return error

    def refused(self, error: errors.CoboxError) -> None:
        """Something that was sent was not taken; what was started goes on."""
        log.warning("the sandbox did not take what was sent: %s", error)

    def _came_back(self) -> Flow[None]:
        if not self._is_first:
            self.reconnects += 1
        self._is_first = False
        self._lost_since, self._ready_at = None, time.monotonic()
        # Nobody may send between the two: what was sent before would be taken for sent, and the numbers would be out of order.
        yield Acquire(self._sending)
        dropped = self._typing.start_over()
        self._is_ready = True
        self._sending.release()
        if dropped:
            log.warning("%d bytes of input were too old to be sent after the connection came back", dropped)
        yield from self._flush()

    def _farewell(self) -> Flow[None]:
        """Everything that came is acknowledged, and the other side told that nobody comes back."""
        socket = self._socket
        if socket is None:
            return
        try:
            for stream, end in self.received().items():
                if end > self._acked.get(stream, 0):
                    self._acked[stream] = end
                    yield Say(socket, json.dumps({"type": "ack", "offset": end, "stream": stream}))
            yield Say(socket, '{"type":"close"}')
        except Closed:
            pass  # It is gone already.
        yield from self._drop()

    def received(self) -> dict[str, int]:
        """How far each stream has come; all of it counts as used when the end was read."""
        return dict(self._used)

    def _drop(self) -> Flow[None]:
        socket, self._socket = self._socket, None
        self._is_ready = False
        if socket is not None:
            yield HangUp(socket)


def natural(value: Any) -> int:
    if type(value) is not int or value < 0 or value >= 1 << 64:
        raise ValueError("not a natural number")
    return value


def data_of(frame: Mapping[str, Any]) -> bytes:
    """The bytes of a `data | data_b64` pair."""
    text, b64 = frame.get("data"), frame.get("data_b64")
    if isinstance(b64, str):
        try:
            return base64.b64decode(b64, validate=True)
        except binascii.Error as error:
            raise ValueError("not base64") from error
    return text.encode() if isinstance(text, str) else b""


def as_data(data: bytes) -> dict[str, str]:
    """As text where it is text, in base64 where that would change it."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_b64": base64.b64encode(data).decode()}
