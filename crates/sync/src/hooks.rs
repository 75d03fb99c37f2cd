//! The environment of one side's file operations: how threads are started, who else writes to the folder, and where
//! digests are cached.

use std::{io, os::fd::BorrowedFd, path::PathBuf, thread};

use rustix::{fs::Stat, io::Errno};

use crate::{digest_cache::DigestCache, path::RelPath};

/// How a name changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Created,
    Replaced,
    Removed,
}

/// The default implementations suit a folder that belongs to the user.
pub trait Hooks: Send + Sync + 'static {
    /// Starts a thread that may access the files.
    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
    }

    /// Runs a step that changes what a name in the directory refers to. The step returns the new status of the name.
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

    /// Whether the opened root is still the folder at the configured path.
    fn is_root(&self, root: BorrowedFd) -> bool {
        let _ = root;
        true
    }

    /// Whether writing has to stop even though the disk would accept more.
    fn is_full(&self) -> bool {
        false
    }

    /// Loads the digests that an earlier sync of this folder saved.
    fn load_digests(&self) -> DigestCache {
        DigestCache::default()
    }

    /// Saves the digests when a sync ends.
    fn save_digests(&self, digest_cache: DigestCache) {
        drop(digest_cache);
    }

    /// Whether files may be changed at all.
    fn may_write(&self) -> bool {
        true
    }
}

/// Hooks for a folder of the user, identified by its path. A different folder that appears at the path is not accepted.
pub struct LocalHooks {
    path: PathBuf,
    digest_cache: Option<PathBuf>,
}

impl LocalHooks {
    pub fn new(path: PathBuf) -> Self {
        Self { path, digest_cache: None }
    }

    /// Caches digests in a file between runs.
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
            tracing::debug!(%error, "can't save the digest cache; the next run reads all files again");
        }
    }
}
