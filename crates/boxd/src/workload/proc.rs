//! What init sees of the workloads' processes: through a mount of /proc that only init has, because the one they see hides from init
//! too whom it may not trace: a program that is not yet one, and one that was run without being readable.

use std::{fs::File, io::Read, os::fd::OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, readlinkat, statat};

/// Most of a file that is read: a status line or a summary, whose lengths the kernel bounds far below this.
const MAX_READ_BYTES: u64 = 64 * 1024;

pub struct Proc(OwnedFd);

impl Proc {
    pub fn new(mount: OwnedFd) -> Self {
        Self(mount)
    }

    /// Every process of the namespace.
    pub fn pids(&self) -> Vec<i32> {
        self.numbers(".")
    }

    /// The entries of a directory that are numbers.
    pub fn numbers(&self, directory: &str) -> Vec<i32> {
        let entries = self.directory(directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok()).collect()
    }

    /// A file's text; `None` for a process that is gone or doesn't let it be read.
    pub fn read(&self, path: &str) -> Option<String> {
        let file = openat(&self.0, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let mut text = Vec::with_capacity(512);
        File::from(file).take(MAX_READ_BYTES).read_to_end(&mut text).ok()?;
        // A process may have given itself any name.
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    /// Tells of each file without a name that a process, named by one of its threads, holds open in memory: its number and its bytes.
    /// Says how many descriptors it has.
    pub fn memory_files(&self, thread: i32, mut tell: impl FnMut(u64, u64)) -> usize {
        let open = self.numbers(&format!("{thread}/fd"));
        for number in &open {
            let path = format!("{thread}/fd/{number}");
            let is_memory = readlinkat(&self.0, &path, Vec::new()).is_ok_and(|to| to.to_bytes().starts_with(b"/memfd:"));
            if is_memory && let Ok(file) = statat(&self.0, &path, AtFlags::empty()) {
                tell(file.st_ino, file.st_blocks as u64 * 512);
            }
        }
        open.len()
    }

    fn directory(&self, path: &str) -> Option<Dir> {
        let directory = openat(&self.0, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        Dir::new(directory).ok()
    }
}
