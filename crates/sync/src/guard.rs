//! Stops a sync that is about to delete what nobody meant to delete: a root that has no files any more, or most of what there was going.
//!
//! Deletions count together with those of the last minutes, so that a slow one is seen as what it is; and once they are more than a small
//! part they are held until no more come, so that little has gone when it turns out to be too much. Everything else goes on meanwhile. A
//! file that is only moved isn't deleted, and neither is one that came after the first of those deletions: programs make files and delete
//! them all the time.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant},
};

use crate::{
    entry::{Digest, Entry},
    halt::{Halt, Side},
    losses::{Lost, Weight, is_counted, lost},
    path::RelPath,
    reconcile::{Change, Plan},
    tree::Tree,
};

/// A directory with more files than this doesn't disappear without a question: few enough to notice a lost `src`, and more than tools
/// remove as a matter of course.
pub const DIRECTORY_FILES: usize = 20;
/// Deletions count together for this long.
const LATELY: Duration = Duration::from_secs(120);
/// More than a small part is held until no more were deleted for this long.
const STILL: Duration = Duration::from_secs(1);
/// And no longer than this in all.
const LONGEST_HOLD: Duration = Duration::from_secs(60);

/// What may be done of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Go,
    /// All but what deletes.
    Hold,
    /// Nothing.
    Halt(Halt),
}

/// The three trees that a plan was made of.
#[derive(Clone, Copy)]
pub struct Trees<'a> {
    pub base: &'a Tree,
    pub here: &'a Tree,
    pub there: &'a Tree,
}

/// What has gone lately, and what somebody said about it.
pub struct Guard {
    /// A directory with more files than this halts the sync when it disappears.
    directory_files: usize,
    gone: BTreeMap<RelPath, Gone>,
    /// Where content was that has gone.
    was_at: HashMap<Digest, RelPath>,
    /// Came after the first of those, and is there.
    made: HashMap<RelPath, Instant>,
    /// What the plan under way deletes, by side.
    planned: [Lost; 2],
    /// Deletions that somebody said are right, by side, until a round has carried them out.
    confirmed: [BTreeSet<RelPath>; 2],
    hold: Option<Hold>,
}

struct Gone {
    side: Side,
    at: Instant,
}

#[derive(Clone, Copy)]
struct Hold {
    files: usize,
    since: Instant,
    grew: Instant,
}

impl Hold {
    fn until(&self) -> Instant {
        (self.grew + STILL).min(self.since + LONGEST_HOLD)
    }
}

impl Guard {
    pub fn new(directory_files: usize) -> Self {
        Self {
            directory_files,
            gone: BTreeMap::new(),
            was_at: HashMap::new(),
            made: HashMap::new(),
            planned: Default::default(),
            confirmed: Default::default(),
            hold: None,
        }
    }

    /// What may be done now. `is_confirmed`: somebody just said that what this plan deletes is right.
    pub fn judge(&mut self, trees: Trees, plan: &Plan, is_confirmed: bool, now: Instant) -> Verdict {
        if is_confirmed {
            self.confirmed = [&plan.here, &plan.there].map(|changes| lost(changes).into_keys().collect());
            self.gone.clear();
        }
        self.forget(now);
        self.planned = [(Side::Here, &plan.here), (Side::Sandbox, &plan.there)].map(|(side, changes)| {
            let mut lost = lost(changes);
            lost.retain(|path, _| !self.confirmed[side as usize].contains(path) && !self.made.contains_key(path));
            lost
        });
        let (halt, is_more) = {
            let weights = [Side::Here, Side::Sandbox].map(|side| self.weigh(side, trees));
            let halt = weights.iter().find_map(|weight| weight.halt(self.directory_files));
            (halt, weights.iter().any(Weight::is_more_than_a_small_part))
        };
        if let Some(halt) = halt {
            self.hold = None;
            return Verdict::Halt(halt);
        }
        self.hold = match is_more {
            true => Some(self.held(now)).filter(|hold| now < hold.until()),
            false => None,
        };
        if self.hold.is_some() { Verdict::Hold } else { Verdict::Go }
    }

    /// What is held goes after all.
    pub fn release(&mut self) {
        self.hold = None;
    }

    /// When what is held is looked at again.
    pub fn holds_until(&self) -> Option<Instant> {
        self.hold.map(|hold| hold.until())
    }

    /// A path has become something else on that side.
    pub fn note(&mut self, side: Side, path: &RelPath, new: Option<&Entry>, now: Instant) {
        match new.and_then(Entry::content) {
            Some((digest, _)) => self.came(path, digest, now),
            None => {
                self.made.remove(path);
                if let Some(digest) = self.planned[side as usize].remove(path) {
                    self.gone.insert(path.clone(), Gone { side, at: now });
                    self.was_at.insert(digest, path.clone());
                }
            }
        }
    }

    /// The plan was carried out as far as it can be.
    pub fn is_over(&mut self) {
        self.confirmed = Default::default();
    }

