//! Why a sync waits for the user, and what the user can do about it.

use std::fmt;

use crate::{path::RelPath, side::Side, trash::TrashFull};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Halt {
    /// One side has no files left; `files` would be deleted on the other one, where `already_deleted` of them are gone.
    FolderEmptied { side: Side, files: usize, already_deleted: usize },
    /// More than half of the files would be deleted on one side, in total or in one top-level directory;
    /// `already_deleted` of them are gone.
    MassDeletion { side: Side, directory: Option<RelPath>, files: usize, total: usize, already_deleted: usize },
    /// A directory with more files than the limit would disappear on one side; `already_deleted` of them are gone.
    DirectoryGone { side: Side, directory: RelPath, files: usize, already_deleted: usize },
    /// The trash has not enough space for the local versions that would be deleted or replaced.
    TrashFull(TrashFull),
}

impl Halt {
    /// Whether the user can resolve it by confirming the deletions.
    pub fn is_confirmable(&self) -> bool {
        !matches!(self, Halt::TrashFull(_))
    }

    /// Number of files that are in the local trash already.
    fn already_deleted_here(&self) -> usize {
        match self {
            Halt::FolderEmptied { side: Side::Sandbox, already_deleted, .. }
            | Halt::MassDeletion { side: Side::Local, already_deleted, .. }
            | Halt::DirectoryGone { side: Side::Local, already_deleted, .. } => *already_deleted,
            _ => 0,
        }
    }

    /// The next step for the user.
    pub fn advice(&self) -> &'static str {
        match self {
            Halt::TrashFull(_) => {
                "free space with `cobox sync trash empty` and run `cobox sync resume`, or start the sync with a larger --trash-size"
            }
            halt if halt.already_deleted_here() > 0 => {
                "to delete them: `cobox sync resume --confirm`; to keep them: `cobox sync undo`, which restores those that are already \
                 deleted, and then `cobox sync resume`, which copies all of them back to the sandbox"
            }
            _ => "if this is intended: `cobox sync resume --confirm`; if not, restore the missing files and run `cobox sync resume`",
        }
    }
}

impl fmt::Display for Halt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let locations = |side: &Side| match side {
            Side::Local => ("here", "in the sandbox"),
            Side::Sandbox => ("in the sandbox", "here"),
        };
        let already_suffix = |already_deleted: &usize| {
            if *already_deleted == 0 { String::new() } else { format!(" ({already_deleted} of them are already deleted)") }
        };
        match self {
            Halt::FolderEmptied { side: Side::Local, files, already_deleted } => {
                write!(f, "this folder has no files, and {files} would be deleted in the sandbox{}", already_suffix(already_deleted))
            }
            Halt::FolderEmptied { side: Side::Sandbox, files, already_deleted } => {
                write!(f, "the sandbox's folder has no files, and {files} would be deleted here{}", already_suffix(already_deleted))
            }
            Halt::MassDeletion { side, directory, files, total, already_deleted } => {
                let (place, other) = locations(side);
                let within = directory.as_ref().map(|directory| format!(" of {directory}")).unwrap_or_default();
                write!(
                    f,
                    "{files} of {total} files{within} would be deleted {place}{}, because they are not {other}",
                    already_suffix(already_deleted)
                )
            }
            Halt::DirectoryGone { side, directory, files, already_deleted } => {
                let (place, other) = locations(side);
                write!(
                    f,
                    "{directory} with its {files} files would be deleted {place}{}, because it is not {other}",
                    already_suffix(already_deleted)
                )
            }
            Halt::TrashFull(full) => full.fmt(f),
        }
    }
}
