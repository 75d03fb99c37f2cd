//! What both sides last agreed on, on disk: a whole tree once, then what changed, each record with its checksum.
//!
//! A record is written after what it says is durable on both sides. One that is lost costs nothing: both sides still agree, and it is found
//! again. So a torn end is cut off, and nothing else can be wrong with the file but a disk that lies.
//!
//! What is about to be made is noted before: a run that is killed in between finds its own doing, and takes it for nobody's edit. A later
//! record of what was agreed on ends such a note.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use crate::{
    codec::{In, Out},
    error::SyncError,
    halt::Side,
    tree::{Tree, Update},
};

const MAGIC: &[u8] = b"cobox sync 2\n";
const CHECK_BYTES: usize = 8;
/// Longest record, in bytes; longer lists are several.
const MAX_RECORD_BYTES: usize = 1024 * 1024;
/// The file is written anew when what was added is this much, in bytes, and more than the tree itself.
const REWRITE_AFTER: u64 = 4 * 1024 * 1024;

const AGREED: u8 = 1;
const MAKING_HERE: u8 = 2;
const MAKING_THERE: u8 = 3;

/// Something one side is to become, that may have become so or not.
pub type Making = (Side, Update);

pub struct Ancestor {
    path: PathBuf,
    file: File,
    tree: Tree,
    tree_bytes: u64,
    added_bytes: u64,
    making: Vec<Making>,
    /// The file lacks something that was to be written, and may end in half of it: it has to be written anew.
    is_behind: bool,
    /// How often something was agreed on: a sync that gets on.
    steps: u64,
}

impl Ancestor {
    pub fn open(path: &Path) -> Result<Self, SyncError> {
        let failed = |e: io::Error| SyncError::State(format!("{}: {e}", path.display()));
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let Remembered { tree, making, good } = read(&bytes);
        if good < bytes.len() || bytes.is_empty() {
            file.set_len(good as u64).map_err(failed)?;
        }
        file.seek(SeekFrom::End(0)).map_err(failed)?;
        let mut ancestor =
            Self { path: path.to_owned(), file, tree, tree_bytes: 0, added_bytes: good as u64, making, is_behind: false, steps: 0 };
        if good == 0 {
            ancestor.rewrite()?;
        }
        Ok(ancestor)
    }

    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// What was to be made, and is not known to be.
    pub fn making(&self) -> &[Making] {
        &self.making
    }

    /// Notes what one side is to become. Known to a run after one that was killed; a machine that fails may forget it.
    pub fn make(&mut self, side: Side, updates: Vec<Update>) -> Result<(), SyncError> {
        let tag = if side == Side::Here { MAKING_HERE } else { MAKING_THERE };
        let bytes = records(tag, updates.iter().map(|(path, entry)| (path, entry.as_ref())));
        self.making.extend(updates.into_iter().map(|update| (side, update)));
        if self.is_behind {
            self.rewrite()?;
        }
        self.append(&bytes)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), SyncError> {
        self.added_bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| {
            self.is_behind = true;
            self.failed(e)
        })
    }

    /// Both sides agree on these, and on nothing else of what was to be made. Durable when this returns.
    pub fn agree(&mut self, updates: Vec<Update>) -> Result<(), SyncError> {
        if updates.is_empty() && self.making.is_empty() {
            return Ok(());
        }
        self.making.clear();
        self.steps += u64::from(!updates.is_empty());
        let bytes = records(AGREED, updates.iter().map(|(path, entry)| (path, entry.as_ref())));
        for (path, entry) in updates {
            self.tree.set(path, entry);
        }
        let added = self.added_bytes + bytes.len() as u64;
        if self.is_behind || added > REWRITE_AFTER && added > self.tree_bytes {
            return self.rewrite();
        }
        self.append(&bytes)?;
        self.file.sync_data().map_err(|e| self.failed(e))
    }

    /// The whole tree into a new file, which then takes the old one's place.
    fn rewrite(&mut self) -> Result<(), SyncError> {
        let bytes = [MAGIC, &records(AGREED, self.tree.iter().map(|(path, entry)| (path, Some(entry))))].concat();
        let beside = self.path.with_extension("new");
        let written = || {
            let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            std::fs::rename(&beside, &self.path)?;
            if let Some(folder) = self.path.parent() {
                File::open(folder)?.sync_all()?;
            }
            Ok(file)
        };
        self.is_behind = true;
        self.file = written().map_err(|e| {
            // Half of it would keep the disk full.
            let _ = std::fs::remove_file(&beside);
            self.failed(e)
        })?;
        self.is_behind = false;
        (self.tree_bytes, self.added_bytes) = (bytes.len() as u64, 0);
        Ok(())
    }

    fn failed(&self, e: io::Error) -> SyncError {
        match Errno::from_io_error(&e) {
            Some(Errno::NOSPC | Errno::DQUOT) => SyncError::Full,
            _ => SyncError::State(format!("remembering what both sides agree on in {}: {e}", self.path.display())),
        }
    }
}

