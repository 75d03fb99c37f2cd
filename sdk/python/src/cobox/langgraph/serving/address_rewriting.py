"""Rewrites sandbox addresses in the broker's responses to the deployment's own address if the deployment relays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

# Response fields that contain addresses of a sandbox or of a file in one.
_FIELDS = frozenset({"http_base_url", "ws_base_url", "dataplane_url", "url", "http", "ws"})
# Paths that the deployment relays; no other path of the broker is rewritten.
_PASSED_ON = ("/dp/", "/v1/sandbox/relay/")
_SOCKETS = {"http": "ws", "https": "wss"}
# Deeper than any response of the broker.
_MAX_DEPTH = 8


def address_rewriter(broker_url: str, relay_url: str) -> Callable[[Any], Any]:
    """Returns a function that rewrites a JSON response. Addresses outside the broker stay unchanged: clients connect to them
    directly."""
    pairs = [(broker_url, relay_url), (_socket(broker_url), _socket(relay_url))]

    def rewrite(value: Any, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            return value
        if isinstance(value, dict):
            return {k: _one(v, pairs) if k in _FIELDS and isinstance(v, str) else rewrite(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list):
            return [rewrite(item, depth + 1) for item in value]
        return value

    return rewrite


def _one(url: str, pairs: list[tuple[str, str]]) -> str:
    for here, there in pairs:
        if url.startswith(here) and url[len(here) :].startswith(_PASSED_ON):
            return there + url[len(here) :]
    return url


def _socket(url: str) -> str:
    scheme = urlsplit(url).scheme
    return _SOCKETS[scheme] + url[len(scheme) :]
