//! Sandboxes on this machine: no daemon, no image, a process tree in namespaces of its own.

mod base;
mod bases;
mod cgroup;
mod config;
mod copy;
mod disk;
mod doctor;
mod fsck;
mod image;
mod launch;
mod opening;
mod prepare;
mod root;
mod running;
mod runtime_dir;
mod snapshots;
mod spec;
mod stage;
mod tree;
mod volumes;

pub use config::{DiskLimit, LocalConfig, LocalOptions, Most, RootSource, WorkloadUser};
pub use doctor::{Check, Status, doctor};
pub use launch::launch_main;

use std::{
    collections::{BTreeMap, HashMap},
    fs, io,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Context;
use async_trait::async_trait;
use cobox_kernel::{LocalSocketStream, Peer};
use cobox_protocol::{SandboxId, SnapshotId, VolumeId, control::ControlState};
use sha2::{Digest, Sha256};
use tokio::{
    io::AsyncWriteExt,
    net::UnixStream,
    process::Command,
    sync::{OnceCell, Semaphore},
};

use crate::{
    Abilities, BoxedStream, DiskUse, Door, FailedDisk, Found, HostDisk, Making, Provider, ProviderError, WrittenFiles,
    private_dir::{private_data_dir, private_dir},
};
use base::Base;
use cgroup::Cgroups;
use snapshots::Snapshots;
use spec::{LaunchSpec, UID_RANGE};
use volumes::Volumes;

/// First of the host uids that sandboxes use. Above what account tools and other container engines hand out.
const FIRST_UID: u32 = 0x7000_0000;
/// Sandboxes with a range of their own: from [`FIRST_UID`] to the end of the uids.
const UID_SLOTS: u32 = (u32::MAX - FIRST_UID) / UID_RANGE;
/// An empty file with the slot in its name: there or not there, never half written.
const UID_SLOT: &str = "uid_slot.";
/// Starting takes milliseconds; a launcher that needs longer hangs.
const LAUNCH_WITHIN: Duration = Duration::from_secs(30);
/// Launchers that run at the same time: more only compete for processors, and the last would miss its deadline.
fn concurrent_launches() -> usize {
    const PER_PROCESSOR: usize = 4;
    std::thread::available_parallelism().map_or(1, usize::from) * PER_PROCESSOR
}
/// The launcher's words about a failure.
const MAX_WORDS: usize = 4096;

pub struct LocalProvider {
    config: LocalConfig,
    base: Base,
    /// Other lower layers, each made when it is first asked for.
    other_bases: Mutex<HashMap<String, Arc<OnceCell<Base>>>>,
    bases_dir: PathBuf,
    /// A filesystem of its size is copied for each sandbox.
    is_disk_hard: bool,
    snapshots: Snapshots,
    volumes: Volumes,
    cgroups: Cgroups,
    sandboxes: PathBuf,
    trash: PathBuf,
    sockets: PathBuf,
    is_root: bool,
    /// Which sandbox has which range of uids.
    uid_slots: Mutex<BTreeMap<u32, SandboxId>>,
    measured: Arc<Mutex<HashMap<PathBuf, Measured>>>,
    launches: Semaphore,
}

/// What a sandbox's or a volume's files took when last looked at.
#[derive(Default)]
struct Measured {
    used: u64,
    is_under_way: bool,
}

impl LocalProvider {
    /// Prepares directories and the lower layer; removes what an earlier life left half removed.
    pub fn new(config: LocalConfig) -> anyhow::Result<Self> {
        config.options.validate().map_err(anyhow::Error::msg)?;
        let is_root = rustix::process::geteuid().is_root();
        fs::metadata(&config.boxd)
            .with_context(|| format!("boxd is not at {}: build it, or say where with COBOX_BOXD", config.boxd.display()))?;
        private_data_dir(&config.data_dir)?;
        let data_dir = fs::canonicalize(&config.data_dir)?;
        let tag = base::hex(&Sha256::digest(data_dir.as_os_str().as_encoded_bytes())[..6]);
        let (sandboxes, trash, bases) = (data_dir.join("sandboxes"), data_dir.join("trash"), data_dir.join("base"));
        for dir in [&sandboxes, &trash] {
            private_dir(dir)?;
        }
        base::close(&bases)?;
        base::clear(&bases).context("removing roots that were left unfinished")?;
        let base = base::prepare(&bases, &config.options.root, &config.options, is_root).context("preparing the sandboxes' root")?;
        let is_disk_hard = match (config.options.disk, disk::can_be_hard(is_root)) {
            (DiskLimit::Soft, _) | (DiskLimit::Auto, Err(_)) => false,
            (DiskLimit::Auto | DiskLimit::Hard, Ok(())) => {
                disk::template(&bases, config.options.disk_bytes)?;
                true
            }
            (DiskLimit::Hard, Err(why)) => anyhow::bail!("local.disk = \"hard\" can't be had: {why}"),
        };
        let snapshots = Snapshots::open(data_dir.join("snapshots"))?;
        let images = is_disk_hard.then(|| bases.clone());
        let volumes = Volumes { dir: data_dir.join("volumes"), images, owner: is_root.then_some(config.options.user) }.open()?;
        // Sandboxes' parents end at once, so they become ours to reap while we live.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let provider = Self {
            base,
            other_bases: Mutex::default(),
            bases_dir: bases,
            is_disk_hard,
            snapshots,
            volumes,
            cgroups: Cgroups::find(&tag),
            sandboxes,
            trash,
            sockets: runtime_dir::make(&tag)?,
            is_root,
            uid_slots: Mutex::default(),
            measured: Arc::default(),
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

    fn socket(&self, id: &SandboxId, door: Door) -> PathBuf {
        self.sockets.join(format!("{id}.{}", if door == Door::Client { "c" } else { "k" }))
    }

    fn read_uid_slots(&self) -> anyhow::Result<()> {
        let mut slots = self.uid_slots.lock().unwrap_or_else(PoisonError::into_inner);
        for id in self.ids()? {
            // One without a range was never started.
            let names = fs::read_dir(self.dir(&id))?.filter_map(|e| e.ok()?.file_name().into_string().ok());
            for slot in names.filter_map(|n| n.strip_prefix(UID_SLOT)?.parse().ok()) {
                slots.insert(slot, id.clone());
            }
        }
        Ok(())
    }

    fn uid_base(&self, id: &SandboxId) -> io::Result<Option<u32>> {
        if !self.is_root {
            return Ok(None);
        }
        let mut slots = self.uid_slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = match slots.iter().find(|(_, owner)| *owner == id) {
            Some((slot, _)) => *slot,
            None => {
                let free = (0..UID_SLOTS).find(|s| !slots.contains_key(s)).ok_or_else(|| io::Error::other("no uid range is free"))?;
                fs::File::create(self.dir(id).join(format!("{UID_SLOT}{free}")))?;
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

    /// Runs the launcher. Its standard error is the sandbox's lock, taken here, so that there is no moment in which a
    /// sandbox is being started and looks stopped: not even to a broker that takes over from this one.
    async fn launch(&self, spec: &LaunchSpec) -> anyhow::Result<()> {
        let _permit = self.launches.acquire().await.context("waiting for other sandboxes to start")?;
        let lock = running::lock(&spec.dir).await?;
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
        let output = match tokio::time::timeout(LAUNCH_WITHIN, child.wait_with_output()).await {
            Ok(output) => output?,
            Err(_) => anyhow::bail!("the launcher did not finish within {} s", LAUNCH_WITHIN.as_secs()),
        };
        if output.status.success() {
            return Ok(());
        }
        let words = String::from_utf8_lossy(&output.stdout[..output.stdout.len().min(MAX_WORDS)]).trim().to_owned();
        anyhow::bail!("{}", if words.is_empty() { format!("the launcher ended with {}", output.status) } else { words })
    }

    /// Ends the processes, if any, and gives their groups and sockets back.
    async fn stop(&self, id: &SandboxId) -> anyhow::Result<()> {
        running::end(&self.dir(id)).await?;
        for door in [Door::Client, Door::Control] {
            match fs::remove_file(self.socket(id, door)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
                _ => {}
            }
        }
        running::retry_busy(|| self.cgroups.remove(id.as_str())).await.context("removing the control groups")
    }

    fn unavailable(&self, id: &SandboxId, error: &anyhow::Error) -> ProviderError {
        ProviderError::Unavailable(format!("sandbox {id}: {}", self.for_callers(&format!("{error:#}"))))
    }

    /// Words without where things are on the host, which is the log's business.
    fn for_callers(&self, words: &str) -> String {
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
        let said = hidden.fold(words.to_owned(), |said, path| said.replace(&*path.to_string_lossy(), "…"));
        if said != words {
            tracing::warn!("what a caller was told without its paths: {words}");
        }
        said
    }

    /// In a thread of its own: how much an earlier life left is not for the start to wait on.
    fn empty_trash(&self) {
        let left: Vec<PathBuf> = fs::read_dir(&self.trash).into_iter().flatten().flatten().map(|e| e.path()).collect();
        std::thread::spawn(move || {
            for path in left {
                match tree::remove(&path) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => {
                        tracing::warn!(path = %path.display(), "a removed sandbox's files are still there: {e}");
                    }
                    _ => {}
                }
            }
        });
    }
}

impl Drop for LocalProvider {
    fn drop(&mut self) {
        self.cgroups.forget();
        // Sockets of sandboxes that go on running keep it, as they should.
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

    fn abilities(&self) -> Abilities {
        Abilities { snapshots: true, volumes: true }
    }

    fn check(&self, making: &Making) -> Result<(), ProviderError> {
        self.check_making(making).map_err(ProviderError::Refused)
    }

    fn pinned(&self, making: Making) -> Result<Making, ProviderError> {
        self.pin(making).map_err(ProviderError::Refused)
    }

    fn check_places(&self, making: &Making, paths: &[&str]) -> Result<(), ProviderError> {
        self.check_mount_paths(making, paths).map_err(ProviderError::Refused)
    }

    async fn start(&self, id: &SandboxId, making: &Making, state: &ControlState) -> Result<(), ProviderError> {
        if self.is_running(id).await && crate::control::push(self, id, state).await.is_ok() {
            return Ok(());
        }
        // Dead, or alive but not answering: either way nothing of it may be in the way.
        self.stop(id).await.map_err(|e| self.unavailable(id, &e))?;
        let spec = self.prepare(id, making, state).await.map_err(|e| self.unavailable(id, &e))?;
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
        let trash = self.trash.join(id.as_str());
        match fs::rename(self.dir(id), &trash) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(self.unavailable(id, &e.into())),
            Ok(()) => self.uid_slots.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, owner| owner != id),
        }
        let upper = self.dir(id).join("data").join("upper");
        self.measured.lock().unwrap_or_else(PoisonError::into_inner).remove(&upper);
        let removed = tokio::task::spawn_blocking(move || tree::remove(&trash)).await;
        match removed {
            Ok(Err(e)) if e.kind() != io::ErrorKind::NotFound => Err(self.unavailable(id, &e.into())),
            _ => Ok(()),
        }
    }

    async fn list(&self) -> Result<Vec<Found>, ProviderError> {
        let ids = self.ids().map_err(|e| ProviderError::Unavailable(format!("{}: {e}", self.sandboxes.display())))?;
        let mut found = Vec::new();
        for id in ids {
            let is_running = self.is_running(&id).await;
            found.push(Found { id, is_running });
        }
        Ok(found)
    }

    async fn is_running(&self, id: &SandboxId) -> bool {
        running::is_alive(&self.dir(id))
    }

    async fn ended(&self, id: &SandboxId) {
        running::ended(&self.dir(id)).await;
    }

    async fn dial(&self, id: &SandboxId, door: Door) -> Result<BoxedStream, ProviderError> {
        match UnixStream::connect(self.socket(id, door)).await.and_then(|stream| LocalSocketStream::new(stream, Peer::Server)) {
            Ok(stream) => Ok(Box::new(stream)),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                Err(ProviderError::NotRunning(id.clone()))
            }
            Err(e) => Err(ProviderError::Unavailable(format!("connecting to sandbox {id}: {e}"))),
        }
    }

    async fn take_snapshot(&self, from: &SandboxId, id: &SnapshotId, making: &Making) -> Result<u64, ProviderError> {
        let failed = |why: String| ProviderError::Unavailable(format!("snapshot {id} of sandbox {from}: {}", self.for_callers(&why)));
        let uid_base = self.uid_base(from).map_err(|e| failed(e.to_string()))?;
        let (snapshots, sandbox, wanted) = (self.snapshots.clone(), self.dir(from), id.clone());
        let most = self.config.options.with(&making.resources).disk_bytes;
        let taken = tokio::task::spawn_blocking(move || snapshots.take(&sandbox, &wanted, uid_base, most)).await;
        taken.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(format!("{e:#}")))
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), ProviderError> {
        let (snapshots, unwanted) = (self.snapshots.clone(), id.clone());
        let removed = tokio::task::spawn_blocking(move || snapshots.remove(&unwanted)).await.map_err(io::Error::other).flatten();
        removed.map_err(|e| ProviderError::Unavailable(format!("removing snapshot {id}: {}", self.for_callers(&e.to_string()))))
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        self.snapshots.list().map_err(|e| ProviderError::Unavailable(format!("looking for snapshots: {e}")))
    }

    fn check_volume(&self, size_bytes: u64) -> Result<(), ProviderError> {
        self.check_volume_size(size_bytes).map_err(ProviderError::Refused)
    }

    async fn make_volume(&self, id: &VolumeId, size_bytes: u64) -> Result<(), ProviderError> {
        self.check_volume(size_bytes)?;
        let (volumes, wanted) = (self.volumes.clone(), id.clone());
        let size = disk::rounded(size_bytes);
        let made = tokio::task::spawn_blocking(move || volumes.make(&wanted, size)).await.map_err(anyhow::Error::from).flatten();
        made.map_err(|e| ProviderError::Unavailable(format!("making volume {id}: {}", self.for_callers(&format!("{e:#}")))))
    }

    async fn remove_volume(&self, id: &VolumeId) -> Result<(), ProviderError> {
        let (volumes, unwanted) = (self.volumes.clone(), id.clone());
        if let Some((files, _)) = volumes.soft(id) {
            self.measured.lock().unwrap_or_else(PoisonError::into_inner).remove(&files);
        }
        let removed = tokio::task::spawn_blocking(move || volumes.remove(&unwanted)).await.map_err(io::Error::other).flatten();
        removed.map_err(|e| ProviderError::Unavailable(format!("removing volume {id}: {}", self.for_callers(&e.to_string()))))
    }

    async fn volumes(&self) -> Result<Vec<VolumeId>, ProviderError> {
        self.volumes.list().map_err(|e| ProviderError::Unavailable(format!("looking for volumes: {e}")))
    }

    async fn host_disk(&self) -> Option<HostDisk> {
        // A directory that can't be looked at is `ready`'s to report.
        disk::host_disk(&self.sandboxes, self.config.options.reserve_bytes).ok()
    }

    async fn failed_disks(&self) -> Vec<FailedDisk> {
        if !self.is_disk_hard {
            return Vec::new();
        }
        let (sandboxes, volumes) = (self.sandboxes.clone(), self.volumes.dir.clone());
        let dirs = [sandboxes.clone(), volumes.clone()];
        let found = tokio::task::spawn_blocking(move || fsck::failed_images(&[&dirs[0], &dirs[1]])).await.unwrap_or_default();
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
        let counted = tokio::task::spawn_blocking(move || match snapshots::upper_of(&sandbox)? {
            Some(upper) => Ok(tree::count_files(upper)),
            None => anyhow::Ok(WrittenFiles { is_complete: true, ..WrittenFiles::default() }),
        });
        match counted.await.map_err(anyhow::Error::from).flatten() {
            Ok(written) => Some(written),
            Err(error) => {
                tracing::warn!(sandbox = %id, error = format!("{error:#}"), "the files of a sandbox could not be counted");
                None
            }
        }
    }

    async fn disk_use(&self, id: &SandboxId, making: &Making) -> Option<DiskUse> {
        let upper = self.dir(id).join("data").join("upper");
        let own = (upper, self.config.options.with(&making.resources).disk_bytes);
        // Who only reads a volume doesn't fill it.
        let volumes = making.mounts.iter().filter(|m| !m.read_only).filter_map(|m| self.volumes.soft(&m.volume));
        // The fullest counts: who may not write to one of them is stopped.
        std::iter::once(own)
            .chain(volumes)
            .enumerate()
            .filter(|(_, (dir, _))| dir.exists())
            .map(|(place, (dir, limit))| DiskUse { place: place as u64, used: self.last_measured(dir), limit })
            .max_by(|a, b| (u128::from(a.used) * u128::from(b.limit)).cmp(&(u128::from(b.used) * u128::from(a.limit))))
    }
}

impl LocalProvider {
    /// What a directory took when last looked at, which it is again behind this. Nobody waits for it: a sandbox with a million files must
    /// not hold up the care for others.
    fn last_measured(&self, dir: PathBuf) -> u64 {
        let last = self.measured.clone();
        let mut known = last.lock().unwrap_or_else(PoisonError::into_inner);
        let measured = known.entry(dir.clone()).or_default();
        if !measured.is_under_way {
            measured.is_under_way = true;
            let last = last.clone();
            tokio::task::spawn_blocking(move || {
                let used = tree::measure(&dir);
                last.lock().unwrap_or_else(PoisonError::into_inner).insert(dir, Measured { used, is_under_way: false });
            });
        }
        measured.used
    }
}
