//! The memory of all programs together, held where no cgroup does it: looked at now and then, and the largest ended when it is too much.

use std::collections::BTreeSet;

use rustix::process::{Pid, Signal, kill_process};

use super::{proc::Proc, tree::processes};

/// Ends the largest programs until the rest fits. Says whether any program runs.
pub fn watch_memory(proc: &Proc, limit: u64) -> bool {
    let all = processes(proc);
    let mut seen = BTreeSet::new();
    let in_files: u64 = all.iter().map(|p| proc.memory_files(p.thread, &mut seen)).sum();
    // What is shared counts for each here, so this is never too little; only past the limit is a closer look worth its price.
    if all.iter().map(|p| resident(proc, p.thread)).sum::<u64>() + in_files <= limit {
        return !all.is_empty();
    }
    let mut seen = BTreeSet::new();
    let mut sizes: Vec<(u64, i32)> =
        all.iter().map(|p| (own_share(proc, p.thread) + proc.memory_files(p.thread, &mut seen), p.pid)).collect();
    sizes.sort_unstable();
    let mut total: u64 = sizes.iter().map(|(bytes, _)| bytes).sum();
    while total > limit
        && let Some((bytes, pid)) = sizes.pop()
    {
        if let Some(pid) = Pid::from_raw(pid) {
            // Gone in the meantime: its memory is, too.
            let _ = kill_process(pid, Signal::KILL);
        }
        total -= bytes;
    }
    !all.is_empty()
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
