//! The only place that writes to the terminal, so that nothing is printed by accident and `--json` holds everywhere.

use std::io::{self, IsTerminal, Write};

use cobox_protocol::Timestamp;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use serde::Serialize;

use crate::{failure::Failure, span::rough};

#[derive(Clone, Copy, Debug)]
pub struct Printer {
    json: bool,
    has_colour: bool,
    has_progress: bool,
}

impl Printer {
    pub fn new(json: bool) -> Self {
        let is_tty = io::stderr().is_terminal();
        let wants_colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        Self { json, has_colour: is_tty && wants_colour, has_progress: is_tty && !json }
    }

    /// Somebody reads along: stderr is a terminal, and words are wanted.
    pub fn is_interactive(self) -> bool {
        self.has_progress
    }

    pub fn is_json(self) -> bool {
        self.json
    }

    /// The result of a command: a JSON object for programs, or `words` for people.
    pub fn result(self, value: &impl Serialize, words: impl FnOnce() -> String) -> io::Result<()> {
        if self.json {
            let mut text = serde_json::to_string_pretty(value)?;
            text.push('\n');
            self.out(text.as_bytes())
        } else {
            self.line(&words())
        }
    }

    /// As [`Printer::result`] for a list. An empty one prints nothing where a program reads, and says so where a person does.
    pub fn list(self, value: &impl Serialize, header: &[&str], rows: &[Vec<String>], when_empty: &str) -> io::Result<()> {
        self.result(value, || match rows {
            [] if io::stdout().is_terminal() => when_empty.to_owned(),
            rows => table(header, rows),
        })
    }

    /// A moment for a table: rough on a terminal, where columns are scarce, and exact where a program may read.
    pub fn moment(self, at: Timestamp) -> String {
        if !io::stdout().is_terminal() {
            return at.to_string();
        }
        let now = Timestamp::now();
        match at.saturating_since(now).as_secs() {
            0 => format!("{} ago", rough(now.saturating_since(at).as_secs())),
            ahead => format!("in {}", rough(ahead)),
        }
    }

    /// A line on stdout, whatever the format.
    pub fn line(self, text: &str) -> io::Result<()> {
        if text.is_empty() { Ok(()) } else { self.out(format!("{text}\n").as_bytes()) }
    }

    /// Something worth knowing beside the result, on stderr; not for programs.
    pub fn note(self, text: &str) {
        if !self.json {
            self.err(format!("{text}\n").as_bytes());
        }
    }

    pub fn failure(self, failure: &Failure) {
        let text = if self.json {
            format!("{}\n", failure.json())
        } else {
            let label = if self.has_colour { "\x1b[1;31merror:\x1b[0m" } else { "error:" };
            // Only our own words may have lines; a server's could pretend to be more than its message.
            let what = match &failure.api {
                Some(_) => visible(&failure.what),
                None => failure.what.lines().map(visible).collect::<Vec<_>>().join("\n  "),
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

    /// Bytes exactly as they are. Nobody reading any more is not an error.
    pub fn out(self, bytes: &[u8]) -> io::Result<()> {
        match self.stream(bytes) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }

    /// As [`Printer::out`], but tells a command that streams when to stop.
    pub fn stream(self, bytes: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    /// Bytes to stderr. With stderr gone there is nobody left to tell, so a failure is not reported.
    pub fn err(self, bytes: &[u8]) {
        let mut stderr = io::stderr().lock();
        let _ = stderr.write_all(bytes).and_then(|()| stderr.flush());
    }

    /// A line that stays at the bottom of a terminal, nothing elsewhere.
    pub fn status_line(self) -> ProgressBar {
        if !self.has_progress {
            return ProgressBar::hidden();
        }
        let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            line.set_style(style);
        }
        line.with_finish(ProgressFinish::AndClear)
    }

    /// A bar on a terminal, nothing elsewhere. Without a known length it counts.
    pub fn progress(self, length: Option<u64>, label: &str) -> ProgressBar {
        if !self.has_progress {
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
        // Also where it is dropped half-way: the error then starts on an empty line.
        bar.with_finish(ProgressFinish::AndClear)
    }
}

/// Text from elsewhere with its control characters made visible, so that a name can't move the cursor or repaint the screen.
pub fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Columns aligned by two spaces; the header is left out when there is nothing under it.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| visible(cell)).collect()).collect();
    let width =
        |i: usize| rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count()).chain([header[i].chars().count()]).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let padded: Vec<String> = cells.iter().zip(&widths).map(|(cell, w)| format!("{cell:<w$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(header.to_vec())];
    lines.extend(rows.iter().map(|row| line(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

/// `label  value` lines with the values aligned.
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
    fn a_table_is_aligned_and_a_hostile_name_can_not_repaint_the_screen() {
        let rows = vec![vec!["a".into(), "x\x1b[2Jy".into()], vec!["long-id".into(), "z".into()]];
        assert_eq!(table(&["ID", "NAME"], &rows), "ID       NAME\na        x\\u{1b}[2Jy\nlong-id  z");
        assert_eq!(table(&["ID"], &[]), "");
    }
}
