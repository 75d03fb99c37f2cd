//! What the broker tells boxd (at its start and over the control channel) and what boxd tells the broker.
//!
//! The broker dials; boxd never does. Everything that comes up this channel is a claim by the sandbox.

use serde::{Deserialize, Serialize};

use crate::{ApiError, ErrorCode, SandboxId, Secret, Timestamp};

/// Read by boxd from a descriptor at its start.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BoxdConfig {
    pub sandbox_id: SandboxId,
    pub state: ControlState,
    pub workload: Workload,
    pub limits: WorkloadLimits,
    /// How many control groups boxd is to move itself to, by as many descriptors after the others.
    #[serde(default)]
    pub groups: u32,
}

/// Who the sandbox's programs run as.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Workload {
    pub uid: u32,
    pub gid: u32,
    pub user: String,
    pub home: String,
    /// The folder human and agent share, and every command's working directory unless it names another.
    pub work_dir: String,
    /// How many uids the sandbox has: one where an ordinary user started it, many where root did.
    pub uid_count: u32,
}

/// What the kernel enforces per process, where no cgroup does it for all of them together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkloadLimits {
    /// RLIMIT_NPROC.
    pub processes: u64,
    /// Set only where there is no memory cgroup: RLIMIT_DATA of each process, and what all of them together are watched for.
    pub memory_bytes: Option<u64>,
    /// RLIMIT_NOFILE.
    pub open_files: u64,
}

/// The whole of what boxd needs to decide a request; each push replaces the last.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ControlState {
    /// Counts up with each push, so that an old one never replaces a newer one.
    pub version: u64,
    pub issuer: String,
    pub keys: Vec<VerifyKeySpec>,
    pub revoked: Vec<Revocation>,
    /// Past this with no broker having spoken, boxd ends itself.
    pub lease_expires_at: Timestamp,
    /// The disk allowance is used up: writers are stopped until files are deleted.
    #[serde(default)]
    pub disk_full: bool,
    /// In the last push before the processes are ended: whoever is connected is told why, and nobody else is let in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ending: Option<Ending>,
}

/// Why a sandbox's processes are about to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// For good.
    Ended,
    /// The next use starts it again.
    Suspended,
}

impl Ending {
    /// What somebody is told whose request or stream is under way.
    pub fn error(self) -> ApiError {
        match self {
            Ending::Ended => ApiError::new(ErrorCode::SessionExpired, "the sandbox has ended; ensure a new session"),
            Ending::Suspended => {
                ApiError::new(ErrorCode::ProviderUnavailable, "the sandbox is being suspended; the next request starts it again")
            }
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct VerifyKeySpec {
    pub kid: String,
    pub alg: Alg,
    /// EdDSA: the public key. HS256: the secret. Base64.
    pub key: Secret,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Alg {
    #[serde(rename = "EdDSA")]
    EdDsa,
    #[serde(rename = "HS256")]
    Hs256,
}

/// One thing that no longer counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "value", rename_all = "snake_case")]
pub enum Revocation {
    Jti(String),
    Grant(String),
    Session(String),
    Principal(String),
}

/// What boxd answers when the broker asks how it is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BoxdStatus {
    pub sandbox_id: SandboxId,
    pub state_version: u64,
    /// Authenticated requests so far: the broker compares with what it saw last to know of activity.
    pub requests: u64,
    pub open_streams: u32,
    pub version: String,
}
