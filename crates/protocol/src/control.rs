//! Messages between the broker and boxd: boxd's start configuration and the control channel.
//!
//! The broker always opens the connection, boxd never does. Everything received from boxd is reported by the sandbox and therefore
//! untrusted.

use serde::{Deserialize, Serialize};

use crate::{ApiError, ErrorCode, SandboxId, Secret, Timestamp};

/// Start configuration, which boxd reads from an inherited file descriptor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BoxdConfig {
    pub sandbox_id: SandboxId,
    pub state: ControlState,
    pub workload: Workload,
    pub limits: WorkloadLimits,
    #[serde(default)]
    pub dataplane: DataplaneLimits,
    /// Number of control groups that boxd must join; their file descriptors follow the other inherited ones.
    #[serde(default)]
    pub groups: u32,
}

/// User and environment of the programs in the sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Workload {
    pub uid: u32,
    pub gid: u32,
    pub user: String,
    pub home: String,
    /// Folder shared by human and agent, and the default working directory of every command.
    pub work_dir: String,
    /// Number of uids in the sandbox: one if an ordinary user started it, many if root did.
    pub uid_count: u32,
    /// Environment variables of every program; a request can override them.
    #[serde(default)]
    pub env: crate::resources::Env,
}

/// Limits that the kernel enforces for each process, for hosts without a cgroup that limits the sandbox as a whole.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkloadLimits {
    /// RLIMIT_NPROC.
    pub processes: u64,
    /// Set only without a memory cgroup: RLIMIT_DATA of each process, and the total for which boxd monitors all processes.
    pub memory_bytes: Option<u64>,
    /// RLIMIT_NOFILE.
    pub open_files: u64,
}

/// Limits for the clients of one sandbox. Requests beyond a limit are refused as retryable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataplaneLimits {
    /// Maximum concurrent connections. Further connections wait without an error, so clients should reach one of the limits below
    /// first.
    pub connections: u32,
    /// Maximum concurrent WebSockets and event streams.
    pub streams: u32,
    /// Maximum concurrent streams of one principal: below `streams`, so that one client leaves room for others.
    pub streams_per_principal: u32,
    /// Maximum concurrent commands.
    pub execs: u32,
    /// Maximum concurrent commands of one principal. Lower than `execs`, so that abandoned commands of one principal leave capacity for
    /// others.
    pub execs_per_principal: u32,
    /// How long a command without a timeout of its own, or on a terminal, runs on without a connected client.
    pub exec_unattended_seconds: u64,
    /// Maximum output kept on disk for reconnecting clients, for stdout and for stderr of each command.
    pub exec_spool_bytes: u64,
    /// How long the output of an ended command is kept.
    pub exec_retention_seconds: u64,
    /// Maximum number of ended commands whose output is kept; the oldest are dropped first.
    pub execs_kept: u32,
    /// Maximum memory for the output of ended commands, in addition to the disk. Fewer commands are kept if it is exceeded.
    pub exec_kept_memory_bytes: u64,
    /// Maximum concurrent shells.
    pub shells: u32,
    /// Size of a shell's output ring buffer in memory. A client that missed more receives a keyframe of the screen instead.
    pub shell_ring_bytes: u64,
    /// Lifetime of a shell without connected clients and without activity.
    pub shell_idle_seconds: u64,
    /// Maximum body of a JSON request.
    pub request_bytes: u64,
    /// Maximum command output in one response; streams and files can deliver more.
    pub output_bytes: u64,
    /// Maximum number of watched directories, over all watchers.
    pub watches: u32,
    /// How long boxd continues after its lease without a request from its broker, which may be restarting.
    pub lease_grace_seconds: u64,
}

impl Default for DataplaneLimits {
    fn default() -> Self {
        Self {
            connections: 1024,
            // Leaves connections for ordinary requests.
            streams: 768,
            streams_per_principal: 512,
            execs: 96,
            execs_per_principal: 64,
            // A laptop that changes networks reconnects within this time.
            exec_unattended_seconds: 600,
            exec_spool_bytes: 256 << 20,
            exec_retention_seconds: 300,
            execs_kept: 256,
            exec_kept_memory_bytes: 32 << 20,
            shells: 256,
            // More than two screens of a 4K terminal; a thousand shells still fit in 512 MiB.
            shell_ring_bytes: 256 << 10,
            shell_idle_seconds: 4 * 3600,
            // Includes a command's standard input.
            request_bytes: 16 << 20,
            output_bytes: 16 << 20,
            // A large repository. The kernel allows a user some ten thousand, and programs in the sandbox need some too.
            watches: 16_384,
            // Covers the restart of a broker that has many sandboxes to adopt.
            lease_grace_seconds: 60,
        }
    }
}

impl DataplaneLimits {
    /// Returns an error that names the first limit out of range, before a sandbox starts with it.
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

/// Complete state with which boxd decides requests. Each control push replaces the previous one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ControlState {
    /// Incremented with each push, so that an older push never replaces a newer one.
    pub version: u64,
    pub issuer: String,
    pub keys: Vec<VerifyKeySpec>,
    pub revoked: Vec<Revocation>,
    /// boxd ends itself after this time if it has received no request from a broker.
    pub lease_expires_at: Timestamp,
    /// The disk quota is used up: writers are stopped until files are deleted.
    #[serde(default)]
    pub disk_full: bool,
    /// Set in the last push before the processes end: connected clients receive the reason, and new clients are refused.
    #[serde(rename = "ending", default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
}

/// Why a sandbox's processes are about to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The sandbox ended permanently.
    Ended,
    /// The next use starts the sandbox again.
    Suspended,
}

impl StopReason {
    /// The error for requests and streams in progress.
    pub fn error(self) -> ApiError {
        match self {
            StopReason::Ended => ApiError::new(ErrorCode::SessionExpired, "the sandbox has ended; ensure a new session"),
            StopReason::Suspended => {
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

/// A revoked token, or a set of revoked tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "value", rename_all = "snake_case")]
pub enum Revocation {
    Jti(String),
    Grant(String),
    Session(String),
    Principal(String),
    /// Revokes only tokens issued up to a point in time; later ones remain valid.
    #[serde(rename = "earlier")]
    IssuedBefore(IssuedBefore),
}

/// Tokens of a grant, session or principal that were issued up to a point in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IssuedBefore {
    pub of: IssuedTo,
    pub value: String,
    /// Latest revoked `iat`, in Unix seconds.
    pub issued_by: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IssuedTo {
    Grant,
    Session,
    Principal,
}

/// boxd's answer to a status request of the broker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BoxdStatus {
    pub sandbox_id: SandboxId,
    pub state_version: u64,
    /// Authenticated requests so far. The broker detects activity by comparing it with the previous value.
    pub requests: u64,
    pub open_streams: u32,
    pub version: String,
}
