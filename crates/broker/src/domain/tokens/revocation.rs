//! Revocation: ends tokens that share a property, rotates a sandbox's key, or ends the sandbox itself. For operators, who
//! manage the whole deployment.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, KeyId, RequestId, SandboxId, SessionId, ShareId, Timestamp, TokenId,
    control::IssuedTo,
    id::is_external_id,
    token::{RevokeRequest, RevokeResponse, RotateKeyResponse, RotationMode},
};
use cobox_token::LEEWAY_SECONDS;

use crate::{
    domain::{
        access,
        context::{BrokerContext, store_error},
        lifecycle::{control_push::PUSH_WAIT, transitions::Lifecycle},
        model::{AuditRecord, Caller, Sandbox},
        token_signer::{LONGEST_TOKEN_LIFE, MAX_REFRESH_AGE},
    },
    store::{RevokeParams, RevokedTokens, Rotated, Rotation},
};

pub struct Revocations {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
}

impl Revocations {
    /// Durable when it returns. The affected sandboxes were notified, or the push is retried. A principal that may get a
    /// new token still may.
    pub async fn revoke(&self, caller: &Caller, params: &RevokeRequest, request_id: &RequestId) -> Result<RevokeResponse, ApiError> {
        access::must_be_operator(&caller.principal, "revoke tokens")?;
        let context = &self.context;
        let now = context.now();
        let workspace = params.workspace.clone().unwrap_or_else(|| caller.principal.workspace.clone());
        // Another broker's clock may be ahead: a token it has just issued may have an issue time in the future.
        let issued_by = now.unix() + if context.store.is_shared() { LEEWAY_SECONDS } else { 0 };
        let earlier = |of, value: &str| RevokedTokens::Earlier { of, value: value.to_owned(), issued_by };
        let (workspace, sandbox, tokens) = match target_of(params)? {
            RevocationTarget::Sandbox(id) => {
                self.rotate(caller, id, RotationMode::Immediate, request_id).await?;
                return Ok(RevokeResponse { sequence: None, revoked_at: now });
            }
            RevocationTarget::Session(id) => {
                let not_found = || ApiError::new(ErrorCode::SessionNotFound, "session: there is no session with this id");
                let id: SessionId = id.parse().map_err(|_| not_found())?;
                let bound = context.store.session(&id).await.map_err(store_error)?.ok_or_else(not_found)?;
                (bound.session.workspace, Some(bound.sandbox.id), earlier(IssuedTo::Session, id.as_str()))
            }
            RevocationTarget::Jti(jti) => {
                // A token whose record is gone is revoked in the workspace that the caller names or belongs to.
                let found = context.store.workspace_of_token(&jti).await.map_err(store_error)?;
                (found.unwrap_or(workspace), None, RevokedTokens::Jti(jti))
            }
            RevocationTarget::Grant(id) => {
                let not_found = || ApiError::new(ErrorCode::KeyNotFound, format!("there is no key {id}"));
                let key = context.store.key(&id).await.map_err(store_error)?.ok_or_else(not_found)?;
                (key.principal.workspace, None, earlier(IssuedTo::Grant, id.as_str()))
            }
            RevocationTarget::Principal(name) => {
                if context.store.principal(&workspace, name).await.map_err(store_error)?.is_none() {
                    return Err(ApiError::new(ErrorCode::PrincipalNotFound, "principal: the workspace has no principal with this name"));
                }
                (workspace, None, earlier(IssuedTo::Principal, name))
            }
        };
        let mut audit = AuditRecord::new(now, &workspace, "tokens.revoked").by(caller, request_id).detail(describe(&tokens));
        audit.sandbox = sandbox.clone();
        if let RevokedTokens::Jti(jti) = &tokens {
            audit.jti = Some(jti.clone());
        }
        let until = now.plus(MAX_REFRESH_AGE + Duration::from_secs(LEEWAY_SECONDS.unsigned_abs()));
        let params = RevokeParams { workspace, sandbox, tokens, until, audit };
        let sequence = context.store.revoke(&params).await.map_err(store_error)?;
        match params.sandbox {
            Some(id) => self.lifecycle.control_push.push_soon(&id, PUSH_WAIT).await,
            None => {
                let (control_push, workspace) = (self.lifecycle.control_push.clone(), params.workspace);
                let pushing = context.background.spawn(async move { control_push.push_to_workspace(&workspace).await });
                // After this wait the pushes continue in the background; the gateway already refuses the tokens.
                let _ = tokio::time::timeout(PUSH_WAIT, pushing).await;
            }
        }
        Ok(RevokeResponse { sequence: Some(sequence), revoked_at: now })
    }

