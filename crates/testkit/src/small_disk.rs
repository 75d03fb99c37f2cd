//! A small ext4 file system that a test can fill or make read-only. Requires root, because it is mounted from a loop device.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// Size in bytes: enough for a broker's database and little more.
const SIZE: u64 = 24 << 20;
const FILLER: &str = "filler";

pub struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    pub fn mount() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (image, at) = (dir.path().join("image"), dir.path().join("mounted"));
        fs::File::create(&image).and_then(|file| file.set_len(SIZE)).expect("an image");
        fs::create_dir(&at).expect("a mount point");
        run(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image));
        run(Command::new("mount").args(["-o", "loop,errors=remount-ro"]).args([&image, &at]));
        Self { dir }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    /// Fills the file system to the last byte.
    pub fn fill(&self) {
        let mut filler = fs::File::create(self.path().join(FILLER)).expect("a file");
        for size in [1 << 16, 1 << 12, 1] {
            while filler.write_all(&vec![0; size]).is_ok() {}
        }
    }

    pub fn free_space(&self) {
        fs::remove_file(self.path().join(FILLER)).expect("the filler file exists");
    }

    /// Makes the file system read-only, as the kernel does when it finds an error in it.
    pub fn turn_read_only(&self) {
        let mounts = fs::read_to_string("/proc/mounts").expect("a list of mounts");
        let at = self.path();
        let device = mounts.lines().filter_map(|line| line.split_once(' ')).find(|(_, rest)| rest.starts_with(&*at.to_string_lossy()));
        let device = device.and_then(|(device, _)| Path::new(device).file_name()).expect("the image is mounted");
        let trigger = Path::new("/sys/fs/ext4").join(device).join("trigger_fs_error");
        fs::write(trigger, "a test").expect("the kernel accepts a simulated error");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily, because files that the test left open are closed only when its process ends.
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

fn run(command: &mut Command) {
    let done = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}
