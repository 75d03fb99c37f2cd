//! OpenAPI operations of `/v1/keys` and `/v1/audit`, for operators.

use cobox_openapi::{Operation, Parameter};
use cobox_protocol::{
    ErrorCode::*,
    audit::{AuditEntry, AuditHeads, AuditLink},
    key::{CreateKey, CreatedKey, ExpireKey, KeyInfo, PrincipalInfo},
    session::Page,
};

use super::{keyed, page_of};

pub fn routes() -> Vec<Operation> {
    let routes = vec![
        keyed("post", "/v1/keys", "createKey", "Create an API key")
            .about("Only this response contains the key.")
            .request_body::<CreateKey>()
            .response::<CreatedKey>(201, "The new key."),
        keyed("get", "/v1/keys", "listKeys", "List the keys of all workspaces")
            .with(page_of())
            .response::<Page<KeyInfo>>(200, "A page, newest first."),
        keyed("get", "/v1/keys/{id}", "getKey", "Get a key")
            .with([key_id()])
            .response::<KeyInfo>(200, "The description of the key, without the key itself.")
            .errors(&[KeyNotFound]),
        keyed("patch", "/v1/keys/{id}", "expireKey", "Set the expiry of a key")
            .with([key_id()])
            .about("Refused if no operator key without an expiry would remain.")
            .request_body::<ExpireKey>()
            .response::<KeyInfo>(200, "The key with its new expiry.")
            .errors(&[KeyNotFound]),
        keyed("delete", "/v1/keys/{id}", "revokeKey", "Revoke a key and the tokens issued under it")
            .about("Refused for the last operator key, and if no operator key without an expiry would remain.")
            .with([key_id()])
            .empty_response(204, "Revoked.")
            .errors(&[KeyNotFound]),
        keyed("get", "/v1/principals", "listPrincipals", "List the principals of a workspace")
            .with([workspace()])
            .with(page_of())
            .response::<Page<PrincipalInfo>>(200, "A page, sorted by name."),
        keyed("post", "/v1/principals/{name}/disable", "disablePrincipal", "Disable a principal, and revoke its keys, sign-ins and tokens")
            .with([Parameter::path("name", "The principal's name."), workspace()])
            .empty_response(204, "Disabled.")
            .errors(&[PrincipalNotFound]),
        keyed("post", "/v1/principals/{name}/enable", "enablePrincipal", "Enable a disabled principal")
            .about("Revoked keys and tokens stay revoked; new keys can be created.")
            .with([Parameter::path("name", "The principal's name."), workspace()])
            .empty_response(204, "Enabled.")
            .errors(&[PrincipalNotFound]),
        keyed("get", "/v1/audit", "listAudit", "List the audit records of your workspace")
            .with([Parameter::query("sandbox", "Only records about this sandbox: its id, also after its end, or its name.")])
            .with([Parameter::query("token", "Only records about the token with this `jti`; not together with `sandbox`.")])
            .with([Parameter::query("jti", "The same as `token`; send one of them.")])
            .with(page_of())
            .response::<Page<AuditEntry>>(200, "A page, newest first.")
            .errors(&[SandboxNotFound]),
        keyed("get", "/v1/audit/heads", "auditHeads", "Get the last record of each audit chain, to be saved elsewhere")
            .response::<AuditHeads>(200, "One head for each broker that has written audit records."),
        keyed("get", "/v1/audit/links", "auditLinks", "List the records of an audit chain, oldest first")
            .with([
                Parameter::query("writer", "Broker that wrote the chain.").required(),
                Parameter::query("after", "Only records with a higher number.").of(serde_json::json!({ "type": "integer", "minimum": 0 })),
                Parameter::query("limit", "Maximum number of records in the page.")
                    .of(serde_json::json!({ "type": "integer", "minimum": 0, "maximum": 1000, "default": 1000 })),
            ])
            .response::<Page<AuditLink>>(200, "A page; its `next_cursor` is the `after` of the next page."),
    ];
    routes.into_iter().map(|route| route.tag("operators").errors(&[Forbidden])).collect()
}

fn key_id() -> Parameter {
    Parameter::path("id", "The key's id.").of(serde_json::json!({ "$ref": "#/components/schemas/KeyId" }))
}

fn workspace() -> Parameter {
    Parameter::query("workspace", "The workspace; the default is your own.")
}
