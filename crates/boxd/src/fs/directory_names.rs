//! Reads the names of a directory in order. Memory use depends on the request, never on the directory's size.

use std::{
    cmp::Ordering,
    collections::{BinaryHeap, VecDeque},
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, Dir, FileType},
    io::Errno,
};

use crate::files::{is_temp_file_name, kind};

/// Collects the smallest of many keys, up to a limit.
pub struct SmallestKeys<K: Ord> {
    heap: BinaryHeap<K>,
    limit: usize,
}

impl<K: Ord> SmallestKeys<K> {
    pub fn new(limit: usize) -> Self {
        Self { heap: BinaryHeap::new(), limit }
    }

    /// Whether an element would be kept. The closure compares it to the largest one kept.
    pub fn would_keep(&self, compare_to_largest: impl FnOnce(&K) -> Ordering) -> bool {
        self.heap.len() < self.limit || self.heap.peek().is_some_and(|largest| compare_to_largest(largest) == Ordering::Less)
    }

    pub fn push(&mut self, key: K) {
        if self.heap.len() < self.limit {
            self.heap.push(key);
        } else if let Some(mut largest) = self.heap.peek_mut()
            && key < *largest
        {
            *largest = key;
        }
    }

    pub fn into_sorted(self) -> Vec<K> {
        self.heap.into_sorted_vec()
    }
}

/// Calls `visit` for every name in a directory except `.`, `..` and unfinished files, until it returns false.
pub fn for_each_name(directory: impl AsFd, mut visit: impl FnMut(&[u8], FileType) -> bool) -> Result<(), Errno> {
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") || is_temp_file_name(name) {
            continue;
        }
        if !visit(name, entry.file_type()) {
            break;
        }
    }
    Ok(())
}

/// The type of an entry. The kernel is asked only if the directory listing didn't contain it.
pub fn entry_type(directory: impl AsFd, name: &[u8], listed_type: FileType) -> FileType {
    match listed_type {
        FileType::Unknown => rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map_or(FileType::Unknown, |s| kind(&s)),
        known => known,
    }
}

/// Names of one directory kept in memory; for more, the directory is read again. With the maximum depth this limits a
/// walk to about 16 MiB.
const BATCH_NAMES: usize = 512;

/// One directory of a sorted walk.
pub struct SortedNames {
    pub directory: OwnedFd,
    after: Option<Vec<u8>>,
    batch: VecDeque<(Vec<u8>, FileType)>,
    is_last: bool,
}

impl SortedNames {
    pub fn new(directory: OwnedFd, after: Option<Vec<u8>>) -> Self {
        Self { directory, after, batch: VecDeque::new(), is_last: false }
    }

    pub fn next(&mut self) -> Result<Option<(Vec<u8>, FileType)>, Errno> {
        if self.batch.is_empty() && !self.is_last {
            let mut smallest = SmallestKeys::new(BATCH_NAMES);
            let after = self.after.take();
            for_each_name(&self.directory, |name, kind| {
                if after.as_deref().is_none_or(|a| name > a) && smallest.would_keep(|l: &NamedEntry| name.cmp(&l.name)) {
                    smallest.push(NamedEntry { name: name.to_vec(), kind });
                }
                true
            })?;
            self.batch = smallest.into_sorted().into_iter().map(|n| (n.name, n.kind)).collect();
            self.is_last = self.batch.len() < BATCH_NAMES;
            self.after = self.batch.back().map(|(name, _)| name.clone());
        }
        Ok(self.batch.pop_front())
    }
}

struct NamedEntry {
    name: Vec<u8>,
    kind: FileType,
}
impl PartialEq for NamedEntry {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}
impl Eq for NamedEntry {}
impl PartialOrd for NamedEntry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for NamedEntry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}
