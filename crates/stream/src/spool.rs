//! The spool: where bytes go that no longer fit into memory. The user of this crate provides it, usually as a file.

use std::io;

/// Stores a bounded, contiguous range of a log. It is called while the log is locked, so it should be as fast as the
/// page cache.
///
/// Offsets are those of the log, each write begins where the last one ended, and the stored range never exceeds the
/// limit that the log was created with. So an implementation may write at `offset % limit` of a file.
pub trait Spool: Send {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Fills all of `into`.
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Bytes before this offset will not be read again.
    fn discard(&mut self, before: u64);
}

/// A spool and the range that it stores: from `from` to the beginning of the ring.
pub(crate) struct Spooled {
    pub spool: Box<dyn Spool>,
    pub from: u64,
    pub limit: u64,
    /// Set when a write or read failed. The spool isn't used any more, and its range is a gap.
    pub failed: Option<io::Error>,
}

impl Spooled {
    /// Appends bytes that leave the ring at offset `at`, and discards the oldest if there is no space.
    pub fn append(&mut self, mut at: u64, parts: [&[u8]; 2]) {
        for part in parts {
            if self.failed.is_some() {
                break;
            }
            // If this is more than the spool can store at once, only the end of it is kept.
            let skipped = part.len().saturating_sub(usize::try_from(self.limit).unwrap_or(usize::MAX));
            if skipped > 0 {
                self.discard_before(at + skipped as u64);
            }
            let end = at + part.len() as u64;
            if end - self.from > self.limit {
                self.discard_before(end - self.limit);
            }
            if let Err(error) = self.spool.write_at(at + skipped as u64, &part[skipped..]) {
                self.failed = Some(error);
            }
            at = end;
        }
    }

    pub fn discard_before(&mut self, before: u64) {
        if before > self.from {
            self.from = before;
            self.spool.discard(before);
        }
    }
}
