//! Finds and ends all descendants of a program. Daemons leave its session and their parents, but keep its mark.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use cobox_kernel::mark_of;
use rustix::{
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
    thread::{NanosleepRelativeResult, Timespec, nanosleep},
};

use super::procfs::ProcFs;

/// Gives up on the remaining processes after this time without change. A process dies within microseconds of SIGKILL,
/// unless it hangs in the kernel, for example on a broken disk, which must not block init forever.
const STUCK_AFTER: Duration = Duration::from_secs(2);
/// Maximum total time. Hundreds of processes that start each other leave init little time of a busy core.
const KILL_WITHIN: Duration = Duration::from_secs(30);
/// Interval between checks whether killed processes are gone: about as long as a small process takes to end.
const RECHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000 };

/// The process tree to search for.
pub struct ProcessTree {
    /// The mark that the tree carries, where marks are available.
    pub mark: Option<u64>,
    /// Pid of the program itself, until it is reaped.
    pub pid: Option<i32>,
}

pub struct LiveProcess {
    pub pid: i32,
    /// One of its live threads, through which its memory is read. The first thread may have ended.
    pub thread: i32,
    parent: i32,
    session: i32,
    /// Start time in kernel ticks since boot. With it a pid identifies one process.
    started: u64,
}

/// All live processes except init.
pub fn processes(proc: &ProcFs) -> Vec<LiveProcess> {
    proc.pids().into_iter().filter(|pid| *pid != 1).filter_map(|pid| LiveProcess::read(proc, pid)).collect()
}

impl LiveProcess {
    /// `None` for an ended process.
    fn read(proc: &ProcFs, pid: i32) -> Option<Self> {
        let stat = proc.read(&format!("{pid}/stat"))?;
        // The name in parentheses may contain any character, so parsing starts after the last parenthesis.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let has_first_thread = is_alive(fields.next()?);
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        let threads: u32 = fields.nth(13)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        let thread = match has_first_thread {
            true => pid,
            // A process whose first thread has ended looks like an ended one, except that it has other threads.
            false if threads > 1 => other_thread(proc, pid).unwrap_or(pid),
            false => return None,
        };
        Some(LiveProcess { pid, thread, parent, session, started })
    }
}

fn is_alive(state: &str) -> bool {
    !matches!(state, "Z" | "X")
}

/// May return `None` if threads end and start during the search.
fn other_thread(proc: &ProcFs, pid: i32) -> Option<i32> {
    proc.numeric_entries(&format!("{pid}/task")).into_iter().find(|thread| {
        let stat = proc.read(&format!("{pid}/task/{thread}/stat")).unwrap_or_default();
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().next()).is_some_and(is_alive)
    })
}

impl ProcessTree {
    /// Pids and start times of the tree's processes, found by the mark, and by descent and session where marks are not
    /// available.
    fn members(&self, proc: &ProcFs) -> BTreeSet<(i32, u64)> {
        let all = processes(proc);
        let belongs = |process: &LiveProcess| {
            self.mark.is_some() && mark_of(process.pid) == self.mark
                || self.pid.is_some_and(|root| process.pid == root || process.session == root)
        };
        let mut members: BTreeSet<i32> = all.iter().filter(|process| belongs(process)).map(|process| process.pid).collect();
        loop {
            let children: Vec<i32> = all
                .iter()
                .filter(|process| members.contains(&process.parent))
                .map(|process| process.pid)
                .filter(|process| !members.contains(process))
                .collect();
            if children.is_empty() {
                return all.iter().filter(|process| members.contains(&process.pid)).map(|process| (process.pid, process.started)).collect();
            }
            members.extend(children);
        }
    }

    /// Signals through a pidfd, and checks the process again after opening it, because the pid may have been reused
    /// since the search.
    fn signal_process(proc: &ProcFs, (pid, started): (i32, u64), signal: Signal) {
        let Some(pidfd) = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else { return };
        if LiveProcess::read(proc, pid).is_some_and(|now| now.started == started) {
            // An error means that the process has already ended.
            let _ = pidfd_send_signal(&pidfd, signal);
        }
    }
}

/// Signals a program and all its descendants.
pub fn signal(proc: &ProcFs, tree: &ProcessTree, signal: Signal) {
    for member in tree.members(proc) {
        ProcessTree::signal_process(proc, member, signal);
    }
}

/// Ends a program and all its descendants, and returns when they have ended.
pub fn kill(proc: &ProcFs, tree: &ProcessTree) {
    let start = Instant::now();
    let mut last_change = start;
    let mut stopped = BTreeSet::new();
    while start.elapsed() < KILL_WITHIN && last_change.elapsed() < STUCK_AFTER {
        let alive = tree.members(proc);
        if alive.is_empty() {
            return;
        }
        if alive != stopped {
            last_change = Instant::now();
        }
        // Stops all processes until a search finds no new one. A stopped process starts no others, so the search is
        // then complete.
        let new: Vec<_> = alive.difference(&stopped).copied().collect();
        for member in &new {
            ProcessTree::signal_process(proc, *member, Signal::STOP);
        }
        if new.is_empty() {
            for member in &alive {
                ProcessTree::signal_process(proc, *member, Signal::KILL);
            }
            // No signal interrupts this sleep: init has all of them blocked.
            let (NanosleepRelativeResult::Ok | _) = nanosleep(&RECHECK_INTERVAL);
        }
        stopped = alive;
    }
    // Last attempt for the processes that remain.
    signal(proc, tree, Signal::KILL);
}
