//! The local provider: each sandbox is a process tree in its own namespaces on this machine, without a daemon or a container image.

mod cgroup;
mod config;
mod disk_image;
mod disk_limit;
mod doctor;
mod fsck;
mod launch;
mod launch_spec;
mod liveness;
mod lower_layer;
mod prepare;
mod root_mount;
mod root_resolver;
mod snapshot_copy;
mod snapshots;
mod socket_dir;
mod staging;
mod temporary_access;
mod untrusted_tree;
mod unwritten_limit;
mod volumes;

pub use config::{DiskLimit, LocalConfig, LocalOptions, MaxResources, RootSource, WorkloadUser};
pub use doctor::{Check, CheckStatus, doctor};
pub use launch::launch_main;

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use async_trait::async_trait;
use cgroup::Cgroups;
use cobox_kernel::{LocalSocketStream, Peer};
use cobox_protocol::{SandboxId, SnapshotId, VolumeId, control::ControlState};
use launch_spec::{LaunchSpec, UID_RANGE};
use lower_layer::LowerLayer;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use snapshots::Snapshots;
use tokio::{
    io::AsyncWriteExt,
    net::UnixStream,
    process::Command,
    sync::{OnceCell, Semaphore},
};
use unwritten_limit::UnwrittenLimit;
use volumes::Volumes;

use crate::{
    BoxdSocket, BoxedStream, DiskUsage, FailedDisk, HostDisk, ImageUsage, Provider, ProviderError, ProviderFeatures, ProviderSandbox,
    SandboxSpec, WrittenFiles,
    private_dir::{private_data_dir, private_dir},
};

/// First host uid for sandboxes, above the ranges that account tools and other container engines assign.
const FIRST_UID: u32 = 0x7000_0000;
/// Number of uid ranges from [`FIRST_UID`] to the largest uid, and so of sandboxes with a range of their own.
const UID_SLOTS: u32 = (u32::MAX - FIRST_UID) / UID_RANGE;
/// Name prefix of an empty file whose name ends in the sandbox's slot: creating it is atomic, unlike writing a file.
const UID_SLOT_PREFIX: &str = "uid_slot.";
/// A start takes milliseconds; a launcher that exceeds this limit hangs.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of concurrent launchers: more would only compete for processors, and the last would time out.
fn concurrent_launches() -> usize {
    const PER_PROCESSOR: usize = 4;
    std::thread::available_parallelism().map_or(1, usize::from) * PER_PROCESSOR
}
/// The unwritten data of sandboxes is limited while less than so many times the reserve is free.
const LOW_SPACE_FACTOR: u64 = 4;
/// It is also limited while less than this is free above the reserve: a program that writes to mapped memory can dirty so much between
/// two checks on a busy machine.
const BURST_BYTES: u64 = 2 << 30;
/// Unit of `st_blocks`, in bytes.
const STAT_BLOCK: u64 = 512;
/// Maximum length of the launcher's error message, in bytes.
const MAX_LAUNCHER_OUTPUT: usize = 4096;

pub struct LocalProvider {
    config: LocalConfig,
    default_root: LowerLayer,
    /// Other lower layers by name, each prepared at its first use.
    other_layers: Mutex<HashMap<String, Arc<OnceCell<LowerLayer>>>>,
    layers_dir: PathBuf,
    /// Whether disk limits are hard: each sandbox has a filesystem image of its size.
    is_disk_hard: bool,
    snapshots: Snapshots,
    volumes: Volumes,
    cgroups: Cgroups,
    sandboxes: PathBuf,
    trash: PathBuf,
    sockets: PathBuf,
    is_root: bool,
    /// The sandbox that owns each uid range.
    uid_slots: Mutex<BTreeMap<u32, SandboxId>>,
    measured: Arc<Mutex<HashMap<PathBuf, DiskMeasurement>>>,
    unwritten_limit: Arc<Mutex<UnwrittenLimit>>,
    launches: Semaphore,
}

/// The last measured size of the files of a sandbox or a volume.
#[derive(Default)]
struct DiskMeasurement {
    used: u64,
    is_measuring: bool,
}

