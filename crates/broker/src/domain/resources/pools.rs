//! Pools: running standby sandboxes of a template that can be taken at once.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, KeyId, PoolId,
    session::{Access, State},
    text::{MAX_SHOWN_CHARS, printable},
};

use super::{
    records::{Pool, PoolTrouble},
    running_operations::InProgress,
    sandbox_spec::{self, ResolvedSpec, SandboxSpecParams, new_sandbox},
    sandboxes,
};
use crate::{
    domain::{
        access::{self, request_context::RequestContext},
        context::{BrokerContext, store_error},
        lifecycle::transitions::Lifecycle,
        model::{AuditRecord, Caller, Principal, Sandbox},
    },
    store::{AddedPoolMember, AddedResource, ChangedResource, PoolAssignment},
};

/// Maximum number of pools per workspace.
pub const MAX_POOLS: u32 = 20;
/// Maximum number of standby sandboxes per pool; each is a running one.
pub const MAX_REPLICAS: u32 = 50;
/// Concurrent starts per pool: a start is short, and other sandboxes need to start too.
const STARTS_AT_ONCE: usize = 4;
/// How often a client that waits for a pool checks it.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How long a member's start is awaited before it is left to continue in the background.
const START_WAIT: Duration = Duration::from_secs(60);
/// Pause after a failed start; it doubles with each failure.
const RETRY_AFTER: Duration = Duration::from_secs(5);
/// Maximum pause between starts: once the cause is fixed, the pool is filled within this time.
const RETRY_WITHIN: Duration = Duration::from_secs(600);
/// Longest stored reason of a failure, in characters.
const MAX_REASON_CHARS: usize = 500;

/// The pool from which sandboxes of a template are taken, if there is one.
pub async fn pool_to_take_from(context: &BrokerContext, workspace: &str, template: &str) -> Result<Option<PoolAssignment>, ApiError> {
    let pools = context.store.pools(workspace).await.map_err(store_error)?;
    let alive_since = context.alive_since();
    Ok(pools.into_iter().find(|p| p.template == template && p.replicas > 0).map(|p| PoolAssignment { pool: p.id, alive_since }))
}

/// Parameters of a new pool.
pub struct PoolParams {
    pub name: String,
    pub template: String,
    pub replicas: u32,
}

pub struct Pools {
    context: Arc<BrokerContext>,
    lifecycle: Arc<Lifecycle>,
    in_progress: InProgress,
}

impl Pools {
    pub fn new(context: Arc<BrokerContext>, lifecycle: Arc<Lifecycle>) -> Self {
        Self { context, lifecycle, in_progress: InProgress::default() }
    }

    pub async fn create(self: &Arc<Self>, request: &RequestContext<'_>, params: PoolParams) -> Result<Pool, ApiError> {
        let (context, principal) = (&self.context, &request.caller.principal);
        sandboxes::check_name(&params.name)?;
        check_replicas(params.replicas)?;
        let policy = context.policy();
        policy.check_provider(&request.caller.subject(), context.provider.name())?;
        // Checks that its sandboxes can be created at all.
        sandbox_spec::resolve(context, &policy, request.caller, &params_of_template(&params.template)).await?;
        let pool = Pool {
            id: PoolId::new(),
            workspace: principal.workspace.clone(),
            name: params.name,
            template: params.template,
            owner: principal.name.clone(),
            owner_kind: principal.kind,
            replicas: params.replicas,
            trouble: PoolTrouble::default(),
            created_at: context.now(),
            updated_at: context.now(),
        };
        let audit = request.audit(self.context.now(), "pool.created", &format!("{} of {} {}", pool.name, pool.replicas, pool.template));
        match context.store.add_pool(&pool, MAX_POOLS, &audit).await.map_err(store_error)? {
            AddedResource::Added => {}
            AddedResource::NameTaken => return Err(name_taken(&pool.name)),
            AddedResource::TooMany | AddedResource::TooLarge => {
                return Err(ApiError::new(
                    ErrorCode::QuotaExceeded,
                    format!("the workspace has {MAX_POOLS} pools, which is its limit; delete some first"),
                ));
            }
        }
        self.reconcile_soon(pool.clone());
        Ok(pool)
    }

