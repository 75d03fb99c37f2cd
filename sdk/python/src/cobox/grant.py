"""Access to one sandbox through a session: base URLs and a token that is renewed before it expires. Shared by threads and tasks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from . import errors
from .call import BrokerEndpoint, Call, Endpoint, perform
from .decode import decode
from .effects import AcquireLock, Flow, Sleep
from .responses import Heartbeat
from .secret import Secret

log = logging.getLogger("cobox")

# Minimum remaining lifetime in seconds for a token to start a call: an upload cannot switch tokens halfway.
MIN_TOKEN_LIFETIME = 10.0
# Minimum seconds between two token renewals, no matter how wrong the local clock is.
MIN_REFRESH_INTERVAL = 5.0
# Seconds to wait after a renewal or heartbeat failed with a retryable error.
RETRY_INTERVAL = 5.0
# Limits in seconds for the heartbeat interval, which is otherwise a third of the idle timeout.
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
class NegotiationResponse:
    """The broker's response to a negotiation."""

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
class RefreshResponse:
    token: Secret
    expires_at: datetime
    refresh_before: datetime


@dataclass
class Token:
    secret: Secret = field(repr=False)
    # Monotonic clock of this machine.
    expires: float
    refresh: float

    @classmethod
    def from_expiry(cls, secret: Secret, expires_at: datetime | None, refresh_before: datetime | None) -> Token:
        now, clock = time.monotonic(), datetime.now(timezone.utc)
        expires = now + (expires_at - clock).total_seconds() if expires_at is not None else float("inf")
        if refresh_before is None:
            return cls(secret, expires, float("inf"))
        return cls(secret, expires, now + max((refresh_before - clock).total_seconds(), MIN_REFRESH_INTERVAL))


