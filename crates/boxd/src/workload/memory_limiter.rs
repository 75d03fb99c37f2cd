//! Limits the total memory of all programs where no cgroup does: init checks it periodically and ends the largest
//! programs when it exceeds the limit.

use std::collections::BTreeMap;

use rustix::process::{Pid, Signal, kill_process};

use super::{
    process_tree::{LiveProcess, processes},
    procfs::ProcFs,
};

/// Descriptors inspected per check; the process that reaches this number is still inspected completely. That takes a
/// millisecond or two, in which init does nothing else.
const MAX_DESCRIPTORS_PER_CHECK: usize = 2048;

pub struct MemoryLimiter {
    limit: u64,
    /// Memory in unnamed files (memfd), as far as they have been found.
    files: BTreeMap<u64, MemoryFile>,
    /// The pid at which the next search for such files continues, and the number of completed rounds.
    next_pid: i32,
    round: u64,
}

struct MemoryFile {
    bytes: u64,
    /// One of the processes that have it open.
    pid: i32,
    round: u64,
}

impl MemoryLimiter {
    pub fn new(limit: u64) -> Self {
        Self { limit, files: BTreeMap::new(), next_pid: 0, round: 0 }
    }

    /// Ends the largest programs until the rest fits. Returns whether any program is running.
    pub fn enforce(&mut self, proc: &ProcFs) -> bool {
        let mut processes_alive = processes(proc);
        processes_alive.sort_unstable_by_key(|process| process.pid);
        self.scan_memory_files(proc, &processes_alive);
        let in_files: u64 = self.files.values().map(|file| file.bytes).sum();
        // This sum counts shared memory once per process, so it is never too low. The exact measurement is expensive
        // and only done above the limit.
        if processes_alive.iter().map(|process| resident_bytes(proc, process.thread)).sum::<u64>() + in_files > self.limit {
            self.kill_largest(proc, &processes_alive);
        }
        !processes_alive.is_empty()
    }

    /// Searches a few processes at a time, because each may have a thousand descriptors.
    fn scan_memory_files(&mut self, proc: &ProcFs, processes_alive: &[LiveProcess]) {
        let mut inspected = 0;
        let start = processes_alive.partition_point(|process| process.pid < self.next_pid);
        for process in &processes_alive[start..] {
            if inspected >= MAX_DESCRIPTORS_PER_CHECK {
                self.next_pid = process.pid;
                return;
            }
            let round = self.round;
            inspected += proc.memory_files(process.thread, |inode, bytes| {
                let file = self.files.entry(inode).or_insert(MemoryFile { bytes, pid: process.pid, round });
                // The first process found in each round becomes the owner. After an owner closes the file, it therefore
                // has no owner for at most one round.
                if file.round != round {
                    *file = MemoryFile { bytes, pid: process.pid, round };
                }
                file.bytes = bytes;
            });
        }
        self.files.retain(|_, file| file.round == self.round);
        self.next_pid = 0;
        self.round += 1;
    }

    fn kill_largest(&mut self, proc: &ProcFs, processes_alive: &[LiveProcess]) {
        let mut in_files: BTreeMap<i32, u64> = BTreeMap::new();
        for file in self.files.values() {
            *in_files.entry(file.pid).or_default() += file.bytes;
        }
        let size = |process: &LiveProcess| proportional_bytes(proc, process.thread) + in_files.get(&process.pid).copied().unwrap_or(0);
        let mut sizes: Vec<(u64, i32)> = processes_alive.iter().map(|process| (size(process), process.pid)).collect();
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
fn resident_bytes(proc: &ProcFs, thread: i32) -> u64 {
    let statm = proc.read(&format!("{thread}/statm")).unwrap_or_default();
    let pages: u64 = statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// Like [`resident_bytes`], but with only the process's proportional share of shared memory (PSS).
fn proportional_bytes(proc: &ProcFs, thread: i32) -> u64 {
    // A process whose executable is unreadable can't be inspected. All its memory then counts as its own.
    let Some(rollup) = proc.read(&format!("{thread}/smaps_rollup")) else { return resident_bytes(proc, thread) };
    let kib = rollup.lines().find_map(|l| l.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
