"""A WebSocket stream that survives lost connections: the part that exec streams and shells share, as flows.

One flow at a time reads (`next`); another may write concurrently, from another thread or task. The reader reconnects after a lost
connection and resumes at the last offset; unacknowledged input is resent under its original sequence numbers.
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
from .effects import AcquireLock, CloseSocket, Flow, OpenSocket, ReceiveMessage, ReceiveTimeout, SendMessage, Sleep, SocketClosed
from .grant import Grant
from .pending_input import PendingInput
from .secret import Secret

log = logging.getLogger("cobox")

E = TypeVar("E")
# Seconds: to open one connection; without a connection before the stream gives up; between two acknowledgements; of silence
# before a ping, and before the connection counts as dead; between two checks for a renewed token.
CONNECT_TIMEOUT, GIVE_UP_AFTER, ACK_INTERVAL, PING_AFTER, DEAD_AFTER, TOKEN_CHECK_INTERVAL = 30.0, 120.0, 0.1, 15.0, 45.0, 5.0
# Seconds a connection must have lasted before its loss resets the backoff. Connections that are lost at once keep increasing it.
STABLE_AFTER = 10.0
# Maximum size of one input frame, in bytes.
INPUT_PIECE_BYTES = 64 * 1024
# Maximum unread output kept for a caller that writes without reading, in bytes.
MAX_UNREAD_BYTES = 16 * 1024 * 1024
# Close codes that are worth a reconnect: going away, no code, abnormal closure, errors, restart, try again later, authentication
# timeout.
TRANSIENT_CLOSE_CODES = (1001, 1005, 1006, 1011, 1012, 1013, 1014, 4408)
UNAUTHENTICATED = 4401
CLOSE_CODE_ERRORS: dict[int, tuple[type[errors.CoboxError], str]] = {
    4403: (errors.CapabilityDenied, "the token lacks the required capability"),
    4409: (errors.Conflict, "another connection of this client took over"),
    4410: (errors.TokenRevoked, "the session has ended or the token was revoked"),
}
BINARY_FRAME_KINDS = {1: "stdout", 2: "stderr", 3: "keyframe"}


class ResumableStream(Generic[E]):
    """Base class; a subclass defines the start frame and handles the received frames."""

    route: str
    # An acknowledgement is sent at the latest after this many bytes.
    ack_bytes: int
    # Whether the input is keyboard input, which expires and can be refused.
    is_keyboard_input = False

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self._socket: Any = None
        self._is_first, self._is_ready, self._is_over = True, False, False
        self._pending: deque[tuple[E, str | None, int]] = deque()
        self._pending_bytes = 0
        self._pending_input = PendingInput(5.0 if self.is_keyboard_input else None)
        self._is_stdin_closed, self._has_closed_stdin = False, False
        self._receiving, self._sending = threading.Lock(), threading.Lock()
        self._consumed: dict[str, int] = {}
        self._acked: dict[str, int] = {}
        self._acked_at = 0.0
        self._reported_error: errors.CoboxError | None = None
        self._sent_token: Secret | None = None
        self._last_received_at, self._pinged = 0.0, False
        self._lost_since: float | None = None
        self._ready_at = 0.0
        self._has_retried_token = False
        self._waits = Backoff()
        self.client_id = os.urandom(12).hex()
        self.reconnects = 0

    # Hooks for subclasses.
    def start_frame(self) -> dict[str, Any]:
        raise NotImplementedError

    def on_ready(self, frame: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def on_output(self, kind: str, offset: int, data: bytes) -> None:
        raise NotImplementedError

    def on_frame(self, kind: str, frame: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def queue_event(self, event: E, stream: str | None = None, end: int = 0, size: int = 0) -> None:
        """Queues an event for the caller. With `stream`, its bytes up to `end` count as consumed once the caller asks for the
        next event."""
        self._pending.append((event, stream, end))
        self._pending_bytes += size

    # Methods for callers.
    def wait_until_ready(self) -> Flow[None]:
        """Connects and waits for the `ready` frame."""
        yield AcquireLock(self._receiving)
        try:
            while not self._is_ready and not self._is_over:
                yield from self._receive()
        finally:
            self._receiving.release()

    def next(self) -> Flow[E | None]:
        """The next event; None after the end. Requesting the next event marks the previous bytes as consumed."""
        yield AcquireLock(self._receiving)
        try:
            while True:
                if self._pending:
                    event, stream, end = self._pending.popleft()
                    if not self._pending:
                        self._pending_bytes = 0
                    if stream is not None:
                        self._consumed[stream] = end
                    return event
                if self._is_over:
                    return None
                yield from self._receive()
        finally:
            self._receiving.release()

    def write(self, data: bytes) -> Flow[None]:
        """Writes input; waits while too much of it is unacknowledged."""
        for at in range(0, len(data), INPUT_PIECE_BYTES):
            yield from self._wait_for_capacity()
            self._pending_input.push(data[at : at + INPUT_PIECE_BYTES])
            yield from self._flush()

    def close_stdin(self) -> Flow[None]:
        self._is_stdin_closed = True
        yield from self._flush()

    def send_if_connected(self, frame: Mapping[str, Any]) -> Flow[None]:
        """Sends a frame that is useless later, such as a signal; raises `Unreachable` without a connection."""
        yield AcquireLock(self._sending)
        try:
            # Read once: the reader may drop the connection concurrently, and sending on a closed socket raises.
            socket = self._socket
            if socket is None or not self._is_ready:
                raise errors.Unreachable("not connected; the reader of this stream reconnects", was_sent=False)
            try:
                yield SendMessage(socket, json.dumps(frame))
            except SocketClosed:
                raise errors.Unreachable("the connection was just lost", was_sent=True) from None
        finally:
            self._sending.release()

    def close(self) -> Flow[None]:
        """Disconnects; the command or shell keeps running unless it was started with `kill_on_disconnect`."""
        self._is_over = True
        yield from self._send_close()

    # Internals.
    def _wait_for_capacity(self) -> Flow[None]:
        while not self._pending_input.has_capacity():
            if self._is_over:
                raise errors.CoboxError("the stream has ended and accepts no more input", code="ENDED")
            if not self._receiving.acquire(blocking=False):
                # Another thread or task is reading and processes the acknowledgements.
                yield Sleep(0.01)
                continue
            try:
                if self._pending_bytes > MAX_UNREAD_BYTES:
                    raise errors.Busy("too much unread output; read it before writing more input")
                yield from self._receive()
            finally:
                self._receiving.release()

    def _flush(self) -> Flow[None]:
        """Sends as much input as this connection's window allows. The reader notices a connection that fails here."""
        yield AcquireLock(self._sending)
        try:
            socket = self._socket
            if socket is None or not self._is_ready:
                return
            while (chunk := self._pending_input.next()) is not None:
                yield SendMessage(socket, json.dumps({"type": "stdin", "seq": chunk[0]} | encode_data(chunk[1])))
            if self._is_stdin_closed and not self._has_closed_stdin and self._pending_input.is_all_sent():
                self._has_closed_stdin = True
                yield SendMessage(socket, '{"type":"close_stdin"}')
        except SocketClosed:
            return
        finally:
            self._sending.release()

    def _receive(self) -> Flow[None]:
        """Handles one message, or times out to send due frames; connects if there is no connection."""
        if self._socket is None:
            yield from self._connect()
        socket = self._socket
        if socket is None:
            return  # Lost immediately or closed concurrently: check again.
        try:
            # Even if sending fails, received messages and the close code are still to be read.
            with contextlib.suppress(SocketClosed):
                yield from self._send_due_frames(socket)
            message = yield ReceiveMessage(socket, self._receive_timeout())
            self._last_received_at, self._pinged = time.monotonic(), False
            yield from self._handle_message(message)
        except ReceiveTimeout:
            if time.monotonic() - self._last_received_at > DEAD_AFTER:
                yield from self._connection_lost(SocketClosed(1006, "no message was received for too long"))
        except SocketClosed as end:
            yield from self._connection_lost(end)

    def _receive_timeout(self) -> float:
        if any(self._consumed[s] > self._acked.get(s, 0) for s in self._consumed):
            return ACK_INTERVAL
        return TOKEN_CHECK_INTERVAL

    def _send_due_frames(self, socket: Any) -> Flow[None]:
        """Sends the frames that are due: acknowledgements, a renewed token, a ping."""
        now = time.monotonic()
        due = [s for s, end in self._consumed.items() if end > self._acked.get(s, 0)]
        if due and (now - self._acked_at >= ACK_INTERVAL or any(self._consumed[s] - self._acked.get(s, 0) >= self.ack_bytes for s in due)):
            self._acked_at = now
            for stream in due:
                self._acked[stream] = self._consumed[stream]
                yield SendMessage(socket, json.dumps({"type": "ack", "offset": self._consumed[stream], "stream": stream}))
        if self._sent_token != self._grant.token.secret:
            self._sent_token = self._grant.token.secret
            yield SendMessage(socket, json.dumps({"type": "auth", "token": self._sent_token.expose()}))
        if now - self._last_received_at > PING_AFTER and not self._pinged:
            self._pinged = True
            yield SendMessage(socket, '{"type":"ping"}')

    def _connect(self) -> Flow[None]:
        """Reconnects until it succeeds or fails permanently."""
        while True:
            secret = yield from self._grant.secret()
            try:
                socket = yield OpenSocket(self._grant.ws_base + self.route, secret, CONNECT_TIMEOUT)
                break
            except errors.CoboxError as error:
                self._sent_token = secret
                yield from self._wait_or_raise(redacted(error, secret))
        if self._is_over:
            yield CloseSocket(socket)  # Closed concurrently while connecting.
            return
        self._socket, self._sent_token, self._reported_error = socket, secret, None
        self._is_ready, self._has_closed_stdin = False, False
        self._last_received_at, self._pinged = time.monotonic(), False
        try:
            yield SendMessage(socket, json.dumps({"type": "start"} | self.start_frame()))
        except SocketClosed as end:
            yield from self._connection_lost(end)

    def _connection_lost(self, end: SocketClosed) -> Flow[None]:
        """Handles a closed connection: waits before reconnecting, or raises the final error."""
        if self._is_ready and time.monotonic() - self._ready_at >= STABLE_AFTER:
            self._reset_backoff()
        yield from self._close_socket()
        if self._is_over:
            return
        reported = self._reported_error
        if end.code == UNAUTHENTICATED:
            yield from self._wait_or_raise(reported or errors.TokenExpired("the token has expired"))
        elif end.code in TRANSIENT_CLOSE_CODES:
            log.debug("connection of %s lost (%s); reconnecting", self.route, end.code)
            yield from self._wait_or_raise(errors.Broken(f"the connection was closed with code {end.code}"), reported)
        else:
            self._is_over = True
            kind, message = CLOSE_CODE_ERRORS.get(
                end.code, (errors.CoboxError, f"the connection was closed with code {end.code}: {end.reason}")
            )
            raise reported or kind(message)

    def _wait_or_raise(self, error: errors.CoboxError, reported: errors.CoboxError | None = None) -> Flow[None]:
        now = time.monotonic()
        self._lost_since = now if self._lost_since is None else self._lost_since
        if isinstance(error, errors.TokenExpired) and not self._has_retried_token:
            # A renewed token that is refused again stays refused.
            self._has_retried_token = True
            if self._sent_token is not None:
                yield from self._renew_token(self._sent_token)
        elif not error.retryable or isinstance(error, errors.TokenExpired):
            self._is_over = True
            raise error
        wait = max(self._waits.next(), min(error.retry_after or 0.0, 10.0))
        if now + wait > self._lost_since + GIVE_UP_AFTER:
            self._is_over = True
            raise errors.GaveUp(f"no connection for {GIVE_UP_AFTER:.0f} s: {reported or error}")
        if self._is_first and isinstance(error, errors.Unreachable) and now - self._lost_since > CONNECT_TIMEOUT:
            self._is_over = True
            raise error
        yield Sleep(wait)

    def _renew_token(self, token: Secret) -> Flow[None]:
        try:
            yield from self._grant.renew(token)
        except errors.CoboxError as error:
            # If the broker is unreachable now, a later attempt renews the token.
            if not error.retryable:
                self._is_over = True
                raise

    def _reset_backoff(self) -> None:
        self._lost_since, self._has_retried_token = None, False
        self._waits.reset()

    def _handle_message(self, message: str | bytes) -> Flow[None]:
        if isinstance(message, bytes):
            kind = BINARY_FRAME_KINDS.get(message[0]) if len(message) >= 9 else None
            if kind is not None:
                yield from self._handle_output(kind, int.from_bytes(message[1:9], "big"), message[9:])
            return
        try:
            frame = json.loads(message)
            kind = frame["type"]
            if kind in ("stdout", "stderr"):
                yield from self._handle_output(kind, parse_uint64(frame["offset"]), decode_data(frame))
            elif kind == "ready":
                self.on_ready(frame)
                yield from self._reconnected()
            elif kind == "stdin_ack":
                self._reset_backoff()
                self._pending_input.acknowledge(parse_uint64(frame["seq"]))
                yield from self._flush()
            elif kind == "error":
                self._handle_error(frame)
            elif kind == "exit":
                self._is_over = True
                self.on_frame(kind, frame)
                yield from self._send_close()
            elif isinstance(kind, str):
                self.on_frame(kind, frame)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._is_over = True
            yield from self._close_socket()
            raise errors.NotCobox(f"{self._grant.ws_base}{self.route} sent an invalid frame") from None

    def _handle_output(self, kind: str, offset: int, data: bytes) -> Flow[None]:
        self._reset_backoff()
        try:
            self.on_output(kind, offset, data)
        except errors.OutputHole:
            self._is_over = True
            yield from self._close_socket()
            raise

    def _handle_error(self, frame: Mapping[str, Any]) -> None:
        error = errors.from_envelope(frame, status=None)
        if error is None:
            raise ValueError("no envelope")
        self._reported_error = error if self._sent_token is None else redacted(error, self._sent_token)
        if not self._is_ready:
            self._reported_error = self.start_error(self._reported_error)
        else:
            if self.is_keyboard_input and isinstance(error, errors.Forbidden):
                self._pending_input.discard_refused()
            self.on_refused(error)

    def start_error(self, error: errors.CoboxError) -> errors.CoboxError:
        """Maps an error that was received instead of `ready`."""
        return error

    def on_refused(self, error: errors.CoboxError) -> None:
        """Handles a refused frame; the command or shell keeps running."""
        log.warning("the sandbox refused a frame: %s", error)

    def _reconnected(self) -> Flow[None]:
        if not self._is_first:
            self.reconnects += 1
        self._is_first = False
        self._lost_since, self._ready_at = None, time.monotonic()
        # No writer may send in between: its input would be marked as sent without having been sent, and the sequence would be out
        # of order.
        yield AcquireLock(self._sending)
        dropped = self._pending_input.restart()
        self._is_ready = True
        self._sending.release()
        if dropped:
            log.warning("dropped %d bytes of input that were too old to resend after the reconnect", dropped)
        yield from self._flush()

    def _send_close(self) -> Flow[None]:
        """Acknowledges everything received and announces that this client will not reconnect."""
        socket = self._socket
        if socket is None:
            return
        try:
            for stream, end in self.received().items():
                if end > self._acked.get(stream, 0):
                    self._acked[stream] = end
                    yield SendMessage(socket, json.dumps({"type": "ack", "offset": end, "stream": stream}))
            yield SendMessage(socket, '{"type":"close"}')
        except SocketClosed:
            pass  # Already closed.
        yield from self._close_socket()

    def received(self) -> dict[str, int]:
        """The received offset of each stream; all of it counts as consumed once the end was read."""
        return dict(self._consumed)

    def _close_socket(self) -> Flow[None]:
        socket, self._socket = self._socket, None
        self._is_ready = False
        if socket is not None:
            yield CloseSocket(socket)


def parse_uint64(value: Any) -> int:
    if type(value) is not int or value < 0 or value >= 1 << 64:
        raise ValueError("not an unsigned 64-bit integer")
    return value


def decode_data(frame: Mapping[str, Any]) -> bytes:
    """Decodes a `data | data_b64` pair."""
    text, b64 = frame.get("data"), frame.get("data_b64")
    if isinstance(b64, str):
        try:
            return base64.b64decode(b64, validate=True)
        except binascii.Error as error:
            raise ValueError("not base64") from error
    return text.encode() if isinstance(text, str) else b""


def encode_data(data: bytes) -> dict[str, str]:
    """Encodes as text if the bytes are valid UTF-8, otherwise as base64."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_b64": base64.b64encode(data).decode()}
