"""A sandbox's events on a run's own stream: `custom`, as `{"type": "sandbox", "event": …}`, because graphs can't name an event."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from ..errors import CoboxError
from ..session import AsyncSession
from .own import Own

Writer = Callable[[Any], None]

# Longest path or command in an event, in characters, as the broker's own have it.
MAX_TEXT = 1024


def stream_writer() -> Writer | None:
    """The run's, where this is called in one of its nodes or tools."""
    # Not needed before, and not there without LangGraph.
    from langgraph.config import get_stream_writer

    try:
        return get_stream_writer()
    except (RuntimeError, KeyError, AttributeError, LookupError):
        return None


def emit(kind: str, *, writer: Writer | None = None, **said: Any) -> None:
    """Tells the run's stream what happened in its sandbox; where there is no run, nobody."""
    writer = writer or stream_writer()
    if writer is not None:
        writer(told({"type": kind, **said}))


def told(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event as the stream carries it."""
    return {"type": "sandbox", "event": {key: _plain(value) for key, value in event.items() if value is not None}}


async def follow(session: AsyncSession, writer: Writer, own: Own) -> None:
    """Tells of what others do in the sandbox from now on, until it is cancelled; the run tells of its own doings itself."""
    # A stream that can't be had is no reason for a run to fail: what it would have told is in the session's events.
    with contextlib.suppress(CoboxError):
        async for event in session.events(after="now"):
            said = dataclasses.asdict(event)
            extra = said.pop("data", None)
            if not own.has(event):
                writer(told({**said, **(extra if isinstance(extra, dict) else {})}))
            # So that a flood of events leaves the run its turn.
            await asyncio.sleep(0)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return value[:MAX_TEXT]
    return value