impl LocalProvider {
    /// Prepares directories and the default lower layer, and finishes removals that an earlier process left incomplete.
    pub fn new(config: LocalConfig) -> anyhow::Result<Self> {
        config.options.validate().map_err(anyhow::Error::msg)?;
        let is_root = rustix::process::geteuid().is_root();
        fs::metadata(&config.boxd)
            .with_context(|| format!("boxd is not at {}: build it, or set its path with COBOX_BOXD", config.boxd.display()))?;
        private_data_dir(&config.data_dir)?;
        let data_dir = fs::canonicalize(&config.data_dir)?;
        let tag = hex::encode(&Sha256::digest(data_dir.as_os_str().as_encoded_bytes())[..6]);
        let (sandboxes, trash, layers_dir) = (data_dir.join("sandboxes"), data_dir.join("trash"), data_dir.join("base"));
        for dir in [&sandboxes, &trash] {
            private_dir(dir)?;
        }
        lower_layer::restrict_dir(&layers_dir)?;
        lower_layer::remove_unfinished(&layers_dir).context("removing incomplete root filesystems")?;
        let default_root =
            lower_layer::prepare(&layers_dir, &config.options.root, &config.options, is_root).context("preparing the sandboxes' root")?;
        let is_disk_hard = match (config.options.disk, disk_limit::check_hard_limit_support(is_root)) {
            (DiskLimit::Soft, _) | (DiskLimit::Auto, Err(_)) => false,
            (DiskLimit::Auto | DiskLimit::Hard, Ok(())) => {
                disk_limit::template(&layers_dir, config.options.disk_bytes)?;
                true
            }
            (DiskLimit::Hard, Err(why)) => anyhow::bail!("local.disk = \"hard\" is not possible here: {why}"),
        };
        let snapshots = Snapshots::open(data_dir.join("snapshots"))?;
        let images = is_disk_hard.then(|| layers_dir.clone());
        let volumes = Volumes { dir: data_dir.join("volumes"), images, owner: is_root.then_some(config.options.user) }.open()?;
        // The launchers exit at once. As a subreaper, this process becomes the parent of their sandboxes and reaps them.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let provider = Self {
            default_root,
            other_layers: Mutex::default(),
            layers_dir,
            is_disk_hard,
            snapshots,
            volumes,
            cgroups: Cgroups::find(&tag),
            sandboxes,
            trash,
            sockets: socket_dir::create(&tag)?,
            is_root,
            uid_slots: Mutex::default(),
            measured: Arc::default(),
            unwritten_limit: Arc::default(),
            launches: Semaphore::new(concurrent_launches()),
            config,
        };
        provider.empty_trash();
        provider.read_uid_slots()?;
        Ok(provider)
    }

    fn dir(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes.join(id.as_str())
    }

    fn socket_path(&self, id: &SandboxId, socket: BoxdSocket) -> PathBuf {
        self.sockets.join(format!("{id}.{}", if socket == BoxdSocket::Client { "c" } else { "k" }))
    }

    fn read_uid_slots(&self) -> anyhow::Result<()> {
        let mut slots = self.uid_slots.lock();
        for id in self.ids()? {
            // A sandbox without a range was never started.
            let names = fs::read_dir(self.dir(&id))?.filter_map(|e| e.ok()?.file_name().into_string().ok());
            for slot in names.filter_map(|n| n.strip_prefix(UID_SLOT_PREFIX)?.parse().ok()) {
                slots.insert(slot, id.clone());
            }
        }
        Ok(())
    }

    fn uid_base(&self, id: &SandboxId) -> io::Result<Option<u32>> {
        if !self.is_root {
            return Ok(None);
        }
        let mut slots = self.uid_slots.lock();
        let slot = match slots.iter().find(|(_, owner)| *owner == id) {
            Some((slot, _)) => *slot,
            None => {
                let free = (0..UID_SLOTS).find(|s| !slots.contains_key(s)).ok_or_else(|| io::Error::other("no uid range is free"))?;
                fs::File::create(self.dir(id).join(format!("{UID_SLOT_PREFIX}{free}")))?;
                slots.insert(free, id.clone());
                free
            }
        };
        Ok(Some(FIRST_UID + slot * UID_RANGE))
    }

    fn ids(&self) -> io::Result<Vec<SandboxId>> {
        let names = fs::read_dir(&self.sandboxes)?.filter_map(|e| e.ok()?.file_name().into_string().ok());
        Ok(names.filter_map(|n| n.parse().ok()).collect())
    }

    /// Runs the launcher. The sandbox's lock is taken here and passed as standard error, so that a sandbox that is being started never
    /// looks stopped, not even to a broker that replaces this one.
    async fn launch(&self, spec: &LaunchSpec) -> anyhow::Result<()> {
        let _permit = self.launches.acquire().await.context("waiting for other sandboxes to start")?;
        let lock = liveness::lock(&spec.dir).await?;
        let mut child = Command::new(&self.config.launcher)
            .arg("__launch")
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(lock)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("running {}", self.config.launcher.display()))?;
        let mut stdin = child.stdin.take().context("the launcher's input")?;
        stdin.write_all(&serde_json::to_vec(spec)?).await?;
        drop(stdin);
        let output = match tokio::time::timeout(LAUNCH_TIMEOUT, child.wait_with_output()).await {
            Ok(output) => output?,
            Err(_) => anyhow::bail!("the launcher did not finish within {} s", LAUNCH_TIMEOUT.as_secs()),
        };
        if output.status.success() {
            return Ok(());
        }
        let message = String::from_utf8_lossy(&output.stdout[..output.stdout.len().min(MAX_LAUNCHER_OUTPUT)]).trim().to_owned();
        anyhow::bail!("{}", if message.is_empty() { format!("the launcher ended with {}", output.status) } else { message })
    }

    /// Ends the sandbox's processes, if any, and removes its control groups and sockets.
    async fn stop(&self, id: &SandboxId) -> anyhow::Result<()> {
        liveness::end(&self.dir(id)).await?;
        for socket in [BoxdSocket::Client, BoxdSocket::Control] {
            match fs::remove_file(self.socket_path(id, socket)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
                _ => {}
            }
        }
        liveness::retry_busy(|| self.cgroups.remove(id.as_str())).await.context("removing the control groups")
    }

    fn unavailable(&self, id: &SandboxId, error: &anyhow::Error) -> ProviderError {
        ProviderError::Unavailable(format!("sandbox {id}: {}", self.without_host_paths(&format!("{error:#}"))))
    }

    /// Removes host paths from a message for callers. The full message goes to the log.
    fn without_host_paths(&self, message: &str) -> String {
        let options = &self.config.options;
        let own = [
            self.sandboxes.parent().unwrap_or(&self.sandboxes),
            self.sockets.as_path(),
            self.config.boxd.as_path(),
            self.config.launcher.as_path(),
        ];
        let configured = options.images.values().filter(|path| path.is_absolute()).map(PathBuf::as_path);
        let root = match &options.root {
            RootSource::Rootfs(path) => Some(path.as_path()),
            RootSource::Host => None,
        };
        let hidden = own.into_iter().chain(configured).chain(root).filter(|path| path.is_absolute() && path.parent().is_some());
        let redacted = hidden.fold(message.to_owned(), |redacted, path| redacted.replace(&*path.to_string_lossy(), "…"));
        if redacted != message {
            tracing::warn!("host paths were removed from an error message: {message}");
        }
        redacted
    }

    /// Removes what an earlier process left in the trash, in a separate thread so that it doesn't delay the start.
    fn empty_trash(&self) {
        let left: Vec<PathBuf> = fs::read_dir(&self.trash).into_iter().flatten().flatten().map(|e| e.path()).collect();
        std::thread::spawn(move || {
            for path in left {
                match untrusted_tree::remove(&path) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => {
                        tracing::warn!(path = %path.display(), "removing the files of a deleted sandbox failed: {e}");
                    }
                    _ => {}
                }
            }
        });
    }
}

