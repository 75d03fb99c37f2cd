//! Merges the changes of a short window: several writes to one file become one change, and a file that was created and
//! removed is not reported.

use std::collections::HashMap;

/// The change of a path as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathChange {
    Created,
    Modified,
    /// boxd moved a finished file to this path, so it was created or replaced.
    Placed,
    Removed,
    Renamed {
        from: Vec<u8>,
        is_modified: bool,
    },
}

#[derive(Clone, Debug)]
pub struct PendingChange {
    order: u64,
    pub change: PathChange,
    pub is_directory: bool,
    /// Device and inode of the containing directory.
    pub parent: (u64, u64),
    /// The new directory in whose scan this was found, if no event of its own reported it.
    pub found_in: Option<Vec<u8>>,
}

/// Pending changes by path relative to the watched directory.
#[derive(Default)]
pub struct PendingChanges {
    entries: HashMap<Vec<u8>, PendingChange>,
    count: u64,
}

impl PendingChanges {
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn add(&mut self, path: Vec<u8>, change: PathChange, is_directory: bool, parent: (u64, u64), found_in: Option<Vec<u8>>) {
        use PathChange::{Created, Modified, Placed, Removed, Renamed};
        let Some(previous) = self.entries.remove(&path) else {
            self.insert(path, change, is_directory, parent, found_in);
            return;
        };
        let (order, found_in) = (previous.order, previous.found_in.or(found_in));
        let change = match (previous.change, change) {
            (Created, Removed) => return,
            (Renamed { from, .. }, Removed) => {
                let entry = PendingChange { order, change: Removed, is_directory, parent, found_in: None };
                self.entries.insert(from, entry);
                return;
            }
            (Created, Created | Modified | Placed) => Created,
            (Removed, Created | Modified | Placed) => Modified,
            (Renamed { from, .. }, Modified | Placed | Created) => Renamed { from, is_modified: true },
            (Placed, Modified | Created) => Placed,
            (_, change) => change,
        };
        self.entries.insert(path, PendingChange { order, change, is_directory, parent, found_in });
    }

    pub fn rename(&mut self, from: Vec<u8>, to: Vec<u8>, is_directory: bool, parent: (u64, u64)) {
        use PathChange::{Created, Removed, Renamed};
        let change = match self.entries.remove(&from).map(|e| e.change) {
            Some(Created) => Created,
            Some(Renamed { from, is_modified }) if from != to => Renamed { from, is_modified },
            // Renamed back to its original path.
            Some(Renamed { is_modified, .. }) => {
                return if is_modified {
                    self.add(to, PathChange::Modified, is_directory, parent, None)
                };
            }
            None | Some(Removed) => Renamed { from, is_modified: false },
            Some(_) => Renamed { from, is_modified: true },
        };
        self.entries.remove(&to);
        self.insert(to, change, is_directory, parent, None);
    }

    fn insert(&mut self, path: Vec<u8>, change: PathChange, is_directory: bool, parent: (u64, u64), found_in: Option<Vec<u8>>) {
        self.count += 1;
        self.entries.insert(path, PendingChange { order: self.count, change, is_directory, parent, found_in });
    }

    /// Returns and removes all changes, in the order in which their paths first changed.
    pub fn drain(&mut self) -> Vec<(Vec<u8>, PendingChange)> {
        let mut all: Vec<_> = std::mem::take(&mut self.entries).into_iter().collect();
        all.sort_by_key(|(_, entry)| entry.order);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::{PathChange::*, *};

    fn merged(steps: &[(&str, Option<&str>, PathChange)]) -> Vec<(String, PathChange)> {
        let mut pending = PendingChanges::default();
        for (path, to, change) in steps {
            match to {
                Some(to) => pending.rename(path.as_bytes().to_vec(), to.as_bytes().to_vec(), false, (0, 0)),
                None => pending.add(path.as_bytes().to_vec(), change.clone(), false, (0, 0), None),
            }
        }
        pending.drain().into_iter().map(|(path, e)| (String::from_utf8(path).unwrap(), e.change)).collect()
    }

    #[test]
    fn changes_within_one_window_are_merged() {
        assert_eq!(merged(&[("a", None, Created), ("a", None, Modified), ("a", None, Modified)]), [("a".into(), Created)]);
        assert_eq!(
            merged(&[("a", None, Modified), ("b", None, Modified), ("a", None, Removed)]),
            [("a".into(), Removed), ("b".into(), Modified)]
        );
        assert_eq!(merged(&[("a", None, Created), ("a", None, Removed)]), []);
        assert_eq!(merged(&[("a", None, Removed), ("a", None, Created)]), [("a".into(), Modified)]);
        let renamed = |from: &str, is_modified| Renamed { from: from.as_bytes().to_vec(), is_modified };
        assert_eq!(merged(&[("a", Some("b"), Created)]), [("b".into(), renamed("a", false))]);
        assert_eq!(merged(&[("a", Some("b"), Created), ("b", Some("c"), Created)]), [("c".into(), renamed("a", false))]);
        assert_eq!(merged(&[("a", None, Created), ("a", Some("b"), Created)]), [("b".into(), Created)]);
        assert_eq!(merged(&[("a", None, Modified), ("a", Some("b"), Created)]), [("b".into(), renamed("a", true))]);
        assert_eq!(merged(&[("a", Some("b"), Created), ("b", None, Removed)]), [("a".into(), Removed)]);
        assert_eq!(merged(&[("a", Some("b"), Created), ("b", Some("a"), Created)]), []);
    }
}
