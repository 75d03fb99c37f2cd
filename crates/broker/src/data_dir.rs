//! The data directory: locked by one broker at a time, it contains the database and the master key, which is created
//! once and kept private.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use cobox_protocol::RequestId;
use cobox_provider::private_dir::{PrivateDirError, private_data_dir};
use cobox_token::MasterKey;
use rustix::fs::FlockOperation;
use zeroize::Zeroize;

/// Only the owner may read a secret.
const SECRET_MODE: u32 = 0o600;
const OTHERS_MASK: u32 = 0o077;

/// File that records where the node was last used.
const DIRECTORY_IDENTITY_FILE: &str = "node.place";
/// Changes with each boot of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    #[error("{path}: {doing}: {cause}")]
    Io { path: PathBuf, doing: &'static str, cause: io::Error },
    #[error(transparent)]
    NotPrivate(#[from] PrivateDirError),
    #[error("{0} is in use by another broker; stop that one, or choose another data directory")]
    InUse(PathBuf),
    #[error(
        "{0} is missing, but the database has sandboxes: restore it from a backup, copy it from another broker on the same database, or, \
         if it is lost, create a new one with `cobox master-key rotate --immediate --lost`, which revokes every token"
    )]
    KeyMissing(PathBuf),
    #[error("{path} can be read by others (mode {mode:o}); run `chmod 600` on it")]
    KeyExposed { path: PathBuf, mode: u32 },
    #[error("{0} belongs to another user; the broker must own it")]
    KeyForeign(PathBuf),
    #[error(
        "{0} is not the master key of this database; copy the key of its other brokers here, restore the earlier key, or choose another \
         database"
    )]
    KeyDiffers(PathBuf),
    #[error(
        "the broker at {url} sent a heartbeat {seconds} s ago; stop every broker on this database first, and wait until they count as dead"
    )]
    BrokerAlive { url: String, seconds: u64 },
    #[error(
        "{path} was used with {used}, but the configuration selects {wanted}; restore the former setting, or choose another data \
         directory"
    )]
    DatabaseDiffers { path: PathBuf, used: &'static str, wanted: &'static str },
    #[error("{0} is not a master key: it must hold exactly 32 bytes")]
    KeyInvalid(PathBuf),
}

/// The kind of database that belongs to a data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Database {
    /// A file in the data directory.
    Sqlite,
    /// A server named in the configuration.
    Postgres,
}

impl Database {
    const fn name(self) -> &'static str {
        match self {
            Database::Sqlite => "its own SQLite database",
            Database::Postgres => "a PostgreSQL database",
        }
    }
}

pub struct DataDir {
    path: PathBuf,
    /// A kernel lock: it is released however the process ends.
    _lock: File,
}

