"""Allowlists of the headers that are forwarded in either direction; all others are dropped."""

from __future__ import annotations

from collections.abc import Iterable

from . import error_responses

# Headers read by the broker's routes.
TO_BROKER = frozenset({"accept", "content-type", "last-event-id", "prefer", "user-agent"})
# Headers read by a sandbox's daemon, and those that describe a body. Excludes credentials, cookies and client addresses.
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
# Response headers that are dropped: hop-by-hop headers, those that this server sets itself, and those that would affect the
# deployment's pages.
_NOT_RETURNED = frozenset(
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
_NOT_RETURNED_PREFIXES = ("access-control-", "proxy-")

HeaderPairs = list[tuple[str, str]]


def filter_request_headers(headers: Iterable[tuple[bytes, bytes]], allowed: frozenset[str]) -> HeaderPairs:
    """The allowed headers of a request. A duplicate is refused, because the two ends could interpret it differently."""
    found: dict[str, str] = {}
    for name, value in headers:
        key = name.decode("latin-1").lower()
        if key in allowed:
            if key in found:
                raise error_responses.invalid(f"{key}: was sent twice; send it once")
            found[key] = value.decode("latin-1")
    return list(found.items())


def filter_response_headers(headers: Iterable[tuple[str, str]]) -> HeaderPairs:
    """The headers of a response that are returned to the caller."""
    pairs = [(name.lower(), value) for name, value in headers]
    # Headers named in `Connection` are hop-by-hop too.
    named = {word.strip().lower() for name, value in pairs if name == "connection" for word in value.split(",")}
    return [(n, v) for n, v in pairs if n not in _NOT_RETURNED and n not in named and not n.startswith(_NOT_RETURNED_PREFIXES)]
