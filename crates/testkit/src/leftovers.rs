//! What a sandbox could leave on the machine: processes, mounts, control groups, directories, loop devices, sockets.

use std::{collections::BTreeSet, fs, path::Path};

/// A look at everything that carries a sandbox's mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftovers {
    pub processes: BTreeSet<String>,
    pub mounts: usize,
    pub cgroups: BTreeSet<String>,
    pub directories: BTreeSet<String>,
    pub sockets: BTreeSet<String>,
    pub loop_devices: BTreeSet<String>,
    pub network_namespaces: usize,
}

impl Leftovers {
    /// Waits until nothing is there that wasn't in an earlier look; shows what is, if that doesn't come.
    pub async fn wait_until_none_since(earlier: &Self, data_dir: &Path) {
        let deadline = tokio::time::Instant::now() + crate::PATIENCE;
        loop {
            let now = Self::of(data_dir);
            if now.is_within(earlier) {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "something was left behind\nbefore: {earlier:#?}\nafter: {now:#?}");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    fn is_within(&self, earlier: &Self) -> bool {
        self.processes.is_subset(&earlier.processes)
            && self.mounts <= earlier.mounts
            && self.cgroups.is_subset(&earlier.cgroups)
            && self.directories.is_subset(&earlier.directories)
            && self.sockets.is_subset(&earlier.sockets)
            && self.loop_devices.is_subset(&earlier.loop_devices)
            && self.network_namespaces <= earlier.network_namespaces
    }

    /// Of the broker with this data directory.
    pub fn of(data_dir: &Path) -> Self {
        let sandboxes: BTreeSet<String> = names(&data_dir.join("sandboxes")).into_iter().chain(names(&data_dir.join("trash"))).collect();
        let image_dir = data_dir.to_string_lossy().into_owned();
        Self {
            processes: boxd_processes(),
            mounts: fs::read_to_string("/proc/self/mounts").map_or(0, |m| m.lines().count()),
            cgroups: cgroups(),
            directories: sandboxes,
            sockets: sockets(),
            loop_devices: loop_devices(&image_dir),
            network_namespaces: network_namespaces(),
        }
    }
}

fn names(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
}

fn pids() -> impl Iterator<Item = String> {
    names(Path::new("/proc")).into_iter().filter(|n| n.bytes().all(|b| b.is_ascii_digit()))
}

/// Every process of any sandbox on the machine, dead and unreaped ones included.
fn boxd_processes() -> BTreeSet<String> {
    pids()
        .filter(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            // In a pid namespace below the machine's: it has more than one number.
            status.lines().any(|l| l.strip_prefix("NSpid:").is_some_and(|n| n.split_ascii_whitespace().count() > 1))
                || status.starts_with("Name:\tboxd")
        })
        .collect()
}

fn cgroups() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut pending = vec![Path::new("/sys/fs/cgroup").to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                if entry.file_name().to_string_lossy().starts_with("sb_") {
                    found.insert(entry.path().to_string_lossy().into_owned());
                }
                pending.push(entry.path());
            }
        }
    }
    found
}

fn sockets() -> BTreeSet<String> {
    let listed = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    listed.lines().filter_map(|l| l.rsplit(' ').next()).filter(|p| p.contains("/sb_")).map(str::to_owned).collect()
}

fn loop_devices(under: &str) -> BTreeSet<String> {
    names(Path::new("/sys/block"))
        .into_iter()
        .filter_map(|n| fs::read_to_string(format!("/sys/block/{n}/loop/backing_file")).ok())
        .filter(|file| file.starts_with(under))
        .collect()
}

fn network_namespaces() -> usize {
    let all: BTreeSet<_> = pids().filter_map(|pid| fs::read_link(format!("/proc/{pid}/ns/net")).ok()).collect();
    all.len()
}
