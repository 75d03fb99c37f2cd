"""What a session can do, as flows: the part that `Session` and `AsyncSession` share, which is nearly all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from . import errors
from .answers import Delegated, ExecResult, FileLink, Heartbeat, ProcessInfo, ShareInfo
from .call import Call, perform, request_of, wanted
from .decode import decode
from .flow import Flow, Send, method
from .grant import Grant
from .paths import SandboxPath, checked
from .secret import Secret

# Seconds a command may take unless told, as boxd has it; and what the answer may take beyond that.
EXEC_SECONDS, EXEC_MARGIN = 600.0, 30.0
# Seconds to end a command whose caller was interrupted.
END_SECONDS = 5.0
# Output is at most 16 MiB a stream, JSON makes up to six bytes of one.
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
        """The session's id; None where it came with a token alone."""
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
        """What was granted; None where nobody said."""
        return self._grant.capabilities

    @property
    def token(self) -> Secret:
        """The token in use now: `token.expose()` gives it, nothing else does."""
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
        """Runs a command to its end and gives what it printed. `command` is run by a shell (`/bin/sh`), `argv` as it is.

        It is never run twice: where an answer is lost, the same command is asked for again by its id, and `MayHaveRun` raised where
        the sandbox doesn't know it. When this call is cancelled or interrupted, the command is ended. `timeout_seconds=0` means no
        limit but the server's own.
        """
        if (command is None) == (argv is None) and command_id is None:
            raise ValueError("give a command for a shell, or an argv")
        name = command_id or f"cmd-{os.urandom(16).hex()}"
        body = wanted(
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
        # An id alone only joins: in a sandbox that was started anew the command is gone, and must not be run again.
        again = {"command_id": name} | wanted(max_output_bytes=max_output_bytes)
        call = Call("POST", "/exec", json=body, json_again=again, timeout=limit + EXEC_MARGIN, max_bytes=MAX_EXEC_BYTES)
        try:
            answer = yield from perform(self._grant, call)
        except (errors.CoboxError, GeneratorExit):
            raise
        except BaseException:
            # Cancelled, or Ctrl-C. The command has an id, so it doesn't end with its client by itself. One try, with the token there is:
            # whoever leaves doesn't wait.
            ending = Call("DELETE", f"/processes/{quote(name, safe='')}", timeout=END_SECONDS)
            with contextlib.suppress(errors.CoboxError):
                yield Send(request_of(self._grant, ending, self._grant.token.secret))
            raise
        return decode(ExecResult, answer.body, self._grant.base)

    @method
    def processes(self) -> Flow[list[ProcessInfo]]:
        """Commands and shells, the oldest first."""
        answer = yield from perform(self._grant, Call("GET", "/processes"))
        return decode(_Processes, answer.body, self._grant.base).items

    @method
    def signal(self, process_id: str, signal: str | int) -> Flow[None]:
        """Sends a command or shell a signal."""
        call = Call("POST", f"/processes/{quote(process_id, safe='')}/signal", json={"signal": signal}, is_repeatable=False)
        yield from perform(self._grant, call)

    @method
    def kill(self, process_id: str) -> Flow[None]:
        """Ends a command or shell with all it started."""
        yield from perform(self._grant, Call("DELETE", f"/processes/{quote(process_id, safe='')}", is_repeatable=False))

    @method
    def refresh(self) -> Flow[None]:
        """Gets a fresh token now; otherwise that happens by itself, in time."""
        yield from self._grant.replace(self._grant.token.secret)

    @method
    def heartbeat(self) -> Flow[Heartbeat]:
        """Says that the sandbox is in use; happens by itself while the session is open."""
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
        """A narrower token to hand on, to a subagent for instance."""
        door = self._grant.at_broker()
        body = wanted(ttl=ttl, actor=actor, token_format=token_format, parent_token=parent_token and parent_token.expose())
        answer = yield from perform(
            door, Call("POST", self._grant.session_path("/delegate"), json=body | {"capabilities": [*capabilities]})
        )
        return decode(Delegated, answer.body, door.base)

    @method
    def share(self, principal: str, capabilities: Sequence[str], *, expires_at: datetime | None = None) -> Flow[ShareInfo]:
        """Lets another principal in, who then negotiates as itself and gets at most these."""
        door = self._grant.at_broker()
        body = {"principal": principal, "capabilities": [*capabilities]} | wanted(expires_at=timestamp(expires_at))
        answer = yield from perform(door, Call("POST", self._grant.session_path("/share"), json=body))
        return decode(ShareInfo, answer.body, door.base)

    @method
    def shares(self) -> Flow[list[ShareInfo]]:
        """Whom it is shared with."""
        door = self._grant.at_broker()
        answer = yield from perform(door, Call("GET", self._grant.session_path("/share")))
        return decode(_Shares, answer.body, door.base).items

    @method
    def unshare(self, principal: str) -> Flow[None]:
        """Takes a share back, with the tokens it gave."""
        path = self._grant.session_path(f"/share/{quote(principal, safe='')}")
        yield from perform(self._grant.at_broker(), Call("DELETE", path, is_repeatable=False))

    @method
    def file_link(self, path: SandboxPath, *, method: str = "GET", ttl: int | None = None) -> Flow[FileLink]:
        """A URL that is good for one file, for a browser. Hand it on as you would the file."""
        door = self._grant.at_broker()
        body: dict[str, Any] = {"path": checked(path).decode(), "method": method} | wanted(ttl=ttl)
        answer = yield from perform(door, Call("POST", self._grant.session_path("/file-links"), json=body))
        return decode(FileLink, answer.body, door.base)

    @method
    def release(self) -> Flow[None]:
        """Ends the session for everybody, with its tokens and, unless it is named or kept, its sandbox. Leaving doesn't do that."""
        yield from perform(self._grant.at_broker(), Call("DELETE", self._grant.session_path(), is_repeatable=False))


def timestamp(when: datetime | None) -> str | None:
    if when is None:
        return None
    if when.tzinfo is None:
        raise ValueError("a time needs its zone; datetime.now(timezone.utc) has one")
    return when.isoformat()
