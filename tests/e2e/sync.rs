//! `cobox sync` with the real programs: a folder here and one in a sandbox stay the same, whoever is killed and whenever.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Output, Stdio},
    time::Duration,
};

use cobox_client::{Dataplane, Session, Upload};
use cobox_testkit::{Dice, TestBroker, ensure, eventually, sh};
use futures_util::TryStreamExt;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const THREAD: &str = "t";
/// The same run each time, but for what the machine adds.
const SEED: u64 = 20;

struct Desk {
    broker: TestBroker,
    session: Session,
    folder: tempfile::TempDir,
}

impl Desk {
    async fn new() -> Self {
        let broker = TestBroker::start().await;
        let session = ensure(&broker.client(), THREAD).await;
        Self { broker, session, folder: tempfile::tempdir().unwrap() }
    }

    fn here(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn sandbox(&self) -> &Dataplane {
        self.session.dataplane()
    }

    fn cobox(&self, args: &[&str]) -> Command {
        let mut command = self.broker.cobox();
        command.args(args).current_dir(self.folder.path());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.cobox(args).output().unwrap()
    }

    fn said(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(
            output.status.success(),
            "{args:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }

    fn status(&self) -> Value {
        serde_json::from_str(&self.said(&["--json", "sync", "status"])).unwrap()
    }

    async fn there(&self, path: &str) -> Option<String> {
        let file = self.sandbox().read_file(format!("/workspace/{path}").as_bytes()).await.ok()?;
        let bytes: Vec<u8> = file
            .into_stream()
            .try_fold(Vec::new(), async |mut all, piece| {
                all.extend_from_slice(&piece);
                Ok(all)
            })
            .await
            .ok()?;
        String::from_utf8(bytes).ok()
    }

    async fn write_there(&self, path: &str, text: &str) {
        self.sandbox().write_file(format!("/workspace/{path}").as_bytes(), None, Upload::from_bytes(text.to_owned())).await.unwrap();
    }

    /// A sync that runs, told to end when this is dropped.
    fn live(&self, more: &[&str]) -> Live {
        let mut child = self.cobox(&["--json", "sync"]).args(more).args([".", "t:"]).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Live { child, output }
    }
}

struct Live {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Live {
    /// Reads on until something is told.
    fn until(&mut self, is_it: impl Fn(&Value) -> bool) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "it ended");
            let event: Value = serde_json::from_str(&line).unwrap();
            if is_it(&event) {
                return event;
            }
        }
    }

    fn until_phase(&mut self, phase: &str) -> Value {
        self.until(|e| e["event"] == "phase" && e["phase"] == phase)
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // It may have been killed already.
        let _ = kill_process(Pid::from_child(&self.child), Signal::INT);
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_save_on_one_side_is_on_the_other_by_itself() {
    let desk = Desk::new().await;
    fs::write(desk.here("a.txt"), "from here").unwrap();
    desk.write_there("b/c.txt", "from there").await;
    let mut live = desk.live(&[]);
    live.until_phase("watching");
    assert_eq!(desk.there("a.txt").await.as_deref(), Some("from here"));
    assert_eq!(fs::read_to_string(desk.here("b/c.txt")).unwrap(), "from there");
    fs::write(desk.here("a.txt"), "saved").unwrap();
    eventually("the save to be there", || async { (desk.there("a.txt").await.as_deref() == Some("saved")).then_some(()) }).await;
    assert_eq!(sh(desk.sandbox(), "echo made > made.txt; rm b/c.txt").await.exit_code, 0);
    let made = desk.here("made.txt");
    eventually("what a program made to be here", || async { made.exists().then_some(()) }).await;
    let gone = desk.here("b/c.txt");
    eventually("what a program deleted to be gone", || async { (!gone.exists()).then_some(()) }).await;
    let owner = sh(desk.sandbox(), "stat -c %U a.txt; test -w a.txt && echo mine").await;
    assert!(owner.stdout.contains("mine"), "{owner:?}");
    assert_eq!(desk.status()["phase"], "watching");
}

#[tokio::test]
async fn exec_sees_what_was_saved_just_before_it() {
    let desk = Desk::new().await;
    let mut live = desk.live(&[]);
    live.until_phase("watching");
    for number in 0..10 {
        fs::write(desk.here("n"), number.to_string()).unwrap();
        assert_eq!(desk.said(&["exec", "-t", THREAD, "--", "cat", "n"]), number.to_string());
    }
}

#[tokio::test]
async fn conflicts_are_listed_with_both_sides_shown_and_settled() {
    let desk = Desk::new().await;
    fs::write(desk.here("x"), "base\n").unwrap();
    let mut live = desk.live(&[]);
    live.until_phase("watching");
    desk.said(&["sync", "pause"]);
    fs::write(desk.here("x"), "mine\n").unwrap();
    desk.write_there("x", "theirs\n").await;
    desk.said(&["sync", "resume"]);
    desk.said(&["sync", "flush", "--wait"]);
    let words = desk.said(&["sync", "status"]);
    assert!(words.contains("x  (here: 5 bytes, sandbox: 7 bytes)"), "{words}");
    let diff = desk.run(&["sync", "diff", "x"]);
    assert_eq!(diff.status.code(), Some(1));
    let diff = String::from_utf8(diff.stdout).unwrap();
    assert!(diff.contains("-mine") && diff.contains("+theirs"), "{diff}");
    assert_eq!(desk.said(&["sync", "resolve", "--keep", "both", "x"]), "settled 1\n");
    desk.said(&["sync", "flush", "--wait"]);
    assert_eq!(fs::read_to_string(desk.here("x")).unwrap(), "theirs\n");
    assert_eq!(desk.there("x.here").await.as_deref(), Some("mine\n"));
    assert!(desk.said(&["sync", "list"]).contains("watching"));
    drop(live);
    assert!(desk.said(&["sync", "list"]).contains("stopped"));
    assert!(desk.said(&["sync", "status"]).contains("not running"));
    let refused = desk.run(&["sync", "pause"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("does not run"), "{refused:?}");
}

#[tokio::test]
async fn an_emptied_folder_halts_and_deletes_nothing_until_it_is_confirmed() {
    let desk = Desk::new().await;
    for number in 0..20 {
        fs::write(desk.here(&format!("f{number}")), "x").unwrap();
    }
    let mut live = desk.live(&[]);
    live.until_phase("watching");
    assert_eq!(sh(desk.sandbox(), "rm -f /workspace/f*").await.exit_code, 0);
    let halted = live.until_phase("halted");
    assert_eq!(halted["why"], "the sandbox's folder is empty now, and 20 files would be deleted here");
    assert!(desk.here("f0").exists());
    assert!(!desk.run(&["sync", "resume"]).status.success());
    desk.said(&["sync", "resume", "--confirm"]);
    live.until_phase("watching");
    assert!(!desk.here("f0").exists());
}

#[tokio::test]
async fn a_token_that_may_only_read_can_pull_and_nothing_else() {
    let desk = Desk::new().await;
    desk.write_there("x", "theirs").await;
    fs::write(desk.here("y"), "mine").unwrap();
    let mut live = desk.live(&["--mode", "pull"]);
    live.until_phase("watching");
    assert!(desk.here("x").exists());
    assert_eq!(desk.there("y").await, None);
}

/// Whole versions of one file: what is neither is half of something.
fn is_whole(text: &str) -> bool {
    let mut lines = text.lines();
    let Some(first) = lines.next() else { return text.is_empty() };
    text.lines().count() == LINES && lines.all(|line| line == first)
}

fn version(number: usize, side: &str) -> String {
    format!("{side} {number}\n").repeat(LINES)
}

/// Some hundred kilobytes, so that deltas are used too.
const LINES: usize = 9000;
const FILES: usize = 6;

fn whole_here(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_file() {
            let text = fs::read_to_string(entry.path()).unwrap();
            assert!(is_whole(&text), "{} is half of something: {} lines", entry.path().display(), text.lines().count());
        }
    }
}

async fn whole_there(desk: &Desk) {
    for number in 0..FILES {
        if let Some(text) = desk.there(&format!("f{number}")).await {
            assert!(is_whole(&text), "f{number} is half of something: {} lines", text.lines().count());
        }
    }
}

async fn killed_at(points: usize) {
    let desk = Desk::new().await;
    let mut dice = Dice::new(SEED);
    for point in 0..points {
        // Each file is one side's in a round, so that nobody has to decide.
        for number in 0..FILES {
            let path = format!("f{number}");
            match (dice.roll(8), (number + point) % 2) {
                (0, 0) => drop(fs::remove_file(desk.here(&path))),
                (_, 0) => fs::write(desk.here(&path), version(point, "here")).unwrap(),
                (..) => desk.write_there(&path, &version(point, "there")).await,
            }
        }
        let live = desk.live(&["--mode", "prefer-here"]);
        tokio::time::sleep(Duration::from_millis(dice.roll(400))).await;
        if dice.roll(2) == 0 {
            live.kill();
        } else {
            for (_, pid) in desk.broker.sandbox_pids() {
                // It may have ended by itself.
                let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
            }
            live.kill();
        }
        whole_here(desk.folder.path());
        whole_there(&desk).await;
    }
    let done = desk.run(&["sync", "--mode", "prefer-here", "--until-synced", ".", "t:"]);
    assert!(done.status.success(), "{done:?}");
    for number in 0..FILES {
        let path = format!("f{number}");
        assert_eq!(fs::read_to_string(desk.here(&path)).ok(), desk.there(&path).await, "{path}");
    }
    assert!(!desk.here(".cobox-sync").exists(), "what killed runs left is swept");
    assert_eq!(sh(desk.sandbox(), "ls -a /workspace | grep -c cobox-sync").await.stdout.trim(), "0");
}

#[tokio::test]
async fn killed_at_any_moment_every_file_is_old_or_new() {
    let points = std::env::var("COBOX_SYNC_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    killed_at(points).await;
}

#[tokio::test]
#[ignore = "takes half an hour; `make soak` runs it"]
async fn soak_sync_killed_at_500_moments() {
    killed_at(500).await;
}

#[tokio::test]
#[ignore = "takes a minute; `make soak` runs it"]
async fn soak_sync_with_writers_on_both_sides() {
    let desk = Desk::new().await;
    let mut live = desk.live(&["--mode", "prefer-here"]);
    live.until_phase("watching");
    let mut dice = Dice::new(SEED);
    for round in 0..500 {
        let name = format!("d{}/f{}", dice.roll(5), dice.roll(20));
        let path = desk.here(&name);
        match dice.roll(5) {
            0 => drop(fs::remove_file(&path)),
            1 | 2 => {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(&path, format!("here {round}")).unwrap();
            }
            3 => desk.write_there(&name, &format!("there {round}")).await,
            _ => drop(sh(desk.sandbox(), &format!("mkdir -p /workspace/d9 && mv /workspace/{name} /workspace/d9/m{round}")).await),
        }
    }
    desk.said(&["sync", "flush", "--wait"]);
    desk.said(&["sync", "flush", "--wait"]);
    let here = Command::new("sh")
        .args(["-c", "find . -type f -not -path './.cobox-sync*' | sort | xargs -r md5sum"])
        .current_dir(desk.folder.path())
        .output()
        .unwrap();
    let there = sh(desk.sandbox(), "cd /workspace; find . -type f -not -path './.cobox-sync*' | sort | xargs -r md5sum").await;
    assert_eq!(String::from_utf8(here.stdout).unwrap(), there.stdout);
}
