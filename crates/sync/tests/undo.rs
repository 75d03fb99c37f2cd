//! Property: after any sequence of changes in the sandbox, `undo` restores every file of the local folder.

mod support;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    time::SystemTime,
};

use cobox_sync::{Mode, RestoreScope};
use proptest::prelude::*;
use support::SyncPair;

/// Few enough that no deletion is a mass deletion.
const PATHS: [&str; 9] = ["a", "b.txt", "d/x", "d/y", "d/e/z", "f/p", "f/q/r", ".git/index", ".git/refs/main"];
const FOLDERS: [&str; 5] = ["d", "d/e", "f", "f/q", ".git/refs"];
/// Files that are never deleted, so that deletions stay the smaller part.
const ANCHORS: usize = 20;

#[derive(Clone, Debug)]
enum Op {
    Write(usize, u8),
    Remove(usize),
    RemoveFolder(usize),
    Rename(usize, usize),
    Exec(usize, bool),
    Link(usize, usize),
    FolderBecomesFile(usize),
    FileBecomesFolder(usize),
}

fn ops() -> impl Strategy<Value = Op> {
    let (path, folder) = (0..PATHS.len(), 0..FOLDERS.len());
    prop_oneof![
        3 => (path.clone(), any::<u8>()).prop_map(|(p, n)| Op::Write(p, n)),
        3 => path.clone().prop_map(Op::Remove),
        1 => folder.clone().prop_map(Op::RemoveFolder),
        1 => (path.clone(), path.clone()).prop_map(|(a, b)| Op::Rename(a, b)),
        1 => (path.clone(), any::<bool>()).prop_map(|(p, exec)| Op::Exec(p, exec)),
        1 => (path.clone(), path.clone()).prop_map(|(a, b)| Op::Link(a, b)),
        1 => folder.prop_map(Op::FolderBecomesFile),
        1 => path.prop_map(Op::FileBecomesFolder),
    ]
}

/// Applies the change if possible; a failure is no change.
fn change(root: &Path, op: &Op) {
    let at = |path: usize| root.join(PATHS[path]);
    let parents = |path: &Path| drop(fs::create_dir_all(path.parent().unwrap()));
    let clear = |path: &Path| drop(fs::remove_file(path).or_else(|_| fs::remove_dir_all(path)));
    match op {
        Op::Write(path, number) => {
            parents(&at(*path));
            let _ = fs::write(at(*path), format!("version {number}"));
        }
        Op::Remove(path) => drop(fs::remove_file(at(*path))),
        Op::RemoveFolder(folder) => drop(fs::remove_dir_all(root.join(FOLDERS[*folder]))),
        Op::Rename(from, to) => {
            parents(&at(*to));
            let _ = fs::rename(at(*from), at(*to));
        }
        Op::Exec(path, exec) => {
            let mode = if *exec { 0o755 } else { 0o644 };
            if fs::symlink_metadata(at(*path)).is_ok_and(|meta| meta.is_file()) {
                let _ = fs::set_permissions(at(*path), fs::Permissions::from_mode(mode));
            }
        }
        Op::Link(path, target) => {
            parents(&at(*path));
            clear(&at(*path));
            // Only a name, which need not exist.
            let _ = symlink(Path::new(PATHS[*target]).file_name().unwrap(), at(*path));
        }
        Op::FolderBecomesFile(folder) => {
            let folder = root.join(FOLDERS[*folder]);
            if folder.is_dir() {
                clear(&folder);
                let _ = fs::write(folder, "was a folder");
            }
        }
        Op::FileBecomesFolder(path) => {
            parents(&at(*path));
            if at(*path).is_file() {
                clear(&at(*path));
                let _ = fs::create_dir(at(*path));
                let _ = fs::write(at(*path).join("within"), "was a file");
            }
        }
    }
}

/// Content and permission bits of a file, or a link's target.
fn look(path: &Path) -> Option<(Vec<u8>, u32)> {
    let meta = fs::symlink_metadata(path).ok()?;
    match meta.is_symlink() {
        true => Some((fs::read_link(path).unwrap().into_os_string().into_encoded_bytes(), 0)),
        false => meta.is_file().then(|| (fs::read(path).unwrap(), meta.permissions().mode() & 0o777)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn undo_restores_every_local_file(
        first in proptest::collection::vec(ops(), 4..16),
        later in proptest::collection::vec(proptest::collection::vec(ops(), 1..4), 1..5),
    ) {
        let pair = SyncPair::new();
        for number in 0..ANCHORS {
            pair.write_local(&format!("anchor{number}"), &number.to_string());
        }
        for path in PATHS {
            pair.write_local(path, &format!("first {path}"));
        }
        first.iter().for_each(|op| change(&pair.local(""), op));
        pair.sync_once(Mode::TwoWaySafe);
        let had: BTreeMap<&str, _> = PATHS.iter().chain(&FOLDERS).filter_map(|p| Some((*p, look(&pair.local(p))?))).collect();
        let began = SystemTime::now();
        for step in &later {
            step.iter().for_each(|op| change(&pair.sandbox(""), op));
            pair.sync_once(Mode::TwoWaySafe);
        }
        let undone = pair.trash().restore(&RestoreScope::Since(began)).unwrap();
        prop_assert!(undone.failed.is_empty(), "{:?}", undone.failed);
        let moved: BTreeMap<String, String> = undone.restored.iter().map(|one| (one.path.to_string(), one.to.to_string())).collect();
        for (path, was) in &had {
            let now = moved.get(*path).map_or(*path, String::as_str);
            let found = look(&pair.local(now));
            prop_assert_eq!(found.as_ref(), Some(was), "{} is at {}; {:?}", path, now, moved);
        }
        // Restored files are ordinary edits, and a second undo finds nothing.
        prop_assert!(pair.trash().restore(&RestoreScope::Since(began)).unwrap().restored.is_empty());
        let status = pair.sync_once(Mode::TwoWaySafe);
        prop_assert!(status.conflicts.is_empty(), "{:?}", status.conflicts);
        pair.assert_same();
    }
}
