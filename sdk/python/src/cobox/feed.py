"""Server-sent events over as many connections as it takes: a session's events, and the changes of files. Each once, in order."""

from __future__ import annotations

import json
import time
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

from . import errors
from .answers import FileChange, SandboxEvent
from .call import Backoff, Call, Door, open_stream
from .decode import Unexpected, reader
from .flow import Awaiting, Blocking, Drop, Flow, Opened, Pause, Pull, method

E = TypeVar("E")
# Longest event read, in bytes: one is a few KiB, and whoever sends more doesn't speak this protocol.
MAX_EVENT_BYTES = 256 * 1024
# Seconds: of silence after which a connection counts as dead (both streams send comments more often); without a success, to give up.
SILENCE, GIVE_UP_AFTER = 45.0, 120.0
# Seconds a connection must have stood for the waits between tries to begin anew: of one that is lost at once they go on growing.
STOOD_FOR = 10.0


class FeedApi(Generic[E]):
    """Iterating gives what happens; a lost connection is made again from where it broke off."""

    # Whether the other side says at once where the stream begins.
    is_greeted = False

    def __init__(self, io: Any, door: Door, call: Call, last_id: str | None) -> None:
        self._io, self._door, self._call = io, door, call
        self._opened: Opened | None = None
        self._opened_at = 0.0
        self._received = bytearray()
        self._is_over = False
        # To come back with.
        self.last_id = last_id
        self.reconnects = 0

    def read_event(self, name: str, data: Any, event_id: str | None) -> E | None:
        """What an event means; None for one to be passed over."""
        raise NotImplementedError

    @method
    def begin(self) -> Flow[None]:
        """Connects, so that nothing which happens from now on is missed; done by whoever opens it."""
        yield from self._connect()
        try:
            while self.is_greeted and b"\n\n" not in self._received:
                yield from self._pull()
        except errors.Broken:
            # As any other loss, for whoever asks what happens next.
            yield from self._drop()

    @method
    def next(self) -> Flow[E | None]:
        """What happens next; None after the last."""
        waits, lost_at = Backoff(), None
        while not self._is_over:
            try:
                if self._opened is None:
                    yield from self._connect()
                    self.reconnects += 1
                event = yield from self._receive()
                if event is not None:
                    return event
                # Something was heard, if only that nothing happens.
                lost_at = None
                continue
            except errors.CoboxError as error:
                if self._opened is not None and time.monotonic() - self._opened_at >= STOOD_FOR:
                    waits.reset()
                yield from self._drop()
                lost_at = time.monotonic() if lost_at is None else lost_at
                if not error.retryable:
                    self._is_over = True
                    raise
                if time.monotonic() - lost_at > GIVE_UP_AFTER:
                    raise errors.GaveUp(f"no connection for {GIVE_UP_AFTER:.0f} s: {error}") from None
                yield Pause(max(waits.next(), min(error.retry_after or 0.0, 10.0)))
        return None

    @method
    def close(self) -> Flow[None]:
        """Stops listening."""
        self._is_over = True
        yield from self._drop()

    def _connect(self) -> Flow[None]:
        headers = (*self._call.headers, ("accept", "text/event-stream"))
        if self.last_id is not None:
            headers += (("last-event-id", self.last_id),)
        query = self._call.query if self.last_id is None else tuple(q for q in self._call.query if q[0] not in ("after", "cursor"))
        call = Call("GET", self._call.path, headers=headers, query=query, silence=SILENCE)
        self._opened = yield from open_stream(self._door, call)
        self._opened_at = time.monotonic()
        self._received.clear()

    def _receive(self) -> Flow[E | None]:
        while (end := self._received.find(b"\n\n")) >= 0:
            block = bytes(self._received[:end])
            del self._received[: end + 2]
            event = self._read_block(block)
            if event is not None:
                return event
        yield from self._pull()
        return None

    def _pull(self) -> Flow[None]:
        if self._opened is None:
            return
        piece: bytes = yield Pull(self._opened)
        if not piece:
            raise errors.Broken("the other side ended the stream")
        self._received += piece.replace(b"\r\n", b"\n")
        if len(self._received) > MAX_EVENT_BYTES:
            raise errors.NotCobox(f"{self._door.base}{self._call.path} sent an event without an end")

    def _read_block(self, block: bytes) -> E | None:
        fields: dict[str, str] = {}
        for line in block.decode("utf-8", "replace").split("\n"):
            name, _, value = line.partition(":")
            if name in ("event", "id", "data"):
                fields[name] = value[1:] if value.startswith(" ") else value
        event_id = fields.get("id")
        if "data" not in fields:
            # Where the stream begins: who comes back before anything happened is told of all since then.
            self._remember(event_id)
            return None
        try:
            data = json.loads(fields["data"])
            if fields.get("event") == "error":
                raise errors.from_envelope(data, status=None) or Unexpected("an error without a code")
            event = self.read_event(fields.get("event", "message"), data, event_id)
        except (ValueError, RecursionError):
            raise errors.NotCobox(f"{self._door.base}{self._call.path} sent an event that can't be read") from None
        self._remember(event_id)
        return event

    def _remember(self, event_id: str | None) -> None:
        if event_id and event_id.isprintable() and event_id.isascii() and len(event_id) <= 256:
            self.last_id = event_id

    def _drop(self) -> Flow[None]:
        opened, self._opened = self._opened, None
        if opened is not None:
            yield Drop(opened)


