//! Decides what to change, as a pure function of three trees: the last state that both sides agreed on, and the current
//! state of each side.
//!
//! A path that is equal on both sides is adopted. A change on one side is propagated to the other. If both sides
//! changed the same place, a side that only deleted yields to the one with content; otherwise it is a conflict and
//! nothing is changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter::Peekable,
};

use crate::{
    entry::Entry,
    mode::Mode,
    path::RelPath,
    side::Side,
    tree::{Tree, Update},
};

/// A change of one path on one side. It is only made if the path is still `old`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub path: RelPath,
    pub old: Option<Entry>,
    pub new: Option<Entry>,
}

/// Both sides changed this path or something beneath it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    pub path: RelPath,
    pub local: Option<Entry>,
    pub sandbox: Option<Entry>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Changes to make locally; each one that succeeds becomes part of the new base.
    pub local: Vec<Change>,
    /// Changes to make in the sandbox, likewise.
    pub sandbox: Vec<Change>,
    /// Paths that both sides agree on already, for the new base.
    pub adopted: Vec<Update>,
    pub conflicts: Vec<Conflict>,
    /// Differences that a one-way mode keeps.
    pub unsynced_differences: usize,
}

impl Plan {
    pub fn is_empty(&self) -> bool {
        self.local.is_empty() && self.sandbox.is_empty()
    }
}

/// `resolutions` names the winning side for the paths of resolved conflicts.
pub fn reconcile(base: &Tree, local: &Tree, sandbox: &Tree, mode: Mode, resolutions: &BTreeMap<RelPath, Side>) -> Plan {
    let mut plan = Plan::default();
    let (mut b, mut h, mut t) = (Cursor::new(base), Cursor::new(local), Cursor::new(sandbox));
    while let Some(path) = [b.head(), h.head(), t.head()].into_iter().flatten().min() {
        let (in_base, in_local, in_sandbox) = (b.take(path), h.take(path), t.take(path));
        if in_local == in_sandbox {
            if in_base != in_local {
                plan.adopted.push((path.clone(), in_local.cloned()));
            }
            continue;
        }
        let region = Region { base: b.region(path, in_base), local: h.region(path, in_local), sandbox: t.region(path, in_sandbox) };
        match decide(&region, mode, resolutions.get(path).copied()) {
            Decision::Local => region.propagate(&region.local, &region.sandbox, &mut plan.sandbox, &mut plan.adopted),
            Decision::Sandbox => region.propagate(&region.sandbox, &region.local, &mut plan.local, &mut plan.adopted),
            Decision::LeftAlone => plan.unsynced_differences += 1,
            Decision::Conflict => {
                plan.conflicts.push(Conflict { path: path.clone(), local: in_local.cloned(), sandbox: in_sandbox.cloned() });
            }
        }
    }
    plan
}

enum Decision {
    Local,
    Sandbox,
    LeftAlone,
    Conflict,
}

fn decide(region: &Region, mode: Mode, resolution: Option<Side>) -> Decision {
    let local_changed = region.local != region.base;
    let sandbox_changed = region.sandbox != region.base;
    // A side that only deleted yields, because the other one has all remaining content. If both only deleted, the side
    // that deleted more wins.
    let local_yields = local_changed && only_deletes(&region.base, &region.local);
    let sandbox_yields = sandbox_changed && only_deletes(&region.base, &region.sandbox);
    let resolved = match resolution {
        Some(Side::Local) => Some(Decision::Local),
        Some(Side::Sandbox) => Some(Decision::Sandbox),
        None => None,
    };
    match mode {
        Mode::Mirror => Decision::Local,
        Mode::Push if !sandbox_changed || sandbox_yields => Decision::Local,
        Mode::Push if !local_changed || local_yields => Decision::LeftAlone,
        Mode::Pull if !local_changed || local_yields => Decision::Sandbox,
        Mode::Pull if !sandbox_changed || sandbox_yields => Decision::LeftAlone,
        Mode::Push => resolved.filter(|s| matches!(s, Decision::Local)).unwrap_or(Decision::Conflict),
        Mode::Pull => resolved.filter(|s| matches!(s, Decision::Sandbox)).unwrap_or(Decision::Conflict),
        _ if !sandbox_changed => Decision::Local,
        _ if !local_changed => Decision::Sandbox,
        _ if local_yields && sandbox_yields => {
            if region.local.is_empty() {
                Decision::Local
            } else {
                Decision::Sandbox
            }
        }
        _ if local_yields => Decision::Sandbox,
        _ if sandbox_yields => Decision::Local,
        Mode::PreferLocal => Decision::Local,
        Mode::PreferSandbox => Decision::Sandbox,
        Mode::TwoWaySafe => resolved.unwrap_or(Decision::Conflict),
    }
}

type Items<'a> = BTreeMap<&'a RelPath, &'a Entry>;

/// A path at which the sides differ, with everything beneath it.
struct Region<'a> {
    base: Items<'a>,
    local: Items<'a>,
    sandbox: Items<'a>,
}

impl Region<'_> {
    /// Makes the losing side equal to the winning one.
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

/// Whether every remaining entry is unchanged.
fn only_deletes(base: &Items, now: &Items) -> bool {
    now.iter().all(|(path, entry)| base.get(path) == Some(entry))
}

/// Reads one tree from start to end.
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
