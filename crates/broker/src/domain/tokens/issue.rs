//! Issues tokens. The record that a token was issued is durable before any client gets the token.

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{ApiError, CapabilitySet, Secret, Timestamp, key::OPAQUE_TOKEN_PREFIX, session::State};
use cobox_token::Claims;

use crate::{
    domain::{
        access::{
            last_used::{LastUsed, WRITE_EVERY},
            request_context::RequestContext,
            session_access::may_see,
        },
        context::{BrokerContext, store_error},
        model::{AuditRecord, Sandbox, Session, SessionWithSandbox},
        token_signer::{DraftParams, IssuedToken, REFRESH_GRACE_SECONDS, TokenDraft, TokenFormat, TokenOrigin, hash},
    },
    store::{Note, OpaqueToken},
};

/// Random bytes of an opaque token: it can't be guessed, so storing a plain hash is safe.
const OPAQUE_BYTES: usize = 32;

/// Parameters of a new token.
#[derive(Clone, Copy)]
pub struct TokenParams<'a> {
    pub capabilities: CapabilitySet,
    /// Requested lifetime in seconds.
    pub ttl: Option<u32>,
    pub format: TokenFormat,
    /// Whether issuing it counts as use of the sandbox.
    pub is_activity: bool,
    pub origin: TokenOrigin<'a>,
}

impl TokenParams<'_> {
    pub fn new(capabilities: CapabilitySet) -> Self {
        Self { capabilities, ttl: None, format: TokenFormat::Jwt, is_activity: false, origin: TokenOrigin::default() }
    }
}

pub struct TokenIssuer {
    pub context: Arc<BrokerContext>,
    pub last_used: Arc<LastUsed>,
}

impl TokenIssuer {
    /// Mints a token. Its audit record and the activity are durable before any client gets it.
    pub async fn issue(
        &self,
        request: &RequestContext<'_>,
        bound: &SessionWithSandbox,
        params: TokenParams<'_>,
    ) -> Result<IssuedToken, ApiError> {
        self.issue_in(request, &bound.sandbox, Some(&bound.session), params).await
    }

    /// As [`TokenIssuer::issue`], also for a sandbox that is used without a session.
    pub async fn issue_in(
        &self,
        request: &RequestContext<'_>,
        sandbox: &Sandbox,
        session: Option<&Session>,
        params: TokenParams<'_>,
    ) -> Result<IssuedToken, ApiError> {
        let context = &self.context;
        // A client that presents a token was authorized when that token was issued.
        if params.origin.parent.is_none() {
            may_see(context, request.caller, sandbox, session).await?;
        }
        let now = context.now();
        let draft = context.tokens.draft(&DraftParams {
            caller: request.caller,
            sandbox,
            session,
            capabilities: params.capabilities,
            ttl: params.ttl.map(|s| Duration::from_secs(s.into())),
            remaining: context.remaining_time(sandbox, session, now),
            now,
            origin: params.origin,
        });
        let mut sandboxes = Vec::new();
        if params.is_activity {
            self.last_used.record_sandbox_request(&sandbox.id, now);
            // A value in the store that is this fresh is good enough: changing a second row would double the time of a
            // refresh.
            if sandbox.state == State::Idle || now.saturating_since(sandbox.last_active_at) >= WRITE_EVERY {
                sandboxes.push((sandbox.id.clone(), now));
            }
        }
        let audit = vec![record(request, sandbox, session, &draft, params.origin, now)];
        let note = Note { sandboxes, audit, ..Note::default() };
        let token = match params.format {
            TokenFormat::Jwt => {
                let signing = async {
                    // The record is sent first: the token is signed while the disk writes.
                    tokio::task::yield_now().await;
                    context.tokens.sign(sandbox, &draft.claims)
                };
                let (noted, token) = tokio::join!(context.store.note(&note), signing);
                noted.map_err(store_error)?;
                token
            }
            TokenFormat::Opaque => {
                let (token, stored) = opaque(&draft.claims);
                context.store.note(&Note { tokens: vec![stored], ..note }).await.map_err(store_error)?;
                token
            }
        };
        Ok(IssuedToken { token, draft })
    }
}

fn record(
    request: &RequestContext<'_>,
    sandbox: &Sandbox,
    session: Option<&Session>,
    draft: &TokenDraft,
    origin: TokenOrigin<'_>,
    now: Timestamp,
) -> AuditRecord {
    let mut detail = draft.capabilities.names().join(" ");
    if let Some(parent) = origin.parent {
        detail += &format!(" from {}", parent.jti);
    }
    if let Some(share) = origin.share {
        detail += &format!(" by {}", share.id);
    }
    AuditRecord {
        thread: session.and_then(Session::thread).map(str::to_owned),
        session: session.map(|s| s.id.clone()),
        sandbox: Some(sandbox.id.clone()),
        jti: Some(draft.jti.to_string()),
        ..AuditRecord::new(now, &sandbox.workspace, "token.issued").by(request.caller, request.request_id).detail(detail)
    }
}

/// A token that only the broker can resolve, and the record that it must store for that.
fn opaque(claims: &Claims) -> (Secret, OpaqueToken) {
    let mut random = [0u8; OPAQUE_BYTES];
    // A guessable token would be worse than a crash.
    getrandom::fill(&mut random).expect("the kernel's random source is available");
    let token = Secret::new(format!("{OPAQUE_TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(random)));
    let keep_until = Timestamp::from_unix(claims.exp.saturating_add(REFRESH_GRACE_SECONDS));
    let stored = OpaqueToken { hash: hash(&token), claims: claims.clone(), keep_until };
    (token, stored)
}
