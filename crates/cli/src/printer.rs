//! The only module that writes to the terminal, so that no output is accidental and `--json` applies everywhere.

use std::io::{self, IsTerminal, Write};

use cobox_protocol::Timestamp;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use serde::Serialize;

use crate::{duration::approximate, failure::Failure, table, terminal};

#[derive(Clone, Copy, Debug)]
pub struct Printer {
    json: bool,
    /// Colours on stderr.
    has_stderr_colour: bool,
    /// Colours on stdout.
    has_stdout_colour: bool,
    is_interactive: bool,
}

/// Emphasis of a word. Colour never carries information that the text lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Good,
    Warn,
    Bad,
    Faint,
    Strong,
}

impl Tone {
    const fn code(self) -> Option<&'static str> {
        match self {
            Tone::Plain => None,
            Tone::Good => Some("32"),
            Tone::Warn => Some("33"),
            Tone::Bad => Some("31"),
            Tone::Faint => Some("2"),
            Tone::Strong => Some("1"),
        }
    }
}

impl Printer {
    pub fn new(json: bool) -> Self {
        let is_tty = io::stderr().is_terminal();
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let wants_colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()) && !is_dumb;
        let has_stdout_colour = io::stdout().is_terminal() && wants_colour && !json;
        Self { json, has_stderr_colour: is_tty && wants_colour, has_stdout_colour, is_interactive: is_tty && !json }
    }

    /// Colours a word for stdout if colours are enabled and supported.
    pub fn paint(self, tone: Tone, text: &str) -> String {
        match tone.code() {
            Some(code) if self.has_stdout_colour => format!("\x1b[{code}m{text}\x1b[0m"),
            _ => text.to_owned(),
        }
    }

    /// Whether a user reads along: stderr is a terminal and the output is not JSON.
    pub fn is_interactive(self) -> bool {
        self.is_interactive
    }

    pub fn is_json(self) -> bool {
        self.json
    }

    /// Prints the result of a command: a JSON object for programs, or `text` for people.
    pub fn result(self, value: &impl Serialize, text: impl FnOnce() -> String) -> io::Result<()> {
        if self.json {
            let mut json = serde_json::to_string_pretty(value)?;
            json.push('\n');
            self.out(json.as_bytes())
        } else {
            self.line(&text())
        }
    }

    /// Like [`Printer::result`] for a list. An empty list prints `when_empty` on a terminal and nothing otherwise.
    pub fn list(self, value: &impl Serialize, header: &[&str], rows: &[Vec<String>], when_empty: &str) -> io::Result<()> {
        self.result(value, || match rows {
            [] if io::stdout().is_terminal() => when_empty.to_owned(),
            rows => self.table(header, rows),
        })
    }

    /// Like [`table`], but no wider than the terminal.
    pub fn table(self, header: &[&str], rows: &[Vec<String>]) -> String {
        let width = if io::stdout().is_terminal() { terminal::size().map(|(cols, _)| usize::from(cols)) } else { None };
        let mut lines = table::lines(header, rows, width);
        if let Some(first) = lines.first_mut() {
            *first = self.paint(Tone::Strong, first);
        }
        lines.join("\n")
    }

    /// The time of day (UTC) on a terminal, otherwise the full timestamp, which a program may read.
    pub fn clock(self, at: Timestamp) -> String {
        let timestamp = at.to_string();
        match timestamp.get(11..19) {
            Some(time) if io::stdout().is_terminal() => format!("{time}Z"),
            _ => timestamp,
        }
    }

    /// A time for a table: approximate on a terminal, where space is scarce, otherwise exact.
    pub fn moment(self, at: Timestamp) -> String {
        if !io::stdout().is_terminal() {
            return at.to_string();
        }
        let now = Timestamp::now();
        match at.saturating_since(now).as_secs() {
            0 => format!("{} ago", approximate(now.saturating_since(at).as_secs())),
            seconds => format!("in {}", approximate(seconds)),
        }
    }

    /// Prints a line on stdout in every format.
    pub fn line(self, text: &str) -> io::Result<()> {
        if text.is_empty() { Ok(()) } else { self.out(format!("{text}\n").as_bytes()) }
    }

    /// Prints additional information on stderr; omitted in JSON mode.
    pub fn note(self, text: &str) {
        if !self.json {
            self.err(format!("{text}\n").as_bytes());
        }
    }

    pub fn failure(self, failure: &Failure) {
        let text = if self.json {
            format!("{}\n", failure.json())
        } else {
            let label = if self.has_stderr_colour { "\x1b[1;31merror:\x1b[0m" } else { "error:" };
            // Only local messages may have several lines: a server could otherwise imitate further output.
            let what = match &failure.api {
                Some(_) => visible(&failure.message),
                None => failure.message.lines().map(visible).collect::<Vec<_>>().join("\n  "),
            };
            let mut text = format!("{label} {what}\n");
            if let Some(advice) = &failure.advice {
                text.push_str(&format!("  {}\n", visible(advice)));
            }
            if let Some(id) = &failure.request_id {
                text.push_str(&format!("  request id: {}\n", visible(id)));
            }
            text
        };
        self.err(text.as_bytes());
    }

    /// Writes bytes unchanged to stdout. A closed stdout is not an error.
    pub fn out(self, bytes: &[u8]) -> io::Result<()> {
        match self.stream(bytes) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }

    /// Like [`Printer::out`], but reports a closed stdout, so that a streaming command can stop.
    pub fn stream(self, bytes: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    /// Writes bytes to stderr. A failure is ignored: there is no other place to report it.
    pub fn err(self, bytes: &[u8]) {
        let mut stderr = io::stderr().lock();
        let _ = stderr.write_all(bytes).and_then(|()| stderr.flush());
    }

    /// A line that stays at the bottom of a terminal; hidden elsewhere.
    pub fn status_line(self) -> ProgressBar {
        if !self.is_interactive {
            return ProgressBar::hidden();
        }
        let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            line.set_style(style);
        }
        line.with_finish(ProgressFinish::AndClear)
    }

    /// A progress bar on a terminal; hidden elsewhere. Without a known length it shows a byte count.
    pub fn progress(self, length: Option<u64>, label: &str) -> ProgressBar {
        if !self.is_interactive {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
        let template = match length {
            Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {bytes} {bytes_per_sec}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(visible(label));
        // Also when it is dropped early, so that an error message starts on an empty line.
        bar.with_finish(ProgressFinish::AndClear)
    }
}

/// Escapes control characters of untrusted text, so that a name can't move the cursor or repaint the screen. Also
/// escapes invisible and bidirectional characters, so that the text can't be mistaken for another.
pub fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || cobox_langgraph::is_invisible(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Columns separated by two spaces; no header if there are no rows.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    table::lines(header, rows, None).join("\n")
}

/// `label  value` lines with aligned values.
pub fn fields(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    let lines: Vec<String> =
        pairs.iter().map(|(label, value)| format!("{label:<width$}  {}", visible(value)).trim_end().to_owned()).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_and_control_characters_are_escaped() {
        assert_eq!(visible("plain 建 e\u{301}"), "plain 建 e\u{301}");
        assert_eq!(visible("a\u{1b}[2J"), "a\\u{1b}[2J");
        assert_eq!(visible("txt.\u{202e}exe"), "txt.\\u{202e}exe");
        assert_eq!(visible("a\u{200b}b\u{e0041}"), "a\\u{200b}b\\u{e0041}");
    }

    #[test]
    fn colours_are_used_only_on_a_terminal() {
        let plain = Printer { json: false, has_stderr_colour: false, has_stdout_colour: false, is_interactive: false };
        assert_eq!(plain.paint(Tone::Bad, "no"), "no");
        let painting = Printer { has_stdout_colour: true, ..plain };
        assert_eq!(painting.paint(Tone::Bad, "no"), "\x1b[31mno\x1b[0m");
        assert_eq!(painting.paint(Tone::Plain, "no"), "no");
    }
}
