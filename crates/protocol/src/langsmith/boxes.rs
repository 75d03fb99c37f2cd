//! Requests and responses of the LangSmith SDKs' sandbox API, which calls sandboxes boxes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::exec::RunConfig;
use crate::{SandboxId, Secret, Timestamp};

/// `POST /boxes`. Accepts every field that any version of the SDKs sends; an unsupported field is refused by name.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateBox {
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether the response waits until the box runs; true by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_for_ready: Option<bool>,
    /// Seconds to wait for readiness; 30 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_name: Option<String>,
    /// Idle time after which the box stops; 0 for the deployment's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ttl_seconds: Option<u64>,
    /// Time after a stop until the box is deleted; 0 for the deployment's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delete_after_stop_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_millicores: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs_capacity_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_config: Option<RunConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// Tags of the box.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<BoxVolume>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_config: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_config: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_delegation: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preserve_memory_on_stop: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_memory: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag_value_ids: Option<Vec<String>>,
}

/// A volume mounted in a box.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BoxVolume {
    pub volume: String,
    pub mount_path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// `PATCH /boxes/{name}`.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PatchBox {
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ttl_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delete_after_stop_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_config: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_config: Option<RunConfig>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "BoxStatusWord"))]
#[serde(rename_all = "snake_case")]
pub enum BoxState {
    Provisioning,
    Ready,
    Failed,
    Stopped,
    Deleting,
}

/// Current state of a box.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxInfo {
    pub id: SandboxId,
    /// Name, or the id of an unnamed box. A path accepts either.
    pub name: String,
    pub status: BoxState,
    pub status_message: Option<String>,
    /// Base URL without a trailing slash; constant for the life of the box.
    pub dataplane_url: String,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub stopped_at: Option<Timestamp>,
    pub created_by: String,
    pub idle_ttl_seconds: Option<u64>,
    pub delete_after_stop_seconds: Option<u64>,
    pub template_name: Option<String>,
    pub snapshot_id: Option<String>,
    pub vcpus: Option<f64>,
    pub mem_bytes: Option<u64>,
    pub fs_capacity_bytes: Option<u64>,
    pub labels: BTreeMap<String, String>,
    /// Always true: files survive a stop.
    pub persistent: bool,
}

/// `GET /boxes`: the same list twice, under the field names of the hand-written and of the generated clients.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxList {
    pub sandboxes: Vec<BoxInfo>,
    pub items: Vec<BoxInfo>,
    pub next_cursor: Option<String>,
    pub offset: u64,
}

/// `GET /boxes/{name}/status`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct BoxStatus {
    pub status: BoxState,
    pub status_message: Option<String>,
}

/// `POST /boxes/{name}/download-url`.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct DownloadUrlRequest {
    /// A relative path starts at the shared folder.
    pub path: String,
    /// 900 by default, which is also the maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_disposition: Option<String>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DownloadUrl {
    /// Anyone with this URL can read the file: treat it as a secret.
    pub download_url: Secret,
    /// The URL's token alone.
    pub token: Secret,
    pub expires_at: Timestamp,
}
