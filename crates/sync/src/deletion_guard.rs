//! Halts a sync that is about to delete files by accident: when one side has no files left, or when most of its files
//! would be deleted.
//!
//! Deletions of the last two minutes count together, so that slow deletions are recognized as well. Once they exceed a
//! small part, further deletions are held until a quiet period without new ones, so that little is lost if they turn
//! out to be too many. All other changes continue. A moved file does not count as deleted, nor does a file that was
//! created after the first of these deletions: programs create and delete temporary files all the time. A file at a new
//! path is only treated as created if its content is new too; otherwise it is a moved one, and its deletion counts.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::{
    deletion_totals::{DeletedFiles, DeletionTotals, deleted_files, is_counted, new_files},
    entry::{Digest, Entry},
    halt::Halt,
    path::RelPath,
    reconcile::{Change, Plan},
    side::Side,
    tree::Tree,
};

/// The disappearance of a directory with more files than this needs a confirmation: low enough to notice a lost `src`,
/// and more than tools usually remove.
pub const DEFAULT_DIRECTORY_DELETION_LIMIT: usize = 20;
/// Deletions within this period count together.
const DELETION_WINDOW: Duration = Duration::from_secs(120);
/// Deletions beyond a small part are held until no new ones were seen for this long.
const QUIET_PERIOD: Duration = Duration::from_secs(1);
/// Maximum time that deletions are held.
const MAX_HOLD: Duration = Duration::from_secs(60);

/// How much of a plan may be carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Proceed,
    /// Everything except deletions.
    HoldDeletions,
    /// Nothing, until the user decides.
    Halt(Halt),
}

/// The three trees that a plan was computed from.
#[derive(Clone, Copy)]
pub struct Trees<'a> {
    pub base: &'a Tree,
    pub local: &'a Tree,
    pub sandbox: &'a Tree,
    /// Paths that only the sandbox has because they are risky. Nothing that is there makes up for a deletion.
    pub held_back: &'a BTreeSet<RelPath>,
}

impl<'a> Trees<'a> {
    fn of(&self, side: Side) -> &'a Tree {
        if side == Side::Local { self.local } else { self.sandbox }
    }
}

/// Recent deletions and what the user has confirmed.
pub struct DeletionGuard {
    /// The disappearance of a directory with more files than this halts the sync.
    directory_deletion_limit: usize,
    deleted: BTreeMap<RelPath, RecentDeletion>,
    /// Former paths of deleted content.
    deleted_content: HashMap<Digest, RelPath>,
    /// Existing files that were created after the first of the recent deletions.
    created: HashMap<RelPath, Instant>,
    /// Files that the current plan creates at a new path with content that it does not remove elsewhere, by side.
    planned_new: [HashSet<RelPath>; 2],
    /// Deletions of the current plan, by side.
    planned: [DeletedFiles; 2],
    /// The last plan has halted. Recent deletions do not expire while the user decides.
    has_halted: bool,
    /// Deletions that the user confirmed, by side, until a plan has carried them out.
    confirmed: [BTreeSet<RelPath>; 2],
    hold: Option<HoldState>,
}

struct RecentDeletion {
    side: Side,
    at: Instant,
}

#[derive(Clone, Copy)]
struct HoldState {
    files: usize,
    since: Instant,
    grew_at: Instant,
}

impl HoldState {
    fn until(&self) -> Instant {
        (self.grew_at + QUIET_PERIOD).min(self.since + MAX_HOLD)
    }
}

impl DeletionGuard {
    pub fn new(directory_deletion_limit: usize) -> Self {
        Self {
            directory_deletion_limit,
            deleted: BTreeMap::new(),
            deleted_content: HashMap::new(),
            created: HashMap::new(),
            planned_new: Default::default(),
            planned: Default::default(),
            has_halted: false,
            confirmed: Default::default(),
            hold: None,
        }
    }

