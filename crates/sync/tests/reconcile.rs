//! Properties of `reconcile`, and a comparison with a simple reference model.

use std::collections::{BTreeMap, BTreeSet};

use cobox_sync::{Change, Digest, Entry, Mode, Plan, RelPath, Side, Tree, reconcile};
use proptest::prelude::*;

fn path(text: &str) -> RelPath {
    RelPath::new(text.as_bytes()).unwrap()
}

fn file(content: u8) -> Entry {
    Entry::File { digest: Digest::of(&[content]), size: 1, exec: content.is_multiple_of(2) }
}

/// A folder as nested maps of names.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Leaf(u8),
    Dir(BTreeMap<String, Node>),
}

type Children = BTreeMap<String, Node>;

fn flatten(folder: &Children) -> Tree {
    fn add(into: &mut Vec<(RelPath, Entry)>, prefix: &str, folder: &Children) {
        for (name, node) in folder {
            let at = format!("{prefix}{name}");
            match node {
                Node::Leaf(content) => into.push((path(&at), file(*content))),
                Node::Dir(within) => {
                    into.push((path(&at), Entry::Dir));
                    add(into, &format!("{at}/"), within);
                }
            }
        }
    }
    let mut entries = Vec::new();
    add(&mut entries, "", folder);
    entries.into_iter().collect()
}

fn apply(tree: &Tree, changes: &[Change]) -> Tree {
    let mut tree = tree.clone();
    for change in changes {
        assert_eq!(tree.get(&change.path), change.old.as_ref(), "a change starts from the current state: {}", change.path);
    }
    let updates = changes.iter().map(|c| (c.path.clone(), c.new.clone())).collect();
    tree.update(updates, usize::MAX).expect("the result is a valid tree");
    tree
}

struct Synced {
    base: Tree,
    local: Tree,
    sandbox: Tree,
    plan: Plan,
}

fn run(base: &Tree, local: &Tree, sandbox: &Tree, mode: Mode) -> Synced {
    let plan = reconcile(base, local, sandbox, mode, &BTreeMap::new());
    let mut next = base.clone();
    for (path, entry) in plan.adopted.iter().cloned() {
        next.set(path, entry);
    }
    for change in plan.local.iter().chain(&plan.sandbox) {
        next.set(change.path.clone(), change.new.clone());
    }
    Synced { base: next, local: apply(local, &plan.local), sandbox: apply(sandbox, &plan.sandbox), plan }
}

/// The reference model for the default mode, on nested folders: the final state of each side, and the paths in
/// conflict.
fn model(
    base: Option<&Node>,
    local: Option<&Node>,
    sandbox: Option<&Node>,
    at: &str,
    conflicts: &mut BTreeSet<String>,
) -> (Option<Node>, Option<Node>) {
    if let (Some(Node::Dir(h)), Some(Node::Dir(t))) = (local, sandbox) {
        let empty = Children::new();
        let b = if let Some(Node::Dir(b)) = base { b } else { &empty };
        let names: BTreeSet<&String> = h.keys().chain(t.keys()).chain(b.keys()).collect();
        let (mut next_h, mut next_t) = (Children::new(), Children::new());
        for name in names {
            let (x, y) = model(b.get(name), h.get(name), t.get(name), &format!("{at}/{name}"), conflicts);
            x.into_iter().for_each(|x| drop(next_h.insert(name.clone(), x)));
            y.into_iter().for_each(|y| drop(next_t.insert(name.clone(), y)));
        }
        return (Some(Node::Dir(next_h)), Some(Node::Dir(next_t)));
    }
    let same = |winner: Option<&Node>| (winner.cloned(), winner.cloned());
    let (h_less, t_less) = (only_deletes(base, local), only_deletes(base, sandbox));
    match () {
        () if local == sandbox || local == base => same(sandbox),
        () if sandbox == base => same(local),
        () if h_less && t_less => same(if local.is_none() { local } else { sandbox }),
        () if h_less => same(sandbox),
        () if t_less => same(local),
        () => {
            conflicts.insert(at.trim_start_matches('/').to_owned());
            (local.cloned(), sandbox.cloned())
        }
    }
}

