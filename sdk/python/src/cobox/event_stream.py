"""Server-sent events over any number of connections: session events and file changes, each delivered once and in order."""

from __future__ import annotations

import json
import time
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

from . import errors
from .call import Backoff, Call, Endpoint, open_stream
from .decode import UnexpectedShape, decoder_for
from .effects import CloseResponse, Flow, OpenedResponse, ReadChunk, Sleep, UsesAsyncIO, UsesBlockingIO, method
from .responses import FileChange, SandboxEvent

E = TypeVar("E")
# Maximum size of one event in bytes: events are a few KiB, so a larger one is not from a Cobox server.
MAX_EVENT_BYTES = 256 * 1024
# Seconds: of silence after which a connection counts as dead (both streams send comments more often); without a connection before
# giving up.
READ_TIMEOUT, GIVE_UP_AFTER = 45.0, 120.0
# Seconds a connection must have lasted before its loss resets the backoff. Connections that are lost at once keep increasing it.
STABLE_AFTER = 10.0


class EventStreamApi(Generic[E]):
    """Iterating yields events; a lost connection is resumed after the last received event."""

    # Whether the server sends the stream's starting position at once.
    has_preamble = False

    def __init__(self, io: Any, endpoint: Endpoint, call: Call, last_id: str | None) -> None:
        self._io, self._endpoint, self._call = io, endpoint, call
        self._opened: OpenedResponse | None = None
        self._opened_at = 0.0
        self._received = bytearray()
        self._is_over = False
        # The id to resume after.
        self.last_id = last_id
        self.reconnects = 0

    def read_event(self, name: str, data: Any, event_id: str | None) -> E | None:
        """Converts an event; None for an event to skip."""
        raise NotImplementedError

    @method
    def begin(self) -> Flow[None]:
        """Connects, so that no event from now on is missed; called by the method that opens the stream."""
        yield from self._connect()
        try:
            while self.has_preamble and b"\n\n" not in self._received:
                yield from self._read_chunk()
        except errors.Broken:
            # Handled like any other lost connection, by the next call of `next`.
            yield from self._drop()

    @method
    def next(self) -> Flow[E | None]:
        """The next event; None after the last one."""
        waits, lost_at = Backoff(), None
        while not self._is_over:
            try:
                if self._opened is None:
                    yield from self._connect()
                    self.reconnects += 1
                event = yield from self._receive()
                if event is not None:
                    return event
                # Data arrived, even if only a comment.
                lost_at = None
                continue
            except errors.CoboxError as error:
                if self._opened is not None and time.monotonic() - self._opened_at >= STABLE_AFTER:
                    waits.reset()
                yield from self._drop()
                lost_at = time.monotonic() if lost_at is None else lost_at
                if not error.retryable:
                    self._is_over = True
                    raise
                if time.monotonic() - lost_at > GIVE_UP_AFTER:
                    raise errors.GaveUp(f"no connection for {GIVE_UP_AFTER:.0f} s: {error}") from None
                yield Sleep(max(waits.next(), min(error.retry_after or 0.0, 10.0)))
        return None

    @method
    def close(self) -> Flow[None]:
        """Closes the stream."""
        self._is_over = True
        yield from self._drop()

    def _connect(self) -> Flow[None]:
        headers = (*self._call.headers, ("accept", "text/event-stream"))
        if self.last_id is not None:
            headers += (("last-event-id", self.last_id),)
        query = self._call.query if self.last_id is None else tuple(q for q in self._call.query if q[0] not in ("after", "cursor"))
        call = Call("GET", self._call.path, headers=headers, query=query, read_timeout=READ_TIMEOUT)
        self._opened = yield from open_stream(self._endpoint, call)
        self._opened_at = time.monotonic()
        self._received.clear()

    def _receive(self) -> Flow[E | None]:
        while (end := self._received.find(b"\n\n")) >= 0:
            block = bytes(self._received[:end])
            del self._received[: end + 2]
            event = self._read_block(block)
            if event is not None:
                return event
        yield from self._read_chunk()
        return None

    def _read_chunk(self) -> Flow[None]:
        if self._opened is None:
            return
        piece: bytes = yield ReadChunk(self._opened)
        if not piece:
            raise errors.Broken("the server ended the stream")
        self._received += piece.replace(b"\r\n", b"\n")
        if len(self._received) > MAX_EVENT_BYTES:
            raise errors.NotCobox(f"{self._endpoint.base}{self._call.path} sent an event that is too long")

    def _read_block(self, block: bytes) -> E | None:
        fields: dict[str, str] = {}
        for line in block.decode("utf-8", "replace").split("\n"):
            name, _, value = line.partition(":")
            if name in ("event", "id", "data"):
                fields[name] = value[1:] if value.startswith(" ") else value
        event_id = fields.get("id")
        if "data" not in fields:
            # The stream's starting position: a reconnect before the first event resumes here, so that nothing is missed.
            self._remember(event_id)
            return None
        try:
            data = json.loads(fields["data"])
            if fields.get("event") == "error":
                raise errors.from_envelope(data, status=None) or UnexpectedShape("an error without a code")
            event = self.read_event(fields.get("event", "message"), data, event_id)
        except (ValueError, RecursionError):
            raise errors.NotCobox(f"{self._endpoint.base}{self._call.path} sent an invalid event") from None
        self._remember(event_id)
        return event

    def _remember(self, event_id: str | None) -> None:
        if event_id and event_id.isprintable() and event_id.isascii() and len(event_id) <= 256:
            self.last_id = event_id

    def _drop(self) -> Flow[None]:
        opened, self._opened = self._opened, None
        if opened is not None:
            yield CloseResponse(opened)


