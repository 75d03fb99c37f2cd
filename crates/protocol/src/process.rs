//! Processes of a sandbox, as boxd lists them, and the signals that can be sent to them.

use serde::{Deserialize, Serialize};

use crate::{Timestamp, key::PrincipalKind};

/// A command or a shell that boxd started.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessInfo {
    /// The `command_id` of a command, or the id of a shell.
    pub id: String,
    pub kind: ProcessKind,
    /// Process id in the sandbox's pid namespace. Absent until the program runs, and if it never ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// Program and arguments, truncated for display.
    pub argv: Vec<String>,
    pub started_at: Timestamp,
    pub principal: String,
    pub actor: PrincipalKind,
    pub state: ProcessState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    #[serde(default)]
    pub timed_out: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProcessKind {
    Command,
    Shell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProcessState {
    Running,
    Ended,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessList {
    pub items: Vec<ProcessInfo>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SignalRequest {
    pub signal: SignalName,
}

/// A signal by name, with or without `SIG`, or by number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum SignalName {
    Number(i32),
    Name(String),
}

/// Signals that can be sent by name, with their numbers on Linux.
const SIGNALS: [(&str, i32); 29] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("SYS", 31),
];

impl From<&str> for SignalName {
    fn from(name: &str) -> Self {
        SignalName::Name(name.to_owned())
    }
}

impl SignalName {
    pub fn number(&self) -> Result<i32, String> {
        let known = match self {
            SignalName::Number(number) => SIGNALS.iter().find(|(_, known)| known == number),
            SignalName::Name(name) => {
                let upper = name.to_ascii_uppercase();
                let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
                SIGNALS.iter().find(|(known, number)| *known == bare || bare.parse() == Ok(*number))
            }
        };
        known.map(|(_, number)| *number).ok_or_else(|| "signal must be a name such as INT, TERM, KILL or HUP, or its number".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_accepted_by_name_and_by_number() {
        let read = |json: &str| serde_json::from_str::<SignalRequest>(json).unwrap().signal.number();
        for json in [r#"{"signal": "TERM"}"#, r#"{"signal": "sigterm"}"#, r#"{"signal": 15}"#, r#"{"signal": "15"}"#] {
            assert_eq!(read(json), Ok(15), "{json}");
        }
        for json in [r#"{"signal": "NONE"}"#, r#"{"signal": 0}"#, r#"{"signal": -9}"#, r#"{"signal": ""}"#] {
            assert!(read(json).is_err(), "{json}");
        }
    }
}
