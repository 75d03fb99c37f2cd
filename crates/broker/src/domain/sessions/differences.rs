//! How an existing session or sandbox differs from what a request asks for. `ensure` refuses such a request: it would change nothing,
//! and its caller would believe that it did.

use cobox_protocol::{
    ApiError, ErrorCode,
    session::Access,
    text::{MAX_SHOWN_CHARS, printable},
};
use serde_json::json;

use super::negotiation::{ANY_PROVIDER, Negotiation};
use crate::domain::model::{Sandbox, Session, SessionWithSandbox};

/// A field of the request, with the requested and the actual value.
pub struct Difference {
    field: String,
    requested: String,
    actual: String,
}

impl Difference {
    fn new(field: impl Into<String>, requested: impl Into<String>, actual: impl Into<String>) -> Self {
        Self { field: field.into(), requested: requested.into(), actual: actual.into() }
    }

    fn sentence(&self) -> String {
        format!("{} is {}, not {}", self.field, self.actual, printable(&self.requested, MAX_SHOWN_CHARS))
    }
}

pub fn of_sandbox(params: &Negotiation, sandbox: &Sandbox) -> Vec<Difference> {
    let mut found = Vec::new();
    if let Some(template) = params.template.as_ref().filter(|requested| Some(*requested) != sandbox.template.as_ref()) {
        found.push(Difference::new("template", template, sandbox.template.as_deref().unwrap_or("none")));
    }
    if let Some(provider) = params.provider_preference.as_ref().filter(|p| ![ANY_PROVIDER, &sandbox.provider].contains(&p.as_str())) {
        found.push(Difference::new("provider", provider, &sandbox.provider));
    }
    // A sandbox with a name is kept in any case.
    if params.keep && !sandbox.is_kept && sandbox.name.is_none() {
        found.push(Difference::new("keep", "true", "false"));
    }
    found
}

/// Differences of a sandbox that a new session is to use. The session may be more private than the sandbox, but not less.
pub fn of_sandbox_to_attach(params: &Negotiation, sandbox: &Sandbox) -> Vec<Difference> {
    let mut found = of_sandbox(params, sandbox);
    if params.access == Some(Access::Workspace) && sandbox.access == Access::Owner {
        found.push(Difference::new("access", "workspace", "owner"));
    }
    found
}

/// Session and sandbox access are both checked on every use: the workspace has access only if both are `workspace`.
pub fn of_access(params: &Negotiation, bound: &SessionWithSandbox) -> Option<Difference> {
    let is_private = [bound.session.access, bound.sandbox.access].contains(&Access::Owner);
    match (params.access?, is_private) {
        (Access::Owner, false) => Some(Difference::new("access", "owner", "workspace")),
        (Access::Workspace, true) => Some(Difference::new("access", "workspace", "owner")),
        (Access::Owner, true) | (Access::Workspace, false) => None,
    }
}

pub fn conflict(session: &Session, sandbox: &Sandbox, differences: &[Difference]) -> ApiError {
    let Session { id, scope_type, scope_id, .. } = session;
    let message = format!(
        "{scope_type} `{scope_id}` already has a session, but its {}; leave this out to join it, or use another {scope_type}",
        sentences(differences)
    );
    let details = json!({ "session_id": id, "binding_id": id, "sandbox_id": sandbox.id, "differences": listed(differences) });
    ApiError::new(ErrorCode::SessionConflict, message).with_details(details)
}

/// Error about a sandbox that a new session would be attached to.
pub fn of_existing_sandbox(sandbox: &Sandbox, differences: &[Difference]) -> ApiError {
    let message = format!("sandbox {} already exists, but its {}; leave this out to use it", sandbox.id, sentences(differences));
    let details = json!({ "sandbox_id": sandbox.id, "differences": listed(differences) });
    ApiError::new(ErrorCode::SessionConflict, message).with_details(details)
}

fn sentences(differences: &[Difference]) -> String {
    differences.iter().map(Difference::sentence).collect::<Vec<_>>().join(", its ")
}

fn listed(differences: &[Difference]) -> Vec<serde_json::Value> {
    differences.iter().map(|d| json!({ "field": d.field, "requested": d.requested, "actual": d.actual })).collect()
}