fn records<'a>(tag: u8, items: impl Iterator<Item = (&'a crate::RelPath, Option<&'a crate::Entry>)>) -> Vec<u8> {
    let (mut bytes, mut record) = (Vec::new(), Out(vec![tag]));
    for (path, entry) in items {
        record.path(path).entry(entry);
        if record.0.len() > MAX_RECORD_BYTES / 2 {
            close(&mut record, &mut bytes);
        }
    }
    // One without anything still ends what was noted before it.
    if record.0.len() > 1 || bytes.is_empty() {
        close(&mut record, &mut bytes);
    }
    bytes
}

fn close(record: &mut Out, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&(record.0.len() as u32).to_be_bytes());
    bytes.extend_from_slice(&record.0);
    bytes.extend_from_slice(&blake3::hash(&record.0).as_bytes()[..CHECK_BYTES]);
    // All but its tag.
    record.0.truncate(1);
}

#[derive(Default)]
struct Remembered {
    tree: Tree,
    making: Vec<Making>,
    /// How much of the file is good, in bytes.
    good: usize,
}

fn read(bytes: &[u8]) -> Remembered {
    let mut all = Remembered::default();
    let Some(rest) = bytes.strip_prefix(MAGIC) else { return all };
    let mut input = In(rest);
    all.good = MAGIC.len();
    while let Ok(length) = input.u32() {
        let Ok(record) = input.take(length as usize) else { break };
        let Ok(check) = input.take(CHECK_BYTES) else { break };
        if record.len() > MAX_RECORD_BYTES || blake3::hash(record).as_bytes()[..CHECK_BYTES] != *check {
            break;
        }
        let Some((tag, items)) = record.split_first() else { break };
        let Ok(updates) = In(items).all(|i| Ok((i.path()?, i.entry()?))) else { break };
        match *tag {
            AGREED => {
                all.making.clear();
                updates.into_iter().for_each(|(path, entry)| all.tree.set(path, entry));
            }
            MAKING_HERE => all.making.extend(updates.into_iter().map(|update| (Side::Here, update))),
            MAKING_THERE => all.making.extend(updates.into_iter().map(|update| (Side::Sandbox, update))),
            _ => break,
        }
        all.good = bytes.len() - input.0.len();
    }
    all
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
    fn a_torn_end_costs_only_itself() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        let mut ancestor = Ancestor::open(&path).unwrap();
        ancestor.agree(vec![file(1), file(2)]).unwrap();
        ancestor.agree(vec![(file(1).0, None)]).unwrap();
        let known = ancestor.tree().clone();
        ancestor.agree(vec![file(3)]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for cut in 1..60 {
            std::fs::write(&path, &whole[..whole.len() - cut]).unwrap();
            assert_eq!(*Ancestor::open(&path).unwrap().tree(), known, "{cut}");
        }
        let mut again = Ancestor::open(&path).unwrap();
        again.agree(vec![file(4)]).unwrap();
        let tree = again.tree().clone();
        assert_eq!((tree.len(), Ancestor::open(&path).unwrap().tree()), (2, &tree));
        std::fs::write(&path, b"something else").unwrap();
        assert!(Ancestor::open(&path).unwrap().tree().is_empty());
    }

    #[test]
    fn what_was_to_be_made_is_known_until_something_is_agreed_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        let mut ancestor = Ancestor::open(&path).unwrap();
        ancestor.agree(vec![file(1)]).unwrap();
        ancestor.make(Side::Sandbox, vec![file(2), (file(1).0, None)]).unwrap();
        ancestor.make(Side::Here, vec![file(3)]).unwrap();
        let again = Ancestor::open(&path).unwrap();
        assert_eq!(again.making(), [(Side::Sandbox, file(2)), (Side::Sandbox, (file(1).0, None)), (Side::Here, file(3))]);
        assert_eq!(again.tree().len(), 1);
        ancestor.agree(Vec::new()).unwrap();
        assert!(ancestor.making().is_empty() && Ancestor::open(&path).unwrap().making().is_empty());
    }

    #[test]
    fn it_is_written_anew_before_it_grows_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("base");
        let mut ancestor = Ancestor::open(&path).unwrap();
        ancestor.added_bytes = REWRITE_AFTER;
        ancestor.agree(vec![file(1)]).unwrap();
        ancestor.agree(vec![file(2)]).unwrap();
        assert_eq!(Ancestor::open(&path).unwrap().tree().len(), 2);
    }
}
