//! Access rules: other workspaces see nothing, owners control what they keep to themselves, operators may help with
//! anything.

use cobox_protocol::{ApiError, CapabilitySet, ErrorCode, key::PrincipalKind, session::Access};
use cobox_token::Actor;
use serde::Serialize;

use crate::{
    domain::model::{Caller, Principal, Sandbox, Session},
    policy::Policy,
};

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

/// Whether the item exists at all for this principal.
pub fn is_visible(principal: &Principal, thing: &impl Owned) -> bool {
    principal.workspace == thing.workspace()
}

pub fn may_use(principal: &Principal, thing: &impl Owned) -> Result<(), ApiError> {
    match thing.access() {
        Access::Workspace => Ok(()),
        Access::Owner if is_owner(principal, thing) || principal.is_operator() => Ok(()),
        Access::Owner => {
            Err(ApiError::new(ErrorCode::Forbidden, "only its owner, principals that it is shared with, and operators may use it"))
        }
    }
}

pub fn may_end(principal: &Principal, thing: &impl Owned) -> Result<(), ApiError> {
    if is_owner(principal, thing) || principal.is_operator() {
        Ok(())
    } else {
        Err(ApiError::new(ErrorCode::Forbidden, "only its owner and operators may end or change it"))
    }
}

pub fn must_be_operator(principal: &Principal, to: &str) -> Result<(), ApiError> {
    if principal.is_operator() {
        Ok(())
    } else {
        Err(ApiError::new(ErrorCode::Forbidden, format!("{} is not an operator; only operators may {to}", principal.name)))
    }
}

fn is_owner(principal: &Principal, thing: &impl Owned) -> bool {
    principal.name == thing.owner() && is_visible(principal, thing)
}

/// The actor on whose behalf a caller wants to act.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ActorParams {
    pub kind: PrincipalKind,
    pub id: Option<String>,
}

/// Returns the caller acting as the requested actor: itself or an actor of a lower kind, which then limits the grant.
pub fn act(caller: &Caller, params: Option<&ActorParams>) -> Result<Caller, ApiError> {
    let (principal, Some(params)) = (&caller.principal, params) else { return Ok(caller.clone()) };
    let refused = |why: String| Err(ApiError::new(ErrorCode::Forbidden, format!("actor: {why}")));
    if rank(params.kind) > rank(principal.kind) {
        return refused(format!("{} is {}, which can't act as {}", principal.name, principal.kind.as_str(), params.kind.as_str()));
    }
    let id = params.id.clone().unwrap_or_else(|| principal.name.clone());
    if params.kind == principal.kind && id != principal.name {
        return refused(format!("{} can't act as another {}", principal.name, params.kind.as_str()));
    }
    Ok(Caller { actor: Actor { kind: params.kind, id }, ..caller.clone() })
}

fn rank(kind: PrincipalKind) -> u8 {
    match kind {
        PrincipalKind::Agent => 0,
        PrincipalKind::Human => 1,
        PrincipalKind::Operator => 2,
    }
}

/// Requested capabilities, and the request field that named them (for error messages).
pub struct RequestedCapabilities<'a> {
    pub field: &'static str,
    pub words: &'a [String],
}

/// Requested ∩ policy for the actor. Without a request, the policy's default.
pub fn grant(policy: &Policy, caller: &Caller, requested: Option<RequestedCapabilities>) -> Result<CapabilitySet, ApiError> {
    let (field, granted) = match requested {
        None => ("default capabilities", policy.default_grant(&caller.subject())),
        Some(RequestedCapabilities { field, words }) => {
            let requested = CapabilitySet::parse(words).map_err(|e| ApiError::invalid(format!("{field}: {e}")))?;
            (field, requested.intersection(policy.allowed(&caller.subject())))
        }
    };
    must_be_some(policy, caller, field, granted)
}

/// The capabilities of an existing token that the policy still allows.
pub fn renew(policy: &Policy, caller: &Caller, had: CapabilitySet) -> Result<CapabilitySet, ApiError> {
    must_be_some(policy, caller, "the token's capabilities", had.intersection(policy.allowed(&caller.subject())))
}

fn must_be_some(policy: &Policy, caller: &Caller, field: &str, granted: CapabilitySet) -> Result<CapabilitySet, ApiError> {
    if !granted.is_empty() {
        return Ok(granted);
    }
    let (actor, allowed) = (&caller.actor, policy.allowed(&caller.subject()));
    let message = match allowed.is_empty() {
        true => format!("{field}: the policy allows no capabilities for {} {}", actor.kind.as_str(), actor.id),
        false => format!("{field}: none of them is allowed for {} {}; allowed are {allowed:?}", actor.kind.as_str(), actor.id),
    };
    Err(ApiError::new(ErrorCode::CapabilityDenied, message))
}

#[cfg(test)]
mod tests {
    use cobox_protocol::KeyId;

    use super::*;

    fn caller(kind: PrincipalKind) -> Caller {
        Caller::new(Principal { workspace: "w".into(), name: "n".into(), kind }, KeyId::new())
    }

    #[test]
    fn a_grant_is_the_request_within_the_policy() {
        let agent = caller(PrincipalKind::Agent);
        let ask = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
            grant(&Policy::default(), &agent, Some(RequestedCapabilities { field: "scopes", words: &words }))
        };
        assert_eq!(grant(&Policy::default(), &agent, None).unwrap(), CapabilitySet::AGENT_DEFAULT);
        assert_eq!(ask(&["fs:rw", "shell"]).unwrap().names(), ["fs_read", "fs_write", "shell_observe"]);
        assert_eq!(ask(&["ports"]).unwrap_err().code, ErrorCode::CapabilityDenied);
        let unknown = ask(&["root"]).unwrap_err();
        assert_eq!(unknown.code, ErrorCode::InvalidRequest);
        assert!(unknown.message.starts_with("scopes: `root`"), "{unknown}");
    }

    #[test]
    fn a_caller_acts_as_itself_or_as_a_lower_kind() {
        use PrincipalKind::*;
        let acting = |own, kind, id: Option<&str>| act(&caller(own), Some(&ActorParams { kind, id: id.map(str::to_owned) }));
        for (own, kind) in [(Human, Human), (Human, Agent), (Operator, Operator), (Operator, Human), (Operator, Agent), (Agent, Agent)] {
            assert_eq!(acting(own, kind, None).unwrap().actor, Actor { kind, id: "n".into() });
        }
        for (own, kind) in [(Agent, Human), (Agent, Operator), (Human, Operator)] {
            assert_eq!(acting(own, kind, None).unwrap_err().code, ErrorCode::Forbidden);
        }
        let helper = acting(Human, Agent, Some("helper")).unwrap();
        assert_eq!((helper.principal.name.as_str(), helper.actor.id.as_str()), ("n", "helper"));
        assert_eq!(grant(&Policy::default(), &helper, None).unwrap(), CapabilitySet::AGENT_DEFAULT);
        assert_eq!(acting(Human, Human, Some("another")).unwrap_err().code, ErrorCode::Forbidden);
    }
}
