"""`podman run` with the smallest possible image: the host's own /bin/true and the libraries it loads."""

import contextlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import tarfile

IMAGE = "localhost/true:1"
RUN_SECONDS = 120
# Files that podman and its runtime create outside the configured directories: as root, and as other users.
ELSEWHERE = ["/var/lib/containers/cache/blob-info-cache-v1.boltdb", "/run/runc", "/run/crun"]
ELSEWHERE_ROOTLESS = [f"/tmp/podman-run-{os.getuid()}", f"/tmp/containers-user-{os.getuid()}"]

# Locks and events stay in the temporary directory. The limits can be set by a root user without CAP_SYS_RESOURCE.
CONF = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
lock_type = "file"
events_logger = "none"
"""


class Podman:
    """podman with its own storage, state and settings in one directory. Use it with `with`; `why_not` is the reason if it is
    unavailable."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.why_not, self.version, self.command = None, None, None
        program = shutil.which("podman")
        if not program:
            self.why_not = "podman is not installed"
            return
        elsewhere = ELSEWHERE if os.getuid() == 0 else ELSEWHERE_ROOTLESS
        self.not_there_before = [path for path in map(pathlib.Path, elsewhere) if not path.exists()]
        self.version = version(program)
        self.directory.mkdir()
        (self.directory / "runtime").mkdir(mode=0o700)
        (self.directory / "containers.conf").write_text(CONF)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("XDG_")}
        self.env |= {"CONTAINERS_CONF": str(self.directory / "containers.conf"), "XDG_RUNTIME_DIR": str(self.directory / "runtime"),
                     "TMPDIR": str(self.directory), "HOME": str(self.directory)}
        image = self.directory / "true.tar"
        write_image(image)
        self.base = [program, "--root", self.directory / "root", "--runroot", self.directory / "run", "--tmpdir", self.directory / "tmp"]
        # First with default options; then without systemd and with the runtime that supports every cgroup layout.
        for options in ([], ["--cgroup-manager=cgroupfs"], ["--cgroup-manager=cgroupfs", "--runtime=runc"]):
            self.command = [*self.base, *options, "run", "--rm", "--network=none", IMAGE, "/bin/true"]
            self.options = " ".join([*options, "--network=none"])
            tried = self._try([*self.base, *options, "import", image, IMAGE]) or self._try(self.command)
            if tried is None:
                return
        self.why_not = f"`podman run` does not work on this machine: {tried}"

    def _try(self, command):
        """Runs a command; returns the error, or None if it succeeded."""
        try:
            done = subprocess.run(command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return f"still running after {RUN_SECONDS} s"
        return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.version is None:
            return
        self._try([*self.base, "rmi", "--all", "--force"])
        # The storage's own mount, which keeps the directory busy.
        for mount in [line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()][::-1]:
            if mount.startswith(f"{self.directory}/"):
                subprocess.run(["umount", mount], check=False)
        for path in self.not_there_before:
            if path.is_file():
                path.unlink()
            elif os.getuid() != 0:
                shutil.rmtree(path, ignore_errors=True)
            for folder in (path, path.parent, path.parent.parent):
                # A directory that is not empty is in use or existed before; a missing one was never created.
                with contextlib.suppress(OSError):
                    folder.rmdir()


def version(program):
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]


def write_image(path):
    """A tar archive with /bin/true and the libraries it needs."""
    listed = subprocess.run(["ldd", "/bin/true"], capture_output=True, text=True, check=False).stdout
    files = ["/bin/true", *re.findall(r"(/\S+) \(0x", listed)]
    with tarfile.open(path, "w") as tar:
        for file in files:
            data = pathlib.Path(file).read_bytes()
            entry = tarfile.TarInfo(file.lstrip("/"))
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
