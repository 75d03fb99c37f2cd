//! What surrounds one side's file work: threads that may touch the files, and others who change them too.

use std::{io, os::fd::BorrowedFd, path::PathBuf, thread};

use rustix::{fs::Stat, io::Errno};

use crate::{digest_cache::DigestCache, path::RelPath};

/// What happens to a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Created,
    Replaced,
    Removed,
}

/// The methods do nothing special by themselves, which is right for somebody's own folder.
pub trait Hooks: Send + Sync + 'static {
    /// Starts a thread that may touch the files.
    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
    }

    /// Runs the step that changes what a path, in that directory, stands for, and learns what stands there then.
    fn change(
        &self,
        directory: BorrowedFd,
        path: &RelPath,
        kind: ChangeKind,
        step: &mut dyn FnMut() -> Result<Option<Stat>, Errno>,
    ) -> Result<Option<Stat>, Errno> {
        let _ = (directory, path, kind);
        step()
    }

    /// Whether the folder is still the one that was meant.
    fn is_root(&self, root: BorrowedFd) -> bool {
        let _ = root;
        true
    }

    /// Whether no more may be written, though the disk itself would take it.
    fn is_full(&self) -> bool {
        false
    }

    /// What an earlier sync of this folder knew of its files.
    fn load_digests(&self) -> DigestCache {
        DigestCache::default()
    }

    /// Takes that from a sync that ends.
    fn save_digests(&self, digest_cache: DigestCache) {
        drop(digest_cache);
    }

    /// Whether files may be changed at all.
    fn may_write(&self) -> bool {
        true
    }
}

/// Somebody's own folder, by its path: another one put in its place is not it.
pub struct LocalHooks {
    path: PathBuf,
    digest_cache: Option<PathBuf>,
}

impl LocalHooks {
    pub fn new(path: PathBuf) -> Self {
        Self { path, digest_cache: None }
    }

    /// With a file that keeps, from run to run, what is known of the folder's files.
    pub fn with_digest_cache(path: PathBuf, digest_cache: PathBuf) -> Self {
        Self { path, digest_cache: Some(digest_cache) }
    }
}

impl Hooks for LocalHooks {
    fn is_root(&self, root: BorrowedFd) -> bool {
        match (rustix::fs::stat(&self.path), rustix::fs::fstat(root)) {
            (Ok(now), Ok(opened)) => (now.st_dev, now.st_ino) == (opened.st_dev, opened.st_ino),
            _ => false,
        }
    }

    fn load_digests(&self) -> DigestCache {
        self.digest_cache.as_deref().map(DigestCache::load).unwrap_or_default()
    }

    fn save_digests(&self, digest_cache: DigestCache) {
        if let Some(path) = &self.digest_cache
            && let Err(error) = digest_cache.save(path)
        {
            tracing::debug!(%error, "what is known of the files could not be kept: the next run reads them again");
        }
    }
}
