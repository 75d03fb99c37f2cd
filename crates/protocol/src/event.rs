//! `GET /v1/sandbox/sessions/{id}/events`: what happens to a session and its sandbox, as server-sent events.
//!
//! Every event is `event: sandbox` with an `id:` to come back with as `Last-Event-ID`, and `data:` a [`SandboxEvent`]. A stream that
//! is ended by the broker before its session is ends with `event: error` and the error's envelope.

use serde::{Deserialize, Serialize};

use crate::{
    EventId, SandboxId, SessionId, Timestamp, capability::Capability, capability::CapabilitySet, key::PrincipalKind, session::State,
};

/// The `event:` of every event but the last of a stream that was refused half-way.
pub const EVENT_NAME: &str = "sandbox";
/// The `event:` of an error's envelope.
pub const ERROR_NAME: &str = "error";
/// Longest path or command in an event, in bytes; what is longer is cut, and said to be.
pub const MAX_EVENT_TEXT_BYTES: usize = 1024;
/// Happenings in one answer of boxd's, so that it stays below a megabyte.
pub const MAX_HAPPENINGS_AT_ONCE: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SandboxEvent {
    pub id: EventId,
    pub at: Timestamp,
    pub session_id: SessionId,
    pub sandbox_id: SandboxId,
    /// Who did it, where somebody did.
    pub principal: Option<String>,
    /// As what: `human`, `agent` or `operator`.
    pub actor: Option<String>,
    pub source: Source,
    #[serde(flatten)]
    pub what: What,
}

