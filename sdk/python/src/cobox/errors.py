"""Exception classes for every way a call can fail: one per error code of the broker, and one per client-side failure.

Catch `CoboxError` for all of them, a group (`NotFound`, `Conflict`, …) or a single code (`FileNotFound`). Each has `code`,
`status`, `request_id` (to find it in the operator's log), `retryable`, `details` and `hint`: what to do next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

# Maximum length of a message in characters; a server that is not Cobox may send a whole page.
MAX_MESSAGE_CHARS = 2000


class CoboxError(Exception):
    """Base class of all errors of this package."""

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
        text = f"{self.message} ({where})"
        return f"{text}; {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries in test runners and task queues, and pickle cannot call a constructor with keyword
        # arguments.
        return (_revive, (type(self), self.args, self.__dict__))


def _revive(kind: type[CoboxError], args: tuple[Any, ...], attributes: dict[str, Any]) -> CoboxError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class SettingsMissing(CoboxError):
    """No broker URL or no API key was found."""

    code = "SETTINGS_MISSING"
    hint = "run `cobox up`, or set COBOX_URL and COBOX_API_KEY"


class Unreachable(CoboxError):
    """No response arrived from the network, the broker or a proxy."""

    code = "UNREACHABLE"
    retryable = True
    hint = "check that the broker is running and that the URL is correct"

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        # Whether the request may have been carried out.
        self.was_sent = was_sent


class MayHaveRun(Unreachable):
    """A command was sent and its response lost, and the sandbox does not know the command: either the sandbox was restarted, or
    the command never arrived. The client does not send it again."""

    code = "MAY_HAVE_RUN"
    retryable = False
    hint = "check whether it ran, in its files or the session's events, before you run it again"


class Broken(Unreachable):
    """A stream's connection ended before the stream did."""

    code = "BROKEN"


class GaveUp(CoboxError):
    """A stream could not reconnect in time."""

    code = "GAVE_UP"
    retryable = True
    hint = "resume it with its command_id or from its last event; the command keeps running"


class NotCobox(CoboxError):
    """The server does not speak this protocol."""

    code = "NOT_COBOX"
    hint = "check the URL: it should be the broker's address, such as http://127.0.0.1:8421"


class TooLong(NotCobox):
    """A response exceeds the memory limit."""

    code = "TOO_LONG"
    hint = "pass a larger max_bytes, or read it as a stream"


class OutputHole(CoboxError):
    """Output is missing without an explanation from the server."""

    code = "OUTPUT_HOLE"


class InvalidPath(CoboxError, ValueError):
    """A path that cannot be sent."""

    code = "INVALID_PATH"


class InvalidText(CoboxError, ValueError):
    """Text with an unpaired surrogate, which cannot be encoded as UTF-8."""

    code = "INVALID_TEXT"


class CommandFailed(CoboxError):
    """Raised by `ExecResult.check()`: the command's exit code is not 0."""

    code = "COMMAND_FAILED"


class Busy(CoboxError):
    """A buffer of the client is full, or a lock was held for too long."""

    code = "BUSY"


class ApiError(CoboxError):
    """An error response of the broker or the sandbox."""

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
    hint = "open a new session to negotiate another token"


class TokenRevoked(Unauthenticated):
    code = "TOKEN_REVOKED"
    hint = "the token was taken back on purpose; if you still have access, session.refresh() gets another one"


class Forbidden(ApiError):
    code = "FORBIDDEN"


class CapabilityDenied(Forbidden):
    code = "CAPABILITY_DENIED"
    hint = "request it in session(capabilities=…), or ask the owner to share more"


class NotFound(ApiError):
    """Group: does not exist, or you have no access to it."""


class SessionNotFound(NotFound):
    code = "SESSION_NOT_FOUND"
    hint = "mode='ensure' creates one"


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
    hint = "the sandbox was restarted since, or the id belongs to someone else; run the command again"


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
    hint = "the broker is older than this client, or its URL contains an extra path"


