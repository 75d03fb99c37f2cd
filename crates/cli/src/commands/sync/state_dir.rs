//! Local state of a sync: its folders, the base version, its last status, and the lock of the process that runs it.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use cobox_sync::{Digest, RelPath};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use super::SyncPair;
use crate::{
    context::{Environment, default_data_dir, user_dir},
    failure::Failure,
    target::Target,
};

/// Length of a sync's id: enough to distinguish the syncs of one machine.
const ID_CHARS: usize = 12;
/// Attempts to lock a sync, and the pause between them.
const LOCK_TRIES: usize = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// Maximum size of a state file that is read, in bytes.
const MAX_STATE_BYTES: u64 = 64 * 1024 * 1024;

/// The stored configuration of a sync: its pair of folders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncConfig {
    pub id: String,
    pub folder: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thread: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Path in the sandbox.
    pub path: String,
    pub mode: String,
    /// The sandbox that the base version belongs to; with another sandbox the sync starts from scratch.
    pub sandbox_id: String,
}

impl SyncConfig {
    pub fn location(&self) -> String {
        format!("{}:{}", self.thread.as_deref().or(self.sandbox.as_deref()).unwrap_or("?"), self.path)
    }
}

/// The state directory of one sync.
#[derive(Clone, Debug)]
pub struct SyncStateDir {
    pub dir: PathBuf,
}

/// Held by the only process that runs a sync.
pub struct SyncLock {
    _file: File,
}

impl SyncStateDir {
    /// The state of the sync between these two folders at that broker.
    pub fn for_pair(pair: &SyncPair, folder: &Path, broker: &str) -> Result<(Self, String), Failure> {
        let (kind, name) = match &pair.target {
            Target::Thread(name) => ("thread", name.as_str()),
            Target::Sandbox(name) => ("sandbox", name.as_str()),
            Target::Session(id) => ("session", id.as_str()),
        };
        let parts =
            [folder.as_os_str().as_bytes(), b"\0", kind.as_bytes(), b"\0", name.as_bytes(), b"\0", &pair.path, b"\0", broker.as_bytes()];
        let id = Digest::of(&parts.concat()).to_string()[..ID_CHARS].to_owned();
        let state_root = state_root().ok_or_else(|| {
            Failure::new("no state directory for the sync: neither XDG_STATE_HOME nor HOME is set").with_advice("set HOME")
        })?;
        Ok((Self { dir: state_root.join(&id) }, id))
    }

    /// All syncs whose configuration can be read.
    pub fn all() -> Vec<(Self, SyncConfig)> {
        let Some(listing) = state_root().and_then(|state_root| fs::read_dir(state_root).ok()) else { return Vec::new() };
        let mut all: Vec<(Self, SyncConfig)> = listing
            .flatten()
            .filter_map(|entry| {
                let state = Self { dir: entry.path() };
                state.config().map(|config| (state, config))
            })
            .collect();
        all.sort_by(|(_, a), (_, b)| (&a.folder, &a.path).cmp(&(&b.folder, &b.path)));
        all
    }

    /// Creates the directory, for this user only, and locks it for this process.
    pub fn lock(&self) -> Result<SyncLock, Failure> {
        let failed = |e: io::Error| Failure::new(format!("{}: {e}", self.dir.display()));
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir).map_err(failed)?;
        let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(self.dir.join("lock")).map_err(failed)?;
        for _ in 0..LOCK_TRIES {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(SyncLock { _file: file }),
                // The lock may be held briefly by a process that only checks whether the sync is running.
                Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(LOCK_PAUSE),
                Err(e) => return Err(failed(e.into())),
            }
        }
        Err(Failure::new("this folder is already being synced with that sandbox folder").with_advice("`cobox sync status` shows its state"))
    }

    pub fn is_running(&self) -> bool {
        let Ok(file) = File::open(self.dir.join("lock")) else { return false };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    }

    pub fn base(&self) -> PathBuf {
        self.dir.join("base")
    }

    pub fn config(&self) -> Option<SyncConfig> {
        self.read("config.json")
    }

    pub fn set_config(&self, config: &SyncConfig) -> Result<(), Failure> {
        self.write("config.json", config).map_err(|e| Failure::new(format!("{}: {e}", self.dir.display())))
    }

    /// The last status that was stored.
    pub fn status(&self) -> Option<serde_json::Value> {
        self.read("status.json")
    }

    pub fn set_status(&self, status: &serde_json::Value) -> io::Result<()> {
        self.write("status.json", status)
    }

    fn read<T: serde::de::DeserializeOwned>(&self, name: &str) -> Option<T> {
        let file = File::open(self.dir.join(name)).ok()?;
        serde_json::from_reader(io::Read::take(io::BufReader::new(file), MAX_STATE_BYTES)).ok()
    }

    fn write(&self, name: &str, value: &impl Serialize) -> io::Result<()> {
        let temporary = self.dir.join(format!("{name}.new"));
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&temporary)?;
        file.write_all(&serde_json::to_vec(value)?)?;
        fs::rename(temporary, self.dir.join(name))
    }
}

/// The parts of cobox's own configuration and state that lie within the folder. They are never synced, because they
/// contain keys and change while a sync runs.
pub fn own_paths(folder: &Path) -> Result<Vec<RelPath>, Failure> {
    let env: Environment = &|name| std::env::var_os(name);
    let config_path = env("COBOX_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from);
    let cobox_dir = |variable: &str, in_home: &str| user_dir(env, variable, in_home).map(|dir| dir.join("cobox"));
    let candidates = [
        state_root().and_then(|sync| sync.parent().map(Path::to_owned)),
        cobox_dir("XDG_CONFIG_HOME", ".config"),
        cobox_dir("XDG_CACHE_HOME", ".cache"),
        default_data_dir(env),
        config_path,
    ];
    let mut excluded = Vec::new();
    for path in candidates.into_iter().flatten() {
        // A path that doesn't exist yet may be created while the sync runs.
        let path = path.canonicalize().unwrap_or(path);
        if folder.starts_with(&path) {
            return Err(Failure::new(format!("{} contains cobox's own keys and state", folder.display()))
                .with_advice("choose another folder: keys and state are never uploaded"));
        }
        excluded.extend(path.strip_prefix(folder).ok().and_then(|path| RelPath::new(path.as_os_str().as_bytes())));
    }
    Ok(excluded)
}

/// `cobox/sync` under the user's state directory.
fn state_root() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|v: &OsString| !v.is_empty()).map(PathBuf::from);
    // The XDG specification requires that a relative path is ignored.
    let state = variable("XDG_STATE_HOME").filter(|p| p.is_absolute()).or_else(|| variable("HOME").map(|home| home.join(".local/state")));
    state.map(|dir| dir.join("cobox/sync"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_names_at_another_broker_are_another_sync() {
        let pair = SyncPair { folder: "/f".into(), target: Target::Thread("demo".to_owned()), path: b"/workspace".to_vec() };
        let id = |broker| SyncStateDir::for_pair(&pair, Path::new("/f"), broker).map(|(_, id)| id).unwrap_or_default();
        assert_eq!(id("https://a"), id("https://a"));
        assert_ne!(id("https://a"), id("https://b"));
    }
}
