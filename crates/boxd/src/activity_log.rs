//! The activity log: files written and commands ended through boxd, for the broker's activity feed.

use std::time::Duration;

use cobox_protocol::{
    Timestamp,
    event::{Action, Activity, ExecEnd, FileChange, MAX_EVENT_TEXT_BYTES},
};
use cobox_token::Claims;

use crate::{files::SandboxPath, pending_records::PendingRecords, processes::JobExit};

/// Some seconds of a busy sandbox whose broker is unreachable, at most 2 MiB.
const MAX_PENDING_ACTIVITIES: usize = 1024;

pub struct ActivityLog {
    pub entries: PendingRecords<Activity>,
}

impl Default for ActivityLog {
    fn default() -> Self {
        Self { entries: PendingRecords::new(MAX_PENDING_ACTIVITIES) }
    }
}

impl ActivityLog {
    pub fn record_write(&self, claims: &Claims, path: &SandboxPath, size: u64) {
        self.add(claims, Action::FileWritten(FileChange { size: Some(size), ..file_change(path) }));
    }

    /// Records several changed entries below a directory as one.
    pub fn record_writes_beneath(&self, claims: &Claims, path: &SandboxPath, entries: u64) {
        self.add(claims, Action::FileWritten(FileChange { entries: Some(entries), ..file_change(path) }));
    }

    pub fn record_removal(&self, claims: &Claims, path: &SandboxPath, entries: Option<u64>) {
        self.add(claims, Action::FileRemoved(FileChange { entries, ..file_change(path) }));
    }

    pub fn record_command(&self, claims: &Claims, command: String, ended: JobExit, duration: Duration) {
        self.record_shell_command(claims, command, Some(ended.exit.code), ended.timed_out, milliseconds(duration));
    }

    pub fn record_shell_command(&self, claims: &Claims, command: String, exit_code: Option<i32>, timed_out: bool, duration_ms: u64) {
        self.add(claims, Action::Exec(ExecEnd { command, exit_code, timed_out, duration_ms, truncated: false }));
    }

    fn add(&self, claims: &Claims, action: Action) {
        let (at, action) = (Timestamp::now(), action.bounded());
        let (principal, actor, session_id) = (Some(claims.sub.clone()), Some(claims.act.kind), claims.sid.clone());
        self.entries.add(|seq| Activity { seq, at, principal, actor, session_id, action });
    }
}

/// A command as requested, up to the maximum length.
pub fn command_text(command: Option<&str>, argv: Option<&[String]>) -> String {
    // Slightly more than the maximum, so that truncation is detected.
    let limit = MAX_EVENT_TEXT_BYTES + char::MAX.len_utf8();
    let mut text = String::new();
    for part in command.into_iter().chain(argv.unwrap_or_default().iter().map(String::as_str)) {
        if text.len() > limit {
            break;
        }
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(&part[..part.floor_char_boundary(limit)]);
    }
    text
}

fn file_change(path: &SandboxPath) -> FileChange {
    let (path, path_b64) = path.to_json();
    FileChange { path, path_b64, ..FileChange::default() }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
