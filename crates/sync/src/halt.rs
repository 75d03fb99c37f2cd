//! Why a sync waits for the user, and what the user can do about it.

use std::fmt;

use crate::{path::RelPath, trash::TrashFull};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Here,
    Sandbox,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Halt {
    /// The folder of that side has no files, and these would be deleted on the other.
    Emptied { side: Side, files: usize },
    /// More than half of the files would be deleted on that side, in all or in one top-level directory; `lately` of them have been already.
    MassDeletion { side: Side, directory: Option<RelPath>, files: usize, of: usize, lately: usize },
    /// A directory with more files than are allowed would disappear on that side; `lately` of them have already.
    DirectoryGone { side: Side, directory: RelPath, files: usize, lately: usize },
    /// The trash has no room for what would be deleted or replaced here.
    TrashFull(TrashFull),
}

impl Halt {
    /// Whether the user can answer it by confirming the deletions.
    pub fn is_confirmable(&self) -> bool {
        !matches!(self, Halt::TrashFull(_))
    }

    /// What to do next.
    pub fn advice(&self) -> &'static str {
        match self {
            Halt::TrashFull(_) => {
                "make room with `cobox sync trash empty` and `cobox sync resume`, or start the sync with a larger --trash-size"
            }
            _ => "if that is right: `cobox sync resume --confirm`; if not, put back what is missing and `cobox sync resume`",
        }
    }
}

impl fmt::Display for Halt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = |side: &Side| match side {
            Side::Here => ("here", "in the sandbox"),
            Side::Sandbox => ("in the sandbox", "here"),
        };
        let already = |lately: &usize| if *lately == 0 { String::new() } else { format!(" ({lately} of them are already)") };
        match self {
            Halt::Emptied { side: Side::Here, files } => {
                write!(f, "this folder has no files, and {files} would be deleted in the sandbox")
            }
            Halt::Emptied { side: Side::Sandbox, files } => {
                write!(f, "the sandbox's folder has no files, and {files} would be deleted here")
            }
            Halt::MassDeletion { side, directory, files, of, lately } => {
                let (place, other) = places(side);
                let within = directory.as_ref().map(|directory| format!(" of {directory}")).unwrap_or_default();
                write!(f, "{files} of {of} files{within} would be deleted {place}{}, because they are not {other}", already(lately))
            }
            Halt::DirectoryGone { side, directory, files, lately } => {
                let (place, other) = places(side);
                write!(f, "{directory} with its {files} files would be deleted {place}{}, because it is not {other}", already(lately))
            }
            Halt::TrashFull(full) => full.fmt(f),
        }
    }
}
