//! Shares: another principal of the workspace gets access to a session with limited capabilities, until the share is
//! revoked.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, CapabilitySet, ErrorCode, SandboxId, SessionId, ShareId, Timestamp,
    id::is_external_id,
    session::Access,
    text::{MAX_SHOWN_CHARS, printable},
    token::{AccessPath, PrincipalAccess, ShareInfo},
};

use crate::{
    domain::{
        access::{
            self, RequestedCapabilities,
            request_context::RequestContext,
            session_access::{may_be_shared, session_expired, visible_session},
        },
        context::{BrokerContext, store_error},
        lifecycle::{control_push::PUSH_WAIT, transitions::Lifecycle},
        model::{AuditRecord, Caller, Principal, Session, SessionWithSandbox, Share},
    },
    store::Shared,
};

/// Shares per session: more than people work in one sandbox, and a list still fits in one response.
const MAX_SHARES: u32 = 100;

/// Decides which principals can enter a session's sandbox without a share of that session. The thread authority and the
/// policy may still refuse a principal; they decide on a request and cannot be asked about a principal that makes none.
struct AccessPaths<'a> {
    bound: &'a SessionWithSandbox,
    /// Valid shares of the other sessions of the sandbox.
    shares: Vec<(Session, Share)>,
}

impl<'a> AccessPaths<'a> {
    async fn into_sandbox_of(context: &BrokerContext, bound: &'a SessionWithSandbox) -> Result<Self, ApiError> {
        let sandbox = &bound.sandbox.id;
        let sessions = context.store.sessions_on(sandbox).await.map_err(store_error)?;
        let found = context.store.shares_on(sandbox).await.map_err(store_error)?;
        let of_another = |share: Share| {
            let session = sessions.iter().find(|s| s.id == share.session && s.id != bound.session.id)?;
            Some((session.clone(), share))
        };
        Ok(Self { bound, shares: found.into_iter().filter(|s| !s.is_over(context.now())).filter_map(of_another).collect() })
    }

    fn of(&self, principal: &Principal) -> Vec<AccessPath> {
        let sandbox = &self.bound.sandbox;
        let mut paths = Vec::new();
        if sandbox.access == Access::Workspace {
            paths.push(AccessPath::WorkspaceAccess);
        }
        if sandbox.owner == principal.name {
            paths.push(AccessPath::SandboxOwner);
        }
        if principal.is_operator() {
            paths.push(AccessPath::Operator);
        }
        // Shares only matter to principals that have no other access.
        if paths.is_empty() {
            let shared = self
                .shares
                .iter()
                .filter(|(session, share)| share.principal == principal.name && may_be_shared(principal, session, sandbox));
            paths.extend(shared.map(|(session, _)| AccessPath::Share { session_id: session.id.clone() }));
        }
        paths
    }
}

/// Parameters of a new share.
pub struct ShareParams<'a> {
    pub principal: &'a str,
    pub capabilities: RequestedCapabilities<'a>,
    pub expires_at: Option<Timestamp>,
}

pub struct Shares {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
}

impl Shares {
    /// Returns the share, and whether it is new.
    pub async fn create(
        &self,
        request: &RequestContext<'_>,
        id: &SessionId,
        params: ShareParams<'_>,
    ) -> Result<(ShareInfo, bool), ApiError> {
        let context = &self.context;
        let bound = self.shareable(request.caller, id).await?;
        let RequestedCapabilities { field, words } = params.capabilities;
        let capabilities = CapabilitySet::parse(words).map_err(|e| ApiError::invalid(format!("{field}: {e}")))?;
        if capabilities.is_empty() {
            return Err(ApiError::invalid(format!("{field}: must name at least one")));
        }
        if params.expires_at.is_some_and(|at| at <= context.now()) {
            return Err(ApiError::invalid("expires_at: is in the past"));
        }
        let name = params.principal;
        if name == bound.session.owner {
            return Err(ApiError::invalid(format!(
                "principal: {} owns the session and can already use it",
                printable(name, MAX_SHOWN_CHARS)
            )));
        }
        if self.principal_of(&bound, name).await?.is_none() {
            return Err(no_principal(name));
        }
        let share = Share {
            id: ShareId::new(),
            workspace: bound.session.workspace.clone(),
            session: bound.session.id.clone(),
            principal: name.to_owned(),
            capabilities,
            shared_by: request.caller.principal.name.clone(),
            created_at: context.now(),
            expires_at: params.expires_at,
        };
        let audit = AuditRecord::new(context.now(), &share.workspace, "session.shared")
            .by(request.caller, request.request_id)
            .about(&bound)
            .detail(format!("{} with {name}: {}", share.id, capabilities.names().join(" ")));
        let ending = context.ending("its share was replaced", audit);
        match context.store.share(&share, MAX_SHARES, &ending).await.map_err(store_error)? {
            Shared::Added(share) => Ok((self.info_of_share(share, &bound).await?, true)),
            Shared::Changed(changed) => {
                if changed.id == share.id {
                    // Tokens of the previous share have ended.
                    self.push_soon(&bound).await;
                }
                Ok((self.info_of_share(changed, &bound).await?, false))
            }
            Shared::TooMany => {
                Err(ApiError::invalid(format!("principal: the session has {MAX_SHARES} shares, which is the limit; revoke one first")))
            }
            Shared::SessionGone => Err(session_expired(&bound.session)),
        }
    }

