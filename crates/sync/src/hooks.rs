//! What surrounds one side's file work: threads that may touch the files, and others who change them too.

use std::{io, os::fd::BorrowedFd, path::PathBuf, thread};

use rustix::{fs::Stat, io::Errno};

use crate::{memory::Memory, path::RelPath};

/// What happens to a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    New,
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
        deed: Deed,
        step: &mut dyn FnMut() -> Result<Option<Stat>, Errno>,
    ) -> Result<Option<Stat>, Errno> {
        let _ = (directory, path, deed);
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
    fn recall(&self) -> Memory {
        Memory::default()
    }

    /// Takes that from a sync that ends.
    fn remember(&self, memory: Memory) {
        drop(memory);
    }

    /// Whether files may be changed at all.
    fn may_write(&self) -> bool {
        true
    }
}

/// Somebody's own folder, by its path: another one put in its place is not it.
pub struct Own {
    path: PathBuf,
    memory: Option<PathBuf>,
}

impl Own {
    pub fn new(path: PathBuf) -> Self {
        Self { path, memory: None }
    }

    /// With a file that keeps, from run to run, what is known of the folder's files.
    pub fn remembering(path: PathBuf, memory: PathBuf) -> Self {
        Self { path, memory: Some(memory) }
    }
}

impl Hooks for Own {
    fn is_root(&self, root: BorrowedFd) -> bool {
        match (rustix::fs::stat(&self.path), rustix::fs::fstat(root)) {
            (Ok(now), Ok(opened)) => (now.st_dev, now.st_ino) == (opened.st_dev, opened.st_ino),
            _ => false,
        }
    }

    fn recall(&self) -> Memory {
        self.memory.as_deref().map(Memory::load).unwrap_or_default()
    }

    fn remember(&self, memory: Memory) {
        if let Some(path) = &self.memory
            && let Err(error) = memory.save(path)
        {
            tracing::debug!(%error, "what is known of the files could not be kept: the next run reads them again");
        }
    }
}
