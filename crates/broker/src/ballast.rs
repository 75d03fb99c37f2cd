//! Disk space that is set aside for the broker: a file beside the database, removed when the disk is full. The broker can then still record
//! that sandboxes are suspended or deleted, which is what makes room.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

const FILE: &str = "ballast";
/// Maximum size in bytes: thousands of suspensions and a start of the broker.
const MAX_BYTES: u64 = 32 << 20;
/// The file takes at most this fraction of the space that sandboxes leave free.
const RESERVE_DIVISOR: u64 = 4;
/// The file is removed when less than this fraction of its size is free.
const FULL_DIVISOR: u64 = 2;

pub struct Ballast {
    path: PathBuf,
}

impl Ballast {
    pub fn new(data_dir: &Path) -> Self {
        Self { path: data_dir.join(FILE) }
    }

    /// Sets space aside unless that was done before. `reserve` is what sandboxes leave free.
    pub fn set_aside(&self, reserve: u64) -> io::Result<()> {
        let bytes = (reserve / RESERVE_DIVISOR).min(MAX_BYTES);
        if bytes == 0 || self.path.exists() {
            return Ok(());
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path)?;
        // Blocks are allocated without being written. An empty file stays where the filesystem can't do that.
        match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            done => Ok(done?),
        }
    }

    /// Removes the file if the disk is full. Returns whether that made room.
    pub fn release_if_full(&self) -> io::Result<bool> {
        let size = match fs::metadata(&self.path) {
            Ok(metadata) => metadata.len(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        };
        let disk = statvfs(&self.path)?;
        if disk.f_bavail.saturating_mul(disk.f_frsize) >= size / FULL_DIVISOR {
            return Ok(false);
        }
        fs::remove_file(&self.path)?;
        Ok(true)
    }
}
