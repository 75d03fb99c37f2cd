//! Token verification: reads the claims of tokens that are presented to the broker, after verifying them.

use cobox_protocol::{
    ApiError, CapabilitySet, Secret,
    token::{IntrospectedToken, Introspection},
};
use cobox_token::{Claims, TokenError};

use crate::domain::{
    access,
    context::{BrokerContext, store_error},
    model::{Caller, Sandbox},
    token_signer::{TokenFormat, hash, possession_check_time, token_refused, unverified_claims},
};

/// The claims of a token, if it is valid for this sandbox now.
pub async fn verify(context: &BrokerContext, sandbox: &Sandbox, token: &Secret) -> Result<Claims, ApiError> {
    let now = context.now();
    let revoked = context.store.revocations(sandbox, now).await.map_err(store_error)?;
    match TokenFormat::of(token) {
        TokenFormat::Jwt => context.tokens.verify(sandbox, token, &revoked, now),
        TokenFormat::Opaque => {
            let claims = claims_of_opaque(context, token).await?;
            context.tokens.verify_stored(sandbox, &claims, &revoked, now)?;
            Ok(claims)
        }
    }
}

/// As [`verify`], but a token that expired within the last hour still counts.
pub async fn verify_possession(context: &BrokerContext, sandbox: &Sandbox, token: &Secret) -> Result<Claims, ApiError> {
    let now = context.now();
    let revoked = context.store.revocations(sandbox, now).await.map_err(store_error)?;
    match TokenFormat::of(token) {
        TokenFormat::Jwt => context.tokens.verify_possession(sandbox, token, &revoked, now),
        TokenFormat::Opaque => {
            let claims = claims_of_opaque(context, token).await?;
            context.tokens.verify_stored(sandbox, &claims, &revoked, possession_check_time(claims.exp, now)?)?;
            Ok(claims)
        }
    }
}

async fn claims_of_opaque(context: &BrokerContext, token: &Secret) -> Result<Claims, ApiError> {
    let known = context.store.opaque_token(&hash(token)).await.map_err(store_error)?;
    known.ok_or_else(|| token_refused(TokenError::UnknownKey)).map_err(|e| ApiError { message: "the token is unknown".to_owned(), ..e })
}

/// Reports for any token whether it is valid and what it allows. For operators.
pub async fn introspect(context: &BrokerContext, caller: &Caller, token: &Secret) -> Result<Introspection, ApiError> {
    access::must_be_operator(&caller.principal, "introspect tokens")?;
    let aud = match TokenFormat::of(token) {
        TokenFormat::Jwt => unverified_claims(token).map(|c| c.aud),
        TokenFormat::Opaque => context.store.opaque_token(&hash(token)).await.map_err(store_error)?.map(|c| c.aud),
    };
    let Some(aud) = aud else { return Ok(Introspection::default()) };
    let Some(sandbox) = context.store.sandbox(&aud).await.map_err(store_error)? else { return Ok(Introspection::default()) };
    match verify(context, &sandbox, token).await {
        Ok(claims) if sandbox.ended_at.is_none() && claims.exp > context.now().unix() => {
            Ok(Introspection { active: true, token: Some(introspected(claims, &sandbox, TokenFormat::of(token))) })
        }
        Ok(_) => Ok(Introspection::default()),
        Err(e) if e.code.status() == 401 => Ok(Introspection::default()),
        Err(e) => Err(e),
    }
}

fn introspected(claims: Claims, sandbox: &Sandbox, format: TokenFormat) -> IntrospectedToken {
    let scope: CapabilitySet = claims.scope;
    IntrospectedToken {
        token_type: "Bearer".to_owned(),
        token_format: format.as_str().to_owned(),
        scope: scope.legacy_names().join(" "),
        granted_capabilities: scope,
        iss: claims.iss,
        username: claims.sub.clone(),
        sub: claims.sub,
        aud: claims.aud.clone(),
        iat: claims.iat,
        nbf: claims.nbf,
        exp: claims.exp,
        jti: claims.jti,
        actor_type: claims.act.kind,
        actor_id: claims.act.id,
        sid: claims.sid,
        thread_id: claims.thread_id,
        sandbox_id: claims.aud,
        workspace: sandbox.workspace.clone(),
        generation: claims.generation,
        grant: claims.grant,
        parent: claims.parent,
    }
}
