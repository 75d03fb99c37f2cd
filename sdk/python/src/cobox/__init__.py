"""One sandbox, shared: the Python client of Cobox.

    from cobox import Cobox

    with Cobox().session(thread_id="demo") as box:
        print(box.exec("pytest -q").stdout)

`Cobox()` finds the broker by COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE), else by what a running `cobox up` left behind.
`AsyncCobox` is the same with `async with` and `await`. Public is what is named here:

- `Cobox`, `AsyncCobox`: `session(thread_id=…)`, `sessions()`, `sandboxes()`, `get_sandbox`, `create_sandbox`, `update_sandbox`,
  `delete_sandbox`, `create_key`, `key_page`, `revoke_key`; `negotiate(…)` gives a bare `Grant`.
- `Session`, `AsyncSession` (also `.from_token(http_base_url, token)`, for a token that somebody else negotiated):
  - `exec`, `stream` (survives lost connections), `processes`, `signal`, `kill`
  - `files`: `read read_text get head write delete open upload download archive unpack`
  - `fs`: `list stat glob grep edit mkdir move copy remove`
  - `shells`: `attach observe run list get create hang_up`
  - `watch` (changes of files), `events` (of the session)
  - `delegate share shares unshare file_link`, `heartbeat refresh release close`, `id sandbox_id thread_id token capabilities`
- `ExecStream`, `Shell`, `Reader`, `Events`, `Watch` and their `Async…` twins; what they give: `Output`, `ShellOutput`, `Screen`,
  `Resized`, `ControlChanged`, `Refused`, `SandboxEvent`, `FileChange`.
- `cobox.errors`: a class for each code, all of them `CoboxError`. `cobox.answers`: what calls give back. `Secret`: keys and tokens.
- `cobox.deepagents.CoboxBackend`, `cobox.backend_protocol.CoboxFiles`: backends for agents.

Leaving a session ends nothing: the human goes on working in it. `release=True` or `.release()` ends it for everybody.

Threads: `Cobox`, `Session` and what hangs on them may be used from many threads at once, their twins from many tasks. A stream, shell,
reader or feed has one reader at a time; another thread or task may write to it meanwhile.

How it is made: everything that decides is a *flow*, a generator that yields what it wants done (`flow.py`); `blocking.py` and
`awaiting.py` do it. So retries, refreshing and resuming exist once, and neither client is a copy or a thread behind the other.
"""

from __future__ import annotations

from . import answers, errors
from .answers import ExecResult, Exit, FileChange, FileEntry, SandboxEvent
from .client import AsyncCobox, Cobox
from .errors import CoboxError
from .exec_stream import AsyncExecStream, ExecStream, Output
from .feed import AsyncEvents, AsyncWatch, Events, Watch
from .files import AsyncReader, Reader
from .grant import Grant
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
    "answers",
    "errors",
]
