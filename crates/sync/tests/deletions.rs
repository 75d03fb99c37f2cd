//! Accidental deletions, with both ends over a socket: when the sync halts, what continues in the meantime, and how to
//! resume.

mod support;

use std::{fs, thread, time::Duration};

use cobox_sync::{Halt, Mode, Phase, RelPath, RestoreScope, Side};
use support::{RunningSync, SyncPair};

fn with_files(count: usize) -> (SyncPair, RunningSync) {
    let pair = SyncPair::new();
    for number in 0..count {
        pair.write_local(&format!("src/f{number}"), &number.to_string());
    }
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    (pair, sync)
}

fn files_in(folder: &std::path::Path) -> usize {
    fs::read_dir(folder).map_or(0, |listing| listing.flatten().filter(|e| e.path().is_file()).count())
}

fn is_halted(sync: &RunningSync) -> bool {
    matches!(sync.status().phase, Phase::Halted(_))
}

#[test]
fn slow_deletions_halt_before_the_other_side_loses_much() {
    let (pair, sync) = with_files(60);
    for number in 0..60 {
        fs::remove_file(pair.sandbox(&format!("src/f{number}"))).unwrap();
        // At the pace of a script that does other work in between.
        thread::sleep(Duration::from_millis(60));
    }
    pair.wait_until(|| is_halted(&sync));
    assert!(files_in(&pair.local("src")) >= 50, "{} are left", files_in(&pair.local("src")));
}

#[test]
fn removing_a_large_tree_halts_before_the_other_side_loses_much() {
    let (pair, sync) = with_files(3000);
    fs::remove_dir_all(pair.local("src")).unwrap();
    pair.wait_until(|| is_halted(&sync));
    assert!(files_in(&pair.sandbox("src")) >= 2700, "{} are left", files_in(&pair.sandbox("src")));
}

#[test]
fn deleting_every_file_halts_the_sync() {
    let (pair, sync) = with_files(10);
    sync.pause();
    for number in 0..10 {
        fs::remove_file(pair.local(&format!("src/f{number}"))).unwrap();
    }
    sync.resume(false).unwrap();
    pair.wait_until(|| is_halted(&sync));
    assert_eq!(sync.status().phase, Phase::Halted(Halt::FolderEmptied { side: Side::Local, files: 10, already_deleted: 0 }));
    assert_eq!(files_in(&pair.sandbox("src")), 10);
}

#[test]
fn a_renamed_directory_does_not_halt_the_sync() {
    let (pair, sync) = with_files(20);
    fs::rename(pair.local("src"), pair.local("lib")).unwrap();
    sync.flush();
    assert!(!pair.sandbox("src").exists());
    pair.assert_same();
}

#[test]
fn resume_continues_once_files_are_back_and_halts_again_otherwise() {
    let (pair, sync) = with_files(20);
    sync.pause();
    fs::rename(pair.sandbox("src"), pair.sandbox("../elsewhere")).unwrap();
    sync.resume(false).unwrap();
    pair.wait_until(|| is_halted(&sync));
    let halted = sync.status().phase;
    let refused = sync.resume(false).unwrap_err();
    assert!(refused.contains("20 would be deleted here") && refused.contains("--confirm"), "{refused}");
    assert_eq!(sync.status().phase, halted);
    fs::rename(pair.sandbox("../elsewhere"), pair.sandbox("src")).unwrap();
    sync.resume(false).unwrap();
    pair.write_local("more", "it goes on");
    sync.flush();
    assert_eq!(pair.read_sandbox("more"), "it goes on");
    pair.assert_same();
}

#[test]
fn a_save_does_not_wait_for_held_deletions() {
    let (pair, sync) = with_files(40);
    sync.pause();
    for number in 0..12 {
        fs::remove_file(pair.local(&format!("src/f{number}"))).unwrap();
    }
    pair.write_local("saved", "now");
    sync.resume(false).unwrap();
    pair.wait_until(|| pair.sandbox("saved").exists());
    assert_eq!(files_in(&pair.sandbox("src")), 40, "the deletions are held back");
    sync.flush();
    pair.assert_same();
}

