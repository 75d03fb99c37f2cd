//! JSON schemas of types that are strings on the wire: ids, capabilities, error codes, timestamps, secrets.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::{
    Capability, CapabilitySet, CommandId, ErrorCode, EventId, KeyId, PoolId, RequestId, SandboxId, Secret, SessionId, ShareId, ShellId,
    SnapshotId, Timestamp, TokenId, VolumeId,
    tags::{MAX_TAG_KEY, MAX_TAG_VALUE, MAX_TAGS},
};

/// Pattern of thread ids, principal names and similar ids.
pub const NO_CONTROL_CHARACTERS: &str = r"^[^\x00-\x1f\x7f-\x9f]+$";

/// Schema of a string that satisfies [`crate::id::is_external_id`].
pub fn external_id(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": crate::id::MAX_EXTERNAL_ID_CHARS, "pattern": NO_CONTROL_CHARACTERS })
}

pub fn optional_external_id(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = external_id(generator);
    schema.insert("type".to_owned(), serde_json::json!(["string", "null"]));
    schema
}

/// Pattern of a sandbox's name; see [`crate::sandbox::is_sandbox_name`].
pub const SANDBOX_NAME: &str = "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}$";

/// Schema of tags that satisfy [`crate::tags::check`].
pub fn tags(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": MAX_TAGS,
        "propertyNames": { "pattern": format!("^[A-Za-z0-9_./-]{{1,{MAX_TAG_KEY}}}$") },
        "additionalProperties": { "type": "string", "maxLength": MAX_TAG_VALUE, "pattern": r"^[^\x00-\x1f\x7f-\x9f]*$" },
    })
}

macro_rules! ids {
    ($($name:ident = $prefix:literal;)*) => {$(
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }
            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": concat!("^", $prefix, "_[0-7][0-9a-hjkmnp-tv-z]{25}$") })
            }
        }
    )*};
}

ids! {
    SessionId = "ssn";
    SandboxId = "sb";
    TokenId = "tok";
    KeyId = "key";
    ShellId = "sh";
    ShareId = "shr";
    EventId = "evt";
    CommandId = "cmd";
    SnapshotId = "snap";
    VolumeId = "vol";
    PoolId = "pool";
}

impl JsonSchema for RequestId {
    fn schema_name() -> Cow<'static, str> {
        "RequestId".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$" })
    }
}

impl JsonSchema for Timestamp {
    fn schema_name() -> Cow<'static, str> {
        "Timestamp".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "date-time", "description": "RFC 3339, in UTC with `Z`.", "examples": ["2026-02-27T20:20:00Z"] })
    }
}

impl JsonSchema for Secret {
    fn schema_name() -> Cow<'static, str> {
        "Secret".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "password" })
    }
}

impl JsonSchema for ErrorCode {
    fn schema_name() -> Cow<'static, str> {
        "ErrorCode".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let codes: Vec<&str> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
        json_schema!({ "type": "string", "enum": codes, "description": "Stable. Later versions may add codes." })
    }
}

impl JsonSchema for Capability {
    fn schema_name() -> Cow<'static, str> {
        "Capability".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "enum": Capability::ALL.map(Capability::as_str) })
    }
}

impl JsonSchema for CapabilitySet {
    fn schema_name() -> Cow<'static, str> {
        "CapabilitySet".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let capability = generator.subschema_for::<Capability>();
        json_schema!({ "type": "array", "items": capability, "uniqueItems": true, "description": "`shell` implies `shell_observe`." })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern<T: JsonSchema>() -> String {
        schemars::schema_for!(T).get("pattern").and_then(|p| p.as_str()).unwrap().to_owned()
    }

    #[test]
    fn the_schema_of_an_id_has_its_prefix() {
        // The schemas repeat the prefixes of `id.rs`; every new id type must be added to both.
        for (pattern, id) in [
            (pattern::<SessionId>(), SessionId::new().to_string()),
            (pattern::<SandboxId>(), SandboxId::new().to_string()),
            (pattern::<TokenId>(), TokenId::new().to_string()),
            (pattern::<KeyId>(), KeyId::new().to_string()),
            (pattern::<ShellId>(), ShellId::new().to_string()),
            (pattern::<CommandId>(), CommandId::new().to_string()),
            (pattern::<SnapshotId>(), SnapshotId::new().to_string()),
            (pattern::<VolumeId>(), VolumeId::new().to_string()),
            (pattern::<PoolId>(), PoolId::new().to_string()),
        ] {
            assert!(pattern.starts_with(&format!("^{}_", id.split('_').next().unwrap())), "{pattern} {id}");
        }
    }
}
