//! The policy that counts now, from a file that may change while the broker runs. A broken file never takes its place.

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
};

use sha2::{Digest, Sha256};

use super::{Policy, PolicyError, read::MAX_POLICY_BYTES};

/// Characters of a file's hash that tell one version from another in logs and audit.
const FINGERPRINT_CHARS: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum PolicyFileError {
    #[error("the policy {} can't be read: {why}", .path.display())]
    Unreadable { path: PathBuf, why: String },
    #[error("the policy {} is wrong:\n{error}", .path.display())]
    Wrong { path: PathBuf, error: PolicyError },
}

/// What a look at the file came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reloaded {
    /// There is no file, and there was none.
    Nothing,
    /// It is read, whether or not it says something else than before.
    Read { fingerprint: String },
}

/// Tells whether a file was changed without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

pub struct PolicySource {
    path: PathBuf,
    current: RwLock<Arc<Policy>>,
    seen: Mutex<Option<Stamp>>,
}

impl PolicySource {
    /// Without a name it is the data directory's, which need not be there.
    pub fn open(named: Option<&Path>, data_dir: &Path) -> Result<Self, PolicyFileError> {
        let path = named.map_or_else(|| data_dir.join("policy.toml"), Path::to_owned);
        let source = Self { path, current: RwLock::default(), seen: Mutex::new(None) };
        let stamp = source.stamp();
        match &stamp {
            None if named.is_none() && !source.path.exists() => {}
            _ => {
                source.read()?;
            }
        }
        *source.seen.lock().unwrap_or_else(PoisonError::into_inner) = stamp;
        Ok(source)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn current(&self) -> Arc<Policy> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again. When it is broken or gone, what counted before goes on counting.
    pub fn reload(&self) -> Result<Reloaded, PolicyFileError> {
        let stamp = self.stamp();
        let known = std::mem::replace(&mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner), stamp.clone());
        if stamp.is_none() && known.is_none() && !self.path.exists() {
            return Ok(Reloaded::Nothing);
        }
        self.read()
    }

    /// As [`PolicySource::reload`], for whoever looks often: nothing is read unless the file was changed, and a broken one is
    /// told of once.
    pub fn reload_if_changed(&self) -> Option<Result<Reloaded, PolicyFileError>> {
        let stamp = self.stamp();
        let is_changed = *self.seen.lock().unwrap_or_else(PoisonError::into_inner) != stamp;
        is_changed.then(|| self.reload())
    }

    fn read(&self) -> Result<Reloaded, PolicyFileError> {
        let unreadable = |why: String| PolicyFileError::Unreadable { path: self.path.clone(), why };
        let about = std::fs::metadata(&self.path).map_err(|e| unreadable(e.to_string()))?;
        // Anything else could keep its reader waiting.
        if !about.is_file() {
            return Err(unreadable("it is not a file".to_owned()));
        }
        if about.len() > MAX_POLICY_BYTES {
            return Err(unreadable(format!("it is larger than {MAX_POLICY_BYTES} bytes")));
        }
        let text = std::fs::read_to_string(&self.path).map_err(|e| unreadable(e.to_string()))?;
        let policy = Policy::from_toml(&text).map_err(|error| PolicyFileError::Wrong { path: self.path.clone(), error })?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(policy);
        let hash: String = Sha256::digest(text.as_bytes()).iter().map(|b| format!("{b:02x}")).collect();
        Ok(Reloaded::Read { fingerprint: hash[..FINGERPRINT_CHARS].to_owned() })
    }

    fn stamp(&self) -> Option<Stamp> {
        let about = std::fs::metadata(&self.path).ok()?;
        Some(Stamp {
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
        let who = Subject { workspace: "w", principal: "p", kind: PrincipalKind::Agent, acting: PrincipalKind::Agent };
        source.current().allowed(&who).words()
    }

    #[test]
    fn a_file_that_breaks_or_vanishes_leaves_the_policy_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let source = PolicySource::open(None, dir.path()).unwrap();
        assert_eq!(source.reload().unwrap(), Reloaded::Nothing);
        let file = dir.path().join("policy.toml");
        std::fs::write(&file, "[agent]\ncapabilities = [\"fs_read\"]\n").unwrap();
        assert!(matches!(source.reload_if_changed(), Some(Ok(Reloaded::Read { .. }))));
        assert!(source.reload_if_changed().is_none(), "nothing changed");
        assert_eq!(allowed(&source), ["fs_read"]);
        std::fs::write(&file, "[agent]\ncapabilites = []\n").unwrap();
        let told = source.reload_if_changed().unwrap().unwrap_err().to_string();
        assert!(told.contains("policy.toml") && told.contains("line 2"), "{told}");
        assert!(source.reload_if_changed().is_none(), "told once");
        assert_eq!(allowed(&source), ["fs_read"]);
        std::fs::remove_file(&file).unwrap();
        assert!(source.reload_if_changed().unwrap().is_err(), "that it is gone is no reason to allow more");
        assert_eq!(allowed(&source), ["fs_read"]);
    }

    #[test]
    fn a_broken_or_missing_file_that_was_named_is_no_start() {
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