    pub async fn list(&self, request: &RequestContext<'_>) -> Result<Vec<Pool>, ApiError> {
        self.context.store.pools(&request.caller.principal.workspace).await.map_err(store_error)
    }

    pub async fn get(&self, request: &RequestContext<'_>, name: &str) -> Result<Pool, ApiError> {
        let found = self.context.store.pool(&request.caller.principal.workspace, name).await.map_err(store_error)?;
        found.ok_or_else(|| not_found(name))
    }

    /// Number of its standby sandboxes that are ready.
    pub async fn ready_members(&self, pool: &Pool) -> Result<u32, ApiError> {
        let context = &self.context;
        let mut ready = 0;
        for member in context.store.pool_members(&pool.id).await.map_err(store_error)? {
            let is_ready =
                member.is_running() && context.nodes.is_alive(&context.store, &member.node, context.now()).await.map_err(store_error)?;
            ready += u32::from(is_ready);
        }
        Ok(ready)
    }

    /// Returns when the pool is full, or when it is certain that it won't be in time.
    pub async fn wait_until_full(self: &Arc<Self>, pool: &Pool, wait: Duration) -> Result<(), ApiError> {
        let context = &self.context;
        let until = context.now().plus(wait);
        let full = async {
            while self.ready_members(pool).await? < pool.replicas {
                self.reconcile(pool).await?;
                let now = context.store.pool_by_id(&pool.id).await.map_err(store_error)?.ok_or_else(|| not_found(&pool.name))?;
                if let PoolTrouble { retry_at: Some(retry_at), reason: Some(reason), .. } = now.trouble
                    && retry_at >= until
                {
                    let message = format!("pool {} can't be filled; the broker retries later: {reason}", pool.name);
                    return Err(ApiError::new(ErrorCode::SandboxStarting, message));
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            Ok(())
        };
        let late = || {
            let message = format!("pool {} is not full after {} s; it is still being filled", pool.name, wait.as_secs());
            Err(ApiError::new(ErrorCode::SandboxStarting, message))
        };
        tokio::time::timeout(wait, full).await.unwrap_or_else(|_| late())
    }

    pub async fn change(
        self: &Arc<Self>,
        request: &RequestContext<'_>,
        name: &str,
        new_name: Option<String>,
        replicas: Option<u32>,
    ) -> Result<Pool, ApiError> {
        let context = &self.context;
        let pool = self.get(request, name).await?;
        access::may_end(&request.caller.principal, &pool)?;
        new_name.as_deref().map_or(Ok(()), sandboxes::check_name)?;
        replicas.map_or(Ok(()), check_replicas)?;
        let changed = Pool {
            name: new_name.unwrap_or_else(|| pool.name.clone()),
            replicas: replicas.unwrap_or(pool.replicas),
            updated_at: context.now(),
            trouble: PoolTrouble::default(),
            ..pool.clone()
        };
        let audit =
            request.audit(self.context.now(), "pool.changed", &format!("{} to {} of {}", pool.name, changed.name, changed.replicas));
        match context.store.change_pool(&pool, &changed, &audit).await.map_err(store_error)? {
            ChangedResource::Changed => {}
            ChangedResource::NameTaken => return Err(name_taken(&changed.name)),
            ChangedResource::Gone => return Err(not_found(name)),
        }
        self.reconcile_soon(changed.clone());
        Ok(changed)
    }

    pub async fn delete(self: &Arc<Self>, request: &RequestContext<'_>, name: &str) -> Result<(), ApiError> {
        let pool = self.get(request, name).await?;
        access::may_end(&request.caller.principal, &pool)?;
        let audit = request.audit(self.context.now(), "pool.deleted", &pool.name);
        if !self.context.store.remove_pool(&pool, &audit).await.map_err(store_error)? {
            return Err(not_found(name));
        }
        self.reconcile_soon(Pool { replicas: 0, ..pool });
        Ok(())
    }

    fn reconcile_soon(self: &Arc<Self>, pool: Pool) {
        let this = self.clone();
        self.context.background.spawn(async move {
            if let Err(error) = this.reconcile(&pool).await {
                tracing::warn!(pool = %pool.id, %error, "maintaining a pool failed; retrying");
            }
        });
    }

    pub async fn reconcile_all(self: &Arc<Self>) -> Result<(), ApiError> {
        let context = &self.context;
        for pool in context.store.all_pools().await.map_err(store_error)? {
            if let Err(error) = self.reconcile(&pool).await {
                tracing::warn!(pool = %pool.id, %error, "maintaining a pool failed; retrying");
            }
        }
        for member in context.store.members_of_deleted_pools().await.map_err(store_error)? {
            self.lifecycle.end_pool_member(&member, "its pool was deleted").await?;
        }
        Ok(())
    }

    /// Ends surplus members and starts missing ones. Every broker does this; each change is made once.
    async fn reconcile(self: &Arc<Self>, pool: &Pool) -> Result<(), ApiError> {
        let context = &self.context;
        let Some(_guard) = self.in_progress.begin(pool.id.as_str()) else { return Ok(()) };
        let pool = match context.store.pool_by_id(&pool.id).await.map_err(store_error)? {
            Some(pool) => pool,
            None => Pool { replicas: 0, ..pool.clone() },
        };
        let members = context.store.pool_members(&pool.id).await.map_err(store_error)?;
        if pool.replicas == 0 && members.is_empty() {
            return Ok(());
        }
        let principal = Principal { workspace: pool.workspace.clone(), name: pool.owner.clone(), kind: pool.owner_kind };
        // This caller presents no key and gets no token: it only serves to check what the owner may create.
        let owner = Caller::new(principal, KeyId::new());
        let resolved = match self.resolve_spec_of(&pool, &owner).await {
            Ok(resolved) => resolved,
            Err(error) => {
                let reason = Some(truncate(&error.message));
                self.store_trouble(&pool, PoolTrouble { reason, ..pool.trouble.clone() }).await?;
                // An owner that may no longer create such sandboxes keeps no standby ones either. Other errors may be
                // temporary, so the members stay.
                if error.code != ErrorCode::Forbidden {
                    return Err(error);
                }
                None
            }
        };
        if resolved.is_some() && pool.trouble.failures == 0 {
            self.store_trouble(&pool, PoolTrouble::default()).await?;
        }
        let (mut kept_members, mut surplus_members) = (Vec::new(), Vec::new());
        for member in members {
            let is_usable = member.is_running() || member.state == State::Provisioning;
            let is_wanted = is_usable
                && resolved.as_ref().is_some_and(|r| r.spec.is_equivalent_to(&member.spec, member.node == context.node))
                && context.nodes.is_alive(&context.store, &member.node, context.now()).await.map_err(store_error)?;
            if is_wanted { kept_members.push(member) } else { surplus_members.push(member) }
        }
        let surplus = kept_members.iter().skip(pool.replicas as usize);
        for member in surplus_members.iter().chain(surplus) {
            self.lifecycle.end_pool_member(member, "its pool no longer wants it").await?;
        }
        let Some(resolved) = resolved.filter(|r| r.node == context.node) else { return Ok(()) };
        // After a failure only one start is tried.
        let at_once = match pool.trouble.retry_at {
            Some(retry_at) if context.now() < retry_at => return Ok(()),
            Some(_) => 1,
            None => STARTS_AT_ONCE,
        };
        // The outcome of earlier starts must be stored first.
        let Some(starting) = self.in_progress.begin(&format!("{}/starting", pool.id)).map(Arc::new) else { return Ok(()) };
        let missing = (pool.replicas as usize).saturating_sub(kept_members.len()).min(at_once);
        for _ in 0..missing {
            let fresh = new_sandbox(context, &owner, None, Access::Owner);
            let fresh = Sandbox { spec: resolved.spec.clone(), template: resolved.template.clone(), pool: Some(pool.id.clone()), ..fresh };
            let quota = context.policy().quota(&owner.subject(), &context.config);
            let audit = AuditRecord::of_sandbox(context.now(), &fresh, "sandbox.created", &format!("for pool {}", pool.name));
            match context.store.add_pool_member(&fresh, &quota, &audit).await.map_err(store_error)? {
                AddedPoolMember::Added => {}
                AddedPoolMember::NotWanted => break,
                AddedPoolMember::QuotaReached(_) => {
                    tracing::warn!(pool = %pool.id, "a pool can't be filled: the limit on sandboxes is reached");
                    break;
                }
                AddedPoolMember::SpecPartMissing(what) => return Err(sandbox_spec::gone(&what)),
            }
            let (this, pool, starting) = (self.clone(), pool.clone(), starting.clone());
            context.background.spawn(async move {
                let _starting = starting;
                let trouble = match this.lifecycle.ensure_running(&fresh.id, START_WAIT).await {
                    Ok(_) => PoolTrouble::default(),
                    // The start continues by itself, or the sandbox was ended.
                    Err(error) if matches!(error.code, ErrorCode::SandboxStarting | ErrorCode::SessionExpired) => return,
                    Err(error) => {
                        let failures = pool.trouble.failures.saturating_add(1);
                        let retry_at = Some(this.context.now().plus(backoff(failures)));
                        PoolTrouble { failures, retry_at, reason: Some(truncate(&error.message)) }
                    }
                };
                if let Err(error) = this.store_trouble(&pool, trouble).await {
                    tracing::error!(pool = %pool.id, %error, "recording the outcome of a pool's start failed");
                }
            });
        }
        Ok(())
    }

    /// The spec of the pool's sandboxes, as far as its owner may create them. `None` if no replicas are wanted.
    async fn resolve_spec_of(&self, pool: &Pool, owner: &Caller) -> Result<Option<ResolvedSpec>, ApiError> {
        let context = &self.context;
        if pool.replicas == 0 {
            return Ok(None);
        }
        if !context.store.has_valid_key(&pool.workspace, &pool.owner, context.now()).await.map_err(store_error)? {
            let message = format!("{}, the owner of the pool, has no valid key; an operator can delete the pool", pool.owner);
            return Err(ApiError::new(ErrorCode::Forbidden, message));
        }
        let policy = context.policy();
        policy.check_provider(&owner.subject(), context.provider.name())?;
        sandbox_spec::resolve(context, &policy, owner, &params_of_template(&pool.template)).await.map(Some)
    }

    async fn store_trouble(&self, pool: &Pool, trouble: PoolTrouble) -> Result<(), ApiError> {
        if pool.trouble != trouble {
            self.context.store.note_pool_trouble(pool, &trouble).await.map_err(store_error)?;
        }
        Ok(())
    }
}

fn backoff(failures: u32) -> Duration {
    RETRY_AFTER.saturating_mul(2u32.saturating_pow(failures.saturating_sub(1))).min(RETRY_WITHIN)
}

fn truncate(reason: &str) -> String {
    reason.chars().take(MAX_REASON_CHARS).collect()
}

fn params_of_template(name: &str) -> SandboxSpecParams {
    SandboxSpecParams { template: Some(name.to_owned()), ..SandboxSpecParams::default() }
}

fn check_replicas(replicas: u32) -> Result<(), ApiError> {
    match replicas <= MAX_REPLICAS {
        true => Ok(()),
        false => Err(ApiError::invalid(format!("replicas: {replicas} is too many; the maximum is {MAX_REPLICAS}"))),
    }
}

fn not_found(name: &str) -> ApiError {
    let name = printable(name, MAX_SHOWN_CHARS);
    ApiError::new(ErrorCode::PoolNotFound, format!("there is no pool `{name}`"))
}

fn name_taken(name: &str) -> ApiError {
    ApiError::new(ErrorCode::NameTaken, format!("name: a pool {name} already exists"))
}
