//! Files that the sandbox deletes or replaces in the local folder, with both ends over a socket: they are in the trash
//! and can be restored.

mod support;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    sync::Arc,
    time::{Duration, SystemTime},
};

use cobox_sync::{Halt, LocalHooks, Mode, Phase, RelPath, Resolution, RestoreScope, Settings, Side, TRASH_DIRECTORY, Trash, TrashLimits};
use support::{RunningSync, SyncPair};

fn is_halted(sync: &RunningSync) -> bool {
    matches!(sync.status().phase, Phase::Halted(_))
}

fn restored(trash: &Trash, scope: &RestoreScope) -> Vec<(String, String)> {
    let done = trash.restore(scope).unwrap();
    assert_eq!(done.failed, []);
    done.restored.iter().map(|one| (one.path.to_string(), one.to.to_string())).collect()
}

fn stored(pair: &SyncPair) -> Vec<String> {
    pair.trash().items().unwrap().iter().map(|item| item.path.to_string()).collect()
}

#[test]
fn a_source_tree_deleted_in_the_sandbox_halts_and_can_be_restored() {
    let pair = SyncPair::new();
    for number in 0..30 {
        pair.write_local(&format!("src/f{number}"), &number.to_string());
    }
    pair.write_local("README.md", "stays");
    for number in 0..56 {
        pair.write_local(&format!(".git/objects/{number:02}/x"), &format!("object {number}"));
    }
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    sync.pause();
    fs::remove_dir_all(pair.sandbox("src")).unwrap();
    sync.resume(false).unwrap();
    pair.wait_until(|| is_halted(&sync));
    let directory = RelPath::new(b"src").unwrap();
    assert_eq!(sync.status().phase, Phase::Halted(Halt::DirectoryGone { side: Side::Local, directory, files: 30, already_deleted: 0 }));
    assert_eq!(fs::read_dir(pair.local("src")).unwrap().count(), 30);
    sync.resume(true).unwrap();
    sync.flush();
    assert!(!pair.local("src").exists());
    assert_eq!(stored(&pair).len(), 30);
    let before = fs::metadata(pair.local(TRASH_DIRECTORY)).unwrap().permissions().mode() & 0o777;
    assert_eq!(before, 0o700, "other users can't read it");
    assert_eq!(restored(&pair.trash(), &RestoreScope::LastBatch).len(), 31, "the files and their folder");
    sync.flush();
    assert_eq!((pair.read_local("src/f7"), pair.read_sandbox("src/f7")), ("7".into(), "7".into()));
    pair.assert_same();
    assert!(stored(&pair).is_empty() && restored(&pair.trash(), &RestoreScope::LastBatch).is_empty());
}

#[test]
fn restoring_a_replaced_file_keeps_its_mode_and_the_sandbox_version() {
    let pair = SyncPair::new();
    pair.write_local("run.sh", "mine");
    fs::set_permissions(pair.local("run.sh"), fs::Permissions::from_mode(0o750)).unwrap();
    pair.write_local("target", "t");
    symlink("target", pair.local("link")).unwrap();
    pair.write_local(".git/index", "index 1");
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    let inode = fs::metadata(pair.local("run.sh")).unwrap().ino();
    pair.write_sandbox("run.sh", "theirs");
    pair.write_sandbox(".git/index", "index 2");
    fs::remove_file(pair.sandbox("link")).unwrap();
    sync.flush();
    assert_eq!(pair.read_local("run.sh"), "theirs");
    let mut names = stored(&pair);
    names.sort();
    assert_eq!(names, [".git/index", "link", "run.sh"], "version control files are moved to the trash, too");
    restored(&pair.trash(), &RestoreScope::LastBatch);
    let meta = fs::metadata(pair.local("run.sh")).unwrap();
    assert_eq!((meta.permissions().mode() & 0o777, meta.ino()), (0o750, inode), "the very same file, by rename");
    assert_eq!((pair.read_local("run.sh"), pair.read_local(".git/index")), ("mine".into(), "index 1".into()));
    assert_eq!(fs::read_link(pair.local("link")).unwrap().to_str(), Some("target"));
    sync.flush();
    assert_eq!(pair.read_sandbox("run.sh"), "mine", "the sync treats it as an ordinary edit");
    let aside: Vec<_> = pair.trash().items().unwrap();
    assert!(aside.iter().all(|item| item.is_from_undo) && aside.len() == 2, "{aside:?}");
    let ids: BTreeSet<String> = aside.iter().filter(|i| i.path.to_string() == "run.sh").map(|i| i.id.clone()).collect();
    restored(&pair.trash(), &RestoreScope::Items(ids));
    assert_eq!(pair.read_local("run.sh"), "theirs", "and back again");
}