class Grant:
    """One principal's access to one sandbox through one session. Without a broker it ends when its token expires."""

    def __init__(
        self,
        *,
        http_base_url: str,
        ws_base_url: str | None,
        token: Token,
        sandbox_id: str,
        session_id: str | None,
        thread_id: str | None = None,
        broker: BrokerEndpoint | None = None,
        capabilities: frozenset[str] | None = None,
        idle_timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        renegotiation_call: Call | None = None,
    ) -> None:
        self.base = http_base_url.rstrip("/")
        self.ws_base = (ws_base_url or self.base.replace("http", "ws", 1)).rstrip("/")
        self.sandbox_id, self.session_id, self.thread_id = sandbox_id, session_id, thread_id
        self.broker = broker
        # None if unknown.
        self.capabilities = capabilities
        self.heartbeat_interval = min(max((idle_timeout or 900.0) / 3, MIN_HEARTBEAT), MAX_HEARTBEAT)
        self.headers = tuple((headers or {}).items())
        # Negotiates again with the same restrictions, set when less was requested than the key allows: a renewed token must not
        # be wider.
        self.renegotiation_call = renegotiation_call
        self._token = token
        self._renewal_lock = threading.Lock()

    @classmethod
    def from_negotiation(
        cls,
        negotiated: NegotiationResponse,
        broker: BrokerEndpoint,
        headers: Mapping[str, str] | None = None,
        renegotiation_call: Call | None = None,
    ) -> Grant:
        return cls(
            http_base_url=negotiated.sandbox.http_base_url,
            ws_base_url=negotiated.sandbox.ws_base_url,
            token=Token.from_expiry(negotiated.token, negotiated.expires_at, negotiated.refresh_before),
            sandbox_id=negotiated.sandbox.id,
            session_id=negotiated.session_id,
            thread_id=negotiated.thread_id,
            broker=broker,
            capabilities=frozenset(negotiated.credentials.granted_capabilities),
            idle_timeout=negotiated.policy.idle_timeout_seconds,
            headers=headers,
            renegotiation_call=renegotiation_call,
        )

    @property
    def token(self) -> Token:
        return self._token

    def secret(self) -> Flow[Secret]:
        """Returns a token that lives long enough to start a call."""
        token = self._token
        if token.expires > time.monotonic() + MIN_TOKEN_LIFETIME or self.broker is None:
            return token.secret
        try:
            fresh = yield from self.renew(token.secret)
            return fresh
        except errors.CoboxError:
            # The local clock may be wrong, so a token that has not expired yet is still worth trying.
            if token.expires > time.monotonic():
                return token.secret
            raise

    def renew(self, old: Secret) -> Flow[Secret]:
        """Renews the token `old`; if it was already renewed concurrently, returns the newer one."""
        if self.broker is None or self.session_id is None:
            raise errors.TokenExpired("the token has expired and cannot be renewed without a broker")
        yield AcquireLock(self._renewal_lock)
        try:
            if self._token.secret != old:
                return self._token.secret
            refreshed = yield from self._request_refresh(self.broker, old)
            self._token = Token.from_expiry(refreshed.token, refreshed.expires_at, refreshed.refresh_before)
            return refreshed.token
        finally:
            self._renewal_lock.release()

    def _request_refresh(self, broker: BrokerEndpoint, old: Secret) -> Flow[RefreshResponse]:
        # With the old token in the request, the new one keeps its actor and capabilities instead of the key's.
        body = {"current_token": old.expose()} if self.renegotiation_call is not None else {}
        try:
            response = yield from perform(broker, Call("POST", self.session_path("/refresh"), json=body, headers=self.headers))
        except errors.Unauthenticated:
            # The old token was revoked, or expired too long ago to be accepted.
            if self.renegotiation_call is None:
                raise
            response = yield from perform(broker, self.renegotiation_call)
            found = decode(NegotiationResponse, response.body, broker.base)
            if found.session_id != self.session_id:
                raise errors.SessionExpired("the session has ended and another one has replaced it") from None
            return RefreshResponse(found.token, found.expires_at, found.refresh_before)
        return decode(RefreshResponse, response.body, broker.base)

    def require_broker(self) -> Endpoint:
        if self.broker is None or self.session_id is None:
            raise errors.SettingsMissing("this session was created from a token alone; this call needs a broker and an API key")
        return self.broker

    def session_path(self, rest: str = "") -> str:
        return f"/v1/sandbox/sessions/{self.session_id}{rest}"

    def heartbeat(self) -> Flow[Heartbeat]:
        endpoint = self.require_broker()
        response = yield from perform(endpoint, Call("POST", self.session_path("/heartbeat"), json={}, timeout=30))
        return decode(Heartbeat, response.body, endpoint.base)

    def keep_alive(self) -> Flow[None]:
        """Renews the token and sends heartbeats for as long as the session lives; runs in the background."""
        beat_at = time.monotonic() + self.heartbeat_interval
        while True:
            token = self._token
            yield Sleep(min(beat_at, token.refresh) - time.monotonic())
            try:
                if token.refresh <= time.monotonic():
                    yield from self.renew(token.secret)
                if beat_at <= time.monotonic():
                    yield from self.heartbeat()
                    beat_at = time.monotonic() + self.heartbeat_interval
            except errors.CoboxError as error:
                if not error.retryable:
                    # Every later call reports the error itself.
                    log.info("session %s is no longer kept alive: %s", self.session_id, error)
                    return
                log.debug("keeping session %s alive failed; retrying: %s", self.session_id, error)
                yield Sleep(RETRY_INTERVAL)


def negotiation_call(
    body: Mapping[str, Any], *, wait: float | None, idempotency_key: str | None, headers: Mapping[str, str] | None
) -> Call:
    extra = [*(headers or {}).items()]
    if wait is not None:
        extra.append(("prefer", f"wait={int(wait)}"))
    if idempotency_key is not None:
        extra.append(("idempotency-key", idempotency_key))
    return Call("POST", "/v1/sandbox/sessions", json=body, headers=tuple(extra))
