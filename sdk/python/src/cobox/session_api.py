"""Methods shared by `Session` and `AsyncSession`, as flows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from . import errors
from .call import Call, perform, to_request, without_none
from .decode import decode
from .effects import Flow, SendRequest, method
from .grant import Grant
from .paths import SandboxPath, checked_bytes
from .responses import Delegated, ExecResult, FileLink, Heartbeat, ProcessInfo, ShareInfo
from .secret import Secret

# Default timeout of a command in seconds, the same as boxd's, and the extra time allowed for the response.
EXEC_SECONDS, EXEC_MARGIN = 600.0, 30.0
# Seconds allowed to kill a command whose caller was interrupted.
END_SECONDS = 5.0
# Output is limited to 16 MiB per stream; JSON escapes a byte with up to six.
MAX_EXEC_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class _Processes:
    items: list[ProcessInfo]


@dataclass(frozen=True)
class _Shares:
    items: list[ShareInfo]


class SessionApi:
    _grant: Grant

    @property
    def id(self) -> str | None:
        """The session's id; None for a session created from a token alone."""
        return self._grant.session_id

    @property
    def sandbox_id(self) -> str:
        return self._grant.sandbox_id

    @property
    def thread_id(self) -> str | None:
        return self._grant.thread_id

    @property
    def http_base_url(self) -> str:
        return self._grant.base

    @property
    def ws_base_url(self) -> str:
        return self._grant.ws_base

    @property
    def capabilities(self) -> frozenset[str] | None:
        """The granted capabilities; None if unknown."""
        return self._grant.capabilities

    @property
    def token(self) -> Secret:
        """The current token; only `token.expose()` reveals it."""
        return self._grant.token.secret

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, sandbox_id={self.sandbox_id!r}, thread_id={self.thread_id!r})"

    @method
    def exec(
        self,
        command: str | None = None,
        *,
        argv: Sequence[str] | None = None,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout_seconds: float | None = None,
        max_output_bytes: int | None = None,
        command_id: str | None = None,
    ) -> Flow[ExecResult]:
        """Runs a command to its end and returns its output. `command` is run by a shell (`/bin/sh`), `argv` directly.

        The command never runs twice: if a response is lost, the client asks for the same command by its id, and raises
        `MayHaveRun` if the sandbox does not know it. Cancelling or interrupting this call kills the command. `timeout_seconds=0`
        means no limit other than the server's own.
        """
        if (command is None) == (argv is None) and command_id is None:
            raise ValueError("give a command for a shell, or an argv")
        name = command_id or f"cmd-{os.urandom(16).hex()}"
        body = without_none(
            command=command,
            argv=[*argv] if argv is not None else None,
            shell=shell,
            cwd=cwd,
            env=dict(env) if env is not None else None,
            stdin=stdin,
            timeout_seconds=timeout_seconds,
            max_output_bytes=max_output_bytes,
            command_id=name,
        )
        limit = EXEC_SECONDS if timeout_seconds is None else timeout_seconds or 24 * 3600.0
        # An id alone only joins a command. In a restarted sandbox the command is gone and must not run again.
        again = {"command_id": name} | without_none(max_output_bytes=max_output_bytes)
        call = Call("POST", "/exec", json=body, retry_json=again, timeout=limit + EXEC_MARGIN, max_bytes=MAX_EXEC_BYTES)
        try:
            response = yield from perform(self._grant, call)
        except (errors.CoboxError, GeneratorExit):
            raise
        except BaseException:
            # Cancelled, or Ctrl-C. A command with an id outlives its client, so kill it. One attempt with the current token,
            # because the caller is leaving and must not wait.
            ending = Call("DELETE", f"/processes/{quote(name, safe='')}", timeout=END_SECONDS)
            with contextlib.suppress(errors.CoboxError):
                yield SendRequest(to_request(self._grant, ending, self._grant.token.secret))
            raise
        return decode(ExecResult, response.body, self._grant.base)

    @method
    def processes(self) -> Flow[list[ProcessInfo]]:
        """Commands and shells, the oldest first."""
        response = yield from perform(self._grant, Call("GET", "/processes"))
        return decode(_Processes, response.body, self._grant.base).items

    @method
    def signal(self, process_id: str, signal: str | int) -> Flow[None]:
        """Sends a signal to a command or shell."""
        call = Call("POST", f"/processes/{quote(process_id, safe='')}/signal", json={"signal": signal}, is_repeatable=False)
        yield from perform(self._grant, call)

    @method
    def kill(self, process_id: str) -> Flow[None]:
        """Kills a command or shell with all its child processes."""
        yield from perform(self._grant, Call("DELETE", f"/processes/{quote(process_id, safe='')}", is_repeatable=False))

    @method
    def refresh(self) -> Flow[None]:
        """Renews the token now; this also happens automatically before it expires."""
        yield from self._grant.renew(self._grant.token.secret)

    @method
    def heartbeat(self) -> Flow[Heartbeat]:
        """Reports that the sandbox is in use; also sent automatically while the session is open."""
        return (yield from self._grant.heartbeat())

    @method
    def delegate(
        self,
        capabilities: Sequence[str],
        *,
        ttl: int | None = None,
        parent_token: Secret | None = None,
        actor: str | None = None,
        token_format: str | None = None,
    ) -> Flow[Delegated]:
        """Issues a narrower token, for instance for a subagent."""
        endpoint = self._grant.require_broker()
        body = without_none(ttl=ttl, actor=actor, token_format=token_format, parent_token=parent_token and parent_token.expose())
        response = yield from perform(
            endpoint, Call("POST", self._grant.session_path("/delegate"), json=body | {"capabilities": [*capabilities]})
        )
        return decode(Delegated, response.body, endpoint.base)

    @method
    def share(self, principal: str, capabilities: Sequence[str], *, expires_at: datetime | None = None) -> Flow[ShareInfo]:
        """Gives another principal access with at most these capabilities; it negotiates as itself."""
        endpoint = self._grant.require_broker()
        body = {"principal": principal, "capabilities": [*capabilities]} | without_none(expires_at=timestamp(expires_at))
        response = yield from perform(endpoint, Call("POST", self._grant.session_path("/share"), json=body))
        return decode(ShareInfo, response.body, endpoint.base)

    @method
    def shares(self) -> Flow[list[ShareInfo]]:
        """The principals that the session is shared with."""
        endpoint = self._grant.require_broker()
        response = yield from perform(endpoint, Call("GET", self._grant.session_path("/share")))
        return decode(_Shares, response.body, endpoint.base).items

    @method
    def unshare(self, principal: str) -> Flow[None]:
        """Revokes a share with the tokens issued for it."""
        path = self._grant.session_path(f"/share/{quote(principal, safe='')}")
        yield from perform(self._grant.require_broker(), Call("DELETE", path, is_repeatable=False))

    @method
    def file_link(self, path: SandboxPath, *, method: str = "GET", ttl: int | None = None) -> Flow[FileLink]:
        """Creates a URL for one file, for instance for a browser. Treat it like the file itself."""
        endpoint = self._grant.require_broker()
        body: dict[str, Any] = {"path": checked_bytes(path).decode(), "method": method} | without_none(ttl=ttl)
        response = yield from perform(endpoint, Call("POST", self._grant.session_path("/file-links"), json=body))
        return decode(FileLink, response.body, endpoint.base)

    @method
    def release(self) -> Flow[None]:
        """Ends the session for all participants, with its tokens and, unless it is named or kept, its sandbox. Closing does not
        do that."""
        yield from perform(self._grant.require_broker(), Call("DELETE", self._grant.session_path(), is_repeatable=False))


def timestamp(when: datetime | None) -> str | None:
    if when is None:
        return None
    if when.tzinfo is None:
        raise ValueError("the time needs a time zone, as in datetime.now(timezone.utc)")
    return when.isoformat()
