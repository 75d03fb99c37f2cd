//! What the sandbox deletes or replaces in the local folder, by both ends over a socket: it is in the trash, and there is a way back.

mod ends;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    sync::Arc,
    time::{Duration, SystemTime},
};

use cobox_sync::{Choice, Halt, Keep, Mode, Own, Phase, RelPath, Scope, Settings, Side, TRASH, Trash, TrashLimits};
use ends::{Ends, Live};

fn is_halted(live: &Live) -> bool {
    matches!(live.status().phase, Phase::Halted(_))
}

fn restored(trash: &Trash, scope: &Scope) -> Vec<(String, String)> {
    let done = trash.restore(scope).unwrap();
    assert_eq!(done.failed, []);
    done.restored.iter().map(|one| (one.path.to_string(), one.to.to_string())).collect()
}

fn stored(ends: &Ends) -> Vec<String> {
    ends.trash().items().unwrap().iter().map(|item| item.path.to_string()).collect()
}

#[test]
fn a_source_tree_that_goes_in_the_sandbox_halts_beside_a_large_repository_and_comes_back() {
    let ends = Ends::new();
    for number in 0..30 {
        ends.write_here(&format!("src/f{number}"), &number.to_string());
    }
    ends.write_here("README.md", "stays");
    for number in 0..56 {
        ends.write_here(&format!(".git/objects/{number:02}/x"), &format!("object {number}"));
    }
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    live.pause();
    fs::remove_dir_all(ends.there("src")).unwrap();
    live.resume(false).unwrap();
    ends.wait_until(|| is_halted(&live));
    let directory = RelPath::new(b"src").unwrap();
    assert_eq!(live.status().phase, Phase::Halted(Halt::DirectoryGone { side: Side::Here, directory, files: 30, lately: 0 }));
    assert_eq!(fs::read_dir(ends.here("src")).unwrap().count(), 30);
    live.resume(true).unwrap();
    live.flush();
    assert!(!ends.here("src").exists());
    assert_eq!(stored(&ends).len(), 30);
    let before = fs::metadata(ends.here(TRASH)).unwrap().permissions().mode() & 0o777;
    assert_eq!(before, 0o700, "other users can't read it");
    assert_eq!(restored(&ends.trash(), &Scope::LastBatch).len(), 31, "the files and their folder");
    live.flush();
    assert_eq!((ends.read_here("src/f7"), ends.read_there("src/f7")), ("7".into(), "7".into()));
    ends.assert_same();
    assert!(stored(&ends).is_empty() && restored(&ends.trash(), &Scope::LastBatch).is_empty());
}

#[test]
fn what_the_sandbox_replaces_comes_back_with_its_mode_and_its_own_version_is_kept_too() {
    let ends = Ends::new();
    ends.write_here("run.sh", "mine");
    fs::set_permissions(ends.here("run.sh"), fs::Permissions::from_mode(0o750)).unwrap();
    ends.write_here("target", "t");
    symlink("target", ends.here("link")).unwrap();
    ends.write_here(".git/index", "index 1");
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    let inode = fs::metadata(ends.here("run.sh")).unwrap().ino();
    ends.write_there("run.sh", "theirs");
    ends.write_there(".git/index", "index 2");
    fs::remove_file(ends.there("link")).unwrap();
    live.flush();
    assert_eq!(ends.read_here("run.sh"), "theirs");
    let mut names = stored(&ends);
    names.sort();
    assert_eq!(names, [".git/index", "link", "run.sh"], "version control is no exception");
    restored(&ends.trash(), &Scope::LastBatch);
    let meta = fs::metadata(ends.here("run.sh")).unwrap();
    assert_eq!((meta.permissions().mode() & 0o777, meta.ino()), (0o750, inode), "the very same file, by rename");
    assert_eq!((ends.read_here("run.sh"), ends.read_here(".git/index")), ("mine".into(), "index 1".into()));
    assert_eq!(fs::read_link(ends.here("link")).unwrap().to_str(), Some("target"));
    live.flush();
    assert_eq!(ends.read_there("run.sh"), "mine", "an ordinary edit for the sync");
    let aside: Vec<_> = ends.trash().items().unwrap();
    assert!(aside.iter().all(|item| item.is_from_undo) && aside.len() == 2, "{aside:?}");
    let ids: BTreeSet<String> = aside.iter().filter(|i| i.path.to_string() == "run.sh").map(|i| i.id.clone()).collect();
    restored(&ends.trash(), &Scope::Items(ids));
    assert_eq!(ends.read_here("run.sh"), "theirs", "and back again");
}

#[test]
fn a_path_that_changed_since_gets_the_old_version_beside_it() {
    let ends = Ends::new();
    for name in ["notes.md", "gone.txt", "d/x"] {
        ends.write_here(name, "old");
    }
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    ends.write_there("notes.md", "from the sandbox");
    fs::remove_file(ends.there("gone.txt")).unwrap();
    fs::remove_dir_all(ends.there("d")).unwrap();
    live.flush();
    drop(live);
    ends.write_here("notes.md", "edited since");
    ends.write_here("gone.txt", "made since");
    ends.write_here("d", "a file now");
    let mut back = restored(&ends.trash(), &Scope::LastBatch);
    back.sort();
    let pair = |from: &str, to: &str| (from.to_owned(), to.to_owned());
    assert_eq!(back, [pair("d/x", "d.restored/x"), pair("gone.txt", "gone.restored.txt"), pair("notes.md", "notes.restored.md")]);
    for (name, text) in [("notes.md", "edited since"), ("gone.txt", "made since"), ("d", "a file now")] {
        assert_eq!(ends.read_here(name), text);
    }
    for name in ["notes.restored.md", "gone.restored.txt", "d.restored/x"] {
        assert_eq!(ends.read_here(name), "old");
    }
}

