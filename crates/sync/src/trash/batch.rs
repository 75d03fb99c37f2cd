//! One batch of the trash: the directory that receives files, and its recovery after a process was killed.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat},
    io::Errno,
};

use super::{
    EmptiedTrash, FLAGS,
    journal::{self, JournalRecord},
    now_millis, whole_blocks,
};
use crate::{
    beneath,
    entry::{Digest, Entry},
    path::RelPath,
    staging::{list, rename_noreplace},
};

/// Suffix of a staged version that is about to take a path's place. The swap leaves the old version under this name.
const INCOMING_SUFFIX: &str = ".new";
const UNDO_SUFFIX: &str = "undo";
/// Prefix of the empty file that marks a batch as too old; the time of the mark follows, in milliseconds since 1970.
const EXPIRY_MARK: &str = "too-old-since-";
/// Maximum time between the mark and the removal of a batch, in milliseconds: one day.
const MAX_GRACE_PERIOD: u64 = 24 * 3600 * 1000;

/// Start time, a random number, and whether a restore created the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BatchName {
    /// Milliseconds since 1970.
    pub at: u64,
    random: u32,
    pub is_undo: bool,
}

impl fmt::Display for BatchName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:013}-{:08x}{}", self.at, self.random, if self.is_undo { "-undo" } else { "" })
    }
}

impl BatchName {
    pub fn parse(name: &[u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(name).ok()?.split('-');
        let (at, random) = (parts.next()?.parse().ok()?, u32::from_str_radix(parts.next()?, 16).ok()?);
        let is_undo = match (parts.next(), parts.next()) {
            (None, None) => false,
            (Some(UNDO_SUFFIX), None) => true,
            _ => return None,
        };
        Some(Self { at, random, is_undo })
    }
}

pub struct Batch {
    pub name: BatchName,
    pub folder: OwnedFd,
}

impl Batch {
    pub fn create(top: &OwnedFd, is_undo: bool) -> Result<Self, Errno> {
        let mut random = [0; 4];
        getrandom::fill(&mut random).map_err(|_| Errno::IO)?;
        let name = BatchName { at: now_millis(), random: u32::from_ne_bytes(random), is_undo };
        rustix::fs::mkdirat(top, name.to_string(), Mode::from_raw_mode(0o700))?;
        // The records are useless if the batch's own name is not durable.
        rustix::fs::fsync(top)?;
        Self::open(top, name)?.ok_or(Errno::NOENT)
    }

