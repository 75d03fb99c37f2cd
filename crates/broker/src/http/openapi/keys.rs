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
        keyed("post", "/v1/keys", "createKey", "Make an API key")
            .about("The one answer that carries the key.")
            .takes::<CreateKey>()
            .gives::<CreatedKey>(201, "The key."),
        keyed("get", "/v1/keys", "listKeys", "List the keys of all workspaces")
            .with(page_of())
            .gives::<Page<KeyInfo>>(200, "A page, newest first."),
        keyed("get", "/v1/keys/{id}", "getKey", "Look at a key")
            .with([key_id()])
            .gives::<KeyInfo>(200, "All but the key.")
            .fails(&[KeyNotFound]),
        keyed("patch", "/v1/keys/{id}", "expireKey", "Say when a key ends")
            .with([key_id()])
            .about("An operator's last key that doesn't expire stays as it is.")
            .takes::<ExpireKey>()
            .gives::<KeyInfo>(200, "The key with its new end.")
            .fails(&[KeyNotFound]),
        keyed("delete", "/v1/keys/{id}", "revokeKey", "End a key and the tokens issued under it")
            .about("An operator's last key that doesn't expire stays, and the last one there is.")
            .with([key_id()])
            .gives_nothing(204, "It has ended.")
            .fails(&[KeyNotFound]),
        keyed("get", "/v1/principals", "listPrincipals", "List the principals of a workspace")
            .with([workspace()])
            .with(page_of())
            .gives::<Page<PrincipalInfo>>(200, "A page, by name."),
        keyed("post", "/v1/principals/{name}/disable", "disablePrincipal", "End every key, sign-in and token of a principal")
            .with([Parameter::path("name", "The principal's name."), workspace()])
            .gives_nothing(204, "It is shut out.")
            .fails(&[PrincipalNotFound]),
        keyed("post", "/v1/principals/{name}/enable", "enablePrincipal", "Let a principal in again")
            .about("What ended stays ended; new keys can be made.")
            .with([Parameter::path("name", "The principal's name."), workspace()])
            .gives_nothing(204, "It may come in again.")
            .fails(&[PrincipalNotFound]),
        keyed("get", "/v1/audit", "listAudit", "Who did what in your workspace")
            .with([Parameter::query("sandbox", "Only about this one: its id, also after its end, or its name.")])
            .with([Parameter::query("token", "Only about the token with this `jti`; not with `sandbox`.")])
            .with([Parameter::query("jti", "The same as `token`; send one of them.")])
            .with(page_of())
            .gives::<Page<AuditEntry>>(200, "A page, newest first.")
            .fails(&[SandboxNotFound]),
        keyed("get", "/v1/audit/heads", "auditHeads", "The last record of each chain, to be kept elsewhere")
            .gives::<AuditHeads>(200, "One for each broker that ever wrote."),
        keyed("get", "/v1/audit/links", "auditLinks", "A chain's records, oldest first")
            .with([
                Parameter::query("writer", "Whose chain.").required(),
                Parameter::query("after", "Only those with a higher number.").of(serde_json::json!({ "type": "integer", "minimum": 0 })),
                Parameter::query("limit", "Records of a page.")
                    .of(serde_json::json!({ "type": "integer", "minimum": 0, "maximum": 1000, "default": 1000 })),
            ])
            .gives::<Page<AuditLink>>(200, "A page; its `next_cursor` is the next `after`."),
    ];
    routes.into_iter().map(|route| route.tag("operators").fails(&[Forbidden])).collect()
}

fn key_id() -> Parameter {
    Parameter::path("id", "The key's id.").of(serde_json::json!({ "$ref": "#/components/schemas/KeyId" }))
}

fn workspace() -> Parameter {
    Parameter::query("workspace", "Of which workspace; your own unless told.")
}