class EventsApi(FeedApi[SandboxEvent]):
    """What happens to a session, until it ends."""

    is_greeted = True
    _COMMON = ("id", "type", "at", "session_id", "sandbox_id", "source", "principal", "actor")

    def read_event(self, name: str, data: Any, event_id: str | None) -> SandboxEvent | None:
        if name != "sandbox":
            return None
        if not isinstance(data, dict):
            raise Unexpected("no object")
        rest = {key: value for key, value in data.items() if key not in self._COMMON}
        event: SandboxEvent = reader(SandboxEvent)({key: data[key] for key in self._COMMON if key in data} | {"data": rest}, "the event")
        self._is_over = event.is_last
        return event


class WatchApi(FeedApi[FileChange]):
    """What happens to files, until it is closed or what is watched is gone."""

    def read_event(self, name: str, data: Any, event_id: str | None) -> FileChange | None:
        if not isinstance(data, dict):
            raise Unexpected("no object")
        if name == "overflow":
            reason = str(data.get("reason"))
            self._is_over = reason == "gone"
            return FileChange("overflow", reason=reason, cursor=event_id)
        if name not in ("created", "modified", "removed", "renamed"):
            return None
        by = data.get("by")
        who = by if isinstance(by, dict) else {}
        told = {"change": name, "path": data.get("path"), "kind": data.get("kind"), "at": data.get("at"), "cursor": event_id}
        told |= {
            "principal": who.get("principal"),
            "actor": who.get("actor"),
            "moved_from": data.get("from"),
            "path_b64": data.get("path_b64"),
        }
        change: FileChange = reader(FileChange)(told, "the event")
        return change


class _Iterates(FeedApi[E], Blocking):
    def __iter__(self) -> Iterator[E]:
        while (event := self.next()) is not None:
            yield event

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        self.close()


class _AsyncIterates(FeedApi[E], Awaiting):
    async def __aiter__(self) -> AsyncIterator[E]:
        while (event := await self.next()) is not None:
            yield event

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None) -> None:
        await self.close()


class Events(EventsApi, _Iterates[SandboxEvent]):
    def __enter__(self) -> Events:
        return self


class Watch(WatchApi, _Iterates[FileChange]):
    def __enter__(self) -> Watch:
        return self


class AsyncEvents(EventsApi, _AsyncIterates[SandboxEvent]):
    async def __aenter__(self) -> AsyncEvents:
        return self


class AsyncWatch(WatchApi, _AsyncIterates[FileChange]):
    async def __aenter__(self) -> AsyncWatch:
        return self
