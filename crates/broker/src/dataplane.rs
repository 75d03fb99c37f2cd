//! The broker's side of the gateway: checks the credential for the requested sandbox, and opens the connection.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use cobox_gateway::{Admission, Caller as Passer, Credential, Directory, DirectoryVersion, FileLink, SandboxConnection, Target, Usage};
use cobox_protocol::{ApiError, ErrorCode, RequestId, SandboxId, Secret, SessionId, secret::redact};
use cobox_provider::{BoxdSocket, ProviderError};
use cobox_token::Claims;

use crate::domain::{
    access::{
        self,
        keys::Keys,
        session_access::{enter, find_entry, may_see},
        token_verification::verify,
    },
    audit::audit_writer::AuditTrail,
    context::{BrokerContext, store_error},
    events::presence::{Participant, Presence},
    lifecycle::transitions::Lifecycle,
    model::{AuditRecord, Caller, Sandbox, Session},
    token_signer::{DraftParams, TokenFormat},
    tokens::file_links,
};

/// How long a request waits for a suspended sandbox to start before the client must retry.
const WAKE_WAIT: Duration = Duration::from_secs(10);

pub struct Dataplane {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
    pub keys: Arc<Keys>,
    pub audit: AuditTrail,
    pub presence: Presence,
}

#[async_trait]
impl Directory for Dataplane {
    async fn admit(&self, target: Target, credential: Option<Credential>, request_id: &RequestId) -> Result<Admission, ApiError> {
        let found = self.find(&target).await?;
        match credential {
            None => match found {
                Some((sandbox, _)) if sandbox.is_running() && self.context.is_here(&sandbox) => {
                    Ok(Admission { sandbox: sandbox.id, is_running: true, is_cacheable: false, token: None, caller: None })
                }
                // The same response for an unknown sandbox and a suspended one, so that an unauthenticated client
                // learns nothing.
                _ => Err(ApiError::new(ErrorCode::Unauthenticated, "no credential, and no sandbox is running; ensure a session first")),
            },
            Some(Credential::ApiKey(key)) => {
                let caller = self.keys.authenticate(&key).await?;
                self.exchange(&caller, &target, found, request_id).await
            }
            Some(Credential::Token(token)) => {
                if let Some(caller) = self.keys.sign_in(&token).await? {
                    return self.exchange(&caller, &target, found, request_id).await;
                }
                let (sandbox, session) = found.ok_or_else(|| not_found(&target))?;
                self.check(token, &sandbox, session.as_ref()).await
            }
            Some(Credential::Link(link)) => {
                let (sandbox, session) = found.ok_or_else(|| not_found(&target))?;
                self.check_link(&link, &sandbox, session.as_ref()).await
            }
        }
    }

    fn version(&self) -> Option<DirectoryVersion> {
        Some(DirectoryVersion { change: self.context.store.changes()?, second: self.context.now().unix() })
    }

    fn touch(&self, admission: &Admission) {
        self.lifecycle.last_used.record_sandbox_use(&admission.sandbox, self.context.now());
    }

    fn provider_name(&self, _: &Admission) -> &str {
        self.context.provider.name()
    }

    async fn connect(&self, admission: &Admission) -> Result<SandboxConnection, ApiError> {
        let (provider, id) = (&self.context.provider, &admission.sandbox);
        if admission.caller.is_some() {
            // Record the activity before reading the state, so that the reaper takes it into account.
            self.touch(admission);
            self.lifecycle.ensure_running(id, WAKE_WAIT).await?;
        }
        if let Some(adapter) = provider.adapter() {
            return Ok(SandboxConnection::Adapter(adapter));
        }
        let stream = match provider.dial(id, BoxdSocket::Client).await {
            Err(ProviderError::NotRunning(_)) if admission.caller.is_some() => {
                // boxd died a moment ago. That counts as a suspension, which traffic ends.
                self.lifecycle.check_running(id).await;
                self.lifecycle.ensure_running(id, WAKE_WAIT).await?;
                provider.dial(id, BoxdSocket::Client).await
            }
            dialled => dialled,
        };
        stream.map(SandboxConnection::Boxd).map_err(|e| unreachable(id, &e))
    }

