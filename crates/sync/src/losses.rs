//! How much a plan deletes on one side: in all, in each top-level directory, and which directories would disappear.
//!
//! Version control's own files and lock files are not counted. Tools create and delete them by the hundred, and a large repository would
//! hide the loss of a small source tree.

use std::collections::{BTreeMap, HashMap};

use crate::{
    entry::{Digest, Entry},
    guard::Trees,
    halt::{Halt, Side},
    path::RelPath,
    reconcile::Change,
    tree::Tree,
};

/// Fewer deleted files than this are never too many: who works with a handful of files deletes most of them now and then.
pub const FEW_FILES: usize = 5;
/// One file of so many is a small part: so many may go at once, whatever comes after them.
pub const SMALL_PART: usize = 10;
/// Directories of version control systems.
const VERSION_CONTROL: [&[u8]; 4] = [b".git", b".hg", b".jj", b".svn"];

/// Files that go and whose content comes nowhere else.
pub type Lost = BTreeMap<RelPath, Digest>;

pub fn lost(changes: &[Change]) -> Lost {
    let digest = |entry: &Option<Entry>| entry.as_ref().and_then(Entry::content).map(|(digest, _)| digest);
    let mut moved: HashMap<Digest, usize> = HashMap::new();
    for come in changes.iter().filter(|c| digest(&c.new) != digest(&c.old)).filter_map(|c| digest(&c.new)) {
        *moved.entry(come).or_default() += 1;
    }
    let mut is_moved = |digest: &Digest| match moved.get_mut(digest) {
        Some(left) if *left > 0 => {
            *left -= 1;
            true
        }
        _ => false,
    };
    let gone = changes.iter().filter(|c| c.new.is_none()).filter_map(|c| Some((c.path.clone(), digest(&c.old)?)));
    gone.filter(|(_, digest)| !is_moved(digest)).collect()
}

/// Whether the loss of this file is weighed.
pub fn is_counted(path: &RelPath) -> bool {
    repository(path).is_none() && !is_lock(path.name())
}

/// The version control directory that a path is in.
fn repository(path: &RelPath) -> Option<RelPath> {
    path.ancestors().find(|folder| VERSION_CONTROL.contains(&folder.name()))
}

/// Of git, package managers, Emacs and LibreOffice.
fn is_lock(name: &[u8]) -> bool {
    name.ends_with(b".lock") || name.ends_with(b".lck") || name.starts_with(b".#") || name.starts_with(b".~lock.")
}

/// What a plan would delete on one side, beside what there was.
pub struct Weight<'a> {
    side: Side,
    whole: Tally,
    /// By top-level directory; only those that lose something.
    tops: BTreeMap<&'a [u8], Tally>,
    /// By directory at any depth.
    directories: BTreeMap<RelPath, Tally>,
    /// The side they are missing on.
    source: &'a Tree,
}

#[derive(Clone, Copy, Default)]
struct Tally {
    planned: usize,
    lately: usize,
    of: usize,
}

