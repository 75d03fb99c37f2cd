//! Stops a sync that is about to delete what nobody meant to delete: a root that is suddenly empty, or most of what there was going at once.

use std::fmt;

use crate::{
    entry::Entry,
    reconcile::{Change, Plan},
    tree::Tree,
};

/// Fewer deleted files than this are never too many: who works with a handful of files deletes most of them now and then.
const FEW_FILES: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Here,
    Sandbox,
}

/// Why a sync waits for somebody to say that it is right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Halt {
    /// The folder of one side has nothing in it any more, or isn't there.
    Emptied { side: Side, files: usize },
    /// More than half of what both sides had would be deleted on that side.
    MassDeletion { side: Side, files: usize, of: usize },
}

impl fmt::Display for Halt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let other = |side: Side| if side == Side::Here { "in the sandbox" } else { "here" };
        match self {
            Halt::Emptied { side: Side::Here, files } => {
                write!(f, "this folder is empty now, and {files} files would be deleted in the sandbox")
            }
            Halt::Emptied { side: Side::Sandbox, files } => {
                write!(f, "the sandbox's folder is empty now, and {files} files would be deleted here")
            }
            Halt::MassDeletion { side, files, of } => {
                let place = if *side == Side::Here { "here" } else { "in the sandbox" };
                match of {
                    of if of < files => write!(f, "{files} files would be deleted {place}"),
                    of => write!(f, "{files} of {of} files would be deleted {place}, because they were deleted {}", other(*side)),
                }
            }
        }
    }
}

/// Whether the plan may be carried out without asking.
pub fn check(base: &Tree, here: &Tree, there: &Tree, plan: &Plan) -> Option<Halt> {
    // Only deletions can come of it; where they don't, as in a one-way mode, there is nothing to ask.
    let (from_here, from_there) = (deleted(&plan.here), deleted(&plan.there));
    if here.is_empty() && from_there > 0 {
        return Some(Halt::Emptied { side: Side::Here, files: base.files() });
    }
    if there.is_empty() && from_here > 0 {
        return Some(Halt::Emptied { side: Side::Sandbox, files: base.files() });
    }
    let is_too_many = |files: usize| files > FEW_FILES && files * 2 > base.files();
    let halt = |side, files| Halt::MassDeletion { side, files, of: base.files() };
    if is_too_many(from_there) {
        return Some(halt(Side::Sandbox, from_there));
    }
    is_too_many(from_here).then(|| halt(Side::Here, from_here))
}

/// Files that go and leave nothing.
fn deleted(changes: &[Change]) -> usize {
    changes.iter().filter(|c| c.new.is_none() && c.old.as_ref().is_some_and(Entry::is_file)).count()
}
