//! Ids: a prefix and 26 lower-case base32 ULID characters, so that they sort by age and say what they name.

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
/// Longest id of somebody else's making (a thread id, a name) that we accept, in characters.
pub const MAX_FOREIGN_ID_CHARS: usize = 256;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{given}` is not an id of the form {prefix}_ and 26 lower-case base32 characters")]
pub struct InvalidId {
    given: String,
    prefix: &'static str,
}

/// Later ids of a process sort after its earlier ones, also within a millisecond and when the clock is set back.
fn new_ulid() -> String {
    static LAST: Mutex<u128> = Mutex::new(0);
    let millis = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_millis());
    let mut random = [0u8; 16];
    // Without randomness ids would collide and could be guessed: there is nothing sensible to go on with.
    getrandom::fill(&mut random[6..]).expect("the kernel's random source answers");
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
    // The first character carries three bits, so it is at most 7.
    s.len() == ULID_CHARS && s.as_bytes()[0] <= b'7' && s.bytes().all(|b| ALPHABET.contains(&b))
}

/// Whether a string may stand as a thread id, a principal's name or the like: 1 to 256 characters, none a control character.
pub fn is_foreign_id(s: &str) -> bool {
    !s.is_empty() && s.chars().count() <= MAX_FOREIGN_ID_CHARS && !s.chars().any(char::is_control)
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
    /// A session, which is the same thing as a binding: "this scope uses this sandbox".
    SessionId = "ssn";
    /// A sandbox: one filesystem and its processes.
    SandboxId = "sb";
    /// A token's `jti`.
    TokenId = "tok";
    /// An API key's public half.
    KeyId = "key";
    /// A share: what lets another principal into a session.
    ShareId = "shr";
    /// A shell.
    ShellId = "sh";
    /// A command run by exec.
    CommandId = "cmd";
    /// Something that happened to a session.
    EventId = "evt";
    /// A snapshot: files that new sandboxes start from.
    SnapshotId = "snap";
    /// A volume: files that outlive the sandboxes they are mounted in.
    VolumeId = "vol";
    /// A pool: sandboxes of a template that wait to be taken.
    PoolId = "pool";
}

/// One HTTP request, in answers and logs: ours, or the one its caller sent, so that a request can be found in the logs of both sides.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RequestId(String);

/// Longest request id of a caller's, in characters: a UUID has 36, a trace context 55.
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
        // It is written to logs and to the audit, where no credential may be.
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
    /// The id of the event with this number: its second, and the number where others have random bits.
    pub fn numbered(at: Timestamp, number: u64) -> Self {
        // 48 bits are milliseconds until the year 10889.
        let millis = u128::from(u64::try_from(at.unix()).unwrap_or(0).saturating_mul(1000)) & ((1 << 48) - 1);
        Self(format!("evt_{}", ulid_text(millis << 80 | u128::from(number))))
    }

    pub fn number(&self) -> u64 {
        let digit = |b: u8| ALPHABET.iter().position(|a| *a == b).unwrap_or(0) as u128;
        // Whatever is above the number is shifted out.
        self.0.bytes().skip("evt_".len()).fold(0u128, |value, b| value << 5 | digit(b)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_in_the_order_in_which_they_were_made() {
        let ids: Vec<String> = (0..10_000).map(|_| new_ulid()).collect();
        assert!(ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|id| is_ulid(id)));
    }

    #[test]
    fn a_callers_request_id_is_taken_unless_it_could_harm_a_log() {
        for good in ["req_01j8zq3k5v6w7x8y9z0a1b2c3d", "6f1c2f0e-7b0d-4c3e-9a57-0c8f5b1f2a3d", "a", "svc:7.1_x"] {
            assert_eq!(good.parse::<RequestId>().unwrap().as_str(), good);
        }
        let (long, key) = ("x".repeat(129), format!("cbx_{}", "a".repeat(60)));
        for bad in ["", "a b", "a\nb", "ä", "a\"b", &long, &key] {
            assert!(bad.parse::<RequestId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_id_survives_the_wire_and_a_stranger_is_refused() {
        let id = SandboxId::new();
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(serde_json::from_str::<SandboxId>(&json).unwrap(), id);
        for bad in ["", "sb_", "sb_abc", "ssn_00000000000000000000000000", "sb_0000000000000000000000000/", "sb_z0000000000000000000000000"]
        {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_events_id_carries_its_number() {
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
