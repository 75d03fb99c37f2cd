"""Return values of API calls: the protocol's responses as frozen dataclasses, with the protocol's field names."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from . import errors
from .secret import Secret

T = TypeVar("T")


def exact(text: str, b64: str | None) -> bytes:
    """The exact bytes of a text field, which may contain replacement characters."""
    if b64 is None:
        return text.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(b64, validate=True)
    except (binascii.Error, ValueError):
        raise errors.NotCobox("the sandbox sent invalid base64") from None


@dataclass(frozen=True)
class ExecResult:
    """The result of a finished command. `stdout` and `stderr` are text; the exact bytes are `stdout_bytes` and `stderr_bytes`."""

    stdout: str
    stderr: str
    # 128 plus the signal number if a signal ended the command.
    exit_code: int
    timed_out: bool
    truncated: bool
    duration_ms: int
    command_id: str
    signal: int | None = None
    stdout_b64: str | None = field(default=None, repr=False)
    stderr_b64: str | None = field(default=None, repr=False)

    @property
    def stdout_bytes(self) -> bytes:
        return exact(self.stdout, self.stdout_b64)

    @property
    def stderr_bytes(self) -> bytes:
        return exact(self.stderr, self.stderr_b64)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def check(self) -> ExecResult:
        """Returns itself if the command succeeded, otherwise raises `CommandFailed`."""
        if self.exit_code != 0:
            why = "the command timed out" if self.timed_out else f"the command ended with {self.exit_code}"
            last = errors.clean(self.stderr.strip()[-500:])
            raise errors.CommandFailed(f"{why}: {last}" if last else why, details={"exit_code": self.exit_code})
        return self


@dataclass(frozen=True)
class Exit:
    """The outcome of a streamed command or a shell."""

    exit_code: int
    signal: int | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class FileEntry:
    """An entry of the file system. A symlink is described itself, not its target."""

    name: str
    path: str
    # One of: file, directory, symlink, fifo, socket, device, unknown.
    type: str
    size: int
    # Permission bits in octal, such as `644`.
    mode: str
    mtime: datetime
    etag: str | None = None
    target: str | None = None
    name_b64: str | None = field(default=None, repr=False)
    path_b64: str | None = field(default=None, repr=False)
    target_b64: str | None = field(default=None, repr=False)

    @property
    def is_dir(self) -> bool:
        return self.type == "directory"

    @property
    def path_bytes(self) -> bytes:
        return exact(self.path, self.path_b64)

    @property
    def target_bytes(self) -> bytes:
        """The target of a symlink, exactly as stored in it."""
        return exact(self.target or "", self.target_b64)


@dataclass(frozen=True)
class Listing:
    path: str
    entries: list[FileEntry]
    next_cursor: str | None = None


@dataclass(frozen=True)
class GlobResult:
    matches: list[FileEntry]
    truncated: bool
    # One of: max_matches, max_bytes, timeout, depth.
    stopped_by: str | None = None
    directories_unreadable: int = 0


@dataclass(frozen=True)
class GrepLine:
    line_number: int
    text: str
    text_b64: str | None = field(default=None, repr=False)
    is_cut: bool = False


@dataclass(frozen=True)
class GrepMatch:
    path: str
    line_number: int
    text: str
    text_b64: str | None = field(default=None, repr=False)
    path_b64: str | None = field(default=None, repr=False)
    is_cut: bool = False
    before: list[GrepLine] = field(default_factory=list)
    after: list[GrepLine] = field(default_factory=list)


@dataclass(frozen=True)
class GrepFile:
    path: str
    count: int
    path_b64: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class GrepResult:
    """The result of a grep; one of `matches`, `files` and `counts` is filled, depending on the requested output."""

    truncated: bool
    files_searched: int
    bytes_searched: int
    files_binary: int
    files_unreadable: int
    stopped_by: str | None = None
    matches: list[GrepMatch] = field(default_factory=list)
    files: list[GrepFile] = field(default_factory=list)
    counts: list[GrepFile] = field(default_factory=list)
    directories_unreadable: int = 0


@dataclass(frozen=True)
class Edited:
    path: str
    size: int
    etag: str
    replacements: int


@dataclass(frozen=True)
class Changed:
    """The result of mkdir, move, copy and remove."""

    path: str
    changed: bool
    entries: int
    bytes: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class FileWritten:
    path: str
    size: int
    etag: str
    path_b64: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class FileHead:
    """A file's metadata."""

    path: str
    size: int
    etag: str
    mode: str | None = None
    modified: str | None = None


@dataclass(frozen=True)
class FileContent:
    head: FileHead
    data: bytes = field(repr=False)

    @property
    def text(self) -> str:
        return self.data.decode()


