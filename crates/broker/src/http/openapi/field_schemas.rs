//! Schemas of fields that are parsed by hand, because they accept more than one shape.

use cobox_protocol::{key::PrincipalKind, schema};
use schemars::{Schema, SchemaGenerator, json_schema};

pub fn mode(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"], "enum": ["get", "attach_only", "ensure", "create_only", null] })
}

pub fn token_format(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"], "enum": ["jwt", "opaque", null] })
}

/// A string, or `{type, id}`.
pub fn actor(generator: &mut SchemaGenerator) -> Schema {
    let kind = generator.subschema_for::<PrincipalKind>();
    let id = schema::optional_external_id(generator);
    json_schema!({ "anyOf": [
        kind,
        { "type": "object", "required": ["type"], "properties": { "type": kind, "id": id } },
        { "type": "null" },
    ] })
}

/// Capabilities in either spelling.
pub fn capabilities(_: &mut SchemaGenerator) -> Schema {
    let words = ["fs_read", "fs_write", "exec", "shell", "shell_observe", "snapshot", "ports", "fs:ro", "fs:rw", "shell:ro", "process"];
    json_schema!({ "type": ["array", "null"], "items": { "type": "string", "enum": words } })
}

/// An object of strings. Some languages write an empty object as an empty list.
pub fn tags(generator: &mut SchemaGenerator) -> Schema {
    let tags = schema::tags(generator);
    json_schema!({ "anyOf": [
        tags,
        { "type": "array", "maxItems": 0 },
        { "type": "null" },
    ] })
}

/// A sandbox's name or id. Some clients leave out a field by sending an empty string.
pub fn sandbox(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "anyOf": [{ "type": "string", "pattern": schema::SANDBOX_NAME }, { "type": "string", "maxLength": 0 }, { "type": "null" }] })
}
