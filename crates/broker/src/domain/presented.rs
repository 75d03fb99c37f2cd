//! Token verification: reads the claims of tokens that are presented to the broker, after verifying them.

use cobox_protocol::{
    ApiError, CapabilitySet, Secret, Timestamp,
    token::{IntrospectedToken, Introspection},
};
use cobox_token::{Claims, TokenError};

use super::{
    access,
    deployment::{Deployment, internal},
    issue::{TokenFormat, hash},
    model::{Caller, Sandbox},
    tokens::{claimed, moment_of_possession, refused},
};

impl Deployment {
    /// The claims of a token, if it is valid for this sandbox now.
    pub async fn claims_of(&self, sandbox: &Sandbox, token: &Secret) -> Result<Claims, ApiError> {
        let now = self.now();
        let revoked = self.store.revocations(sandbox, now).await.map_err(internal)?;
        match TokenFormat::of(token) {
            TokenFormat::Jwt => self.tokens.verify(sandbox, token, &revoked, now),
            TokenFormat::Opaque => {
                let claims = self.stands_for(token).await?;
                self.tokens.verify_stored(sandbox, &claims, &revoked, now)?;
                Ok(claims)
            }
        }
    }

    /// As [`Deployment::claims_of`], but a token that expired within the last hour still counts.
    pub async fn possession_of(&self, sandbox: &Sandbox, token: &Secret) -> Result<Claims, ApiError> {
        let now = self.now();
        let revoked = self.store.revocations(sandbox, now).await.map_err(internal)?;
        match TokenFormat::of(token) {
            TokenFormat::Jwt => self.tokens.verify_possession(sandbox, token, &revoked, now),
            TokenFormat::Opaque => {
                let claims = self.stands_for(token).await?;
                self.tokens.verify_stored(sandbox, &claims, &revoked, moment_of_possession(claims.exp, now)?)?;
                Ok(claims)
            }
        }
    }

    async fn stands_for(&self, token: &Secret) -> Result<Claims, ApiError> {
        let known = self.store.opaque_token(&hash(token)).await.map_err(internal)?;
        known.ok_or_else(|| refused(TokenError::UnknownKey)).map_err(|e| ApiError { message: "the token is unknown".to_owned(), ..e })
    }

    /// Reports for any token whether it is valid and what it allows. For operators.
    pub async fn introspect(&self, caller: &Caller, token: &Secret) -> Result<Introspection, ApiError> {
        access::must_be_operator(&caller.principal, "look into tokens")?;
        let aud = match TokenFormat::of(token) {
            TokenFormat::Jwt => claimed(token).map(|c| c.aud),
            TokenFormat::Opaque => self.store.opaque_token(&hash(token)).await.map_err(internal)?.map(|c| c.aud),
        };
        let Some(aud) = aud else { return Ok(Introspection::default()) };
        let Some(sandbox) = self.store.sandbox(&aud).await.map_err(internal)? else { return Ok(Introspection::default()) };
        match self.claims_of(&sandbox, token).await {
            Ok(claims) if sandbox.ended_at.is_none() && claims.exp > self.now().unix() => {
                Ok(Introspection { active: true, token: Some(told(claims, &sandbox, TokenFormat::of(token))) })
            }
            Ok(_) => Ok(Introspection::default()),
            Err(e) if e.code.status() == 401 => Ok(Introspection::default()),
            Err(e) => Err(e),
        }
    }

    /// Maximum remaining lifetime of a new token: until the session's hard end, or the sandbox's if there is no session.
    pub fn left(&self, sandbox: &Sandbox, session: Option<&super::model::Session>, now: Timestamp) -> std::time::Duration {
        let base = session.map_or(std::time::Duration::ZERO, |s| s.active_base);
        self.lifetimes(sandbox).hard_ttl.saturating_sub(sandbox.active_until(now).saturating_sub(base))
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
