//! Errors that stop a sync, for now or for good.

use std::{io, path::PathBuf};

use rustix::io::Errno;

use crate::{halt::Halt, message::Fault};

#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    #[error("the folder no longer exists")]
    RootGone,
    #[error("the folder can't be opened: {0}")]
    Root(io::Error),
    #[error("there are more than {0} files and directories; exclude some with .coboxignore")]
    TooMany(usize),
    #[error("more than {0} files can't be synced; exclude them with .coboxignore")]
    TooManyProblems(usize),
    #[error("the disk is full")]
    Full,
    #[error("failed to {operation}: {cause}")]
    Writing { operation: String, cause: io::Error },
    /// Another command held the trash's lock for longer than a restore takes.
    #[error("the trash is in use by another cobox command")]
    TrashBusy,
    /// Something else has the trash's name.
    #[error("{} is not a directory, so nothing can be moved to the trash; move or delete it", .0.display())]
    TrashBlocked(PathBuf),
    #[error("this token does not permit writing files")]
    NotAllowed,
    /// The connection failed; a new one may work.
    #[error("the connection was lost: {0}")]
    Lost(io::Error),
    /// The other side violated the protocol.
    #[error("the other side violated the sync protocol: {0}")]
    Protocol(&'static str),
    /// The sandbox's end failed.
    #[error("in the sandbox: {reason}")]
    Sandbox { fault: Fault, reason: String },
    /// The stored state of the sync can't be read or written.
    #[error("{0}")]
    State(String),
    /// Only for a sync with `once`, which can't wait for a confirmation.
    #[error("nothing was changed: {0}")]
    Halted(Halt),
    /// Without git's answer it is unknown which files git would execute, so nothing may be written.
    #[error("git did not respond within {seconds} s in {}; run `git config --list` there to find the cause", folder.display())]
    GitTimeout { folder: PathBuf, seconds: u64 },
    #[error("the sync was stopped")]
    Stopped,
}

impl SyncError {
    pub fn root(e: Errno) -> Self {
        match e {
            Errno::NOENT | Errno::NOTDIR => SyncError::RootGone,
            e => SyncError::Root(e.into()),
        }
    }

    pub fn writing(operation: &str, e: Errno) -> Self {
        match e {
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => SyncError::Full,
            e => SyncError::Writing { operation: operation.to_owned(), cause: e.into() },
        }
    }

    pub fn writing_io(operation: &str, e: io::Error) -> Self {
        match Errno::from_io_error(&e) {
            Some(errno) => Self::writing(operation, errno),
            None => SyncError::Writing { operation: operation.to_owned(), cause: e },
        }
    }

    /// The code under which the error is reported to the other side.
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

    /// Whether a later retry may succeed without user action.
    pub fn is_transient(&self) -> bool {
        match self {
            SyncError::Lost(_) | SyncError::Full | SyncError::Writing { .. } | SyncError::TooMany(_) | SyncError::TooManyProblems(_) => {
                true
            }
            SyncError::Sandbox { fault, .. } => !matches!(fault, Fault::Version | Fault::NotAllowed),
            SyncError::RootGone | SyncError::Root(_) | SyncError::TrashBusy | SyncError::TrashBlocked(_) | SyncError::GitTimeout { .. } => {
                true
            }
            _ => false,
        }
    }
}
