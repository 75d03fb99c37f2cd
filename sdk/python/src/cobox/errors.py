"""Every way a call can fail, as classes: by the broker's code, or by what happened on the way to it.

Catch `CoboxError` for all of them, a group (`NotFound`, `Conflict`, …) or one code (`FileNotFound`). Each has `code`, `status`,
`request_id` (for the operator's log), `retryable`, `details` and `hint`: what to do next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

# Longest message kept, in characters: a stranger's page is not one.
MAX_MESSAGE_CHARS = 2000


class CoboxError(Exception):
    """Anything that went wrong between here and the sandbox."""

    code: str = "ERROR"
    hint: str = ""
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        request_id: str | None = None,
        retryable: bool | None = None,
        details: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.request_id = request_id
        self.details: Mapping[str, Any] = details or {}
        self.retry_after = retry_after
        if retryable is not None:
            self.retryable = retryable
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        where = self.code if self.request_id is None else f"{self.code}, request {self.request_id}"
        told = f"{self.message} ({where})"
        return f"{told}; {self.hint}" if self.hint else told

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process borders in test runners and task queues; the class takes keywords, which pickle doesn't know of.
        return (_revive, (type(self), self.args, self.__dict__))


def _revive(kind: type[CoboxError], args: tuple[Any, ...], attributes: dict[str, Any]) -> CoboxError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class SettingsMissing(CoboxError):
    """There is no broker to talk to, or no key."""

    code = "SETTINGS_MISSING"
    hint = "run `cobox up`, or set COBOX_URL and COBOX_API_KEY"


class Unreachable(CoboxError):
    """No answer came: the network, the broker or a proxy."""

    code = "UNREACHABLE"
    retryable = True
    hint = "see that the broker runs and that the URL is right"

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        # Whether the request may have been carried out although nobody said so.
        self.was_sent = was_sent


class MayHaveRun(Unreachable):
    """A command was sent and its answer lost, and the sandbox, asked again, doesn't know the command: it was started anew meanwhile, or
    the command never came there. It is not sent a second time."""

    code = "MAY_HAVE_RUN"
    retryable = False
    hint = "look whether it ran, in its files or the session's events, before you run it again"


class Broken(Unreachable):
    """A stream's connection ended before the stream did."""

    code = "BROKEN"


class GaveUp(CoboxError):
    """A stream could not be continued in time."""

    code = "GAVE_UP"
    retryable = True
    hint = "start it again with its command_id or from its last event; what it did goes on"


class NotCobox(CoboxError):
    """What answered doesn't speak this protocol."""

    code = "NOT_COBOX"
    hint = "check the URL: it should be the broker's own, such as http://127.0.0.1:8421"


class TooLong(NotCobox):
    """An answer is longer than what is held in memory."""

    code = "TOO_LONG"
    hint = "give a larger max_bytes, or take it as a stream"


class OutputHole(CoboxError):
    """Output arrived whose beginning is missing and nothing said why."""

    code = "OUTPUT_HOLE"


class InvalidPath(CoboxError, ValueError):
    """A path that can't be sent as it is."""

    code = "INVALID_PATH"


class InvalidText(CoboxError, ValueError):
    """Text with half a character in it (a lone surrogate), which neither a file nor a request can hold."""

    code = "INVALID_TEXT"


class CommandFailed(CoboxError):
    """`ExecResult.check()`: the command ended with something else than 0."""

    code = "COMMAND_FAILED"


class Busy(CoboxError):
    """More is waiting here than is kept."""

    code = "BUSY"


