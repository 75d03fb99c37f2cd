"""Cobox as a sandbox provider of `deepagents-code` (`dcode --sandbox cobox`), registered through an entry point."""

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
class _OpenSandbox:
    """A sandbox in use by this process, with a use count."""

    # Sessions, each with whether this provider created its thread.
    sessions: list[tuple[Session, bool]] = field(default_factory=list)
    users: int = 0
    # Whether this provider created the sandbox and therefore deletes it.
    is_created_here: bool = False


class CoboxProvider(SandboxProvider):
    """Sandboxes of the broker given by COBOX_URL and COBOX_API_KEY, or run on this machine by `cobox up`.

    The deepagents-code configuration section `[sandboxes.providers.cobox.params]` accepts `thread`, the thread whose sandbox to
    join together with its other users, and `name`, under which a sandbox is found again.
    """

    def __init__(self, cobox: Cobox | None = None) -> None:
        self._cobox = cobox
        self._open: dict[str, _OpenSandbox] = {}
        self._lock = threading.Lock()

    @property
    def metadata(self) -> SandboxProviderMetadata:
        return SandboxProviderMetadata(name="cobox", working_dir="/workspace")

    def get_or_create(
        self, *, sandbox_id: str | None = None, thread: str | None = None, name: str | None = None, **kwargs: Any
    ) -> CoboxBackend:
        """Returns the sandbox with an id or name, the one of a thread, or a new one."""
        if kwargs:
            raise TypeError(f"cobox does not support {', '.join(sorted(kwargs))}; supported parameters are `thread` and `name`")
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
        # A given thread and a sandbox that existed before may have other users.
        is_created_here = thread is None and sandbox_id is None
        with self._lock:
            held = self._open.setdefault(session.sandbox_id, _OpenSandbox())
            held.sessions.append((session, thread is None))
            held.users += 1
            held.is_created_here = held.is_created_here or is_created_here
        return CoboxBackend(session)

    def delete(self, *, sandbox_id: str, **kwargs: Any) -> None:
        """Releases one use. After the last one, ends the sessions this provider created, with their sandbox unless it is named;
        sandboxes that were only joined stay."""
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
                # Sessions that joined a sandbox created here also keep it alive.
                if held.is_created_here and has_own_thread:
                    session.release()
                session.close()
        except NotFound:
            # Already gone, which is the requested state.
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
