//! The services of the domain, as the API and the broker's own tasks use them.

use std::sync::Arc;

use crate::domain::{
    access::{keys::Keys, principals::Principals},
    audit::audit_chain::AuditLog,
    context::Deployment,
    lifecycle::transitions::Lifecycle,
    resources::{
        deleted_sandboxes::DeletedSandboxes, langsmith_sandboxes::LangSmithSandboxes, pools::Pools, sandboxes::Sandboxes,
        snapshots::Snapshots, templates::Templates, volumes::Volumes,
    },
    sessions::{negotiation::Negotiator, renewal::SessionRenewal, session::Sessions, shares::Shares, threads::Threads},
    tokens::{delegation::Delegations, file_links::FileLinks, issue::TokenIssuer, revocation::Revoking},
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
    pub revoking: Revoking,
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
    pub fn new(deployment: &Arc<Deployment>, lifecycle: &Arc<Lifecycle>) -> Self {
        let (deployment, lifecycle) = (|| deployment.clone(), || lifecycle.clone());
        let (activity, revocation_push) = (lifecycle().activity.clone(), lifecycle().control_push.clone());
        let issuer = Arc::new(TokenIssuer { deployment: deployment(), activity: activity.clone() });
        let sessions = Arc::new(Sessions { deployment: deployment(), lifecycle: lifecycle(), issuer: issuer.clone() });
        let sandboxes = Arc::new(Sandboxes { deployment: deployment(), lifecycle: lifecycle() });
        Self {
            keys: Arc::new(Keys { deployment: deployment(), revocation_push: revocation_push.clone(), activity }),
            principals: Principals { deployment: deployment(), revocation_push },
            negotiator: Negotiator { deployment: deployment(), lifecycle: lifecycle(), sessions: sessions.clone() },
            renewal: SessionRenewal { deployment: deployment(), lifecycle: lifecycle(), issuer: issuer.clone() },
            shares: Shares { deployment: deployment(), lifecycle: lifecycle() },
            threads: Threads { deployment: deployment(), lifecycle: lifecycle() },
            delegations: Delegations { deployment: deployment(), issuer: issuer.clone() },
            file_links: FileLinks { deployment: deployment(), issuer },
            revoking: Revoking { deployment: deployment(), lifecycle: lifecycle() },
            deleted_sandboxes: DeletedSandboxes { deployment: deployment(), lifecycle: lifecycle(), sandboxes: sandboxes.clone() },
            langsmith_sandboxes: LangSmithSandboxes { deployment: deployment(), lifecycle: lifecycle(), sandboxes: sandboxes.clone() },
            templates: Templates { deployment: deployment() },
            snapshots: Arc::new(Snapshots::new(deployment())),
            volumes: Arc::new(Volumes::new(deployment())),
            pools: Arc::new(Pools::new(deployment(), lifecycle())),
            audit_log: AuditLog { deployment: deployment() },
            sessions,
            sandboxes,
        }
    }
}