    /// Opens a batch; `None` if it is gone.
    pub fn open(top: &OwnedFd, name: BatchName) -> Result<Option<Self>, Errno> {
        match rustix::fs::openat(top, name.to_string(), FLAGS, Mode::empty()) {
            Ok(folder) => Ok(Some(Self { name, folder })),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub fn append(&self, records: &[JournalRecord]) -> Result<(), Errno> {
        journal::append(&self.folder, records)
    }

    pub fn records(&self) -> Result<Vec<JournalRecord>, Errno> {
        journal::read(&self.folder)
    }

    /// Keeps only these records, and removes the batch if none are left.
    pub fn retain(&self, top: &OwnedFd, records: &[JournalRecord]) -> Result<(), Errno> {
        match records {
            [] => self.remove(top).map(drop),
            records => journal::rewrite(&self.folder, records),
        }
    }

    /// Records whose old version is stored in the batch, with its size.
    pub fn stored(&self) -> Result<Vec<(JournalRecord, u64)>, Errno> {
        let mut stored = Vec::new();
        for record in self.records()?.into_iter().filter(JournalRecord::is_stored) {
            if let Some(stat) = self.stat(&record)? {
                stored.push((record, size(&stat)));
            }
        }
        Ok(stored)
    }

    pub fn stat(&self, record: &JournalRecord) -> Result<Option<Stat>, Errno> {
        beneath::stat(self.folder.as_fd(), record.number.to_string().as_bytes())
    }

    /// Size of the batch's files in whole blocks, in bytes.
    pub fn bytes(&self) -> Result<u64, Errno> {
        let mut bytes = 0;
        for name in list(&self.folder)? {
            if let Some(stat) = beneath::stat(self.folder.as_fd(), &name)? {
                bytes += whole_blocks(size(&stat));
            }
        }
        Ok(bytes)
    }

    /// Completes or reverts an interrupted swap: the file under the incoming name is either the sandbox's version,
    /// which is not needed, or one that the folder had.
    pub fn recover(&self) -> Result<(), Errno> {
        let names = list(&self.folder)?;
        let incoming = |name: &Vec<u8>| std::str::from_utf8(name).ok()?.strip_suffix(INCOMING_SUFFIX)?.parse::<u64>().ok();
        let swaps: Vec<u64> = names.iter().filter_map(incoming).collect();
        if swaps.is_empty() {
            return Ok(());
        }
        let records: HashMap<u64, JournalRecord> = self.records()?.into_iter().map(|record| (record.number, record)).collect();
        for number in swaps {
            let name = incoming_name(number);
            let Some(stat) = beneath::stat(self.folder.as_fd(), name.as_bytes())? else { continue };
            let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            let new = records.get(&number).and_then(|record| record.new.as_ref());
            if is_folder {
                rustix::fs::unlinkat(&self.folder, name, AtFlags::REMOVEDIR)?;
            } else if new.is_some_and(|new| is_entry(self.folder.as_fd(), name.as_bytes(), new)) {
                rustix::fs::unlinkat(&self.folder, name, AtFlags::empty())?;
            } else {
                rename_noreplace(self.folder.as_fd(), name.as_bytes(), self.folder.as_fd(), number.to_string().as_bytes())?;
            }
        }
        Ok(())
    }

    /// Whether the batch has to be removed, at a time and with a maximum age in milliseconds. A batch that is too old is
    /// marked first and expires only if it still is too old a while later: otherwise a clock that is set forward would
    /// erase the whole trash.
    pub fn is_expired(&self, now: u64, max_age: u64) -> Result<bool, Errno> {
        let since = |name: &Vec<u8>| std::str::from_utf8(name).ok()?.strip_prefix(EXPIRY_MARK)?.parse::<u64>().ok();
        let mut marked = list(&self.folder)?.iter().find_map(since);
        let is_old = now.saturating_sub(self.name.at) > max_age;
        // The clock was ahead when the mark was made.
        if let Some(at) = marked.filter(|at| !is_old || *at > now) {
            rustix::fs::unlinkat(&self.folder, format!("{EXPIRY_MARK}{at}"), AtFlags::empty())?;
            marked = None;
        }
        if is_old && marked.is_none() {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat(&self.folder, format!("{EXPIRY_MARK}{now}"), flags, Mode::from_raw_mode(0o600))?;
        }
        Ok(is_old && now - marked.unwrap_or(now) >= max_age.min(MAX_GRACE_PERIOD))
    }

    /// Deletes the batch with all its files.
    pub fn remove(&self, top: &OwnedFd) -> Result<EmptiedTrash, Errno> {
        let mut emptied = EmptiedTrash::default();
        for name in list(&self.folder)? {
            let Some(stat) = beneath::stat(self.folder.as_fd(), &name)? else { continue };
            let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            rustix::fs::unlinkat(&self.folder, name.as_slice(), flags)?;
            if name.first().is_some_and(u8::is_ascii_digit) {
                (emptied.files, emptied.bytes) = (emptied.files + 1, emptied.bytes + size(&stat));
            }
        }
        rustix::fs::unlinkat(top, self.name.to_string(), AtFlags::REMOVEDIR)?;
        Ok(emptied)
    }
}

/// A batch with durable records, ready to receive the files that they name. The trash stays locked until this is
/// dropped.
pub struct OpenBatch {
    _lock: OwnedFd,
    batch: Batch,
    numbers: HashMap<RelPath, u64>,
}

impl OpenBatch {
    pub fn new(lock: OwnedFd, batch: Batch, records: &[JournalRecord]) -> Self {
        let numbers = records.iter().map(|record| (record.path.clone(), record.number)).collect();
        Self { _lock: lock, batch, numbers }
    }

    fn number(&self, path: &RelPath) -> Result<u64, Errno> {
        // A file without a record must not be moved.
        self.numbers.get(path).copied().ok_or(Errno::INVAL)
    }

    fn folder(&self) -> BorrowedFd<'_> {
        self.batch.folder.as_fd()
    }

    /// Moves a path's file into the batch and returns its status.
    pub fn store(&self, path: &RelPath, parent: BorrowedFd) -> Result<Stat, Errno> {
        let name = self.number(path)?.to_string();
        rename_noreplace(parent, path.name(), self.folder(), name.as_bytes())?;
        beneath::stat(self.folder(), name.as_bytes())?.ok_or(Errno::NOENT)
    }

    /// Moves the file back, under its own or another name.
    pub fn give_back(&self, path: &RelPath, parent: BorrowedFd, name: &[u8]) -> Result<(), Errno> {
        rename_noreplace(self.folder(), self.number(path)?.to_string().as_bytes(), parent, name)
    }

    /// Directory and name for the staged version before [`OpenBatch::swap`].
    pub fn incoming(&self, path: &RelPath) -> Result<(BorrowedFd<'_>, String), Errno> {
        Ok((self.folder(), incoming_name(self.number(path)?)))
    }

    /// Swaps the staged version with the file at the path. `is_expected` judges the file that came out: an unexpected
    /// version is swapped back. If it is uncertain which version is under the incoming name, both stay until
    /// [`Batch::recover`].
    pub fn swap(&self, path: &RelPath, parent: BorrowedFd, is_expected: impl Fn(&Stat) -> bool) -> Result<(), Errno> {
        let number = self.number(path)?;
        let incoming = incoming_name(number);
        let exchange = || rustix::fs::renameat_with(self.folder(), incoming.as_str(), parent, path.name(), RenameFlags::EXCHANGE);
        match exchange() {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                return self.replace_in_two_steps(path, parent, is_expected).inspect_err(|_| self.discard(&incoming));
            }
            Err(e) => {
                self.discard(&incoming);
                return Err(e);
            }
        }
        if !beneath::stat(self.folder(), incoming.as_bytes())?.is_some_and(|stat| is_expected(&stat)) {
            exchange()?;
            self.discard(&incoming);
            return Err(Errno::AGAIN);
        }
        rename_noreplace(self.folder(), incoming.as_bytes(), self.folder(), number.to_string().as_bytes())
    }

