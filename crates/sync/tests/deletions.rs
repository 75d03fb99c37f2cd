//! Deletions that nobody may have meant, by both ends over a socket: what is asked about, what goes meanwhile, and the ways on.

mod ends;

use std::{fs, thread, time::Duration};

use cobox_sync::{Halt, Mode, Phase, Side};
use ends::{Ends, Live};

fn with_files(count: usize) -> (Ends, Live) {
    let ends = Ends::new();
    for number in 0..count {
        ends.write_here(&format!("src/f{number}"), &number.to_string());
    }
    let live = ends.start(Mode::TwoWaySafe);
    live.flush();
    (ends, live)
}

fn files_in(folder: &std::path::Path) -> usize {
    fs::read_dir(folder).map_or(0, |listing| listing.flatten().filter(|e| e.path().is_file()).count())
}

fn is_halted(live: &Live) -> bool {
    matches!(live.status().phase, Phase::Halted(_))
}

#[test]
fn one_file_after_the_other_halts_when_few_have_gone_on_the_other_side() {
    let (ends, live) = with_files(60);
    for number in 0..60 {
        fs::remove_file(ends.there(&format!("src/f{number}"))).unwrap();
        // As slowly as a script that does something between two of them.
        thread::sleep(Duration::from_millis(60));
    }
    ends.wait_until(|| is_halted(&live));
    assert!(files_in(&ends.here("src")) >= 50, "{} are left", files_in(&ends.here("src")));
}

#[test]
fn a_large_tree_that_is_removed_halts_when_few_have_gone_on_the_other_side() {
    let (ends, live) = with_files(3000);
    fs::remove_dir_all(ends.here("src")).unwrap();
    ends.wait_until(|| is_halted(&live));
    assert!(files_in(&ends.there("src")) >= 2700, "{} are left", files_in(&ends.there("src")));
}

#[test]
fn files_that_all_go_from_their_folders_are_asked_about() {
    let (ends, live) = with_files(10);
    live.pause();
    for number in 0..10 {
        fs::remove_file(ends.here(&format!("src/f{number}"))).unwrap();
    }
    live.resume(false).unwrap();
    ends.wait_until(|| is_halted(&live));
    assert_eq!(live.status().phase, Phase::Halted(Halt::Emptied { side: Side::Here, files: 10 }));
    assert_eq!(files_in(&ends.there("src")), 10);
}

#[test]
fn a_folder_that_is_renamed_is_nothing_to_ask_about() {
    let (ends, live) = with_files(20);
    fs::rename(ends.here("src"), ends.here("lib")).unwrap();
    live.flush();
    assert!(!ends.there("src").exists());
    ends.assert_same();
}

#[test]
fn what_is_put_back_after_a_halt_lets_it_go_on_and_what_is_not_halts_again() {
    let (ends, live) = with_files(20);
    live.pause();
    fs::rename(ends.there("src"), ends.there("../elsewhere")).unwrap();
    live.resume(false).unwrap();
    ends.wait_until(|| is_halted(&live));
    let halted = live.status().phase;
    let refused = live.resume(false).unwrap_err();
    assert!(refused.contains("20 would be deleted here") && refused.contains("--confirm"), "{refused}");
    assert_eq!(live.status().phase, halted);
    fs::rename(ends.there("../elsewhere"), ends.there("src")).unwrap();
    live.resume(false).unwrap();
    ends.write_here("more", "it goes on");
    live.flush();
    assert_eq!(ends.read_there("more"), "it goes on");
    ends.assert_same();
}

#[test]
fn a_save_does_not_wait_for_deletions_that_are_held() {
    let (ends, live) = with_files(40);
    live.pause();
    for number in 0..12 {
        fs::remove_file(ends.here(&format!("src/f{number}"))).unwrap();
    }
    ends.write_here("saved", "now");
    live.resume(false).unwrap();
    ends.wait_until(|| ends.there("saved").exists());
    assert_eq!(files_in(&ends.there("src")), 40, "they are held");
    live.flush();
    ends.assert_same();
}

#[test]
fn a_pause_and_a_halt_are_told_also_after_a_cut() {
    let (ends, live) = with_files(20);
    live.pause();
    live.cut();
    ends.wait_until(|| live.dials() == 2 && live.status().phase == Phase::Paused);
    fs::remove_dir_all(ends.here("src")).unwrap();
    live.resume(false).unwrap();
    ends.wait_until(|| is_halted(&live));
    let halted = live.status().phase;
    live.cut();
    ends.wait_until(|| live.dials() == 3 && live.status().phase == halted);
    assert_eq!(files_in(&ends.there("src")), 20);
}
