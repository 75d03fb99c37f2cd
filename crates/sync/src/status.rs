//! How a sync stands, for whoever asks, and what happens in it, for whoever listens.

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
    /// Both sides agree, as far as they can.
    Watching,
    Paused,
    /// Waits for somebody to say that it is right.
    Halted(Halt),
    /// Tries again soon; this is why it could not go on.
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
    /// From the sandbox, and not taken because it would run here by itself.
    pub held_back: Vec<RelPath>,
    pub unsynced_differences: usize,
    /// Of the local folder's trash: used and allowed, in bytes.
    pub trash: (u64, u64),
    /// Where not all changes are seen as they happen.
    pub is_polling: [bool; 2],
    /// When both sides last agreed as far as they can.
    pub synced_at: Option<SystemTime>,
    pub rounds: u64,
}

/// Something worth telling as it happens.
#[derive(Debug)]
pub enum Event<'a> {
    Phase(&'a Phase),
    /// Bytes of content on their way, of so many.
    Progress {
        to: Side,
        done: u64,
        total: u64,
    },
    /// Done, on that side.
    Changed {
        side: Side,
        change: &'a Change,
        /// The trash batch that has the old version, where there was one here.
        batch: Option<&'a str>,
    },
    /// A round that did something, or found another conflict, is over.
    Round(&'a Status),
    Notice(&'a str),
}
