"""The most memory a process had, read while it runs: what the system tells afterwards counts the program that started it too."""

import contextlib
import pathlib
import subprocess

POLL_SECONDS = 0.02


def most_memory(pid):
    """In KiB, up to now; 0 of one that is gone."""
    with contextlib.suppress(OSError, ProcessLookupError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def watched(process):
    """Waits for a process, and says the most memory that it, or one that it started, had."""
    most = 0
    while True:
        try:
            process.wait(POLL_SECONDS)
            return most
        except subprocess.TimeoutExpired:
            children = ""
            with contextlib.suppress(OSError, ProcessLookupError):
                children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            most = max(most, *(most_memory(pid) for pid in [process.pid, *children.split()]))
