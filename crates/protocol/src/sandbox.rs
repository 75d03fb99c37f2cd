//! Sandboxes themselves, with or without a session.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::{
    SandboxId, SessionId, SnapshotId, Timestamp, json,
    making::{Env, MountWish, Resources},
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
    /// It is suspended, not ended, when its last session ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<bool>,
    #[serde(default, skip_serializing_if = "Tags::is_empty")]
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::tags"))]
    pub tags: Tags,
    /// The name of a template to make it by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// A snapshot to start from, in place of what the template says: an id, `name` or `name:tag`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// In place of the template's, one by one.
    #[serde(default, skip_serializing_if = "Resources::is_default", deserialize_with = "json::object")]
    pub resources: Resources,
    /// Beside the template's, and before them.
    #[serde(default, skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    /// Volumes, beside the template's.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "json::objects")]
    pub mounts: Vec<MountWish>,
    /// Unused for so long it is suspended; the deployment's own limit counts where it is shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_OWN_SECONDS)))]
    pub lease_seconds: Option<u64>,
    /// Suspended for so long it ends; the deployment's own limit counts where it is shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_OWN_SECONDS)))]
    pub keep_suspended_seconds: Option<u64>,
}

/// Longest time a sandbox may wish for: ten years, in seconds.
pub const MAX_OWN_SECONDS: u64 = 3650 * 86_400;

/// `PATCH /v1/sandboxes/{id or name}`: what is left out stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PatchSandbox {
    /// `null` takes the name away.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub name: Option<Option<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// Added or replaced one by one; `null` takes one away.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tags: BTreeMap<String, Option<String>>,
    /// `null`: as long as others.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_OWN_SECONDS)))]
    pub lease_seconds: Option<Option<u64>>,
    /// `null`: as long as others.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "schema", schemars(range(min = 1, max = MAX_OWN_SECONDS)))]
    pub keep_suspended_seconds: Option<Option<u64>>,
}

/// Tells a field that is `null` from one that isn't there.
fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(d: D) -> Result<Option<Option<T>>, D::Error> {
    Option::<T>::deserialize(d).map(Some)
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SandboxInfo {
    pub id: SandboxId,
    pub name: Option<String>,
    /// Whether it outlives its sessions although it has no name.
    #[serde(default)]
    pub keep: bool,
    pub provider: String,
    pub state: State,
    /// Why it failed, when it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub owner: String,
    pub access: Access,
    pub created_at: Timestamp,
    pub last_active_at: Timestamp,
    pub lease_expires_at: Timestamp,
    pub http_base_url: String,
    pub ws_base_url: String,
    /// The sessions that use it.
    pub sessions: Vec<SessionId>,
    /// The threads of those sessions.
    pub threads: Vec<String>,
    #[serde(default)]
    pub tags: Tags,
    /// The template it was made by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The snapshot it started from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<SnapshotId>,
    /// What it may use, where that was said when it was made.
    #[serde(default, skip_serializing_if = "Resources::is_default", deserialize_with = "json::object")]
    pub resources: Resources,
    /// What it wished for, which counts where it is shorter than the deployment's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_suspended_seconds: Option<u64>,
    /// Since when it is suspended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended_at: Option<Timestamp>,
    /// When it was released or deleted: its files are still kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deleted_at: Option<Timestamp>,
    /// Until when a deleted one can be restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_until: Option<Timestamp>,
}

/// `POST /v1/sandboxes/{id or name}/restore`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RestoreSandbox {
    /// A name for it, where its old one is taken by now.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// `GET /v1/sandboxes/{id or name}/usage`: what deleting it would erase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SandboxUsage {
    /// Files that were written in it, without those of its image, snapshot and volumes; `null` where its provider can't count them.
    pub files: Option<u64>,
    /// Their size.
    pub bytes: Option<u64>,
    /// False where there are more than were counted.
    pub complete: bool,
    /// For how long it could be restored if it were deleted now; 0: not at all.
    pub restorable_seconds: u64,
}

/// A name people may give a sandbox: what also works as a host name's label, a little wider.
pub fn is_sandbox_name(s: &str) -> bool {
    (1..=63).contains(&s.len())
        && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        && !s.starts_with(['.', '-'])
        && !s.starts_with("sb_")
}
