//! Events of a session and its sandbox, sent by `GET /v1/sandbox/sessions/{id}/events` as server-sent events, and the activity that boxd
//! reports to the broker for them.
//!
//! Every event has `event: sandbox`, an `id:` for `Last-Event-ID` when a client reconnects, and a [`SandboxEvent`] as `data:`. If the
//! broker ends a stream before the session ends, the last event is `event: error` with the error's envelope.

use serde::{Deserialize, Serialize};

use crate::{
    EventId, SandboxId, SessionId, Timestamp, capability::Capability, capability::CapabilitySet, key::PrincipalKind, session::State,
};

/// `event:` of every event except an error that ends the stream.
pub const EVENT_NAME: &str = "sandbox";
/// `event:` of an error's envelope.
pub const ERROR_NAME: &str = "error";
/// Maximum length of a path or command in an event, in bytes; longer ones are truncated and marked `truncated`.
pub const MAX_EVENT_TEXT_BYTES: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SandboxEvent {
    pub id: EventId,
    pub at: Timestamp,
    pub session_id: SessionId,
    pub sandbox_id: SandboxId,
    /// Principal that caused the event, if any.
    pub principal: Option<String>,
    /// Kind of that principal: `human`, `agent` or `operator`.
    pub actor: Option<String>,
    pub source: EventSource,
    #[serde(flatten)]
    pub kind: EventKind,
}

/// Reporter of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Source"))]
#[serde(rename_all = "snake_case")]
pub enum EventSource {
    Broker,
    /// Reported by the sandbox itself, and therefore untrusted.
    Sandbox,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "What"))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum EventKind {
    /// The session was created; always its first event.
    Created {
        state: State,
    },
    /// The sandbox is running: it was started, or used again after it was idle.
    Active,
    Idle,
    Suspended {
        reason: String,
    },
    /// Started again after it was suspended.
    Resumed,
    /// The sandbox was deleted and has been restored with its files.
    Restored,
    /// The session ended; its last event.
    Terminated {
        reason: String,
    },
    /// The session ended because its sandbox cannot be recovered; its last event.
    Failed {
        reason: String,
    },
    /// The sandbox's name, access, tags or `keep` changed.
    Changed {
        change: String,
    },
    /// The session was shared with another principal, or the capabilities of a share changed.
    Shared {
        with: String,
        capabilities: CapabilitySet,
    },
    Unshared {
        with: String,
    },
    /// A principal uses the sandbox again after a while.
    Connected,
    FileWritten(FileChange),
    FileRemoved(FileChange),
    /// A command ended.
    Exec(ExecEnd),
    /// Events are missing here: they are no longer kept, or the sandbox was more active than the limit for recording allows.
    Gap {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lost: Option<u64>,
    },
    /// An event type of a newer broker.
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileChange {
    pub path: String,
    /// Exact bytes, if the path is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Number of files and directories, if a whole directory was unpacked, moved, copied or removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<u64>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub truncated: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecEnd {
    /// Command as requested, without environment and input.
    pub command: String,
    /// Absent if a shell did not report it.
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub timed_out: bool,
    pub duration_ms: u64,
    #[serde(default, skip_serializing_if = "is_false")]
    pub truncated: bool,
}

fn is_false(b: &bool) -> bool {
    !b
}

impl EventKind {
    /// Whether a caller with these capabilities may see the event.
    pub fn is_shown_to(&self, capabilities: CapabilitySet) -> bool {
        match self {
            EventKind::FileWritten(_) | EventKind::FileRemoved(_) => capabilities.contains(Capability::FsRead),
            EventKind::Exec(_) => capabilities.contains(Capability::Exec) || capabilities.contains(Capability::ShellObserve),
            _ => true,
        }
    }

    /// Whether this is the last event of its session.
    pub fn is_last(&self) -> bool {
        matches!(self, EventKind::Terminated { .. } | EventKind::Failed { .. })
    }

    pub fn as_str(&self) -> &'static str {
        match self {
            EventKind::Created { .. } => "created",
            EventKind::Active => "active",
            EventKind::Idle => "idle",
            EventKind::Suspended { .. } => "suspended",
            EventKind::Resumed => "resumed",
            EventKind::Restored => "restored",
            EventKind::Terminated { .. } => "terminated",
            EventKind::Failed { .. } => "failed",
            EventKind::Changed { .. } => "changed",
            EventKind::Shared { .. } => "shared",
            EventKind::Unshared { .. } => "unshared",
            EventKind::Connected => "connected",
            EventKind::FileWritten(_) => "file_written",
            EventKind::FileRemoved(_) => "file_removed",
            EventKind::Exec(_) => "exec",
            EventKind::Gap { .. } => "gap",
            EventKind::Unknown => "unknown",
        }
    }
}

