//! Negotiation: finds or creates a scope's session, brings its sandbox up, and issues a token.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, SessionId, Timestamp,
    id::is_external_id,
    session::{Access, Mode, NegotiateResponse, Scope, ScopeType},
    tags::{self, Tags},
    text::{MAX_SHOWN_CHARS, printable},
};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{differences, session::Sessions};
use crate::{
    domain::{
        access::{
            self, ActorParams, RequestedCapabilities,
            request_context::RequestContext,
            sandbox_lookup,
            session_access::{check_threads_of_sandbox, enter, session_expired},
        },
        context::{BrokerContext, store_error},
        lifecycle::transitions::Lifecycle,
        model::{AuditRecord, Caller, HARD_END, IDEMPOTENCY_KEEP, SANDBOX_RESTORED, Sandbox, Session, SessionWithSandbox},
        resources::{
            sandbox_spec::{self, SandboxSpecParams, new_sandbox},
            sandboxes,
        },
        token_signer::TokenFormat,
        tokens::issue::TokenParams,
    },
    policy::Policy,
    store::{EnsureParams, Ensured, Idempotency, PoolAssignment},
};

/// Attempts when a session or sandbox ends, or a name is taken, while the request is processed.
const ATTEMPTS: usize = 3;
/// Any provider; the broker has exactly one.
pub(super) const ANY_PROVIDER: &str = "auto";

/// A negotiation request, independent of its wire format. An existing session must already match it (`differences`).
#[derive(Clone, Debug, Serialize)]
pub struct Negotiation {
    pub scope: Scope,
    pub mode: Mode,
    pub requested_capabilities: Option<Vec<String>>,
    /// The older name of `requested_capabilities`.
    pub scopes: Option<Vec<String>>,
    pub actor: Option<ActorParams>,
    /// An existing sandbox, by id or name: a new session is bound to it; an existing session must already use it.
    pub sandbox: Option<String>,
    /// The name of the sandbox: attaches to an existing one, otherwise creates it.
    pub name: Option<String>,
    /// A new sandbox outlives its sessions.
    pub keep: bool,
    pub access: Option<Access>,
    /// Requested lifetime of the token in seconds.
    pub ttl: Option<u32>,
    pub tags: Tags,
    pub provider_preference: Option<String>,
    pub template: Option<String>,
    pub token_format: TokenFormat,
}

impl Negotiation {
    pub fn new(scope: Scope, mode: Mode) -> Self {
        Self {
            scope,
            mode,
            requested_capabilities: None,
            scopes: None,
            actor: None,
            sandbox: None,
            name: None,
            keep: false,
            access: None,
            ttl: None,
            tags: Tags::new(),
            provider_preference: None,
            template: None,
            token_format: TokenFormat::Jwt,
        }
    }

    pub fn of_thread(thread: &str, mode: Mode) -> Self {
        Self::new(Scope { kind: ScopeType::Thread.as_str().to_owned(), id: thread.to_owned() }, mode)
    }

    fn requested(&self) -> Result<Option<RequestedCapabilities<'_>>, ApiError> {
        match (&self.requested_capabilities, &self.scopes) {
            (Some(_), Some(_)) => Err(ApiError::invalid("scopes: is a legacy name of requested_capabilities; send one of them")),
            (Some(words), None) => Ok(Some(RequestedCapabilities { field: "requested_capabilities", words })),
            (None, Some(words)) => Ok(Some(RequestedCapabilities { field: "scopes", words })),
            (None, None) => Ok(None),
        }
    }

    /// Checks that don't depend on stored state.
    fn check(&self, provider: &str) -> Result<(), ApiError> {
        if !is_external_id(&self.scope.id) {
            let field = if self.scope.kind == ScopeType::Thread.as_str() { "thread_id" } else { "scope.id" };
            return Err(ApiError::invalid(format!("{field}: must have 1 to 256 characters and no control characters")));
        }
        if self.ttl == Some(0) {
            return Err(ApiError::invalid("ttl: must be at least 1 second"));
        }
        match (&self.name, &self.sandbox) {
            (Some(_), Some(_)) => return Err(ApiError::invalid("name: send it or sandbox_hint, not both")),
            (Some(name), None) => sandboxes::check_name(name)?,
            (None, Some(hint)) if !is_external_id(hint) => {
                return Err(ApiError::invalid("sandbox_hint: must be the id or the name of a sandbox"));
            }
            _ => {}
        }
        tags::check(&self.tags)?;
        if let Some(requested) = self.provider_preference.as_deref().filter(|p| ![ANY_PROVIDER, provider].contains(p)) {
            return Err(ApiError::invalid(format!(
                "provider_preference: there is no provider `{}` here; use `{ANY_PROVIDER}` or `{provider}`",
                printable(requested, MAX_SHOWN_CHARS)
            )));
        }
        Ok(())
    }

    fn thread(&self) -> Option<&str> {
        (self.scope.kind == ScopeType::Thread.as_str()).then_some(self.scope.id.as_str())
    }

    /// Checks the named provider and template against the policy.
    fn check_allowed(&self, policy: &Policy, caller: &Caller) -> Result<(), ApiError> {
        if let Some(provider) = self.provider_preference.as_deref().filter(|p| *p != ANY_PROVIDER) {
            policy.check_provider(&caller.subject(), provider)?;
        }
        if let Some(template) = &self.template {
            policy.check_template(&caller.subject(), template)?;
        }
        Ok(())
    }

    /// The caller's tags plus the broker's automatic ones, by which a session or sandbox can be found.
    fn all_tags(&self, request: &RequestContext<'_>) -> Tags {
        let mut all = self.tags.clone();
        all.entry(tags::CREATED_BY.to_owned()).or_insert_with(|| request.client.to_owned());
        all.insert(tags::SCOPE.to_owned(), format!("{}:{}", self.scope.kind, self.scope.id));
        all.insert(tags::PRINCIPAL.to_owned(), request.caller.principal.name.clone());
        all
    }
}

