//! Limits memory, processes and processor time with control groups (version 1 or 2), where the broker may create them.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::config::LocalOptions;

/// The directory that contains all groups of brokers.
const PARENT: &str = "cobox";
/// Memory limit of boxd, so that no request can make it grow at the host's cost. Well above its buffers for exec and archives. Where the
/// workload's limit is larger, boxd gets the same: the page cache of files that it transfers is charged to it, and a file that doesn't fit
/// would be read from the disk each time.
const BOXD_MEMORY_BYTES: u64 = 512 << 20;
/// Processes that are always in a sandbox's groups and are added to its limit: init, the spawner and its two standby processes.
const RESERVED_PROCESSES: u64 = 4;
/// Attempts to create a group while other brokers remove empty parents. An attempt fails only if a removal happens within the same
/// microseconds; all attempts together take some tens of milliseconds.
const CREATE_ATTEMPTS: usize = 10_000;
/// Length of a CPU accounting period, in microseconds: the kernel's default.
const CPU_PERIOD_US: u64 = 100_000;

/// The hierarchies of this machine in which groups can be created.
#[derive(Clone, Debug, Default)]
pub struct Cgroups {
    hierarchies: Vec<Hierarchy>,
}

#[derive(Clone, Debug)]
struct Hierarchy {
    /// Parent of this broker's groups.
    parent: PathBuf,
    is_v2: bool,
    controllers: Vec<String>,
}

/// The groups of one sandbox, which the launcher enters.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CgroupMembership {
    /// The limited groups of the workloads.
    pub workloads: Vec<PathBuf>,
    /// The groups of boxd, siblings of the workloads'.
    pub boxd: Vec<PathBuf>,
}

impl Cgroups {
    /// Finds the usable hierarchies. Finding none is not an error: limits are per process then. `tag` distinguishes this broker's groups
    /// from those of other brokers.
    pub fn find(tag: &str) -> Self {
        let mut hierarchies = Vec::new();
        let (Ok(mounts), Ok(own)) = (fs::read_to_string("/proc/self/mounts"), fs::read_to_string("/proc/self/cgroup")) else {
            return Self::default();
        };
        for line in mounts.lines() {
            let mut fields = line.split(' ');
            let (Some(_), Some(at), Some(kind), Some(options)) = (fields.next(), fields.next(), fields.next(), fields.next()) else {
                continue;
            };
            let hierarchy = match kind {
                "cgroup2" => v2(Path::new(at), &own, tag),
                "cgroup" => v1(Path::new(at), options, &own, tag),
                _ => None,
            };
            hierarchies.extend(hierarchy);
        }
        Self { hierarchies }
    }

    pub fn has_controller(&self, controller: &str) -> bool {
        self.hierarchies.iter().any(|h| h.controllers.iter().any(|c| c == controller))
    }

    /// Whether memory is limited by version 1, which doesn't count the buffers of datagram sockets.
    pub fn is_memory_v1(&self) -> bool {
        self.hierarchies.iter().any(|h| !h.is_v2 && h.controllers.iter().any(|c| c == "memory"))
    }

    /// Creates a sandbox's groups and sets their limits. Idempotent.
    pub fn create(&self, name: &str, options: &LocalOptions) -> io::Result<CgroupMembership> {
        let mut made = CgroupMembership::default();
        for h in &self.hierarchies {
            let group = h.parent.join(name);
            let (workloads, boxd) = (group.join("work"), group.join("boxd"));
            create_group(&group)?;
            if h.is_v2 {
                delegate_controllers(&group, &h.controllers)?;
            }
            create_group(&workloads)?;
            create_group(&boxd)?;
            let boxd_options = LocalOptions { memory_bytes: options.memory_bytes.max(BOXD_MEMORY_BYTES), ..options.clone() };
            for controller in &h.controllers {
                limit(&workloads, controller, h.is_v2, options)?;
                if controller == "memory" {
                    limit(&boxd, controller, h.is_v2, &boxd_options)?;
                }
            }
            made.workloads.push(workloads);
            made.boxd.push(boxd);
        }
        Ok(made)
    }

