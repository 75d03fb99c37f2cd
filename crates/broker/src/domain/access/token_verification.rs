//! Token verification: reads the claims of tokens that are presented to the broker, after verifying them.

use cobox_protocol::{
    ApiError, CapabilitySet, Secret,
    token::{IntrospectedToken, Introspection},
};
use cobox_token::{Claims, TokenError};

use crate::domain::{
    access,
    context::{Deployment, internal},
    model::{Caller, Sandbox},
    token_signer::{TokenFormat, claimed, hash, moment_of_possession, refused},
};

/// The claims of a token, if it is valid for this sandbox now.
pub async fn verify(d: &Deployment, sandbox: &Sandbox, token: &Secret) -> Result<Claims, ApiError> {
    let now = d.now();
    let revoked = d.store.revocations(sandbox, now).await.map_err(internal)?;
    match TokenFormat::of(token) {
        TokenFormat::Jwt => d.tokens.verify(sandbox, token, &revoked, now),
        TokenFormat::Opaque => {
            let claims = claims_of_opaque(d, token).await?;
            d.tokens.verify_stored(sandbox, &claims, &revoked, now)?;
            Ok(claims)
        }
    }
}

/// As [`verify`], but a token that expired within the last hour still counts.
pub async fn verify_possession(d: &Deployment, sandbox: &Sandbox, token: &Secret) -> Result<Claims, ApiError> {
    let now = d.now();
    let revoked = d.store.revocations(sandbox, now).await.map_err(internal)?;
    match TokenFormat::of(token) {
        TokenFormat::Jwt => d.tokens.verify_possession(sandbox, token, &revoked, now),
        TokenFormat::Opaque => {
            let claims = claims_of_opaque(d, token).await?;
            d.tokens.verify_stored(sandbox, &claims, &revoked, moment_of_possession(claims.exp, now)?)?;
            Ok(claims)
        }
    }
}

async fn claims_of_opaque(d: &Deployment, token: &Secret) -> Result<Claims, ApiError> {
    let known = d.store.opaque_token(&hash(token)).await.map_err(internal)?;
    known.ok_or_else(|| refused(TokenError::UnknownKey)).map_err(|e| ApiError { message: "the token is unknown".to_owned(), ..e })
}

/// Reports for any token whether it is valid and what it allows. For operators.
pub async fn introspect(d: &Deployment, caller: &Caller, token: &Secret) -> Result<Introspection, ApiError> {
    access::must_be_operator(&caller.principal, "look into tokens")?;
    let aud = match TokenFormat::of(token) {
        TokenFormat::Jwt => claimed(token).map(|c| c.aud),
        TokenFormat::Opaque => d.store.opaque_token(&hash(token)).await.map_err(internal)?.map(|c| c.aud),
    };
    let Some(aud) = aud else { return Ok(Introspection::default()) };
    let Some(sandbox) = d.store.sandbox(&aud).await.map_err(internal)? else { return Ok(Introspection::default()) };
    match verify(d, &sandbox, token).await {
        Ok(claims) if sandbox.ended_at.is_none() && claims.exp > d.now().unix() => {
            Ok(Introspection { active: true, token: Some(told(claims, &sandbox, TokenFormat::of(token))) })
        }
        Ok(_) => Ok(Introspection::default()),
        Err(e) if e.code.status() == 401 => Ok(Introspection::default()),
        Err(e) => Err(e),
    }
}

fn told(claims: Claims, sandbox: &Sandbox, format: TokenFormat) -> IntrospectedToken {
    let scope: CapabilitySet = claims.scope;
    IntrospectedToken {
        token_type: "Bearer".to_owned(),
        token_format: format.word().to_owned(),
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