pub struct Negotiator {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
    pub sessions: Arc<Sessions>,
}

impl Negotiator {
    pub async fn negotiate(
        &self,
        request: &RequestContext<'_>,
        params: &Negotiation,
        key: Option<&str>,
    ) -> Result<NegotiateResponse, ApiError> {
        params.check(self.context.provider.name())?;
        if key.is_some_and(|key| !is_external_id(key)) {
            return Err(ApiError::invalid("Idempotency-Key: must have 1 to 256 characters"));
        }
        let caller = access::act(request.caller, params.actor.as_ref())?;
        let request = &RequestContext { caller: &caller, ..*request };
        let policy = self.context.policy();
        params.check_allowed(&policy, &caller)?;
        let capabilities = access::grant(&policy, &caller, params.requested()?)?;
        // Before anything is looked up or created.
        self.context.may_see(&caller, params.thread()).await?;
        let mut attempt = 1;
        loop {
            let bound = match params.mode {
                Mode::Get => session_of_scope(&self.context, &caller, &params.scope).await?,
                Mode::Ensure | Mode::CreateOnly => self.ensure(request, &policy, params, key).await?,
            };
            request.about(&bound.session.id, &bound.sandbox.id);
            let entry = enter(&self.context, &caller.principal, &bound.session, &bound.sandbox).await?;
            let capabilities = entry.limit(capabilities)?;
            check_sandbox_hint(&self.context, &caller, params.sandbox.as_deref(), &bound.sandbox).await?;
            if let Some(name) = params.name.as_deref().filter(|n| Some(*n) != bound.sandbox.name.as_deref()) {
                return Err(bound_elsewhere(&bound.sandbox, name));
            }
            self.check_matches(params, &bound).await?;
            match self.lifecycle.ensure_found_running(bound.sandbox, request.wait).await {
                Ok(sandbox) => {
                    let bound = SessionWithSandbox { session: bound.session, sandbox };
                    let token = TokenParams {
                        ttl: params.ttl,
                        format: params.token_format,
                        origin: entry.origin(),
                        ..TokenParams::new(capabilities)
                    };
                    return self.sessions.answer(request, bound, token).await;
                }
                // The session ended after it was found.
                Err(e) if e.code == ErrorCode::SessionExpired && params.mode != Mode::Get && attempt < ATTEMPTS => attempt += 1,
                Err(e) => return Err(e),
            }
        }
    }

    /// The session and sandbox must already match the request: a request changes neither, and a restriction must not seem
    /// to be granted.
    async fn check_matches(&self, params: &Negotiation, bound: &SessionWithSandbox) -> Result<(), ApiError> {
        let mut differences = differences::of_sandbox(params, &bound.sandbox);
        differences.extend(differences::of_access(params, bound));
        match differences.is_empty() {
            true => Ok(()),
            false => Err(differences::conflict(&bound.session, &bound.sandbox, &differences)),
        }
    }

