"""Network settings shared by blocking and async I/O: limits, TLS, headers, and log redaction."""

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
from .effects import Request, Response
from .version import __version__

# Seconds to establish a connection.
CONNECT_TIMEOUT = 10.0
# Seconds to wait for the server to accept the next part of an upload.
WRITE_TIMEOUT = 60.0
# Seconds to wait for a free connection of the pool.
POOL_TIMEOUT = 60.0
# Maximum pooled connections: agents run tools in parallel, and each waits for its response.
MAX_CONNECTIONS = 100
# Maximum size of a WebSocket frame in either direction.
MAX_FRAME_BYTES = 1024 * 1024
# Maximum size of an error response.
MAX_ERROR_BYTES = 1024 * 1024
USER_AGENT = f"cobox-python/{__version__}"


class _NoDebug(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG


# At DEBUG the websockets library logs headers and frames, which contain the token.
websocket_log = logging.getLogger("cobox.socket")
websocket_log.setLevel(logging.INFO)
websocket_log.addFilter(_NoDebug())


@dataclass(frozen=True)
class Network:
    """Settings for connections."""

    ca_file: str | None = None

    def tls(self) -> ssl.SSLContext:
        """The TLS context shared by all connections: loading certificates is slow and would block an event loop."""
        return self._tls

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file or os.environ.get("COBOX_CA_FILE") or None)

    @property
    def has_tls(self) -> bool:
        return "_tls" in self.__dict__


def is_local(url: str) -> bool:
    """Whether the URL is on this machine, where proxies are not used."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def timeouts(request: Request) -> httpx.Timeout:
    read_timeout = request.timeout if request.read_timeout is None else request.read_timeout
    # No phase may exceed the total timeout.
    connect, write, pool = (min(limit, request.timeout) for limit in (CONNECT_TIMEOUT, WRITE_TIMEOUT, POOL_TIMEOUT))
    return httpx.Timeout(read_timeout, connect=connect, write=write, pool=pool)


def request_headers(request: Request) -> list[tuple[str, str]]:
    """The headers of a request. The credential is stored in no other object."""
    headers = [("user-agent", USER_AGENT), ("accept-encoding", "identity"), *request.headers]
    if request.body is not None and request.body.length is not None:
        headers.append(("content-length", str(request.body.length)))
    if request.secret is not None:
        headers.append(("authorization", f"Bearer {request.secret.expose()}"))
    return headers


def unreachable(url: str, error: BaseException, *, was_sent: bool) -> errors.Unreachable:
    """The error for a missing response. Leaves out the query, which may contain a file link's credential."""
    parts = urlsplit(url)
    why = errors.clean(str(error)) or type(error).__name__
    return errors.Unreachable(f"no response from {parts.scheme}://{parts.netloc}{parts.path}: {why}", was_sent=was_sent)


def too_long(url: str, max_bytes: int) -> errors.TooLong:
    return errors.TooLong(f"{url} sent a response of more than {max_bytes} bytes")


def upgrade_refused(url: str, response: Any) -> errors.CoboxError:
    """The error for a refused WebSocket handshake."""
    headers = {name.lower(): value for name, value in response.headers.raw_items()}
    return errors.from_answer(response.status_code, headers, bytes(response.body or b"")[:MAX_ERROR_BYTES], url)


def to_response(status: int, headers: Any, body: bytes) -> Response:
    return Response(status, {name.lower(): value for name, value in headers.items()}, body)
