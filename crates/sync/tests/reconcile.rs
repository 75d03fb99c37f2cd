//! Reconciling held to what it promises, and to a second, slower way of deciding the same.

use std::collections::{BTreeMap, BTreeSet};

use cobox_sync::{Change, Digest, Entry, Keep, Mode, Plan, RelPath, Tree, reconcile};
use proptest::prelude::*;

fn path(text: &str) -> RelPath {
    RelPath::new(text.as_bytes()).unwrap()
}

fn file(content: u8) -> Entry {
    Entry::File { digest: Digest::of(&[content]), size: 1, exec: content.is_multiple_of(2) }
}

/// As people see a folder: names with something at each.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Leaf(u8),
    Dir(BTreeMap<String, Node>),
}

type Folder = BTreeMap<String, Node>;

fn flatten(folder: &Folder) -> Tree {
    fn add(into: &mut Vec<(RelPath, Entry)>, prefix: &str, folder: &Folder) {
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
        assert_eq!(tree.get(&change.path), change.old.as_ref(), "a change starts from what is there: {}", change.path);
    }
    let updates = changes.iter().map(|c| (c.path.clone(), c.new.clone())).collect();
    tree.update(updates, usize::MAX).expect("what comes out is a tree again");
    tree
}

struct Result3 {
    base: Tree,
    here: Tree,
    there: Tree,
    plan: Plan,
}

fn run(base: &Tree, here: &Tree, there: &Tree, mode: Mode) -> Result3 {
    let plan = reconcile(base, here, there, mode, &BTreeMap::new());
    let mut next = base.clone();
    for (path, entry) in plan.adopted.iter().cloned() {
        next.set(path, entry);
    }
    for change in plan.here.iter().chain(&plan.there) {
        next.set(change.path.clone(), change.new.clone());
    }
    Result3 { base: next, here: apply(here, &plan.here), there: apply(there, &plan.there), plan }
}

/// The same decision by the definition, on nested folders, for the default mode: what each side has in the end, and where it is stuck.
fn model(
    base: Option<&Node>,
    here: Option<&Node>,
    there: Option<&Node>,
    at: &str,
    stuck: &mut BTreeSet<String>,
) -> (Option<Node>, Option<Node>) {
    if let (Some(Node::Dir(h)), Some(Node::Dir(t))) = (here, there) {
        let empty = Folder::new();
        let b = if let Some(Node::Dir(b)) = base { b } else { &empty };
        let names: BTreeSet<&String> = h.keys().chain(t.keys()).chain(b.keys()).collect();
        let (mut next_h, mut next_t) = (Folder::new(), Folder::new());
        for name in names {
            let (x, y) = model(b.get(name), h.get(name), t.get(name), &format!("{at}/{name}"), stuck);
            x.into_iter().for_each(|x| drop(next_h.insert(name.clone(), x)));
            y.into_iter().for_each(|y| drop(next_t.insert(name.clone(), y)));
        }
        return (Some(Node::Dir(next_h)), Some(Node::Dir(next_t)));
    }
    let same = |winner: Option<&Node>| (winner.cloned(), winner.cloned());
    let (h_less, t_less) = (is_less(base, here), is_less(base, there));
    match () {
        () if here == there || here == base => same(there),
        () if there == base => same(here),
        () if h_less && t_less => same(if here.is_none() { here } else { there }),
        () if h_less => same(there),
        () if t_less => same(here),
        () => {
            stuck.insert(at.trim_start_matches('/').to_owned());
            (here.cloned(), there.cloned())
        }
    }
}

/// Nothing in `now` that wasn't in `base`.
fn is_less(base: Option<&Node>, now: Option<&Node>) -> bool {
    match (base, now) {
        (_, None) => true,
        (Some(Node::Leaf(a)), Some(Node::Leaf(b))) => a == b,
        (Some(Node::Dir(a)), Some(Node::Dir(b))) => b.iter().all(|(name, node)| is_less(a.get(name), Some(node))),
        _ => false,
    }
}

fn folder() -> impl Strategy<Value = Folder> {
    let name = prop::sample::select(vec!["a", "a-b", "b", "c"]).prop_map(str::to_owned);
    let leaf = (0u8..3).prop_map(Node::Leaf);
    let node = leaf.prop_recursive(3, 24, 4, {
        let name = name.clone();
        move |inner| prop::collection::btree_map(name.clone(), inner, 0..4).prop_map(Node::Dir)
    });
    prop::collection::btree_map(name, node, 0..4)
}

/// Sides that come from the base by some edits, which is what sides do, or from nowhere.
fn three() -> impl Strategy<Value = (Folder, Folder, Folder)> {
    let edited = |base: Folder| {
        prop_oneof![
            1 => folder(),
            1 => Just(base.clone()),
            4 => prop::collection::vec((any::<prop::sample::Index>(), prop::option::of(0u8..3), any::<bool>()), 0..4)
                .prop_map(move |edits| edits.into_iter().fold(base.clone(), edit_one)),
        ]
    };
    folder().prop_flat_map(move |base| (Just(base.clone()), edited(base.clone()), edited(base)))
}

