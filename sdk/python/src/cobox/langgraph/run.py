"""The fields of a LangGraph run that determine its sandbox, and which of them come from the server rather than the client."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .supplied_sandbox import MAX_ID, SandboxRefused, SuppliedSandbox

# Tag with the user of a session or sandbox, in deployments whose users share one API key.
USER_TAG = "langgraph_user"
# Prefix of a user name that cannot be a tag value and is hashed.
_HASHED = "sha256:"


@dataclass(frozen=True)
class Run:
    """A run, parsed from `config["configurable"]`.

    The server sets `thread_id` and all fields that begin with `langgraph_auth_`, and drops what a client sends under those names.
    `user_id` and `sandbox_id` come from the client (untrusted) and are not read.
    """

    thread_id: str | None
    user: str | None
    supplied: SuppliedSandbox | None

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
        supplied = SuppliedSandbox.read(configurable.get("sandbox"))
        if supplied is not None:
            supplied.require_thread(thread_id)
        return cls(thread_id=thread_id, user=user if isinstance(user, str) and user else None, supplied=supplied)

    def tags(self) -> dict[str, str]:
        """The tags of a new session of this run."""
        return {} if self.user is None else {USER_TAG: user_tag(self.user)}


def user_tag(user: str) -> str:
    """A user name as a tag value; hashed if it is too long or not printable."""
    if len(user) <= MAX_ID and user.isprintable() and not user.startswith(_HASHED):
        return user
    return _HASHED + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()