    /// Decides how much of the plan may be carried out now. `is_confirmed`: the user has just confirmed this plan's
    /// deletions.
    pub fn judge(&mut self, trees: Trees, plan: &Plan, is_confirmed: bool, now: Instant) -> Verdict {
        if is_confirmed {
            self.confirmed = [&plan.local, &plan.sandbox].map(|changes| deleted_files(changes).into_keys().collect());
            self.deleted.clear();
        }
        self.forget_restored(trees);
        self.expire(now);
        self.planned = [(Side::Local, &plan.local), (Side::Sandbox, &plan.sandbox)].map(|(side, changes)| {
            let mut deleted_files = deleted_files(changes);
            deleted_files.retain(|path, _| !self.confirmed[side as usize].contains(path) && !self.created.contains_key(path));
            deleted_files
        });
        let has_deletions = !self.deleted.is_empty() || self.planned.iter().any(|files| !files.is_empty());
        self.planned_new = match has_deletions {
            true => [&plan.local, &plan.sandbox].map(|changes| new_files(changes)),
            false => Default::default(),
        };
        let (halt, exceeds_small_part) = {
            let totals = [Side::Local, Side::Sandbox].map(|side| self.totals(side, trees));
            let halt = totals.iter().find_map(|side_totals| side_totals.halt(self.directory_deletion_limit));
            (halt, totals.iter().any(|side_totals| side_totals.exceeds_small_part(self.directory_deletion_limit)))
        };
        self.has_halted = halt.is_some();
        if let Some(halt) = halt {
            self.hold = None;
            return Verdict::Halt(halt);
        }
        self.hold = match exceeds_small_part {
            true => Some(self.extended_hold(now)).filter(|hold| now < hold.until()),
            false => None,
        };
        if self.hold.is_some() { Verdict::HoldDeletions } else { Verdict::Proceed }
    }

    /// Whether the user rejects the local deletions that the sync halted for: some that were made before are undone.
    /// Asked when the user resumes the sync without a confirmation.
    pub fn is_rejected(&self, trees: Trees) -> bool {
        let is_restored =
            |(path, deleted): (&RelPath, &RecentDeletion)| deleted.side == Side::Local && trees.local.get(path).is_some_and(Entry::is_file);
        self.has_halted && self.deleted.iter().any(is_restored)
    }

    /// Whether a change of the current plan has to wait while deletions are held. The old paths of moved files do not,
    /// because in a later plan they would look like deletions.
    pub fn is_held(&self, side: Side, change: &Change) -> bool {
        let is_file = change.old.as_ref().is_some_and(Entry::is_file);
        is_deletion(change) && (!is_file || self.planned[side as usize].contains_key(&change.path))
    }

    /// Lets held deletions proceed.
    pub fn release_hold(&mut self) {
        self.hold = None;
    }

    /// When held deletions are judged again.
    pub fn holds_until(&self) -> Option<Instant> {
        self.hold.map(|hold| hold.until())
    }

    /// Records a change that was made on one side.
    pub fn record(&mut self, side: Side, path: &RelPath, new: Option<&Entry>, now: Instant) {
        match new.and_then(Entry::content) {
            Some((digest, _)) => self.record_content(side, path, digest, now),
            None => {
                self.created.remove(path);
                if let Some(digest) = self.planned[side as usize].remove(path) {
                    self.deleted.insert(path.clone(), RecentDeletion { side, at: now });
                    self.deleted_content.insert(digest, path.clone());
                }
            }
        }
    }

    /// Called after the plan was carried out as far as possible.
    pub fn finish_plan(&mut self) {
        self.confirmed = Default::default();
    }

    /// Content that exists again, at its path or at another one, is not deleted.
    fn record_content(&mut self, side: Side, path: &RelPath, digest: Digest, now: Instant) {
        if self.deleted.is_empty() {
            return;
        }
        let is_back = self.deleted.remove(path).is_some()
            || self.deleted_content.remove(&digest).is_some_and(|other_path| self.deleted.remove(&other_path).is_some());
        // Its deletion would be a loss again.
        if !is_back && self.planned_new[side as usize].contains(path) {
            self.created.insert(path.clone(), now);
        }
    }

    /// Deleted files that exist again on their side, restored by the user for instance, are not deleted.
    fn forget_restored(&mut self, trees: Trees) {
        self.deleted.retain(|path, deleted| !trees.of(deleted.side).get(path).is_some_and(Entry::is_file));
    }

