//! Resources of sandboxes: limits, environment and mounts, and the templates, snapshots and volumes that provide them.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::{ApiError, SandboxId, SnapshotId, Timestamp, VolumeId, id::UnknownName, json, session::Access};

/// Maximum number of environment variables of a sandbox; larger sets belong in a file.
pub const MAX_VARIABLES: usize = 256;
/// Maximum size of all names and values together, in bytes: well within the kernel's limit for arguments and environment.
pub const MAX_ENV_BYTES: usize = 64 << 10;
/// Maximum number of volumes mounted in one sandbox.
pub const MAX_MOUNTS: usize = 8;
/// Maximum length of a mount path, in bytes.
const MAX_MOUNT_PATH: usize = 1024;
/// Directories that exist in every sandbox; a volume cannot be mounted at or below them.
const RESERVED_PATHS: [&str; 11] = ["/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/run"];

/// CPU limit in thousandths of a processor; a number of processors on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cpus(pub u32);

impl Cpus {
    pub fn count(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
    pub fn from_count(count: f64) -> Option<Self> {
        let millis = (count * 1000.0).round();
        // The range check makes the cast lossless.
        (1.0..=1_024_000.0).contains(&millis).then_some(Self(millis as u32))
    }
}

impl Serialize for Cpus {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_f64(self.count())
    }
}

impl<'de> Deserialize<'de> for Cpus {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        /// TOML settings have `2`, JSON may have `2.0`.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Number {
            Whole(u32),
            Fraction(f64),
        }
        let count = match Number::deserialize(d).map_err(|_| D::Error::custom("a number of processors, such as 0.5 or 2"))? {
            Number::Whole(count) => f64::from(count),
            Number::Fraction(count) => count,
        };
        Self::from_count(count).ok_or_else(|| D::Error::custom("from 0.001 to 1024 processors"))
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Cpus {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Cpus".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "number", "minimum": 0.001, "maximum": 1024, "description": "Number of processors." })
    }
}

/// Resource limits of a sandbox. The provider chooses the limits that are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Resources {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<Cpus>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Maximum number of processes and threads at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
}

impl Resources {
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// These limits, completed by those of `other`.
    pub fn or(&self, other: &Self) -> Self {
        Self {
            cpus: self.cpus.or(other.cpus),
            memory_bytes: self.memory_bytes.or(other.memory_bytes),
            disk_bytes: self.disk_bytes.or(other.disk_bytes),
            processes: self.processes.or(other.processes),
        }
    }
}

/// Environment variables of every program in a sandbox. `Debug` prints only their names, because values may be secrets.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Env(pub BTreeMap<String, String>);

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Env {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn check(&self) -> Result<(), ApiError> {
        if self.0.len() > MAX_VARIABLES {
            return Err(ApiError::invalid(format!("env: {} variables are too many; the maximum is {MAX_VARIABLES}", self.0.len())));
        }
        let bytes: usize = self.0.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        if bytes > MAX_ENV_BYTES {
            return Err(ApiError::invalid(format!("env: {bytes} bytes are too many; the maximum is {MAX_ENV_BYTES}")));
        }
        for (name, value) in &self.0 {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                let shown: String = name.escape_default().take(64).collect();
                return Err(ApiError::invalid(format!("env: `{shown}` can't be a variable (no `=` in its name, no NUL)")));
            }
        }
        Ok(())
    }
}

/// A volume to mount in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "MountWish"))]
#[serde(deny_unknown_fields)]
pub struct MountParams {
    /// Name or id of the volume.
    pub volume: String,
    /// Absolute mount path in the sandbox.
    pub path: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// Checks that the mount paths are valid, not reserved and not nested.
pub fn check_mounts(mounts: &[MountParams]) -> Result<(), ApiError> {
    if mounts.len() > MAX_MOUNTS {
        return Err(ApiError::invalid(format!("mounts: {} are too many; the maximum is {MAX_MOUNTS}", mounts.len())));
    }
    for (index, mount) in mounts.iter().enumerate() {
        let path = mount.path.as_str();
        let refused = |why: &str| Err(ApiError::invalid(format!("mounts[{index}].path: {why}")));
        let has_odd_part = path.split('/').skip(1).any(|part| part.is_empty() || part == "." || part == "..");
        if !path.starts_with('/') || path.len() > MAX_MOUNT_PATH || has_odd_part || path.chars().any(char::is_control) {
            return refused("must be an absolute path such as /data, without `.`, `..` or a slash at the end");
        }
        let is_below = |path: &str, other: &str| path == other || path.strip_prefix(other).is_some_and(|rest| rest.starts_with('/'));
        if let Some(reserved) = RESERVED_PATHS.into_iter().find(|reserved| is_below(path, reserved)) {
            return refused(&format!("is {reserved} or below it, which exists in every sandbox"));
        }
        if mounts[..index].iter().any(|other| is_below(path, &other.path) || is_below(&other.path, path)) {
            return refused("is the path of another mount, or above or below it");
        }
    }
    Ok(())
}

/// `POST /v1/templates`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateTemplate {
    /// Unique in the workspace, and not one of the operator's.
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    pub name: String,
    /// Where its sandboxes run; any provider that there is, when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// Root file system: an image that the provider has. Absent for the provider's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(default, skip_serializing_if = "Resources::is_default", deserialize_with = "json::object")]
    pub resources: Resources,
    #[serde(default, skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "json::objects")]
    pub mounts: Vec<MountParams>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TemplateInfo {
    pub name: String,
    /// Whether the template is defined in the broker's configuration. Such a template is visible to everyone and cannot be changed
    /// through the API.
    pub is_operators: bool,
    pub provider: Option<String>,
    pub image: Option<String>,
    pub resources: Resources,
    pub env: Env,
    pub mounts: Vec<MountParams>,
    /// Principal that created it; absent for a template of the broker's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Timestamp>,
}

/// `POST /v1/sandboxes/{id or name}/snapshots`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TakeSnapshot {
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    pub name: String,
    /// `latest` by default. An existing tag is moved to the new snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotState {
    Building,
    Ready,
    Failed,
    /// No sandbox can start from it any more; its files are removed when nothing depends on them.
    Deleting,
}