    /// What is back, there or elsewhere, isn't gone.
    fn came(&mut self, path: &RelPath, digest: Digest, now: Instant) {
        if self.gone.is_empty() {
            return;
        }
        if self.gone.remove(path).is_none()
            && let Some(elsewhere) = self.was_at.remove(&digest)
        {
            self.gone.remove(&elsewhere);
        }
        self.made.insert(path.clone(), now);
    }

    fn forget(&mut self, now: Instant) {
        self.gone.retain(|_, gone| now.duration_since(gone.at) < LATELY);
        self.was_at.retain(|_, path| self.gone.contains_key(path));
        match self.gone.values().map(|gone| gone.at).min() {
            Some(first) => self.made.retain(|_, at| *at >= first),
            None => self.made.clear(),
        }
    }

    fn weigh<'a>(&'a self, side: Side, trees: Trees<'a>) -> Weight<'a> {
        let planned = &self.planned[side as usize];
        let gone = self.gone.iter().map(|(path, gone)| (path, gone.side));
        Weight::of(side, planned.keys(), gone, self.made.keys(), trees)
    }

    fn held(&self, now: Instant) -> Hold {
        let files = self.planned.iter().flat_map(BTreeMap::keys).filter(|path| is_counted(path)).count();
        match self.hold {
            Some(hold) if files <= hold.files => Hold { files, ..hold },
            Some(hold) => Hold { files, grew: now, ..hold },
            None => Hold { files, since: now, grew: now },
        }
    }
}