#[test]
fn a_path_changed_since_is_restored_under_another_name() {
    let pair = SyncPair::new();
    for name in ["notes.md", "gone.txt", "d/x"] {
        pair.write_local(name, "old");
    }
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    pair.write_sandbox("notes.md", "from the sandbox");
    fs::remove_file(pair.sandbox("gone.txt")).unwrap();
    fs::remove_dir_all(pair.sandbox("d")).unwrap();
    sync.flush();
    drop(sync);
    pair.write_local("notes.md", "edited since");
    pair.write_local("gone.txt", "made since");
    pair.write_local("d", "a file now");
    let mut back = restored(&pair.trash(), &RestoreScope::LastBatch);
    back.sort();
    let renamed = |from: &str, to: &str| (from.to_owned(), to.to_owned());
    assert_eq!(back, [renamed("d/x", "d.restored/x"), renamed("gone.txt", "gone.restored.txt"), renamed("notes.md", "notes.restored.md")]);
    for (name, text) in [("notes.md", "edited since"), ("gone.txt", "made since"), ("d", "a file now")] {
        assert_eq!(pair.read_local(name), text);
    }
    for name in ["notes.restored.md", "gone.restored.txt", "d.restored/x"] {
        assert_eq!(pair.read_local(name), "old");
    }
}

#[test]
fn undo_since_a_time_restores_that_version_and_keeps_later_ones() {
    let pair = SyncPair::new();
    pair.write_local("x", "one");
    pair.sync_once(Mode::TwoWaySafe);
    let began = SystemTime::now();
    for text in ["two", "three", "four"] {
        pair.write_sandbox("x", text);
        pair.sync_once(Mode::TwoWaySafe);
    }
    assert_eq!(stored(&pair).len(), 3);
    assert_eq!(restored(&pair.trash(), &RestoreScope::Since(began)), [("x".to_owned(), "x".to_owned())]);
    assert_eq!(pair.read_local("x"), "one");
    let sizes: Vec<u64> = pair.trash().items().unwrap().iter().map(|item| item.size).collect();
    assert_eq!(sizes, [4, 3, 5], "the existing version 4, then the versions between");
    assert!(restored(&pair.trash(), &RestoreScope::Since(began)).is_empty());
    assert_eq!(pair.sync_once(Mode::TwoWaySafe).conflicts, []);
    assert_eq!(pair.read_sandbox("x"), "one");
}

#[test]
fn a_full_trash_halts_the_sync_until_space_is_freed() {
    let pair = SyncPair::new();
    pair.write_local("a", &"a".repeat(6000));
    pair.write_local("b", &"b".repeat(6000));
    let trash = TrashLimits { bytes: 10_000, ..TrashLimits::default() };
    let sync = pair.start_with(Settings { trash, ..Settings::default() }, Arc::new(LocalHooks::new(pair.sandbox(""))));
    sync.flush();
    pair.write_sandbox("a", "changed");
    sync.flush();
    assert_eq!(sync.status().trash, (8192, 10_000));
    fs::remove_file(pair.sandbox("b")).unwrap();
    pair.wait_until(|| is_halted(&sync));
    let why = match sync.status().phase {
        Phase::Halted(halt) => halt.to_string(),
        phase => panic!("{phase:?}"),
    };
    assert!(why.contains("the trash is full"), "{why}");
    assert!(sync.resume(true).unwrap_err().contains("trash empty"), "a confirmation does not free space");
    assert_eq!(pair.read_local("b").len(), 6000);
    assert_eq!(pair.trash().empty(None).unwrap().files, 1);
    sync.resume(false).unwrap();
    sync.flush();
    assert!(!pair.local("b").exists());
    assert_eq!(stored(&pair), ["b"]);
}

