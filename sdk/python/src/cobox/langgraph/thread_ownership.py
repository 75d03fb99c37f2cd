"""Decides whether a session belongs to a thread and user: after a thread was deleted, any user can create a thread with the same
id.

LangGraph does not notify the broker of deleted threads, so the sandbox may still exist when another user creates a thread with
the same id. The creation times tell the two threads apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from .run import USER_TAG, user_tag

# Tag with the creation time of the thread for which a session was created, in the server's format.
THREAD_TAG = "langgraph_thread"


@dataclass(frozen=True)
class Thread:
    """A thread as its server reports it."""

    id: str
    # None if the server does not report it.
    created_at: str | None = None


def belongs_to(user: str, thread: Thread, tags: Mapping[str, str], session_created_at: datetime) -> bool:
    """Whether a session with these tags and creation time belongs to exactly this thread, or at least to this user.

    Several people may share a thread, so a different user in the tag is no reason to refuse; a different thread is.
    """
    owner = tags.get(USER_TAG)
    if owner == user_tag(user):
        return True
    if thread.created_at is None:
        return owner is None
    if (made_for := tags.get(THREAD_TAG)) is not None:
        return made_for == thread.created_at
    thread_made_at = parse_time(thread.created_at)
    # The broker's timestamps have whole seconds.
    return thread_made_at is not None and thread_made_at.replace(microsecond=0) <= session_created_at


def parse_time(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        at = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    except ValueError:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
