//! The current policy, read from a file that may change while the broker runs. A broken file never replaces it.

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::{Mutex, RwLock};
use sha2::{Digest, Sha256};

use super::{Policy, PolicyError, read::MAX_POLICY_BYTES};

/// Number of characters of the file's hash that identify a version in logs and audit entries.
const FINGERPRINT_CHARS: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum PolicyFileError {
    #[error("the policy {} can't be read: {why}", .path.display())]
    Unreadable { path: PathBuf, why: String },
    #[error("the policy {} is empty and wasn't before; to allow everything again, add a comment to the file", .path.display())]
    Emptied { path: PathBuf },
    #[error("the policy {} was changed while it was read; try again", .path.display())]
    Unsettled { path: PathBuf },
    #[error("the policy {} is invalid:\n{error}", .path.display())]
    Wrong { path: PathBuf, error: PolicyError },
}

/// Result of checking the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reloaded {
    /// There is no file, and there was none before.
    Nothing,
    /// The file was read; its content may be unchanged.
    Read { fingerprint: String },
}

/// File metadata that reveals a change without reading the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileStamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

pub struct PolicySource {
    path: PathBuf,
    current: RwLock<Arc<Policy>>,
    checked: Mutex<CheckedFile>,
}

/// State of the file at earlier checks.
#[derive(Default)]
struct CheckedFile {
    /// State of the file when it was last read.
    read: Option<FileStamp>,
    /// State at the last check, if it differs from the one last read: the file may still be in the middle of a save.
    changing: Option<Option<FileStamp>>,
    /// True if the version last read was empty.
    is_empty: bool,
}

