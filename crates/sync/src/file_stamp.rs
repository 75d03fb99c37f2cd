//! A file's metadata as a fingerprint: as long as it is unchanged, so is the content.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FileType, Stat};

use crate::codec::{Decoder, Encoder, Malformed};

/// Longer than one tick of the kernel's file clock: a write after a stamp that is at least this much younger than the
/// last change gets a different time.
const CLOCK_TICK: Duration = Duration::from_millis(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    mode: u32,
    modified: (i64, i64),
    changed: (i64, i64),
    /// Taken so soon after the last change that another change could leave the same times, so the content has to be
    /// read again.
    is_racy: bool,
}

impl Stamp {
    /// `seen` is the time at which the scan began.
    #[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
    pub fn of(stat: &Stat, seen: SystemTime) -> Self {
        let changed = (stat.st_ctime as i64, stat.st_ctime_nsec as i64);
        Self {
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mode: stat.st_mode,
            modified: (stat.st_mtime as i64, stat.st_mtime_nsec as i64),
            changed,
            is_racy: !is_older(changed, seen),
        }
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn mode(&self) -> u32 {
        self.mode
    }

    pub fn device(&self) -> u64 {
        self.device
    }

    pub fn is_executable(&self) -> bool {
        self.mode & 0o100 != 0
    }

    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    /// Whether any later write changes the stamp.
    pub fn is_settled(&self) -> bool {
        !self.is_racy
    }

    /// Whether the file was last changed before that second.
    pub fn is_older_than(&self, second: u64) -> bool {
        u64::try_from(self.changed.0).is_ok_and(|changed| changed < second)
    }

    /// Encodes a settled stamp.
    pub fn write(&self, out: &mut Encoder) {
        out.u64(self.device).u64(self.inode).u64(self.size).u32(self.mode);
        for (seconds, nanoseconds) in [self.modified, self.changed] {
            out.u64(seconds.cast_unsigned()).u64(nanoseconds.cast_unsigned());
        }
    }

    pub fn read(input: &mut Decoder) -> Result<Self, Malformed> {
        let (device, inode, size, mode) = (input.u64()?, input.u64()?, input.u64()?, input.u32()?);
        let mut time = || Ok((input.u64()?.cast_signed(), input.u64()?.cast_signed()));
        let (modified, changed) = (time()?, time()?);
        Ok(Self { device, inode, size, mode, modified, changed, is_racy: false })
    }

    /// Whether the file is unchanged and no change can have gone unnoticed.
    pub fn is_unchanged(&self, now: &Stamp) -> bool {
        !self.is_racy && self.matches(now)
    }

    /// Whether it is the same file, regardless of its content.
    pub fn is_same_file(&self, now: &Stamp) -> bool {
        (self.device, self.inode) == (now.device, now.inode)
    }

    /// For a file that became shorter: whether it was truncated so recently that its times may not show it yet.
    pub fn may_be_mid_write(&self, was: &Stamp) -> bool {
        self.is_racy || self.changed == was.changed
    }

    /// Identifies a version in a file name: the same for the same content, also after a rename.
    pub fn key(&self) -> String {
        format!("{:x}.{:x}.{:x}.{:x}", self.inode, self.size, self.modified.0, self.modified.1)
    }

    pub fn inode(&self) -> u64 {
        self.inode
    }

    pub fn matches(&self, now: &Stamp) -> bool {
        self.matches_content(now) && self.mode == now.mode && self.changed == now.changed
    }

    /// Like [`Stamp::matches`], but allows a rename, which changes the status time.
    pub fn matches_content(&self, now: &Stamp) -> bool {
        (self.device, self.inode, self.size, self.modified) == (now.device, now.inode, now.size, now.modified)
    }
}

fn is_older((seconds, nanoseconds): (i64, i64), seen: SystemTime) -> bool {
    let (Ok(seconds), Ok(nanoseconds)) = (u64::try_from(seconds), u32::try_from(nanoseconds)) else { return true };
    match (UNIX_EPOCH + Duration::new(seconds, nanoseconds)).checked_add(CLOCK_TICK) {
        Some(settled) => settled < seen,
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_taken_right_after_a_write_is_not_trusted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let stat = rustix::fs::stat(file.path()).unwrap();
        let fresh = Stamp::of(&stat, SystemTime::now() - CLOCK_TICK);
        assert!(!fresh.is_unchanged(&fresh) && fresh.matches(&fresh));
        let settled = Stamp::of(&stat, SystemTime::now() + CLOCK_TICK * 2);
        assert!(settled.is_unchanged(&fresh));
    }
}