    async fn ensure(
        &self,
        request: &RequestContext<'_>,
        policy: &Policy,
        params: &Negotiation,
        key: Option<&str>,
    ) -> Result<SessionWithSandbox, ApiError> {
        let (context, principal) = (&self.context, &request.caller.principal);
        let must_create = params.mode == Mode::CreateOnly;
        // Usually the session exists already, and a read is much cheaper than a transaction that may write.
        if key.is_none()
            && let Some(bound) = find_session_of_scope(&self.context, request.caller, &params.scope).await?
        {
            return if must_create { Err(self.conflict(request.caller, &bound).await) } else { Ok(bound) };
        }
        let quota = policy.quota(&request.caller.subject(), &context.config);
        for _ in 0..ATTEMPTS {
            let (new_rows, is_attaching, taking) = self.new_rows(request.caller, policy, params).await?;
            let audit = AuditRecord::new(context.now(), &principal.workspace, "session.created")
                .by(request.caller, request.request_id)
                .about(&new_rows);
            let idempotency = key.map(|key| idempotency(&principal.name, key, params, context.now())).transpose()?;
            let tags = params.all_tags(request);
            let requested = EnsureParams { fresh: new_rows, is_attaching, must_create, tags, quota, taking, idempotency, audit };
            return match context.store.ensure(&requested).await.map_err(store_error)? {
                Ensured::Existing(bound) if must_create => Err(self.conflict(request.caller, &bound).await),
                Ensured::Created(bound) | Ensured::Existing(bound) => Ok(bound),
                Ensured::Replayed(bound) if bound.session.ended_at.is_none() => Ok(bound),
                Ensured::Replayed(bound) => Err(session_expired(&bound.session)),
                Ensured::KeyReused => {
                    Err(ApiError::new(ErrorCode::IdempotencyConflict, "this Idempotency-Key was used with another request; use a new one"))
                }
                Ensured::QuotaReached(reached) => Err(sandboxes::quota_reached(context, principal, &quota, reached).await),
                Ensured::SpecPartMissing(what) => Err(sandbox_spec::gone(&what)),
                Ensured::SandboxGone if params.sandbox.is_some() => Err(sandbox_lookup::not_found()),
                // A concurrent request was faster: it took or released the name.
                Ensured::SandboxGone | Ensured::NameTaken(_) => continue,
            };
        }
        Err(ApiError::new(ErrorCode::SessionConflict, "the sandbox of this name was created and ended during the request; try again"))
    }

    async fn conflict(&self, caller: &Caller, bound: &SessionWithSandbox) -> ApiError {
        if let Err(refused) = enter(&self.context, &caller.principal, &bound.session, &bound.sandbox).await {
            return refused;
        }
        let (session, sandbox) = (&bound.session, &bound.sandbox);
        let message =
            format!("{} `{}` has session {} already; use mode `ensure` to join it", session.scope_type, session.scope_id, session.id);
        let details = serde_json::json!({ "session_id": session.id, "binding_id": session.id, "sandbox_id": sandbox.id });
        ApiError::new(ErrorCode::SessionConflict, message).with_details(details)
    }

    /// The sandbox of the scope's last session, if that session reached its hard end or the sandbox was restored: the
    /// files stay with the scope.
    async fn left_by_last_session(&self, caller: &Caller, params: &Negotiation) -> Result<Option<Sandbox>, ApiError> {
        let last = self.context.store.last_session_of(&caller.principal.workspace, &params.scope).await.map_err(store_error)?;
        Ok(last
            .filter(|last| last.session.end_reason.as_deref().is_some_and(|why| [HARD_END, SANDBOX_RESTORED].contains(&why)))
            .filter(|last| is_reusable(last, caller, params))
            .map(|last| last.sandbox))
    }

