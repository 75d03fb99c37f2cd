//! Which tokens no longer count, as last told by the broker.

use std::collections::{HashMap, HashSet};

use cobox_protocol::control::{IssuedBefore, IssuedTo, Revocation};

use crate::Claims;

#[derive(Default)]
pub struct RevocationView {
    jtis: HashSet<String>,
    grants: HashSet<String>,
    sessions: HashSet<String>,
    principals: HashSet<String>,
    /// By kind and name, the latest time of issue that no longer counts.
    earlier: HashMap<(IssuedTo, String), i64>,
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
                    let last = view.earlier.entry((*of, value.clone())).or_insert(*issued_by);
                    *last = (*last).max(*issued_by);
                }
            }
        }
        view
    }

    pub fn covers(&self, claims: &Claims) -> bool {
        let is_late = |of, value: &String| self.earlier.get(&(of, value.clone())).is_some_and(|issued_by| claims.iat <= *issued_by);
        self.jtis.contains(&claims.jti)
            || claims.parent.as_ref().is_some_and(|p| self.jtis.contains(p))
            || claims.via.iter().any(|v| self.jtis.contains(v))
            || self.grants.contains(&claims.grant)
            || claims.sid.as_ref().is_some_and(|s| self.sessions.contains(s))
            || self.principals.contains(&claims.sub)
            || !self.earlier.is_empty()
                && (is_late(IssuedTo::Grant, &claims.grant)
                    || claims.sid.as_ref().is_some_and(|s| is_late(IssuedTo::Session, s))
                    || is_late(IssuedTo::Principal, &claims.sub))
    }
}
