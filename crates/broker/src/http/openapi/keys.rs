//! `/v1/keys` and `/v1/audit`: for operators.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    audit::AuditEntry,
    key::{CreateKey, CreatedKey, KeyInfo},
    session::Page,
};

use super::{keyed, page_of};

pub fn routes() -> Vec<Operation> {
    let routes = vec![
        keyed("post", "/v1/keys", "createKey", "Make an API key")
            .about("The one answer that carries the key.")
            .takes::<CreateKey>()
            .gives::<CreatedKey>(201, "The key."),
        keyed("get", "/v1/keys", "listKeys", "List the keys of all workspaces")
            .with(page_of())
            .gives::<Page<KeyInfo>>(200, "A page, newest first."),
        keyed("delete", "/v1/keys/{id}", "revokeKey", "End a key and the tokens issued under it")
            .with([Parameter::path("id", "The key's id.").of(serde_json::json!({ "$ref": "#/components/schemas/KeyId" }))])
            .gives_nothing(204, "It has ended.")
            .fails(&[KeyNotFound]),
        keyed("get", "/v1/audit", "listAudit", "Who did what in your workspace")
            .with([Parameter::query("sandbox", "Only about this one: its id, also after its end, or its name.")])
            .with(page_of())
            .gives::<Page<AuditEntry>>(200, "A page, newest first.")
            .fails(&[SandboxNotFound]),
    ];
    routes.into_iter().map(|route| route.tag("operators").fails(&[Forbidden])).collect()
}
