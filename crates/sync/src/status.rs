//! Status of a sync, and the events that it reports.

use std::{collections::BTreeMap, time::SystemTime};

use crate::{
    halt::Halt,
    mode::Mode,
    path::RelPath,
    problem::Problem,
    reconcile::{Change, Conflict},
    side::Side,
};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Connecting,
    Scanning,
    Syncing,
    /// Both sides agree as far as possible.
    Watching,
    Paused,
    /// Waits for the user's decision.
    Halted(Halt),
    /// Waits for the next attempt; contains the reason of the last failure.
    Retrying(String),
    Ended,
}

#[derive(Clone, Debug, Default)]
pub struct Status {
    pub mode: Mode,
    pub phase: Phase,
    pub local_files: usize,
    pub sandbox_files: usize,
    /// Files that both sides agree on.
    pub synced_files: usize,
    pub conflicts: Vec<Conflict>,
    pub local_problems: BTreeMap<RelPath, Problem>,
    pub sandbox_problems: BTreeMap<RelPath, Problem>,
    /// Files from the sandbox that were held back because tools on this machine would execute them.
    pub held_back: Vec<RelPath>,
    pub unsynced_differences: usize,
    /// Used and permitted size of the local trash, in bytes.
    pub trash: (u64, u64),
    /// Whether some changes are only found by full scans, by side.
    pub is_polling: [bool; 2],
    /// When both sides last agreed as far as possible.
    pub synced_at: Option<SystemTime>,
    pub rounds: u64,
}

/// An event of a running sync.
#[derive(Debug)]
pub enum Event<'a> {
    Phase(&'a Phase),
    /// Bytes of content transferred so far, and in total.
    Progress {
        to: Side,
        done: u64,
        total: u64,
    },
    /// A change was made on one side.
    Changed {
        side: Side,
        change: &'a Change,
        /// The trash batch that holds the old version; local changes only.
        batch: Option<&'a str>,
    },
    /// A round has ended that changed files or found a new conflict.
    Round(&'a Status),
    Notice(&'a str),
}
