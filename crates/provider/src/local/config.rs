//! What an operator may set about local sandboxes.

use std::{collections::BTreeMap, path::PathBuf};

use cobox_protocol::{control::DataplaneLimits, resources::Resources};
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
    /// What must stay free on the disk that holds the data directory: below this no sandbox may write and no new one is made.
    /// Without it a twentieth of that disk, at most 1 GiB.
    pub reserve_bytes: Option<u64>,
    pub open_files: u64,
    /// More of the host to show, read-only, at the same place.
    pub view: Vec<PathBuf>,
    pub disk: DiskLimit,
    /// The `[local.images]` table: what templates and snapshots may name as an image, and the root filesystem that it stands for, or
    /// [`HOST`].
    pub images: BTreeMap<String, PathBuf>,
    /// The `[local.most]` table.
    pub most: Most,
    /// The `[local.dataplane]` table.
    pub dataplane: DataplaneLimits,
}

/// The most that a template or a request may give one sandbox or volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Most {
    pub memory_bytes: u64,
    pub cpus: f64,
    pub disk_bytes: u64,
    pub processes: u64,
    pub volume_bytes: u64,
}

impl Default for Most {
    /// What clients of hosted sandboxes ask for without thinking fits; ten of them still fit in a server.
    fn default() -> Self {
        Self { memory_bytes: 8 << 30, cpus: 8.0, disk_bytes: 64 << 30, processes: 4096, volume_bytes: 64 << 30 }
    }
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
            reserve_bytes: None,
            open_files: 4096,
            view: Vec::new(),
            disk: DiskLimit::Auto,
            images: BTreeMap::new(),
            most: Most::default(),
            dataplane: DataplaneLimits::default(),
        }
    }
}

/// An image that is this machine's programs, as sandboxes have them where nothing is said.
pub const HOST: &str = "host";
/// Least memory of a sandbox, in bytes: a shell and a few programs.
pub const MIN_MEMORY_BYTES: u64 = 16 << 20;
/// Least processes of a sandbox.
pub const MIN_PROCESSES: u64 = 8;
/// Smallest disk of a sandbox or a volume, in bytes: a filesystem's own structures fit well.
pub const MIN_DISK_BYTES: u64 = 16 << 20;

impl LocalOptions {
    /// These, with what a sandbox was given instead.
    pub fn with(&self, resources: &Resources) -> Self {
        Self {
            memory_bytes: resources.memory_bytes.unwrap_or(self.memory_bytes),
            processes: resources.processes.unwrap_or(self.processes),
            cpus: resources.cpus.map_or(self.cpus, |c| c.count()),
            disk_bytes: resources.disk_bytes.unwrap_or(self.disk_bytes),
            ..self.clone()
        }
    }

    /// Whether a sandbox may have this much.
    pub fn check(&self, resources: &Resources) -> Result<(), String> {
        let within = |name: &str, value: Option<u64>, least: u64, most: u64| match value {
            Some(value) if value < least => Err(format!("resources.{name}: {value} is too little; at least {least} is needed")),
            Some(value) if value > most => Err(format!("resources.{name}: {value} is too much; at most {most} can be had here")),
            _ => Ok(()),
        };
        within("memory_bytes", resources.memory_bytes, MIN_MEMORY_BYTES, self.most.memory_bytes.max(self.memory_bytes))?;
        within("disk_bytes", resources.disk_bytes, MIN_DISK_BYTES, self.most.disk_bytes.max(self.disk_bytes))?;
        within("processes", resources.processes, MIN_PROCESSES, self.most.processes.max(self.processes))?;
        let most = self.most.cpus.max(self.cpus);
        match resources.cpus.map(|c| c.count()) {
            Some(count) if count < 0.01 => Err(format!("resources.cpus: {count} is too little; at least 0.01 is needed")),
            Some(count) if count > most => Err(format!("resources.cpus: {count} is too much; at most {most} can be had here")),
            _ => Ok(()),
        }
    }

    /// Says what can't be, before a sandbox is tried with it.
    pub fn validate(&self) -> Result<(), String> {
        let least = |name: &str, value: u64, least: u64| {
            if value < least { Err(format!("local.{name} is {value}, but at least {least} is needed")) } else { Ok(()) }
        };
        least("memory_bytes", self.memory_bytes, MIN_MEMORY_BYTES)?;
        least("processes", self.processes, MIN_PROCESSES)?;
        least("disk_bytes", self.disk_bytes, MIN_DISK_BYTES)?;
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
        for (name, path) in &self.images {
            if name.is_empty() || !(path.is_absolute() || path.as_os_str() == HOST) {
                return Err(format!("local.images: `{name}` must have a name, and an absolute path or `{HOST}`"));
            }
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