@dataclass(frozen=True)
class Uploaded:
    """One file of an upload; `error` is set if it was not written."""

    path: str
    size: int | None = None
    etag: str | None = None
    error: Mapping[str, Any] | None = None
    path_b64: str | None = field(default=None, repr=False)

    @property
    def failure(self) -> errors.ApiError | None:
        return None if self.error is None else errors.from_envelope({"error": self.error}, status=None)


@dataclass(frozen=True)
class UploadResult:
    files: list[Uploaded]


@dataclass(frozen=True)
class Downloaded:
    """One file of a download; `failure` is set if it could not be read."""

    path: str
    data: bytes | None = field(default=None, repr=False)
    etag: str | None = None
    failure: errors.ApiError | None = None


@dataclass(frozen=True)
class Unpacked:
    path: str
    entries: int
    bytes: int


@dataclass(frozen=True)
class Controller:
    principal: str
    actor: str


@dataclass(frozen=True)
class ShellInfo:
    id: str
    name: str
    cols: int
    rows: int
    offset: int
    viewers: int
    created_at: datetime
    command: str | None = None
    controller: Controller | None = None
    # None if the shell does not report it.
    at_prompt: bool | None = None


@dataclass(frozen=True)
class ShellRunResult:
    """The output of a shared terminal between the command and the next prompt."""

    output: str
    timed_out: bool
    truncated: bool
    duration_ms: int
    # Range in the shell's output, as byte offsets.
    start: int = field(metadata={"name": "from"})
    end: int = field(metadata={"name": "to"})
    exit_code: int | None = None
    output_b64: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ProcessInfo:
    id: str
    kind: str
    argv: list[str]
    started_at: datetime
    principal: str
    actor: str
    state: str
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class Heartbeat:
    lease_expires_at: datetime
    state: str


@dataclass(frozen=True)
class Scope:
    type: str
    id: str


@dataclass(frozen=True)
class SessionInfo:
    """A session in a list."""

    session_id: str
    thread_id: str
    scope: Scope
    sandbox_id: str
    provider: str
    state: str
    owner: str
    access: str
    created_at: datetime
    last_active_at: datetime
    lease_expires_at: datetime
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SandboxInfo:
    id: str
    provider: str
    state: str
    owner: str
    access: str
    created_at: datetime
    last_active_at: datetime
    lease_expires_at: datetime
    http_base_url: str
    ws_base_url: str
    keep: bool = False
    name: str | None = None
    reason: str | None = None
    sessions: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Page(Generic[T]):
    items: list[T]
    next_cursor: str | None = None


@dataclass(frozen=True)
class ShareInfo:
    id: str
    session_id: str
    principal: str
    capabilities: list[str]
    scopes: list[str]
    shared_by: str
    created_at: datetime
    expires_at: datetime | None = None
    is_limit: bool = True


@dataclass(frozen=True)
class KeyInfo:
    """Metadata of an API key, without the key itself."""

    id: str
    name: str
    kind: str
    workspace: str
    created_at: datetime
    prefix: str | None = None
    issuer: str | None = None
    subject: str | None = None
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None


@dataclass(frozen=True)
class CreatedKey:
    """A newly created API key; the only response that contains the key: `created.api_key.expose()`."""

    id: str
    name: str
    kind: str
    workspace: str
    created_at: datetime
    api_key: Secret
    prefix: str | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True)
class Delegated:
    """A delegated token with fewer capabilities: `delegated.token.expose()`."""

    token: Secret
    expires_at: datetime
    granted_capabilities: list[str]
    scopes: list[str]
    jti: str
    refresh_before: datetime | None = None


@dataclass(frozen=True)
class FileLink:
    """A URL for one file and one method. Anyone who has it can use it, so it is a secret: `link.url.expose()`."""

    url: Secret
    expires_at: datetime
    path: str
    method: str
    jti: str


@dataclass(frozen=True)
class SandboxEvent:
    """An event of a session or its sandbox. `data` holds the fields that are specific to its type."""

    id: str
    type: str
    at: datetime
    session_id: str
    sandbox_id: str
    # `broker`, or `sandbox` for events reported by the sandbox itself (untrusted).
    source: str
    principal: str | None = None
    actor: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_last(self) -> bool:
        return self.type in ("terminated", "failed")


@dataclass(frozen=True)
class FileChange:
    """A file change reported by `watch`. `change` is created, modified, removed, renamed or overflow; after an overflow changes
    may be missing, so list the directory again."""

    change: str
    # None for an overflow.
    path: str | None = None
    kind: str | None = None
    at: datetime | None = None
    # The principal that made the change through the API; None for a program in the sandbox.
    principal: str | None = None
    actor: str | None = None
    # Set for a rename.
    moved_from: str | None = None
    # Set for an overflow.
    reason: str | None = None
    # Resumes the watch: watch(after=…).
    cursor: str | None = field(default=None, repr=False)
    path_b64: str | None = field(default=None, repr=False)
