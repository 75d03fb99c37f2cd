"""Error responses of the deployment, in the same envelope as the broker's."""

from __future__ import annotations

import secrets
import time

from starlette.responses import JSONResponse

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"


class RequestError(Exception):
    """A request that is refused here, with the status and message for the caller."""

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


def unauthenticated(message: str) -> RequestError:
    return RequestError(401, "UNAUTHENTICATED", message)


def forbidden(message: str) -> RequestError:
    return RequestError(403, "FORBIDDEN", message)


def no_such_thread() -> RequestError:
    return RequestError(404, "SESSION_NOT_FOUND", "this deployment has no such thread, or you have no access to it")


def no_such_session() -> RequestError:
    return RequestError(404, "SESSION_NOT_FOUND", "no thread of this deployment has such a session")


def session_of_earlier_thread() -> RequestError:
    message = "the thread has no sandbox: the one with its id was created for an earlier thread, which was deleted; create a new thread"
    return RequestError(404, "SESSION_NOT_FOUND", message)


def no_such_sandbox() -> RequestError:
    return RequestError(404, "SANDBOX_NOT_FOUND", "there is no such sandbox, or you have no access to it")


def invalid(message: str) -> RequestError:
    return RequestError(400, "INVALID_REQUEST", message)


def too_large(message: str) -> RequestError:
    return RequestError(413, "TOO_LARGE", message)


def unavailable(message: str) -> RequestError:
    return RequestError(503, "PROVIDER_UNAVAILABLE", message, retryable=True)


def not_a_broker() -> RequestError:
    return unavailable("the server at COBOX_URL is not a Cobox broker")


def new_request_id() -> str:
    """A ULID: 48 bits of time, 80 random bits."""
    number = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return "req_" + "".join(_BASE32[(number >> shift) & 31] for shift in range(125, -1, -5))