impl DataDir {
    /// Creates the directory if it doesn't exist, makes it private and locks it for this process.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        private_data_dir(path)?;
        let lock_path = path.join("broker.lock");
        let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(SECRET_MODE).open(&lock_path);
        let lock = lock.map_err(failed(&lock_path, "opening"))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(DataDirError::InUse(path.to_owned())),
            Err(e) => Err(failed(&lock_path, "locking")(e.into())),
        }
    }

    /// Fixes the kind of database: with the other kind, the broker would find none of its earlier records.
    pub fn use_database(&self, wanted: Database) -> Result<(), DataDirError> {
        let marker = self.path.join("postgres");
        let is_marked = marker.try_exists().map_err(failed(&marker, "checking for"))?;
        let has_file = self.path.join("broker.db").try_exists().map_err(failed(&self.path, "checking for broker.db"))?;
        let used = match (is_marked, has_file) {
            (true, _) => Database::Postgres,
            (false, true) => Database::Sqlite,
            (false, false) => wanted,
        };
        if used != wanted {
            return Err(DataDirError::DatabaseDiffers { path: self.path.clone(), used: used.name(), wanted: wanted.name() });
        }
        if wanted == Database::Postgres && !is_marked {
            self.write_once(&marker, b"This data directory's records are in a PostgreSQL database.\n")?;
        }
        Ok(())
    }

    pub fn master_key_path(&self) -> PathBuf {
        self.path.join("master.key")
    }

    pub fn previous_key_path(&self) -> PathBuf {
        self.path.join("master.previous.key")
    }

    /// The new master key during a rotation.
    fn next_key_path(&self) -> PathBuf {
        self.path.join("master.next.key")
    }

    /// Creates the database file as private. SQLite gives its additional files the same mode.
    pub fn database(&self) -> Result<PathBuf, DataDirError> {
        let path = self.path.join("broker.db");
        let made = OpenOptions::new().create(true).truncate(false).write(true).mode(SECRET_MODE).open(&path);
        made.map_err(failed(&path, "opening"))?;
        Ok(path)
    }

    /// Reads the master key, or creates it if no sandbox depends on an earlier one.
    pub fn master_key(&self, has_sandboxes: bool) -> Result<MasterKey, DataDirError> {
        let path = self.master_key_path();
        match self.key_in(&path)? {
            Some(key) => Ok(key),
            None if has_sandboxes => Err(DataDirError::KeyMissing(path)),
            None => {
                let key = MasterKey::generate();
                self.write_once(&path, key.expose())?;
                Ok(key)
            }
        }
    }

    /// The previous master key, as long as a token issued with it can still be valid.
    pub fn previous_key(&self, longest_token_life: Duration) -> Result<Option<MasterKey>, DataDirError> {
        let path = self.previous_key_path();
        let age = fs::metadata(&path).and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > longest_token_life) {
            fs::remove_file(&path).map_err(failed(&path, "removing"))?;
            return Ok(None);
        }
        self.key_in(&path)
    }

    pub fn next_key(&self) -> Result<Option<MasterKey>, DataDirError> {
        self.key_in(&self.next_key_path())
    }

    pub fn write_next_key(&self, key: &MasterKey) -> Result<(), DataDirError> {
        self.write_once(&self.next_key_path(), key.expose())
    }

    /// Removes the new key of a failed rotation.
    pub fn remove_next_key(&self) -> Result<(), DataDirError> {
        remove(&self.next_key_path())
    }

    /// Replaces the master key with the next one. The replaced key becomes the previous key if it is still needed.
    pub fn take_next_key(&self, previous: Option<&MasterKey>) -> Result<(), DataDirError> {
        let path = self.previous_key_path();
        match previous {
            Some(key) => self.write_once(&path, key.expose())?,
            None => remove(&path)?,
        }
        fs::rename(self.next_key_path(), self.master_key_path()).map_err(failed(&self.next_key_path(), "naming"))?;
        File::open(&self.path).and_then(|dir| dir.sync_all()).map_err(failed(&self.path, "syncing"))
    }

    fn key_in(&self, path: &Path) -> Result<Option<MasterKey>, DataDirError> {
        let path = path.to_owned();
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed(&path, "opening")(e)),
        };
        let meta = file.metadata().map_err(failed(&path, "reading the owner and mode"))?;
        if meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(DataDirError::KeyForeign(path));
        }
        if meta.mode() & OTHERS_MASK != 0 {
            return Err(DataDirError::KeyExposed { path, mode: meta.mode() & 0o7777 });
        }
        let mut bytes = [0u8; MasterKey::LEN];
        let is_exact = meta.len() == bytes.len() as u64 && file.read_exact(&mut bytes).is_ok();
        let key = is_exact.then(|| MasterKey::from_bytes(bytes));
        bytes.zeroize();
        key.ok_or(DataDirError::KeyInvalid(path)).map(Some)
    }

    /// The node's id, which is as permanent as the data directory.
    pub fn node_id(&self) -> Result<String, DataDirError> {
        let path = self.path.join("node.id");
        match fs::read_to_string(&path) {
            Ok(id) => Ok(id.trim().to_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let id = RequestId::new().as_str().replacen("req_", "node_", 1);
                self.write_once(&path, id.as_bytes())?;
                Ok(id)
            }
            Err(e) => Err(failed(&path, "reading")(e)),
        }
    }

    /// Returns true if the node was last used from this same directory since the last boot. The original of a copied
    /// directory, or of one on another machine, may still be running. If this can't be determined, the directory counts
    /// as a copy.
    pub fn is_original_directory(&self) -> Result<bool, DataDirError> {
        let path = self.path.join(DIRECTORY_IDENTITY_FILE);
        match fs::read_to_string(&path) {
            Ok(last) => Ok(last == self.directory_identity()?),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(failed(&path, "reading")(e)),
        }
    }

    /// Records this directory as the one where the node is used.
    pub fn record_directory_identity(&self) -> Result<(), DataDirError> {
        self.write_once(&self.path.join(DIRECTORY_IDENTITY_FILE), self.directory_identity()?.as_bytes())
    }

    /// Identifies this directory by what a copy can't share: the machine's boot id, and the inode and creation time of
    /// the node id file.
    fn directory_identity(&self) -> Result<String, DataDirError> {
        let boot = fs::read_to_string(BOOT_ID).map_err(failed(Path::new(BOOT_ID), "reading"))?;
        let path = self.path.join("node.id");
        let meta = fs::metadata(&path).map_err(failed(&path, "reading the owner and mode"))?;
        // On a filesystem without creation times, only the inode number is available.
        let born = meta.created().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok()).unwrap_or_default();
        Ok(format!("{} {} {}\n", boot.trim(), meta.ino(), born.as_nanos()))
    }

    /// Writes a file that is either complete and durable or absent.
    fn write_once(&self, path: &Path, bytes: &[u8]) -> Result<(), DataDirError> {
        write_atomically(path, bytes).map_err(failed(path, "writing"))
    }
}

