//! Which tokens no longer count, as last told by the broker.

use std::collections::HashSet;

use cobox_protocol::control::Revocation;

use crate::Claims;

#[derive(Default)]
pub struct RevocationView {
    jtis: HashSet<String>,
    grants: HashSet<String>,
    sessions: HashSet<String>,
    principals: HashSet<String>,
}

impl RevocationView {
    pub fn new(list: &[Revocation]) -> Self {
        let mut view = Self::default();
        for r in list {
            match r {
                Revocation::Jti(v) => view.jtis.insert(v.clone()),
                Revocation::Grant(v) => view.grants.insert(v.clone()),
                Revocation::Session(v) => view.sessions.insert(v.clone()),
                Revocation::Principal(v) => view.principals.insert(v.clone()),
            };
        }
        view
    }

    pub fn covers(&self, claims: &Claims) -> bool {
        self.jtis.contains(&claims.jti)
            || self.grants.contains(&claims.grant)
            || claims.sid.as_ref().is_some_and(|s| self.sessions.contains(s))
            || self.principals.contains(&claims.sub)
    }
}
