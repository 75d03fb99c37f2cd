"""A session's way into its sandbox: the addresses, and a token that is replaced before it runs out. Shared by threads and tasks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from . import errors
from .answers import Heartbeat
from .call import BrokerDoor, Call, Door, perform
from .decode import decode
from .flow import Acquire, Flow, Pause
from .secret import Secret

log = logging.getLogger("cobox")

# Seconds of life a token must have left for a call to start with it: an upload can't be stopped half-way for a new one.
MIN_LIFE = 10.0
# Seconds between two refreshes at least, however wrong this machine's clock is.
MIN_REFRESH_INTERVAL = 5.0
# Seconds between two tries of upkeep that failed for a passing reason.
RETRY_INTERVAL = 5.0
# Seconds between heartbeats, at least and at most; a third of the idle timeout lies mostly between.
MIN_HEARTBEAT, MAX_HEARTBEAT = 1.0, 300.0


@dataclass(frozen=True)
class Address:
    id: str
    provider: str
    http_base_url: str
    ws_base_url: str


@dataclass(frozen=True)
class Binding:
    id: str
    state: str
    lease_expires_at: datetime


@dataclass(frozen=True)
class Credentials:
    granted_capabilities: list[str]


@dataclass(frozen=True)
class LeasePolicy:
    idle_timeout_seconds: int
    hard_ttl_seconds: int


@dataclass(frozen=True)
class Negotiated:
    """What the broker answers to a negotiation."""

    session_id: str
    thread_id: str
    sandbox: Address
    token: Secret
    expires_at: datetime
    refresh_before: datetime
    scopes: list[str]
    binding: Binding
    credentials: Credentials
    policy: LeasePolicy


@dataclass(frozen=True)
class Refreshed:
    token: Secret
    expires_at: datetime
    refresh_before: datetime


@dataclass
class Token:
    secret: Secret = field(repr=False)
    # On this machine's own steady clock.
    expires: float
    refresh: float

    @classmethod
    def told(cls, secret: Secret, expires_at: datetime | None, refresh_before: datetime | None) -> Token:
        now, clock = time.monotonic(), datetime.now(timezone.utc)
        expires = now + (expires_at - clock).total_seconds() if expires_at is not None else float("inf")
        if refresh_before is None:
            return cls(secret, expires, float("inf"))
        return cls(secret, expires, now + max((refresh_before - clock).total_seconds(), MIN_REFRESH_INTERVAL))


class Grant:
    """What one principal has of one sandbox through one session. Without a broker, it ends with the token it was made of."""

    def __init__(
        self,
        *,
        http_base_url: str,
        ws_base_url: str | None,
        token: Token,
        sandbox_id: str,
        session_id: str | None,
        thread_id: str | None = None,
        broker: BrokerDoor | None = None,
        capabilities: frozenset[str] | None = None,
        idle_timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        narrowed: Call | None = None,
    ) -> None:
        self.base = http_base_url.rstrip("/")
        self.ws_base = (ws_base_url or self.base.replace("http", "ws", 1)).rstrip("/")
        self.sandbox_id, self.session_id, self.thread_id = sandbox_id, session_id, thread_id
        self.broker = broker
        # None where nobody said.
        self.capabilities = capabilities
        self.heartbeat_every = min(max((idle_timeout or 900.0) / 3, MIN_HEARTBEAT), MAX_HEARTBEAT)
        self.headers = tuple((headers or {}).items())
        # How to ask for it again where it was asked for as less than the key may: what follows must not be more.
        self.narrowed = narrowed
        self._token = token
        self._replacing = threading.Lock()

    @classmethod
    def of(cls, told: Negotiated, broker: BrokerDoor, headers: Mapping[str, str] | None = None, narrowed: Call | None = None) -> Grant:
        return cls(
            http_base_url=told.sandbox.http_base_url,
            ws_base_url=told.sandbox.ws_base_url,
            token=Token.told(told.token, told.expires_at, told.refresh_before),
            sandbox_id=told.sandbox.id,
            session_id=told.session_id,
            thread_id=told.thread_id,
            broker=broker,
            capabilities=frozenset(told.credentials.granted_capabilities),
            idle_timeout=told.policy.idle_timeout_seconds,
            headers=headers,
            narrowed=narrowed,
        )

    @property
    def token(self) -> Token:
        return self._token

    def secret(self) -> Flow[Secret]:
        """A token to start a call with."""
        token = self._token
        if token.expires > time.monotonic() + MIN_LIFE or self.broker is None:
            return token.secret
        try:
            fresh = yield from self.replace(token.secret)
            return fresh
        except errors.CoboxError:
            # This machine's clock may be the one that is wrong: a token not yet past is worth a try.
            if token.expires > time.monotonic():
                return token.secret
            raise

    def replace(self, old: Secret) -> Flow[Secret]:
        """Replaces `old`; where somebody else just did, gives what they got."""
        if self.broker is None or self.session_id is None:
            raise errors.TokenExpired("the token has expired, and without a broker there is no other")
        yield Acquire(self._replacing)
        try:
            if self._token.secret != old:
                return self._token.secret
            told = yield from self._refreshed(self.broker, old)
            self._token = Token.told(told.token, told.expires_at, told.refresh_before)
            return told.token
        finally:
            self._replacing.release()

    def _refreshed(self, broker: BrokerDoor, old: Secret) -> Flow[Refreshed]:
        # With the old one shown the new one has its actor and its capabilities, not the key's.
        body = {"current_token": old.expose()} if self.narrowed is not None else {}
        try:
            answer = yield from perform(broker, Call("POST", self.session_path("/refresh"), json=body, headers=self.headers))
        except errors.Unauthenticated:
            # The old one was taken back, or expired too long ago to be shown.
            if self.narrowed is None:
                raise
            answer = yield from perform(broker, self.narrowed)
            found = decode(Negotiated, answer.body, broker.base)
            if found.session_id != self.session_id:
                raise errors.SessionExpired("the session is over, and there is another in its place") from None
            return Refreshed(found.token, found.expires_at, found.refresh_before)
        return decode(Refreshed, answer.body, broker.base)

    def at_broker(self) -> Door:
        if self.broker is None or self.session_id is None:
            raise errors.SettingsMissing("this session came with a token alone; what it asks for needs a broker and a key")
        return self.broker

    def session_path(self, rest: str = "") -> str:
        return f"/v1/sandbox/sessions/{self.session_id}{rest}"

    def heartbeat(self) -> Flow[Heartbeat]:
        door = self.at_broker()
        answer = yield from perform(door, Call("POST", self.session_path("/heartbeat"), json={}, timeout=30))
        return decode(Heartbeat, answer.body, door.base)

    def keep(self) -> Flow[None]:
        """Refreshes and says that somebody is here, for as long as the session lives; runs beside everything else."""
        beat_at = time.monotonic() + self.heartbeat_every
        while True:
            token = self._token
            yield Pause(min(beat_at, token.refresh) - time.monotonic())
            try:
                if token.refresh <= time.monotonic():
                    yield from self.replace(token.secret)
                if beat_at <= time.monotonic():
                    yield from self.heartbeat()
                    beat_at = time.monotonic() + self.heartbeat_every
            except errors.CoboxError as error:
                if not error.retryable:
                    # Every later call says so itself.
                    log.info("session %s is not kept alive any more: %s", self.session_id, error)
                    return
                log.debug("upkeep of session %s failed and is tried again: %s", self.session_id, error)
                yield Pause(RETRY_INTERVAL)


def negotiation(body: Mapping[str, Any], *, wait: float | None, idempotency_key: str | None, headers: Mapping[str, str] | None) -> Call:
    extra = [*(headers or {}).items()]
    if wait is not None:
        extra.append(("prefer", f"wait={int(wait)}"))
    if idempotency_key is not None:
        extra.append(("idempotency-key", idempotency_key))
    return Call("POST", "/v1/sandbox/sessions", json=body, headers=tuple(extra))
