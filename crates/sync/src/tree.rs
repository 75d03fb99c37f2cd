//! All paths of one side with their entries, limited in number and size.

use std::collections::{BTreeMap, btree_map};

use crate::{entry::Entry, path::RelPath};

/// A path's new entry; `None` if it was deleted.
pub type Update = (RelPath, Option<Entry>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    entries: BTreeMap<RelPath, Entry>,
    files: usize,
    /// Total length of paths and link targets.
    bytes: usize,
}

/// Maximum total length of a tree's paths and link targets, in bytes: a million entries of usual length, but not of the
/// maximum length.
const MAX_TREE_BYTES: usize = 256 * 1024 * 1024;

/// Why updates do not form a valid tree; the side that sent them is hostile or broken.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum InvalidTree {
    #[error("the parent of {0} is not a directory")]
    MissingParent(RelPath),
    #[error("{0} has contents and is not a directory")]
    NotADirectory(RelPath),
    #[error("there are more than {0} files and directories")]
    TooMany(usize),
    #[error("the paths take more than {MAX_TREE_BYTES} bytes in total")]
    PathsTooLong,
}

impl Tree {
    pub fn get(&self, path: &RelPath) -> Option<&Entry> {
        self.entries.get(path)
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn files(&self) -> usize {
        self.files
    }

    pub fn iter(&self) -> btree_map::Iter<'_, RelPath, Entry> {
        self.entries.iter()
    }

    pub fn set(&mut self, path: RelPath, entry: Option<Entry>) {
        let length = path.bytes().len();
        let bytes = |entry: &Option<Entry>| match entry {
            Some(Entry::Link { target }) => length + target.len(),
            Some(_) => length,
            None => 0,
        };
        self.files += usize::from(entry.as_ref().is_some_and(Entry::is_file));
        self.bytes += bytes(&entry);
        let before = match entry {
            Some(entry) => self.entries.insert(path, entry),
            None => self.entries.remove(&path),
        };
        self.files -= usize::from(before.as_ref().is_some_and(Entry::is_file));
        self.bytes -= bytes(&before);
    }

    /// Everything strictly beneath a directory.
    pub fn beneath<'a>(&'a self, top: &'a RelPath) -> impl Iterator<Item = (&'a RelPath, &'a Entry)> {
        self.entries.range((std::ops::Bound::Excluded(top), std::ops::Bound::Unbounded)).take_while(|(path, _)| path.is_beneath(top))
    }

    /// Applies updates from the other side. After an error the tree contains invalid entries and has to be discarded.
    pub fn update(&mut self, updates: Vec<Update>, max_entries: usize) -> Result<(), InvalidTree> {
        let touched: Vec<RelPath> = updates.iter().map(|(path, _)| path.clone()).collect();
        for (path, entry) in updates {
            self.set(path, entry);
            if self.len() > max_entries {
                return Err(InvalidTree::TooMany(max_entries));
            }
            if self.bytes > MAX_TREE_BYTES {
                return Err(InvalidTree::PathsTooLong);
            }
        }
        for path in touched {
            match self.get(&path) {
                Some(_) if !path.parent().is_none_or(|p| self.get(&p).is_some_and(Entry::is_dir)) => {
                    return Err(InvalidTree::MissingParent(path));
                }
                Some(Entry::Dir) => {}
                _ if self.beneath(&path).next().is_some() => return Err(InvalidTree::NotADirectory(path)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes a path and everything beneath it.
    pub fn prune(&mut self, top: &RelPath) {
        let beneath: Vec<RelPath> = self.beneath(top).map(|(path, _)| path.clone()).collect();
        beneath.into_iter().chain([top.clone()]).for_each(|path| self.set(path, None));
    }
}

impl FromIterator<(RelPath, Entry)> for Tree {
    fn from_iter<I: IntoIterator<Item = (RelPath, Entry)>>(entries: I) -> Self {
        let mut tree = Self::default();
        entries.into_iter().for_each(|(path, entry)| tree.set(path, Some(entry)));
        tree
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Digest;

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn updates_that_form_no_valid_tree_are_rejected() {
        let file = Entry::File { digest: Digest::of(b"x"), size: 1, exec: false };
        let mut tree = Tree::default();
        tree.update(vec![(path("a"), Some(Entry::Dir)), (path("a/x"), Some(file.clone()))], 10).unwrap();
        assert_eq!((tree.len(), tree.files()), (2, 1));
        assert_eq!(tree.clone().update(vec![(path("b/x"), Some(file.clone()))], 10), Err(InvalidTree::MissingParent(path("b/x"))));
        assert_eq!(tree.clone().update(vec![(path("a"), None)], 10), Err(InvalidTree::NotADirectory(path("a"))));
        assert_eq!(tree.clone().update(vec![(path("a"), Some(file.clone()))], 10), Err(InvalidTree::NotADirectory(path("a"))));
        assert_eq!(tree.clone().update(vec![(path("c"), Some(file))], 2), Err(InvalidTree::TooMany(2)));
        tree.prune(&path("a"));
        assert!(tree.is_empty() && tree.files() == 0);
    }
}