impl Drop for LocalProvider {
    fn drop(&mut self) {
        self.cgroups.remove_empty_parents();
        // Fails on purpose while sandboxes that keep running have sockets in it.
        let _ = fs::remove_dir(&self.sockets);
    }
}

#[async_trait]
impl Provider for LocalProvider {
    fn name(&self) -> &'static str {
        "local"
    }

    async fn ready(&self) -> Result<(), ProviderError> {
        for needed in [&self.config.boxd, &self.sandboxes] {
            fs::metadata(needed).map_err(|e| ProviderError::Unavailable(format!("{}: {e}", needed.display())))?;
        }
        Ok(())
    }

    fn features(&self) -> ProviderFeatures {
        ProviderFeatures { snapshots: true, volumes: true }
    }

    fn check_spec(&self, spec: &SandboxSpec) -> Result<(), ProviderError> {
        self.validate_spec(spec).map_err(ProviderError::Refused)
    }

    fn pin_root(&self, spec: SandboxSpec) -> Result<SandboxSpec, ProviderError> {
        self.pin_root(spec).map_err(ProviderError::Refused)
    }

    fn check_mount_paths(&self, spec: &SandboxSpec, paths: &[&str]) -> Result<(), ProviderError> {
        self.validate_mount_paths(spec, paths).map_err(ProviderError::Refused)
    }

    async fn start(&self, id: &SandboxId, spec: &SandboxSpec, state: &ControlState) -> Result<(), ProviderError> {
        if self.is_running(id).await && crate::control::push_state(self, id, state).await.is_ok() {
            return Ok(());
        }
        // It is dead, or alive without responding: remove what is left of it before the start.
        self.stop(id).await.map_err(|e| self.unavailable(id, &e))?;
        let spec = self.prepare(id, spec, state).await.map_err(|e| self.unavailable(id, &e))?;
        if let Err(e) = self.launch(&spec).await {
            self.stop(id).await.map_err(|e| self.unavailable(id, &e))?;
            return Err(self.unavailable(id, &e));
        }
        Ok(())
    }

    async fn suspend(&self, id: &SandboxId) -> Result<(), ProviderError> {
        self.stop(id).await.map_err(|e| self.unavailable(id, &e))
    }

    async fn destroy(&self, id: &SandboxId) -> Result<(), ProviderError> {
        self.stop(id).await.map_err(|e| self.unavailable(id, &e))?;
        let mut trash = self.trash.join(id.as_str());
        match fs::rename(self.dir(id), &trash) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            // The sandboxes are on a mount of their own. An incomplete removal is repeated.
            Err(e) if e.kind() == io::ErrorKind::CrossesDevices => trash = self.dir(id),
            Err(e) => return Err(self.unavailable(id, &e.into())),
            Ok(()) => self.uid_slots.lock().retain(|_, owner| owner != id),
        }
        let upper = self.dir(id).join("data").join("upper");
        self.measured.lock().remove(&upper);
        let removed = tokio::task::spawn_blocking(move || untrusted_tree::remove(&trash)).await;
        match removed {
            Ok(Err(e)) if e.kind() != io::ErrorKind::NotFound => Err(self.unavailable(id, &e.into())),
            _ => {
                self.uid_slots.lock().retain(|_, owner| owner != id);
                Ok(())
            }
        }
    }

    async fn list(&self) -> Result<Vec<ProviderSandbox>, ProviderError> {
        let ids = self.ids().map_err(|e| ProviderError::Unavailable(format!("{}: {e}", self.sandboxes.display())))?;
        let mut found = Vec::new();
        for id in ids {
            let is_running = self.is_running(&id).await;
            found.push(ProviderSandbox { id, is_running });
        }
        Ok(found)
    }

    async fn is_running(&self, id: &SandboxId) -> bool {
        liveness::is_alive(&self.dir(id))
    }

    async fn ended(&self, id: &SandboxId) {
        liveness::ended(&self.dir(id)).await;
    }

    async fn dial(&self, id: &SandboxId, socket: BoxdSocket) -> Result<BoxedStream, ProviderError> {
        match UnixStream::connect(self.socket_path(id, socket)).await.and_then(|stream| LocalSocketStream::new(stream, Peer::Server)) {
            Ok(stream) => Ok(Box::new(stream)),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                Err(ProviderError::NotRunning(id.clone()))
            }
            Err(e) => Err(ProviderError::Unavailable(format!("connecting to sandbox {id}: {e}"))),
        }
    }

    async fn take_snapshot(&self, from: &SandboxId, id: &SnapshotId, spec: &SandboxSpec) -> Result<u64, ProviderError> {
        let failed =
            |why: String| ProviderError::Unavailable(format!("snapshot {id} of sandbox {from}: {}", self.without_host_paths(&why)));
        let uid_base = self.uid_base(from).map_err(|e| failed(e.to_string()))?;
        let (snapshots, sandbox, wanted) = (self.snapshots.clone(), self.dir(from), id.clone());
        let max_bytes = self.config.options.with_resources(&spec.resources).disk_bytes;
        let taken = tokio::task::spawn_blocking(move || snapshots.take(&sandbox, &wanted, uid_base, max_bytes)).await;
        taken.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(format!("{e:#}")))
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), ProviderError> {
        let (snapshots, unwanted) = (self.snapshots.clone(), id.clone());
        let removed = tokio::task::spawn_blocking(move || snapshots.remove(&unwanted)).await.map_err(io::Error::other).flatten();
        removed.map_err(|e| ProviderError::Unavailable(format!("removing snapshot {id}: {}", self.without_host_paths(&e.to_string()))))
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        self.snapshots.list().map_err(|e| ProviderError::Unavailable(format!("listing snapshots: {e}")))
    }

    fn check_volume(&self, size_bytes: u64) -> Result<(), ProviderError> {
        self.check_volume_size(size_bytes).map_err(ProviderError::Refused)
    }

    async fn make_volume(&self, id: &VolumeId, size_bytes: u64) -> Result<(), ProviderError> {
        self.check_volume(size_bytes)?;
        let (volumes, wanted) = (self.volumes.clone(), id.clone());
        let size = disk_limit::round_up_image_size(size_bytes);
        let made = tokio::task::spawn_blocking(move || volumes.make(&wanted, size)).await.map_err(anyhow::Error::from).flatten();
        made.map_err(|e| ProviderError::Unavailable(format!("creating volume {id}: {}", self.without_host_paths(&format!("{e:#}")))))
    }

    async fn remove_volume(&self, id: &VolumeId) -> Result<(), ProviderError> {
        let (volumes, unwanted) = (self.volumes.clone(), id.clone());
        if let Some((files, _)) = volumes.measured(id) {
            self.measured.lock().remove(&files);
        }
        let removed = tokio::task::spawn_blocking(move || volumes.remove(&unwanted)).await.map_err(io::Error::other).flatten();
        removed.map_err(|e| ProviderError::Unavailable(format!("removing volume {id}: {}", self.without_host_paths(&e.to_string()))))
    }

    async fn volumes(&self) -> Result<Vec<VolumeId>, ProviderError> {
        self.volumes.list().map_err(|e| ProviderError::Unavailable(format!("listing volumes: {e}")))
    }

    async fn host_disk(&self) -> Option<HostDisk> {
        // `ready` reports a directory that can't be read.
        let disk = self.measure_host_disk().ok()?;
        self.limit_unwritten(disk).await;
        Some(disk)
    }

    async fn image_usage(&self, id: &SandboxId, spec: &SandboxSpec) -> Option<ImageUsage> {
        if !self.is_disk_hard {
            return None;
        }
        // What reaches a volume may have been written by any sandbox that mounts it.
        let writers = spec.mounts.iter().all(|m| m.read_only).then_some(id.as_str());
        // Read first: what is written in between counts twice, and not never.
        let unwritten = self.cgroups.unwritten_bytes(writers);
        let own = self.dir(id).join(disk_image::IMAGE);
        let volumes = spec.mounts.iter().filter(|m| !m.read_only).map(|m| self.volumes.image(&m.volume));
        let sizes =
            std::iter::once(own).chain(volumes).filter_map(|image| Some(image.metadata().ok()?.blocks().saturating_mul(STAT_BLOCK)));
        Some(ImageUsage { allocated: sizes.sum(), unwritten })
    }

    async fn failed_disks(&self) -> Vec<FailedDisk> {
        if !self.is_disk_hard {
            return Vec::new();
        }
        let (sandboxes, volumes) = (self.sandboxes.clone(), self.volumes.dir.clone());
        let dirs = [sandboxes.clone(), volumes.clone()];
        let found = tokio::task::spawn_blocking(move || fsck::failed_images(&dirs)).await.unwrap_or_default();
        let named = |image: &Path| {
            let (dir, name) = (image.parent()?.parent()?, image.parent()?.file_name()?.to_str()?);
            match dir {
                dir if dir == sandboxes => Some(FailedDisk::Sandbox(name.parse().ok()?)),
                dir if dir == volumes => Some(FailedDisk::Volume(name.parse().ok()?)),
                _ => None,
            }
        };
        found.iter().filter_map(|image| named(image)).collect()
    }

    async fn written_files(&self, id: &SandboxId) -> Option<WrittenFiles> {
        let sandbox = self.dir(id);
        let counted = tokio::task::spawn_blocking(move || match snapshots::open_upper(&sandbox)? {
            Some(upper) => Ok(untrusted_tree::count_files(upper)),
            None => anyhow::Ok(WrittenFiles { is_complete: true, ..WrittenFiles::default() }),
        });
        match counted.await.map_err(anyhow::Error::from).flatten() {
            Ok(written) => Some(written),
            Err(error) => {
                tracing::warn!(sandbox = %id, error = format!("{error:#}"), "counting the files of a sandbox failed");
                None
            }
        }
    }

    async fn disk_usage(&self, id: &SandboxId, spec: &SandboxSpec) -> Option<DiskUsage> {
        let upper = self.dir(id).join("data").join("upper");
        let own = (upper, self.config.options.with_resources(&spec.resources).disk_bytes);
        // A read-only mount can't fill a volume.
        let volumes = spec.mounts.iter().filter(|m| !m.read_only).filter_map(|m| self.volumes.measured(&m.volume));
        // Returns the fullest location: a sandbox is stopped from writing when any of them is full.
        std::iter::once(own)
            .chain(volumes)
            .enumerate()
            .filter(|(_, (dir, _))| dir.exists())
            .map(|(location, (dir, limit))| DiskUsage { location: location as u64, used: self.last_measured(dir), limit })
            .max_by(|a, b| (u128::from(a.used) * u128::from(b.limit)).cmp(&(u128::from(b.used) * u128::from(a.limit))))
    }
}

