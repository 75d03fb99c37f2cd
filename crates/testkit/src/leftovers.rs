//! Resources that a broker and its sandboxes could leave on the machine: processes, mounts, control groups, directories, sockets, loop
//! devices.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::TestBroker;

/// All resources on the machine that belong to one broker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Sandbox processes, which have a file of the broker open or are in its control groups, and unreaped children of the broker.
    pub processes: BTreeSet<String>,
    pub network_namespaces: BTreeSet<String>,
    pub mounts: BTreeSet<String>,
    pub cgroups: BTreeSet<PathBuf>,
    pub directories: BTreeSet<String>,
    pub sockets: BTreeSet<String>,
    pub loop_devices: BTreeSet<String>,
}

impl Leftovers {
    pub fn of(broker: &TestBroker) -> Self {
        let data_dir = fs::canonicalize(broker.data_dir()).expect("the data directory");
        let text = data_dir.to_string_lossy().into_owned();
        let (tag, cgroups) = (tag(&data_dir), cgroups(&data_dir));
        let processes = processes(&text, &cgroups, broker.running_pid());
        Self {
            network_namespaces: processes
                .iter()
                .filter_map(|pid| fs::read_link(format!("/proc/{pid}/ns/net")).ok())
                .map(|l| l.to_string_lossy().into_owned())
                .collect(),
            processes,
            mounts: lines_with("/proc/self/mounts", &text),
            cgroups,
            directories: names(&data_dir.join("sandboxes")).into_iter().chain(names(&data_dir.join("trash"))).collect(),
            sockets: lines_with("/proc/net/unix", &format!("/{tag}/")),
            loop_devices: names(Path::new("/sys/block"))
                .into_iter()
                .filter(|n| fs::read_to_string(format!("/sys/block/{n}/loop/backing_file")).is_ok_and(|file| file.starts_with(&text)))
                .collect(),
        }
    }

    /// Waits until nothing is left; panics with the list of leftovers after [`crate::EVENT_TIMEOUT`].
    pub async fn wait_for_none(broker: &TestBroker) {
        let deadline = tokio::time::Instant::now() + crate::EVENT_TIMEOUT;
        loop {
            let now = Self::of(broker);
            if now == Self::default() {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "the test left resources on the machine: {now:#?}\n{}", now.described());
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }
}

impl Leftovers {
    /// Description of the processes for the panic message.
    fn described(&self) -> String {
        let stat = |pid: &String| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_else(|e| format!("{pid}: {e}"));
        self.processes.iter().map(stat).collect()
    }
}

/// Tag in the names of the local provider's control groups and sockets.
fn tag(data_dir: &Path) -> String {
    Sha256::digest(data_dir.as_os_str().as_encoded_bytes())[..6].iter().map(|b| format!("{b:02x}")).collect()
}

fn names(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
}

fn lines_with(file: &str, text: &str) -> BTreeSet<String> {
    fs::read_to_string(file).unwrap_or_default().lines().filter(|l| l.contains(text)).map(str::to_owned).collect()
}

/// Control groups of this broker's sandboxes, the innermost last.
pub fn cgroups(data_dir: &Path) -> BTreeSet<PathBuf> {
    let tag = tag(data_dir);
    let mut found = BTreeSet::new();
    let mut pending = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
            if entry.path().iter().any(|part| part == tag.as_str()) {
                found.insert(entry.path());
            }
            pending.push(entry.path());
        }
    }
    found
}

fn processes(data_dir: &str, cgroups: &BTreeSet<PathBuf>, broker: Option<u32>) -> BTreeSet<String> {
    let mut found: BTreeSet<String> = cgroups
        .iter()
        .filter_map(|g| fs::read_to_string(g.join("cgroup.procs")).ok())
        .flat_map(|pids| pids.lines().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    for pid in names(Path::new("/proc")).into_iter().filter(|n| n.bytes().all(|b| b.is_ascii_digit())) {
        if Some(pid.as_str()) == broker.map(|b| b.to_string()).as_deref() {
            continue;
        }
        let holds_a_file = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(data_dir)));
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let mut fields = rest.split_ascii_whitespace();
        let is_unreaped = fields.next() == Some("Z") && broker.is_some() && fields.next() == broker.map(|b| b.to_string()).as_deref();
        if holds_a_file || is_unreaped {
            found.insert(pid);
        }
    }
    found
}

/// Removes the control groups and sockets of a dead broker, so that a test that kills its broker leaves nothing on the machine.
pub fn sweep(data_dir: &Path) {
    let Ok(data_dir) = fs::canonicalize(data_dir) else { return };
    for group in cgroups(&data_dir).iter().rev() {
        for _ in 0..200 {
            match fs::remove_dir(group) {
                // Its last process has not ended yet.
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy => std::thread::sleep(std::time::Duration::from_millis(5)),
                _ => break,
            }
        }
    }
    let _ = fs::remove_dir_all(Path::new("/run/cobox").join(tag(&data_dir)));
}