    /// Bytes of files that the processes of one sandbox, or of all, have written and the kernel has not; 0 if memory is not accounted.
    pub fn unwritten_bytes(&self, name: Option<&str>) -> u64 {
        let Some(h) = self.hierarchies.iter().find(|h| h.controllers.iter().any(|c| c == "memory")) else { return 0 };
        let group = name.map_or_else(|| h.parent.clone(), |name| h.parent.join(name));
        fs::read_to_string(group.join("memory.stat")).map_or(0, |stat| unwritten(&stat, h.is_v2))
    }

    /// Removes a sandbox's groups, which must not contain processes.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        for h in &self.hierarchies {
            let group = h.parent.join(name);
            for dir in [group.join("work"), group.join("boxd"), group] {
                match fs::remove_dir(&dir) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                    _ => {}
                }
            }
        }
        self.remove_empty_parents();
        Ok(())
    }

    /// Removes this broker's parent directories if no sandbox has a group in them.
    pub fn remove_empty_parents(&self) {
        for h in &self.hierarchies {
            for dir in [Some(h.parent.as_path()), h.parent.parent()].into_iter().flatten() {
                // Fails on purpose while another sandbox or broker has groups in it.
                let _ = fs::remove_dir(dir);
            }
        }
    }
}

impl CgroupMembership {
    /// Moves the calling process, which must have a single thread, into the workloads' groups. Its children start there.
    pub fn enter_workloads(&self) -> io::Result<()> {
        open_entry_files(&self.workloads)?.iter_mut().try_for_each(|file| file.write_all(b"0"))
    }

    /// Opens the files to which boxd writes `0` to move itself into its own groups.
    pub fn open_boxd_entry_files(&self) -> io::Result<Vec<File>> {
        open_entry_files(&self.boxd)
    }
}

/// Version 1 has `tasks`, which moves a single thread. For a process with one thread this equals `cgroup.procs` but is a hundred times
/// faster, because the kernel doesn't have to block all forks.
fn open_entry_files(groups: &[PathBuf]) -> io::Result<Vec<File>> {
    let open = |group: &PathBuf| {
        let tasks = group.join("tasks");
        let path = if tasks.exists() { tasks } else { group.join("cgroup.procs") };
        File::options().write(true).open(&path).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
    };
    groups.iter().map(open).collect()
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, value).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

fn limit(group: &Path, controller: &str, is_v2: bool, options: &LocalOptions) -> io::Result<()> {
    let quota = (options.cpus * CPU_PERIOD_US as f64) as u64;
    match (controller, is_v2) {
        ("memory", true) => {
            write(&group.join("memory.max"), &options.memory_bytes.to_string())?;
            // Prevents the use of swap beyond the limit. The file is missing if the kernel doesn't account swap.
            ignore_unsupported(write(&group.join("memory.swap.max"), "0"))
        }
        ("memory", false) => {
            write(&group.join("memory.limit_in_bytes"), &options.memory_bytes.to_string())?;
            // Buffers of TCP connections have a separate counter.
            ignore_unsupported(write(&group.join("memory.kmem.tcp.limit_in_bytes"), &(options.memory_bytes / 4).to_string()))?;
            ignore_unsupported(write(&group.join("memory.memsw.limit_in_bytes"), &options.memory_bytes.to_string()))
        }
        ("pids", _) => write(&group.join("pids.max"), &(options.processes + RESERVED_PROCESSES).to_string()),
        ("cpu", true) => write(&group.join("cpu.max"), &format!("{quota} {CPU_PERIOD_US}")),
        ("cpu", false) => {
            write(&group.join("cpu.cfs_period_us"), &CPU_PERIOD_US.to_string())?;
            write(&group.join("cpu.cfs_quota_us"), &quota.to_string())
        }
        _ => Ok(()),
    }
}

/// Version 1 has a separate sum that includes child groups.
fn unwritten(memory_stat: &str, is_v2: bool) -> u64 {
    let keys = if is_v2 { ["file_dirty ", "file_writeback "] } else { ["total_dirty ", "total_writeback "] };
    let values = memory_stat.lines().filter_map(|line| keys.iter().find_map(|key| line.strip_prefix(key))?.parse::<u64>().ok());
    values.fold(0, u64::saturating_add)
}

fn ignore_unsupported(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => Ok(()),
        other => other,
    }
}