#[test]
fn old_batches_expire_and_an_emptied_trash_is_removed() {
    let pair = SyncPair::new();
    pair.write_local("x", "one");
    pair.sync_once(Mode::TwoWaySafe);
    pair.write_sandbox("x", "two");
    pair.sync_once(Mode::TwoWaySafe);
    assert_eq!(stored(&pair).len(), 1);
    let trash = TrashLimits { age: Duration::ZERO, ..TrashLimits::default() };
    pair.start_with(Settings { trash, ..Settings::default() }, Arc::new(LocalHooks::new(pair.sandbox("")))).flush();
    assert!(stored(&pair).is_empty());
    pair.trash().empty(None).unwrap();
    assert!(!pair.local(TRASH_DIRECTORY).exists());
}

#[test]
fn pull_mode_moves_replaced_files_to_the_trash() {
    let pair = SyncPair::new();
    pair.write_local("x", "one");
    pair.write_local("y", "one");
    pair.sync_once(Mode::Pull);
    pair.sync_once(Mode::TwoWaySafe);
    pair.write_sandbox("x", "two");
    let status = pair.sync_once(Mode::Pull);
    assert_eq!((status.conflicts.len(), pair.read_local("x").as_str()), (0, "two"));
    assert_eq!(stored(&pair), ["x"]);
    // The winning side of a conflict replaces the local edit.
    pair.write_local("y", "mine");
    pair.write_sandbox("y", "theirs");
    pair.sync_once(Mode::PreferSandbox);
    assert_eq!(pair.read_local("y"), "theirs");
    pair.write_local("x", "mine");
    pair.write_sandbox("x", "theirs");
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    assert_eq!(sync.resolve(&["x"], Resolution::Keep(Side::Sandbox)), Ok(1));
    sync.flush();
    assert_eq!(pair.read_local("x"), "theirs");
    let versions: Vec<(String, u64)> = pair.trash().items().unwrap().iter().map(|i| (i.path.to_string(), i.size)).collect();
    assert_eq!(versions, [("x".to_owned(), 3), ("y".to_owned(), 4), ("x".to_owned(), 4)]);
    restored(&pair.trash(), &RestoreScope::LastBatch);
    assert_eq!(pair.read_local("x"), "mine");
}

#[test]
fn the_trash_is_never_synced_and_git_ignores_it() {
    let pair = SyncPair::new();
    pair.write_local("x", "one");
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    pair.write_sandbox("x", "two");
    sync.flush();
    assert!(pair.local(TRASH_DIRECTORY).is_dir());
    sync.flush();
    assert!(!pair.sandbox(TRASH_DIRECTORY).exists());
    assert_eq!(fs::read_to_string(pair.local(TRASH_DIRECTORY).join(".gitignore")).unwrap(), "*\n");
}

#[test]
fn a_trash_whose_name_is_taken_is_reported_with_its_path() {
    for is_link in [false, true] {
        let pair = SyncPair::new();
        pair.write_local("x", "one");
        let sync = pair.start(Mode::TwoWaySafe);
        sync.flush();
        let path = pair.local(TRASH_DIRECTORY);
        match is_link {
            true => symlink("x", &path).unwrap(),
            false => fs::write(&path, "mine").unwrap(),
        }
        fs::remove_file(pair.sandbox("x")).unwrap();
        let expected = format!("{} is not a directory", path.display());
        pair.wait_until(|| matches!(sync.status().phase, Phase::Retrying(reason) if reason.contains(&expected)));
        assert_eq!(pair.read_local("x"), "one");
        let listed = pair.trash().items().unwrap_err().to_string();
        assert!(listed.contains(&expected) && listed.contains("move or delete it"), "{listed}");
        fs::remove_file(&path).unwrap();
        pair.wait_until(|| !pair.local("x").exists());
        assert_eq!(stored(&pair), ["x"]);
    }
}
