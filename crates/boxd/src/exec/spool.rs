//! Spool for output that no longer fits into memory: an unlinked file on the sandbox's own disk.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use cobox_stream::Spool;

/// Disk space that all spools together may use.
pub struct DiskBudget {
    available: AtomicU64,
}

impl DiskBudget {
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { available: AtomicU64::new(bytes) })
    }

    fn reserve(&self, bytes: u64) -> bool {
        self.available.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |available| available.checked_sub(bytes)).is_ok()
    }

    fn release(&self, bytes: u64) {
        self.available.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The spool's file, created on first use; `None` if it could not be created.
pub type LazySpoolFile = Arc<OnceLock<Option<File>>>;

/// A ring buffer in a file: the byte of an offset is stored at that offset modulo the limit.
pub struct SpoolFile {
    pub lazy_file: LazySpoolFile,
    pub limit: u64,
    pub budget: Arc<DiskBudget>,
    /// High-water mark of the file, which is its disk usage.
    pub used: u64,
}

impl SpoolFile {
    fn file(&self) -> io::Result<&File> {
        self.lazy_file.get().and_then(Option::as_ref).ok_or_else(|| io::Error::other("there is no spool file"))
    }

    /// The file ranges that hold `length` bytes from an offset on: one, or two where it wraps around.
    fn segments(&self, offset: u64, length: usize) -> [(u64, usize); 2] {
        let at = offset % self.limit;
        let until_end = usize::try_from(self.limit - at).unwrap_or(usize::MAX).min(length);
        [(at, until_end), (0, length - until_end)]
    }
}

impl Spool for SpoolFile {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        for (at, length) in self.segments(offset, bytes.len()) {
            let growth = (at + length as u64).saturating_sub(self.used);
            if growth > 0 {
                if !self.budget.reserve(growth) {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                self.used += growth;
            }
            self.file()?.write_all_at(&rest[..length], at)?;
            rest = &rest[length..];
        }
        Ok(())
    }

    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        for (at, length) in self.segments(offset, into.len()) {
            self.file()?.read_exact_at(&mut into[done..done + length], at)?;
            done += length;
        }
        Ok(())
    }

    /// Nothing to do: the space is reused when the ring wraps around.
    fn discard(&mut self, _before: u64) {}
}

impl Drop for SpoolFile {
    fn drop(&mut self) {
        self.budget.release(self.used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spool(limit: u64, budget: &Arc<DiskBudget>) -> SpoolFile {
        let lazy_file = LazySpoolFile::default();
        lazy_file.set(Some(tempfile::tempfile().unwrap())).unwrap();
        SpoolFile { lazy_file, limit, budget: budget.clone(), used: 0 }
    }

    #[test]
    fn reads_wrap_around_the_end_of_the_file() {
        let budget = DiskBudget::new(10);
        let mut spool = spool(10, &budget);
        let text = b"abcdefghijklmnopqrstuvwxyz";
        for (i, piece) in text.chunks(7).enumerate() {
            spool.write_at(7 * i as u64, piece).unwrap();
        }
        let mut last = [0; 10];
        spool.read_at(16, &mut last).unwrap();
        assert_eq!(&last, &text[16..]);
    }

    #[test]
    fn a_spool_beyond_the_shared_budget_is_refused_and_a_dropped_spool_frees_its_share() {
        let budget = DiskBudget::new(10);
        let mut one = spool(8, &budget);
        one.write_at(0, &[1; 8]).unwrap();
        let mut other = spool(8, &budget);
        assert!(other.write_at(0, &[1; 8]).is_err());
        drop(one);
        other.write_at(0, &[1; 8]).unwrap();
    }
}
