//! Either end killed at random moments, each in a process of its own: every file is then the old or the new version, whole, what was saved
//! last is what both sides have in the end, and nobody is asked about a conflict that there isn't.
//!
//! `COBOX_SYNC_KILLS` says how often; 50 unless told.
//!
//! The local end killed in the midst of deletions and replacements: every version is at its place or in the trash.

mod ends;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, SystemTime},
};

use cobox_sync::{Connection, Engine, Limits, Mode, NoConnection, Own, Settings, open_root, serve};
use ends::Ends;

const FILES: u64 = 12;
/// Some hundred kilobytes, so that deltas are used too.
const LINES: usize = 12_000;

/// The same run each time, but for what the machine adds.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

fn version(side: &str, number: u64, lines: usize) -> String {
    format!("{side} {number} of {lines}\n").repeat(lines)
}

fn assert_whole(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let Ok(text) = fs::read_to_string(entry.path()) else { continue };
        let first = text.lines().next().unwrap_or_default();
        let lines: usize = first.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let is_whole = text.lines().count() == lines && text.lines().all(|line| line == first);
        assert!(is_whole, "{} is half of something", entry.path().display());
    }
}

/// Starts this test program again as one of the ends.
fn child(name: &str, at: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env("COBOX_SYNC_AT", at)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn whoever_is_killed_every_file_is_old_or_new() {
    kill(std::env::var("COBOX_SYNC_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(50));
}

#[test]
#[ignore = "takes minutes; `make soak` runs it"]
fn soak_either_end_killed_500_times() {
    kill(500);
    if let Some(file) = std::env::var_os("COBOX_SOAK_RESULTS") {
        use std::io::Write;
        let mut file = fs::File::options().create(true).append(true).open(file).unwrap();
        writeln!(file, "- either end of a sync killed 500 times, without a broker: every file old or new, whole").unwrap();
    }
}

/// Rounds after which both sides are let come to rest, and each file becomes the other side's.
const TURN: u64 = 10;

fn kill(kills: u64) {
    let ends = Ends::new();
    let top = ends.here("").parent().unwrap().to_owned();
    // More than are ever deleted before both sides come to rest: that most of a folder goes is another matter.
    for number in 0..FILES * 2 {
        ends.write_here(&format!("kept{number}"), &version("here", number, 1));
    }
    let mut dice = Dice(77);
    let mut last: Vec<Option<String>> = vec![None; FILES as usize];
    for round in 0..kills {
        if round % TURN == 0 {
            settle(&ends, &last);
        }
        for number in 0..FILES {
            let (side, path) = match (number + round / TURN) % 2 {
                0 => ("here", ends.here(&format!("f{number}"))),
                _ => ("there", ends.there(&format!("f{number}"))),
            };
            let lines = if number % 3 == 0 { LINES } else { 50 };
            match dice.roll(6) {
                0 => {
                    let _ = fs::remove_file(path);
                    last[number as usize] = None;
                }
                // Sometimes nothing.
                1 => {}
                _ => {
                    let (beside, text) = (path.with_extension("writing"), version(side, round, lines));
                    fs::write(&beside, &text).unwrap();
                    fs::rename(beside, path).unwrap();
                    last[number as usize] = Some(text);
                }
            }
        }
        let mut sandbox = child("as_the_sandbox", &top);
        ends.wait_until(|| top.join("socket").exists());
        let mut laptop = child("as_the_laptop", &top);
        thread::sleep(Duration::from_millis(dice.roll(150)));
        if dice.roll(2) == 0 {
            laptop.kill().unwrap();
        } else {
            sandbox.kill().unwrap();
            assert_whole(&ends.there(""));
        }
        for one in [&mut laptop, &mut sandbox] {
            // The one that is left: it would go on for ever.
            let _ = one.kill();
            one.wait().unwrap();
        }
        let _ = fs::remove_file(top.join("socket"));
        assert_whole(&ends.here(""));
        assert_whole(&ends.there(""));
    }
    settle(&ends, &last);
    // What killed runs left is swept.
    ends.wait_until(|| !ends.here(cobox_sync::STAGING).exists() && !ends.there(cobox_sync::STAGING).exists());
}

/// Files of the test below; those that stay are so many that no round is a mass deletion.
const TRASH_FILES: u64 = 120;
const TRASH_ANCHORS: u64 = 600;
const TRASH_KILLS: u64 = 12;

/// Every file in the trash, whole or half moved.
fn in_trash(ends: &Ends) -> Vec<String> {
    let batches = fs::read_dir(ends.here(cobox_sync::TRASH)).into_iter().flatten().flatten();
    let files = batches.filter_map(|batch| fs::read_dir(batch.path()).ok()).flatten().flatten();
    files.filter(|file| file.file_name().as_encoded_bytes()[0].is_ascii_digit()).filter_map(|f| fs::read_to_string(f.path()).ok()).collect()
}

fn in_folder(ends: &Ends) -> Vec<String> {
    fs::read_dir(ends.here("")).unwrap().flatten().filter_map(|file| fs::read_to_string(file.path()).ok()).collect()
}

#[test]
fn killed_while_it_deletes_and_replaces_every_version_is_at_its_place_or_in_the_trash() {
    let ends = Ends::new();
    let top = ends.here("").parent().unwrap().to_owned();
    for number in 0..TRASH_ANCHORS {
        ends.write_here(&format!("anchor{number}"), &format!("anchor {number}"));
    }
    let first = |number: u64| format!("first version of {number}");
    (0..TRASH_FILES).for_each(|number| ends.write_here(&format!("f{number}"), &first(number)));
    ends.start(Mode::TwoWaySafe).flush();
    let (began, mut dice, mut had) = (SystemTime::now(), Dice(4711), BTreeSet::new());
    for round in 0..TRASH_KILLS {
        had.extend(in_folder(&ends));
        for number in 0..TRASH_FILES {
            match dice.roll(20) {
                0 => drop(fs::remove_file(ends.there(&format!("f{number}")))),
                1..10 => ends.write_there(&format!("f{number}"), &format!("version {round} of {number}")),
                _ => {}
            }
        }
        let (before, moved) = (in_trash(&ends).len(), dice.roll(TRASH_FILES / 3) as usize);
        let mut sandbox = child("as_the_sandbox", &top);
        ends.wait_until(|| top.join("socket").exists());
        let mut laptop = child("as_the_laptop", &top);
        ends.wait_until(|| in_trash(&ends).len() >= before + moved);
        for one in [&mut laptop, &mut sandbox] {
            one.kill().unwrap();
            one.wait().unwrap();
        }
        let _ = fs::remove_file(top.join("socket"));
        let now: BTreeSet<String> = in_folder(&ends).into_iter().chain(in_trash(&ends)).collect();
        let lost: Vec<&String> = had.difference(&now).collect();
        assert!(lost.is_empty(), "round {round}: {lost:?}");
    }
    ends.start(Mode::TwoWaySafe).flush();
    let undone = ends.trash().restore(&cobox_sync::Scope::Since(began)).unwrap();
    assert!(undone.failed.is_empty(), "{:?}", undone.failed);
    let beside: BTreeMap<String, String> = undone.restored.iter().map(|one| (one.path.to_string(), one.to.to_string())).collect();
    for number in 0..TRASH_FILES {
        let name = format!("f{number}");
        assert_eq!(ends.read_here(beside.get(&name).unwrap_or(&name)), first(number));
    }
}

/// A run that is left alone makes both sides what was saved last.
fn settle(ends: &Ends, last: &[Option<String>]) {
    let live = ends.start(Mode::TwoWaySafe);
    let status = live.flush();
    assert!(status.conflicts.is_empty(), "{:?}", status.conflicts);
    drop(live);
    for (number, text) in last.iter().enumerate() {
        for path in [ends.here(&format!("f{number}")), ends.there(&format!("f{number}"))] {
            assert!(fs::read_to_string(&path).ok() == *text, "{} is not what was saved last", path.display());
        }
    }
}

fn place() -> Option<std::path::PathBuf> {
    std::env::var_os("COBOX_SYNC_AT").map(Into::into)
}

#[test]
#[ignore = "one of the ends that the test above starts and kills"]
fn as_the_sandbox() {
    let Some(at) = place() else { return };
    let listener = UnixListener::bind(at.join("socket.new")).unwrap();
    fs::rename(at.join("socket.new"), at.join("socket")).unwrap();
    for stream in listener.incoming().flatten() {
        let root = open_root(&at.join("there")).unwrap();
        let _ = serve(stream.try_clone().unwrap(), stream, root, Limits::default(), Arc::new(Own::new(at.join("there"))));
    }
}

#[test]
#[ignore = "one of the ends that the test above starts and kills"]
fn as_the_laptop() {
    let Some(at) = place() else { return };
    let settings = Settings::default();
    let engine = Engine::open(&at.join("here"), &at.join("base"), settings, Box::new(|_| ())).unwrap();
    let mut dial = || match UnixStream::connect(at.join("socket")) {
        Ok(stream) => Ok(Connection { reader: Box::new(stream.try_clone().unwrap()), writer: Box::new(stream) }),
        Err(e) => Err(NoConnection::Passing(e.to_string())),
    };
    engine.run(&mut dial).unwrap();
}