impl SnapshotState {
    pub const fn as_str(self) -> &'static str {
        match self {
            SnapshotState::Building => "building",
            SnapshotState::Ready => "ready",
            SnapshotState::Failed => "failed",
            SnapshotState::Deleting => "deleting",
        }
    }
}

impl FromStr for SnapshotState {
    type Err = UnknownName;
    fn from_str(s: &str) -> Result<Self, UnknownName> {
        [Self::Building, Self::Ready, Self::Failed, Self::Deleting]
            .into_iter()
            .find(|v| v.as_str() == s)
            .ok_or_else(|| UnknownName::new(s, "snapshot state"))
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SnapshotInfo {
    pub id: SnapshotId,
    pub name: String,
    pub tag: String,
    pub state: SnapshotState,
    /// Reason of a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Sandbox that the snapshot was taken from; `null` for an image.
    pub sandbox_id: Option<SandboxId>,
    pub image: Option<String>,
    /// Size on disk, if known.
    pub size_bytes: Option<u64>,
    pub provider: String,
    pub owner: String,
    pub access: Access,
    pub created_at: Timestamp,
}

/// `POST /v1/volumes`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    #[cfg_attr(feature = "schema", schemars(regex(pattern = crate::schema::SANDBOX_NAME)))]
    pub name: String,
    pub size_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VolumeInfo {
    pub id: VolumeId,
    pub name: String,
    pub size_bytes: u64,
    pub provider: String,
    pub owner: String,
    pub access: Access,
    pub created_at: Timestamp,
    /// Sandboxes that mount the volume.
    pub sandboxes: Vec<SandboxId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_counts_accept_integers_and_fractions() {
        let read = |text: &str| serde_json::from_str::<Cpus>(text).ok();
        assert_eq!((read("2"), read("0.5"), read("1.25")), (Some(Cpus(2000)), Some(Cpus(500)), Some(Cpus(1250))));
        assert_eq!((read("0"), read("-1"), read("1e9"), read("\"2\"")), (None, None, None, None));
        assert_eq!(serde_json::to_string(&Cpus(500)).unwrap(), "0.5");
    }

    #[test]
    fn mount_paths_must_be_absolute_unreserved_and_not_nested() {
        let at = |paths: &[&str]| {
            let mounts: Vec<_> = paths.iter().map(|p| MountParams { volume: "v".into(), path: (*p).into(), read_only: false }).collect();
            check_mounts(&mounts).map_err(|e| e.message)
        };
        at(&["/data", "/workspace/cache", "/database"]).unwrap();
        for bad in ["data", "/", "/a/", "/a//b", "/a/../b", "/proc", "/usr/local", "/dev/shm", "/a\n", ""] {
            assert!(at(&[bad]).unwrap_err().starts_with("mounts[0].path: "), "{bad}");
        }
        assert!(at(&["/data", "/data/inner"]).is_err() && at(&["/data/inner", "/data"]).is_err() && at(&["/d", "/d"]).is_err());
        assert!(at(&["/0", "/1", "/2", "/3", "/4", "/5", "/6", "/7", "/8"]).is_err());
    }

    #[test]
    fn debug_output_of_env_has_no_values() {
        let env = Env([("TOKEN".to_owned(), "hidden".to_owned())].into());
        assert_eq!(format!("{env:?}"), "{\"TOKEN\"}");
        env.check().unwrap();
        for name in ["", "A=B", "A\0"] {
            assert!(Env([(name.to_owned(), String::new())].into()).check().is_err());
        }
        assert!(Env([("A".to_owned(), "x".repeat(MAX_ENV_BYTES))].into()).check().is_err());
    }
}