impl PolicySource {
    /// Without an explicit path, uses the optional `policy.toml` in the data directory.
    pub fn open(named: Option<&Path>, data_dir: &Path) -> Result<Self, PolicyFileError> {
        let path = named.map_or_else(|| data_dir.join("policy.toml"), Path::to_owned);
        let source =
            Self { path, current: RwLock::default(), checked: Mutex::new(CheckedFile { is_empty: true, ..CheckedFile::default() }) };
        let is_absent = source.stamp().is_none() && named.is_none() && !source.path.exists();
        if !is_absent {
            source.take()?;
        }
        Ok(source)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn current(&self) -> Arc<Policy> {
        self.current.read().clone()
    }

    /// Reads the file again. If it is broken or missing, the previous policy stays in effect.
    pub fn reload(&self) -> Result<Reloaded, PolicyFileError> {
        let is_known = self.checked.lock().read.is_some();
        if !is_known && self.stamp().is_none() && !self.path.exists() {
            return Ok(Reloaded::Nothing);
        }
        self.take()
    }

    fn take(&self) -> Result<Reloaded, PolicyFileError> {
        let mut checked = self.checked.lock();
        let stamp = self.stamp();
        let known = std::mem::replace(&mut checked.read, stamp.clone());
        checked.changing = None;
        let (text, policy) = self.read()?;
        if self.stamp() != stamp {
            checked.read = known;
            return Err(PolicyFileError::Unsettled { path: self.path.clone() });
        }
        // A file that is saved in place is empty for a moment. An empty policy would lift every restriction.
        let is_empty = text.trim().is_empty();
        if is_empty && !checked.is_empty {
            return Err(PolicyFileError::Emptied { path: self.path.clone() });
        }
        checked.is_empty = is_empty;
        *self.current.write() = Arc::new(policy);
        let hash: String = Sha256::digest(text.as_bytes()).iter().map(|b| format!("{b:02x}")).collect();
        Ok(Reloaded::Read { fingerprint: hash[..FINGERPRINT_CHARS].to_owned() })
    }

    /// Like [`PolicySource::reload`], for frequent polling. Reads the file only if it changed before the last check and
    /// not since, so that a half-written file is never read. A broken file is reported only once.
    pub fn reload_if_changed(&self) -> Option<Result<Reloaded, PolicyFileError>> {
        let stamp = self.stamp();
        let is_settled = {
            let mut checked = self.checked.lock();
            let is_settled = checked.changing.as_ref() == Some(&stamp);
            checked.changing = (checked.read != stamp).then_some(stamp);
            is_settled
        };
        is_settled.then(|| self.reload())
    }

    fn read(&self) -> Result<(String, Policy), PolicyFileError> {
        let unreadable = |why: String| PolicyFileError::Unreadable { path: self.path.clone(), why };
        let about = std::fs::metadata(&self.path).map_err(|e| unreadable(e.to_string()))?;
        // Reading anything but a regular file could block.
        if !about.is_file() {
            return Err(unreadable("it is not a file".to_owned()));
        }
        if about.len() > MAX_POLICY_BYTES {
            return Err(unreadable(format!("it is larger than {MAX_POLICY_BYTES} bytes")));
        }
        let text = std::fs::read_to_string(&self.path).map_err(|e| unreadable(e.to_string()))?;
        let policy = Policy::from_toml(&text).map_err(|error| PolicyFileError::Wrong { path: self.path.clone(), error })?;
        Ok((text, policy))
    }

    fn stamp(&self) -> Option<FileStamp> {
        let about = std::fs::metadata(&self.path).ok()?;
        Some(FileStamp {
            inode: about.ino(),
            size: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
        })
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::key::PrincipalKind;

    use super::{super::Subject, *};

    fn allowed(source: &PolicySource) -> Vec<String> {
        let subject = Subject { workspace: "w", principal: "p", kind: PrincipalKind::Agent, acting: PrincipalKind::Agent };
        source.current().allowed(&subject).names()
    }

    /// Polls until the file has settled.
    fn check(source: &PolicySource) -> Option<Result<Reloaded, PolicyFileError>> {
        source.reload_if_changed().or_else(|| source.reload_if_changed())
    }

    #[test]
    fn a_file_is_read_once_it_no_longer_changes_and_an_empty_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("policy.toml");
        std::fs::write(&file, "[agent]\ncapabilities = [\"fs_read\"]\n").unwrap();
        let source = PolicySource::open(None, dir.path()).unwrap();
        // First a prefix that is still valid, then the whole text.
        let whole = "[human]\ncapabilities = [\"fs_read\"]\n[agent]\ncapabilities = [\"fs_write\"]\n";
        for part in [&whole[..8], whole] {
            std::fs::write(&file, part).unwrap();
            assert!(source.reload_if_changed().is_none(), "it was changed since the last read");
            assert_eq!(allowed(&source), ["fs_read"]);
        }
        assert!(matches!(source.reload_if_changed(), Some(Ok(Reloaded::Read { .. }))));
        assert_eq!(allowed(&source), ["fs_write"]);
        std::fs::write(&file, " \n").unwrap();
        assert!(check(&source).unwrap().unwrap_err().to_string().contains("is empty and wasn't before"));
        assert!(source.reload().is_err() && check(&source).is_none(), "the error is returned once, and on request");
        assert_eq!(allowed(&source), ["fs_write"]);
        std::fs::write(&file, "# everything\n").unwrap();
        assert!(check(&source).unwrap().is_ok());
        assert_ne!(allowed(&source), ["fs_write"]);
    }

    #[test]
    fn a_broken_or_missing_file_leaves_the_policy_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let source = PolicySource::open(None, dir.path()).unwrap();
        assert_eq!(source.reload().unwrap(), Reloaded::Nothing);
        let file = dir.path().join("policy.toml");
        std::fs::write(&file, "[agent]\ncapabilities = [\"fs_read\"]\n").unwrap();
        assert!(matches!(check(&source), Some(Ok(Reloaded::Read { .. }))));
        assert!(check(&source).is_none(), "nothing changed");
        assert_eq!(allowed(&source), ["fs_read"]);
        std::fs::write(&file, "[agent]\ncapabilites = []\n").unwrap();
        let error = check(&source).unwrap().unwrap_err().to_string();
        assert!(error.contains("policy.toml") && error.contains("line 2"), "{error}");
        assert!(check(&source).is_none(), "the error is returned once");
        assert_eq!(allowed(&source), ["fs_read"]);
        std::fs::remove_file(&file).unwrap();
        assert!(check(&source).unwrap().is_err(), "a missing file must not allow more");
        assert_eq!(allowed(&source), ["fs_read"]);
    }

    #[test]
    fn a_broken_or_missing_configured_file_prevents_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mine.toml");
        assert!(PolicySource::open(Some(&file), dir.path()).is_err());
        std::fs::write(&file, "[[rule]]\n").unwrap();
        assert!(PolicySource::open(Some(&file), dir.path()).is_err());
        std::fs::write(dir.path().join("policy.toml"), "x = 1").unwrap();
        assert!(PolicySource::open(None, dir.path()).is_err());
        assert!(PolicySource::open(Some(dir.path()), dir.path()).is_err(), "a directory is not a file");
    }
}
