//! `cobox sync` with the real programs: a local folder and one in a sandbox stay identical, regardless of crashes.

mod command_line;
mod large;
mod undo;

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use cobox_client::{Dataplane, Session, Upload};
use cobox_testkit::{SeededRng, TestBroker, ensure, eventually, sh};
use futures_util::TryStreamExt;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const THREAD: &str = "t";
/// The same sequence in each run, except for effects of timing.
const SEED: u64 = 20;

struct SyncTest {
    broker: TestBroker,
    session: Session,
    folder: tempfile::TempDir,
}

impl SyncTest {
    async fn new() -> Self {
        let broker = TestBroker::start().await;
        let session = ensure(&broker.client(), THREAD).await;
        Self { broker, session, folder: tempfile::tempdir().unwrap() }
    }

    fn local(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn dataplane(&self) -> &Dataplane {
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

    fn stdout(&self, args: &[&str]) -> String {
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
        serde_json::from_str(&self.stdout(&["--json", "sync", "status"])).unwrap()
    }

    async fn read_sandbox(&self, path: &str) -> Option<String> {
        let file = self.dataplane().read_file(format!("/workspace/{path}").as_bytes()).await.ok()?;
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

    async fn write_sandbox(&self, path: &str, text: &str) {
        self.dataplane().write_file(format!("/workspace/{path}").as_bytes(), None, Upload::from_bytes(text.to_owned())).await.unwrap();
    }

    /// Starts a live sync; dropping it ends the sync.
    fn start(&self, more: &[&str]) -> RunningSync {
        let mut child = self.cobox(&["--json", "sync"]).args(more).args([".", "t:"]).stdout(Stdio::piped()).spawn().unwrap();
        let output = child.stdout.take().unwrap();
        Self::read(child, output)
    }

    /// The same, with the messages for a person.
    fn start_as_text(&self) -> RunningSync {
        let mut child = self.cobox(&["sync", ".", "t:"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let output = child.stderr.take().unwrap();
        Self::read(child, output)
    }

    fn read(child: Child, output: impl Read + Send + 'static) -> RunningSync {
        let (sender, output_lines) = mpsc::channel();
        let lines = BufReader::new(output).lines();
        // Always read, even if the test ignores it: a sync blocks when its output is not read.
        thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        RunningSync { child, output: output_lines }
    }
}

struct RunningSync {
    child: Child,
    output: mpsc::Receiver<String>,
}

impl RunningSync {
    /// Reads events until one matches.
    fn until(&mut self, is_it: impl Fn(&Value) -> bool) -> Value {
        loop {
            let line = self.output.recv().expect("the sync still runs");
            let event: Value = serde_json::from_str(&line).unwrap();
            if is_it(&event) {
                return event;
            }
        }
    }

    /// Reads lines until one has this text.
    fn line(&mut self, text: &str) -> String {
        self.output.iter().find(|line| line.contains(text)).expect("the sync still runs")
    }

    fn until_phase(&mut self, phase: &str) -> Value {
        self.until(|e| e["event"] == "phase" && e["phase"] == phase)
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for RunningSync {
    fn drop(&mut self) {
        // It may have been killed already.
        let _ = kill_process(Pid::from_child(&self.child), Signal::INT);
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_saved_file_appears_on_the_other_side() {
    let test = SyncTest::new().await;
    fs::write(test.local("a.txt"), "from here").unwrap();
    test.write_sandbox("b/c.txt", "from there").await;
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    assert_eq!(test.read_sandbox("a.txt").await.as_deref(), Some("from here"));
    assert_eq!(fs::read_to_string(test.local("b/c.txt")).unwrap(), "from there");
    fs::write(test.local("a.txt"), "saved").unwrap();
    eventually("the save to be there", || async { (test.read_sandbox("a.txt").await.as_deref() == Some("saved")).then_some(()) }).await;
    assert_eq!(sh(test.dataplane(), "echo made > made.txt; rm b/c.txt").await.exit_code, 0);
    let made = test.local("made.txt");
    eventually("what a program made to be here", || async { made.exists().then_some(()) }).await;
    let gone = test.local("b/c.txt");
    eventually("what a program deleted to be gone", || async { (!gone.exists()).then_some(()) }).await;
    let owner = sh(test.dataplane(), "stat -c %U a.txt; test -w a.txt && echo mine").await;
    assert!(owner.stdout.contains("mine"), "{owner:?}");
    assert_eq!(test.status()["phase"], "watching");
}

#[tokio::test]
async fn exec_sees_files_saved_just_before_it() {
    let test = SyncTest::new().await;
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    for number in 0..10 {
        fs::write(test.local("n"), number.to_string()).unwrap();
        assert_eq!(test.stdout(&["exec", "-t", THREAD, "--", "cat", "n"]), number.to_string());
    }
}

#[tokio::test]
async fn conflicts_are_listed_compared_and_resolved() {
    let test = SyncTest::new().await;
    fs::write(test.local("x"), "base\n").unwrap();
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    test.stdout(&["sync", "pause"]);
    fs::write(test.local("x"), "mine\n").unwrap();
    test.write_sandbox("x", "theirs\n").await;
    test.stdout(&["sync", "resume"]);
    test.stdout(&["sync", "flush", "--wait"]);
    let output = test.stdout(&["sync", "status"]);
    assert!(output.contains("x  (here: 5 bytes, sandbox: 7 bytes)"), "{output}");
    let diff = test.run(&["sync", "diff", "x"]);
    assert_eq!(diff.status.code(), Some(1));
    let diff = String::from_utf8(diff.stdout).unwrap();
    assert!(diff.contains("-mine") && diff.contains("+theirs"), "{diff}");
    assert_eq!(test.stdout(&["sync", "resolve", "--keep", "both", "x"]), "resolved 1\n");
    test.stdout(&["sync", "flush", "--wait"]);
    assert_eq!(fs::read_to_string(test.local("x")).unwrap(), "theirs\n");
    assert_eq!(test.read_sandbox("x.here").await.as_deref(), Some("mine\n"));
    assert!(test.stdout(&["sync", "list"]).contains("watching"));
    drop(sync);
    assert!(test.stdout(&["sync", "list"]).contains("stopped"));
    assert!(test.stdout(&["sync", "status"]).contains("not running"));
    let refused = test.run(&["sync", "pause"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is not running"), "{refused:?}");
}

#[tokio::test]
async fn an_emptied_folder_halts_the_sync_until_confirmed() {
    let test = SyncTest::new().await;
    for number in 0..20 {
        fs::write(test.local(&format!("f{number}")), "x").unwrap();
    }
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    // In one step from the sync's point of view.
    test.stdout(&["sync", "pause"]);
    assert_eq!(sh(test.dataplane(), "rm -f /workspace/f*").await.exit_code, 0);
    test.stdout(&["sync", "resume"]);
    let halted = sync.until_phase("halted");
    assert_eq!(halted["why"], "the sandbox's folder has no files, and 20 would be deleted here");
    assert!(test.local("f0").exists());
    assert!(!test.run(&["sync", "resume"]).status.success());
    test.stdout(&["sync", "resume", "--confirm"]);
    sync.until_phase("watching");
    assert!(!test.local("f0").exists());
}

/// Whether the text is one complete version: a mixture means a partial write.
fn is_whole(text: &str) -> bool {
    let first = text.lines().next().unwrap_or_default();
    let lines: usize = first.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    text.lines().count() == lines && text.lines().all(|line| line == first)
}

fn version(point: usize, side: &str, lines: usize) -> String {
    format!("{side} {point} of {lines}\n").repeat(lines)
}

/// Some are large enough that deltas are used.
const LINES: [usize; 6] = [9000, 50, 50, 9000, 50, 50];
/// Number of points after which both sides settle and each file's writer changes sides.
const TURN: usize = 10;

/// A folder, a sandbox, and the last saved content of each file, which one side at a time writes.
struct Crashes {
    test: SyncTest,
    rng: SeededRng,
    last: [Option<String>; LINES.len()],
}

impl Crashes {
    async fn new() -> Self {
        let test = SyncTest::new().await;
        // A file that never changes, because a suddenly empty folder is handled differently.
        fs::write(test.local("kept"), "").unwrap();
        Self { test, rng: SeededRng::new(SEED), last: Default::default() }
    }

    async fn save(&mut self, point: usize) {
        for (number, lines) in LINES.into_iter().enumerate() {
            let (path, is_here) = (format!("f{number}"), (number + point / TURN).is_multiple_of(2));
            let text = match self.rng.below(8) {
                0 => None,
                _ => Some(version(point, if is_here { "here" } else { "there" }, lines)),
            };
            match (&text, is_here) {
                (None, true) => drop(fs::remove_file(self.test.local(&path))),
                (None, false) => assert_eq!(sh(self.test.dataplane(), &format!("rm -f /workspace/{path}")).await.exit_code, 0),
                (Some(text), true) => {
                    // Like an editor, with a rename: a partial write in place would be the writer's own fault.
                    fs::write(self.test.local("beside.tmp"), text).unwrap();
                    fs::rename(self.test.local("beside.tmp"), self.test.local(&path)).unwrap();
                }
                (Some(text), false) => self.test.write_sandbox(&path, text).await,
            }
            self.last[number] = text;
        }
    }

    async fn kill_one(&mut self) {
        let mut sync = self.test.start(&[]);
        // Killed during its start, or while it scans and applies changes.
        if self.rng.below(3) > 0 {
            sync.until_phase("scanning");
        }
        std::thread::sleep(Duration::from_millis(self.rng.below(60)));
        if self.rng.below(3) == 0 {
            for (_, pid) in self.test.broker.sandbox_pids() {
                // It may have ended already.
                let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
            }
        }
        sync.kill();
        for (number, _) in LINES.iter().enumerate() {
            let here = fs::read_to_string(self.test.local(&format!("f{number}"))).ok();
            let there = self.test.read_sandbox(&format!("f{number}")).await;
            for (side, text) in [("here", here), ("in the sandbox", there)] {
                assert!(text.as_deref().is_none_or(is_whole), "f{number} {side} is half of something");
            }
        }
    }

    /// Checks that an undisturbed run brings the last saved contents to both sides, without a conflict.
    async fn settle(&self) {
        let done = self.test.run(&["sync", "--until-synced", ".", "t:"]);
        assert!(done.status.success(), "{done:?}");
        for (number, text) in self.last.iter().enumerate() {
            let path = format!("f{number}");
            assert!(fs::read_to_string(self.test.local(&path)).ok() == *text, "{path} here is not what was saved last");
            assert!(self.test.read_sandbox(&path).await == *text, "{path} in the sandbox is not what was saved last");
        }
    }
}

async fn killed_at(points: usize) {
    let mut crashes = Crashes::new().await;
    for point in 0..points {
        if point.is_multiple_of(TURN) {
            crashes.settle().await;
        }
        crashes.save(point).await;
        crashes.kill_one().await;
    }
    crashes.settle().await;
    assert!(!crashes.test.local(".cobox-sync").exists(), "what killed runs left is swept");
    assert_eq!(sh(crashes.test.dataplane(), "ls -a /workspace | grep -c cobox-sync").await.stdout.trim(), "0");
}

#[tokio::test]
async fn killed_at_any_moment_every_file_is_old_or_new_and_none_is_lost() {
    let points = std::env::var("COBOX_SYNC_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(50);
    killed_at(points).await;
}

#[tokio::test]
#[ignore = "takes minutes; `make soak` runs it"]
async fn soak_sync_killed_at_500_moments() {
    killed_at(500).await;
    crate::load::record(
        "a sync, `cobox` or boxd of it killed at 500 random moments: every file old or new, nothing lost, no conflict that isn't one",
    );
}

/// The state of one side's writer: the current contents of its own files, and its last write to the shared file.
#[derive(Default)]
struct Written {
    own: std::collections::BTreeMap<String, String>,
    shared: String,
}

/// The next action of a writer.
enum Step {
    Write(String, String),
    Rename(String, String),
    Remove(String),
}

impl Written {
    fn next(&mut self, side: &str, round: usize, rng: &mut SeededRng) -> Step {
        // Both sides share the directories; each has its own file names.
        let name = format!("d{}/{side}-{}", rng.below(4), rng.below(12));
        match rng.below(10) {
            0 => {
                self.shared = format!("{side} {round}\n");
                Step::Write("shared".to_owned(), self.shared.clone())
            }
            1 | 2 if self.own.remove(&name).is_some() => Step::Remove(name),
            3 if self.own.contains_key(&name) => {
                let (text, new) = (self.own.remove(&name).unwrap(), format!("d{}/{side}-moved-{round}", rng.below(4)));
                self.own.insert(new.clone(), text);
                Step::Rename(name, new)
            }
            _ => {
                let text = format!("{side} {round}\n").repeat(if rng.below(10) == 0 { 9000 } else { 20 });
                self.own.insert(name.clone(), text.clone());
                Step::Write(name, text)
            }
        }
    }
}

/// Both sides write at the same time: at the end each has the last version of every file, and the file that both wrote
/// is either identical on both sides or a conflict in which each side keeps its own version.
async fn writers_on_both_sides(rounds: usize) {
    let test = SyncTest::new().await;
    for number in 0..4 {
        fs::create_dir(test.local(&format!("d{number}"))).unwrap();
    }
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    let folder = test.folder.path().to_owned();
    let person = tokio::task::spawn_blocking(move || {
        let (mut written, mut rng) = (Written::default(), SeededRng::new(SEED));
        for round in 0..rounds {
            match written.next("here", round, &mut rng) {
                Step::Write(name, text) => fs::write(folder.join(name), text).unwrap(),
                Step::Rename(old, new) => fs::rename(folder.join(old), folder.join(new)).unwrap(),
                Step::Remove(name) => fs::remove_file(folder.join(name)).unwrap(),
            }
        }
        written
    });
    let (mut agent, mut rng) = (Written::default(), SeededRng::new(SEED + 1));
    for round in 0..rounds {
        match agent.next("there", round, &mut rng) {
            Step::Write(name, text) => test.write_sandbox(&name, &text).await,
            Step::Rename(old, new) => {
                assert_eq!(sh(test.dataplane(), &format!("mv /workspace/{old} /workspace/{new}")).await.exit_code, 0);
            }
            Step::Remove(name) => assert_eq!(sh(test.dataplane(), &format!("rm /workspace/{name}")).await.exit_code, 0),
        }
    }
    let person = person.await.unwrap();
    test.stdout(&["sync", "flush", "--wait"]);
    let status = test.status();
    let shared = (fs::read_to_string(test.local("shared")).unwrap_or_default(), test.read_sandbox("shared").await.unwrap_or_default());
    if shared.0 == shared.1 {
        assert!(shared.0 == person.shared || shared.0 == agent.shared, "{shared:?}");
        assert_eq!(status["conflicts"], serde_json::json!([]));
    } else {
        assert_eq!(shared, (person.shared, agent.shared));
        assert_eq!((status["conflicts"].as_array().unwrap().len(), &status["conflicts"][0]["path"]), (1, &"shared".into()));
    }
    for (name, text) in person.own.iter().chain(&agent.own) {
        assert!(fs::read_to_string(test.local(name)).is_ok_and(|here| here == *text), "{name} here");
        assert!(test.read_sandbox(name).await.as_ref() == Some(text), "{name} in the sandbox");
    }
    let files = sh(test.dataplane(), "cd /workspace; find d? -type f | wc -l").await.stdout;
    assert_eq!(files.trim(), (person.own.len() + agent.own.len()).to_string(), "what was deleted stays deleted");
}

#[tokio::test]
async fn writers_on_both_sides_lose_nothing() {
    writers_on_both_sides(60).await;
}

#[tokio::test]
#[ignore = "takes minutes; `make soak` runs it"]
async fn soak_sync_with_writers_on_both_sides() {
    writers_on_both_sides(3000).await;
    crate::load::record("a sync with writers on both sides, 3000 steps each: both have all of it");
}

#[tokio::test]
async fn sync_until_synced_ends_even_if_a_file_cannot_be_synced() {
    let test = SyncTest::new().await;
    fs::write(test.local("x"), "mine").unwrap();
    test.write_sandbox("x", "theirs").await;
    let done = test.run(&["sync", "--until-synced", ".", "t:"]);
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    let output = String::from_utf8(done.stdout).unwrap();
    assert!(output.contains("1 conflict") && output.contains("cobox sync resolve"), "{output}");
    // A directory in which the workload may not write.
    fs::remove_file(test.local("x")).unwrap();
    assert_eq!(sh(test.dataplane(), "rm x; mkdir closed; chmod 555 closed").await.exit_code, 0);
    let done = test.run(&["sync", "--until-synced", ".", "t:"]);
    assert!(done.status.success(), "{done:?}");
    fs::write(test.local("closed/y"), "mine").unwrap();
    let done = test.run(&["sync", "--until-synced", ".", "t:"]);
    if sh(test.dataplane(), "test -w closed").await.exit_code != 0 {
        assert_eq!(done.status.code(), Some(1), "{done:?}");
        let output = String::from_utf8(done.stdout).unwrap();
        assert!(output.contains("1 problem") && output.contains("closed/y in the sandbox: it could not be written"), "{output}");
    }
}
