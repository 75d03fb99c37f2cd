//! The state of a folder sync: queried every second from the `cobox sync` process that runs it.

use std::time::Duration;

use serde_json::Value;

use super::{message::ThreadUpdate, tasks::UpdateSender};
use crate::commands::sync::running_sync_status;

/// Query interval: fast enough for a user, and negligible load for the sync.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of detail lines, such as conflicts: more than a user scrolls through.
const MAX_LINES: usize = 40;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SyncState {
    #[default]
    None,
    /// A short summary, and detail lines.
    Running { summary: String, details: Vec<String>, conflicts: usize },
}

impl SyncState {
    pub fn summary(&self) -> String {
        match self {
            SyncState::None => "no sync".to_owned(),
            SyncState::Running { summary, conflicts: 0, .. } => summary.clone(),
            SyncState::Running { summary, conflicts: 1, .. } => format!("{summary}, 1 conflict"),
            SyncState::Running { summary, conflicts, .. } => format!("{summary}, {conflicts} conflicts"),
        }
    }

    pub fn details(&self) -> &[String] {
        match self {
            SyncState::None => &[],
            SyncState::Running { details, .. } => details,
        }
    }

    /// Parses the output of `cobox sync status --json`.
    pub fn from_status(status: Option<Result<Value, String>>) -> Self {
        let status = match status {
            None => return Self::None,
            Some(Err(reason)) => return Self::Running { summary: "sync?".to_owned(), details: vec![reason], conflicts: 0 },
            Some(Ok(status)) => status,
        };
        let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
        let array = |name: &str| status[name].as_array().cloned().unwrap_or_default();
        let summary = match status["phase"].as_str() {
            Some("watching") => "in sync".to_owned(),
            phase => phase.unwrap_or("sync?").to_owned(),
        };
        let mut details = vec![
            format!("{}  <->  {}", text(&status["folder"]), text(&status["path"])),
            format!(
                "{} file{}, {}",
                status["files"]["agreed"],
                if status["files"]["agreed"] == 1 { "" } else { "s" },
                text(&status["mode"])
            ),
        ];
        details.extend(status["why"].as_str().map(str::to_owned));
        let conflicts = array("conflicts");
        details.extend(conflicts.iter().map(|c| format!("conflict: {}", text(&c["path"]))));
        if !conflicts.is_empty() {
            details.push("resolve with `cobox sync resolve`".to_owned());
        }
        details.extend(array("held_back").iter().map(|path| format!("held back: {}", text(path))));
        details.extend(array("problems").iter().map(|p| format!("not synced: {}: {}", text(&p["path"]), text(&p["message"]))));
        if details.len() > MAX_LINES {
            let more = details.len() - (MAX_LINES - 1);
            details.truncate(MAX_LINES - 1);
            details.push(format!("and {more} more; see `cobox sync status`"));
        }
        Self::Running { summary, details, conflicts: conflicts.len() }
    }
}

/// Reports changes for as long as the state is alive.
pub async fn watch(thread: String, sandbox: String, updates: UpdateSender) {
    let mut before = SyncState::None;
    loop {
        let (thread_id, sandbox_id) = (thread.clone(), sandbox.clone());
        let result = tokio::task::spawn_blocking(move || running_sync_status(&thread_id, &sandbox_id)).await;
        let now = SyncState::from_status(result.unwrap_or(None));
        if now != before {
            if !updates.send(ThreadUpdate::Sync(now.clone())).await {
                return;
            }
            before = now;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_sync_summary_lists_what_needs_attention() {
        let status = json!({
            "folder": "/home/ann/project", "path": "/workspace", "phase": "watching", "mode": "two-way-safe", "why": null,
            "files": {"agreed": 12}, "conflicts": [{"path": "notes.txt"}], "held_back": [".envrc"],
            "problems": [{"side": "here", "path": "a", "message": "no"}],
        });
        let state = SyncState::from_status(Some(Ok(status)));
        assert_eq!(state.summary(), "in sync, 1 conflict");
        let SyncState::Running { details, .. } = state else { panic!("it runs") };
        assert_eq!(
            details,
            [
                "/home/ann/project  <->  /workspace",
                "12 files, two-way-safe",
                "conflict: notes.txt",
                "resolve with `cobox sync resolve`",
                "held back: .envrc",
                "not synced: a: no"
            ]
        );
        assert_eq!(SyncState::from_status(None).summary(), "no sync");
        let many = json!({"phase": "halted", "why": "it is empty", "problems": vec![json!({"path": "x"}); 1000]});
        let SyncState::Running { summary, details, .. } = SyncState::from_status(Some(Ok(many))) else { panic!("it runs") };
        assert_eq!((summary.as_str(), details.len()), ("halted", MAX_LINES));
        assert_eq!(details.last().unwrap(), "and 964 more; see `cobox sync status`");
    }
}
