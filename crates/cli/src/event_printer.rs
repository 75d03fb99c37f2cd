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
const READER_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Why a feed stopped.
pub enum FeedEnd {
    /// The session's last event was printed.
    SessionEnded,
    /// The reader of stdout has closed it.
    OutputClosed,
    Failed(ClientError),
}

/// Prints each event and stores its id in `last`, so that a later call can resume after it.
pub async fn print_events(printer: Printer, events: &mut EventStream, last: &mut Option<String>) -> Result<FeedEnd, Failure> {
    loop {
        let next = tokio::select! {
            next = events.next() => next,
            () = output_closed() => return Ok(FeedEnd::OutputClosed),
        };
        let event = match next {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(FeedEnd::SessionEnded),
            Err(error) => return Ok(FeedEnd::Failed(error)),
        };
        let line = if printer.is_json() { serde_json::to_string(&event).map_err(anyhow::Error::from)? } else { line(printer, &event) };
        match printer.stream(format!("{line}\n").as_bytes()) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(FeedEnd::OutputClosed),
            other => other?,
        }
        *last = Some(event.id.to_string());
    }
}

/// Resolves when the reader of stdout has closed it, as `head` does, so that the feed stops without waiting for
/// another event.
async fn output_closed() {
    loop {
        tokio::time::sleep(READER_CHECK_INTERVAL).await;
        let stdout = std::io::stdout();
        let mut fds = [PollFd::new(&stdout, PollFlags::empty())];
        let is_ready = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0);
        if is_ready && fds[0].revents().intersects(PollFlags::ERR | PollFlags::NVAL) {
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
    let suffix = |reason: &str| if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let actor = match (&event.principal, &event.actor) {
        (Some(principal), Some(actor)) => format!("{principal} ({actor})"),
        (Some(principal), None) => principal.clone(),
        _ => "unknown".to_owned(),
    };
    let text = match &event.kind {
        EventKind::Created { state } => format!("{actor} created the session ({})", state.as_str()),
        EventKind::Active => "the sandbox is running".to_owned(),
        EventKind::Idle => "the sandbox is idle".to_owned(),
        EventKind::Suspended { reason } => format!("the sandbox was suspended{}", suffix(reason)),
        EventKind::Resumed => "the sandbox was resumed".to_owned(),
        EventKind::Restored => format!("{actor} restored the deleted sandbox"),
        EventKind::Terminated { reason } => format!("the session ended{}", suffix(reason)),
        EventKind::Failed { reason } => format!("the session failed{}", suffix(reason)),
        EventKind::Changed { change } => format!("{actor} changed the sandbox{}", suffix(change)),
        EventKind::Shared { with, capabilities } => format!("{actor} shared the session with {with} ({})", capabilities.names().join(" ")),
        EventKind::Unshared { with } => format!("{actor} revoked the share of {with}"),
        EventKind::Connected => format!("{actor} connected"),
        EventKind::FileWritten(file) => format!("{actor} wrote {}", describe_file(file)),
        EventKind::FileRemoved(file) => format!("{actor} removed {}", describe_file(file)),
        EventKind::Exec(end) => format!("{actor} ran {}", describe_exec(end)),
        EventKind::Gap { lost: Some(lost) } => format!("({lost} events are missing)"),
        EventKind::Gap { lost: None } => "(some events are missing)".to_owned(),
        EventKind::Unknown => "(an event that this version of cobox does not know)".to_owned(),
    };
    visible(&text)
}

fn describe_file(file: &FileChange) -> String {
    let size = match (file.size, file.entries) {
        (Some(1), _) => " (1 byte)".to_owned(),
        (Some(bytes), _) => format!(" ({bytes} bytes)"),
        (None, Some(1)) => " (1 entry)".to_owned(),
        (None, Some(entries)) => format!(" ({entries} entries)"),
        (None, None) => String::new(),
    };
    format!("{}{}{size}", file.path, ellipsis(file.truncated))
}

fn describe_exec(end: &ExecEnd) -> String {
    let outcome = match (end.exit_code, end.timed_out) {
        (_, true) => "timed out".to_owned(),
        (Some(code), false) => format!("exit {code}"),
        (None, false) => "no exit code".to_owned(),
    };
    let duration = match end.duration_ms {
        ms @ 0..1000 => format!("{ms} ms"),
        ms => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
    };
    format!("{}{} → {outcome} ({duration})", end.command, ellipsis(end.truncated))
}

const fn ellipsis(is_truncated: bool) -> &'static str {
    if is_truncated { "…" } else { "" }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::{EventId, SandboxId, SessionId, Timestamp, event::EventSource, session::State};

    use super::*;

    fn sentence_for(kind: EventKind) -> String {
        let event = SandboxEvent {
            id: EventId::numbered(Timestamp::from_unix(0), 1),
            at: Timestamp::from_unix(0),
            session_id: SessionId::new(),
            sandbox_id: SandboxId::new(),
            principal: Some("bot".into()),
            actor: Some("agent".into()),
            source: EventSource::Sandbox,
            kind,
        };
        sentence(&event)
    }

    #[test]
    fn events_are_formatted_as_sentences() {
        let ran = |exit_code, timed_out, duration_ms| {
            sentence_for(EventKind::Exec(ExecEnd { command: "make".into(), exit_code, timed_out, duration_ms, ..ExecEnd::default() }))
        };
        assert_eq!(ran(Some(0), false, 12), "bot (agent) ran make → exit 0 (12 ms)");
        assert_eq!(ran(Some(137), true, 61_250), "bot (agent) ran make → timed out (61.2 s)");
        assert_eq!(ran(None, false, 1), "bot (agent) ran make → no exit code (1 ms)");
        let file = FileChange { path: "/workspace/a.py".into(), size: Some(8), ..FileChange::default() };
        assert_eq!(sentence_for(EventKind::FileWritten(file)), "bot (agent) wrote /workspace/a.py (8 bytes)");
        assert_eq!(sentence_for(EventKind::Created { state: State::Active }), "bot (agent) created the session (active)");
    }

    #[test]
    fn a_hostile_file_name_cannot_repaint_the_screen_or_start_a_line() {
        let file = FileChange { path: "/w/\x1b[2J\nbot ran rm".into(), truncated: true, ..FileChange::default() };
        assert_eq!(sentence_for(EventKind::FileRemoved(file)), "bot (agent) removed /w/\\u{1b}[2J\\nbot ran rm…");
    }
}