/// Whether a change takes something away that was there.
pub fn deletes(change: &Change) -> bool {
    let is_folder = |entry: &Option<Entry>| entry.as_ref().is_some_and(Entry::is_dir);
    change.new.is_none() || is_folder(&change.old) && !is_folder(&change.new)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        losses::{FEW_FILES, SMALL_PART},
        mode::Mode,
        reconcile::reconcile,
    };

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    fn file(text: &str) -> Entry {
        Entry::File { digest: Digest::of(text.as_bytes()), size: 1, exec: false }
    }

    /// This many files, each with its own content.
    fn files(count: usize) -> Tree {
        (0..count).map(|n| (path(&format!("f{n}")), file(&n.to_string()))).collect()
    }

    fn without(tree: &Tree, gone: impl Iterator<Item = usize>) -> Tree {
        let mut tree = tree.clone();
        gone.for_each(|n| tree.set(path(&format!("f{n}")), None));
        tree
    }

    /// Both sides as a guard sees them, over time.
    struct Play {
        guard: Guard,
        base: Tree,
        here: Tree,
        there: Tree,
        now: Instant,
    }

    impl Play {
        fn new(base: Tree) -> Self {
            Self { guard: Guard::new(DIRECTORY_FILES), here: base.clone(), there: base.clone(), base, now: Instant::now() }
        }

        fn judge(&mut self, mode: Mode, is_confirmed: bool) -> (Verdict, Plan) {
            let plan = reconcile(&self.base, &self.here, &self.there, mode, &BTreeMap::new());
            let trees = Trees { base: &self.base, here: &self.here, there: &self.there };
            (self.guard.judge(trees, &plan, is_confirmed, self.now), plan)
        }

        /// A round that does what it may.
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
            for (side, changes) in [(Side::Sandbox, plan.there), (Side::Here, plan.here)] {
                for change in changes.into_iter().filter(|c| verdict == Verdict::Go || !deletes(c)) {
                    let tree = if side == Side::Here { &mut self.here } else { &mut self.there };
                    tree.set(change.path.clone(), change.new.clone());
                    self.guard.note(side, &change.path, change.new.as_ref(), self.now);
                    self.base.set(change.path, change.new);
                }
            }
            self.guard.is_over();
            verdict
        }

        fn later(&mut self, time: Duration) {
            self.now += time;
        }
    }

    #[test]
    fn most_of_the_files_or_the_last_of_them_are_asked_about() {
        let halts = |had: usize, gone: usize| {
            let mut play = Play::new(files(had));
            play.there = without(&play.there, 0..gone);
            match play.round() {
                Verdict::Halt(halt) => Some(halt),
                _ => None,
            }
        };
        let emptied = |files| Some(Halt::Emptied { side: Side::Sandbox, files });
        let most = |files, of| Some(Halt::MassDeletion { side: Side::Here, directory: None, files, of, lately: 0 });
        for (had, gone, expected) in [
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
            assert_eq!(halts(had, gone), expected, "{gone} of {had}");
        }
    }

    #[test]
    fn folders_that_are_left_are_no_files() {
        let mut play = Play::new(files(10));
        for tree in [&mut play.base, &mut play.here, &mut play.there] {
            tree.set(path("folder"), Some(Entry::Dir));
        }
        play.here = without(&play.here, 0..10);
        assert_eq!(play.round(), Verdict::Halt(Halt::Emptied { side: Side::Here, files: 10 }));
    }

    #[test]
    fn what_is_moved_is_not_deleted() {
        let mut play = Play::new(files(20));
        play.here = without(&play.here, 0..20);
        play.here.set(path("lib"), Some(Entry::Dir));
        (0..20).for_each(|n| play.here.set(path(&format!("lib/f{n}")), Some(file(&n.to_string()))));
        assert_eq!(play.round(), Verdict::Go);
        assert_eq!(play.there.files(), 20);
        // One copy makes up for one.
        let mut play = Play::new((0..20).map(|n| (path(&format!("f{n}")), file("the same"))).collect());
        play.here = without(&play.here, 0..19);
        play.here.set(path("x"), Some(file("the same")));
        assert_eq!(play.round(), Verdict::Halt(Halt::MassDeletion { side: Side::Sandbox, directory: None, files: 18, of: 20, lately: 0 }));
    }

    #[test]
    fn one_file_after_the_other_halts_when_few_have_gone() {
        let (had, pause) = (400, Duration::from_millis(60));
        let mut play = Play::new(files(had));
        for n in 0..had {
            play.there = without(&play.there, n..=n);
            let verdict = play.round();
            if let Verdict::Halt(halt) = verdict {
                assert_eq!(n, had / 2, "{halt}");
                assert!(play.here.files() >= had - had / SMALL_PART, "{} are left", play.here.files());
                return;
            }
            play.later(pause);
        }
        panic!("it deleted all");
    }

    #[test]
    fn what_is_held_goes_when_no_more_is_deleted_and_other_changes_do_not_wait() {
        let mut play = Play::new(files(40));
        play.here = without(&play.here, 0..10);
        play.here.set(path("saved"), Some(file("saved")));
        assert_eq!(play.round(), Verdict::Hold);
        assert!(play.there.files() == 41 && play.there.get(&path("saved")).is_some());
        play.later(STILL / 2);
        play.here = without(&play.here, 10..11);
        assert_eq!(play.round(), Verdict::Hold);
        assert_eq!(play.guard.holds_until(), Some(play.now + STILL));
        play.later(STILL);
        assert_eq!(play.round(), Verdict::Go);
        assert_eq!(play.there.files(), 30);
    }

    #[test]
    fn files_that_come_and_go_all_the_time_are_nothing_to_ask_about() {
        let mut play = Play::new(files(20));
        for n in 0..5000 {
            let name = path(&format!("temporary{n}"));
            play.here.set(name.clone(), Some(file(&format!("t{n}"))));
            assert_eq!(play.round(), Verdict::Go);
            play.later(Duration::from_millis(30));
            play.here.set(name, None);
            assert_eq!(play.round(), Verdict::Go);
            play.later(Duration::from_millis(30));
        }
    }

    #[test]
    fn what_is_confirmed_goes_also_after_a_cut_and_the_next_is_asked_about() {
        let mut play = Play::new(files(40));
        play.there = without(&play.there, 0..30);
        assert!(matches!(play.round(), Verdict::Halt(_)));
        // The round with the confirmation breaks off after the first few.
        let (verdict, plan) = play.judge(Mode::TwoWaySafe, true);
        assert_eq!(verdict, Verdict::Go);
        for change in &plan.here[..10] {
            play.guard.note(Side::Here, &change.path, None, play.now);
            play.here.set(change.path.clone(), None);
            play.base.set(change.path.clone(), None);
        }
        assert_eq!(play.round(), Verdict::Go);
        assert_eq!(play.here.files(), 10);
        play.there = without(&play.there, 30..39);
        assert!(matches!(play.round(), Verdict::Halt(_)), "another one");
        assert_eq!(play.round_with(true), Verdict::Go);
        assert_eq!(play.here.files(), 1);
    }

    #[test]
    fn a_mirror_of_an_empty_folder_says_how_many_would_go() {
        let mut play = Play::new(Tree::default());
        play.there = files(5);
        assert_eq!(play.judge(Mode::Mirror, false).0, Verdict::Halt(Halt::Emptied { side: Side::Here, files: 5 }));
        play.here.set(path("mine"), Some(file("mine")));
        let most = Halt::MassDeletion { side: Side::Sandbox, directory: None, files: 5, of: 5, lately: 0 };
        assert_eq!(play.judge(Mode::Mirror, false).0, Verdict::Halt(most));
    }

    proptest! {
        /// Whatever is deleted and however slowly: more than half never go within the time that counts, and what stays is whole.
        #[test]
        fn never_more_than_half_go_without_a_question(had in 5..200usize, steps in proptest::collection::vec((1..40usize, 0..1500u64), 1..60)) {
            let mut play = Play::new(files(had));
            let (began, mut next) = (play.now, 0);
            for (count, pause) in steps {
                play.here = without(&play.here, next..(next + count).min(had));
                next += count;
                let verdict = play.round();
                prop_assert!(play.here.files() > 0 || matches!(verdict, Verdict::Halt(_)));
                if matches!(verdict, Verdict::Halt(_)) {
                    break;
                }
                if play.now.duration_since(began) < LATELY {
                    prop_assert!(play.there.files() * 2 >= had || had - play.there.files() < FEW_FILES);
                }
                play.later(Duration::from_millis(pause));
            }
        }
    }
}
