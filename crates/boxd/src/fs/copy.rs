//! Copies files and trees by descriptors in bounded memory. A link is copied as a link; fifos, sockets and devices are
//! skipped.

use std::os::fd::{AsFd, OwnedFd};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps},
    io::Errno,
};

use super::stop_signal::StopSignal;
use crate::files::{is_temp_file_name, kind, refuse_kernel_files, write_all};

/// Maximum depth of directories. Each level holds two descriptors.
const MAX_DEPTH: usize = 100;
/// Maximum entries of one copy: a few times a large monorepo with its dependencies.
const MAX_ENTRIES: u64 = 1_000_000;
/// Bytes per system call, so that a cancelled copy ends soon.
const STEP_BYTES: usize = 8 * 1024 * 1024;
/// For copies that the kernel can't do by itself.
const BUFFER_BYTES: usize = 256 * 1024;

#[derive(Default)]
pub struct CopyStats {
    pub entries: u64,
    pub bytes: u64,
    pub skipped: u64,
}

/// Reasons to abort a copy, checked while it runs.
pub struct AbortCheck<'a> {
    pub stop: &'a StopSignal,
    pub is_full: &'a dyn Fn() -> bool,
}

impl AbortCheck<'_> {
    fn check(&self) -> Result<(), Errno> {
        if self.stop.is_stopped() {
            return Err(Errno::INTR);
        }
        if (self.is_full)() { Err(Errno::NOSPC) } else { Ok(()) }
    }
}

/// Copies a file's content, mode and modification time.
pub fn copy_file(from: &OwnedFd, to: &OwnedFd, stat: &Stat, abort_check: &AbortCheck<'_>) -> Result<u64, Errno> {
    let mut total = 0u64;
    let mut buffer = Vec::new();
    loop {
        abort_check.check()?;
        let n = if buffer.is_empty() {
            match rustix::fs::copy_file_range(from, None, to, None, STEP_BYTES) {
                // The file systems are of different kinds, or one doesn't support this call.
                Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    buffer.resize(BUFFER_BYTES, 0);
                    continue;
                }
                other => other?,
            }
        } else {
            let n = rustix::io::retry_on_intr(|| rustix::io::read(from, buffer.as_mut_slice()))?;
            write_all(to, &buffer[..n])?;
            n
        };
        if n == 0 {
            break;
        }
        total += n as u64;
    }
    rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode & 0o777))?;
    set_times(to, stat)?;
    Ok(total)
}

fn set_times(to: impl AsFd, stat: &Stat) -> Result<(), Errno> {
    #[allow(clippy::unnecessary_cast, reason = "the fields are narrower on some machines")]
    let at = Timespec { tv_sec: stat.st_mtime as i64, tv_nsec: stat.st_mtime_nsec as _ };
    rustix::fs::futimens(to, &Timestamps { last_access: at, last_modification: at })
}

struct Level {
    entries: Dir,
    to: OwnedFd,
    stat: Stat,
}

/// Copies the content of a directory into an empty one.
pub fn copy_tree(from: OwnedFd, to: OwnedFd, abort_check: &AbortCheck<'_>) -> Result<CopyStats, Errno> {
    let mut stats = CopyStats { entries: 1, ..CopyStats::default() };
    let stat = rustix::fs::fstat(&from)?;
    let mut levels = vec![Level { entries: Dir::new(from)?, to, stat }];
    while let Some(level) = levels.last_mut() {
        abort_check.check()?;
        let Some(entry) = level.entries.read() else {
            // Last, because creating an entry changes the directory's time, and its mode may forbid it.
            rustix::fs::fchmod(&level.to, Mode::from_raw_mode(level.stat.st_mode & 0o777))?;
            set_times(&level.to, &level.stat)?;
            levels.pop();
            continue;
        };
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") || is_temp_file_name(name) {
            continue;
        }
        stats.entries += 1;
        if stats.entries > MAX_ENTRIES {
            return Err(Errno::TOOBIG);
        }
        let is_at_max_depth = levels.len() >= MAX_DEPTH;
        let Some(level) = levels.last() else { break };
        match copy_entry(level, name, &mut stats, abort_check) {
            Ok(Some(_)) if is_at_max_depth => return Err(Errno::TOOBIG),
            Ok(Some(child)) => levels.push(child),
            Ok(None) => {}
            // Deleted since it was listed.
            Err(Errno::NOENT) => stats.entries -= 1,
            Err(e) => return Err(e),
        }
    }
    Ok(stats)
}

fn copy_entry(level: &Level, name: &[u8], stats: &mut CopyStats, abort_check: &AbortCheck<'_>) -> Result<Option<Level>, Errno> {
    let parent = level.entries.fd()?;
    let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let open = |flags| rustix::fs::openat(parent, name, flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    match kind(&stat) {
        FileType::Directory => {
            let from = open(OFlags::DIRECTORY)?;
            if refuse_kernel_files(&from).is_err() {
                stats.skipped += 1;
                stats.entries -= 1;
                return Ok(None);
            }
            rustix::fs::mkdirat(&level.to, name, Mode::RWXU)?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let to = rustix::fs::openat(&level.to, name, flags, Mode::empty())?;
            Ok(Some(Level { entries: Dir::new(from)?, to, stat }))
        }
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(parent, name, Vec::new())?;
            rustix::fs::symlinkat(&target, &level.to, name)?;
            Ok(None)
        }
        FileType::RegularFile => {
            let from = open(OFlags::NONBLOCK | OFlags::NOCTTY)?;
            let stat = rustix::fs::fstat(&from)?;
            // It may have been replaced by something else.
            if kind(&stat) == FileType::RegularFile && refuse_kernel_files(&from).is_ok() {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let to = rustix::fs::openat(&level.to, name, flags, Mode::RUSR | Mode::WUSR)?;
                stats.bytes += copy_file(&from, &to, &stat, abort_check)?;
            }
            Ok(None)
        }
        _ => {
            stats.skipped += 1;
            stats.entries -= 1;
            Ok(None)
        }
    }
}
