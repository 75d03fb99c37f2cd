"""What both interpreters agree on about the network: who is asked, over which TLS, and what is never logged."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from . import errors
from .flow import Answer, Request
from .version import __version__

# Seconds until a connection must stand.
CONNECT_TIMEOUT = 10.0
# Seconds a piece of an upload may wait to be taken.
WRITE_TIMEOUT = 60.0
# Seconds to wait for one of our own connections to come free.
POOL_TIMEOUT = 60.0
# Connections kept: agents run tools side by side, and each waits for its answer.
MAX_CONNECTIONS = 100
# Largest frame either side sends.
MAX_FRAME_BYTES = 1024 * 1024
# Of an answer that is an error.
MAX_ERROR_BYTES = 1024 * 1024
USER_AGENT = f"cobox-python/{__version__}"


class _NoDebug(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG


# At DEBUG the websockets library logs headers and frames, and there the token is.
socket_log = logging.getLogger("cobox.socket")
socket_log.setLevel(logging.INFO)
socket_log.addFilter(_NoDebug())


@dataclass(frozen=True)
class Network:
    """How to get there."""

    ca_file: str | None = None

    def tls(self) -> ssl.SSLContext:
        """One for all connections: reading the certificates takes a while, in which nothing else happens in an event loop."""
        return self._tls

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file or os.environ.get("COBOX_CA_FILE") or None)

    @property
    def has_tls(self) -> bool:
        return "_tls" in self.__dict__


def is_local(url: str) -> bool:
    """On this machine, where no proxy leads."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def timeouts(request: Request) -> httpx.Timeout:
    silence = request.timeout if request.silence is None else request.silence
    # No step of it may take longer than all of it.
    connect, write, pool = (min(limit, request.timeout) for limit in (CONNECT_TIMEOUT, WRITE_TIMEOUT, POOL_TIMEOUT))
    return httpx.Timeout(silence, connect=connect, write=write, pool=pool)


def head(request: Request) -> list[tuple[str, str]]:
    """The headers of a request; the credential is in no object but this list."""
    headers = [("user-agent", USER_AGENT), ("accept-encoding", "identity"), *request.headers]
    if request.body is not None and request.body.length is not None:
        headers.append(("content-length", str(request.body.length)))
    if request.secret is not None:
        headers.append(("authorization", f"Bearer {request.secret.expose()}"))
    return headers


def unreachable(url: str, error: BaseException, *, was_sent: bool) -> errors.Unreachable:
    """Without the library's own words where they are empty, and never with a query: a link's credential may be in one."""
    parts = urlsplit(url)
    why = errors.clean(str(error)) or type(error).__name__
    return errors.Unreachable(f"no answer from {parts.scheme}://{parts.netloc}{parts.path}: {why}", was_sent=was_sent)


def endless(url: str, max_bytes: int) -> errors.TooLong:
    return errors.TooLong(f"{url} answered with more than {max_bytes} bytes")


def refused_upgrade(url: str, response: Any) -> errors.CoboxError:
    """Why a WebSocket was not opened."""
    headers = {name.lower(): value for name, value in response.headers.raw_items()}
    return errors.from_answer(response.status_code, headers, bytes(response.body or b"")[:MAX_ERROR_BYTES], url)


def answer_of(status: int, headers: Any, body: bytes) -> Answer:
    return Answer(status, {name.lower(): value for name, value in headers.items()}, body)
