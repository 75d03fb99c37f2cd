"""A program on a pseudo-terminal: types into it and waits for text on its screen."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from types import TracebackType

# Seconds to wait for a text.
PATIENCE_SECONDS = 30.0


class Terminal:
    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env | {"TERM": "xterm"}, start_new_session=True)
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"{text!r} did not appear; shown was:\n{self.shown}")
            try:
                self.shown += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the terminal ended before {text!r} appeared; shown was:\n{self.shown}") from None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)
