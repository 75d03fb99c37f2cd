//! Where bytes go that no longer fit into memory: somebody else's file, as far as this crate is concerned.

use std::io;

/// Keeps a bounded, contiguous stretch of a log. Called with the log's lock held, so it should be as quick as the page cache.
///
/// Offsets are the log's own, each write begins where the last ended, and what is kept is never more than the limit the log was made
/// with: a file written at `offset % limit` does.
pub trait Spool: Send {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Fills the whole of `into`.
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Nothing before this offset will be asked for again.
    fn discard(&mut self, before: u64);
}

/// A spool and the stretch it holds: from here to where the ring begins.
pub(crate) struct Spooled {
    pub spool: Box<dyn Spool>,
    pub from: u64,
    pub limit: u64,
    /// A write or read failed. It is not asked again, and what it held is a gap.
    pub failed: Option<io::Error>,
}

impl Spooled {
    /// Takes what leaves the ring at `at`, letting the oldest go where there is no room.
    pub fn take(&mut self, mut at: u64, parts: [&[u8]; 2]) {
        for part in parts {
            if self.failed.is_some() {
                break;
            }
            // More than it can hold at once: only the end of it matters.
            let skipped = part.len().saturating_sub(usize::try_from(self.limit).unwrap_or(usize::MAX));
            if skipped > 0 {
                self.let_go(at + skipped as u64);
            }
            let end = at + part.len() as u64;
            if end - self.from > self.limit {
                self.let_go(end - self.limit);
            }
            if let Err(error) = self.spool.write_at(at + skipped as u64, &part[skipped..]) {
                self.failed = Some(error);
            }
            at = end;
        }
    }

    pub fn let_go(&mut self, before: u64) {
        if before > self.from {
            self.from = before;
            self.spool.discard(before);
        }
    }
}
