//! Issues tokens. The record that a token was issued is durable before any client gets the token.

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{ApiError, CapabilitySet, Secret, Timestamp, key::OPAQUE_TOKEN_PREFIX, session::State};
use cobox_token::Claims;

use crate::{
    domain::{
        access::{
            last_used::{Activity, WRITE_EVERY},
            request_context::Asking,
            session_access::may_see,
        },
        context::{Deployment, internal},
        model::{AuditRecord, Bound, Sandbox, Session},
        token_signer::{Draft, Issued, Lineage, REFRESH_GRACE_SECONDS, TokenFormat, Wish, hash},
    },
    store::{Note, OpaqueToken},
};

/// Random bytes of an opaque token: it can't be guessed, so storing a plain hash is safe.
const OPAQUE_BYTES: usize = 32;

/// Parameters of a new token.
#[derive(Clone, Copy)]
pub struct TokenWish<'a> {
    pub capabilities: CapabilitySet,
    /// Requested lifetime in seconds.
    pub ttl: Option<u32>,
    pub format: TokenFormat,
    /// Whether issuing it counts as use of the sandbox.
    pub is_activity: bool,
    pub lineage: Lineage<'a>,
}

impl TokenWish<'_> {
    pub fn new(capabilities: CapabilitySet) -> Self {
        Self { capabilities, ttl: None, format: TokenFormat::Jwt, is_activity: false, lineage: Lineage::default() }
    }
}

pub struct TokenIssuer {
    pub deployment: Arc<Deployment>,
    pub activity: Arc<Activity>,
}

impl TokenIssuer {
    /// Mints a token. Its audit record and the activity are durable before any client gets it.
    pub async fn issue(&self, asking: &Asking<'_>, bound: &Bound, wish: TokenWish<'_>) -> Result<Issued, ApiError> {
        self.issue_in(asking, &bound.sandbox, Some(&bound.session), wish).await
    }

    /// As [`TokenIssuer::issue`], also for a sandbox that is used without a session.
    pub async fn issue_in(
        &self,
        asking: &Asking<'_>,
        sandbox: &Sandbox,
        session: Option<&Session>,
        wish: TokenWish<'_>,
    ) -> Result<Issued, ApiError> {
        let d = &self.deployment;
        // A client that presents a token was authorized when that token was issued.
        if wish.lineage.parent.is_none() {
            may_see(d, asking.caller, sandbox, session).await?;
        }
        let now = d.now();
        let draft = d.tokens.draft(&Wish {
            caller: asking.caller,
            sandbox,
            session,
            capabilities: wish.capabilities,
            ttl: wish.ttl.map(|s| Duration::from_secs(s.into())),
            left: d.left(sandbox, session, now),
            now,
            lineage: wish.lineage,
        });
        let mut sandboxes = Vec::new();
        if wish.is_activity {
            self.activity.sandbox_asked_for(&sandbox.id, now);
            // A value in the store that is this fresh is good enough: changing a second row would double the time of a
            // refresh.
            if sandbox.state == State::Idle || now.saturating_since(sandbox.last_active_at) >= WRITE_EVERY {
                sandboxes.push((sandbox.id.clone(), now));
            }
        }
        let audit = vec![record(asking, sandbox, session, &draft, wish.lineage, now)];
        let note = Note { sandboxes, audit, ..Note::default() };
        let token = match wish.format {
            TokenFormat::Jwt => {
                let signing = async {
                    // The record is sent first: the token is signed while the disk writes.
                    tokio::task::yield_now().await;
                    d.tokens.sign(sandbox, &draft.claims)
                };
                let (noted, token) = tokio::join!(d.store.note(&note), signing);
                noted.map_err(internal)?;
                token
            }
            TokenFormat::Opaque => {
                let (token, kept) = opaque(&draft.claims);
                d.store.note(&Note { tokens: vec![kept], ..note }).await.map_err(internal)?;
                token
            }
        };
        Ok(Issued { token, draft })
    }
}

fn record(
    asking: &Asking<'_>,
    sandbox: &Sandbox,
    session: Option<&Session>,
    draft: &Draft,
    lineage: Lineage<'_>,
    now: Timestamp,
) -> AuditRecord {
    let mut detail = draft.capabilities.names().join(" ");
    if let Some(parent) = lineage.parent {
        detail += &format!(" from {}", parent.jti);
    }
    if let Some(share) = lineage.share {
        detail += &format!(" by {}", share.id);
    }
    AuditRecord {
        thread: session.and_then(Session::thread).map(str::to_owned),
        session: session.map(|s| s.id.clone()),
        sandbox: Some(sandbox.id.clone()),
        jti: Some(draft.jti.to_string()),
        ..AuditRecord::new(now, &sandbox.workspace, "token.issued").by(asking.caller, asking.request_id).detail(detail)
    }
}

/// A token that only the broker can resolve, and the record that it must store for that.
fn opaque(claims: &Claims) -> (Secret, OpaqueToken) {
    let mut random = [0u8; OPAQUE_BYTES];
    // A guessable token would be worse than a crash.
    getrandom::fill(&mut random).expect("the kernel's random source answers");
    let token = Secret::new(format!("{OPAQUE_TOKEN_PREFIX}{}", URL_SAFE_NO_PAD.encode(random)));
    let keep_until = Timestamp::from_unix(claims.exp.saturating_add(REFRESH_GRACE_SECONDS));
    let kept = OpaqueToken { hash: hash(&token), claims: claims.clone(), keep_until };
    (token, kept)
}