    async fn record_usage(&self, usage: Usage) {
        let Some(caller) = &usage.admission.caller else { return };
        let Passer { workspace, principal, actor, session, .. } = caller;
        let participant = Participant { workspace, principal, actor, session: session.as_ref() };
        self.presence.record(&self.context, &usage.admission.sandbox, &participant);
        let record = self.record("dataplane.used", caller, &usage.admission.sandbox, &usage.request_id);
        let Usage { method, path, status, .. } = &usage;
        let redacted = redact(path);
        let detail = match usage.route {
            // The route's template alone lacks the parameters, so the path is included for readers.
            Some(route) if route != path => format!("{method} {route} {status} {redacted}"),
            _ => format!("{method} {redacted} {status}"),
        };
        self.audit.add(record.detail(detail)).await;
    }

    async fn check_not_ended(&self, admission: &Admission) -> Result<(), ApiError> {
        let store = &self.context.store;
        let session = admission.caller.as_ref().and_then(|c| c.session.as_ref());
        if let Some(id) = session {
            let session = store.session(id).await.map_err(store_error)?.map(|b| b.session);
            return match session.filter(|s| s.ended_at.is_none()) {
                Some(_) => Ok(()),
                None => Err(ApiError::new(ErrorCode::SessionExpired, format!("session {id} is over; ensure a new one"))),
            };
        }
        match store.sandbox(&admission.sandbox).await.map_err(store_error)?.filter(|s| s.ended_at.is_none()) {
            Some(_) => Ok(()),
            None => Err(not_found(&Target::Sandbox(admission.sandbox.clone()))),
        }
    }
}

impl Dataplane {
    fn record(&self, action: &'static str, passer: &Passer, sandbox: &SandboxId, request_id: &RequestId) -> AuditRecord {
        AuditRecord {
            request_id: Some(request_id.clone()),
            principal: Some(passer.principal.clone()),
            actor: Some(passer.actor.clone()),
            thread: passer.thread.clone(),
            session: passer.session.clone(),
            sandbox: Some(sandbox.clone()),
            jti: Some(passer.jti.clone()),
            ..AuditRecord::new(self.context.now(), &passer.workspace, action)
        }
    }

    /// A sandbox of another node must be reached there. Every response that names the sandbox contains that node's URL.
    fn must_be_here(&self, sandbox: &Sandbox) -> Result<(), ApiError> {
        if self.context.is_here(sandbox) {
            return Ok(());
        }
        let url = self.context.gateway(sandbox).http_base_url;
        let message = format!("sandbox {} is on another node; use {url}", sandbox.id);
        Err(ApiError::new(ErrorCode::ProviderUnavailable, message).with_details(serde_json::json!({ "http_base_url": url })))
    }

    async fn find(&self, target: &Target) -> Result<Option<(Sandbox, Option<Session>)>, ApiError> {
        let store = &self.context.store;
        Ok(match target {
            // A sandbox that waits in a pool belongs to no one yet, including its creator.
            Target::Sandbox(id) => {
                store.sandbox(id).await.map_err(store_error)?.filter(|s| s.pool.is_none()).map(|sandbox| (sandbox, None))
            }
            Target::Session(id) => store.session(id).await.map_err(store_error)?.map(|b| (b.sandbox, Some(b.session))),
        })
    }

    /// Exchanges an API key or an OIDC token for a token of the same principal. The original credential is not
    /// forwarded.
    async fn exchange(
        &self,
        caller: &Caller,
        target: &Target,
        found: Option<(Sandbox, Option<Session>)>,
        request_id: &RequestId,
    ) -> Result<Admission, ApiError> {
        let context = &self.context;
        let principal = &caller.principal;
        let (sandbox, session) = found.filter(|(s, _)| access::is_visible(principal, s)).ok_or_else(|| not_found(target))?;
        let (session, entry) = match session {
            Some(session) => {
                let entry = enter(context, principal, &session, &sandbox).await?;
                if session.ended_at.is_some() {
                    return Err(ApiError::new(ErrorCode::SessionExpired, format!("session {} is over; ensure a new one", session.id)));
                }
                (Some(session), entry)
            }
            None => find_entry(context, principal, &sandbox).await?,
        };
        if sandbox.ended_at.is_some() {
            return Err(not_found(target));
        }
        self.must_be_here(&sandbox)?;
        may_see(context, caller, &sandbox, session.as_ref()).await?;
        let now = context.now();
        let capabilities = entry.limit(access::grant(&context.policy(), caller, None)?)?;
        let draft = context.tokens.draft(&DraftParams {
            caller,
            sandbox: &sandbox,
            session: session.as_ref(),
            capabilities,
            ttl: None,
            remaining: context.remaining_time(&sandbox, session.as_ref(), now),
            now,
            origin: entry.origin(),
        });
        let passer = Passer {
            workspace: principal.workspace.clone(),
            principal: principal.name.clone(),
            actor: caller.actor.kind.as_str().to_owned(),
            thread: session.as_ref().and_then(Session::thread).map(str::to_owned),
            session: session.map(|s| s.id),
            jti: draft.jti.to_string(),
            capabilities,
        };
        self.audit.add(self.record("token.issued", &passer, &sandbox.id, request_id).detail(capabilities.names().join(" "))).await;
        let token = context.tokens.sign(&sandbox, &draft.claims);
        Ok(Admission {
            is_running: is_serving(&sandbox),
            is_cacheable: false,
            sandbox: sandbox.id,
            token: Some(token),
            caller: Some(passer),
        })
    }

