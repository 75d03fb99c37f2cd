//! Requests and responses of the sandbox routes, `/v1/sandboxes`.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    SandboxId, SessionId, SnapshotId, Timestamp, json,
    resources::{Env, MountParams, Resources},
    session::{Access, State},
    tags::Tags,
};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateSandbox {
    /// Unique in the workspace: 1 to 63 letters, digits, `-`, `_` or `.`.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// Whether the sandbox is suspended, instead of ended, when its last session ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<bool>,
    #[serde(default, skip_serializing_if = "Tags::is_empty")]
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::tags"))]
    pub tags: Tags,
    /// Name of the template to create it from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Snapshot to start from, instead of the template's image: an id, `name` or `name:tag`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Each value replaces the template's.
    #[serde(default, skip_serializing_if = "Resources::is_default", deserialize_with = "json::object")]
    pub resources: Resources,
    /// Added to the template's variables, with precedence over them.
    #[serde(default, skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    /// Volumes, in addition to the template's.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "json::objects")]
    pub mounts: Vec<MountParams>,
    /// Idle time after which the sandbox is suspended. A shorter limit of the deployment takes precedence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_LIFETIME_SECONDS)))]
    pub lease_seconds: Option<u64>,
    /// Time in suspension after which the sandbox ends. A shorter limit of the deployment takes precedence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_LIFETIME_SECONDS)))]
    pub keep_suspended_seconds: Option<u64>,
}

/// Maximum `lease_seconds` and `keep_suspended_seconds` of a sandbox: ten years.
pub const MAX_LIFETIME_SECONDS: u64 = 3650 * 86_400;

/// `PATCH /v1/sandboxes/{id or name}`: absent fields remain unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PatchSandbox {
    /// `null` removes the name.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub name: Option<Option<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// Each tag is added or replaced; `null` removes it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, Option<String>>,
    /// `null` restores the deployment's default.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_LIFETIME_SECONDS)))]
    pub lease_seconds: Option<Option<u64>>,
    /// `null` restores the deployment's default.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_LIFETIME_SECONDS)))]
    pub keep_suspended_seconds: Option<Option<u64>>,
}

/// Distinguishes a field that is `null` from an absent one.
fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(d: D) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(d).map(Some)
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SandboxInfo {
    pub id: SandboxId,
    pub name: Option<String>,
    /// Whether an unnamed sandbox outlives its sessions.
    #[serde(default)]
    pub keep: bool,
    pub provider: String,
    pub state: State,
    /// Reason of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub owner: String,
    pub access: Access,
    pub created_at: Timestamp,
    pub last_active_at: Timestamp,
    pub lease_expires_at: Timestamp,
    pub http_base_url: String,
    pub ws_base_url: String,
    /// Sessions that use the sandbox.
    pub sessions: Vec<SessionId>,
    /// Threads of those sessions.
    pub threads: Vec<String>,
    #[serde(default)]
    pub tags: Tags,
    /// Template that the sandbox was created from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Snapshot that the sandbox started from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<SnapshotId>,
    /// Resource limits that were requested at its creation.
    #[serde(default, skip_serializing_if = "Resources::is_default", deserialize_with = "json::object")]
    pub resources: Resources,
    /// Requested idle limit; it applies if it is shorter than the deployment's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_suspended_seconds: Option<u64>,
    /// Time of its suspension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended_at: Option<Timestamp>,
    /// Time of its release or deletion; its files are still kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deleted_at: Option<Timestamp>,
    /// Time until which a deleted sandbox can be restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_until: Option<Timestamp>,
}

/// `POST /v1/sandboxes/{id or name}/restore`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RestoreSandbox {
    /// New name, if another sandbox now has the old one.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Response to a restore.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RestoreResponse {
    #[serde(flatten)]
    pub sandbox: SandboxInfo,
    /// Threads whose next session uses the sandbox again.
    #[serde(default)]
    pub returning_threads: Vec<String>,
    /// Threads that used the sandbox and have had another one since: they do not return to it.
    #[serde(default)]
    pub threads_elsewhere: Vec<String>,
}

/// `GET /v1/sandboxes/{id or name}/usage`: the data that a deletion would erase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SandboxUsage {
    /// Number of files written in the sandbox, without those of its image, snapshot and volumes; `null` if they cannot be counted.
    pub files: Option<u64>,
    /// Total size of those files.
    pub bytes: Option<u64>,
    /// False if the count stopped early and there are more files.
    pub complete: bool,
    /// Why the files cannot be counted, if they cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncounted: Option<Uncounted>,
    /// How long the sandbox could be restored if it were deleted now; 0 if it could not be.
    pub restorable_seconds: u64,
}

/// Why the files of a sandbox cannot be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Uncounted {
    /// They are on another node, and brokers need not reach each other by network.
    OtherNode,
    /// The provider cannot count them, or failed to.
    Provider,
    /// Sent by a newer broker.
    #[serde(other)]
    Unknown,
}

/// Whether a string is a valid sandbox name: a host name label, also with `_`, `.` and upper case. Ids are not valid names.
pub fn is_sandbox_name(s: &str) -> bool {
    (1..=63).contains(&s.len())
        && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !s.starts_with(['.', '-'])
        && !s.starts_with("sb_")
}
