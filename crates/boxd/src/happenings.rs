//! The activity feed: files written and commands ended through boxd. Kept in memory until the broker, which polls for
//! it, has fetched it.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cobox_protocol::{
    RequestId, Timestamp,
    event::{Action, Activity, ActivityBatch, ExecEnd, FileChange, MAX_ACTIVITY_BATCH, MAX_EVENT_TEXT_BYTES},
};
use cobox_token::Claims;
use serde::Deserialize;
use tokio::{sync::Notify, time::timeout};

use crate::{files::SandboxPath, processes::JobExit};

/// Some seconds of a busy sandbox whose broker is unreachable, at most 2 MiB. Beyond it the oldest entries are dropped;
/// the sequence numbers show how many.
const MAX_WAITING: usize = 1024;
/// Entries within this time are delivered together, so that a busy sandbox wakes its broker a few times per second and
/// not with every request.
const GATHER: Duration = Duration::from_millis(50);
/// Maximum seconds for which the broker may wait for entries: below its timeout for a response.
const MAX_WAIT_SECONDS: u64 = 30;

pub struct HappeningLog {
    life: String,
    lines: Mutex<Lines>,
    arrived: Notify,
}

#[derive(Default)]
struct Lines {
    waiting: VecDeque<Activity>,
    last: u64,
}

impl Default for HappeningLog {
    fn default() -> Self {
        let life = RequestId::new().as_str().trim_start_matches("req_").to_owned();
        Self { life, lines: Mutex::default(), arrived: Notify::new() }
    }
}

#[derive(Clone, Deserialize)]
pub struct Wish {
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

impl HappeningLog {
    pub fn written(&self, claims: &Claims, path: &SandboxPath, size: u64) {
        self.add(claims, Action::FileWritten(FileChange { size: Some(size), ..named(path) }));
    }

    /// Records several changed entries below a directory as one.
    pub fn written_beneath(&self, claims: &Claims, path: &SandboxPath, entries: u64) {
        self.add(claims, Action::FileWritten(FileChange { entries: Some(entries), ..named(path) }));
    }

    pub fn removed(&self, claims: &Claims, path: &SandboxPath, entries: Option<u64>) {
        self.add(claims, Action::FileRemoved(FileChange { entries, ..named(path) }));
    }

    pub fn ran(&self, claims: &Claims, command: String, ended: JobExit, took: Duration) {
        self.ran_in_shell(claims, command, Some(ended.exit.code), ended.timed_out, milliseconds(took));
    }

    pub fn ran_in_shell(&self, claims: &Claims, command: String, exit_code: Option<i32>, timed_out: bool, duration_ms: u64) {
        self.add(claims, Action::Exec(ExecEnd { command, exit_code, timed_out, duration_ms, truncated: false }));
    }

    fn add(&self, claims: &Claims, what: Action) {
        let happening = Activity {
            seq: 0,
            at: Timestamp::now(),
            principal: Some(claims.sub.clone()),
            actor: Some(claims.act.kind),
            session_id: claims.sid.clone(),
            action: what.bounded(),
        };
        {
            let mut lines = self.lines();
            lines.last += 1;
            let seq = lines.last;
            lines.waiting.push_back(Activity { seq, ..happening });
            if lines.waiting.len() > MAX_WAITING {
                lines.waiting.pop_front();
            }
        }
        // Only has an effect while the broker waits. After it, the broker doesn't wait again before the batch is
        // delivered.
        self.arrived.notify_waiters();
    }

    /// The oldest entries after those acknowledged, which are dropped. Waits if there are none.
    pub async fn fetch(&self, wish: &Wish) -> ActivityBatch {
        // Registers before checking, so that no entry is missed in between.
        let mut arrived = std::pin::pin!(self.arrived.notified());
        arrived.as_mut().enable();
        let there = self.take(wish);
        if !there.items.is_empty() || wish.wait == 0 {
            return there;
        }
        if timeout(Duration::from_secs(wish.wait.min(MAX_WAIT_SECONDS)), arrived).await.is_ok() {
            tokio::time::sleep(GATHER).await;
        }
        self.take(wish)
    }

    /// The entries available now.
    pub fn take(&self, wish: &Wish) -> ActivityBatch {
        let mut lines = self.lines();
        if wish.life == self.life {
            while lines.waiting.front().is_some_and(|h| h.seq <= wish.after) {
                lines.waiting.pop_front();
            }
        }
        ActivityBatch { life: self.life.clone(), items: lines.waiting.iter().take(MAX_ACTIVITY_BATCH).cloned().collect() }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        // No change can panic halfway, so the state is consistent.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A command as requested, up to the maximum length.
pub fn in_words(command: Option<&str>, argv: Option<&[String]>) -> String {
    // Slightly more than the maximum, so that truncation is detected.
    let most = MAX_EVENT_TEXT_BYTES + char::MAX.len_utf8();
    let mut words = String::new();
    for word in command.into_iter().chain(argv.unwrap_or_default().iter().map(String::as_str)) {
        if words.len() > most {
            break;
        }
        if !words.is_empty() {
            words.push(' ');
        }
        words.push_str(&word[..word.floor_char_boundary(most)]);
    }
    words
}

fn named(path: &SandboxPath) -> FileChange {
    let (path, path_b64) = path.to_json();
    FileChange { path, path_b64, ..FileChange::default() }
}

fn milliseconds(took: Duration) -> u64 {
    u64::try_from(took.as_millis()).unwrap_or(u64::MAX)
}
