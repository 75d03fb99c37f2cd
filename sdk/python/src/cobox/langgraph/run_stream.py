"""Sends sandbox events to a run's stream, as `custom` data of the form `{"type": "sandbox", "event": …}`, because graphs cannot
define event names."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from ..errors import CoboxError
from ..session import AsyncSession
from .own_events import OwnEvents

Writer = Callable[[Any], None]

# Maximum length of a path or command in an event in characters, the same as the broker's.
MAX_TEXT = 1024


def stream_writer() -> Writer | None:
    """The stream writer of the current node or tool; None outside a run."""
    # Only needed here, and LangGraph may not be installed.
    from langgraph.config import get_stream_writer

    try:
        return get_stream_writer()
    except (RuntimeError, KeyError, AttributeError, LookupError):
        return None


def emit(kind: str, *, writer: Writer | None = None, **fields: Any) -> None:
    """Sends a sandbox event to the run's stream; does nothing outside a run."""
    writer = writer or stream_writer()
    if writer is not None:
        writer(stream_event({"type": kind, **fields}))


def stream_event(event: Mapping[str, Any]) -> dict[str, Any]:
    """The stream representation of an event."""
    return {"type": "sandbox", "event": {key: _plain(value) for key, value in event.items() if value is not None}}


async def follow(session: AsyncSession, writer: Writer, own: OwnEvents) -> None:
    """Reports the actions of other participants from now on, until cancelled; the run reports its own actions itself."""
    # A missing event stream must not fail the run; the session's events are still stored by the broker.
    with contextlib.suppress(CoboxError):
        async for event in session.events(after="now"):
            fields = dataclasses.asdict(event)
            extra = fields.pop("data", None)
            if not own.claim(event):
                writer(stream_event({**fields, **(extra if isinstance(extra, dict) else {})}))
            # Yields to the run, so that a burst of events cannot starve it.
            await asyncio.sleep(0)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return value[:MAX_TEXT]
    return value
