//! The last state that both sides agreed on (the common ancestor), stored on disk: one whole tree, followed by changes,
//! each record with its checksum.
//!
//! A record is written after the change it describes is durable on both sides. Losing a record costs nothing: both
//! sides still agree, and the next scan finds that again. A torn record at the end is therefore cut off; only a failing
//! disk can damage the file in any other way.
//!
//! Before changes are made, they are recorded as pending. A run that follows a killed one recognizes them as its own
//! and does not treat them as user edits. The next commit ends all pending changes.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use crate::{
    codec::{Decoder, Encoder},
    error::SyncError,
    side::Side,
    tree::{Tree, Update},
};

const MAGIC: &[u8] = b"cobox sync 2\n";
const CHECKSUM_BYTES: usize = 8;
/// Maximum size of a record, in bytes; longer lists are split into several.
const MAX_RECORD_BYTES: usize = 1024 * 1024;
/// The file is rewritten once this many bytes were appended, if that is also more than the tree itself.
const REWRITE_THRESHOLD_BYTES: u64 = 4 * 1024 * 1024;

const COMMITTED: u8 = 1;
const PENDING_LOCAL: u8 = 2;
const PENDING_SANDBOX: u8 = 3;

/// A change that was started on one side and may or may not have been made.
pub type PendingChange = (Side, Update);

pub struct BaseVersion {
    path: PathBuf,
    file: File,
    tree: Tree,
    tree_bytes: u64,
    appended_bytes: u64,
    pending: Vec<PendingChange>,
    /// The file lacks a record and may end in a partial one, so the next write has to rewrite it.
    needs_rewrite: bool,
    /// Number of commits that changed something; it shows that a sync makes progress.
    commits: u64,
}

impl BaseVersion {
    pub fn open(path: &Path) -> Result<Self, SyncError> {
        let state_error = |e: io::Error| SyncError::State(format!("{}: {e}", path.display()));
        let mut file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path).map_err(state_error)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(state_error)?;
        let StoredState { tree, pending, valid_bytes } = read(&bytes);
        if valid_bytes < bytes.len() || bytes.is_empty() {
            file.set_len(valid_bytes as u64).map_err(state_error)?;
        }
        file.seek(SeekFrom::End(0)).map_err(state_error)?;
        let mut base_version = Self {
            path: path.to_owned(),
            file,
            tree,
            tree_bytes: 0,
            appended_bytes: valid_bytes as u64,
            pending,
            needs_rewrite: false,
            commits: 0,
        };
        if valid_bytes == 0 {
            base_version.rewrite()?;
        }
        Ok(base_version)
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub fn commits(&self) -> u64 {
        self.commits
    }

    /// Changes that were started and are not known to be complete.
    pub fn pending_changes(&self) -> &[PendingChange] {
        &self.pending
    }

    /// Records changes that are about to be made on one side. A run after a killed one finds them; a crash of the
    /// machine may lose them, because the record is not synced to disk.
    pub fn begin_changes(&mut self, side: Side, updates: Vec<Update>) -> Result<(), SyncError> {
        let tag = if side == Side::Local { PENDING_LOCAL } else { PENDING_SANDBOX };
        let bytes = records(tag, updates.iter().map(|(path, entry)| (path, entry.as_ref())));
        self.pending.extend(updates.into_iter().map(|update| (side, update)));
        if self.needs_rewrite {
            self.rewrite()?;
        }
        self.append(&bytes)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), SyncError> {
        self.appended_bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| {
            self.needs_rewrite = true;
            self.state_error(e)
        })
    }

    /// Records that both sides agree on these paths, and ends all other pending changes. Durable on return.
    pub fn commit(&mut self, updates: Vec<Update>) -> Result<(), SyncError> {
        if updates.is_empty() && self.pending.is_empty() {
            return Ok(());
        }
        self.pending.clear();
        self.commits += u64::from(!updates.is_empty());
        let bytes = records(COMMITTED, updates.iter().map(|(path, entry)| (path, entry.as_ref())));
        for (path, entry) in updates {
            self.tree.set(path, entry);
        }
        let added = self.appended_bytes + bytes.len() as u64;
        if self.needs_rewrite || added > REWRITE_THRESHOLD_BYTES && added > self.tree_bytes {
            return self.rewrite();
        }
        self.append(&bytes)?;
        self.file.sync_data().map_err(|e| self.state_error(e))
    }

    /// Writes the whole tree to a new file and renames it over the old one.
    fn rewrite(&mut self) -> Result<(), SyncError> {
        let bytes = [MAGIC, &records(COMMITTED, self.tree.iter().map(|(path, entry)| (path, Some(entry))))].concat();
        let temporary = self.path.with_extension("new");
        let write_new = || {
            let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            std::fs::rename(&temporary, &self.path)?;
            if let Some(folder) = self.path.parent() {
                File::open(folder)?.sync_all()?;
            }
            Ok(file)
        };
        self.needs_rewrite = true;
        self.file = write_new().map_err(|e| {
            // A partial file would keep the disk full.
            let _ = std::fs::remove_file(&temporary);
            self.state_error(e)
        })?;
        self.needs_rewrite = false;
        (self.tree_bytes, self.appended_bytes) = (bytes.len() as u64, 0);
        Ok(())
    }

    fn state_error(&self, e: io::Error) -> SyncError {
        match Errno::from_io_error(&e) {
            Some(Errno::NOSPC | Errno::DQUOT) => SyncError::Full,
            _ => SyncError::State(format!("can't store the sync state in {}: {e}", self.path.display())),
        }
    }
}

