"""Multipart bodies for batch uploads and downloads; parts are delimited by their content length."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from urllib.parse import quote, unquote_to_bytes

from . import errors
from .responses import Downloaded

# Maximum size of a part's header: a percent-encoded path of 4 KiB and a few lines.
MAX_HEAD_BYTES = 32 * 1024


def encode(files: Sequence[tuple[bytes, bytes]]) -> tuple[str, list[bytes]]:
    """Returns the content type and the chunks of a body with these (path, content) pairs."""
    boundary = f"cobox-{os.urandom(16).hex()}"
    pieces = []
    for path, content in files:
        head = f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="file"\r\nx-file-path: {quote(path)}\r\n\r\n'
        pieces += [head.encode(), content, b"\r\n"]
    pieces.append(f"--{boundary}--\r\n".encode())
    return f"multipart/form-data; boundary={boundary}", pieces


def decode(content_type: str, body: bytes) -> list[Downloaded]:
    """Returns the files of a `multipart/mixed` response, in its order."""
    return list(_parts(content_type, body))


def _parts(content_type: str, body: bytes) -> Iterable[Downloaded]:
    boundary = next((p.split("=", 1)[1].strip('"') for p in content_type.split("; ") if p.startswith("boundary=")), None)
    if not content_type.startswith("multipart/mixed") or not boundary:
        raise errors.NotCobox("the sandbox's response to a download is not multipart")
    opening, ending = f"--{boundary}\r\n".encode(), f"--{boundary}--".encode()
    at = 0
    while not body.startswith(ending, at):
        end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        if not body.startswith(opening, at) or end < 0:
            raise errors.NotCobox("the sandbox's download is truncated")
        lines = body[at + len(opening) : end].decode("latin-1").split("\r\n")
        head = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = head.get("content-length", "")
        at = end + 4 + (int(length) if length.isdigit() and len(length) < 16 else len(body))
        if at + 2 > len(body):
            raise errors.NotCobox("the sandbox's download is truncated")
        content = body[end + 4 : at]
        at += 2
        path = unquote_to_bytes(head.get("x-file-path", "")).decode("utf-8", "surrogateescape")
        if "x-file-error" in head:
            yield Downloaded(path, failure=_failure(content, head["x-file-error"]))
        else:
            yield Downloaded(path, content, head.get("etag"))


def _failure(content: bytes, code: str) -> errors.ApiError:
    try:
        error = errors.from_envelope(json.loads(content), status=None)
    except (ValueError, RecursionError):
        error = None
    return error or errors.ApiError("the file could not be read", code=errors.clean(code))