class MethodNotAllowed(ApiError):
    code = "METHOD_NOT_ALLOWED"


class Conflict(ApiError):
    """Group: conflicts with something that exists."""


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
    hint = "pass overwrite=True or exist_ok=True if this is intended"


class ShellBusy(Conflict):
    code = "SHELL_BUSY"
    retryable = True
    hint = "someone is working in it; try again later, or use exec()"


class ShellExists(Conflict):
    code = "SHELL_EXISTS"


class SessionExpired(ApiError):
    code = "SESSION_EXPIRED"
    hint = "the session has ended; Cobox.session() creates a new one"


class CommandExpired(ApiError):
    code = "COMMAND_EXPIRED"


class FileChanged(ApiError):
    code = "FILE_CHANGED"
    hint = "someone else wrote the file; read it again and decide"


class TooLarge(ApiError):
    code = "TOO_LARGE"


class RangeNotSatisfiable(ApiError):
    code = "RANGE_NOT_SATISFIABLE"


class SandboxStarting(ApiError):
    code = "SANDBOX_STARTING"
    retryable = True
    hint = "the sandbox is still starting; repeat the call later"


class RateLimited(ApiError):
    code = "RATE_LIMITED"
    retryable = True
    hint = "send fewer requests, or try again later"


class QuotaExceeded(ApiError):
    code = "QUOTA_EXCEEDED"
    hint = "delete what is no longer needed; waiting does not help"


class Internal(ApiError):
    code = "INTERNAL"
    retryable = True
    hint = "find the request id in the broker's log"


class Unsupported(ApiError):
    code = "UNSUPPORTED"
    hint = "this deployment does not support it"


class ProviderUnavailable(ApiError):
    code = "PROVIDER_UNAVAILABLE"
    retryable = True
    hint = "try again; the node of this sandbox may be unavailable"


class BackendUnavailable(ProviderUnavailable):
    code = "BACKEND_UNAVAILABLE"


class DiskFull(ApiError):
    code = "DISK_FULL"
    hint = "delete files in the sandbox"


def clean(text: str) -> str:
    """Makes untrusted text safe for a terminal and a log."""
    printable = "".join(c if c.isprintable() or c == " " else "�" for c in text[:MAX_MESSAGE_CHARS])
    return printable if len(text) <= MAX_MESSAGE_CHARS else printable + "…"


def from_envelope(body: Any, *, status: int | None, retry_after: float | None = None, request_id: str | None = None) -> ApiError | None:
    """The error in an error envelope; None if the body is not one."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("code"), str) or not isinstance(error.get("message"), str):
        return None
    code, raw_id, details = error["code"], error.get("request_id"), error.get("details")
    kind = ApiError.by_code.get(code, ApiError)
    return kind(
        clean(error["message"]),
        status=status,
        code=clean(code),
        request_id=clean(raw_id) if isinstance(raw_id, str) else request_id,
        retryable=error["retryable"] if isinstance(error.get("retryable"), bool) else None,
        details=details if isinstance(details, dict) else None,
        retry_after=retry_after,
    )


def from_answer(status: int, headers: Mapping[str, str], body: bytes, url: str) -> CoboxError:
    """The error for an unsuccessful response."""
    retry_after = seconds(headers.get("retry-after"))
    request_id = headers.get("x-request-id")
    try:
        error = from_envelope(json.loads(body), status=status, retry_after=retry_after, request_id=request_id and clean(request_id))
    except (ValueError, RecursionError):
        error = None
    if error is not None:
        return error
    return NotCobox(
        f"{url} responded with status {status} without an error message",
        status=status,
        retry_after=retry_after,
        retryable=status in (429, 502, 503, 504),
    )


def seconds(text: str | None) -> float | None:
    """The number of seconds in `Retry-After`; None if it has another format."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < 1e9 else None
