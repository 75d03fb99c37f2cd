"""Parses the sandbox that a run supplies in `config.configurable.sandbox`. The input is untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import CoboxError
from ..secret import Secret

# Maximum length of an id in characters.
MAX_ID = 256
# Maximum length of a token in characters; tokens signed by the broker are shorter.
MAX_TOKEN = 16 * 1024
# Maximum length of a URL in characters, as most servers accept.
MAX_URL = 2048
# Prefix of every API key. A key must only be sent to the broker: it gives access to far more than one sandbox.
API_KEY_PREFIX = "cbx_"

_DEFAULT_PORTS = {"http": 80, "https": 443}
# A WebSocket URL is compared as the corresponding HTTP URL.
_AS_HTTP = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_VISIBLE_ASCII = re.compile(r"[\x21-\x7e]+")


class SandboxRefused(CoboxError):
    """The run supplies a sandbox that it may not use or that cannot be used. Nothing was sent to it."""

    code = "SANDBOX_REFUSED"


@dataclass(frozen=True)
class SuppliedSandbox:
    """A sandbox supplied by a run, in the format of a negotiation response or as `{sandbox_id, credential, dataplane_url}`."""

    sandbox_id: str
    token: Secret | None = field(default=None, repr=False)
    http_base_url: str | None = None
    ws_base_url: str | None = None
    session_id: str | None = None
    thread_id: str | None = None
    expires_at: datetime | None = None

    @classmethod
    def read(cls, value: object) -> SuppliedSandbox | None:
        """Returns None if nothing was supplied; raises `SandboxRefused` if it is invalid."""
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise SandboxRefused("configurable.sandbox: must be an object")
        sandbox, binding = _nested_object(value, "sandbox"), _nested_object(value, "binding")
        dataplane, credentials = _nested_object(value, "dataplane"), _nested_object(value, "credentials")
        sandbox_id = _single_value("sandbox id", MAX_ID, value.get("sandbox_id"), sandbox.get("id"), binding.get("sandbox_id"))
        if sandbox_id is None:
            raise SandboxRefused("configurable.sandbox: identifies no sandbox; send `sandbox.id` or `sandbox_id`")
        http = _single_value("http_base_url", MAX_URL, sandbox.get("http_base_url"), dataplane.get("http_base_url"))
        older = _single_value("dataplane_url", MAX_URL, value.get("dataplane_url"))
        if http is None and older is not None:
            http = older.rstrip("/") + "/v1"
        token = _single_value(
            "token",
            MAX_TOKEN,
            value.get("token"),
            value.get("credential"),
            value.get("sandbox_credential"),
            credentials.get("access_token"),
        )
        if token is not None and token.startswith(API_KEY_PREFIX):
            raise SandboxRefused(
                "configurable.sandbox: contains an API key, which is for the broker only; send a token instead, and revoke that key"
            )
        return cls(
            sandbox_id=sandbox_id,
            token=None if token is None else Secret(token),
            http_base_url=http,
            ws_base_url=_single_value("ws_base_url", MAX_URL, sandbox.get("ws_base_url"), dataplane.get("ws_base_url")),
            session_id=_single_value("session_id", MAX_ID, value.get("session_id"), binding.get("id")),
            thread_id=_single_value("thread_id", MAX_ID, value.get("thread_id")),
            expires_at=_parse_expiry(_single_value("expires_at", MAX_ID, value.get("expires_at"), credentials.get("expires_at"))),
        )

    def require_thread(self, thread_id: str | None) -> None:
        """Raises unless the sandbox was negotiated for this thread."""
        if self.thread_id is not None and self.thread_id != thread_id:
            raise SandboxRefused("configurable.sandbox: belongs to another thread than this run")

    def require_unexpired(self, now: datetime | None = None) -> None:
        if self.expires_at is not None and self.expires_at <= (now or datetime.now(timezone.utc)):
            raise SandboxRefused("configurable.sandbox: the token has expired; negotiate or refresh, and send the new one with the run")


@dataclass(frozen=True)
class AllowedPrefixes:
    """URL prefixes to which supplied tokens may be sent; each allows its origin and every path below it."""

    allowed: tuple[_PrefixUrl, ...] = ()

    @classmethod
    def of(cls, urls: Iterable[str]) -> AllowedPrefixes:
        return cls(tuple(_PrefixUrl.read(url, "a prefix") for url in urls))

    @classmethod
    def from_text(cls, text: str) -> AllowedPrefixes:
        """Parses the environment variable: prefixes separated by commas or spaces."""
        return cls.of(value for value in re.split(r"[,\s]+", text) if value)

    def require_allowed(self, url: str, name: str) -> None:
        target = _PrefixUrl.read(url, name)
        if not any(target.is_beneath(prefix) for prefix in self.allowed):
            # The URL is untrusted and would end up in logs, so the message leaves it out.
            raise SandboxRefused(f"configurable.sandbox: {name} is under none of the allowed prefixes, so no token is sent there")


@dataclass(frozen=True)
class _PrefixUrl:
    scheme: str
    host: str
    port: int
    path: tuple[str, ...]

    @classmethod
    def read(cls, url: str, name: str) -> _PrefixUrl:
        """Accepts only URLs that all parsers interpret alike."""
        unreadable = SandboxRefused(f"{name} must be a plain http or https URL without user, query, fragment or `..` in its path")
        # Parsers disagree about spaces, control characters and backslashes.
        if len(url) > MAX_URL or not _VISIBLE_ASCII.fullmatch(url) or "\\" in url or "?" in url or "#" in url:
            raise unreadable
        try:
            parts = urlsplit(url)
            scheme, host, port = _AS_HTTP.get(parts.scheme), parts.hostname, parts.port
        except ValueError:
            raise unreadable from None
        if scheme is None or not host or host.endswith(".") or "%" in host or "@" in parts.netloc:
            raise unreadable
        path = tuple(segment for segment in parts.path.split("/") if segment)
        for segment in path:
            plain = unquote(segment)
            if plain in (".", "..") or "/" in plain or "\\" in plain or "%" in plain:
                raise unreadable
        return cls(scheme, host, port or _DEFAULT_PORTS[scheme], path)

    def is_beneath(self, prefix: _PrefixUrl) -> bool:
        is_origin = (self.scheme, self.host, self.port) == (prefix.scheme, prefix.host, prefix.port)
        return is_origin and self.path[: len(prefix.path)] == prefix.path


def _nested_object(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = value.get(name)
    if inner is None:
        return {}
    if not isinstance(inner, Mapping):
        raise SandboxRefused(f"configurable.sandbox.{name}: must be an object")
    return inner


def _single_value(name: str, limit: int, *values: object) -> str | None:
    """The value of a field that may be given under several names, which must agree."""
    found = [value for value in values if value is not None and value != ""]
    for value in found:
        if not isinstance(value, str) or len(value) > limit or not value.isprintable():
            raise SandboxRefused(f"configurable.sandbox: {name} must be a string of 1 to {limit} printable characters")
    if any(value != found[0] for value in found):
        raise SandboxRefused(f"configurable.sandbox: contains different values for the {name}")
    return str(found[0]) if found else None


def _parse_expiry(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    except ValueError:
        raise SandboxRefused("configurable.sandbox: expires_at must be a time such as 2026-02-27T20:20:00Z") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
