//! The ballast file: it takes disk space beside the database, and is removed when the disk is full. The broker can then still record
//! that sandboxes are suspended or deleted, which is what makes room.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

const FILE: &str = "ballast";
/// Extension of the file's name until its space is allocated.
const UNFINISHED_EXTENSION: &str = "new";
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

    /// Sets space aside unless that was done before, or less than the reserve is free. `reserve` is what sandboxes leave free.
    pub fn set_aside(&self, reserve: u64) -> io::Result<()> {
        let bytes = (reserve / RESERVE_DIVISOR).min(MAX_BYTES);
        if bytes == 0 || self.path.exists() || available(self.dir())? < bytes.saturating_mul(RESERVE_DIVISOR) {
            return Ok(());
        }
        // Renamed when it has its space, so that an error or a crash leaves no file that takes none.
        let unfinished = self.path.with_extension(UNFINISHED_EXTENSION);
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        // Blocks are allocated without being written. An empty file stays where the filesystem can't do that.
        match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => fs::rename(&unfinished, &self.path),
            Err(error) => {
                fs::remove_file(&unfinished)?;
                Err(error.into())
            }
        }
    }

    /// Whether the file exists and the disk is full.
    pub fn is_needed(&self) -> io::Result<bool> {
        match fs::metadata(&self.path) {
            Ok(metadata) => Ok(available(self.dir())? < metadata.len() / FULL_DIVISOR),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    pub fn release(&self) -> io::Result<()> {
        fs::remove_file(&self.path)
    }

    /// Removes the file if the disk is full.
    pub fn release_if_full(&self) -> io::Result<()> {
        if self.is_needed()? { self.release() } else { Ok(()) }
    }

    fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }
}

fn available(dir: &Path) -> io::Result<u64> {
    let disk = statvfs(dir)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESERVE: u64 = 4 << 20;

    #[test]
    fn an_interrupted_attempt_to_set_space_aside_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let ballast = Ballast::new(dir.path());
        fs::write(dir.path().join("ballast.new"), "").unwrap();
        ballast.set_aside(RESERVE).unwrap();
        assert_eq!(fs::metadata(dir.path().join(FILE)).unwrap().len(), RESERVE / RESERVE_DIVISOR);
        assert!(!dir.path().join("ballast.new").exists());
    }

    #[test]
    fn a_failed_attempt_to_set_space_aside_leaves_no_file_and_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let ballast = Ballast::new(dir.path());
        fs::create_dir(dir.path().join("ballast.new")).unwrap();
        ballast.set_aside(RESERVE).unwrap_err();
        assert!(!dir.path().join(FILE).exists());
        fs::remove_dir(dir.path().join("ballast.new")).unwrap();
        ballast.set_aside(RESERVE).unwrap();
        assert!(dir.path().join(FILE).exists());
    }

    #[test]
    fn no_space_is_set_aside_while_less_than_the_reserve_is_free() {
        let disk = cobox_testkit::SmallDisk::mount();
        let ballast = Ballast::new(&disk.path());
        ballast.set_aside(u64::MAX).unwrap();
        assert!(!disk.path().join(FILE).exists() && !ballast.is_needed().unwrap());
        ballast.set_aside(RESERVE).unwrap();
        assert!(!ballast.is_needed().unwrap());
        disk.fill();
        assert!(ballast.is_needed().unwrap());
        ballast.release_if_full().unwrap();
        assert!(!disk.path().join(FILE).exists());
    }
}