/// Whether `now` contains nothing that `base` lacks.
fn only_deletes(base: Option<&Node>, now: Option<&Node>) -> bool {
    match (base, now) {
        (_, None) => true,
        (Some(Node::Leaf(a)), Some(Node::Leaf(b))) => a == b,
        (Some(Node::Dir(a)), Some(Node::Dir(b))) => b.iter().all(|(name, node)| only_deletes(a.get(name), Some(node))),
        _ => false,
    }
}

fn folder() -> impl Strategy<Value = Children> {
    let name = prop::sample::select(vec!["a", "a-b", "b", "c"]).prop_map(str::to_owned);
    let leaf = (0u8..3).prop_map(Node::Leaf);
    let node = leaf.prop_recursive(3, 24, 4, {
        let name = name.clone();
        move |inner| prop::collection::btree_map(name.clone(), inner, 0..4).prop_map(Node::Dir)
    });
    prop::collection::btree_map(name, node, 0..4)
}

/// Sides derived from the base by some edits, which is the usual case, or unrelated to it.
fn three_trees() -> impl Strategy<Value = (Children, Children, Children)> {
    let edited = |base: Children| {
        prop_oneof![
            1 => folder(),
            1 => Just(base.clone()),
            4 => prop::collection::vec((any::<prop::sample::Index>(), prop::option::of(0u8..3), any::<bool>()), 0..4)
                .prop_map(move |edits| edits.into_iter().fold(base.clone(), edit_one)),
        ]
    };
    folder().prop_flat_map(move |base| (Just(base.clone()), edited(base.clone()), edited(base)))
}

