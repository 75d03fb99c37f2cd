"""Which headers cross, in either direction. Named ones only: what nobody thought of stays on its side."""

from __future__ import annotations

from collections.abc import Iterable

from . import refusals

# What the broker's routes read.
TO_BROKER = frozenset({"accept", "content-type", "last-event-id", "prefer", "user-agent"})
# What a sandbox's daemon reads, and what carries a body. Credentials, cookies and addresses of others are not among them.
TO_SANDBOX = frozenset(
    {
        "accept",
        "accept-encoding",
        "content-encoding",
        "content-length",
        "content-type",
        "idempotency-key",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-range",
        "if-unmodified-since",
        "last-event-id",
        "prefer",
        "range",
        "user-agent",
        "x-file-mode",
    }
)
# Of an answer: meant for one connection, this server's own to say, or this deployment's rules for pages.
_STAYS = frozenset(
    {
        "alt-svc",
        "clear-site-data",
        "connection",
        "date",
        "keep-alive",
        "nel",
        "proxy-authenticate",
        "proxy-connection",
        "refresh",
        "report-to",
        "reporting-endpoints",
        "server",
        "service-worker-allowed",
        "set-cookie",
        "set-cookie2",
        "strict-transport-security",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "www-authenticate",
    }
)
_STAYS_BEGINNING = ("access-control-", "proxy-")

Pairs = list[tuple[str, str]]


def passed_on(headers: Iterable[tuple[bytes, bytes]], allowed: frozenset[str]) -> Pairs:
    """Of a request's raw headers those that are allowed across; a condition or length that is said twice may not be meant."""
    found: dict[str, str] = {}
    for name, value in headers:
        key = name.decode("latin-1").lower()
        if key in allowed:
            if key in found:
                raise refusals.invalid(f"{key}: was sent twice; send it once")
            found[key] = value.decode("latin-1")
    return list(found.items())


def handed_back(headers: Iterable[tuple[str, str]]) -> Pairs:
    """Of an answer's headers what its caller gets."""
    pairs = [(name.lower(), value) for name, value in headers]
    # What `Connection` names is for the connection too.
    named = {word.strip().lower() for name, value in pairs if name == "connection" for word in value.split(",")}
    return [(n, v) for n, v in pairs if n not in _STAYS and n not in named and not n.startswith(_STAYS_BEGINNING)]
