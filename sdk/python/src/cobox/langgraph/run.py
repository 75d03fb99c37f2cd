"""What a LangGraph run is, as far as its sandbox is concerned, and which of its words are the server's own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .bootstrap import MAX_ID, Bootstrap, SandboxRefused

# The tag that says whose a session and its sandbox are, where all users of a deployment share one key.
USER_TAG = "langgraph_user"
# Stands before a name that can't be a tag as it is.
_HASHED = "sha256:"


@dataclass(frozen=True)
class Run:
    """A run, read from `config["configurable"]`.

    The server sets `thread_id` and everything that begins with `langgraph_auth_`, and drops what a client sends under those
    names. `user_id` and `sandbox_id` beside them are the client's own words: they are never read here.
    """

    thread_id: str | None
    user: str | None
    bootstrap: Bootstrap | None

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Run:
        configurable = (config or {}).get("configurable") or {}
        if not isinstance(configurable, Mapping):
            raise SandboxRefused("config.configurable: must be an object")
        thread = configurable.get("thread_id")
        thread_id = None if thread is None else str(thread)
        if thread_id is not None and not 1 <= len(thread_id) <= MAX_ID:
            raise SandboxRefused(f"thread_id: must have 1 to {MAX_ID} characters")
        user = configurable.get("langgraph_auth_user_id")
        bootstrap = Bootstrap.read(configurable.get("sandbox"))
        if bootstrap is not None:
            bootstrap.must_be_for(thread_id)
        return cls(thread_id=thread_id, user=user if isinstance(user, str) and user else None, bootstrap=bootstrap)

    def tags(self) -> dict[str, str]:
        """What a new session of this run is marked with."""
        return {} if self.user is None else {USER_TAG: tag_of(self.user)}


def tag_of(user: str) -> str:
    """A user's name as a tag's value: itself, or what stands for it where it is too long or can't be shown."""
    if len(user) <= MAX_ID and user.isprintable() and not user.startswith(_HASHED):
        return user
    return _HASHED + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()
