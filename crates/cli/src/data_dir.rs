//! The data directory of a local broker: locked by one broker at a time, with its key and a file that says where it
//! listens.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use cobox_protocol::Secret;
use cobox_provider::private_dir::private_data_dir;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Separate from the broker's own lock and taken earlier, because preparing the provider already changes the
/// directory.
const LOCK_FILE: &str = "node.lock";

/// Address of a running broker, for scripts: written when it is ready, removed when it stops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerInfo {
    pub url: String,
    pub pid: u32,
    pub api_key_file: PathBuf,
    /// The agent's key file, if one was created besides the user's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_key_file: Option<PathBuf>,
}

#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// Held for the process's life. Sandboxes don't inherit it: their launch closes all descriptors.
    _lock: File,
}

impl DataDir {
    /// Creates the directory if it is missing and locks it; the error names the process that holds the lock.
    pub fn lock(path: &Path) -> Result<Self, Failure> {
        private_data_dir(path).context("preparing the data directory")?;
        let path = path.canonicalize().with_context(|| format!("opening the data directory {}", path.display()))?;
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join(LOCK_FILE))
            .with_context(|| format!("opening {}", path.join(LOCK_FILE).display()))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { path, _lock: file }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(in_use_failure(&path)),
            Err(e) => Err(Failure::new(format!("locking {}: {e}", path.display()))),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn api_key_file(&self) -> PathBuf {
        self.path.join("api_key")
    }

    pub fn agent_key_file(&self) -> PathBuf {
        self.path.join("agent_key")
    }

    pub fn write_info(&self, info: &BrokerInfo) -> Result<(), Failure> {
        let path = self.info_file();
        let text = serde_json::to_vec_pretty(info).context("writing broker.json")?;
        replace_file(&path, &text).with_context(|| format!("writing {}", path.display()))?;
        Ok(())
    }

    /// A note that stays behind misleads scripts only briefly, so this is no reason to fail an orderly shutdown.
    pub fn remove_info(&self) {
        if let Err(error) = std::fs::remove_file(self.info_file())
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "removing broker.json failed");
        }
    }

    fn info_file(&self) -> PathBuf {
        self.path.join("broker.json")
    }
}

fn in_use_failure(path: &Path) -> Failure {
    let info: Option<BrokerInfo> = std::fs::read(path.join("broker.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let holder = info.map_or_else(|| "another broker".to_owned(), |n| format!("the broker at {} (pid {})", n.url, n.pid));
    Failure::new(format!("{} is in use by {holder}", path.display()))
        .with_advice("stop that process first, or choose another directory with --data-dir")
}

pub fn write_key(path: &Path, key: &Secret) -> Result<(), Failure> {
    replace_file(path, format!("{}\n", key.expose()).as_bytes()).with_context(|| format!("writing {}", path.display()))?;
    Ok(())
}

/// Replaces a file atomically and durably, also across a power failure. Only its owner can read it.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // A temporary file is created with mode 0600.
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(|e| io::Error::from(e.kind()))?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_data_directory_in_use_is_refused_with_its_broker() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let first = DataDir::lock(&path).unwrap();
        let info = BrokerInfo { url: "http://127.0.0.1:1".into(), pid: 42, api_key_file: first.api_key_file(), agent_key_file: None };
        first.write_info(&info).unwrap();
        let failure = DataDir::lock(&path).unwrap_err();
        assert!(failure.message.contains("http://127.0.0.1:1 (pid 42)"), "{}", failure.message);
        drop(first);
        DataDir::lock(&path).unwrap();
    }

    #[test]
    fn keys_and_directory_are_private_to_their_owner() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::lock(&dir.path().join("data")).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        for file in [data.api_key_file(), data.agent_key_file()] {
            write_key(&file, &Secret::new("cbx_x")).unwrap();
            assert_eq!((mode(data.path()), mode(&file)), (0o700, 0o600));
            assert_eq!(std::fs::read_to_string(file).unwrap(), "cbx_x\n");
        }
    }
}
