"""What a run may bring along about its sandbox (`config.configurable.sandbox`), read as what it is: a stranger's word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import CoboxError
from ..secret import Secret

# As long as an id may be that we are given, in characters.
MAX_ID = 256
# Longer than any token the broker signs, in characters.
MAX_TOKEN = 16 * 1024
# As much of a URL as any server takes, in characters.
MAX_URL = 2048
# Every API key begins so; it is for the broker alone and opens far more than a sandbox.
API_KEY_PREFIX = "cbx_"

_DEFAULT_PORTS = {"http": 80, "https": 443}
# A socket's URL is judged as the page's it belongs to.
_AS_HTTP = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_VISIBLE_ASCII = re.compile(r"[\x21-\x7e]+")


class SandboxRefused(CoboxError):
    """The run names a sandbox that it may not have, or none that could be used. Nothing was sent there."""

    code = "SANDBOX_REFUSED"


@dataclass(frozen=True)
class Bootstrap:
    """A sandbox as a run names it, in the shape of a negotiation's answer or as `{sandbox_id, credential, dataplane_url}`."""

    sandbox_id: str
    token: Secret | None = field(default=None, repr=False)
    http_base_url: str | None = None
    ws_base_url: str | None = None
    session_id: str | None = None
    thread_id: str | None = None
    expires_at: datetime | None = None

    @classmethod
    def read(cls, value: object) -> Bootstrap | None:
        """None where nothing was brought; `SandboxRefused` where it can't be read."""
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise SandboxRefused("configurable.sandbox: must be an object")
        sandbox, binding = _object(value, "sandbox"), _object(value, "binding")
        dataplane, credentials = _object(value, "dataplane"), _object(value, "credentials")
        sandbox_id = _one("sandbox id", MAX_ID, value.get("sandbox_id"), sandbox.get("id"), binding.get("sandbox_id"))
        if sandbox_id is None:
            raise SandboxRefused("configurable.sandbox: names no sandbox; send `sandbox.id` or `sandbox_id`")
        http = _one("http_base_url", MAX_URL, sandbox.get("http_base_url"), dataplane.get("http_base_url"))
        older = _one("dataplane_url", MAX_URL, value.get("dataplane_url"))
        if http is None and older is not None:
            http = older.rstrip("/") + "/v1"
        token = _one(
            "token",
            MAX_TOKEN,
            value.get("token"),
            value.get("credential"),
            value.get("sandbox_credential"),
            credentials.get("access_token"),
        )
        if token is not None and token.startswith(API_KEY_PREFIX):
            raise SandboxRefused("configurable.sandbox: an API key is for the broker alone; send a token, and replace that key")
        return cls(
            sandbox_id=sandbox_id,
            token=None if token is None else Secret(token),
            http_base_url=http,
            ws_base_url=_one("ws_base_url", MAX_URL, sandbox.get("ws_base_url"), dataplane.get("ws_base_url")),
            session_id=_one("session_id", MAX_ID, value.get("session_id"), binding.get("id")),
            thread_id=_one("thread_id", MAX_ID, value.get("thread_id")),
            expires_at=_time(_one("expires_at", MAX_ID, value.get("expires_at"), credentials.get("expires_at"))),
        )

    def must_be_for(self, thread_id: str | None) -> None:
        """What was negotiated for another thread is not for this run."""
        if self.thread_id is not None and self.thread_id != thread_id:
            raise SandboxRefused("configurable.sandbox: is of another thread than this run's")

    def must_be_fresh(self, now: datetime | None = None) -> None:
        if self.expires_at is not None and self.expires_at <= (now or datetime.now(timezone.utc)):
            raise SandboxRefused("configurable.sandbox: its token has expired; negotiate or refresh, and send the new one with the run")


@dataclass(frozen=True)
class Prefixes:
    """Where tokens that a run brings may be sent: URLs, each standing for its origin and every path beneath it."""

    allowed: tuple[_Place, ...] = ()

    @classmethod
    def of(cls, urls: Iterable[str]) -> Prefixes:
        return cls(tuple(_Place.read(url, "a prefix") for url in urls))

    @classmethod
    def from_text(cls, text: str) -> Prefixes:
        """As an environment variable has them: with commas or spaces between."""
        return cls.of(word for word in re.split(r"[,\s]+", text) if word)

    def must_have(self, url: str, what: str) -> None:
        place = _Place.read(url, what)
        if not any(place.is_beneath(prefix) for prefix in self.allowed):
            # Not repeated: it is a stranger's, and ends in logs.
            raise SandboxRefused(f"configurable.sandbox: {what} is under none of the configured prefixes, so no token is sent there")


@dataclass(frozen=True)
class _Place:
    scheme: str
    host: str
    port: int
    path: tuple[str, ...]

    @classmethod
    def read(cls, url: str, what: str) -> _Place:
        """Only what every reader of URLs understands alike."""
        unreadable = SandboxRefused(f"{what} must be a plain http or https URL, without user, query, fragment or steps back in its path")
        # Parsers differ in what they make of blanks, controls and backslashes.
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

    def is_beneath(self, prefix: _Place) -> bool:
        is_origin = (self.scheme, self.host, self.port) == (prefix.scheme, prefix.host, prefix.port)
        return is_origin and self.path[: len(prefix.path)] == prefix.path


def _object(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = value.get(name)
    if inner is None:
        return {}
    if not isinstance(inner, Mapping):
        raise SandboxRefused(f"configurable.sandbox.{name}: must be an object")
    return inner


def _one(what: str, limit: int, *said: object) -> str | None:
    """The one thing that is said, in however many places."""
    found = [word for word in said if word is not None and word != ""]
    for word in found:
        if not isinstance(word, str) or len(word) > limit or not word.isprintable():
            raise SandboxRefused(f"configurable.sandbox: {what} must be a string of 1 to {limit} printable characters")
    if any(word != found[0] for word in found):
        raise SandboxRefused(f"configurable.sandbox: names more than one {what}")
    return str(found[0]) if found else None


def _time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    except ValueError:
        raise SandboxRefused("configurable.sandbox: expires_at must be a time such as 2026-02-27T20:20:00Z") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=timezone.utc)
