//! The launcher's input for one sandbox, and the record of the running sandbox that the launcher leaves behind.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use cobox_protocol::control::BoxdConfig;
use serde::{Deserialize, Serialize};

use super::cgroup::CgroupMembership;

/// The launcher's input: JSON on its standard input.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LaunchSpec {
    /// The sandbox's directory: `data/` (or `disk.img`), `alive`, `run.json`, `boxd.log`.
    pub dir: PathBuf,
    pub client_socket: PathBuf,
    pub control_socket: PathBuf,
    pub boxd: PathBuf,
    /// The lower layer of its root.
    pub base: PathBuf,
    /// Snapshots between the lower layer and the sandbox's own files, topmost first.
    pub layers: Vec<PathBuf>,
    pub volumes: Vec<VolumeSpec>,
    /// Directories and files of the host, mounted read-only at the same path.
    pub view: Vec<PathBuf>,
    /// First host uid of the sandbox's range; `None` if an ordinary user runs the broker and has only one uid.
    pub uid_base: Option<u32>,
    /// The image that contains its files if the disk limit is hard.
    pub disk_image: Option<PathBuf>,
    pub hostname: String,
    pub cgroups: CgroupMembership,
    pub config: BoxdConfig,
}

/// A volume to be mounted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VolumeSpec {
    pub files: VolumeFiles,
    /// Mount point in the sandbox.
    pub path: PathBuf,
    pub read_only: bool,
}

/// The storage of a volume. Files have the IDs that sandboxes see: 0 is a sandbox's root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeFiles {
    Directory(PathBuf),
    /// A filesystem image of the volume's size, where images are supported.
    Image(PathBuf),
}

/// Number of IDs in a sandbox's range. The last is boxd's.
pub const UID_RANGE: u32 = 65_536;

/// Identifies a running sandbox's first process, stored in `run.json`. The kernel reuses PIDs, so a PID alone is not enough.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRecord {
    pub pid: i32,
    /// In clock ticks since boot, field 22 of /proc/pid/stat.
    pub start_time: u64,
    pub boot_id: String,
}

impl RunRecord {
    pub fn of(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, start_time: start_time(pid)?, boot_id: boot_id()? })
    }

    /// Whether the recorded process still runs.
    pub fn is_alive(&self) -> bool {
        boot_id().is_ok_and(|b| b == self.boot_id) && start_time(self.pid).is_ok_and(|t| t == self.start_time)
    }

    /// Whether the recorded process still exists, possibly as a zombie, and has this parent.
    pub fn is_child_of(&self, parent: u32) -> bool {
        let is_same = |stat: ProcessStat| stat.start_time == self.start_time && stat.parent == parent;
        boot_id().is_ok_and(|b| b == self.boot_id) && process_stat(self.pid).is_ok_and(is_same)
    }
}

impl RunRecord {
    /// Writes the record atomically, because a broker may read it at any time. It isn't synced to disk: after a power failure it matches no
    /// process anyway.
    pub fn write_to(&self, dir: &Path) -> io::Result<()> {
        let temporary = dir.join("run.json.new");
        fs::write(&temporary, serde_json::to_vec(self)?)?;
        fs::rename(temporary, dir.join("run.json"))
    }
}

fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// The needed fields of /proc/pid/stat.
struct ProcessStat {
    is_zombie: bool,
    parent: u32,
    /// Time of the start, in clock ticks since boot.
    start_time: u64,
}

fn start_time(pid: i32) -> io::Result<u64> {
    let stat = process_stat(pid)?;
    if stat.is_zombie { Err(io::ErrorKind::NotFound.into()) } else { Ok(stat.start_time) }
}

fn process_stat(pid: i32) -> io::Result<ProcessStat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may contain any character, so fields are counted from the last parenthesis.
    let parse = || {
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let is_zombie = *fields.first()? == "Z";
        Some(ProcessStat { is_zombie, parent: fields.get(1)?.parse().ok()?, start_time: fields.get(19)?.parse().ok()? })
    };
    parse().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed /proc/pid/stat"))
}
