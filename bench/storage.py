"""Where the peers keep their files: a filesystem of the kind the sandboxes have, so that file servers are compared and not disks."""

import contextlib
import pathlib
import subprocess


class Storage:
    """A copy of the broker's empty disk image, mounted, where its sandboxes have such; else a plain directory. Use it with `with`."""

    def __init__(self, place, broker):
        self.place, self.device = pathlib.Path(place), None
        self.place.mkdir(parents=True)
        template = next(iter((broker.data_dir / "base").glob("disk-*.img")), None)
        self.words = "in a directory beside the sandbox's, on the same filesystem"
        if not template:
            return
        image = self.place.with_suffix(".img")
        subprocess.run(["cp", "--sparse=always", template, image], check=True)
        # As the broker attaches its own: past the page cache of the filesystem below.
        found = subprocess.run(["losetup", "--find", "--show", "--direct-io=on", image], check=True, capture_output=True, text=True)
        self.device = found.stdout.strip()
        subprocess.run(["mount", "-t", "ext4", self.device, self.place], check=True)
        self.words = "on an ext4 image of their own, a copy of the one each sandbox gets"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.device:
            with contextlib.suppress(subprocess.CalledProcessError):
                subprocess.run(["umount", self.place], check=True)
            subprocess.run(["losetup", "-d", self.device], check=False)
