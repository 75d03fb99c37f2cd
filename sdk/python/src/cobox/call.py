"""One call as it is meant, and the flow that makes it: credential, waiting when told to wait, trying again where that is safe."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from . import errors
from .body import Upload
from .flow import Answer, Flow, Open, Opened, Pause, Request, Send
from .secret import Secret

# Seconds a call goes on waiting where it is told to wait: a starting sandbox, too many requests.
PATIENCE = 120.0
# Seconds between two tries, at least and at most: a server may say 0, or an hour.
MIN_WAIT, MAX_WAIT = 0.1, 10.0
# Tries of a call that nobody answered, or that met a provider that is away.
TRIES = 4
# Answers that say "not now" of which nothing was done.
NOT_NOW = (423, 429)
# Of a proxy, or of a broker whose provider is away: done or not, nobody knows.
AWAY = (502, 503, 504)


@dataclass(frozen=True)
class Call:
    """A request relative to a door: the broker, a session there, or a sandbox."""

    method: str
    path: str
    json: Any = None
    # What is sent in place of `json` once that may have arrived: it asks for what was begun, and begins nothing.
    json_again: Any = None
    body: Upload | None = None
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    # Whether doing it twice is as good as once: then it is tried again when no answer came.
    is_repeatable: bool = True
    timeout: float = 60.0
    silence: float | None = None
    max_bytes: int = 64 * 1024 * 1024
    # Statuses beside 2xx that the caller reads itself.
    takes: tuple[int, ...] = ()


class Door(Protocol):
    """Where calls go, and what is shown there."""

    @property
    def base(self) -> str: ...
    def secret(self) -> Flow[Secret]: ...
    def replace(self, old: Secret) -> Flow[Secret]: ...


class BrokerDoor:
    """The broker, with the API key."""

    def __init__(self, url: str, key: Secret) -> None:
        self.base, self._key = url, key

    def secret(self) -> Flow[Secret]:
        return self._key
        yield

    def replace(self, old: Secret) -> Flow[Secret]:
        raise errors.Unauthenticated("the API key has expired")
        yield


def request_of(door: Door, call: Call, secret: Secret) -> Request:
    url = door.base + call.path
    if call.query:
        url += "?" + urlencode(call.query, quote_via=quote)
    headers, body = call.headers, call.body
    if call.json is not None:
        headers, body = (*headers, ("content-type", "application/json")), Upload.json(call.json)
    return Request(call.method, url, headers, body, secret, call.timeout, call.silence, call.max_bytes)


def perform(door: Door, call: Call) -> Flow[Answer]:
    """Makes a call and gives its answer, a success."""
    answer: Answer = yield from _perform(door, call, is_opened=False)
    return answer


def open_stream(door: Door, call: Call) -> Flow[Opened]:
    """The same for an answer that is read piece by piece."""
    opened: Opened = yield from _perform(door, call, is_opened=True)
    return opened


def _perform(door: Door, call: Call, is_opened: bool) -> Flow[Any]:
    # What was waited, not what the call itself took: a command of an hour whose answer is lost is still asked for again.
    waited = 0.0
    waits = Backoff()
    has_replaced = False
    lost: errors.CoboxError | None = None
    tries = 0
    while True:
        secret = yield from door.secret()
        request = request_of(door, call, secret)
        error: errors.CoboxError
        try:
            answer = yield (Open(request) if is_opened else Send(request))
        except errors.Unreachable as unreachable:
            tries += 1
            error, wait = unreachable, waits.next()
            may_repeat = tries < TRIES and (call.is_repeatable or not unreachable.was_sent)
            if unreachable.was_sent:
                lost = unreachable
        else:
            if 200 <= answer.status < 300 or answer.status in call.takes:
                return answer
            error = redacted(errors.from_answer(answer.status, answer.headers, answer.body, door.base + call.path), secret)
            if lost is not None and isinstance(error, errors.CommandNotFound):
                raise errors.MayHaveRun(f"the command's answer was lost ({lost.message}), and the sandbox doesn't know the command")
            if isinstance(error, errors.TokenExpired) and not has_replaced:
                has_replaced = True
                yield from door.replace(secret)
                continue
            wait = min(max(error.retry_after if error.retry_after is not None else 1.0, MIN_WAIT), MAX_WAIT)
            if answer.status in NOT_NOW and not isinstance(error, errors.QuotaExceeded):
                may_repeat = True
            else:
                tries += 1
                may_repeat = answer.status in AWAY and call.is_repeatable and tries < TRIES
                if answer.status in AWAY:
                    lost = error
        if not may_repeat or waited + wait > PATIENCE or not (request.body is None or request.body.is_replayable):
            raise error
        if lost is not None and call.json_again is not None:
            call = replace(call, json=call.json_again)
        waited += wait
        yield Pause(wait)


def redacted(error: errors.CoboxError, secret: Secret) -> errors.CoboxError:
    """Whoever answers may repeat what was shown to it; no message does."""
    text = secret.expose()
    for name in ("message", "code", "request_id"):
        told = getattr(error, name)
        if told is not None and text in told:
            setattr(error, name, told.replace(text, "***"))
    error.args = (error.message,)
    if text in repr(error.details):
        error.details = {}
    return error


class Backoff:
    """Waits that double, each anywhere between half and all of it, so that many clients don't come back in step."""

    def __init__(self, first: float = 0.1, longest: float = 5.0) -> None:
        self._next, self._first, self._longest = first, first, longest

    def next(self) -> float:
        full, self._next = self._next, min(self._next * 2, self._longest)
        return full * (0.5 + 0.5 * random.random())

    def reset(self) -> None:
        self._next = self._first


def wanted(**fields: Any) -> dict[str, Any]:
    """The fields that were given: what is None is left to the server."""
    return {name: value for name, value in fields.items() if value is not None}