class EventsApi(EventStreamApi[SandboxEvent]):
    """Events of a session, until it ends."""

    has_preamble = True
    _COMMON = ("id", "type", "at", "session_id", "sandbox_id", "source", "principal", "actor")

    def read_event(self, name: str, data: Any, event_id: str | None) -> SandboxEvent | None:
        if name != "sandbox":
            return None
        if not isinstance(data, dict):
            raise UnexpectedShape("no object")
        rest = {key: value for key, value in data.items() if key not in self._COMMON}
        event: SandboxEvent = decoder_for(SandboxEvent)(
            {key: data[key] for key in self._COMMON if key in data} | {"data": rest}, "the event"
        )
        self._is_over = event.is_last
        return event


class WatchApi(EventStreamApi[FileChange]):
    """File changes, until the watch is closed or the watched path is gone."""

    def read_event(self, name: str, data: Any, event_id: str | None) -> FileChange | None:
        if not isinstance(data, dict):
            raise UnexpectedShape("no object")
        if name == "overflow":
            reason = str(data.get("reason"))
            self._is_over = reason == "gone"
            return FileChange("overflow", reason=reason, cursor=event_id)
        if name not in ("created", "modified", "removed", "renamed"):
            return None
        by = data.get("by")
        who = by if isinstance(by, dict) else {}
        fields = {"change": name, "path": data.get("path"), "kind": data.get("kind"), "at": data.get("at"), "cursor": event_id}
        fields |= {
            "principal": who.get("principal"),
            "actor": who.get("actor"),
            "moved_from": data.get("from"),
            "path_b64": data.get("path_b64"),
        }
        change: FileChange = decoder_for(FileChange)(fields, "the event")
        return change


class _SyncIteration(EventStreamApi[E], UsesBlockingIO):
    def __iter__(self) -> Iterator[E]:
        while (event := self.next()) is not None:
            yield event

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class _AsyncIteration(EventStreamApi[E], UsesAsyncIO):
    async def __aiter__(self) -> AsyncIterator[E]:
        while (event := await self.next()) is not None:
            yield event

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()


class Events(EventsApi, _SyncIteration[SandboxEvent]):
    def __enter__(self) -> Events:
        return self


class Watch(WatchApi, _SyncIteration[FileChange]):
    def __enter__(self) -> Watch:
        return self


class AsyncEvents(EventsApi, _AsyncIteration[SandboxEvent]):
    async def __aenter__(self) -> AsyncEvents:
        return self


class AsyncWatch(WatchApi, _AsyncIteration[FileChange]):
    async def __aenter__(self) -> AsyncWatch:
        return self