fn edit_one(folder: Folder, (which, content, as_dir): (prop::sample::Index, Option<u8>, bool)) -> Folder {
    let paths: Vec<String> = flatten(&folder).iter().map(|(p, _)| p.to_string()).collect();
    if paths.is_empty() {
        return folder;
    }
    fn set(folder: &mut Folder, path: &str, node: Option<Node>) {
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
    let node = content.map(|c| if as_dir { Node::Dir(Folder::from([("n".to_owned(), Node::Leaf(c))])) } else { Node::Leaf(c) });
    set(&mut folder, &paths[which.index(paths.len())], node);
    folder
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn it_decides_as_the_definition_does((base, here, there) in three()) {
        let mut stuck = BTreeSet::new();
        let top = |f: &Folder| Node::Dir(f.clone());
        let (h, t) = model(Some(&top(&base)), Some(&top(&here)), Some(&top(&there)), "", &mut stuck);
        let (Some(Node::Dir(h)), Some(Node::Dir(t))) = (h, t) else { panic!("roots stay folders") };
        let got = run(&flatten(&base), &flatten(&here), &flatten(&there), Mode::TwoWaySafe);
        prop_assert_eq!(got.plan.conflicts.iter().map(|c| c.path.to_string()).collect::<BTreeSet<_>>(), stuck);
        prop_assert_eq!(got.here, flatten(&h));
        prop_assert_eq!(got.there, flatten(&t));
    }

    #[test]
    fn nothing_new_is_ever_overwritten_and_only_the_known_is_deleted((base, here, there) in three()) {
        let (base, here, there) = (flatten(&base), flatten(&here), flatten(&there));
        let got = run(&base, &here, &there, Mode::TwoWaySafe);
        for (before, after) in [(&here, &got.here), (&there, &got.there)] {
            for (path, entry) in before.iter().filter(|(path, entry)| entry.is_file() && base.get(path) != Some(entry)) {
                prop_assert_eq!(after.get(path), Some(entry), "{} was new and is gone", path);
            }
        }
    }

    #[test]
    fn what_is_not_in_conflict_is_the_same_on_both_sides_and_stays_so((base, here, there) in three()) {
        let got = run(&flatten(&base), &flatten(&here), &flatten(&there), Mode::TwoWaySafe);
        let in_conflict = |path: &RelPath| got.plan.conflicts.iter().any(|c| path.is_within(&c.path));
        let settled = |tree: &Tree| -> Vec<_> { tree.iter().filter(|(p, _)| !in_conflict(p)).map(|(p, e)| (p.clone(), e.clone())).collect() };
        prop_assert_eq!(settled(&got.here), settled(&got.there));
        prop_assert_eq!(settled(&got.here), settled(&got.base));
        let again = run(&got.base, &got.here, &got.there, Mode::TwoWaySafe);
        prop_assert!(again.plan.is_empty() && again.plan.adopted.is_empty());
        prop_assert_eq!(again.plan.conflicts, got.plan.conflicts);
    }

    #[test]
    fn the_sides_are_treated_alike((base, here, there) in three()) {
        let (base, here, there) = (flatten(&base), flatten(&here), flatten(&there));
        let one = reconcile(&base, &here, &there, Mode::TwoWaySafe, &BTreeMap::new());
        let other = reconcile(&base, &there, &here, Mode::TwoWaySafe, &BTreeMap::new());
        prop_assert_eq!((one.here, one.there, one.adopted), (other.there, other.here, other.adopted));
    }

    #[test]
    fn each_mode_does_what_it_says((base, here, there) in three()) {
        let (base, here, there) = (flatten(&base), flatten(&here), flatten(&there));
        let of = |mode| run(&base, &here, &there, mode);
        let mirrored = of(Mode::Mirror);
        prop_assert_eq!(&mirrored.there, &here);
        prop_assert!(mirrored.plan.here.is_empty());
        for mode in [Mode::PreferHere, Mode::PreferSandbox] {
            let got = of(mode);
            prop_assert!(got.plan.conflicts.is_empty());
            prop_assert_eq!(&got.here, &got.there);
        }
        let (push, pull) = (of(Mode::Push), of(Mode::Pull));
        prop_assert!(push.plan.here.is_empty() && pull.plan.there.is_empty());
        for (got, before, after) in [(&push, &there, &push.there), (&pull, &here, &pull.here)] {
            for (path, entry) in before.iter().filter(|(path, entry)| entry.is_file() && base.get(path) != Some(entry)) {
                prop_assert_eq!(after.get(path), Some(entry), "{} was new and is gone: {:?}", path, got.plan);
            }
        }
    }

    #[test]
    fn a_decision_ends_its_conflict((base, here, there) in three(), keep_here in any::<bool>()) {
        let (base, here, there) = (flatten(&base), flatten(&here), flatten(&there));
        let first = reconcile(&base, &here, &there, Mode::TwoWaySafe, &BTreeMap::new());
        let keep = if keep_here { Keep::Here } else { Keep::Sandbox };
        let decided = first.conflicts.iter().map(|c| (c.path.clone(), keep)).collect();
        let plan = reconcile(&base, &here, &there, Mode::TwoWaySafe, &decided);
        prop_assert!(plan.conflicts.is_empty());
        prop_assert_eq!(apply(&here, &plan.here), apply(&there, &plan.there));
    }
}

#[test]
fn a_deleted_folder_comes_back_where_the_other_side_worked_in_it() {
    let base: Tree = [(path("d"), Entry::Dir), (path("d/x"), file(1)), (path("d/y"), file(1))].into_iter().collect();
    let mut there = base.clone();
    there.set(path("d/x"), Some(file(2)));
    let got = run(&base, &Tree::default(), &there, Mode::TwoWaySafe);
    assert!(got.plan.conflicts.is_empty() && got.here == there && got.there == there);
}