    /// Forwards a token unchanged once it is known to be one that boxd accepts. A format that boxd can't read is
    /// replaced with one that it can.
    async fn check(&self, token: Secret, sandbox: &Sandbox, session: Option<&Session>) -> Result<Admission, ApiError> {
        let claims = verify(&self.context, sandbox, &token).await?;
        match TokenFormat::of(&token) {
            TokenFormat::Jwt => Ok(Admission { is_cacheable: true, ..self.admit_claims(token, claims, sandbox, session)? }),
            TokenFormat::Opaque => self.admit_claims(self.context.tokens.sign(sandbox, &claims), claims, sandbox, session),
        }
    }

    /// Replaces a link with a token that permits only the linked file.
    async fn check_link(&self, link: &FileLink, sandbox: &Sandbox, session: Option<&Session>) -> Result<Admission, ApiError> {
        let context = &self.context;
        let now = context.now();
        let revoked = context.store.revocations(sandbox, now).await.map_err(store_error)?;
        let claims = context.tokens.verify_link(sandbox, &link.link, &revoked, now)?;
        let is_for_this = claims.file.as_ref().is_some_and(|file| {
            let is_method = file.method == link.method.as_str() || file.method == "GET" && link.method == http::Method::HEAD;
            is_method
                && file_links::decode(&file.path)
                    .is_some_and(|path| file_links::decode(&link.path).is_some_and(|requested| requested == path))
        });
        if !is_for_this {
            return Err(ApiError::new(ErrorCode::Forbidden, "the link is for another file or another method"));
        }
        let claims = Claims { file: None, ..claims };
        self.admit_claims(context.tokens.sign(sandbox, &claims), claims, sandbox, session)
    }

    fn admit_claims(&self, token: Secret, claims: Claims, sandbox: &Sandbox, session: Option<&Session>) -> Result<Admission, ApiError> {
        if session.is_some_and(|s| claims.sid.as_deref() != Some(s.id.as_str())) {
            return Err(ApiError::new(ErrorCode::Unauthenticated, "the token is for another session"));
        }
        if sandbox.ended_at.is_some() {
            return Err(not_found(&Target::Sandbox(sandbox.id.clone())));
        }
        self.must_be_here(sandbox)?;
        let passer = Passer {
            workspace: sandbox.workspace.clone(),
            principal: claims.sub,
            actor: claims.act.kind.as_str().to_owned(),
            session: claims.sid.and_then(|s| s.parse::<SessionId>().ok()),
            thread: claims.thread_id,
            jti: claims.jti,
            capabilities: claims.scope,
        };
        let is_running = is_serving(sandbox);
        Ok(Admission { sandbox: sandbox.id.clone(), is_running, is_cacheable: false, token: Some(token), caller: Some(passer) })
    }
}

fn is_serving(sandbox: &Sandbox) -> bool {
    sandbox.is_running() && sandbox.intent.is_none()
}

fn not_found(target: &Target) -> ApiError {
    match target {
        Target::Sandbox(id) => ApiError::new(ErrorCode::SandboxNotFound, format!("there is no sandbox {id}")),
        Target::Session(id) => ApiError::new(ErrorCode::SessionNotFound, format!("there is no session {id}")),
    }
}

fn unreachable(id: &SandboxId, error: &ProviderError) -> ApiError {
    tracing::warn!(sandbox = %id, %error, "no connection to boxd");
    ApiError::new(ErrorCode::ProviderUnavailable, format!("boxd of {id} can't be reached; try again"))
}