    /// The rows to write if there is no session, whether the sandbox's row exists already, and the pool from which a
    /// standby sandbox may be taken instead.
    async fn new_rows(
        &self,
        caller: &Caller,
        policy: &Policy,
        params: &Negotiation,
    ) -> Result<(SessionWithSandbox, bool, Option<PoolAssignment>), ApiError> {
        let context = &self.context;
        let named = params.sandbox.as_deref().or(params.name.as_deref());
        let existing = match named {
            None => None,
            Some(id_or_name) => match sandbox_lookup::find(context, caller, id_or_name).await {
                Ok(sandbox) => Some(sandbox),
                Err(e) if e.code == ErrorCode::SandboxNotFound => None,
                Err(e) => return Err(e),
            },
        };
        let existing = match existing {
            None if named.is_none() => self.left_by_last_session(caller, params).await?,
            found => found,
        };
        if let Some(sandbox) = &existing {
            access::may_use(&caller.principal, sandbox)?;
            check_threads_of_sandbox(context, caller, sandbox).await?;
            let differences = differences::of_sandbox_to_attach(params, sandbox);
            if !differences.is_empty() {
                return Err(differences::of_existing_sandbox(sandbox, &differences));
            }
        }
        // A hint to a missing sandbox is passed to the store, which first checks for an existing session and for the
        // request that this may replay.
        let is_attaching = existing.is_some() || params.sandbox.is_some();
        let access = params.access.unwrap_or(existing.as_ref().map_or(policy.default_access(&caller.subject()), |s| s.access));
        // A hint to a missing sandbox must not create one.
        let resolved = match &params.template {
            Some(template) if !is_attaching => {
                let made_of = SandboxSpecParams { template: Some(template.clone()), ..SandboxSpecParams::default() };
                Some(sandbox_spec::resolve(context, policy, caller, &made_of).await.map_err(about_the_request)?)
            }
            _ => None,
        };
        if !is_attaching {
            policy.check_provider(&caller.subject(), context.provider.name())?;
        }
        let taking = resolved.as_ref().and_then(|r| r.taking.clone());
        let sandbox = existing.unwrap_or_else(|| {
            let sandbox = Sandbox { is_kept: params.keep, ..new_sandbox(context, caller, params.name.clone(), access) };
            match resolved {
                Some(resolved) => resolved.into_sandbox(sandbox),
                None => sandbox,
            }
        });
        let session = Session {
            id: SessionId::new(),
            workspace: sandbox.workspace.clone(),
            scope_type: params.scope.kind.clone(),
            scope_id: params.scope.id.clone(),
            sandbox: sandbox.id.clone(),
            owner: caller.principal.name.clone(),
            access,
            created_at: context.now(),
            active_base: Duration::ZERO,
            ended_at: None,
            end_reason: None,
        };
        Ok((SessionWithSandbox { session, sandbox }, is_attaching, taking))
    }
}

/// The live session of a scope.
pub async fn session_of_scope(context: &BrokerContext, caller: &Caller, scope: &Scope) -> Result<SessionWithSandbox, ApiError> {
    find_session_of_scope(context, caller, scope).await?.ok_or_else(|| {
        let message = format!("{} `{}` has no session; use mode `ensure` to create one", scope.kind, scope.id);
        ApiError::new(ErrorCode::SessionNotFound, message)
    })
}

async fn find_session_of_scope(context: &BrokerContext, caller: &Caller, scope: &Scope) -> Result<Option<SessionWithSandbox>, ApiError> {
    context.store.session_of(&caller.principal.workspace, &scope.kind, &scope.id).await.map_err(store_error)
}

/// A sandbox hint must match the bound sandbox; it never moves a session to another one.
pub async fn check_sandbox_hint(context: &BrokerContext, caller: &Caller, hint: Option<&str>, bound: &Sandbox) -> Result<(), ApiError> {
    let Some(hint) = hint.filter(|h| *h != bound.id.as_str() && Some(*h) != bound.name.as_deref()) else { return Ok(()) };
    sandbox_lookup::find(context, caller, hint).await?;
    Err(bound_elsewhere(bound, hint))
}

fn is_reusable(last: &SessionWithSandbox, caller: &Caller, params: &Negotiation) -> bool {
    let SessionWithSandbox { session, sandbox } = last;
    let is_allowed = access::may_use(&caller.principal, session).and_then(|()| access::may_use(&caller.principal, sandbox)).is_ok();
    let is_of_template = params.template.is_none() || params.template == sandbox.template;
    sandbox.ended_at.is_none() && is_allowed && is_of_template
}

/// Reports a missing resource that the request names as an invalid request, so that the caller doesn't take it for a
/// missing session.
fn about_the_request(error: ApiError) -> ApiError {
    match error.code {
        ErrorCode::TemplateNotFound => ApiError { code: ErrorCode::InvalidRequest, ..error },
        ErrorCode::SnapshotNotFound | ErrorCode::VolumeNotFound => ApiError::invalid(format!("template: {}", error.message)),
        _ => error,
    }
}

fn bound_elsewhere(bound: &Sandbox, requested: &str) -> ApiError {
    let message =
        format!("the session uses {}, not {}; use another thread for another sandbox", bound.id, printable(requested, MAX_SHOWN_CHARS));
    ApiError::new(ErrorCode::SessionConflict, message).with_details(serde_json::json!({ "sandbox_id": bound.id }))
}

fn idempotency(principal: &str, key: &str, params: &Negotiation, now: Timestamp) -> Result<Idempotency, ApiError> {
    // The request as parsed: whitespace and unknown fields make no difference.
    let canonical =
        serde_json::to_vec(params).map_err(|e| ApiError::new(ErrorCode::Internal, format!("the request can't be hashed: {e}")))?;
    let since = Timestamp::from_unix(now.unix() - i64::try_from(IDEMPOTENCY_KEEP.as_secs()).unwrap_or(i64::MAX));
    Ok(Idempotency { principal: principal.to_owned(), key: key.to_owned(), request_hash: Sha256::digest(canonical).into(), since })
}
