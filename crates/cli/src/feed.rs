//! Prints a session's events as they arrive: one sentence per event for people, one JSON object per line for programs.

use std::time::Duration;

use cobox_client::{ClientError, EventStream};
use cobox_protocol::event::{EventKind, ExecEnd, FileChange, SandboxEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{
    failure::Failure,
    printer::{Printer, Tone, visible},
};

/// Interval between two checks whether the reader of stdout is still there.
const LOOK_FOR_READER: Duration = Duration::from_millis(250);

/// Why a feed stopped.
pub enum Stopped {
    /// The session's last event was printed.
    Over,
    /// The reader of stdout has closed it.
    Unread,
    Failed(ClientError),
}

/// Prints each event and stores its id in `last`, so that a later call can resume after it.
pub async fn follow(printer: Printer, events: &mut EventStream, last: &mut Option<String>) -> Result<Stopped, Failure> {
    loop {
        let next = tokio::select! {
            next = events.next() => next,
            () = unread() => return Ok(Stopped::Unread),
        };
        let event = match next {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(Stopped::Over),
            Err(error) => return Ok(Stopped::Failed(error)),
        };
        let line = if printer.is_json() { serde_json::to_string(&event).map_err(anyhow::Error::from)? } else { line(printer, &event) };
        match printer.stream(format!("{line}\n").as_bytes()) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(Stopped::Unread),
            other => other?,
        }
        *last = Some(event.id.to_string());
    }
}

/// Resolves when the reader of stdout has closed it, as `head` does, so that the feed stops without waiting for
/// another event.
async fn unread() {
    loop {
        tokio::time::sleep(LOOK_FOR_READER).await;
        let stdout = std::io::stdout();
        let mut asked = [PollFd::new(&stdout, PollFlags::empty())];
        let is_told = poll(&mut asked, Some(&Timespec::default())).is_ok_and(|n| n > 0);
        if is_told && asked[0].revents().intersects(PollFlags::ERR | PollFlags::NVAL) {
            return;
        }
    }
}

fn line(printer: Printer, event: &SandboxEvent) -> String {
    let tone = match &event.kind {
        EventKind::Exec(ExecEnd { exit_code: Some(0), timed_out: false, .. }) => Tone::Good,
        EventKind::Exec(_) | EventKind::Failed { .. } => Tone::Bad,
        EventKind::Gap { .. } => Tone::Warn,
        _ => Tone::Plain,
    };
    format!("{}  {}", printer.paint(Tone::Faint, &printer.clock(event.at)), printer.paint(tone, &sentence(event)))
}

/// Formats one event as a sentence, with control characters escaped: text from a sandbox can't move the cursor.
pub fn sentence(event: &SandboxEvent) -> String {
    let because = |reason: &str| if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let who = match (&event.principal, &event.actor) {
        (Some(principal), Some(actor)) => format!("{principal} ({actor})"),
        (Some(principal), None) => principal.clone(),
        _ => "somebody".to_owned(),
    };
    let said = match &event.kind {
        EventKind::Created { state } => format!("{who} made the session ({})", state.as_str()),
        EventKind::Active => "the sandbox runs".to_owned(),
        EventKind::Idle => "the sandbox is idle".to_owned(),
        EventKind::Suspended { reason } => format!("the sandbox was suspended{}", because(reason)),
        EventKind::Resumed => "the sandbox runs again".to_owned(),
        EventKind::Restored => format!("{who} restored the deleted sandbox"),
        EventKind::Terminated { reason } => format!("the session ended{}", because(reason)),
        EventKind::Failed { reason } => format!("the session failed{}", because(reason)),
        EventKind::Changed { change } => format!("{who} changed the sandbox{}", because(change)),
        EventKind::Shared { with, capabilities } => format!("{who} let {with} in ({})", capabilities.names().join(" ")),
        EventKind::Unshared { with } => format!("{who} no longer lets {with} in"),
        EventKind::Connected => format!("{who} connected"),
        EventKind::FileWritten(file) => format!("{who} wrote {}", file_words(file)),
        EventKind::FileRemoved(file) => format!("{who} removed {}", file_words(file)),
        EventKind::Exec(end) => format!("{who} ran {}", exec_words(end)),
        EventKind::Gap { lost: Some(lost) } => format!("({lost} events were not kept)"),
        EventKind::Gap { lost: None } => "(events are missing here)".to_owned(),
        EventKind::Unknown => "(something this version of cobox has no words for)".to_owned(),
    };
    visible(&said)
}

fn file_words(file: &FileChange) -> String {
    let size = match (file.size, file.entries) {
        (Some(1), _) => " (1 byte)".to_owned(),
        (Some(bytes), _) => format!(" ({bytes} bytes)"),
        (None, Some(1)) => " (1 entry)".to_owned(),
        (None, Some(entries)) => format!(" ({entries} entries)"),
        (None, None) => String::new(),
    };
    format!("{}{}{size}", file.path, cut(file.truncated))
}

fn exec_words(end: &ExecEnd) -> String {
    let how = match (end.exit_code, end.timed_out) {
        (_, true) => "timed out".to_owned(),
        (Some(code), false) => format!("exit {code}"),
        (None, false) => "no exit code".to_owned(),
    };
    let took = match end.duration_ms {
        ms @ 0..1000 => format!("{ms} ms"),
        ms => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
    };
    format!("{}{} → {how} ({took})", end.command, cut(end.truncated))
}

const fn cut(is_truncated: bool) -> &'static str {
    if is_truncated { "…" } else { "" }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::{EventId, SandboxId, SessionId, Timestamp, event::EventSource, session::State};

    use super::*;

    fn told(what: EventKind) -> String {
        let event = SandboxEvent {
            id: EventId::numbered(Timestamp::from_unix(0), 1),
            at: Timestamp::from_unix(0),
            session_id: SessionId::new(),
            sandbox_id: SandboxId::new(),
            principal: Some("bot".into()),
            actor: Some("agent".into()),
            source: EventSource::Sandbox,
            kind: what,
        };
        sentence(&event)
    }

    #[test]
    fn what_an_agent_does_reads_as_a_sentence() {
        let ran = |exit_code, timed_out, duration_ms| {
            told(EventKind::Exec(ExecEnd { command: "make".into(), exit_code, timed_out, duration_ms, ..ExecEnd::default() }))
        };
        assert_eq!(ran(Some(0), false, 12), "bot (agent) ran make → exit 0 (12 ms)");
        assert_eq!(ran(Some(137), true, 61_250), "bot (agent) ran make → timed out (61.2 s)");
        assert_eq!(ran(None, false, 1), "bot (agent) ran make → no exit code (1 ms)");
        let file = FileChange { path: "/workspace/a.py".into(), size: Some(8), ..FileChange::default() };
        assert_eq!(told(EventKind::FileWritten(file)), "bot (agent) wrote /workspace/a.py (8 bytes)");
        assert_eq!(told(EventKind::Created { state: State::Active }), "bot (agent) made the session (active)");
    }

    #[test]
    fn a_hostile_file_name_can_not_repaint_the_screen_or_begin_a_line() {
        let file = FileChange { path: "/w/\x1b[2J\nbot ran rm".into(), truncated: true, ..FileChange::default() };
        assert_eq!(told(EventKind::FileRemoved(file)), "bot (agent) removed /w/\\u{1b}[2J\\nbot ran rm…");
    }
}