/// Whose word an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Broker,
    /// What the sandbox says of itself, which may be anything.
    Sandbox,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum What {
    /// The session was made: always its first event.
    Created {
        state: State,
    },
    /// The sandbox runs: it was started, or used again after it was idle.
    Active,
    Idle,
    Suspended {
        reason: String,
    },
    /// Started again after it was suspended.
    Resumed,
    /// The sandbox was deleted, and is there again with its files.
    Restored,
    /// The session is over: its last event.
    Terminated {
        reason: String,
    },
    /// The session is over because its sandbox can't be brought back: its last event.
    Failed {
        reason: String,
    },
    /// The sandbox's name, access, tags or whether it is kept.
    Changed {
        change: String,
    },
    /// The session was opened to another principal, or what they may do was changed.
    Shared {
        with: String,
        capabilities: CapabilitySet,
    },
    Unshared {
        with: String,
    },
    /// Somebody uses the sandbox who hadn't for a while.
    Connected,
    FileWritten(FileChange),
    FileRemoved(FileChange),
    /// A command ended.
    Exec(ExecEnd),
    /// Events are missing here: they are no longer kept, or the sandbox did more than is recorded.
    Gap {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lost: Option<u64>,
    },
    /// A newer broker's word.
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FileChange {
    pub path: String,
    /// The name itself, where it isn't UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Of a directory that was unpacked, moved, copied or removed at once: how many files and directories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entries: Option<u64>,
    #[serde(default, skip_serializing_if = "is_false")]
    pub truncated: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExecEnd {
    /// As it was asked for. Never its environment or its input.
    pub command: String,
    /// Missing where a shell didn't tell.
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

impl What {
    /// Whether one who may do this much in a sandbox may see it.
    pub fn is_shown_to(&self, capabilities: CapabilitySet) -> bool {
        match self {
            What::FileWritten(_) | What::FileRemoved(_) => capabilities.contains(Capability::FsRead),
            What::Exec(_) => capabilities.contains(Capability::Exec) || capabilities.contains(Capability::ShellObserve),
            _ => true,
        }
    }

    /// Whether nothing comes after it in its session.
    pub fn is_last(&self) -> bool {
        matches!(self, What::Terminated { .. } | What::Failed { .. })
    }

    pub fn word(&self) -> &'static str {
        match self {
            What::Created { .. } => "created",
            What::Active => "active",
            What::Idle => "idle",
            What::Suspended { .. } => "suspended",
            What::Resumed => "resumed",
            What::Restored => "restored",
            What::Terminated { .. } => "terminated",
            What::Failed { .. } => "failed",
            What::Changed { .. } => "changed",
            What::Shared { .. } => "shared",
            What::Unshared { .. } => "unshared",
            What::Connected => "connected",
            What::FileWritten(_) => "file_written",
            What::FileRemoved(_) => "file_removed",
            What::Exec(_) => "exec",
            What::Gap { .. } => "gap",
            What::Unknown => "unknown",
        }
    }
}

/// The part of it that boxd may speak of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Deed {
    FileWritten(FileChange),
    FileRemoved(FileChange),
    Exec(ExecEnd),
}

impl Deed {
    /// Cut to what an event carries: it may be a stranger's.
    pub fn bounded(self) -> Self {
        let file = |mut change: FileChange| {
            change.truncated |= cut(&mut change.path);
            // A part of one would be another name.
            change.path_b64 = change.path_b64.filter(|b64| b64.len() <= MAX_EVENT_TEXT_BYTES);
            change
        };
        match self {
            Deed::FileWritten(change) => Deed::FileWritten(file(change)),
            Deed::FileRemoved(change) => Deed::FileRemoved(file(change)),
            Deed::Exec(mut end) => {
                end.truncated |= cut(&mut end.command);
                Deed::Exec(end)
            }
        }
    }
}

impl From<Deed> for What {
    fn from(deed: Deed) -> Self {
        match deed {
            Deed::FileWritten(change) => What::FileWritten(change),
            Deed::FileRemoved(change) => What::FileRemoved(change),
            Deed::Exec(end) => What::Exec(end),
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

/// One thing that was done through boxd, as it says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Happening {
    /// Counts up from 1 in one life of the daemon.
    pub seq: u64,
    pub at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<PrincipalKind>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    pub what: Deed,
}

/// What was not taken yet, oldest first; no items where the wait was in vain.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Happenings {
    /// Of this life of the daemon; another one counts anew.
    pub life: String,
    pub items: Vec<Happening>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_is_one_flat_object_in_the_words_of_the_protocol() {
        let exec = ExecEnd { command: "python main.py".into(), exit_code: Some(0), duration_ms: 3, ..ExecEnd::default() };
        let event = SandboxEvent {
            id: EventId::numbered(Timestamp::from_unix(0), 7),
            at: Timestamp::from_unix(0),
            session_id: SessionId::new(),
            sandbox_id: SandboxId::new(),
            principal: Some("ann".into()),
            actor: Some("human".into()),
            source: Source::Sandbox,
            what: What::Exec(exec),
        };
        let wire = serde_json::to_value(&event).unwrap();
        assert_eq!((&wire["type"], &wire["command"], &wire["exit_code"]), (&json!("exec"), &json!("python main.py"), &json!(0)));
        assert_eq!(wire["source"], "sandbox");
        assert_eq!(serde_json::from_value::<SandboxEvent>(wire).unwrap(), event);
        assert_eq!(serde_json::from_value::<What>(json!({ "type": "moved", "far": true })).unwrap(), What::Unknown);
        assert!(serde_json::from_value::<Deed>(json!({ "type": "terminated", "reason": "mine" })).is_err(), "not a sandbox's to say");
    }

    #[test]
    fn a_strangers_text_is_cut_between_characters_and_said_to_be() {
        let path = "€".repeat(1000);
        let Deed::FileWritten(cut) = Deed::FileWritten(FileChange { path, ..FileChange::default() }).bounded() else { panic!() };
        assert_eq!((cut.path.len(), cut.truncated), (MAX_EVENT_TEXT_BYTES / 3 * 3, true));
    }

    #[test]
    fn who_may_not_read_files_or_run_commands_sees_neither() {
        let set = |words: &[&str]| CapabilitySet::parse(words).unwrap();
        let (file, exec) = (What::FileWritten(FileChange::default()), What::Exec(ExecEnd::default()));
        assert!(file.is_shown_to(set(&["fs_read"])) && !file.is_shown_to(set(&["fs_write", "exec"])));
        assert!(exec.is_shown_to(set(&["exec"])) && exec.is_shown_to(set(&["shell:ro"])) && !exec.is_shown_to(set(&["fs:rw"])));
        assert!(What::Idle.is_shown_to(set(&["ports"])));
    }
}
