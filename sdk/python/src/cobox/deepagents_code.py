"""Cobox as a sandbox provider of `deepagents-code` (`dcode --sandbox cobox`), found by its entry point group."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, field
from typing import Any

from deepagents_code.integrations.sandbox_provider import SandboxError, SandboxNotFoundError, SandboxProvider, SandboxProviderMetadata

from .client import Cobox
from .deepagents import CoboxBackend
from .errors import CoboxError, NotFound
from .session import Session


@dataclass
class _Held:
    """A sandbox in use here, by as many as asked for it."""

    # Each with whether its thread is ours alone.
    sessions: list[tuple[Session, bool]] = field(default_factory=list)
    users: int = 0
    # Made here, and so ended from here.
    is_ours: bool = False


class CoboxProvider(SandboxProvider):
    """Sandboxes of the broker that COBOX_URL and COBOX_API_KEY name, or that `cobox up` runs here.

    In the configuration of deepagents-code, `[sandboxes.providers.cobox.params]` may have `thread`: the thread whose sandbox to join, so
    that whoever is in it already shares it; and `name`: a sandbox that is found again under it.
    """

    def __init__(self, cobox: Cobox | None = None) -> None:
        self._cobox = cobox
        self._open: dict[str, _Held] = {}
        self._lock = threading.Lock()

    @property
    def metadata(self) -> SandboxProviderMetadata:
        return SandboxProviderMetadata(name="cobox", working_dir="/workspace")

    def get_or_create(
        self, *, sandbox_id: str | None = None, thread: str | None = None, name: str | None = None, **kwargs: Any
    ) -> CoboxBackend:
        """The sandbox of an id or name, the one of a thread, or a new one."""
        if kwargs:
            raise TypeError(f"cobox knows no {', '.join(sorted(kwargs))}; it takes `thread` and `name`")
        try:
            session = self._broker().session(
                thread or f"dcode-{uuid.uuid4()}",
                actor="agent",
                sandbox=sandbox_id,
                name=None if sandbox_id else name,
                tags={"created_by": "deepagents-code"},
            )
        except NotFound as error:
            raise SandboxNotFoundError(str(error)) from error
        except CoboxError as error:
            raise SandboxError(str(error)) from error
        # A thread is somebody's, who goes on when we leave, and so is a sandbox that was there before.
        is_ours = thread is None and sandbox_id is None
        with self._lock:
            held = self._open.setdefault(session.sandbox_id, _Held())
            held.sessions.append((session, thread is None))
            held.users += 1
            held.is_ours = held.is_ours or is_ours
        return CoboxBackend(session)

    def delete(self, *, sandbox_id: str, **kwargs: Any) -> None:
        """Ends what was made here, with its sandbox unless that is named; leaves what was only joined. What was got several times ends
        when it was let go of as often."""
        with self._lock:
            held = self._open.get(sandbox_id)
            if held is not None:
                held.users -= 1
                if held.users > 0:
                    return
                del self._open[sandbox_id]
        try:
            if held is None:
                self._broker().delete_sandbox(sandbox_id)
                return
            for session, has_own_thread in held.sessions:
                # Those that joined what was made here hold it too.
                if held.is_ours and has_own_thread:
                    session.release()
                session.close()
        except NotFound:
            # Gone already, which is what was asked for.
            return
        except CoboxError as error:
            raise SandboxError(str(error)) from error

    def _broker(self) -> Cobox:
        if self._cobox is None:
            try:
                self._cobox = Cobox()
            except CoboxError as error:
                raise SandboxError(str(error)) from error
        return self._cobox