    pub async fn list(&self, caller: &Caller, id: &SessionId) -> Result<Vec<ShareInfo>, ApiError> {
        let bound = self.shareable(caller, id).await?;
        let found = self.context.store.shares(id).await.map_err(store_error)?;
        let paths = AccessPaths::into_sandbox_of(&self.context, &bound).await?;
        let now = self.context.now();
        let mut list = Vec::with_capacity(found.len());
        for share in found.into_iter().filter(|s| !s.is_over(now)) {
            let is_limit = self.paths_of(&share.principal, &paths).await?.is_empty();
            list.push(info(share, is_limit));
        }
        Ok(list)
    }

    /// Whether a principal of the workspace can enter the session's sandbox, by its share and without it.
    pub async fn principal_access(&self, caller: &Caller, id: &SessionId, principal: &str) -> Result<PrincipalAccess, ApiError> {
        let context = &self.context;
        let bound = self.shareable(caller, id).await?;
        let Some(known) = self.principal_of(&bound, principal).await? else { return Err(no_principal(principal)) };
        let paths = AccessPaths::into_sandbox_of(context, &bound).await?.of(&known);
        let share = context.store.share_of(id, principal).await.map_err(store_error)?.filter(|s| !s.is_over(context.now()));
        Ok(PrincipalAccess {
            principal: known.name,
            share: share.map(|s| info(s, paths.is_empty())),
            can_enter_without_share: !paths.is_empty(),
            access_paths: paths,
        })
    }

    /// Ends a share and the tokens issued through it. Durable when it returns; the sandbox was notified, or the push is
    /// retried.
    pub async fn delete(&self, request: &RequestContext<'_>, id: &SessionId, principal: &str) -> Result<(), ApiError> {
        let context = &self.context;
        let bound = self.shareable(request.caller, id).await?;
        let audit = AuditRecord::new(context.now(), &bound.session.workspace, "session.unshared")
            .by(request.caller, request.request_id)
            .about(&bound)
            .detail(printable(principal, MAX_SHOWN_CHARS));
        let ended = context.store.unshare(id, principal, &context.ending("its share was revoked", audit)).await.map_err(store_error)?;
        if ended.is_none() {
            return Err(self.not_shared(&bound, principal).await?);
        }
        self.push_soon(&bound).await;
        Ok(())
    }

    /// The error also says if the principal can enter without a share, because the caller wants to keep it out.
    async fn not_shared(&self, bound: &SessionWithSandbox, principal: &str) -> Result<ApiError, ApiError> {
        let paths = AccessPaths::into_sandbox_of(&self.context, bound).await?;
        let paths = self.paths_of(principal, &paths).await?;
        let printable = printable(principal, MAX_SHOWN_CHARS);
        let message = match paths.is_empty() {
            true => format!("the session is not shared with `{printable}`"),
            false => {
                format!(
                    "the session is not shared with `{printable}`, but {printable} can still enter: {}",
                    reasons(&paths, &bound.sandbox.id)
                )
            }
        };
        let error = ApiError::new(ErrorCode::ShareNotFound, message);
        Ok(if paths.is_empty() { error } else { error.with_details(serde_json::json!({ "access_paths": paths })) })
    }

    async fn info_of_share(&self, share: Share, bound: &SessionWithSandbox) -> Result<ShareInfo, ApiError> {
        let paths = AccessPaths::into_sandbox_of(&self.context, bound).await?;
        let is_limit = self.paths_of(&share.principal, &paths).await?.is_empty();
        Ok(info(share, is_limit))
    }

    async fn paths_of(&self, principal: &str, paths: &AccessPaths<'_>) -> Result<Vec<AccessPath>, ApiError> {
        Ok(self.principal_of(paths.bound, principal).await?.map_or_else(Vec::new, |known| paths.of(&known)))
    }

    async fn principal_of(&self, bound: &SessionWithSandbox, name: &str) -> Result<Option<Principal>, ApiError> {
        if !is_external_id(name) {
            return Ok(None);
        }
        self.context.store.principal(&bound.session.workspace, name).await.map_err(store_error)
    }

    /// Continues when the caller doesn't wait for it.
    async fn push_soon(&self, bound: &SessionWithSandbox) {
        self.lifecycle.control_push.push_soon(&bound.sandbox.id, PUSH_WAIT).await;
    }

    async fn shareable(&self, caller: &Caller, id: &SessionId) -> Result<SessionWithSandbox, ApiError> {
        let bound = visible_session(&self.context, caller, id).await?;
        access::may_end(&caller.principal, &bound.session)?;
        if bound.session.ended_at.is_some() {
            return Err(session_expired(&bound.session));
        }
        Ok(bound)
    }
}

fn no_principal(name: &str) -> ApiError {
    ApiError::new(
        ErrorCode::PrincipalNotFound,
        format!("the workspace has no principal `{}`; see `cobox keys list`", printable(name, MAX_SHOWN_CHARS)),
    )
}

fn reasons(paths: &[AccessPath], sandbox: &SandboxId) -> String {
    let reason = |way: &AccessPath| match way {
        AccessPath::WorkspaceAccess => format!("sandbox {sandbox} is open to the whole workspace"),
        AccessPath::SandboxOwner => format!("they own sandbox {sandbox}"),
        AccessPath::Operator => "they are an operator".to_owned(),
        AccessPath::Share { session_id } => format!("session {session_id} of the same sandbox is shared with them"),
        AccessPath::Unknown => "they have another access path".to_owned(),
    };
    paths.iter().map(reason).collect::<Vec<_>>().join(", and ")
}

fn info(share: Share, is_limit: bool) -> ShareInfo {
    ShareInfo {
        id: share.id,
        session_id: share.session,
        principal: share.principal,
        capabilities: share.capabilities,
        scopes: share.capabilities.legacy_names(),
        shared_by: share.shared_by,
        created_at: share.created_at,
        expires_at: share.expires_at,
        is_limit,
    }
}
