//! What to do, from what three trees say: the last that both sides agreed on, and each side now. A pure function.
//!
//! Equal on both sides is taken over without a word. What one side changed goes to the other. Where both changed the same place, the side
//! that only deleted gives way to the one with content; else it is a conflict, and nothing is touched.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter::Peekable,
};

use crate::{
    entry::Entry,
    mode::{Keep, Mode},
    path::RelPath,
    tree::{Tree, Update},
};

/// A path that is to become something else on one side. It must still be `old` when it is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub path: RelPath,
    pub old: Option<Entry>,
    pub new: Option<Entry>,
}

/// Both sides changed what is here or beneath.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    pub path: RelPath,
    pub here: Option<Entry>,
    pub there: Option<Entry>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// To be done here; each one done is part of the new base with its `new`.
    pub here: Vec<Change>,
    /// To be done in the sandbox, likewise.
    pub there: Vec<Change>,
    /// Both sides agree already: part of the new base as it is.
    pub adopted: Vec<Update>,
    pub conflicts: Vec<Conflict>,
    /// Differences that a one-way mode leaves alone.
    pub left_alone: usize,
}

impl Plan {
    pub fn is_empty(&self) -> bool {
        self.here.is_empty() && self.there.is_empty()
    }
}

/// `decided` says who wins at the paths of conflicts that somebody settled.
pub fn reconcile(base: &Tree, here: &Tree, there: &Tree, mode: Mode, decided: &BTreeMap<RelPath, Keep>) -> Plan {
    let mut plan = Plan::default();
    let (mut b, mut h, mut t) = (Cursor::new(base), Cursor::new(here), Cursor::new(there));
    while let Some(path) = [b.head(), h.head(), t.head()].into_iter().flatten().min() {
        let (was, is_here, is_there) = (b.take(path), h.take(path), t.take(path));
        if is_here == is_there {
            if was != is_here {
                plan.adopted.push((path.clone(), is_here.cloned()));
            }
            continue;
        }
        let region = Region { base: b.region(path, was), here: h.region(path, is_here), there: t.region(path, is_there) };
        match winner(&region, mode, decided.get(path).copied()) {
            Outcome::Here => region.propagate(&region.here, &region.there, &mut plan.there, &mut plan.adopted),
            Outcome::There => region.propagate(&region.there, &region.here, &mut plan.here, &mut plan.adopted),
            Outcome::LeftAlone => plan.left_alone += 1,
            Outcome::Conflict => {
                plan.conflicts.push(Conflict { path: path.clone(), here: is_here.cloned(), there: is_there.cloned() });
            }
        }
    }
    plan
}

enum Outcome {
    Here,
    There,
    LeftAlone,
    Conflict,
}

fn winner(region: &Region, mode: Mode, decided: Option<Keep>) -> Outcome {
    let here_changed = region.here != region.base;
    let there_changed = region.there != region.base;
    // Where one side only took away, the other has all that there is. Of two that did, the one that took away more.
    let here_gives_way = here_changed && only_deletes(&region.base, &region.here);
    let there_gives_way = there_changed && only_deletes(&region.base, &region.there);
    let settled = match decided {
        Some(Keep::Here) => Some(Outcome::Here),
        Some(Keep::Sandbox) => Some(Outcome::There),
        None => None,
    };
    match mode {
        Mode::Mirror => Outcome::Here,
        Mode::Push if !there_changed || there_gives_way => Outcome::Here,
        Mode::Push if !here_changed || here_gives_way => Outcome::LeftAlone,
        Mode::Pull if !here_changed || here_gives_way => Outcome::There,
        Mode::Pull if !there_changed || there_gives_way => Outcome::LeftAlone,
        Mode::Push => settled.filter(|s| matches!(s, Outcome::Here)).unwrap_or(Outcome::Conflict),
        Mode::Pull => settled.filter(|s| matches!(s, Outcome::There)).unwrap_or(Outcome::Conflict),
        _ if !there_changed => Outcome::Here,
        _ if !here_changed => Outcome::There,
        _ if here_gives_way && there_gives_way => {
            if region.here.is_empty() {
                Outcome::Here
            } else {
                Outcome::There
            }
        }
        _ if here_gives_way => Outcome::There,
        _ if there_gives_way => Outcome::Here,
        Mode::PreferHere => Outcome::Here,
        Mode::PreferSandbox => Outcome::There,
        Mode::TwoWaySafe => settled.unwrap_or(Outcome::Conflict),
    }
}

type Items<'a> = BTreeMap<&'a RelPath, &'a Entry>;

/// A path at which the sides differ, with everything beneath it.
struct Region<'a> {
    base: Items<'a>,
    here: Items<'a>,
    there: Items<'a>,
}

impl Region<'_> {
    /// Makes the loser what the winner is.
    fn propagate(&self, winner: &Items, loser: &Items, changes: &mut Vec<Change>, adopted: &mut Vec<Update>) {
        let paths: BTreeSet<&RelPath> = self.base.keys().chain(winner.keys()).chain(loser.keys()).copied().collect();
        for path in paths {
            let (new, old) = (winner.get(path).copied(), loser.get(path).copied());
            if new != old {
                changes.push(Change { path: path.clone(), old: old.cloned(), new: new.cloned() });
            } else if new != self.base.get(path).copied() {
                adopted.push((path.clone(), new.cloned()));
            }
        }
    }
}

/// Everything that is left is as it was.
fn only_deletes(base: &Items, now: &Items) -> bool {
    now.iter().all(|(path, entry)| base.get(path) == Some(entry))
}

/// One tree, read once from its beginning to its end.
struct Cursor<'a> {
    items: Peekable<std::collections::btree_map::Iter<'a, RelPath, Entry>>,
}

impl<'a> Cursor<'a> {
    fn new(tree: &'a Tree) -> Self {
        Self { items: tree.iter().peekable() }
    }

    fn head(&mut self) -> Option<&'a RelPath> {
        self.items.peek().map(|(path, _)| *path)
    }

    fn take(&mut self, path: &RelPath) -> Option<&'a Entry> {
        self.items.next_if(|(at, _)| *at == path).map(|(_, entry)| entry)
    }

    /// The entry that was just taken and everything beneath it.
    fn region(&mut self, top: &'a RelPath, entry: Option<&'a Entry>) -> Items<'a> {
        let mut items: Items = entry.map(|entry| (top, entry)).into_iter().collect();
        while let Some((path, entry)) = self.items.next_if(|(path, _)| path.is_beneath(top)) {
            items.insert(path, entry);
        }
        items
    }
}
