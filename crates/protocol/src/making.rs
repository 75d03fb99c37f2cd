//! What sandboxes are made of: resources, environment and mounts, and the templates that name them together.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use crate::{ApiError, SandboxId, SnapshotId, Timestamp, VolumeId, json, session::Access};

/// Variables of one sandbox: more is a file.
pub const MAX_VARIABLES: usize = 256;
/// Names and values together, in bytes: well within what the kernel takes beside a program's arguments.
pub const MAX_ENV_BYTES: usize = 64 << 10;
/// Volumes mounted in one sandbox.
pub const MAX_MOUNTS: usize = 8;
/// Longest path of a mount, in bytes.
const MAX_MOUNT_PATH: usize = 1024;
/// What a sandbox has there already.
const TAKEN: [&str; 11] = ["/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/run"];

/// Processors' worth of time, in thousandths; a number of processors on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cpus(pub u32);

impl Cpus {
    pub fn count(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
    pub fn from_count(count: f64) -> Option<Self> {
        let millis = (count * 1000.0).round();
        // Checked to fit.
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
        /// Settings say `2`, JSON may say `2.0`.
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
        schemars::json_schema!({ "type": "number", "minimum": 0.001, "maximum": 1024, "description": "Processors' worth of time." })
    }
}

/// What a sandbox may use; what is left out is the provider's to say.
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
    /// Processes and threads at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
}

impl Resources {
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// What is said here, and where nothing is, what is said there.
    pub fn or(&self, other: &Self) -> Self {
        Self {
            cpus: self.cpus.or(other.cpus),
            memory_bytes: self.memory_bytes.or(other.memory_bytes),
            disk_bytes: self.disk_bytes.or(other.disk_bytes),
            processes: self.processes.or(other.processes),
        }
    }
}

/// Variables every program of a sandbox starts with. Its `Debug` has their names alone: people put secrets there.
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
            return Err(ApiError::invalid(format!("env: {} variables are too many; at most {MAX_VARIABLES} are kept", self.0.len())));
        }
        let bytes: usize = self.0.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        if bytes > MAX_ENV_BYTES {
            return Err(ApiError::invalid(format!("env: {bytes} bytes are too many; at most {MAX_ENV_BYTES} are kept")));
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

/// A volume in a sandbox, by its name or id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MountWish {
    pub volume: String,
    /// Where it is in the sandbox, absolute.
    pub path: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
}

/// Whether volumes can be at these places.
pub fn check_mounts(mounts: &[MountWish]) -> Result<(), ApiError> {
    if mounts.len() > MAX_MOUNTS {
        return Err(ApiError::invalid(format!("mounts: {} are too many; a sandbox has at most {MAX_MOUNTS}", mounts.len())));
    }
    for (index, mount) in mounts.iter().enumerate() {
        let path = mount.path.as_str();
        let refused = |why: &str| Err(ApiError::invalid(format!("mounts[{index}].path: {why}")));
        let has_odd_part = path.split('/').skip(1).any(|part| part.is_empty() || part == "." || part == "..");
        if !path.starts_with('/') || path.len() > MAX_MOUNT_PATH || has_odd_part || path.chars().any(char::is_control) {
            return refused("must be an absolute path such as /data, without `.`, `..` or a slash at the end");
        }
        let is_below = |path: &str, other: &str| path == other || path.strip_prefix(other).is_some_and(|rest| rest.starts_with('/'));
        if let Some(taken) = TAKEN.into_iter().find(|taken| is_below(path, taken)) {
            return refused(&format!("is {taken} or below it, which a sandbox has already"));
        }
        if mounts[..index].iter().any(|other| is_below(path, &other.path) || is_below(&other.path, path)) {
            return refused("is the place of another mount, or below or above it");
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
    /// What `/` starts as: an image the provider has. Left out: what it gives everybody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(default, skip_serializing_if = "Resources::is_default", deserialize_with = "json::object")]
    pub resources: Resources,
    #[serde(default, skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "json::objects")]
    pub mounts: Vec<MountWish>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TemplateInfo {
    pub name: String,
    /// Whether it stands in the broker's settings and so is everybody's, and can't be changed here.
    pub is_operators: bool,
    pub provider: Option<String>,
    pub image: Option<String>,
    pub resources: Resources,
    pub env: Env,
    pub mounts: Vec<MountWish>,
    /// Who made it; nobody where it stands in the settings.
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
    /// `latest` unless told. One that is there is moved to the new snapshot.
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
    /// Nobody can start from it any more; its files go when nothing stands on them.
    Deleting,
}

impl SnapshotState {
    pub const fn word(self) -> &'static str {
        match self {
            SnapshotState::Building => "building",
            SnapshotState::Ready => "ready",
            SnapshotState::Failed => "failed",
            SnapshotState::Deleting => "deleting",
        }
    }
    pub fn from_word(w: &str) -> Option<Self> {
        use SnapshotState::*;
        [Building, Ready, Failed, Deleting].into_iter().find(|s| s.word() == w)
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SnapshotInfo {
    pub id: SnapshotId,
    pub name: String,
    pub tag: String,
    pub state: SnapshotState,
    /// Why it failed, when it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What it was taken from; nothing where it is an image.
    pub sandbox_id: Option<SandboxId>,
    pub image: Option<String>,
    /// What it takes on disk, when that is known.
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
    /// The sandboxes that have it mounted.
    pub sandboxes: Vec<SandboxId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_numbers_of_any_kind() {
        let read = |text: &str| serde_json::from_str::<Cpus>(text).ok();
        assert_eq!((read("2"), read("0.5"), read("1.25")), (Some(Cpus(2000)), Some(Cpus(500)), Some(Cpus(1250))));
        assert_eq!((read("0"), read("-1"), read("1e9"), read("\"2\"")), (None, None, None, None));
        assert_eq!(serde_json::to_string(&Cpus(500)).unwrap(), "0.5");
    }

    #[test]
    fn a_mount_is_where_nothing_else_is() {
        let at = |paths: &[&str]| {
            let mounts: Vec<_> = paths.iter().map(|p| MountWish { volume: "v".into(), path: (*p).into(), read_only: false }).collect();
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
    fn a_variables_value_is_not_shown_to_who_debugs() {
        let env = Env([("TOKEN".to_owned(), "hidden".to_owned())].into());
        assert_eq!(format!("{env:?}"), "{\"TOKEN\"}");
        env.check().unwrap();
        for name in ["", "A=B", "A\0"] {
            assert!(Env([(name.to_owned(), String::new())].into()).check().is_err());
        }
        assert!(Env([("A".to_owned(), "x".repeat(MAX_ENV_BYTES))].into()).check().is_err());
    }
}
