"""Whether the session of a thread's id is for whoever asks now: an id can be made again after its thread was deleted, by anybody.

LangGraph tells no broker of a deleted thread by itself, so the sandbox may still be there when somebody else makes a thread of the same
id. Their own age tells the two threads apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

from .run import USER_TAG, tag_of

# The tag that says for which thread of that id a session was made: the time at which that thread was made, in its server's words.
THREAD_TAG = "langgraph_thread"


@dataclass(frozen=True)
class Thread:
    """A thread as its server shows it."""

    id: str
    # None where the server doesn't say.
    created_at: str | None = None


def is_for(user: str, thread: Thread, tags: Mapping[str, str], made_at: datetime) -> bool:
    """Whether a session with these tags, made then, is of this very thread, or at least of this very user.

    Several people may share a thread, so another's name in the tag is no reason to refuse; another thread is.
    """
    owner = tags.get(USER_TAG)
    if owner == tag_of(user):
        return True
    if thread.created_at is None:
        return owner is None
    if (made_for := tags.get(THREAD_TAG)) is not None:
        return made_for == thread.created_at
    thread_made_at = read_time(thread.created_at)
    # The broker's times are whole seconds.
    return thread_made_at is not None and thread_made_at.replace(microsecond=0) <= made_at


def read_time(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        at = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    except ValueError:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
