//! Configuration of the local provider.

use std::{collections::BTreeMap, path::PathBuf};

use cobox_protocol::{control::DataplaneLimits, resources::Resources};
use serde::{Deserialize, Serialize};

/// Paths and options of the local provider.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// The broker's data directory, which contains the sandboxes.
    pub data_dir: PathBuf,
    /// The static boxd binary.
    pub boxd: PathBuf,
    /// The program that is run as `PROGRAM __launch`: the current executable, except in tests.
    pub launcher: PathBuf,
    pub options: LocalOptions,
}

/// The `[local]` table of the configuration file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LocalOptions {
    pub root: RootSource,
    pub user: WorkloadUser,
    /// Memory of all programs of a sandbox together, or of each one where no cgroup can enforce it.
    pub memory_bytes: u64,
    /// Maximum number of processes and threads.
    pub processes: u64,
    /// CPU time in processors: 1.5 is one and a half.
    pub cpus: f64,
    /// Maximum disk usage of a sandbox's files.
    pub disk_bytes: u64,
    /// Space that must stay free on the disk of the data directory: below this, sandboxes may not write and no new ones are created.
    /// The default is a twentieth of that disk, at most 1 GiB.
    pub reserve_bytes: Option<u64>,
    pub open_files: u64,
    /// Additional host paths that sandboxes see, read-only and at the same path.
    pub view: Vec<PathBuf>,
    pub disk: DiskLimit,
    /// The `[local.images]` table: the image names that templates and snapshots may use, each with its root filesystem or [`HOST_IMAGE`].
    pub images: BTreeMap<String, PathBuf>,
    /// The `[local.most]` table.
    #[serde(rename = "most")]
    pub max_resources: MaxResources,
    /// The `[local.dataplane]` table.
    pub dataplane: DataplaneLimits,
}

/// The maximum resources that a template or a request may give one sandbox or volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MaxResources {
    pub memory_bytes: u64,
    pub cpus: f64,
    pub disk_bytes: u64,
    pub processes: u64,
    pub volume_bytes: u64,
}

impl Default for MaxResources {
    /// Allows the usual requests of clients of hosted sandboxes; ten such sandboxes fit on a server.
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
            max_resources: MaxResources::default(),
            dataplane: DataplaneLimits::default(),
        }
    }
}

/// The image that consists of the host's programs, which sandboxes use by default.
pub const HOST_IMAGE: &str = "host";
/// Minimum memory of a sandbox, in bytes: a shell and a few programs.
pub const MIN_MEMORY_BYTES: u64 = 16 << 20;
/// Minimum process limit of a sandbox.
pub const MIN_PROCESSES: u64 = 8;
/// Minimum disk size of a sandbox or volume, in bytes: well above a filesystem's own structures.
pub const MIN_DISK_BYTES: u64 = 16 << 20;

impl LocalOptions {
    /// These options with the resources of one sandbox applied.
    pub fn with_resources(&self, resources: &Resources) -> Self {
        Self {
            memory_bytes: resources.memory_bytes.unwrap_or(self.memory_bytes),
            processes: resources.processes.unwrap_or(self.processes),
            cpus: resources.cpus.map_or(self.cpus, |c| c.count()),
            disk_bytes: resources.disk_bytes.unwrap_or(self.disk_bytes),
            ..self.clone()
        }
    }

    /// Checks whether a sandbox may have these resources.
    pub fn check_resources(&self, resources: &Resources) -> Result<(), String> {
        let within = |name: &str, value: Option<u64>, min: u64, max: u64| match value {
            Some(value) if value < min => Err(format!("resources.{name}: {value} is too little; the minimum is {min}")),
            Some(value) if value > max => Err(format!("resources.{name}: {value} is too much; the maximum is {max} here")),
            _ => Ok(()),
        };
        within("memory_bytes", resources.memory_bytes, MIN_MEMORY_BYTES, self.max_resources.memory_bytes.max(self.memory_bytes))?;
        within("disk_bytes", resources.disk_bytes, MIN_DISK_BYTES, self.max_resources.disk_bytes.max(self.disk_bytes))?;
        within("processes", resources.processes, MIN_PROCESSES, self.max_resources.processes.max(self.processes))?;
        let max = self.max_resources.cpus.max(self.cpus);
        match resources.cpus.map(|c| c.count()) {
            Some(count) if count < 0.01 => Err(format!("resources.cpus: {count} is too little; the minimum is 0.01")),
            Some(count) if count > max => Err(format!("resources.cpus: {count} is too much; the maximum is {max} here")),
            _ => Ok(()),
        }
    }

    /// Checks all options, so that errors are reported before the first sandbox is started.
    pub fn validate(&self) -> Result<(), String> {
        let least = |name: &str, value: u64, min: u64| {
            if value < min { Err(format!("local.{name} is {value}, but at least {min} is needed")) } else { Ok(()) }
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
                return Err(format!("local.view: {} is at or below {taken}, which sandboxes have already", path.display()));
            }
        }
        if let RootSource::Rootfs(path) = &self.root
            && !path.is_absolute()
        {
            return Err(format!("local.root: {} is not an absolute path", path.display()));
        }
        for (name, path) in &self.images {
            if name.is_empty() || !(path.is_absolute() || path.as_os_str() == HOST_IMAGE) {
                return Err(format!("local.images: `{name}` must be a non-empty name with an absolute path or `{HOST_IMAGE}`"));
            }
        }
        self.dataplane.validate().map_err(|e| format!("local.{e}"))
    }
}

/// The source of a sandbox's root filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RootSource {
    /// A read-only view of the host's programs and libraries; everything else is new.
    Host,
    /// A directory, or an archive (`.tar`, `.tar.zst`) that is unpacked once.
    Rootfs(PathBuf),
}

/// The user of programs inside a sandbox.
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

/// How the disk limit is enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskLimit {
    /// Hard where this machine supports it, otherwise soft.
    Auto,
    /// A filesystem image of the limit's size per sandbox. The broker doesn't start where this isn't supported.
    Hard,
    /// Files are measured periodically; above the limit, programs that write are stopped.
    Soft,
}
