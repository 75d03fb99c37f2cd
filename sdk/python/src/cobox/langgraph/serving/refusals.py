"""How this side says no: the protocol's envelope, as the broker would."""

from __future__ import annotations

import secrets
import time

from starlette.responses import JSONResponse

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


class Refused(Exception):
    """A request that ends here, with the status and words its caller gets."""

    def __init__(self, status: int, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.retryable = status, code, message, retryable

    def response(self) -> JSONResponse:
        request_id = new_request_id()
        error = {"code": self.code, "message": self.message, "retryable": self.retryable, "request_id": request_id}
        headers = {"x-request-id": request_id, "cache-control": "no-store"}
        if self.retryable:
            headers["retry-after"] = "1"
        return JSONResponse({"error": error}, status_code=self.status, headers=headers)


def unauthenticated(message: str) -> Refused:
    return Refused(401, "UNAUTHENTICATED", message)


def forbidden(message: str) -> Refused:
    return Refused(403, "FORBIDDEN", message)


def no_such_thread() -> Refused:
    return Refused(404, "SESSION_NOT_FOUND", "this deployment has no such thread, or not for you")


def no_such_session() -> Refused:
    return Refused(404, "SESSION_NOT_FOUND", "no thread here has such a session")


def of_an_earlier_thread() -> Refused:
    message = "the thread has no sandbox: the one of its id was made for an earlier thread, which was deleted; make a new thread"
    return Refused(404, "SESSION_NOT_FOUND", message)


def no_such_sandbox() -> Refused:
    return Refused(404, "SANDBOX_NOT_FOUND", "there is no such sandbox, or not for you")


def invalid(message: str) -> Refused:
    return Refused(400, "INVALID_REQUEST", message)


def too_large(message: str) -> Refused:
    return Refused(413, "TOO_LARGE", message)


def unavailable(message: str) -> Refused:
    return Refused(503, "PROVIDER_UNAVAILABLE", message, retryable=True)


def not_a_broker() -> Refused:
    return unavailable("what answers for the broker is not one; see COBOX_URL")


def new_request_id() -> str:
    """A ULID: 48 bits of time, 80 of chance."""
    number = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return "req_" + "".join(_BASE32[(number >> shift) & 31] for shift in range(125, -1, -5))