/// Replaces a file in the data directory atomically. It is durable when this returns.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let partial = path.with_extension("partial");
    // Left over from a crash, and useless.
    match fs::remove_file(&partial) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = OpenOptions::new().create_new(true).write(true).mode(SECRET_MODE).open(&partial)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&partial, path)?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

fn remove(path: &Path) -> Result<(), DataDirError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(path, "removing")(e)),
        _ => Ok(()),
    }
}

fn failed(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> DataDirError {
    let path = path.to_owned();
    move |cause| DataDirError::Io { path, doing, cause }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_master_key_is_created_once_and_readable_by_the_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(dir.path()).unwrap();
        assert!(matches!(data.master_key(true), Err(DataDirError::KeyMissing(_))));
        let made = data.master_key(false).unwrap();
        assert_eq!(data.master_key(true).unwrap().expose(), made.expose());
        let path = dir.path().join("master.key");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(data.master_key(true), Err(DataDirError::KeyExposed { .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, b"short").unwrap();
        assert!(matches!(data.master_key(true), Err(DataDirError::KeyInvalid(_))));
    }

    #[test]
    fn a_data_directory_is_tied_to_one_kind_of_database() {
        for (first, second) in [(Database::Sqlite, Database::Postgres), (Database::Postgres, Database::Sqlite)] {
            let dir = tempfile::tempdir().unwrap();
            let data = DataDir::open(dir.path()).unwrap();
            data.use_database(first).unwrap();
            if first == Database::Sqlite {
                data.database().unwrap();
            }
            data.use_database(first).unwrap();
            assert!(matches!(data.use_database(second), Err(DataDirError::DatabaseDiffers { .. })));
        }
    }

    #[test]
    fn a_data_directory_has_one_broker_and_one_node_name() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::open(dir.path()).unwrap();
        assert!(matches!(DataDir::open(dir.path()), Err(DataDirError::InUse(_))));
        let name = data.node_id().unwrap();
        drop(data);
        assert_eq!(DataDir::open(dir.path()).unwrap().node_id().unwrap(), name);
    }

    #[test]
    fn a_copy_of_a_data_directory_is_distinguished_from_the_original() {
        let (dir, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let data = DataDir::open(dir.path()).unwrap();
        data.node_id().unwrap();
        assert!(!data.is_original_directory().unwrap(), "it was never used");
        data.record_directory_identity().unwrap();
        assert!(data.is_original_directory().unwrap());
        for name in ["node.id", DIRECTORY_IDENTITY_FILE] {
            fs::copy(dir.path().join(name), copy.path().join(name)).unwrap();
        }
        assert!(!DataDir::open(copy.path()).unwrap().is_original_directory().unwrap());
        drop(data);
        let moved = copy.path().join("moved");
        fs::rename(dir.path(), &moved).unwrap();
        assert!(DataDir::open(&moved).unwrap().is_original_directory().unwrap());
        fs::create_dir(dir.path()).unwrap();
    }
}
