//! Ids: a type prefix and a ULID of 26 lower-case base32 characters, so that ids sort by age and show what they identify.

use std::{
    fmt,
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use crate::Timestamp;

/// Crockford's alphabet, lower case: no `i`, `l`, `o`, `u`.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const ULID_CHARS: usize = 26;
/// Maximum length of an id chosen by a client (a thread id, a name), in characters.
pub const MAX_EXTERNAL_ID_CHARS: usize = 256;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{given}` is not an id of the form {prefix}_ and 26 lower-case base32 characters")]
pub struct InvalidId {
    given: String,
    prefix: &'static str,
}

/// A string that is not the wire name of any value of an enum.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{given}` is not a known {expected}")]
pub struct UnknownName {
    given: String,
    expected: &'static str,
}

impl UnknownName {
    pub(crate) fn new(given: &str, expected: &'static str) -> Self {
        Self { given: given.chars().take(64).collect(), expected }
    }
}

/// Later ids of a process sort after its earlier ones, also within a millisecond and when the clock is set back.
fn new_ulid() -> String {
    static LAST: Mutex<u128> = Mutex::new(0);
    let millis = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_millis());
    let mut random = [0u8; 16];
    // Without randomness, ids would collide and could be guessed, so there is no way to continue.
    getrandom::fill(&mut random[6..]).expect("the kernel's random source is available");
    random[..6].copy_from_slice(&millis.to_be_bytes()[10..]);
    let fresh = u128::from_be_bytes(random);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    // 48 random bits keep the next id from being guessed; they last for billions of ids within a millisecond.
    *last = if fresh > *last { fresh } else { *last + 1 + (fresh & ((1 << 48) - 1)) };
    ulid_text(*last)
}

fn ulid_text(value: u128) -> String {
    (0..ULID_CHARS).rev().map(|i| ALPHABET[(value >> (5 * i)) as usize & 31] as char).collect()
}

fn is_ulid(s: &str) -> bool {
    // 26 characters encode 130 bits; a ULID has 128, so the first character has only three bits.
    s.len() == ULID_CHARS && s.as_bytes()[0] <= b'7' && s.bytes().all(|b| ALPHABET.contains(&b))
}

/// Whether a string is valid as a thread id, a principal's name or a similar id: 1 to 256 characters, no control characters.
pub fn is_external_id(s: &str) -> bool {
    !s.is_empty() && s.chars().count() <= MAX_EXTERNAL_ID_CHARS && !s.chars().any(char::is_control)
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            #[allow(clippy::new_without_default, reason = "a default that differs each time would surprise")]
            pub fn new() -> Self {
                Self(format!(concat!($prefix, "_{}"), new_ulid()))
            }
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(s: &str) -> Result<Self, InvalidId> {
                match s.strip_prefix(concat!($prefix, "_")) {
                    Some(rest) if is_ulid(rest) => Ok(Self(s.to_owned())),
                    _ => Err(InvalidId { given: s.chars().take(64).collect(), prefix: $prefix }),
                }
            }
        }
        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(s: String) -> Result<Self, InvalidId> {
                s.parse()
            }
        }
        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

ids! {
    /// A session, also called a binding: it associates a scope with a sandbox.
    SessionId = "ssn";
    /// A sandbox: one file system and its processes.
    SandboxId = "sb";
    /// A token's `jti`.
    TokenId = "tok";
    /// Public part of an API key.
    KeyId = "key";
    /// A share: grants another principal access to a session.
    ShareId = "shr";
    /// A shell.
    ShellId = "sh";
    /// A command started by an exec route.
    CommandId = "cmd";
    /// An event of a session.
    EventId = "evt";
    /// A snapshot: the initial files of new sandboxes.
    SnapshotId = "snap";
    /// A volume: files that outlive the sandboxes in which they are mounted.
    VolumeId = "vol";
    /// A pool: sandboxes of a template, started in advance.
    PoolId = "pool";
}

/// Id of one HTTP request, in responses and logs. It is generated here or sent by the caller, so that both sides can find the request in
/// their logs.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RequestId(String);