/// The subset of [`EventKind`] that boxd may report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Action {
    FileWritten(FileChange),
    FileRemoved(FileChange),
    Exec(ExecEnd),
}

impl Action {
    /// Truncates the texts to the limit for events, because the sandbox chooses them.
    pub fn bounded(self) -> Self {
        let file = |mut change: FileChange| {
            change.truncated |= cut(&mut change.path);
            // A truncated path would name another file.
            change.path_b64 = change.path_b64.filter(|b64| b64.len() <= MAX_EVENT_TEXT_BYTES);
            change
        };
        match self {
            Action::FileWritten(change) => Action::FileWritten(file(change)),
            Action::FileRemoved(change) => Action::FileRemoved(file(change)),
            Action::Exec(mut end) => {
                end.truncated |= cut(&mut end.command);
                Action::Exec(end)
            }
        }
    }
}

impl From<Action> for EventKind {
    fn from(deed: Action) -> Self {
        match deed {
            Action::FileWritten(change) => EventKind::FileWritten(change),
            Action::FileRemoved(change) => EventKind::FileRemoved(change),
            Action::Exec(end) => EventKind::Exec(end),
        }
    }
}

fn cut(text: &mut String) -> bool {
    if text.len() <= MAX_EVENT_TEXT_BYTES {
        return false;
    }
    text.truncate(text.floor_char_boundary(MAX_EVENT_TEXT_BYTES));
    true
}

/// One entry of the activity feed: an action through boxd, as boxd reports it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Activity {
    /// Sequence number, from 1 within one run of boxd.
    pub seq: u64,
    pub at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<PrincipalKind>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    #[serde(rename = "what")]
    pub action: Action,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_is_serialized_as_one_flat_object() {
        let exec = ExecEnd { command: "python main.py".into(), exit_code: Some(0), duration_ms: 3, ..ExecEnd::default() };
        let event = SandboxEvent {
            id: EventId::numbered(Timestamp::from_unix(0), 7),
            at: Timestamp::from_unix(0),
            session_id: SessionId::new(),
            sandbox_id: SandboxId::new(),
            principal: Some("ann".into()),
            actor: Some("human".into()),
            source: EventSource::Sandbox,
            kind: EventKind::Exec(exec),
        };
        let wire = serde_json::to_value(&event).unwrap();
        assert_eq!((&wire["type"], &wire["command"], &wire["exit_code"]), (&json!("exec"), &json!("python main.py"), &json!(0)));
        assert_eq!(wire["source"], "sandbox");
        assert_eq!(serde_json::from_value::<SandboxEvent>(wire).unwrap(), event);
        assert_eq!(serde_json::from_value::<EventKind>(json!({ "type": "moved", "far": true })).unwrap(), EventKind::Unknown);
        assert!(
            serde_json::from_value::<Action>(json!({ "type": "terminated", "reason": "mine" })).is_err(),
            "a sandbox must not report this event"
        );
    }

    #[test]
    fn long_texts_are_truncated_at_a_character_boundary_and_marked() {
        let path = "€".repeat(1000);
        let Action::FileWritten(cut) = Action::FileWritten(FileChange { path, ..FileChange::default() }).bounded() else { panic!() };
        assert_eq!((cut.path.len(), cut.truncated), (MAX_EVENT_TEXT_BYTES / 3 * 3, true));
    }

    #[test]
    fn file_and_exec_events_require_the_matching_capability() {
        let set = |words: &[&str]| CapabilitySet::parse(words).unwrap();
        let (file, exec) = (EventKind::FileWritten(FileChange::default()), EventKind::Exec(ExecEnd::default()));
        assert!(file.is_shown_to(set(&["fs_read"])) && !file.is_shown_to(set(&["fs_write", "exec"])));
        assert!(exec.is_shown_to(set(&["exec"])) && exec.is_shown_to(set(&["shell:ro"])) && !exec.is_shown_to(set(&["fs:rw"])));
        assert!(EventKind::Idle.is_shown_to(set(&["ports"])));
    }
}