impl LocalProvider {
    fn measure_host_disk(&self) -> io::Result<HostDisk> {
        // Files that are not in an image take their space from the host's disk when they are written, not when the kernel writes them.
        let unwritten = if self.is_disk_hard { self.cgroups.unwritten_bytes(None) } else { 0 };
        let data_dir = self.sandboxes.parent().unwrap_or(&self.sandboxes);
        disk_limit::host_disk(&self.sandboxes, data_dir, unwritten, self.config.options.reserve_bytes)
    }

    /// Limits unwritten data while there is little space.
    async fn limit_unwritten(&self, disk: HostDisk) {
        if !self.is_disk_hard {
            return;
        }
        let enough = disk.reserve.saturating_mul(LOW_SPACE_FACTOR).max(disk.reserve.saturating_add(BURST_BYTES));
        let is_low = disk.writable() < enough;
        // Locked while another task updates it.
        if self.unwritten_limit.try_lock().is_some_and(|limit| limit.is_due(is_low)) {
            let (limit, dirs) = (self.unwritten_limit.clone(), [self.sandboxes.clone(), self.volumes.dir.clone()]);
            let updated = tokio::task::spawn_blocking(move || limit.lock().update(&dirs, is_low)).await;
            if let Err(error) = updated {
                tracing::warn!(%error, "limiting unwritten data failed");
            }
        }
    }

    /// The last measured size of a directory. Starts a new measurement in the background, because one of a million files must not delay
    /// the checks of other sandboxes.
    fn last_measured(&self, dir: PathBuf) -> u64 {
        let last = self.measured.clone();
        let mut known = last.lock();
        let measured = known.entry(dir.clone()).or_default();
        if !measured.is_measuring {
            measured.is_measuring = true;
            let last = last.clone();
            tokio::task::spawn_blocking(move || {
                let used = untrusted_tree::measure(&dir);
                last.lock().insert(dir, DiskMeasurement { used, is_measuring: false });
            });
        }
        measured.used
    }
}
