//! The memory of all programs together, held where no cgroup does it: looked at now and then, and the largest ended when it is too much.

use std::{collections::BTreeSet, fs};

use rustix::process::{Pid, Signal, kill_process};

use super::tree::processes;

/// Ends the largest programs until the rest fits. Says whether any program runs.
pub fn watch_memory(limit: u64) -> bool {
    let all = processes();
    let mut seen = BTreeSet::new();
    let in_files: u64 = all.iter().map(|p| memory_files(p.pid, &mut seen)).sum();
    // What is shared counts for each here, so this is never too little; only past the limit is a closer look worth its price.
    let page = rustix::param::page_size() as u64;
    let resident = |pid: i32| {
        Some(fs::read_to_string(format!("/proc/{pid}/statm")).ok()?.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()? * page)
    };
    if all.iter().filter_map(|p| resident(p.pid)).sum::<u64>() + in_files <= limit {
        return !all.is_empty();
    }
    let mut seen = BTreeSet::new();
    let mut sizes: Vec<(u64, i32)> = all.iter().map(|p| (own_share(p.pid) + memory_files(p.pid, &mut seen), p.pid)).collect();
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

/// Memory of a process, what it shares counted by its share.
fn own_share(pid: i32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let kib = rollup.lines().find_map(|l| l.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Memory in files without a name that a process holds open, each file once.
fn memory_files(pid: i32, seen: &mut BTreeSet<u64>) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries
        .filter(|e| fs::read_link(e.path()).is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"/memfd:")))
        .filter_map(|e| fs::metadata(e.path()).ok())
        .filter(|m| seen.insert(m.ino()))
        .map(|m| m.blocks() * 512)
        .sum()
}
