"""Storage for the peers' files: the same kind of file system as the sandboxes have, so that servers and not disks are compared."""

import contextlib
import pathlib
import subprocess


class Storage:
    """A mounted copy of the broker's empty disk image if its sandboxes have one, otherwise a plain directory. Use it with `with`."""

    def __init__(self, directory, broker):
        self.directory, self.device = pathlib.Path(directory), None
        self.directory.mkdir(parents=True)
        template = next(iter((broker.data_dir / "base").glob("disk-*.img")), None)
        self.words = "in a directory beside the sandbox's, on the same filesystem"
        if not template:
            return
        image = self.directory.with_suffix(".img")
        subprocess.run(["cp", "--sparse=always", template, image], check=True)
        # Direct I/O, as the broker attaches its images: bypasses the page cache of the file system below.
        found = subprocess.run(["losetup", "--find", "--show", "--direct-io=on", image], check=True, capture_output=True, text=True)
        self.device = found.stdout.strip()
        subprocess.run(["mount", "-t", "ext4", self.device, self.directory], check=True)
        self.words = "on an ext4 image of their own, a copy of the one each sandbox gets"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.device:
            with contextlib.suppress(subprocess.CalledProcessError):
                subprocess.run(["umount", self.directory], check=True)
            subprocess.run(["losetup", "-d", self.device], check=False)
