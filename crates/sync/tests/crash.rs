//! Kills either end at random moments, each in a process of its own. Afterwards every file has its complete old or new
//! version, both sides converge to the last save, and there are no false conflicts.
//!
//! `COBOX_SYNC_KILLS` sets the number of kills; the default is 50.
//!
//! Also kills the local end during deletions and replacements: every version is then in its place or in the trash.

mod support;

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

use cobox_sync::{ConnectError, Connection, Engine, Limits, LocalHooks, Mode, Settings, open_root, serve};
use support::SyncPair;

const FILES: u64 = 12;
/// Several hundred kilobytes, so that deltas are used as well.
const LINES: usize = 12_000;

/// A seeded generator, so that runs differ only by timing.
struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
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
        assert!(is_whole, "{} is a partial file", entry.path().display());
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
fn every_file_is_old_or_new_when_either_end_is_killed() {
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

/// After this many kills both sides are synced completely, and each file is edited on the other side.
const SETTLE_INTERVAL: u64 = 10;

fn kill(kills: u64) {
    let pair = SyncPair::new();
    let top = pair.local("").parent().unwrap().to_owned();
    // More files than are ever deleted between two complete syncs, because a mass deletion would halt.
    for number in 0..FILES * 2 {
        pair.write_local(&format!("kept{number}"), &version("local", number, 1));
    }
    let mut random = Random(77);
    let mut last: Vec<Option<String>> = vec![None; FILES as usize];
    for round in 0..kills {
        if round % SETTLE_INTERVAL == 0 {
            settle(&pair, &last);
        }
        for number in 0..FILES {
            let (side, path) = match (number + round / SETTLE_INTERVAL) % 2 {
                0 => ("local", pair.local(&format!("f{number}"))),
                _ => ("sandbox", pair.sandbox(&format!("f{number}"))),
            };
            let lines = if number % 3 == 0 { LINES } else { 50 };
            match random.below(6) {
                0 => {
                    let _ = fs::remove_file(path);
                    last[number as usize] = None;
                }
                // No change.
                1 => {}
                _ => {
                    let (beside, text) = (path.with_extension("writing"), version(side, round, lines));
                    fs::write(&beside, &text).unwrap();
                    fs::rename(beside, path).unwrap();
                    last[number as usize] = Some(text);
                }
            }
        }
        let mut sandbox = child("run_as_sandbox_end", &top);
        pair.wait_until(|| top.join("socket").exists());
        let mut laptop = child("run_as_local_end", &top);
        thread::sleep(Duration::from_millis(random.below(150)));
        if random.below(2) == 0 {
            laptop.kill().unwrap();
        } else {
            sandbox.kill().unwrap();
            assert_whole(&pair.sandbox(""));
        }
        for process in [&mut laptop, &mut sandbox] {
            // The remaining process would run forever.
            let _ = process.kill();
            process.wait().unwrap();
        }
        let _ = fs::remove_file(top.join("socket"));
        assert_whole(&pair.local(""));
        assert_whole(&pair.sandbox(""));
    }
    settle(&pair, &last);
    // Leftovers of killed runs are swept.
    pair.wait_until(|| !pair.local(cobox_sync::STAGING_DIRECTORY).exists() && !pair.sandbox(cobox_sync::STAGING_DIRECTORY).exists());
}

/// Files that the test below changes. The anchors are so many that no round is a mass deletion.
const TRASH_FILES: u64 = 120;
const TRASH_ANCHORS: u64 = 600;
const TRASH_KILLS: u64 = 12;

/// Every file in the trash, including those of unfinished swaps.
fn in_trash(pair: &SyncPair) -> Vec<String> {
    let batches = fs::read_dir(pair.local(cobox_sync::TRASH_DIRECTORY)).into_iter().flatten().flatten();
    let files = batches.filter_map(|batch| fs::read_dir(batch.path()).ok()).flatten().flatten();
    files.filter(|file| file.file_name().as_encoded_bytes()[0].is_ascii_digit()).filter_map(|f| fs::read_to_string(f.path()).ok()).collect()
}

fn in_folder(pair: &SyncPair) -> Vec<String> {
    fs::read_dir(pair.local("")).unwrap().flatten().filter_map(|file| fs::read_to_string(file.path()).ok()).collect()
}

#[test]
fn every_version_is_in_place_or_in_the_trash_when_killed() {
    let pair = SyncPair::new();
    let top = pair.local("").parent().unwrap().to_owned();
    for number in 0..TRASH_ANCHORS {
        pair.write_local(&format!("anchor{number}"), &format!("anchor {number}"));
    }
    let first = |number: u64| format!("first version of {number}");
    (0..TRASH_FILES).for_each(|number| pair.write_local(&format!("f{number}"), &first(number)));
    pair.start(Mode::TwoWaySafe).flush();
    let (began, mut random, mut had) = (SystemTime::now(), Random(4711), BTreeSet::new());
    for round in 0..TRASH_KILLS {
        had.extend(in_folder(&pair));
        for number in 0..TRASH_FILES {
            match random.below(20) {
                0 => drop(fs::remove_file(pair.sandbox(&format!("f{number}")))),
                1..10 => pair.write_sandbox(&format!("f{number}"), &format!("version {round} of {number}")),
                _ => {}
            }
        }
        let (before, moved) = (in_trash(&pair).len(), random.below(TRASH_FILES / 3) as usize);
        let mut sandbox = child("run_as_sandbox_end", &top);
        pair.wait_until(|| top.join("socket").exists());
        let mut laptop = child("run_as_local_end", &top);
        pair.wait_until(|| in_trash(&pair).len() >= before + moved);
        for process in [&mut laptop, &mut sandbox] {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        let _ = fs::remove_file(top.join("socket"));
        let now: BTreeSet<String> = in_folder(&pair).into_iter().chain(in_trash(&pair)).collect();
        let lost: Vec<&String> = had.difference(&now).collect();
        assert!(lost.is_empty(), "round {round}: {lost:?}");
    }
    pair.start(Mode::TwoWaySafe).flush();
    let undone = pair.trash().restore(&cobox_sync::RestoreScope::Since(began)).unwrap();
    assert!(undone.failed.is_empty(), "{:?}", undone.failed);
    let beside: BTreeMap<String, String> =
        undone.restored.iter().map(|process| (process.path.to_string(), process.to.to_string())).collect();
    for number in 0..TRASH_FILES {
        let name = format!("f{number}");
        assert_eq!(pair.read_local(beside.get(&name).unwrap_or(&name)), first(number));
    }
}

/// A complete run converges both sides to the last save.
fn settle(pair: &SyncPair, last: &[Option<String>]) {
    let sync = pair.start(Mode::TwoWaySafe);
    let status = sync.flush();
    assert!(status.conflicts.is_empty(), "{:?}", status.conflicts);
    drop(sync);
    for (number, text) in last.iter().enumerate() {
        for path in [pair.local(&format!("f{number}")), pair.sandbox(&format!("f{number}"))] {
            assert!(fs::read_to_string(&path).ok() == *text, "{} is not the last saved version", path.display());
        }
    }
}

fn child_directory() -> Option<std::path::PathBuf> {
    std::env::var_os("COBOX_SYNC_AT").map(Into::into)
}

#[test]
#[ignore = "child process of the tests above"]
fn run_as_sandbox_end() {
    let Some(at) = child_directory() else { return };
    let listener = UnixListener::bind(at.join("socket.new")).unwrap();
    fs::rename(at.join("socket.new"), at.join("socket")).unwrap();
    for stream in listener.incoming().flatten() {
        let root = open_root(&at.join("sandbox")).unwrap();
        let _ = serve(stream.try_clone().unwrap(), stream, root, Limits::default(), Arc::new(LocalHooks::new(at.join("sandbox"))));
    }
}

#[test]
#[ignore = "child process of the tests above"]
fn run_as_local_end() {
    let Some(at) = child_directory() else { return };
    let settings = Settings::default();
    let engine = Engine::open(&at.join("local"), &at.join("base"), settings, Box::new(|_| ())).unwrap();
    let mut dial = || match UnixStream::connect(at.join("socket")) {
        Ok(stream) => Ok(Connection { reader: Box::new(stream.try_clone().unwrap()), writer: Box::new(stream) }),
        Err(e) => Err(ConnectError::Transient(e.to_string())),
    };
    engine.run(&mut dial).unwrap();
}
