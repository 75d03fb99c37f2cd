//! Counts what a plan deletes on one side: in total, in each top-level directory, and which directories would
//! disappear.
//!
//! Files inside version control directories and lock files do not count. Tools create and delete them by the hundred,
//! and a large repository would hide the loss of a small source tree.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::{
    deletion_guard::Trees,
    entry::{Digest, Entry},
    halt::Halt,
    path::RelPath,
    reconcile::Change,
    side::Side,
    tree::Tree,
};

/// Fewer deleted files than this are never a mass deletion: in a folder with a handful of files, users often delete
/// most of them.
pub const MIN_MASS_DELETION: usize = 5;
/// One file in this many is a small part, which may be deleted at once no matter what follows.
pub const SMALL_PART_DIVISOR: usize = 10;
/// Directories of version control systems.
const VERSION_CONTROL: [&[u8]; 4] = [b".git", b".hg", b".jj", b".svn"];

/// Deleted files whose content does not appear anywhere else in the plan.
pub type DeletedFiles = BTreeMap<RelPath, Digest>;

pub fn deleted_files(changes: &[Change]) -> DeletedFiles {
    let digest = |entry: &Option<Entry>| entry.as_ref().and_then(Entry::content).map(|(digest, _)| digest);
    let mut added_content: HashMap<Digest, usize> = HashMap::new();
    for added in changes.iter().filter(|c| digest(&c.new) != digest(&c.old)).filter_map(|c| digest(&c.new)) {
        *added_content.entry(added).or_default() += 1;
    }
    let mut is_moved = |digest: &Digest| match added_content.get_mut(digest) {
        Some(left) if *left > 0 => {
            *left -= 1;
            true
        }
        _ => false,
    };
    let deleted = changes.iter().filter(|c| c.new.is_none()).filter_map(|c| Some((c.path.clone(), digest(&c.old)?)));
    deleted.filter(|(_, digest)| !is_moved(digest)).collect()
}

/// Files at new paths whose content is new too: the same changes do not remove it elsewhere, as a move does.
pub fn new_files(changes: &[Change]) -> HashSet<RelPath> {
    let digest = |entry: &Option<Entry>| entry.as_ref().and_then(Entry::content).map(|(digest, _)| digest);
    let removed: HashSet<Digest> = changes.iter().filter(|c| digest(&c.new) != digest(&c.old)).filter_map(|c| digest(&c.old)).collect();
    let is_new = |c: &&Change| c.old.is_none() && digest(&c.new).is_some_and(|digest| !removed.contains(&digest));
    changes.iter().filter(is_new).map(|c| c.path.clone()).collect()
}

/// Whether the deletion of this file counts.
pub fn is_counted(path: &RelPath) -> bool {
    repository(path).is_none() && !is_lock(path.name())
}

/// The version control directory that contains a path.
fn repository(path: &RelPath) -> Option<RelPath> {
    path.ancestors().find(is_version_control)
}

fn is_version_control(directory: &RelPath) -> bool {
    VERSION_CONTROL.contains(&directory.name())
}

/// Lock files of git, package managers, Emacs and LibreOffice.
fn is_lock(name: &[u8]) -> bool {
    name.ends_with(b".lock") || name.ends_with(b".lck") || name.starts_with(b".#") || name.starts_with(b".~lock.")
}

/// The deletions of a plan on one side, compared with the existing files.
pub struct DeletionTotals<'a> {
    side: Side,
    whole: DeletionCount,
    /// Per top-level directory; only those with deletions.
    top_directories: BTreeMap<&'a [u8], DeletionCount>,
    /// Per directory at any depth.
    directories: BTreeMap<RelPath, DeletionCount>,
    /// The tree of the other side, which lacks the files, and the paths in it that do not count as present.
    source: &'a Tree,
    held_back: &'a BTreeSet<RelPath>,
    base: &'a Tree,
}

#[derive(Clone, Copy, Default)]
struct DeletionCount {
    planned: usize,
    already_deleted: usize,
    total: usize,
}

impl DeletionCount {
    fn is_large(&self) -> bool {
        self.planned > 0 && self.planned + self.already_deleted >= MIN_MASS_DELETION
    }

    fn exceeds_small_part_of(&self, total: usize) -> bool {
        (self.planned + self.already_deleted) * SMALL_PART_DIVISOR > total
    }
}