#[test]
fn pause_and_halt_are_still_shown_after_a_reconnect() {
    let (pair, sync) = with_files(20);
    sync.pause();
    sync.disconnect();
    pair.wait_until(|| sync.connection_count() == 2 && sync.status().phase == Phase::Paused);
    fs::remove_dir_all(pair.local("src")).unwrap();
    sync.resume(false).unwrap();
    pair.wait_until(|| is_halted(&sync));
    let halted = sync.status().phase;
    sync.disconnect();
    pair.wait_until(|| sync.connection_count() == 3 && sync.status().phase == halted);
    assert_eq!(files_in(&pair.sandbox("src")), 20);
}

/// A sync with the default settings of 30 files in `src` and 40 in `docs`.
fn with_directories() -> (SyncPair, RunningSync) {
    let pair = SyncPair::new();
    for (folder, count) in [("src", 30), ("docs", 40)] {
        for number in 0..count {
            pair.write_local(&format!("{folder}/f{number}"), &format!("{folder} {number}"));
        }
    }
    pair.write_local("x", "x");
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    (pair, sync)
}

fn source_gone(directory: &str, files: usize) -> Phase {
    let directory = RelPath::new(directory.as_bytes()).unwrap();
    Phase::Halted(Halt::DirectoryGone { side: Side::Local, directory, files, already_deleted: 0 })
}

#[test]
fn moving_a_directory_to_a_held_back_name_counts_as_its_deletion() {
    let (pair, sync) = with_directories();
    fs::rename(pair.sandbox("src"), pair.sandbox(".idea")).unwrap();
    pair.wait_until(|| is_halted(&sync));
    assert_eq!(sync.status().phase, source_gone("src", 30));
    assert_eq!(files_in(&pair.local("src")), 30);
}

#[test]
fn moving_files_into_a_held_back_directory_of_their_own_counts_as_their_deletion() {
    let (pair, sync) = with_directories();
    sync.pause();
    fs::create_dir(pair.sandbox("src/.idea")).unwrap();
    for number in 0..30 {
        fs::rename(pair.sandbox(&format!("src/f{number}")), pair.sandbox(&format!("src/.idea/f{number}"))).unwrap();
    }
    sync.resume(false).unwrap();
    pair.wait_until(|| is_halted(&sync));
    assert_eq!(sync.status().phase, source_gone("src", 30));
}

#[test]
fn deleting_a_moved_directory_halts_even_after_another_deletion() {
    let (pair, sync) = with_directories();
    fs::remove_file(pair.sandbox("x")).unwrap();
    sync.flush();
    assert!(!pair.local("x").exists());
    fs::rename(pair.sandbox("src"), pair.sandbox("old")).unwrap();
    sync.flush();
    assert_eq!(files_in(&pair.local("old")), 30);
    sync.pause();
    fs::remove_dir_all(pair.sandbox("old")).unwrap();
    sync.resume(false).unwrap();
    pair.wait_until(|| is_halted(&sync) || !pair.local("old").exists());
    assert!(matches!(sync.status().phase, Phase::Halted(Halt::DirectoryGone { files: 30, .. })), "{:?}", sync.status().phase);
}

#[test]
fn undo_after_a_halt_keeps_all_files_of_the_directory() {
    let pair = SyncPair::new();
    for number in 0..30 {
        pair.write_local(&format!("src/a/b/f{number}"), &number.to_string());
    }
    for number in 0..400 {
        pair.write_local(&format!("src/f{number}"), &format!("other {number}"));
    }
    let sync = pair.start(Mode::TwoWaySafe);
    sync.flush();
    for number in 0..4 {
        fs::remove_file(pair.sandbox(&format!("src/a/b/f{number}"))).unwrap();
    }
    sync.flush();
    assert_eq!(files_in(&pair.local("src/a/b")), 26);
    sync.pause();
    for number in 4..30 {
        fs::remove_file(pair.sandbox(&format!("src/a/b/f{number}"))).unwrap();
    }
    sync.resume(false).unwrap();
    pair.wait_until(|| is_halted(&sync));
    let refused = sync.resume(false).unwrap_err();
    for part in ["30 files", "4 of them are already deleted", "resume --confirm", "cobox sync undo"] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    assert_eq!(pair.trash().restore(&RestoreScope::LastBatch).unwrap().restored.len(), 4);
    sync.resume(false).unwrap();
    sync.flush();
    assert_eq!((files_in(&pair.local("src/a/b")), files_in(&pair.sandbox("src/a/b"))), (30, 30));
    pair.assert_same();
}