impl<'a> Weight<'a> {
    /// `gone` went lately, with the side it went on; `made` came after the first of those.
    pub fn of(
        side: Side,
        planned: impl Iterator<Item = &'a RelPath>,
        gone: impl Iterator<Item = (&'a RelPath, Side)>,
        made: impl Iterator<Item = &'a RelPath>,
        trees: Trees<'a>,
    ) -> Self {
        let source = if side == Side::Here { trees.there } else { trees.here };
        let mut weight = Self { side, whole: Tally::default(), tops: BTreeMap::new(), directories: BTreeMap::new(), source };
        for path in planned {
            weight.count_directories(path, |tally| tally.planned += 1);
            if is_counted(path) {
                if let Some(top) = top_directory(path) {
                    weight.tops.entry(top).or_default();
                }
                // In mirror mode also what both sides never agreed on.
                let unknown = usize::from(!trees.base.get(path).is_some_and(Entry::is_file));
                weight.count(path, |tally| (tally.planned, tally.of) = (tally.planned + 1, tally.of + unknown));
            }
        }
        if weight.directories.is_empty() && weight.whole.planned == 0 {
            return weight;
        }
        trees.base.iter().filter(|(path, entry)| entry.is_file() && is_counted(path)).for_each(|(path, _)| {
            weight.count(path, |tally| tally.of += 1);
        });
        for (path, its_side) in gone {
            let lately = usize::from(its_side == side);
            weight.count_directories(path, |tally| tally.lately += lately);
            if is_counted(path) {
                weight.count(path, |tally| (tally.lately, tally.of) = (tally.lately + lately, tally.of + 1));
            }
        }
        made.filter(|path| is_counted(path)).for_each(|path| weight.count(path, |tally| tally.of = tally.of.saturating_sub(1)));
        weight
    }

    fn count(&mut self, path: &RelPath, add: impl Fn(&mut Tally)) {
        add(&mut self.whole);
        if let Some(tally) = top_directory(path).and_then(|top| self.tops.get_mut(top)) {
            add(tally);
        }
    }

    /// For each directory that the path is in. Of a repository only the directory as a whole: its files come and go.
    fn count_directories(&mut self, path: &RelPath, add: impl Fn(&mut Tally)) {
        match repository(path) {
            Some(repository) => add(self.directories.entry(repository).or_default()),
            None if is_lock(path.name()) => {}
            None => path.ancestors().for_each(|directory| add(self.directories.entry(directory).or_default())),
        }
    }

    pub fn halt(&self, directory_files: usize) -> Option<Halt> {
        let Weight { side, whole, .. } = *self;
        let is_empty = || !self.source.iter().any(|(path, entry)| entry.is_file() && is_counted(path));
        if whole.planned > 0 && whole.of > 1 && is_empty() {
            let emptied = if side == Side::Here { Side::Sandbox } else { Side::Here };
            return Some(Halt::Emptied { side: emptied, files: whole.planned });
        }
        let mass_deletion = |directory: Option<RelPath>, Tally { planned, lately, of }: Tally| {
            let files = planned + lately;
            let is_most = planned > 0 && files >= FEW_FILES && files * 2 > of;
            is_most.then_some(Halt::MassDeletion { side, directory, files, of, lately })
        };
        self.vanished(directory_files)
            .or_else(|| mass_deletion(None, whole))
            .or_else(|| self.tops.iter().find_map(|(top, tally)| mass_deletion(RelPath::new(top), *tally)))
    }

    /// The topmost directory that has nothing left on the other side.
    fn vanished(&self, directory_files: usize) -> Option<Halt> {
        let has_files = |directory: &RelPath| {
            let is_its = |path: &RelPath| is_counted(path) || repository(path).as_ref() == Some(directory);
            self.source.beneath(directory).any(|(path, entry)| entry.is_file() && is_its(path))
        };
        let mut large = self.directories.iter().filter(|(_, tally)| tally.planned > 0 && tally.planned + tally.lately > directory_files);
        large.find(|(directory, _)| !has_files(directory)).map(|(directory, tally)| Halt::DirectoryGone {
            side: self.side,
            directory: directory.clone(),
            files: tally.planned + tally.lately,
            lately: tally.lately,
        })
    }

    pub fn is_more_than_a_small_part(&self) -> bool {
        let is_more = |tally: &Tally| {
            let files = tally.planned + tally.lately;
            tally.planned > 0 && files >= FEW_FILES && files * SMALL_PART > tally.of
        };
        is_more(&self.whole) || self.tops.values().any(is_more)
    }
}

fn top_directory(path: &RelPath) -> Option<&[u8]> {
    if path.depth() > 0 { path.parts().next() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        guard::{DIRECTORY_FILES, Guard, Verdict},
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

    /// What the guard says when the sandbox has lost these folders.
    fn verdict(base: &Tree, gone: &[&str]) -> Verdict {
        let mut there = base.clone();
        gone.iter().for_each(|folder| there.prune(&RelPath::new(folder.as_bytes()).unwrap()));
        let plan = reconcile(base, base, &there, Mode::TwoWaySafe, &BTreeMap::new());
        let trees = Trees { base, here: base, there: &there };
        Guard::new(DIRECTORY_FILES).judge(trees, &plan, false, std::time::Instant::now())
    }

    fn gone(directory: &str, files: usize) -> Verdict {
        let directory = RelPath::new(directory.as_bytes()).unwrap();
        Verdict::Halt(Halt::DirectoryGone { side: Side::Here, directory, files, lately: 0 })
    }

    #[test]
    fn a_repository_does_not_hide_the_loss_of_a_source_tree() {
        let base = tree(named("src", 30).chain(named(".git/objects", 56)).chain(named("docs", 40)));
        assert_eq!(verdict(&base, &["src"]), gone("src", 30));
    }

    #[test]
    fn a_directory_deep_in_a_large_tree_does_not_disappear_without_a_question() {
        let base = tree(named("src", 2000).chain(named("src/a/b", 15)).chain(named("src/a/c", 15)));
        assert_eq!(verdict(&base, &["src/a"]), gone("src/a", 30));
        assert_eq!(verdict(&base, &["src/a/b"]), Verdict::Go);
    }

    #[test]
    fn most_of_a_top_level_directory_is_asked_about_though_it_is_little_of_the_whole() {
        let base = tree(named("docs", 4).chain(named("docs/old", 6)).chain(named("src", 500)));
        let most = Halt::MassDeletion { side: Side::Here, directory: RelPath::new(b"docs"), files: 6, of: 10, lately: 0 };
        assert_eq!(verdict(&base, &["docs/old"]), Verdict::Halt(most));
    }

    #[test]
    fn what_tools_do_within_a_repository_is_not_counted_and_its_loss_is() {
        let base = tree(named(".git/objects/ab", 300).chain(["f".to_owned(), "g".to_owned(), ".git/HEAD".to_owned()]));
        assert_eq!(verdict(&base, &[".git/objects"]), Verdict::Go);
        assert_eq!(verdict(&base, &[".git"]), gone(".git", 301));
    }

    #[test]
    fn lock_files_are_not_counted() {
        let locks = (0..50).map(|n| format!("run/{n}.lock"));
        let base = tree(locks.chain(["run/x".to_owned(), "y".to_owned(), "z".to_owned()]));
        assert_eq!(verdict(&base, &["run"]), Verdict::Go);
    }
}
