"""Peak memory of a process, sampled while it runs: the kernel's value after its end includes the program that started it."""

import contextlib
import pathlib
import subprocess

POLL_SECONDS = 0.02


def most_memory(pid):
    """The peak in KiB so far; 0 if the process is gone."""
    with contextlib.suppress(OSError, ProcessLookupError):
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def watched(process):
    """Waits for a process; returns the peak memory of it or one of its children."""
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
