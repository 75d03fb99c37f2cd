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
    #[serde(default)]
    pub dataplane: DataplaneLimits,
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
    /// Variables of every program, unless whoever starts it says otherwise.
    #[serde(default)]
    pub env: crate::making::Env,
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

/// What one sandbox's clients may have of boxd; beyond it they are told to come again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataplaneLimits {
    /// Connections at once. Past it new ones wait, so the limits below are what clients should meet first.
    pub connections: u32,
    /// WebSockets and event streams at once.
    pub streams: u32,
    /// Of one principal: below `streams`, so that one who opens many leaves room for others.
    pub streams_per_principal: u32,
    /// Commands running at once.
    pub execs: u32,
    /// Of one principal: below `execs`, so that one who leaves commands behind leaves room for others.
    pub execs_per_principal: u32,
    /// How long a command without a timeout of its own, or on a terminal, runs on with no client connected.
    pub exec_unattended_seconds: u64,
    /// Of one command's stdout, and of its stderr, what is kept on disk for a client to come back to.
    pub exec_spool_bytes: u64,
    /// How long an ended command's output is kept for that.
    pub exec_retention_seconds: u64,
    /// Ended commands whose output is kept for that; the oldest go first.
    pub execs_kept: u32,
    /// What the output of those may take of memory, beside what is on disk: with more of it fewer are kept.
    pub exec_kept_memory_bytes: u64,
    pub shells: u32,
    /// Of a shell's output, what is kept in memory; who was away for longer gets the screen instead.
    pub shell_ring_bytes: u64,
    /// How long a shell with nobody connected and nothing going on lives.
    pub shell_idle_seconds: u64,
    /// Largest body of a JSON request.
    pub request_bytes: u64,
    /// Most of a command's output in one answer; more comes over streams and files.
    pub output_bytes: u64,
    /// Directories watched at once, of all watchers together.
    pub watches: u32,
    /// How long boxd goes on after its lease without a request of its broker, which may be restarting.
    pub lease_grace_seconds: u64,
}

impl Default for DataplaneLimits {
    fn default() -> Self {
        Self {
            connections: 1024,
            // So that there is always room for ordinary requests beside them.
            streams: 768,
            streams_per_principal: 512,
            execs: 96,
            execs_per_principal: 64,
            // A laptop that changes its network comes back within it.
            exec_unattended_seconds: 600,
            exec_spool_bytes: 256 << 20,
            exec_retention_seconds: 300,
            execs_kept: 256,
            exec_kept_memory_bytes: 32 << 20,
            shells: 256,
            // Two screens of a 4K terminal and more, and a thousand shells still fit in 512 MiB.
            shell_ring_bytes: 256 << 10,
            shell_idle_seconds: 4 * 3600,
            // Standard input is in it.
            request_bytes: 16 << 20,
            output_bytes: 16 << 20,
            // A large repository; the kernel lets a user have some ten thousand, and programs inside want some too.
            watches: 16_384,
            // A broker that restarts with many sandboxes to adopt.
            lease_grace_seconds: 60,
        }
    }
}

impl DataplaneLimits {
    /// Says what can't be, before a sandbox is tried with it.
    pub fn validate(&self) -> Result<(), String> {
        let within = |name: &str, value: u64, range: std::ops::RangeInclusive<u64>| match range.contains(&value) {
            true => Ok(()),
            false => Err(format!("dataplane.{name} is {value}, but it must be from {} to {}", range.start(), range.end())),
        };
        within("connections", self.connections.into(), 16..=65_536)?;
        within("streams", self.streams.into(), 1..=u64::from(self.connections) - 8)?;
        within("streams_per_principal", self.streams_per_principal.into(), 1..=65_536)?;
        within("execs", self.execs.into(), 1..=4096)?;
        within("execs_per_principal", self.execs_per_principal.into(), 1..=4096)?;
        within("exec_unattended_seconds", self.exec_unattended_seconds, 1..=86_400)?;
        within("exec_spool_bytes", self.exec_spool_bytes, 0..=1 << 40)?;
        within("exec_retention_seconds", self.exec_retention_seconds, 0..=7 * 86_400)?;
        within("execs_kept", self.execs_kept.into(), 1..=65_536)?;
        within("exec_kept_memory_bytes", self.exec_kept_memory_bytes, 0..=64 << 30)?;
        within("shells", self.shells.into(), 1..=4096)?;
        within("shell_ring_bytes", self.shell_ring_bytes, 4096..=64 << 20)?;
        within("shell_idle_seconds", self.shell_idle_seconds, 1..=365 * 86_400)?;
        within("request_bytes", self.request_bytes, 64 << 10..=256 << 20)?;
        within("output_bytes", self.output_bytes, 4096..=256 << 20)?;
        within("watches", self.watches.into(), 1..=1 << 20)?;
        within("lease_grace_seconds", self.lease_grace_seconds, 1..=3600)
    }
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
    /// Only what was issued up to a moment: what is issued later counts.
    Earlier(Earlier),
}

/// What was issued under a grant, through a session or to a principal, up to a moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Earlier {
    pub of: IssuedTo,
    pub value: String,
    /// The latest `iat` that no longer counts, in Unix seconds.
    pub issued_by: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IssuedTo {
    Grant,
    Session,
    Principal,
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
