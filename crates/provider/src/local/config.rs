//! What an operator may set about local sandboxes.

use std::path::PathBuf;

use cobox_protocol::control::DataplaneLimits;
use serde::{Deserialize, Serialize};

/// Where everything of the local provider is and what a sandbox may use.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// The broker's data directory; sandboxes are below it.
    pub data_dir: PathBuf,
    /// The static boxd binary.
    pub boxd: PathBuf,
    /// The program that is run as `PROGRAM __launch`: this one, unless a test has another.
    pub launcher: PathBuf,
    pub options: LocalOptions,
}

/// The `[local]` table of the configuration file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LocalOptions {
    pub root: RootSource,
    pub user: WorkloadUser,
    /// Memory of all a sandbox's programs together, where a cgroup can hold it; of each one, where not.
    pub memory_bytes: u64,
    /// Processes and threads at once.
    pub processes: u64,
    /// Processors' worth of time: 1.5 is one and a half.
    pub cpus: f64,
    /// What a sandbox's files may take on disk.
    pub disk_bytes: u64,
    pub open_files: u64,
    /// More of the host to show, read-only, at the same place.
    pub view: Vec<PathBuf>,
    pub disk: DiskLimit,
    /// The `[local.dataplane]` table.
    pub dataplane: DataplaneLimits,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self {
            root: RootSource::Host,
            user: WorkloadUser::User,
            memory_bytes: 2 << 30,
            processes: 512,
            cpus: 2.0,
            disk_bytes: 8 << 30,
            open_files: 4096,
            view: Vec::new(),
            disk: DiskLimit::Auto,
            dataplane: DataplaneLimits::default(),
        }
    }
}

impl LocalOptions {
    /// Says what can't be, before a sandbox is tried with it.
    pub fn validate(&self) -> Result<(), String> {
        let least = |name: &str, value: u64, least: u64| {
            if value < least { Err(format!("local.{name} is {value}, but at least {least} is needed")) } else { Ok(()) }
        };
        least("memory_bytes", self.memory_bytes, 16 << 20)?;
        least("processes", self.processes, 8)?;
        least("disk_bytes", self.disk_bytes, 16 << 20)?;
        least("open_files", self.open_files, 64)?;
        if !(0.01..=1024.0).contains(&self.cpus) {
            return Err(format!("local.cpus is {}, but it must be between 0.01 and 1024", self.cpus));
        }
        for path in &self.view {
            if !path.is_absolute() {
                return Err(format!("local.view: {} is not an absolute path", path.display()));
            }
            if let Some(taken) = ["/usr", "/proc", "/sys", "/dev", "/tmp"].into_iter().find(|taken| path.starts_with(taken)) {
                return Err(format!("local.view: {} is below {taken}, which a sandbox has already", path.display()));
            }
        }
        if let RootSource::Rootfs(path) = &self.root
            && !path.is_absolute()
        {
            return Err(format!("local.root: {} is not an absolute path", path.display()));
        }
        self.dataplane.validate().map_err(|e| format!("local.{e}"))
    }
}

/// What a sandbox's `/` starts as.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RootSource {
    /// A read-only view of this machine's programs and libraries; everything else fresh.
    Host,
    /// A root filesystem: a directory, or a tar (`.tar`, `.tar.zst`) that is unpacked once.
    Rootfs(PathBuf),
}

/// Who programs run as, inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkloadUser {
    /// An ordinary user, uid 1000.
    User,
    /// Uid 0, without any capability.
    Root,
}

impl WorkloadUser {
    pub const fn id(self) -> u32 {
        match self {
            WorkloadUser::User => 1000,
            WorkloadUser::Root => 0,
        }
    }
    pub const fn name(self) -> &'static str {
        match self {
            WorkloadUser::User => "user",
            WorkloadUser::Root => "root",
        }
    }
    pub const fn home(self) -> &'static str {
        match self {
            WorkloadUser::User => "/home/user",
            WorkloadUser::Root => "/root",
        }
    }
}

/// How the disk limit is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskLimit {
    /// Hard where this machine can, else soft.
    Auto,
    /// A filesystem image of that size per sandbox; refuses to start where that can't be.
    Hard,
    /// Files are measured now and then; past the limit writers are stopped.
    Soft,
}
