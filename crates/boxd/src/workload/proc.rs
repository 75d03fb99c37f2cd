//! Init's view of workload processes, through a mount of /proc that only init has. The mount that workloads see also
//! hides from init the processes that it may not trace: a standby process that has not executed its program, and a
//! program whose file is unreadable.

use std::{fs::File, io::Read, os::fd::OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, readlinkat, statat};

/// Maximum bytes read from a file. Status lines and summaries are far shorter, as bounded by the kernel.
const MAX_READ_BYTES: u64 = 64 * 1024;

pub struct Proc(OwnedFd);

impl Proc {
    pub fn new(mount: OwnedFd) -> Self {
        Self(mount)
    }

    /// Pids of all processes in the namespace.
    pub fn pids(&self) -> Vec<i32> {
        self.numbers(".")
    }

    /// The entries of a directory that are numbers.
    pub fn numbers(&self, directory: &str) -> Vec<i32> {
        let entries = self.directory(directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok()).collect()
    }

    /// A file's text; `None` if the process is gone or the file is unreadable.
    pub fn read(&self, path: &str) -> Option<String> {
        let file = openat(&self.0, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let mut text = Vec::with_capacity(512);
        File::from(file).take(MAX_READ_BYTES).read_to_end(&mut text).ok()?;
        // A process may have set any bytes as its name.
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    /// Calls `tell` with the inode and size in bytes of each unnamed memory file that a process (given by one of its
    /// threads) has open. Returns the number of the process's descriptors.
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
