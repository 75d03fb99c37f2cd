//! Limits the total memory of all programs where no cgroup does: init checks it periodically and ends the largest
//! programs when it exceeds the limit.

use std::collections::BTreeMap;

use rustix::process::{Pid, Signal, kill_process};

use super::{
    proc::Proc,
    tree::{Member, processes},
};

/// Descriptors inspected per check; the process that reaches this number is still inspected completely. That takes a
/// millisecond or two, in which init does nothing else.
const MAX_DESCRIPTORS_A_LOOK: usize = 2048;

pub struct MemoryWatch {
    limit: u64,
    /// Memory in unnamed files (memfd), as far as they have been found.
    files: BTreeMap<u64, MemoryFile>,
    /// The pid at which the next search for such files continues, and the number of completed rounds.
    next: i32,
    round: u64,
}

struct MemoryFile {
    bytes: u64,
    /// One of the processes that have it open.
    pid: i32,
    round: u64,
}

impl MemoryWatch {
    pub fn new(limit: u64) -> Self {
        Self { limit, files: BTreeMap::new(), next: 0, round: 0 }
    }

    /// Ends the largest programs until the rest fits. Returns whether any program is running.
    pub fn look(&mut self, proc: &Proc) -> bool {
        let mut all = processes(proc);
        all.sort_unstable_by_key(|p| p.pid);
        self.look_for_files(proc, &all);
        let in_files: u64 = self.files.values().map(|file| file.bytes).sum();
        // This sum counts shared memory once per process, so it is never too low. The exact measurement is expensive
        // and only done above the limit.
        if all.iter().map(|p| resident(proc, p.thread)).sum::<u64>() + in_files > self.limit {
            self.end_the_largest(proc, &all);
        }
        !all.is_empty()
    }

    /// Searches a few processes at a time, because each may have a thousand descriptors.
    fn look_for_files(&mut self, proc: &Proc, all: &[Member]) {
        let mut looked_at = 0;
        let start = all.partition_point(|p| p.pid < self.next);
        for p in &all[start..] {
            if looked_at >= MAX_DESCRIPTORS_A_LOOK {
                self.next = p.pid;
                return;
            }
            let round = self.round;
            looked_at += proc.memory_files(p.thread, |inode, bytes| {
                let file = self.files.entry(inode).or_insert(MemoryFile { bytes, pid: p.pid, round });
                // The first process found in each round becomes the owner. After an owner closes the file, it therefore
                // has no owner for at most one round.
                if file.round != round {
                    *file = MemoryFile { bytes, pid: p.pid, round };
                }
                file.bytes = bytes;
            });
        }
        self.files.retain(|_, file| file.round == self.round);
        self.next = 0;
        self.round += 1;
    }

    fn end_the_largest(&mut self, proc: &Proc, all: &[Member]) {
        let mut in_files: BTreeMap<i32, u64> = BTreeMap::new();
        for file in self.files.values() {
            *in_files.entry(file.pid).or_default() += file.bytes;
        }
        let size = |p: &Member| own_share(proc, p.thread) + in_files.get(&p.pid).copied().unwrap_or(0);
        let mut sizes: Vec<(u64, i32)> = all.iter().map(|p| (size(p), p.pid)).collect();
        sizes.sort_unstable();
        let mut total: u64 = sizes.iter().map(|(bytes, _)| bytes).sum();
        while total > self.limit
            && let Some((bytes, pid)) = sizes.pop()
        {
            if let Some(pid) = Pid::from_raw(pid) {
                // An error means that the process, and its memory, is already gone.
                let _ = kill_process(pid, Signal::KILL);
            }
            self.files.retain(|_, file| file.pid != pid);
            total -= bytes;
        }
    }
}

/// Resident memory of a process, read through one of its threads. Shared memory is counted in full.
fn resident(proc: &Proc, thread: i32) -> u64 {
    let statm = proc.read(&format!("{thread}/statm")).unwrap_or_default();
    let pages: u64 = statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// Like [`resident`], but with only the process's proportional share of shared memory (PSS).
fn own_share(proc: &Proc, thread: i32) -> u64 {
    // A process whose executable is unreadable can't be inspected. All its memory then counts as its own.
    let Some(rollup) = proc.read(&format!("{thread}/smaps_rollup")) else { return resident(proc, thread) };
    let kib = rollup.lines().find_map(|l| l.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