    fn expire(&mut self, now: Instant) {
        if !self.has_halted {
            self.deleted.retain(|_, deleted| now.duration_since(deleted.at) < DELETION_WINDOW);
        }
        self.deleted_content.retain(|_, path| self.deleted.contains_key(path));
        match self.deleted.values().map(|deleted| deleted.at).min() {
            Some(first) => self.created.retain(|_, at| *at >= first),
            None => self.created.clear(),
        }
    }

    fn totals<'a>(&'a self, side: Side, trees: Trees<'a>) -> DeletionTotals<'a> {
        let planned = &self.planned[side as usize];
        let deleted = self.deleted.iter().map(|(path, deleted)| (path, deleted.side));
        DeletionTotals::new(side, planned.keys(), deleted, self.created.keys(), trees)
    }

    fn extended_hold(&self, now: Instant) -> HoldState {
        let files = self.planned.iter().flat_map(BTreeMap::keys).filter(|path| is_counted(path)).count();
        match self.hold {
            Some(hold) if files <= hold.files => HoldState { files, ..hold },
            Some(hold) => HoldState { files, grew_at: now, ..hold },
            None => HoldState { files, since: now, grew_at: now },
        }
    }
}

/// Whether a change deletes a file or a directory.
fn is_deletion(change: &Change) -> bool {
    let is_folder = |entry: &Option<Entry>| entry.as_ref().is_some_and(Entry::is_dir);
    change.new.is_none() || is_folder(&change.old) && !is_folder(&change.new)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        deletion_totals::{MIN_MASS_DELETION, SMALL_PART_DIVISOR},
        mode::Mode,
        reconcile::reconcile,
    };

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    fn file(text: &str) -> Entry {
        Entry::File { digest: Digest::of(text.as_bytes()), size: 1, exec: false }
    }

    /// A tree of files, each with its own content.
    fn files(count: usize) -> Tree {
        (0..count).map(|n| (path(&format!("f{n}")), file(&n.to_string()))).collect()
    }

    fn without(tree: &Tree, deleted: impl Iterator<Item = usize>) -> Tree {
        let mut tree = tree.clone();
        deleted.for_each(|n| tree.set(path(&format!("f{n}")), None));
        tree
    }

    /// Both sides of a sync and a simulated clock.
    struct Simulation {
        deletion_guard: DeletionGuard,
        base: Tree,
        local: Tree,
        sandbox: Tree,
        now: Instant,
    }

    impl Simulation {
        fn new(base: Tree) -> Self {
            Self {
                deletion_guard: DeletionGuard::new(DEFAULT_DIRECTORY_DELETION_LIMIT),
                local: base.clone(),
                sandbox: base.clone(),
                base,
                now: Instant::now(),
            }
        }

        fn judge(&mut self, mode: Mode, is_confirmed: bool) -> (Verdict, Plan) {
            let plan = reconcile(&self.base, &self.local, &self.sandbox, mode, &BTreeMap::new());
            let trees = Trees { base: &self.base, local: &self.local, sandbox: &self.sandbox, held_back: &BTreeSet::new() };
            (self.deletion_guard.judge(trees, &plan, is_confirmed, self.now), plan)
        }

        /// Runs one round and applies what the guard permits.
        fn round(&mut self) -> Verdict {
            self.round_with(false)
        }

        fn round_with(&mut self, is_confirmed: bool) -> Verdict {
            let (verdict, plan) = self.judge(Mode::TwoWaySafe, is_confirmed);
            if matches!(verdict, Verdict::Halt(_)) {
                return verdict;
            }
            for (path, entry) in plan.adopted {
                self.base.set(path, entry);
            }
            for (side, changes) in [(Side::Sandbox, plan.sandbox), (Side::Local, plan.local)] {
                let is_held = |change: &Change| verdict != Verdict::Proceed && self.deletion_guard.is_held(side, change);
                for change in changes.into_iter().filter(|c| !is_held(c)).collect::<Vec<_>>() {
                    let tree = if side == Side::Local { &mut self.local } else { &mut self.sandbox };
                    tree.set(change.path.clone(), change.new.clone());
                    self.deletion_guard.record(side, &change.path, change.new.as_ref(), self.now);
                    self.base.set(change.path, change.new);
                }
            }
            self.deletion_guard.finish_plan();
            verdict
        }

        fn advance(&mut self, time: Duration) {
            self.now += time;
        }
    }

    #[test]
    fn deleting_most_or_all_files_halts_the_sync() {
        let halts = |had: usize, deleted: usize| {
            let mut simulation = Simulation::new(files(had));
            simulation.sandbox = without(&simulation.sandbox, 0..deleted);
            match simulation.round() {
                Verdict::Halt(halt) => Some(halt),
                _ => None,
            }
        };
        let emptied = |files| Some(Halt::FolderEmptied { side: Side::Sandbox, files, already_deleted: 0 });
        let most = |files, total| Some(Halt::MassDeletion { side: Side::Local, directory: None, files, total, already_deleted: 0 });
        for (had, deleted, expected) in [
            (1, 1, None),
            (2, 2, emptied(2)),
            (10, 10, emptied(10)),
            (3, 2, None),
            (5, 4, None),
            (6, 5, most(5, 6)),
            (10, 5, None),
            (10, 6, most(6, 10)),
            (40, 20, None),
            (40, 21, most(21, 40)),
        ] {
            assert_eq!(halts(had, deleted), expected, "{deleted} of {had}");
        }
    }

    #[test]
    fn remaining_directories_do_not_count_as_files() {
        let mut simulation = Simulation::new(files(10));
        for tree in [&mut simulation.base, &mut simulation.local, &mut simulation.sandbox] {
            tree.set(path("folder"), Some(Entry::Dir));
        }
        simulation.local = without(&simulation.local, 0..10);
        assert_eq!(simulation.round(), Verdict::Halt(Halt::FolderEmptied { side: Side::Local, files: 10, already_deleted: 0 }));
    }

    #[test]
    fn a_moved_file_does_not_count_as_deleted() {
        let mut simulation = Simulation::new(files(20));
        simulation.local = without(&simulation.local, 0..20);
        simulation.local.set(path("lib"), Some(Entry::Dir));
        (0..20).for_each(|n| simulation.local.set(path(&format!("lib/f{n}")), Some(file(&n.to_string()))));
        assert_eq!(simulation.round(), Verdict::Proceed);
        assert_eq!(simulation.sandbox.files(), 20);
        // One copy makes up for one deletion.
        let mut simulation = Simulation::new((0..20).map(|n| (path(&format!("f{n}")), file("the same"))).collect());
        simulation.local = without(&simulation.local, 0..19);
        simulation.local.set(path("x"), Some(file("the same")));
        assert_eq!(
            simulation.round(),
            Verdict::Halt(Halt::MassDeletion { side: Side::Sandbox, directory: None, files: 18, total: 20, already_deleted: 0 })
        );
    }

    #[test]
    fn slow_deletions_halt_after_a_small_part_was_deleted() {
        let (had, pause) = (400, Duration::from_millis(60));
        let mut simulation = Simulation::new(files(had));
        for n in 0..had {
            simulation.sandbox = without(&simulation.sandbox, n..=n);
            let verdict = simulation.round();
            if let Verdict::Halt(halt) = verdict {
                assert_eq!(n, had / 2, "{halt}");
                assert!(simulation.local.files() >= had - had / SMALL_PART_DIVISOR, "{} are left", simulation.local.files());
                return;
            }
            simulation.advance(pause);
        }
        panic!("every file was deleted");
    }

    #[test]
    fn held_deletions_proceed_after_a_quiet_period_and_other_changes_do_not_wait() {
        let mut simulation = Simulation::new(files(40));
        simulation.local = without(&simulation.local, 0..10);
        simulation.local.set(path("saved"), Some(file("saved")));
        assert_eq!(simulation.round(), Verdict::HoldDeletions);
        assert!(simulation.sandbox.files() == 41 && simulation.sandbox.get(&path("saved")).is_some());
        simulation.advance(QUIET_PERIOD / 2);
        simulation.local = without(&simulation.local, 10..11);
        assert_eq!(simulation.round(), Verdict::HoldDeletions);
        assert_eq!(simulation.deletion_guard.holds_until(), Some(simulation.now + QUIET_PERIOD));
        simulation.advance(QUIET_PERIOD);
        assert_eq!(simulation.round(), Verdict::Proceed);
        assert_eq!(simulation.sandbox.files(), 30);
    }

    #[test]
    fn a_move_does_not_wait_for_held_deletions() {
        let mut simulation = Simulation::new(files(60));
        simulation.local = without(&simulation.local, 0..10);
        for n in 10..50 {
            simulation.local.set(path(&format!("f{n}")), None);
            simulation.local.set(path(&format!("moved{n}")), Some(file(&n.to_string())));
        }
        assert_eq!(simulation.round(), Verdict::HoldDeletions);
        assert!(simulation.sandbox.get(&path("moved20")).is_some() && simulation.sandbox.get(&path("f20")).is_none());
        assert_eq!(simulation.sandbox.files(), 60);
        simulation.advance(QUIET_PERIOD);
        assert_eq!(simulation.round(), Verdict::Proceed);
        assert_eq!(simulation.sandbox.files(), 50);
    }

    #[test]
    fn slow_deletions_of_a_nested_directory_halt_after_a_small_part_was_deleted() {
        let name = |n: usize| path(&format!("src/a/b/f{n}"));
        let mut base: Tree = (0..400).map(|n| (path(&format!("src/f{n}")), file(&format!("other {n}")))).collect();
        ["src", "src/a", "src/a/b"].iter().for_each(|folder| base.set(path(folder), Some(Entry::Dir)));
        (0..30).for_each(|n| base.set(name(n), Some(file(&n.to_string()))));
        let mut simulation = Simulation::new(base);
        for n in 0..30 {
            simulation.sandbox.set(name(n), None);
            let verdict = simulation.round();
            assert_eq!(matches!(verdict, Verdict::Halt(_)), n == 29, "{n}: {verdict:?}");
            simulation.advance(Duration::from_millis(150));
        }
        assert_eq!(simulation.local.files(), 426);
        // While the user decides, nothing is forgotten.
        simulation.advance(DELETION_WINDOW * 2);
        let directory = path("src/a");
        let halt = Halt::DirectoryGone { side: Side::Local, directory: directory.clone(), files: 30, already_deleted: 4 };
        assert_eq!(simulation.round(), Verdict::Halt(halt));
        let is_rejected = |simulation: &Simulation| {
            let Simulation { base, local, sandbox, .. } = simulation;
            simulation.deletion_guard.is_rejected(Trees { base, local, sandbox, held_back: &BTreeSet::new() })
        };
        assert!(!is_rejected(&simulation));
        // What the user has restored is no longer counted as deleted.
        simulation.local.set(name(0), Some(file("0")));
        assert!(is_rejected(&simulation));
        let halt = Halt::DirectoryGone { side: Side::Local, directory, files: 29, already_deleted: 3 };
        assert_eq!(simulation.round(), Verdict::Halt(halt));
    }

    #[test]
    fn temporary_files_never_halt_the_sync() {
        let mut simulation = Simulation::new(files(20));
        for n in 0..5000 {
            let name = path(&format!("temporary{n}"));
            simulation.local.set(name.clone(), Some(file(&format!("t{n}"))));
            assert_eq!(simulation.round(), Verdict::Proceed);
            simulation.advance(Duration::from_millis(30));
            simulation.local.set(name, None);
            assert_eq!(simulation.round(), Verdict::Proceed);
            simulation.advance(Duration::from_millis(30));
        }
    }

    #[test]
    fn only_content_that_is_new_at_a_new_path_is_exempt() {
        let base: Tree = files(60).iter().map(|(path, entry)| (path.clone(), entry.clone())).chain([(path("x"), file("x"))]).collect();
        let delete_src = |simulation: &mut Simulation, prefix: &str| {
            (0..60).for_each(|n| simulation.sandbox.set(path(&format!("{prefix}{n}")), None));
            assert!(matches!(simulation.round(), Verdict::Halt(_)), "{prefix}");
        };
        // Moved.
        let mut simulation = Simulation::new(base.clone());
        simulation.sandbox.set(path("x"), None);
        assert_eq!(simulation.round(), Verdict::Proceed);
        for n in 0..60 {
            simulation.sandbox.set(path(&format!("f{n}")), None);
            simulation.sandbox.set(path(&format!("moved{n}")), Some(file(&n.to_string())));
        }
        assert_eq!(simulation.round(), Verdict::Proceed);
        delete_src(&mut simulation, "moved");
        // Edited.
        let mut simulation = Simulation::new(base.clone());
        simulation.sandbox.set(path("x"), None);
        assert_eq!(simulation.round(), Verdict::Proceed);
        (0..60).for_each(|n| simulation.sandbox.set(path(&format!("f{n}")), Some(file(&format!("edited {n}")))));
        assert_eq!(simulation.round(), Verdict::Proceed);
        delete_src(&mut simulation, "f");
        // Deleted and created again.
        let mut simulation = Simulation::new(base);
        for n in 0..60 {
            let name = path(&format!("f{n}"));
            simulation.sandbox.set(name.clone(), None);
            assert_eq!(simulation.round(), Verdict::Proceed);
            simulation.sandbox.set(name, Some(file(&format!("again {n}"))));
            assert_eq!(simulation.round(), Verdict::Proceed);
        }
        delete_src(&mut simulation, "f");
    }

    #[test]
    fn a_confirmation_survives_a_lost_connection_and_covers_one_plan_only() {
        let mut simulation = Simulation::new(files(40));
        simulation.sandbox = without(&simulation.sandbox, 0..30);
        assert!(matches!(simulation.round(), Verdict::Halt(_)));
        // The connection is lost after the first ten changes of the confirmed plan.
        let (verdict, plan) = simulation.judge(Mode::TwoWaySafe, true);
        assert_eq!(verdict, Verdict::Proceed);
        for change in &plan.local[..10] {
            simulation.deletion_guard.record(Side::Local, &change.path, None, simulation.now);
            simulation.local.set(change.path.clone(), None);
            simulation.base.set(change.path.clone(), None);
        }
        assert_eq!(simulation.round(), Verdict::Proceed);
        assert_eq!(simulation.local.files(), 10);
        simulation.sandbox = without(&simulation.sandbox, 30..39);
        assert!(matches!(simulation.round(), Verdict::Halt(_)), "another one");
        assert_eq!(simulation.round_with(true), Verdict::Proceed);
        assert_eq!(simulation.local.files(), 1);
    }

    #[test]
    fn mirroring_an_empty_folder_reports_the_number_of_deletions() {
        let mut simulation = Simulation::new(Tree::default());
        simulation.sandbox = files(5);
        assert_eq!(
            simulation.judge(Mode::Mirror, false).0,
            Verdict::Halt(Halt::FolderEmptied { side: Side::Local, files: 5, already_deleted: 0 })
        );
        simulation.local.set(path("mine"), Some(file("mine")));
        let most = Halt::MassDeletion { side: Side::Sandbox, directory: None, files: 5, total: 5, already_deleted: 0 };
        assert_eq!(simulation.judge(Mode::Mirror, false).0, Verdict::Halt(most));
    }

    proptest! {
        /// For any deletions at any speed, at most half of the files disappear within the window, and the rest stays
        /// complete.
        #[test]
        fn at_most_half_of_the_files_are_deleted_without_confirmation(had in 5..200usize, steps in proptest::collection::vec((1..40usize, 0..1500u64), 1..60)) {
            let mut simulation = Simulation::new(files(had));
            let (began, mut next) = (simulation.now, 0);
            for (count, pause) in steps {
                simulation.local = without(&simulation.local, next..(next + count).min(had));
                next += count;
                let verdict = simulation.round();
                prop_assert!(simulation.local.files() > 0 || matches!(verdict, Verdict::Halt(_)));
                if matches!(verdict, Verdict::Halt(_)) {
                    break;
                }
                if simulation.now.duration_since(began) < DELETION_WINDOW {
                    prop_assert!(simulation.sandbox.files() * 2 >= had || had - simulation.sandbox.files() < MIN_MASS_DELETION);
                }
                simulation.advance(Duration::from_millis(pause));
            }
        }
    }
}
