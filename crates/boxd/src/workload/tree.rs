//! Finding and ending all that a program started, whatever it did to get away: daemons have left its session and its parents, but not its mark.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use cobox_kernel::mark_of;
use rustix::{
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
    thread::{NanosleepRelativeResult, Timespec, nanosleep},
};

use super::proc::Proc;

/// How long nothing may change before what is left is given up on. What was sent SIGKILL goes in microseconds, save what hangs in
/// the kernel on a broken disk; that must not hold up init for ever.
const STUCK_AFTER: Duration = Duration::from_secs(2);
/// How long it may take in all: hundreds of processes that start each other leave init little of a busy core.
const KILL_WITHIN: Duration = Duration::from_secs(30);
/// Between two looks at whether the killed are gone: about what a small process takes to end.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000 };

/// What to look for.
pub struct Root {
    /// The mark everything started by it carries, where there are marks.
    pub mark: Option<u64>,
    /// The program itself, while it has not been waited for.
    pub pid: Option<i32>,
}

pub struct Member {
    pub pid: i32,
    /// One of its threads that has not ended, which is how its memory is found: its first may have.
    pub thread: i32,
    parent: i32,
    session: i32,
    /// Since boot, in the kernel's ticks: with it a number names one process.
    started: u64,
}

/// Every process but init that has not ended.
pub fn processes(proc: &Proc) -> Vec<Member> {
    proc.pids().into_iter().filter(|pid| *pid != 1).filter_map(|pid| Member::look(proc, pid)).collect()
}

impl Member {
    /// `None` for one that has ended.
    fn look(proc: &Proc, pid: i32) -> Option<Self> {
        let stat = proc.read(&format!("{pid}/stat"))?;
        // The name in parentheses may hold anything, so count from the last one.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let has_first_thread = is_alive(fields.next()?);
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        let threads: u32 = fields.nth(13)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        let thread = match has_first_thread {
            true => pid,
            // What goes on without its first thread looks like one that has ended, but for its others.
            false if threads > 1 => other_thread(proc, pid).unwrap_or(pid),
            false => return None,
        };
        Some(Member { pid, thread, parent, session, started })
    }
}

fn is_alive(state: &str) -> bool {
    !matches!(state, "Z" | "X")
}

/// None is found where they end and begin while they are looked at.
fn other_thread(proc: &Proc, pid: i32) -> Option<i32> {
    proc.numbers(&format!("{pid}/task")).into_iter().find(|thread| {
        let stat = proc.read(&format!("{pid}/task/{thread}/stat")).unwrap_or_default();
        stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().next()).is_some_and(is_alive)
    })
}

impl Root {
    /// By the mark; and by descent and session, where there are no marks. Each with when it was started.
    fn members(&self, proc: &Proc) -> BTreeSet<(i32, u64)> {
        let all = processes(proc);
        let is_ours = |p: &Member| {
            self.mark.is_some() && mark_of(p.pid) == self.mark || self.pid.is_some_and(|root| p.pid == root || p.session == root)
        };
        let mut found: BTreeSet<i32> = all.iter().filter(|p| is_ours(p)).map(|p| p.pid).collect();
        loop {
            let more: Vec<i32> = all.iter().filter(|p| found.contains(&p.parent)).map(|p| p.pid).filter(|p| !found.contains(p)).collect();
            if more.is_empty() {
                return all.iter().filter(|p| found.contains(&p.pid)).map(|p| (p.pid, p.started)).collect();
            }
            found.extend(more);
        }
    }

    /// By a handle, and looked at once more when it is open: between the look and the signal a number may become somebody else's.
    fn send(proc: &Proc, (pid, started): (i32, u64), signal: Signal) {
        let Some(handle) = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else { return };
        if Member::look(proc, pid).is_some_and(|now| now.started == started) {
            // Gone in the meantime is what was wanted.
            let _ = pidfd_send_signal(&handle, signal);
        }
    }
}

/// Signals a program and all it started.
pub fn signal(proc: &Proc, root: &Root, signal: Signal) {
    for member in root.members(proc) {
        Root::send(proc, member, signal);
    }
}

/// Ends a program and all it started, and returns when they have ended.
pub fn kill(proc: &Proc, root: &Root) {
    let begun = Instant::now();
    let mut changed = begun;
    let mut stopped = BTreeSet::new();
    while begun.elapsed() < KILL_WITHIN && changed.elapsed() < STUCK_AFTER {
        let living = root.members(proc);
        if living.is_empty() {
            return;
        }
        if living != stopped {
            changed = Instant::now();
        }
        // Stopped first, until a look finds nobody new: a stopped process starts none, so then these are all.
        let new: Vec<_> = living.difference(&stopped).copied().collect();
        for member in &new {
            Root::send(proc, *member, Signal::STOP);
        }
        if new.is_empty() {
            for member in &living {
                Root::send(proc, *member, Signal::KILL);
            }
            // Woken by no signal: init has them all blocked.
            let (NanosleepRelativeResult::Ok | _) = nanosleep(&LOOK_AGAIN);
        }
        stopped = living;
    }
    // Whatever is left gets what can still be done.
    signal(proc, root, Signal::KILL);
}
