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
    #[error("the policy {} is empty and wasn't before; to allow everything again, say so with a comment in it", .path.display())]
    Emptied { path: PathBuf },
    #[error("the policy {} was changed while it was read; try again", .path.display())]
    Unsettled { path: PathBuf },
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
    seen: Mutex<Looked>,
}

/// What the file looked like.
#[derive(Default)]
struct Looked {
    /// When it was read last.
    read: Option<Stamp>,
    /// At the last look, where that was another one: whoever saves may not be done yet.
    changing: Option<Option<Stamp>>,
    /// Whether it said anything.
    is_empty: bool,
}

impl PolicySource {
    /// Without a name it is the data directory's, which need not be there.
    pub fn open(named: Option<&Path>, data_dir: &Path) -> Result<Self, PolicyFileError> {
        let path = named.map_or_else(|| data_dir.join("policy.toml"), Path::to_owned);
        let source = Self { path, current: RwLock::default(), seen: Mutex::new(Looked { is_empty: true, ..Looked::default() }) };
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
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again. When it is broken or gone, what counted before goes on counting.
    pub fn reload(&self) -> Result<Reloaded, PolicyFileError> {
        let is_known = self.seen.lock().unwrap_or_else(PoisonError::into_inner).read.is_some();
        if !is_known && self.stamp().is_none() && !self.path.exists() {
            return Ok(Reloaded::Nothing);
        }
        self.take()
    }

    fn take(&self) -> Result<Reloaded, PolicyFileError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = self.stamp();
        let known = std::mem::replace(&mut seen.read, stamp.clone());
        seen.changing = None;
        let (text, policy) = self.read()?;
        if self.stamp() != stamp {
            seen.read = known;
            return Err(PolicyFileError::Unsettled { path: self.path.clone() });
        }
        // As a file is for a moment while it is saved in place. It would allow everything.
        let is_empty = text.trim().is_empty();
        if is_empty && !seen.is_empty {
            return Err(PolicyFileError::Emptied { path: self.path.clone() });
        }
        seen.is_empty = is_empty;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(policy);
        let hash: String = Sha256::digest(text.as_bytes()).iter().map(|b| format!("{b:02x}")).collect();
        Ok(Reloaded::Read { fingerprint: hash[..FINGERPRINT_CHARS].to_owned() })
    }

    /// As [`PolicySource::reload`], for whoever looks often: nothing is read unless the file was changed before the last look and not
    /// since, so that none is read half written; and a broken one is told of once.
    pub fn reload_if_changed(&self) -> Option<Result<Reloaded, PolicyFileError>> {
        let stamp = self.stamp();
        let is_settled = {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            let is_settled = seen.changing.as_ref() == Some(&stamp);
            seen.changing = (seen.read != stamp).then_some(stamp);
            is_settled
        };
        is_settled.then(|| self.reload())
    }

    fn read(&self) -> Result<(String, Policy), PolicyFileError> {
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
        Ok((text, policy))
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
        source.current().allowed(&who).names()
    }

    /// Looks until the file is at rest.
    fn look(source: &PolicySource) -> Option<Result<Reloaded, PolicyFileError>> {
        source.reload_if_changed().or_else(|| source.reload_if_changed())
    }

    #[test]
    fn a_file_that_is_being_saved_is_left_alone_until_it_rests_and_an_empty_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("policy.toml");
        std::fs::write(&file, "[agent]\ncapabilities = [\"fs_read\"]\n").unwrap();
        let source = PolicySource::open(None, dir.path()).unwrap();
        // Cut off where it still can be read, then whole.
        let whole = "[human]\ncapabilities = [\"fs_read\"]\n[agent]\ncapabilities = [\"fs_write\"]\n";
        for part in [&whole[..8], whole] {
            std::fs::write(&file, part).unwrap();
            assert!(source.reload_if_changed().is_none(), "it was changed since the last look");
            assert_eq!(allowed(&source), ["fs_read"]);
        }
        assert!(matches!(source.reload_if_changed(), Some(Ok(Reloaded::Read { .. }))));
        assert_eq!(allowed(&source), ["fs_write"]);
        std::fs::write(&file, " \n").unwrap();
        assert!(look(&source).unwrap().unwrap_err().to_string().contains("is empty and wasn't before"));
        assert!(source.reload().is_err() && look(&source).is_none(), "told once, and to whoever asks");
        assert_eq!(allowed(&source), ["fs_write"]);
        std::fs::write(&file, "# everything\n").unwrap();
        assert!(look(&source).unwrap().is_ok());
        assert_ne!(allowed(&source), ["fs_write"]);
    }

    #[test]
    fn a_file_that_breaks_or_vanishes_leaves_the_policy_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let source = PolicySource::open(None, dir.path()).unwrap();
        assert_eq!(source.reload().unwrap(), Reloaded::Nothing);
        let file = dir.path().join("policy.toml");
        std::fs::write(&file, "[agent]\ncapabilities = [\"fs_read\"]\n").unwrap();
        assert!(matches!(look(&source), Some(Ok(Reloaded::Read { .. }))));
        assert!(look(&source).is_none(), "nothing changed");
        assert_eq!(allowed(&source), ["fs_read"]);
        std::fs::write(&file, "[agent]\ncapabilites = []\n").unwrap();
        let told = look(&source).unwrap().unwrap_err().to_string();
        assert!(told.contains("policy.toml") && told.contains("line 2"), "{told}");
        assert!(look(&source).is_none(), "told once");
        assert_eq!(allowed(&source), ["fs_read"]);
        std::fs::remove_file(&file).unwrap();
        assert!(look(&source).unwrap().is_err(), "that it is gone is no reason to allow more");
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
