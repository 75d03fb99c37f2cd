"""Makes one API call: authenticates it, honors Retry-After, and retries it where that is safe."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from . import errors
from .effects import Flow, OpenedResponse, OpenResponse, Request, Response, SendRequest, Sleep
from .request_body import RequestBody
from .secret import Secret

# Maximum seconds spent waiting between attempts when the server asks to retry later: a starting sandbox, a rate limit.
MAX_TOTAL_WAIT = 120.0
# Limits in seconds for the wait between two attempts: a server may send 0, or an hour.
MIN_WAIT, MAX_WAIT = 0.1, 10.0
# Maximum attempts of a call that got no response, or whose provider was unavailable.
MAX_ATTEMPTS = 4
# Statuses that mean "retry later" and guarantee that nothing was done.
RETRY_LATER_STATUSES = (423, 429)
# Statuses of a proxy, or of a broker whose provider is unavailable: the request may or may not have been carried out.
UNAVAILABLE_STATUSES = (502, 503, 504)


@dataclass(frozen=True)
class Call:
    """A request relative to an endpoint: the broker, a session at the broker, or a sandbox."""

    method: str
    path: str
    json: Any = None
    # Replaces `json` once a previous attempt may have arrived: it joins what was started and starts nothing.
    retry_json: Any = None
    body: RequestBody | None = None
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    # Whether the call is idempotent. Only then is it retried after a missing response.
    is_repeatable: bool = True
    timeout: float = 60.0
    read_timeout: float | None = None
    max_bytes: int = 64 * 1024 * 1024
    # Statuses other than 2xx that the caller handles itself.
    accepted_statuses: tuple[int, ...] = ()


class Endpoint(Protocol):
    """A base URL with its credential."""

    @property
    def base(self) -> str: ...
    def secret(self) -> Flow[Secret]: ...
    def renew(self, old: Secret) -> Flow[Secret]: ...


class BrokerEndpoint:
    """The broker, authenticated with the API key."""

    def __init__(self, url: str, key: Secret) -> None:
        self.base, self._key = url, key

    def secret(self) -> Flow[Secret]:
        return self._key
        yield

    def renew(self, old: Secret) -> Flow[Secret]:
        raise errors.Unauthenticated("the API key has expired")
        yield


def to_request(endpoint: Endpoint, call: Call, secret: Secret) -> Request:
    url = endpoint.base + call.path
    if call.query:
        url += "?" + urlencode(call.query, quote_via=quote)
    headers, body = call.headers, call.body
    if call.json is not None:
        headers, body = (*headers, ("content-type", "application/json")), RequestBody.json(call.json)
    return Request(call.method, url, headers, body, secret, call.timeout, call.read_timeout, call.max_bytes)


def perform(endpoint: Endpoint, call: Call) -> Flow[Response]:
    """Makes a call and returns the successful response."""
    response: Response = yield from _perform(endpoint, call, is_opened=False)
    return response


def open_stream(endpoint: Endpoint, call: Call) -> Flow[OpenedResponse]:
    """Like `perform`, for a response that is read in chunks."""
    opened: OpenedResponse = yield from _perform(endpoint, call, is_opened=True)
    return opened


def _perform(endpoint: Endpoint, call: Call, is_opened: bool) -> Flow[Any]:
    # Counts only the waits, not the duration of the call itself: a command that ran for an hour and whose response was lost is
    # still retried.
    waited = 0.0
    waits = Backoff()
    has_replaced = False
    lost: errors.CoboxError | None = None
    attempts = 0
    while True:
        secret = yield from endpoint.secret()
        request = to_request(endpoint, call, secret)
        error: errors.CoboxError
        try:
            response = yield (OpenResponse(request) if is_opened else SendRequest(request))
        except errors.Unreachable as unreachable:
            attempts += 1
            error, wait = unreachable, waits.next()
            may_repeat = attempts < MAX_ATTEMPTS and (call.is_repeatable or not unreachable.was_sent)
            if unreachable.was_sent:
                lost = unreachable
        else:
            if 200 <= response.status < 300 or response.status in call.accepted_statuses:
                return response
            error = redacted(errors.from_answer(response.status, response.headers, response.body, endpoint.base + call.path), secret)
            if lost is not None and isinstance(error, errors.CommandNotFound):
                raise errors.MayHaveRun(f"the command's response was lost ({lost.message}), and the sandbox doesn't know the command")
            if isinstance(error, errors.TokenExpired) and not has_replaced:
                has_replaced = True
                yield from endpoint.renew(secret)
                continue
            wait = min(max(error.retry_after if error.retry_after is not None else 1.0, MIN_WAIT), MAX_WAIT)
            if response.status in RETRY_LATER_STATUSES and not isinstance(error, errors.QuotaExceeded):
                may_repeat = True
            else:
                attempts += 1
                may_repeat = response.status in UNAVAILABLE_STATUSES and call.is_repeatable and attempts < MAX_ATTEMPTS
                if response.status in UNAVAILABLE_STATUSES:
                    lost = error
        if not may_repeat or waited + wait > MAX_TOTAL_WAIT or not (request.body is None or request.body.is_replayable):
            raise error
        if lost is not None and call.retry_json is not None:
            call = replace(call, json=call.retry_json)
        waited += wait
        yield Sleep(wait)


def redacted(error: errors.CoboxError, secret: Secret) -> errors.CoboxError:
    """Removes the credential from an error: a server may echo it in any field."""
    text = secret.expose()
    for name in ("message", "code", "request_id"):
        value = getattr(error, name)
        if value is not None and text in value:
            setattr(error, name, value.replace(text, "***"))
    error.args = (error.message,)
    if text in repr(error.details):
        error.details = {}
    return error


class Backoff:
    """Exponential backoff with jitter: each wait is between half and all of the current step, so that many clients do not
    reconnect in sync."""

    def __init__(self, first: float = 0.1, longest: float = 5.0) -> None:
        self._next, self._first, self._longest = first, first, longest

    def next(self) -> float:
        full, self._next = self._next, min(self._next * 2, self._longest)
        return full * (0.5 + 0.5 * random.random())

    def reset(self) -> None:
        self._next = self._first


def without_none(**fields: Any) -> dict[str, Any]:
    """Only the fields that were given; the server applies its defaults to the others."""
    return {name: value for name, value in fields.items() if value is not None}
