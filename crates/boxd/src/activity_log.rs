//! The activity feed: files written and commands ended through boxd. Kept in memory until the broker, which polls for
//! it, has fetched it.

use std::{collections::VecDeque, time::Duration};

use cobox_protocol::{
    RequestId, Timestamp,
    event::{Action, Activity, ActivityBatch, ExecEnd, FileChange, MAX_ACTIVITY_BATCH, MAX_EVENT_TEXT_BYTES},
};
use cobox_token::Claims;
use parking_lot::{Mutex, MutexGuard};
use serde::Deserialize;
use tokio::{sync::Notify, time::timeout};

use crate::{files::SandboxPath, processes::JobExit};

/// Some seconds of a busy sandbox whose broker is unreachable, at most 2 MiB. Beyond it the oldest entries are dropped;
/// the sequence numbers show how many.
const MAX_PENDING: usize = 1024;
/// Entries within this time are delivered together, so that a busy sandbox wakes its broker a few times per second and
/// not with every request.
const BATCH_WINDOW: Duration = Duration::from_millis(50);
/// Maximum seconds for which the broker may wait for entries: below its timeout for a response.
const MAX_WAIT_SECONDS: u64 = 30;

pub struct ActivityLog {
    run_id: String,
    pending: Mutex<PendingActivities>,
    arrived: Notify,
}

#[derive(Default)]
struct PendingActivities {
    entries: VecDeque<Activity>,
    last_seq: u64,
}

impl Default for ActivityLog {
    fn default() -> Self {
        let run_id = RequestId::new().as_str().trim_start_matches("req_").to_owned();
        Self { run_id, pending: Mutex::default(), arrived: Notify::new() }
    }
}

#[derive(Clone, Deserialize)]
pub struct ActivityFetchParams {
    /// Entries up to this number were stored and can be dropped.
    #[serde(default)]
    after: u64,
    /// The run of boxd that the number is from. A number from another run is ignored.
    #[serde(default)]
    life: String,
    /// Seconds to wait if there are no entries.
    #[serde(default)]
    wait: u64,
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
        let activity = Activity {
            seq: 0,
            at: Timestamp::now(),
            principal: Some(claims.sub.clone()),
            actor: Some(claims.act.kind),
            session_id: claims.sid.clone(),
            action: action.bounded(),
        };
        {
            let mut pending = self.pending();
            pending.last_seq += 1;
            let seq = pending.last_seq;
            pending.entries.push_back(Activity { seq, ..activity });
            if pending.entries.len() > MAX_PENDING {
                pending.entries.pop_front();
            }
        }
        // Only has an effect while the broker waits. After it, the broker doesn't wait again before the batch is
        // delivered.
        self.arrived.notify_waiters();
    }

    /// The oldest entries after those acknowledged, which are dropped. Waits if there are none.
    pub async fn fetch(&self, params: &ActivityFetchParams) -> ActivityBatch {
        // Registers before checking, so that no entry is missed in between.
        let mut arrived = std::pin::pin!(self.arrived.notified());
        arrived.as_mut().enable();
        let available = self.take(params);
        if !available.items.is_empty() || params.wait == 0 {
            return available;
        }
        if timeout(Duration::from_secs(params.wait.min(MAX_WAIT_SECONDS)), arrived).await.is_ok() {
            tokio::time::sleep(BATCH_WINDOW).await;
        }
        self.take(params)
    }

    /// The entries available now.
    pub fn take(&self, params: &ActivityFetchParams) -> ActivityBatch {
        let mut pending = self.pending();
        if params.life == self.run_id {
            while pending.entries.front().is_some_and(|activity| activity.seq <= params.after) {
                pending.entries.pop_front();
            }
        }
        ActivityBatch { life: self.run_id.clone(), items: pending.entries.iter().take(MAX_ACTIVITY_BATCH).cloned().collect() }
    }

    fn pending(&self) -> MutexGuard<'_, PendingActivities> {
        self.pending.lock()
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