    /// Switches to the sandbox's next key. Tokens of the previous key stay valid until they expire, or end now together
    /// with the connections that use them.
    pub async fn rotate(
        &self,
        caller: &Caller,
        id: &str,
        mode: RotationMode,
        request_id: &RequestId,
    ) -> Result<RotateKeyResponse, ApiError> {
        access::must_be_operator(&caller.principal, "rotate keys")?;
        let context = &self.context;
        let sandbox = self.live_sandbox(id).await?;
        let (now, word) = match mode {
            RotationMode::Graceful => (context.now(), "graceful"),
            RotationMode::Immediate => (context.now(), "immediate"),
        };
        let old_until = (mode == RotationMode::Graceful).then(|| now.plus(LONGEST_TOKEN_LIFE));
        let audit = AuditRecord::of_sandbox(now, &sandbox, "sandbox.key_rotated", word).by(caller, request_id);
        let rotated = match context.store.rotate_key(&sandbox.id, &Rotation { now, old_until }, &audit).await.map_err(store_error)? {
            Rotated::Rotated(sandbox) => sandbox,
            Rotated::TooSoon(until) => return Err(too_soon(until, now)),
            Rotated::Gone => return Err(not_found()),
        };
        self.lifecycle.control_push.push_soon(&rotated.id, PUSH_WAIT).await;
        let old_keys_until = rotated.old_keys.map(|old| old.until);
        Ok(RotateKeyResponse { sandbox_id: rotated.id, generation: rotated.generation, old_keys_until })
    }

    /// Ends a sandbox of any workspace, with every session that uses it.
    pub async fn end_sandbox(&self, caller: &Caller, id: &str, request_id: &RequestId) -> Result<(), ApiError> {
        access::must_be_operator(&caller.principal, "end sandboxes of others")?;
        let sandbox = self.live_sandbox(id).await?;
        let audit = AuditRecord::of_sandbox(self.context.now(), &sandbox, "sandbox.deleted", "by an operator").by(caller, request_id);
        let lifecycle = self.lifecycle.clone();
        let deleting = self.context.background.spawn(async move { lifecycle.terminate(&sandbox, "an operator ended it", audit).await });
        deleting.await.map_err(|_| ApiError::new(ErrorCode::Internal, "deleting was interrupted; try again"))?
    }

    async fn live_sandbox(&self, id: &str) -> Result<Sandbox, ApiError> {
        let id: SandboxId = id.parse().map_err(|_| not_found())?;
        let found = self.context.store.sandbox(&id).await.map_err(store_error)?;
        found.filter(|s| s.ended_at.is_none()).ok_or_else(not_found)
    }
}

fn not_found() -> ApiError {
    ApiError::new(ErrorCode::SandboxNotFound, "there is no sandbox with this id")
}

fn too_soon(until: Timestamp, now: Timestamp) -> ApiError {
    let message =
        format!("mode: tokens of an older key are valid until {until}; rotate with `graceful` after that, or with `immediate` now");
    let retry_after = u32::try_from(until.saturating_since(now).as_secs()).ok();
    ApiError { retry_after, ..ApiError::new(ErrorCode::SandboxConflict, message) }
}

enum RevocationTarget<'a> {
    /// Id of a token or a share.
    Jti(String),
    Grant(KeyId),
    Session(&'a str),
    Principal(&'a str),
    Sandbox(&'a str),
}

/// The one item that a request names. Its value is never repeated in a message unless it is an id: it may be a secret in
/// the wrong field.
fn target_of(params: &RevokeRequest) -> Result<RevocationTarget<'_>, ApiError> {
    let RevokeRequest { jti, grant, session, principal, sandbox, workspace } = params;
    let fields = [jti, grant, session, principal, sandbox].map(|f| f.as_deref());
    if fields.iter().flatten().count() != 1 {
        return Err(ApiError::invalid("jti: send exactly one of jti, grant, session, principal and sandbox"));
    }
    if fields.iter().flatten().copied().chain(workspace.as_deref()).any(|v| !is_external_id(v)) {
        return Err(ApiError::invalid("jti, grant, session, principal, sandbox: must have 1 to 256 characters and no control characters"));
    }
    match fields {
        [Some(jti), ..] if jti.parse::<TokenId>().is_ok() || jti.parse::<ShareId>().is_ok() => Ok(RevocationTarget::Jti(jti.to_owned())),
        [Some(_), ..] => Err(ApiError::invalid("jti: must be a token's or a share's id, `tok_…` or `shr_…`; never send the token itself")),
        [_, Some(grant), ..] => grant
            .parse()
            .map(RevocationTarget::Grant)
            .map_err(|_| ApiError::invalid("grant: must be an API key's id, `key_…`; never send the key itself")),
        [_, _, Some(session), ..] => Ok(RevocationTarget::Session(session)),
        [_, _, _, Some(principal), _] => Ok(RevocationTarget::Principal(principal)),
        [.., sandbox] => Ok(RevocationTarget::Sandbox(sandbox.unwrap_or_default())),
    }
}

fn describe(tokens: &RevokedTokens) -> String {
    match tokens {
        RevokedTokens::Jti(jti) => format!("jti {jti}"),
        RevokedTokens::Earlier { of, value, .. } => format!("{of:?} {value}").to_lowercase(),
    }
}
