//! Who may do what: other workspaces see nothing, owners keep what they made for themselves, operators may help.

use cobox_protocol::{ApiError, CapabilitySet, ErrorCode, key::PrincipalKind, session::Access};

use super::model::{Principal, Sandbox, Session};

/// Anything with a workspace, an owner and an access rule.
pub trait Owned {
    fn workspace(&self) -> &str;
    fn owner(&self) -> &str;
    fn access(&self) -> Access;
}

impl Owned for Session {
    fn workspace(&self) -> &str {
        &self.workspace
    }
    fn owner(&self) -> &str {
        &self.owner
    }
    fn access(&self) -> Access {
        self.access
    }
}

impl Owned for Sandbox {
    fn workspace(&self) -> &str {
        &self.workspace
    }
    fn owner(&self) -> &str {
        &self.owner
    }
    fn access(&self) -> Access {
        self.access
    }
}

/// Whether it exists for this principal at all.
pub fn is_visible(principal: &Principal, thing: &impl Owned) -> bool {
    principal.workspace == thing.workspace()
}

pub fn may_use(principal: &Principal, thing: &impl Owned) -> Result<(), ApiError> {
    match thing.access() {
        Access::Workspace => Ok(()),
        Access::Owner if is_owner(principal, thing) || principal.is_operator() => Ok(()),
        Access::Owner => Err(ApiError::new(ErrorCode::Forbidden, "only the one who made it and operators may use it")),
    }
}

pub fn may_end(principal: &Principal, thing: &impl Owned) -> Result<(), ApiError> {
    if is_owner(principal, thing) || principal.is_operator() {
        Ok(())
    } else {
        Err(ApiError::new(ErrorCode::Forbidden, "only the one who made it and operators may end it"))
    }
}

pub fn must_be_operator(principal: &Principal) -> Result<(), ApiError> {
    if principal.is_operator() {
        Ok(())
    } else {
        Err(ApiError::new(ErrorCode::Forbidden, format!("{} is not an operator; only operators manage keys", principal.name)))
    }
}

fn is_owner(principal: &Principal, thing: &impl Owned) -> bool {
    principal.name == thing.owner() && is_visible(principal, thing)
}

/// Requested ∩ policy; nothing requested means the policy's default.
pub fn grant(principal: &Principal, requested: Option<&[String]>) -> Result<CapabilitySet, ApiError> {
    let policy = match principal.kind {
        PrincipalKind::Agent => CapabilitySet::AGENT_DEFAULT,
        PrincipalKind::Human | PrincipalKind::Operator => CapabilitySet::HUMAN_DEFAULT,
    };
    let Some(words) = requested else { return Ok(policy) };
    let wished = CapabilitySet::parse(words).map_err(|e| ApiError::invalid(format!("requested_capabilities: {e}")))?;
    let granted = wished.intersection(policy);
    if granted.is_empty() {
        return Err(ApiError::new(
            ErrorCode::CapabilityDenied,
            format!(
                "none of the requested capabilities is allowed for {} {}; allowed are {policy:?}",
                principal.kind.word(),
                principal.name
            ),
        ));
    }
    Ok(granted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn principal(kind: PrincipalKind) -> Principal {
        Principal { workspace: "w".into(), name: "n".into(), kind }
    }

    #[test]
    fn a_grant_is_what_was_asked_for_within_the_policy() {
        let agent = principal(PrincipalKind::Agent);
        assert_eq!(grant(&agent, None).unwrap(), CapabilitySet::AGENT_DEFAULT);
        assert_eq!(grant(&agent, Some(&["fs:rw".into(), "shell".into()])).unwrap().words(), ["fs_read", "fs_write", "shell_observe"]);
        assert_eq!(grant(&agent, Some(&["ports".into()])).unwrap_err().code, ErrorCode::CapabilityDenied);
        let unknown = grant(&agent, Some(&["root".into()])).unwrap_err();
        assert_eq!(unknown.code, ErrorCode::InvalidRequest);
        assert!(unknown.message.contains("`root`"));
    }
}