/// A hierarchy of version 1, where `memory`, `pids` and `cpu` each have their own tree.
fn v1(at: &Path, options: &str, own: &str, tag: &str) -> Option<Hierarchy> {
    let controller = ["memory", "pids", "cpu"].into_iter().find(|c| options.split(',').any(|o| o == *c))?;
    let path = own.lines().find_map(|l| {
        let mut f = l.splitn(3, ':');
        (f.nth(1)?.split(',').any(|c| c == controller)).then(|| f.next())?
    })?;
    let parent = create_parent(at, path, tag)?;
    Some(Hierarchy { parent, is_v2: false, controllers: vec![controller.to_owned()] })
}

/// The single tree of version 2, if it provides one of the needed controllers.
fn v2(at: &Path, own: &str, tag: &str) -> Option<Hierarchy> {
    let path = own.lines().find_map(|l| l.strip_prefix("0::"))?;
    let here = at.join(path.trim_start_matches('/'));
    let available = fs::read_to_string(here.join("cgroup.controllers")).ok()?;
    let controllers: Vec<String> =
        available.split_ascii_whitespace().filter(|c| ["memory", "pids", "cpu"].contains(c)).map(str::to_owned).collect();
    if controllers.is_empty() {
        return None;
    }
    // Except for the root, a group with processes can't delegate controllers. This tree is unusable then.
    write(&here.join("cgroup.subtree_control"), &enable_list(&controllers)).ok()?;
    let parent = create_parent(at, path, tag)?;
    delegate_controllers(&parent, &controllers).ok()?;
    Some(Hierarchy { parent, is_v2: true, controllers })
}

fn enable_list(controllers: &[String]) -> String {
    controllers.iter().map(|c| format!("+{c}")).collect::<Vec<_>>().join(" ")
}

/// Creates a group and its parents. Retries, because another broker that exits may remove an empty parent at the same time.
fn create_group(group: &Path) -> io::Result<()> {
    for _ in 1..CREATE_ATTEMPTS {
        match fs::create_dir_all(group) {
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) => {}
            made => return made,
        }
    }
    fs::create_dir_all(group)
}

/// Enables the controllers for the children of a group and of its parents below [`PARENT`].
fn delegate_controllers(group: &Path, controllers: &[String]) -> io::Result<()> {
    let ours: Vec<_> = group.ancestors().take_while(|d| d.iter().any(|part| part == PARENT)).collect();
    ours.into_iter().rev().try_for_each(|dir| write(&dir.join("cgroup.subtree_control"), &enable_list(controllers)))
}

/// Creates this broker's directory below the group of this process; `None` if that isn't permitted.
fn create_parent(at: &Path, own_path: &str, tag: &str) -> Option<PathBuf> {
    // Without this, a broker that was started inside another broker's group would nest one level deeper.
    let base = own_path.split("/cobox/").next().unwrap_or(own_path);
    let parent = at.join(base.trim_start_matches('/')).join(PARENT).join(tag);
    create_group(&parent).ok()?;
    Some(parent)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn unwritten_bytes_are_those_of_dirty_pages_and_of_pages_in_writeback() {
        let v1 = "cache 9\ndirty 1\nwriteback 2\ntotal_dirty 4096\ntotal_writeback 8192\n";
        let v2 = "file 9\nfile_mapped 7\nfile_dirty 4096\nfile_writeback 8192\n";
        assert_eq!((unwritten(v1, false), unwritten(v2, true), unwritten("", true)), (12288, 12288, 0));
    }

    #[test]
    fn a_group_can_be_created_while_another_broker_removes_empty_parents() {
        let top = tempfile::tempdir().unwrap();
        let hierarchy = |tag: &str| Hierarchy { parent: top.path().join(PARENT).join(tag), is_v2: false, controllers: Vec::new() };
        let (one, other) = (Cgroups { hierarchies: vec![hierarchy("one")] }, Cgroups { hierarchies: vec![hierarchy("other")] });
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    other.remove_empty_parents();
                }
            });
            let made: io::Result<()> = (0..200).try_for_each(|_| {
                let groups = one.create("sandbox", &LocalOptions::default())?;
                assert!(groups.workloads.iter().chain(&groups.boxd).all(|group| group.is_dir()));
                one.remove("sandbox")
            });
            is_over.store(true, Ordering::Relaxed);
            made.unwrap();
        });
    }
}