class ApiError(CoboxError):
    """The broker or the sandbox said no."""

    by_code: ClassVar[dict[str, type[ApiError]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            ApiError.by_code[cls.code] = cls


class InvalidRequest(ApiError):
    code = "INVALID_REQUEST"


class Unauthenticated(ApiError):
    code = "UNAUTHENTICATED"
    hint = "check the API key: COBOX_API_KEY, or `cobox keys list`"


class TokenExpired(Unauthenticated):
    code = "TOKEN_EXPIRED"
    hint = "negotiate again: open the session anew"


class TokenRevoked(Unauthenticated):
    code = "TOKEN_REVOKED"
    hint = "somebody took it back; if you are still allowed in, session.refresh() gets another"


class Forbidden(ApiError):
    code = "FORBIDDEN"


class CapabilityDenied(Forbidden):
    code = "CAPABILITY_DENIED"
    hint = "ask for it in session(capabilities=…), or ask the owner to share more"


class NotFound(ApiError):
    """Group: it isn't there, or it isn't yours to see."""


class SessionNotFound(NotFound):
    code = "SESSION_NOT_FOUND"
    hint = "mode='ensure' makes one"


class BindingNotFound(SessionNotFound):
    code = "BINDING_NOT_FOUND"


class SandboxNotFound(NotFound):
    code = "SANDBOX_NOT_FOUND"


class FileNotFound(NotFound):
    code = "FILE_NOT_FOUND"


class ShellNotFound(NotFound):
    code = "SHELL_NOT_FOUND"


class CommandNotFound(NotFound):
    code = "COMMAND_NOT_FOUND"
    hint = "the sandbox was started anew since, or the id is another's; run the command again"


class KeyNotFound(NotFound):
    code = "KEY_NOT_FOUND"


class PrincipalNotFound(NotFound):
    code = "PRINCIPAL_NOT_FOUND"


class ShareNotFound(NotFound):
    code = "SHARE_NOT_FOUND"


class TemplateNotFound(NotFound):
    code = "TEMPLATE_NOT_FOUND"


class SnapshotNotFound(NotFound):
    code = "SNAPSHOT_NOT_FOUND"


class VolumeNotFound(NotFound):
    code = "VOLUME_NOT_FOUND"


class PoolNotFound(NotFound):
    code = "POOL_NOT_FOUND"


class RouteNotFound(NotFound):
    code = "ROUTE_NOT_FOUND"
    hint = "the broker is older than this client, or its URL has a path too many"


class MethodNotAllowed(ApiError):
    code = "METHOD_NOT_ALLOWED"


class Conflict(ApiError):
    """Group: something else is there already."""


class SessionConflict(Conflict):
    code = "SESSION_CONFLICT"
    hint = "the bound sandbox is in `details`; mode='ensure' without a hint uses it"


class BindingConflict(SessionConflict):
    code = "BINDING_CONFLICT"


class SandboxConflict(Conflict):
    code = "SANDBOX_CONFLICT"


class NameTaken(Conflict):
    code = "NAME_TAKEN"


class InUse(Conflict):
    code = "IN_USE"


class IdempotencyConflict(Conflict):
    code = "IDEMPOTENCY_CONFLICT"


class FileExists(Conflict):
    code = "FILE_EXISTS"
    hint = "overwrite=True or exist_ok=True, if that is meant"


class ShellBusy(Conflict):
    code = "SHELL_BUSY"
    retryable = True
    hint = "somebody works in it; try later, or use exec()"


class ShellExists(Conflict):
    code = "SHELL_EXISTS"


class SessionExpired(ApiError):
    code = "SESSION_EXPIRED"
    hint = "it is over; Cobox.session() makes a new one"


class CommandExpired(ApiError):
    code = "COMMAND_EXPIRED"


class FileChanged(ApiError):
    code = "FILE_CHANGED"
    hint = "somebody else wrote it; read it again and decide"


class TooLarge(ApiError):
    code = "TOO_LARGE"


class RangeNotSatisfiable(ApiError):
    code = "RANGE_NOT_SATISFIABLE"


class SandboxStarting(ApiError):
    code = "SANDBOX_STARTING"
    retryable = True
    hint = "it goes on starting; the same call finds it later"


class RateLimited(ApiError):
    code = "RATE_LIMITED"
    retryable = True
    hint = "ask less often, or later"


class QuotaExceeded(ApiError):
    code = "QUOTA_EXCEEDED"
    hint = "delete what is no longer needed; waiting does not help"


class Internal(ApiError):
    code = "INTERNAL"
    retryable = True
    hint = "the broker's log has the request id"


class Unsupported(ApiError):
    code = "UNSUPPORTED"
    hint = "this deployment can't do it, now or later"


class ProviderUnavailable(ApiError):
    code = "PROVIDER_UNAVAILABLE"
    retryable = True
    hint = "try again; the node of this sandbox may be away"


class BackendUnavailable(ProviderUnavailable):
    code = "BACKEND_UNAVAILABLE"


class DiskFull(ApiError):
    code = "DISK_FULL"
    hint = "delete files in the sandbox"


def clean(text: str) -> str:
    """A stranger's words, fit for a terminal and a log."""
    shown = "".join(c if c.isprintable() or c == " " else "�" for c in text[:MAX_MESSAGE_CHARS])
    return shown if len(text) <= MAX_MESSAGE_CHARS else shown + "…"


def from_envelope(body: Any, *, status: int | None, retry_after: float | None = None, request_id: str | None = None) -> ApiError | None:
    """The error an envelope tells of; None where it isn't one."""
    told = body.get("error") if isinstance(body, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("code"), str) or not isinstance(told.get("message"), str):
        return None
    code, told_id, details = told["code"], told.get("request_id"), told.get("details")
    kind = ApiError.by_code.get(code, ApiError)
    return kind(
        clean(told["message"]),
        status=status,
        code=clean(code),
        request_id=clean(told_id) if isinstance(told_id, str) else request_id,
        retryable=told["retryable"] if isinstance(told.get("retryable"), bool) else None,
        details=details if isinstance(details, dict) else None,
        retry_after=retry_after,
    )


def from_answer(status: int, headers: Mapping[str, str], body: bytes, url: str) -> CoboxError:
    """The error behind an answer that is no success."""
    retry_after = seconds(headers.get("retry-after"))
    request_id = headers.get("x-request-id")
    try:
        error = from_envelope(json.loads(body), status=status, retry_after=retry_after, request_id=request_id and clean(request_id))
    except (ValueError, RecursionError):
        error = None
    if error is not None:
        return error
    return NotCobox(
        f"{url} answered {status} without saying why", status=status, retry_after=retry_after, retryable=status in (429, 502, 503, 504)
    )


def seconds(text: str | None) -> float | None:
    """What `Retry-After` says, where it says seconds."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < 1e9 else None
