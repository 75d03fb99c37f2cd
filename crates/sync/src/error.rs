//! Why a sync can't go on now.

use std::{io, path::PathBuf};

use rustix::io::Errno;

use crate::{halt::Halt, message::Fault};

#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    #[error("the folder is not there any more")]
    RootGone,
    #[error("the folder can't be opened: {0}")]
    Root(io::Error),
    #[error("there are more than {0} files and folders; leave some out with .coboxignore")]
    TooMany(usize),
    #[error("more than {0} files can't be synced; leave them out with .coboxignore")]
    TooManyProblems(usize),
    #[error("the disk is full")]
    Full,
    #[error("writing {target}: {cause}")]
    Writing { target: String, cause: io::Error },
    /// Another command holds the trash's lock for longer than a restore takes.
    #[error("the trash is in use by another cobox command")]
    TrashBusy,
    #[error("files may not be changed with this token")]
    NotAllowed,
    /// The connection; a new one may do.
    #[error("the connection is lost: {0}")]
    Lost(io::Error),
    /// The other side broke the rules.
    #[error("the other side is not understood: {0}")]
    Protocol(&'static str),
    /// The other side can't go on.
    #[error("in the sandbox: {reason}")]
    Sandbox { fault: Fault, reason: String },
    /// What is remembered of the sync.
    #[error("{0}")]
    State(String),
    /// Of a sync that has to end: nobody is there who could say that it is right.
    #[error("nothing was changed: {0}")]
    Halted(Halt),
    /// What git would run is not known, so nothing may be written.
    #[error("git did not answer within {seconds} s in {}: run `git config --list` there to see why", folder.display())]
    GitTimeout { folder: PathBuf, seconds: u64 },
    #[error("it was told to stop")]
    Stopped,
}

impl SyncError {
    pub fn root(e: Errno) -> Self {
        match e {
            Errno::NOENT | Errno::NOTDIR => SyncError::RootGone,
            e => SyncError::Root(e.into()),
        }
    }

    pub fn writing(target: &str, e: Errno) -> Self {
        match e {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => SyncError::Full,
            e => SyncError::Writing { target: target.to_owned(), cause: e.into() },
        }
    }

    pub fn writing_io(target: &str, e: io::Error) -> Self {
        match Errno::from_io_error(&e) {
            Some(errno) => Self::writing(target, errno),
            None => SyncError::Writing { target: target.to_owned(), cause: e },
        }
    }

    /// How it is told to the other side.
    pub fn fault(&self) -> Fault {
        match self {
            SyncError::RootGone | SyncError::Root(_) => Fault::RootGone,
            SyncError::TooMany(_) | SyncError::TooManyProblems(_) => Fault::TooMany,
            SyncError::Full => Fault::Full,
            SyncError::NotAllowed => Fault::NotAllowed,
            SyncError::Sandbox { fault, .. } => *fault,
            _ => Fault::Other,
        }
    }

    /// Whether another try later may do without anybody doing something.
    pub fn is_transient(&self) -> bool {
        match self {
            SyncError::Lost(_) | SyncError::Full | SyncError::Writing { .. } | SyncError::TooMany(_) | SyncError::TooManyProblems(_) => {
                true
            }
            SyncError::Sandbox { fault, .. } => !matches!(fault, Fault::Version | Fault::NotAllowed),
            SyncError::RootGone | SyncError::Root(_) | SyncError::TrashBusy | SyncError::GitTimeout { .. } => true,
            _ => false,
        }
    }
}