#[test]
fn undo_since_a_time_gives_the_version_of_that_time_and_keeps_the_later_ones() {
    let ends = Ends::new();
    ends.write_here("x", "one");
    ends.sync_once(Mode::TwoWaySafe);
    let began = SystemTime::now();
    for text in ["two", "three", "four"] {
        ends.write_there("x", text);
        ends.sync_once(Mode::TwoWaySafe);
    }
    assert_eq!(stored(&ends).len(), 3);
    assert_eq!(restored(&ends.trash(), &Scope::Since(began)), [("x".to_owned(), "x".to_owned())]);
    assert_eq!(ends.read_here("x"), "one");
    let sizes: Vec<u64> = ends.trash().items().unwrap().iter().map(|item| item.size).collect();
    assert_eq!(sizes, [4, 3, 5], "four, which was there, and then the versions between");
    assert!(restored(&ends.trash(), &Scope::Since(began)).is_empty());
    assert_eq!(ends.sync_once(Mode::TwoWaySafe).conflicts, []);
    assert_eq!(ends.read_there("x"), "one");
}

#[test]
fn a_full_trash_halts_the_sync_until_there_is_room() {
    let ends = Ends::new();
    ends.write_here("a", &"a".repeat(6000));
    ends.write_here("b", &"b".repeat(6000));
    let trash = TrashLimits { bytes: 10_000, ..TrashLimits::default() };
    let live = ends.start_with(Settings { trash, ..Settings::default() }, Arc::new(Own::new(ends.there(""))));
    live.flush();
    ends.write_there("a", "changed");
    live.flush();
    assert_eq!(live.status().trash, (8192, 10_000));
    fs::remove_file(ends.there("b")).unwrap();
    ends.wait_until(|| is_halted(&live));
    let why = match live.status().phase {
        Phase::Halted(halt) => halt.to_string(),
        phase => panic!("{phase:?}"),
    };
    assert!(why.contains("the trash is full"), "{why}");
    assert!(live.resume(true).unwrap_err().contains("trash empty"), "no confirmation makes room");
    assert_eq!(ends.read_here("b").len(), 6000);
    assert_eq!(ends.trash().empty(None).unwrap().files, 1);
    live.resume(false).unwrap();
    live.flush();
    assert!(!ends.here("b").exists());
    assert_eq!(stored(&ends), ["b"]);
}

#[test]
fn what_is_too_old_expires_and_an_emptied_trash_leaves_nothing_behind() {
    let ends = Ends::new();
    ends.write_here("x", "one");
    ends.sync_once(Mode::TwoWaySafe);
    ends.write_there("x", "two");
    ends.sync_once(Mode::TwoWaySafe);
    assert_eq!(stored(&ends).len(), 1);
    let trash = TrashLimits { age: Duration::ZERO, ..TrashLimits::default() };
    ends.start_with(Settings { trash, ..Settings::default() }, Arc::new(Own::new(ends.there("")))).flush();
    assert!(stored(&ends).is_empty());
    ends.trash().empty(None).unwrap();
    assert!(!ends.here(TRASH).exists());
}

#[test]
fn a_one_way_mode_keeps_what_it_replaces() {
    let ends = Ends::new();
    ends.write_here("x", "one");
    ends.write_here("y", "one");
    ends.sync_once(Mode::Pull);
    ends.sync_once(Mode::TwoWaySafe);
    ends.write_there("x", "two");
    let status = ends.sync_once(Mode::Pull);
    assert_eq!((status.conflicts.len(), ends.read_here("x").as_str()), (0, "two"));
    assert_eq!(stored(&ends), ["x"]);
    // The side that wins a conflict replaces the local edit.
    ends.write_here("y", "mine");
    ends.write_there("y", "theirs");
    ends.sync_once(Mode::PreferSandbox);
    assert_eq!(ends.read_here("y"), "theirs");
    ends.write_here("x", "mine");
    ends.write_there("x", "theirs");
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    assert_eq!(live.resolve(&["x"], Choice::Keep(Keep::Sandbox)), Ok(1));
    live.flush();
    assert_eq!(ends.read_here("x"), "theirs");
    let versions: Vec<(String, u64)> = ends.trash().items().unwrap().iter().map(|i| (i.path.to_string(), i.size)).collect();
    assert_eq!(versions, [("x".to_owned(), 3), ("y".to_owned(), 4), ("x".to_owned(), 4)]);
    restored(&ends.trash(), &Scope::LastBatch);
    assert_eq!(ends.read_here("x"), "mine");
}

#[test]
fn the_trash_is_never_synced_and_git_does_not_see_it() {
    let ends = Ends::new();
    ends.write_here("x", "one");
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    ends.write_there("x", "two");
    live.flush();
    assert!(ends.here(TRASH).is_dir());
    live.flush();
    assert!(!ends.there(TRASH).exists());
    assert_eq!(fs::read_to_string(ends.here(TRASH).join(".gitignore")).unwrap(), "*\n");
}
