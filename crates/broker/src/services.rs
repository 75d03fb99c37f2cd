//! The services of the domain, as the API and the broker's own tasks use them.

use std::sync::Arc;

use crate::domain::{
    access::{keys::Keys, principals::Principals},
    audit::audit_chain::AuditLog,
    context::BrokerContext,
    lifecycle::transitions::Lifecycle,
    resources::{
        deleted_sandboxes::DeletedSandboxes, langsmith_sandboxes::LangSmithSandboxes, pools::Pools, sandboxes::Sandboxes,
        snapshots::Snapshots, templates::Templates, volumes::Volumes,
    },
    sessions::{negotiation::Negotiator, renewal::SessionRenewal, session::Sessions, shares::Shares, threads::Threads},
    tokens::{delegation::Delegations, file_links::FileLinks, issue::TokenIssuer, revocation::Revocations},
};

pub struct Services {
    pub keys: Arc<Keys>,
    pub principals: Principals,
    pub negotiator: Negotiator,
    pub sessions: Arc<Sessions>,
    pub renewal: SessionRenewal,
    pub shares: Shares,
    pub threads: Threads,
    pub delegations: Delegations,
    pub file_links: FileLinks,
    pub revocations: Revocations,
    pub sandboxes: Arc<Sandboxes>,
    pub deleted_sandboxes: DeletedSandboxes,
    pub langsmith_sandboxes: LangSmithSandboxes,
    pub templates: Templates,
    pub snapshots: Arc<Snapshots>,
    pub volumes: Arc<Volumes>,
    pub pools: Arc<Pools>,
    pub audit_log: AuditLog,
}

impl Services {
    pub fn new(context: &Arc<BrokerContext>, lifecycle: &Arc<Lifecycle>) -> Self {
        let (context, lifecycle) = (|| context.clone(), || lifecycle.clone());
        let (last_used, revocation_push) = (lifecycle().last_used.clone(), lifecycle().control_push.clone());
        let issuer = Arc::new(TokenIssuer { context: context(), last_used: last_used.clone() });
        let sessions = Arc::new(Sessions { context: context(), lifecycle: lifecycle(), issuer: issuer.clone() });
        let sandboxes = Arc::new(Sandboxes { context: context(), lifecycle: lifecycle() });
        Self {
            keys: Arc::new(Keys { context: context(), revocation_push: revocation_push.clone(), last_used }),
            principals: Principals { context: context(), revocation_push },
            negotiator: Negotiator { context: context(), lifecycle: lifecycle(), sessions: sessions.clone() },
            renewal: SessionRenewal { context: context(), lifecycle: lifecycle(), issuer: issuer.clone() },
            shares: Shares { context: context(), lifecycle: lifecycle() },
            threads: Threads { context: context(), lifecycle: lifecycle() },
            delegations: Delegations { context: context(), issuer: issuer.clone() },
            file_links: FileLinks { context: context(), issuer },
            revocations: Revocations { context: context(), lifecycle: lifecycle() },
            deleted_sandboxes: DeletedSandboxes { context: context(), lifecycle: lifecycle(), sandboxes: sandboxes.clone() },
            langsmith_sandboxes: LangSmithSandboxes { context: context(), lifecycle: lifecycle(), sandboxes: sandboxes.clone() },
            templates: Templates { context: context() },
            snapshots: Arc::new(Snapshots::new(context())),
            volumes: Arc::new(Volumes::new(context())),
            pools: Arc::new(Pools::new(context(), lifecycle())),
            audit_log: AuditLog { context: context() },
            sessions,
            sandboxes,
        }
    }
}
