//! Transcripts of commands and their output, with everything redacted that differs from run to run.

use std::{
    io::Write,
    process::{Command, Output, Stdio},
    sync::LazyLock,
};

use cobox_testkit::TestBroker;
use regex::Regex;

/// A terminal session: each command with its stdout, its stderr and its exit code.
pub struct Transcript<'a> {
    broker: &'a TestBroker,
    text: String,
    env: Vec<(String, String)>,
    /// Paths of this run, and their placeholders.
    placeholders: Vec<(String, &'static str)>,
}

impl<'a> Transcript<'a> {
    pub fn at(broker: &'a TestBroker) -> Self {
        let home = broker.data_dir().parent().expect("a home").display().to_string();
        Self { broker, text: String::new(), env: Vec::new(), placeholders: vec![(home, "HOME")] }
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn redacting(mut self, path: &str, name: &'static str) -> Self {
        self.placeholders.insert(0, (path.to_owned(), name));
        self
    }

    /// Runs the command twice: with text output, then with JSON.
    pub fn run_text_and_json(&mut self, line: &[&str]) {
        self.run(line);
        self.run(&[&["--json"], line].concat());
    }

    pub fn run(&mut self, line: &[&str]) -> Output {
        self.run_with(line, "")
    }

    pub fn run_with(&mut self, line: &[&str], input: &str) -> Output {
        let mut command = self.broker.cobox();
        command.args(line).envs(self.env.iter().map(|(name, value)| (name, value)));
        let output = feed(&mut command, input);
        let quoted: Vec<String> = line.iter().map(|arg| if arg.contains(' ') { format!("'{arg}'") } else { (*arg).to_owned() }).collect();
        self.text.push_str(&format!("$ cobox {}\n", quoted.join(" ")));
        let is_json = line.contains(&"--json");
        for (stream, mark) in [(&output.stdout, ""), (&output.stderr, "! ")] {
            for output_line in String::from_utf8_lossy(stream).lines() {
                self.text.push_str(&format!(
                    "{mark}{}\n",
                    if is_json { output_line.to_owned() } else { SPACES.replace_all(output_line, "  ").into_owned() }
                ));
            }
        }
        if let Some(code) = output.status.code().filter(|code| *code != 0) {
            self.text.push_str(&format!("[exit {code}]\n"));
        }
        self.text.push('\n');
        output
    }

    /// Adds the output of a background command.
    pub fn add(&mut self, output_line: &str) {
        self.text.push_str(&format!("{output_line}\n"));
    }

    /// Compares the transcript with the snapshot of this name.
    pub fn assert_snapshot(self, name: &str) {
        let mut text = self.text;
        for (path, name) in &self.placeholders {
            text = text.replace(path, name);
        }
        for (pattern, replacement) in REDACTED.iter() {
            text = pattern.replace_all(&text, *replacement).into_owned();
        }
        let text = without_repeated_events(&text);
        let mut settings = insta::Settings::clone_current();
        settings.set_snapshot_path("../snapshots");
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.bind(|| insta::assert_snapshot!(format!("output__{name}"), text.trim_end()));
    }
}

/// How often a sync rescans without finding changes depends on timing, so repeated events are removed.
fn without_repeated_events(text: &str) -> String {
    let (mut filtered, mut events) = (String::new(), Vec::new());
    for line in text.lines() {
        if line.starts_with("$ ") {
            events.clear();
        }
        if line.starts_with(r#"{"event":"#) {
            if events.contains(&line) {
                continue;
            }
            events.push(line);
        }
        filtered.push_str(line);
        filtered.push('\n');
    }
    filtered
}

fn feed(command: &mut Command, input: &str) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("cobox runs");
    // A command may exit without reading its input.
    let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
    child.wait_with_output().expect("it ends")
}

/// Column widths depend on the contents, which differ.
static SPACES: LazyLock<Regex> = LazyLock::new(|| Regex::new(" {2,}").expect("a pattern"));

static REDACTED: LazyLock<Vec<(Regex, &'static str)>> = LazyLock::new(|| {
    [
        (r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+", "TOKEN"),
        (r"cbx_[A-Za-z0-9_-]{20,}", "cbx_KEY"),
        (r"\b\d{13}-[0-9a-f]{8}(-undo)?", "BATCH$1"),
        (r"\b(ssn|sb|tok|req|key|snap|vol|sh|cmd|evt|node|own|shr)_[0-9a-z]{26}", "${1}_ID"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
        (r"(http|ws)://127\.0\.0\.1:\d+", "$1://BROKER"),
        (r"\b[0-9a-f]{64}\b", "HASH"),
        (r"\b[0-9a-f]{12}\b", "SYNC_ID"),
        (r#""duration_ms": ?\d+"#, r#""duration_ms": 0"#),
        (r"\(\d+ ms\)", "(0 ms)"),
        (r#""pid": ?\d+"#, r#""pid": 0"#),
        (r"(cmd_ID  )\d+", "${1}PID"),
        // A broker records the last use of a key with a delay.
        (r#"\n *"last_used_at": "TIME","#, ""),
        (r"(default  (?:TIME|\d)  )(?:never|TIME)", "${1}USED"),
        // A sync may be in the middle of a scan at any time.
        (r#""(phase|state)": "(?:scanning|syncing)""#, r#""$1": "watching""#),
        (r"(?m)^(?:scanning|syncing), mode", "watching, mode"),
        (r"(?m)^(SYNC_ID  .*  )(?:scanning|syncing)(  \d+)$", "${1}watching$2"),
    ]
    .map(|(pattern, replacement)| (Regex::new(pattern).expect("a pattern"), replacement))
    .into()
});