fn records<'a>(tag: u8, items: impl Iterator<Item = (&'a crate::RelPath, Option<&'a crate::Entry>)>) -> Vec<u8> {
    let (mut bytes, mut record) = (Vec::new(), Encoder(vec![tag]));
    for (path, entry) in items {
        record.path(path).entry(entry);
        if record.0.len() > MAX_RECORD_BYTES / 2 {
            finish_record(&mut record, &mut bytes);
        }
    }
    // An empty record still ends the pending changes before it.
    if record.0.len() > 1 || bytes.is_empty() {
        finish_record(&mut record, &mut bytes);
    }
    bytes
}

fn finish_record(record: &mut Encoder, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&(record.0.len() as u32).to_be_bytes());
    bytes.extend_from_slice(&record.0);
    bytes.extend_from_slice(&blake3::hash(&record.0).as_bytes()[..CHECKSUM_BYTES]);
    // Keep the tag.
    record.0.truncate(1);
}

#[derive(Default)]
struct StoredState {
    tree: Tree,
    pending: Vec<PendingChange>,
    /// Length of the valid part of the file, in bytes.
    valid_bytes: usize,
}

fn read(bytes: &[u8]) -> StoredState {
    let mut state = StoredState::default();
    let Some(rest) = bytes.strip_prefix(MAGIC) else { return state };
    let mut input = Decoder(rest);
    state.valid_bytes = MAGIC.len();
    while let Ok(length) = input.u32() {
        let Ok(record) = input.take(length as usize) else { break };
        let Ok(check) = input.take(CHECKSUM_BYTES) else { break };
        if record.len() > MAX_RECORD_BYTES || blake3::hash(record).as_bytes()[..CHECKSUM_BYTES] != *check {
            break;
        }
        let Some((tag, items)) = record.split_first() else { break };
        let Ok(updates) = Decoder(items).all(|i| Ok((i.path()?, i.entry()?))) else { break };
        match *tag {
            COMMITTED => {
                state.pending.clear();
                updates.into_iter().for_each(|(path, entry)| state.tree.set(path, entry));
            }
            PENDING_LOCAL => state.pending.extend(updates.into_iter().map(|update| (Side::Local, update))),
            PENDING_SANDBOX => state.pending.extend(updates.into_iter().map(|update| (Side::Sandbox, update))),
            _ => break,
        }
        state.valid_bytes = bytes.len() - input.0.len();
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Digest, Entry, RelPath};

    fn file(number: u8) -> Update {
        let entry = Entry::File { digest: Digest::of(&[number]), size: 1, exec: false };
        (RelPath::new(format!("f{number}").as_bytes()).unwrap(), Some(entry))
    }

    #[test]
    fn a_torn_record_at_the_end_is_the_only_one_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        let mut base_version = BaseVersion::open(&path).unwrap();
        base_version.commit(vec![file(1), file(2)]).unwrap();
        base_version.commit(vec![(file(1).0, None)]).unwrap();
        let committed = base_version.tree().clone();
        base_version.commit(vec![file(3)]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        for cut in 1..60 {
            std::fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
            assert_eq!(*BaseVersion::open(&path).unwrap().tree(), committed, "{cut}");
        }
        let mut reopened = BaseVersion::open(&path).unwrap();
        reopened.commit(vec![file(4)]).unwrap();
        let tree = reopened.tree().clone();
        assert_eq!((tree.len(), BaseVersion::open(&path).unwrap().tree()), (2, &tree));
        std::fs::write(&path, b"something else").unwrap();
        assert!(BaseVersion::open(&path).unwrap().tree().is_empty());
    }

    #[test]
    fn pending_changes_are_remembered_until_the_next_commit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        let mut base_version = BaseVersion::open(&path).unwrap();
        base_version.commit(vec![file(1)]).unwrap();
        base_version.begin_changes(Side::Sandbox, vec![file(2), (file(1).0, None)]).unwrap();
        base_version.begin_changes(Side::Local, vec![file(3)]).unwrap();
        let reopened = BaseVersion::open(&path).unwrap();
        assert_eq!(reopened.pending_changes(), [(Side::Sandbox, file(2)), (Side::Sandbox, (file(1).0, None)), (Side::Local, file(3))]);
        assert_eq!(reopened.tree().len(), 1);
        base_version.commit(Vec::new()).unwrap();
        assert!(base_version.pending_changes().is_empty() && BaseVersion::open(&path).unwrap().pending_changes().is_empty());
    }

    #[test]
    fn the_file_is_rewritten_before_it_grows_without_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        let mut base_version = BaseVersion::open(&path).unwrap();
        base_version.appended_bytes = REWRITE_THRESHOLD_BYTES;
        base_version.commit(vec![file(1)]).unwrap();
        base_version.commit(vec![file(2)]).unwrap();
        assert_eq!(BaseVersion::open(&path).unwrap().tree().len(), 2);
    }
}