impl<'a> DeletionTotals<'a> {
    /// `deleted` are recent deletions with their side; `created` are files created after the first of those.
    pub fn new(
        side: Side,
        planned: impl Iterator<Item = &'a RelPath>,
        deleted: impl Iterator<Item = (&'a RelPath, Side)>,
        created: impl Iterator<Item = &'a RelPath>,
        trees: Trees<'a>,
    ) -> Self {
        let source = if side == Side::Local { trees.sandbox } else { trees.local };
        let mut totals = Self {
            side,
            whole: DeletionCount::default(),
            top_directories: BTreeMap::new(),
            directories: BTreeMap::new(),
            source,
            held_back: trees.held_back,
            base: trees.base,
        };
        for path in planned {
            totals.add_to_directories(path, |count| count.planned += 1);
            if is_counted(path) {
                if let Some(top) = top_directory(path) {
                    totals.top_directories.entry(top).or_default();
                }
                // In mirror mode a plan also deletes files that both sides never agreed on.
                let never_synced = usize::from(!trees.base.get(path).is_some_and(Entry::is_file));
                totals.add(path, |count| (count.planned, count.total) = (count.planned + 1, count.total + never_synced));
            }
        }
        if totals.directories.is_empty() && totals.whole.planned == 0 {
            return totals;
        }
        trees.base.iter().filter(|(path, entry)| entry.is_file() && is_counted(path)).for_each(|(path, _)| {
            totals.add(path, |count| count.total += 1);
        });
        for (path, its_side) in deleted {
            let already_deleted = usize::from(its_side == side);
            totals.add_to_directories(path, |count| count.already_deleted += already_deleted);
            if is_counted(path) {
                totals.add(path, |count| (count.already_deleted, count.total) = (count.already_deleted + already_deleted, count.total + 1));
            }
        }
        created.filter(|path| is_counted(path)).for_each(|path| totals.add(path, |count| count.total = count.total.saturating_sub(1)));
        totals
    }

    fn add(&mut self, path: &RelPath, update: impl Fn(&mut DeletionCount)) {
        update(&mut self.whole);
        if let Some(count) = top_directory(path).and_then(|top| self.top_directories.get_mut(top)) {
            update(count);
        }
    }

    /// Updates every directory that contains the path. A repository counts only as a whole, because its files come and
    /// go.
    fn add_to_directories(&mut self, path: &RelPath, update: impl Fn(&mut DeletionCount)) {
        match repository(path) {
            Some(repository) => update(self.directories.entry(repository).or_default()),
            None if is_lock(path.name()) => {}
            None => path.ancestors().for_each(|directory| update(self.directories.entry(directory).or_default())),
        }
    }

    pub fn halt(&self, directory_deletion_limit: usize) -> Option<Halt> {
        let DeletionTotals { side, whole, .. } = *self;
        let is_empty = || !self.source.iter().any(|(path, entry)| entry.is_file() && is_counted(path) && !self.held_back.contains(path));
        if whole.planned > 0 && whole.total > 1 && is_empty() {
            let empty_side = if side == Side::Local { Side::Sandbox } else { Side::Local };
            let files = whole.planned + whole.already_deleted;
            return Some(Halt::FolderEmptied { side: empty_side, files, already_deleted: whole.already_deleted });
        }
        let mass_deletion = |directory: Option<RelPath>, DeletionCount { planned, already_deleted, total }: DeletionCount| {
            let files = planned + already_deleted;
            let is_majority = planned > 0 && files >= MIN_MASS_DELETION && files * 2 > total;
            is_majority.then_some(Halt::MassDeletion { side, directory, files, total, already_deleted })
        };
        self.vanished_directory(directory_deletion_limit)
            .or_else(|| mass_deletion(None, whole))
            .or_else(|| self.top_directories.iter().find_map(|(top, count)| mass_deletion(RelPath::new(top), *count)))
    }

    /// The topmost directory that has no files left on the other side.
    fn vanished_directory(&self, directory_deletion_limit: usize) -> Option<Halt> {
        let has_files = |directory: &RelPath| {
            let is_its = |path: &RelPath| is_counted(path) || repository(path).as_ref() == Some(directory);
            self.source.beneath(directory).any(|(path, entry)| entry.is_file() && is_its(path) && !self.held_back.contains(path))
        };
        let mut large = self
            .directories
            .iter()
            .filter(|(_, count)| count.planned > 0 && count.planned + count.already_deleted > directory_deletion_limit);
        large.find(|(directory, _)| !has_files(directory)).map(|(directory, count)| Halt::DirectoryGone {
            side: self.side,
            directory: directory.clone(),
            files: count.planned + count.already_deleted,
            already_deleted: count.already_deleted,
        })
    }

    /// Whether more than a small part would be gone: in total, of a top-level directory, or of any directory whose
    /// disappearance would halt the sync.
    pub fn exceeds_small_part(&self, directory_deletion_limit: usize) -> bool {
        let exceeds = |count: &DeletionCount| count.is_large() && count.exceeds_small_part_of(count.total);
        let may_vanish = |(directory, count): (&RelPath, &DeletionCount)| {
            // A repository counts only as a whole, because its files come and go.
            if !count.is_large() || is_version_control(directory) {
                return false;
            }
            let left = self.base.beneath(directory).filter(|(path, entry)| entry.is_file() && is_counted(path)).count();
            let total = left + count.already_deleted;
            total > directory_deletion_limit && count.exceeds_small_part_of(total)
        };
        exceeds(&self.whole) || self.top_directories.values().any(exceeds) || self.directories.iter().any(may_vanish)
    }
}

fn top_directory(path: &RelPath) -> Option<&[u8]> {
    if path.depth() > 0 { path.parts().next() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        deletion_guard::{DEFAULT_DIRECTORY_DELETION_LIMIT, DeletionGuard, Verdict},
        mode::Mode,
        reconcile::reconcile,
    };

    fn tree(files: impl IntoIterator<Item = String>) -> Tree {
        let mut tree = Tree::default();
        for name in files {
            let path = RelPath::new(name.as_bytes()).unwrap();
            path.ancestors().for_each(|folder| tree.set(folder, Some(Entry::Dir)));
            tree.set(path, Some(Entry::File { digest: Digest::of(name.as_bytes()), size: 1, exec: false }));
        }
        tree
    }

    fn named(folder: &str, count: usize) -> impl Iterator<Item = String> {
        (0..count).map(move |n| format!("{folder}/f{n}"))
    }

    /// The guard's verdict after the sandbox has lost these directories.
    fn verdict(base: &Tree, deleted: &[&str]) -> Verdict {
        let mut sandbox = base.clone();
        deleted.iter().for_each(|folder| sandbox.prune(&RelPath::new(folder.as_bytes()).unwrap()));
        let plan = reconcile(base, base, &sandbox, Mode::TwoWaySafe, &BTreeMap::new());
        let trees = Trees { base, local: base, sandbox: &sandbox, held_back: &BTreeSet::new() };
        DeletionGuard::new(DEFAULT_DIRECTORY_DELETION_LIMIT).judge(trees, &plan, false, std::time::Instant::now())
    }

    fn deleted(directory: &str, files: usize) -> Verdict {
        let directory = RelPath::new(directory.as_bytes()).unwrap();
        Verdict::Halt(Halt::DirectoryGone { side: Side::Local, directory, files, already_deleted: 0 })
    }

    #[test]
    fn a_repository_does_not_hide_the_loss_of_a_source_tree() {
        let base = tree(named("src", 30).chain(named(".git/objects", 56)).chain(named("docs", 40)));
        assert_eq!(verdict(&base, &["src"]), deleted("src", 30));
    }

    #[test]
    fn deleting_a_nested_directory_of_a_large_tree_halts() {
        let base = tree(named("src", 2000).chain(named("src/a/b", 15)).chain(named("src/a/c", 15)));
        assert_eq!(verdict(&base, &["src/a"]), deleted("src/a", 30));
        // This could go on until all of src/a is gone.
        assert_eq!(verdict(&base, &["src/a/b"]), Verdict::HoldDeletions);
        assert_eq!(verdict(&tree(named("src", 2000).chain(named("src/a/b", 15))), &["src/a/b"]), Verdict::Proceed);
    }

    #[test]
    fn deleting_most_of_a_top_level_directory_halts() {
        let base = tree(named("docs", 4).chain(named("docs/old", 6)).chain(named("src", 500)));
        let most = Halt::MassDeletion { side: Side::Local, directory: RelPath::new(b"docs"), files: 6, total: 10, already_deleted: 0 };
        assert_eq!(verdict(&base, &["docs/old"]), Verdict::Halt(most));
    }

    #[test]
    fn deletions_inside_a_repository_are_not_counted_but_its_loss_is() {
        let base = tree(named(".git/objects/ab", 300).chain(["f".to_owned(), "g".to_owned(), ".git/HEAD".to_owned()]));
        assert_eq!(verdict(&base, &[".git/objects"]), Verdict::Proceed);
        assert_eq!(verdict(&base, &[".git"]), deleted(".git", 301));
    }

    #[test]
    fn lock_files_are_not_counted() {
        let locks = (0..50).map(|n| format!("run/{n}.lock"));
        let base = tree(locks.chain(["run/x".to_owned(), "y".to_owned(), "z".to_owned()]));
        assert_eq!(verdict(&base, &["run"]), Verdict::Proceed);
    }
}