    /// For file systems that can't swap two names. The path is absent for a moment.
    fn replace_in_two_steps(&self, path: &RelPath, parent: BorrowedFd, is_expected: impl Fn(&Stat) -> bool) -> Result<(), Errno> {
        if !is_expected(&self.store(path, parent)?) {
            self.give_back(path, parent, path.name())?;
            return Err(Errno::AGAIN);
        }
        let (folder, incoming) = self.incoming(path)?;
        rename_noreplace(folder, incoming.as_bytes(), parent, path.name())
    }

    /// Removes a staged version that was not placed.
    fn discard(&self, incoming: &str) {
        // The next recovery removes it otherwise.
        let _ = rustix::fs::unlinkat(self.folder(), incoming, AtFlags::empty())
            .or_else(|_| rustix::fs::unlinkat(self.folder(), incoming, AtFlags::REMOVEDIR));
    }

    /// Makes the new names durable.
    pub fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fsync(self.folder())
    }
}

fn incoming_name(number: u64) -> String {
    format!("{number}{INCOMING_SUFFIX}")
}

fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// Whether a name refers to this content. A file is only read if its size matches.
pub fn is_entry(parent: BorrowedFd, name: &[u8], entry: &Entry) -> bool {
    let Ok(Some(stat)) = beneath::stat(parent, name) else { return false };
    match (FileType::from_raw_mode(stat.st_mode), entry) {
        (FileType::Directory, Entry::Dir) => true,
        (FileType::Symlink, Entry::Link { target }) => {
            rustix::fs::readlinkat(parent, name, Vec::new()).is_ok_and(|now| now.to_bytes() == &**target)
        }
        (FileType::RegularFile, Entry::File { digest, size: expected, .. }) => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let open = || rustix::fs::openat(parent, name, flags, Mode::empty()).ok();
            size(&stat) == *expected && open().and_then(|file| digest_of(File::from(file))).as_ref() == Some(digest)
        }
        _ => false,
    }
}

fn digest_of(file: File) -> Option<Digest> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file).ok()?;
    Some(Digest(hasher.finalize().into()))
}
