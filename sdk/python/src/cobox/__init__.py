"""Python client for Cobox: one sandbox, shared by a human and an agent.

from cobox import Cobox

with Cobox().session(thread_id="demo") as box:
    print(box.exec("pytest -q").stdout)

`Cobox()` finds the broker through COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE), otherwise through the state file of a
running `cobox up`. `AsyncCobox` has the same methods for asyncio, used with `async with` and `await`. The public API:

- `Cobox`, `AsyncCobox`: `session(thread_id=…)`, `sessions()`, `sandboxes()`, `get_sandbox`, `create_sandbox`, `update_sandbox`,
  `delete_sandbox`, `create_key`, `key_page`, `revoke_key`; `negotiate(…)` returns a bare `Grant`.
- `Session`, `AsyncSession` (also `.from_token(http_base_url, token)`, for a token that was negotiated elsewhere):
  - `exec`, `stream` (survives lost connections), `processes`, `signal`, `kill`
  - `files`: `read read_text get head write delete open upload download archive unpack`
  - `fs`: `list stat glob grep edit mkdir move copy remove`
  - `shells`: `attach observe run list get create hang_up`
  - `watch` (file changes), `events` (of the session)
  - `delegate share shares unshare file_link`, `heartbeat refresh release close`, `id sandbox_id thread_id token capabilities`
- `ExecStream`, `Shell`, `Reader`, `Events`, `Watch` and their `Async…` counterparts; they yield `Output`, `ShellOutput`, `Screen`,
  `Resized`, `ControlChanged`, `Refused`, `SandboxEvent`, `FileChange`.
- `cobox.errors`: one class per error code, all derived from `CoboxError`. `cobox.responses`: return values. `Secret`: keys and tokens.
- `cobox.deepagents.CoboxBackend`, `cobox.backend_protocol.CoboxFiles`: backends for agents.

Closing a session does not end it: the human keeps working in it. `release=True` or `.release()` ends it for all participants.

Thread safety: `Cobox`, `Session` and the objects reached through them may be used from many threads at once, their async
counterparts from many tasks. A stream, shell, reader or event stream has one reader at a time; another thread or task may write
to it concurrently.

Design: all decisions are made in *flows*, generators that yield the effects they need (`effects.py`); `blocking_io.py` and
`async_io.py` execute those effects. Retries, token renewal and resuming are therefore written once, and neither client wraps the
other.
"""

from __future__ import annotations

from . import errors, responses
from .client import AsyncCobox, Cobox
from .errors import CoboxError
from .event_stream import AsyncEvents, AsyncWatch, Events, Watch
from .exec_stream import AsyncExecStream, ExecStream, Output
from .files import AsyncReader, Reader
from .grant import Grant
from .responses import ExecResult, Exit, FileChange, FileEntry, SandboxEvent
from .secret import Secret
from .session import AsyncSession, Session
from .shell import AsyncShell, ControlChanged, Refused, Resized, Screen, Shell, ShellOutput
from .version import __version__

__all__ = [
    "AsyncCobox",
    "AsyncEvents",
    "AsyncExecStream",
    "AsyncReader",
    "AsyncSession",
    "AsyncShell",
    "AsyncWatch",
    "Cobox",
    "CoboxError",
    "ControlChanged",
    "Events",
    "ExecResult",
    "ExecStream",
    "Exit",
    "FileChange",
    "FileEntry",
    "Grant",
    "Output",
    "Reader",
    "Refused",
    "Resized",
    "SandboxEvent",
    "Screen",
    "Secret",
    "Session",
    "Shell",
    "ShellOutput",
    "Watch",
    "__version__",
    "errors",
    "responses",
]
