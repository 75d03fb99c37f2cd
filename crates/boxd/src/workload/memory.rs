//! The memory of all programs together, held where no cgroup does it: looked at now and then, and the largest ended when it is too much.

use std::collections::BTreeMap;

use rustix::process::{Pid, Signal, kill_process};

use super::{
    proc::Proc,
    tree::{Member, processes},
};

/// Descriptors looked at in one look, besides the rest of one process's: a millisecond or two, in which init does nothing else.
const MAX_DESCRIPTORS_A_LOOK: usize = 2048;

pub struct MemoryWatch {
    limit: u64,
    /// Memory in files without a name, as far as it was looked for.
    files: BTreeMap<u64, MemoryFile>,
    /// Where the next look for such files goes on, and how many times it went around.
    next: i32,
    round: u64,
}

struct MemoryFile {
    bytes: u64,
    /// One of those who have it open.
    pid: i32,
    round: u64,
}

impl MemoryWatch {
    pub fn new(limit: u64) -> Self {
        Self { limit, files: BTreeMap::new(), next: 0, round: 0 }
    }

    /// Ends the largest programs until the rest fits. Says whether any program runs.
    pub fn look(&mut self, proc: &Proc) -> bool {
        let mut all = processes(proc);
        all.sort_unstable_by_key(|p| p.pid);
        self.look_for_files(proc, &all);
        let in_files: u64 = self.files.values().map(|file| file.bytes).sum();
        // What is shared counts for each here, so this is never too little; only past the limit is a closer look worth its price.
        if all.iter().map(|p| resident(proc, p.thread)).sum::<u64>() + in_files > self.limit {
            self.end_the_largest(proc, &all);
        }
        !all.is_empty()
    }

    /// Some processes at a time: they may have a thousand descriptors each.
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
                // Of those who have it, the first of each round: so a file that is let go of stays nobody's for a round at most.
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
                // Gone in the meantime: its memory is, too.
                let _ = kill_process(pid, Signal::KILL);
            }
            self.files.retain(|_, file| file.pid != pid);
            total -= bytes;
        }
    }
}

/// Memory of a process, by one of its threads; what it shares counted in full.
fn resident(proc: &Proc, thread: i32) -> u64 {
    let statm = proc.read(&format!("{thread}/statm")).unwrap_or_default();
    let pages: u64 = statm.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// The same, what it shares counted by its share.
fn own_share(proc: &Proc, thread: i32) -> u64 {
    // One that runs a program it can't read doesn't let itself be looked into: then all it has is its own.
    let Some(rollup) = proc.read(&format!("{thread}/smaps_rollup")) else { return resident(proc, thread) };
    let kib = rollup.lines().find_map(|l| l.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
