//! The revocations that a sandbox knows, as last pushed by the broker.

use std::collections::{HashMap, HashSet};

use cobox_protocol::control::{IssuedBefore, IssuedTo, Revocation};

use crate::Claims;

#[derive(Default)]
pub struct RevocationView {
    jtis: HashSet<String>,
    grants: HashSet<String>,
    sessions: HashSet<String>,
    principals: HashSet<String>,
    /// Tokens issued up to this time (Unix seconds) are revoked, by kind and name of what they were issued to.
    issued_before: HashMap<(IssuedTo, String), i64>,
}

impl RevocationView {
    pub fn new(list: &[Revocation]) -> Self {
        let mut view = Self::default();
        for r in list {
            match r {
                Revocation::Jti(v) => drop(view.jtis.insert(v.clone())),
                Revocation::Grant(v) => drop(view.grants.insert(v.clone())),
                Revocation::Session(v) => drop(view.sessions.insert(v.clone())),
                Revocation::Principal(v) => drop(view.principals.insert(v.clone())),
                Revocation::IssuedBefore(IssuedBefore { of, value, issued_by }) => {
                    let last = view.issued_before.entry((*of, value.clone())).or_insert(*issued_by);
                    *last = (*last).max(*issued_by);
                }
            }
        }
        view
    }

    pub fn covers(&self, claims: &Claims) -> bool {
        let is_issued_before =
            |of, value: &String| self.issued_before.get(&(of, value.clone())).is_some_and(|issued_by| claims.iat <= *issued_by);
        self.jtis.contains(&claims.jti)
            || claims.parent.as_ref().is_some_and(|p| self.jtis.contains(p))
            || claims.via.iter().any(|v| self.jtis.contains(v))
            || self.grants.contains(&claims.grant)
            || claims.sid.as_ref().is_some_and(|s| self.sessions.contains(s))
            || self.principals.contains(&claims.sub)
            || !self.issued_before.is_empty()
                && (is_issued_before(IssuedTo::Grant, &claims.grant)
                    || claims.sid.as_ref().is_some_and(|s| is_issued_before(IssuedTo::Session, s))
                    || is_issued_before(IssuedTo::Principal, &claims.sub))
    }
}