/// Maximum length of a request id sent by a caller, in characters: a UUID has 36, a trace context 55.
pub const MAX_REQUEST_ID_CHARS: usize = 128;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a request id has 1 to {MAX_REQUEST_ID_CHARS} letters, digits, `_`, `-`, `.` or `:`, and is no credential")]
pub struct InvalidRequestId;

impl RequestId {
    #[allow(clippy::new_without_default, reason = "a default that differs each time would surprise")]
    pub fn new() -> Self {
        Self(format!("req_{}", new_ulid()))
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for RequestId {
    type Err = InvalidRequestId;
    fn from_str(s: &str) -> Result<Self, InvalidRequestId> {
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"_-.:".contains(&b);
        let is_id = (1..=MAX_REQUEST_ID_CHARS).contains(&s.len()) && s.bytes().all(is_plain);
        // Request ids are written to logs and to the audit, which must not contain credentials.
        if is_id && crate::secret::redact(s) == s { Ok(Self(s.to_owned())) } else { Err(InvalidRequestId) }
    }
}

impl TryFrom<String> for RequestId {
    type Error = InvalidRequestId;
    fn try_from(s: String) -> Result<Self, InvalidRequestId> {
        s.parse()
    }
}

impl From<RequestId> for String {
    fn from(id: RequestId) -> String {
        id.0
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl EventId {
    /// Id of the event with this number. The timestamp has a resolution of one second; the number replaces the random bits of other ids.
    pub fn numbered(at: Timestamp, number: u64) -> Self {
        // 48 bits are milliseconds until the year 10889.
        let millis = u128::from(u64::try_from(at.unix()).unwrap_or(0).saturating_mul(1000)) & ((1 << 48) - 1);
        Self(format!("evt_{}", ulid_text(millis << 80 | u128::from(number))))
    }

    pub fn number(&self) -> u64 {
        let digit = |b: u8| ALPHABET.iter().position(|a| *a == b).unwrap_or(0) as u128;
        // The timestamp, above the number's 64 bits, is shifted out.
        self.0.bytes().skip("evt_".len()).fold(0u128, |value, b| value << 5 | digit(b)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_ids_are_strictly_increasing() {
        let ids: Vec<String> = (0..10_000).map(|_| new_ulid()).collect();
        assert!(ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|id| is_ulid(id)));
    }

    #[test]
    fn a_callers_request_id_is_accepted_if_it_is_safe_to_log() {
        for good in ["req_01j8zq3k5v6w7x8y9z0a1b2c3d", "6f1c2f0e-7b0d-4c3e-9a57-0c8f5b1f2a3d", "a", "svc:7.1_x"] {
            assert_eq!(good.parse::<RequestId>().unwrap().as_str(), good);
        }
        let (long, key) = ("x".repeat(129), format!("cbx_{}", "a".repeat(60)));
        for bad in ["", "a b", "a\nb", "ä", "a\"b", &long, &key] {
            assert!(bad.parse::<RequestId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn ids_round_trip_through_json_and_malformed_ones_are_refused() {
        let id = SandboxId::new();
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(serde_json::from_str::<SandboxId>(&json).unwrap(), id);
        for bad in ["", "sb_", "sb_abc", "ssn_00000000000000000000000000", "sb_0000000000000000000000000/", "sb_z0000000000000000000000000"]
        {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_event_id_contains_its_number() {
        for number in [0, 1, 31, 32, u64::MAX] {
            let id = EventId::numbered(Timestamp::from_unix(1_800_000_000), number);
            assert_eq!(id.as_str().parse::<EventId>().unwrap().number(), number, "{id}");
        }
        assert!(EventId::numbered(Timestamp::from_unix(5), 1) < EventId::numbered(Timestamp::from_unix(5), 2));
    }

    #[test]
    fn ids_are_unique_and_sort_by_time() {
        let a = SessionId::new();
        std::thread::sleep(std::time::Duration::from_millis(2));
        let b = SessionId::new();
        assert!(a < b);
    }
}
