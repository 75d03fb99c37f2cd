//! Init's view of workload processes, through a mount of /proc that only init has. The mount that workloads see also
//! hides from init the processes that it may not trace: a standby process that has not executed its program, and a
//! program whose file is unreadable.

use std::{fs::File, io::Read, os::fd::OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, openat, readlinkat, statat};

/// Maximum bytes read from a file. Status lines and summaries are far shorter, as bounded by the kernel.
const MAX_READ_BYTES: u64 = 64 * 1024;

pub struct ProcFs(OwnedFd);

impl ProcFs {
    pub fn new(mount: OwnedFd) -> Self {
        Self(mount)
    }

    /// Pids of all processes in the namespace.
    pub fn pids(&self) -> Vec<i32> {
        self.numeric_entries(".")
    }

    /// The entries of a directory that are numbers.
    pub fn numeric_entries(&self, directory: &str) -> Vec<i32> {
        let entries = self.open_directory(directory).into_iter().flatten().flatten();
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

    /// Calls `visit` with the inode and size in bytes of each unnamed memory file that a process (given by one of its
    /// threads) has open. Returns the number of the process's descriptors.
    pub fn memory_files(&self, thread: i32, mut visit: impl FnMut(u64, u64)) -> usize {
        let open = self.numeric_entries(&format!("{thread}/fd"));
        for fd in &open {
            let path = format!("{thread}/fd/{fd}");
            let is_memory_file = readlinkat(&self.0, &path, Vec::new()).is_ok_and(|to| to.to_bytes().starts_with(b"/memfd:"));
            if is_memory_file && let Ok(file) = statat(&self.0, &path, AtFlags::empty()) {
                visit(file.st_ino, file.st_blocks as u64 * 512);
            }
        }
        open.len()
    }

    fn open_directory(&self, path: &str) -> Option<Dir> {
        let directory = openat(&self.0, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        Dir::new(directory).ok()
    }
}