fn edit_one(folder: Children, (which, content, as_dir): (prop::sample::Index, Option<u8>, bool)) -> Children {
    let paths: Vec<String> = flatten(&folder).iter().map(|(p, _)| p.to_string()).collect();
    if paths.is_empty() {
        return folder;
    }
    fn set(folder: &mut Children, path: &str, node: Option<Node>) {
        match path.split_once('/') {
            Some((first, rest)) => {
                if let Some(Node::Dir(within)) = folder.get_mut(first) {
                    set(within, rest, node);
                }
            }
            None => match node {
                Some(node) => drop(folder.insert(path.to_owned(), node)),
                None => drop(folder.remove(path)),
            },
        }
    }
    let mut folder = folder;
    let node = content.map(|c| if as_dir { Node::Dir(Children::from([("n".to_owned(), Node::Leaf(c))])) } else { Node::Leaf(c) });
    set(&mut folder, &paths[which.index(paths.len())], node);
    folder
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn reconcile_matches_the_reference_model((base, local, sandbox) in three_trees()) {
        let mut conflicts = BTreeSet::new();
        let top = |f: &Children| Node::Dir(f.clone());
        let (h, t) = model(Some(&top(&base)), Some(&top(&local)), Some(&top(&sandbox)), "", &mut conflicts);
        let (Some(Node::Dir(h)), Some(Node::Dir(t))) = (h, t) else { panic!("roots stay folders") };
        let got = run(&flatten(&base), &flatten(&local), &flatten(&sandbox), Mode::TwoWaySafe);
        prop_assert_eq!(got.plan.conflicts.iter().map(|c| c.path.to_string()).collect::<BTreeSet<_>>(), conflicts);
        prop_assert_eq!(got.local, flatten(&h));
        prop_assert_eq!(got.sandbox, flatten(&t));
    }

    #[test]
    fn new_files_are_never_overwritten_and_only_known_files_are_deleted((base, local, sandbox) in three_trees()) {
        let (base, local, sandbox) = (flatten(&base), flatten(&local), flatten(&sandbox));
        let got = run(&base, &local, &sandbox, Mode::TwoWaySafe);
        for (before, after) in [(&local, &got.local), (&sandbox, &got.sandbox)] {
            for (path, entry) in before.iter().filter(|(path, entry)| entry.is_file() && base.get(path) != Some(entry)) {
                prop_assert_eq!(after.get(path), Some(entry), "{} was new and was lost", path);
            }
        }
    }

    #[test]
    fn paths_without_conflict_converge_and_stay_equal((base, local, sandbox) in three_trees()) {
        let got = run(&flatten(&base), &flatten(&local), &flatten(&sandbox), Mode::TwoWaySafe);
        let in_conflict = |path: &RelPath| got.plan.conflicts.iter().any(|c| path.is_within(&c.path));
        let settled = |tree: &Tree| -> Vec<_> { tree.iter().filter(|(p, _)| !in_conflict(p)).map(|(p, e)| (p.clone(), e.clone())).collect() };
        prop_assert_eq!(settled(&got.local), settled(&got.sandbox));
        prop_assert_eq!(settled(&got.local), settled(&got.base));
        let again = run(&got.base, &got.local, &got.sandbox, Mode::TwoWaySafe);
        prop_assert!(again.plan.is_empty() && again.plan.adopted.is_empty());
        prop_assert_eq!(again.plan.conflicts, got.plan.conflicts);
    }

    #[test]
    fn both_sides_are_treated_symmetrically((base, local, sandbox) in three_trees()) {
        let (base, local, sandbox) = (flatten(&base), flatten(&local), flatten(&sandbox));
        let one = reconcile(&base, &local, &sandbox, Mode::TwoWaySafe, &BTreeMap::new());
        let other = reconcile(&base, &sandbox, &local, Mode::TwoWaySafe, &BTreeMap::new());
        prop_assert_eq!((one.local, one.sandbox, one.adopted), (other.sandbox, other.local, other.adopted));
    }

    #[test]
    fn each_mode_keeps_its_promise((base, local, sandbox) in three_trees()) {
        let (base, local, sandbox) = (flatten(&base), flatten(&local), flatten(&sandbox));
        let of = |mode| run(&base, &local, &sandbox, mode);
        let mirrored = of(Mode::Mirror);
        prop_assert_eq!(&mirrored.sandbox, &local);
        prop_assert!(mirrored.plan.local.is_empty());
        for mode in [Mode::PreferLocal, Mode::PreferSandbox] {
            let got = of(mode);
            prop_assert!(got.plan.conflicts.is_empty());
            prop_assert_eq!(&got.local, &got.sandbox);
        }
        let (push, pull) = (of(Mode::Push), of(Mode::Pull));
        prop_assert!(push.plan.local.is_empty() && pull.plan.sandbox.is_empty());
        for (got, before, after) in [(&push, &sandbox, &push.sandbox), (&pull, &local, &pull.local)] {
            for (path, entry) in before.iter().filter(|(path, entry)| entry.is_file() && base.get(path) != Some(entry)) {
                prop_assert_eq!(after.get(path), Some(entry), "{} was new and was lost: {:?}", path, got.plan);
            }
        }
    }

    #[test]
    fn a_resolution_ends_its_conflict((base, local, sandbox) in three_trees(), keep_local in any::<bool>()) {
        let (base, local, sandbox) = (flatten(&base), flatten(&local), flatten(&sandbox));
        let first = reconcile(&base, &local, &sandbox, Mode::TwoWaySafe, &BTreeMap::new());
        let winner = if keep_local { Side::Local } else { Side::Sandbox };
        let resolutions = first.conflicts.iter().map(|c| (c.path.clone(), winner)).collect();
        let plan = reconcile(&base, &local, &sandbox, Mode::TwoWaySafe, &resolutions);
        prop_assert!(plan.conflicts.is_empty());
        prop_assert_eq!(apply(&local, &plan.local), apply(&sandbox, &plan.sandbox));
    }
}

#[test]
fn a_deleted_directory_is_recreated_when_the_other_side_changed_it() {
    let base: Tree = [(path("d"), Entry::Dir), (path("d/x"), file(1)), (path("d/y"), file(1))].into_iter().collect();
    let mut sandbox = base.clone();
    sandbox.set(path("d/x"), Some(file(2)));
    let got = run(&base, &Tree::default(), &sandbox, Mode::TwoWaySafe);
    assert!(got.plan.conflicts.is_empty() && got.local == sandbox && got.sandbox == sandbox);
}
