//! Pools: running standby sandboxes of a template that can be taken at once.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, KeyId, PoolId,
    session::{Access, State},
};

use super::{
    in_progress::InProgress,
    records::{Pool, PoolTrouble},
    sandbox_spec::{self, MakingWish, Recipe, new_sandbox},
    sandboxes,
};
use crate::{
    domain::{
        access::{self, request_context::Asking},
        context::{Deployment, internal},
        lifecycle::transitions::Lifecycle,
        model::{AuditRecord, Caller, Principal, Sandbox},
    },
    store::{AddedKind, AddedMember, ChangedKind, PoolTaking},
};

/// Maximum number of pools per workspace.
pub const MAX_POOLS: u32 = 20;
/// Maximum number of standby sandboxes per pool; each is a running one.
pub const MAX_REPLICAS: u32 = 50;
/// Concurrent starts per pool: a start is short, and other sandboxes need to start too.
const STARTS_AT_ONCE: usize = 4;
/// How often a client that waits for a pool checks it.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a member's start is awaited before it is left to continue in the background.
const START_WAIT: Duration = Duration::from_secs(60);
/// Pause after a failed start; it doubles with each failure.
const RETRY_AFTER: Duration = Duration::from_secs(5);
/// Maximum pause between starts: once the cause is fixed, the pool is filled within this time.
const RETRY_WITHIN: Duration = Duration::from_secs(600);
/// Longest stored reason of a failure, in characters.
const MAX_REASON_CHARS: usize = 500;

/// The pool from which sandboxes of a template are taken, if there is one.
pub async fn taking(d: &Deployment, workspace: &str, template: &str) -> Result<Option<PoolTaking>, ApiError> {
    let pools = d.store.pools(workspace).await.map_err(internal)?;
    let alive_since = d.alive_since();
    Ok(pools.into_iter().find(|p| p.template == template && p.replicas > 0).map(|p| PoolTaking { pool: p.id, alive_since }))
}

/// Parameters of a new pool.
pub struct PoolWish {
    pub name: String,
    pub template: String,
    pub replicas: u32,
}

pub struct Pools {
    deployment: Arc<Deployment>,
    lifecycle: Arc<Lifecycle>,
    in_progress: InProgress,
}

impl Pools {
    pub fn new(deployment: Arc<Deployment>, lifecycle: Arc<Lifecycle>) -> Self {
        Self { deployment, lifecycle, in_progress: InProgress::default() }
    }

    pub async fn create_pool(self: &Arc<Self>, asking: &Asking<'_>, wish: PoolWish) -> Result<Pool, ApiError> {
        let (d, principal) = (&self.deployment, &asking.caller.principal);
        sandboxes::check_name(&wish.name)?;
        check_replicas(wish.replicas)?;
        d.policy().check_provider(&asking.caller.subject(), d.provider.name())?;
        // Checks that its sandboxes can be created at all.
        sandbox_spec::resolve(d, asking.caller, &of_template(&wish.template)).await?;
        let pool = Pool {
            id: PoolId::new(),
            workspace: principal.workspace.clone(),
            name: wish.name,
            template: wish.template,
            owner: principal.name.clone(),
            owner_kind: principal.kind,
            replicas: wish.replicas,
            trouble: PoolTrouble::default(),
            created_at: d.now(),
            updated_at: d.now(),
        };
        let audit = asking.audit(self.deployment.now(), "pool.created", &format!("{} of {} {}", pool.name, pool.replicas, pool.template));
        match d.store.add_pool(&pool, MAX_POOLS, &audit).await.map_err(internal)? {
            AddedKind::Added => {}
            AddedKind::NameTaken => return Err(taken(&pool.name)),
            AddedKind::TooMany | AddedKind::TooLarge => {
                return Err(ApiError::new(
                    ErrorCode::QuotaExceeded,
                    format!("the workspace has {MAX_POOLS} pools, which is its limit; delete some first"),
                ));
            }
        }
        self.keep_pool_soon(pool.clone());
        Ok(pool)
    }

    pub async fn pools(&self, asking: &Asking<'_>) -> Result<Vec<Pool>, ApiError> {
        self.deployment.store.pools(&asking.caller.principal.workspace).await.map_err(internal)
    }

    pub async fn pool(&self, asking: &Asking<'_>, name: &str) -> Result<Pool, ApiError> {
        let found = self.deployment.store.pool(&asking.caller.principal.workspace, name).await.map_err(internal)?;
        found.ok_or_else(|| not_found(name))
    }

    /// Number of its standby sandboxes that are ready.
    pub async fn waiting(&self, pool: &Pool) -> Result<u32, ApiError> {
        let d = &self.deployment;
        let mut ready = 0;
        for member in d.store.pool_members(&pool.id).await.map_err(internal)? {
            let is_ready = member.is_running() && d.nodes.is_alive(&*d.store, &member.node, d.now()).await.map_err(internal)?;
            ready += u32::from(is_ready);
        }
        Ok(ready)
    }

    /// Returns when the pool is full, or when it is certain that it won't be in time.
    pub async fn wait_for_pool(self: &Arc<Self>, pool: &Pool, wait: Duration) -> Result<(), ApiError> {
        let d = &self.deployment;
        let until = d.now().plus(wait);
        let full = async {
            while self.waiting(pool).await? < pool.replicas {
                self.keep_pool(pool).await?;
                let now = d.store.pool_by_id(&pool.id).await.map_err(internal)?.ok_or_else(|| not_found(&pool.name))?;
                if let PoolTrouble { retry_at: Some(retry_at), reason: Some(reason), .. } = now.trouble
                    && retry_at >= until
                {
                    let message = format!("pool {} can't be filled, and is tried again later: {reason}", pool.name);
                    return Err(ApiError::new(ErrorCode::SandboxStarting, message));
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
            Ok(())
        };
        let late = || {
            let message = format!("pool {} is not full after {} s; it is being filled", pool.name, wait.as_secs());
            Err(ApiError::new(ErrorCode::SandboxStarting, message))
        };
        tokio::time::timeout(wait, full).await.unwrap_or_else(|_| late())
    }

    pub async fn change_pool(
        self: &Arc<Self>,
        asking: &Asking<'_>,
        name: &str,
        new_name: Option<String>,
        replicas: Option<u32>,
    ) -> Result<Pool, ApiError> {
        let d = &self.deployment;
        let pool = self.pool(asking, name).await?;
        access::may_end(&asking.caller.principal, &pool)?;
        new_name.as_deref().map_or(Ok(()), sandboxes::check_name)?;
        replicas.map_or(Ok(()), check_replicas)?;
        let changed = Pool {
            name: new_name.unwrap_or_else(|| pool.name.clone()),
            replicas: replicas.unwrap_or(pool.replicas),
            updated_at: d.now(),
            trouble: PoolTrouble::default(),
            ..pool.clone()
        };
        let audit =
            asking.audit(self.deployment.now(), "pool.changed", &format!("{} to {} of {}", pool.name, changed.name, changed.replicas));
        match d.store.change_pool(&pool, &changed, &audit).await.map_err(internal)? {
            ChangedKind::Changed => {}
            ChangedKind::NameTaken => return Err(taken(&changed.name)),
            ChangedKind::Gone => return Err(not_found(name)),
        }
        self.keep_pool_soon(changed.clone());
        Ok(changed)
    }

    pub async fn delete_pool(self: &Arc<Self>, asking: &Asking<'_>, name: &str) -> Result<(), ApiError> {
        let pool = self.pool(asking, name).await?;
        access::may_end(&asking.caller.principal, &pool)?;
        let audit = asking.audit(self.deployment.now(), "pool.deleted", &pool.name);
        if !self.deployment.store.remove_pool(&pool, &audit).await.map_err(internal)? {
            return Err(not_found(name));
        }
        self.keep_pool_soon(Pool { replicas: 0, ..pool });
        Ok(())
    }

    fn keep_pool_soon(self: &Arc<Self>, pool: Pool) {
        let this = self.clone();
        self.deployment.background.spawn(async move {
            if let Err(error) = this.keep_pool(&pool).await {
                tracing::warn!(pool = %pool.id, %error, "a pool could not be looked after; it is tried again");
            }
        });
    }

    pub async fn keep_pools(self: &Arc<Self>) -> Result<(), ApiError> {
        let d = &self.deployment;
        for pool in d.store.all_pools().await.map_err(internal)? {
            if let Err(error) = self.keep_pool(&pool).await {
                tracing::warn!(pool = %pool.id, %error, "a pool could not be looked after; it is tried again");
            }
        }
        for member in d.store.poolless_members().await.map_err(internal)? {
            self.lifecycle.end_pool_member(&member, "its pool was deleted").await?;
        }
        Ok(())
    }

    /// Ends surplus members and starts missing ones. Every broker does this; each change is made once.
    async fn keep_pool(self: &Arc<Self>, pool: &Pool) -> Result<(), ApiError> {
        let d = &self.deployment;
        let Some(_under_way) = self.in_progress.begin(pool.id.as_str()) else { return Ok(()) };
        let pool = match d.store.pool_by_id(&pool.id).await.map_err(internal)? {
            Some(pool) => pool,
            None => Pool { replicas: 0, ..pool.clone() },
        };
        let members = d.store.pool_members(&pool.id).await.map_err(internal)?;
        if pool.replicas == 0 && members.is_empty() {
            return Ok(());
        }
        let principal = Principal { workspace: pool.workspace.clone(), name: pool.owner.clone(), kind: pool.owner_kind };
        // This caller presents no key and gets no token: it only serves to check what the owner may create.
        let owner = Caller::new(principal, KeyId::new());
        let recipe = match self.recipe_of(&pool, &owner).await {
            Ok(recipe) => recipe,
            Err(error) => {
                let reason = Some(cut(&error.message));
                self.note_trouble(&pool, PoolTrouble { reason, ..pool.trouble.clone() }).await?;
                // An owner that may no longer create such sandboxes keeps no standby ones either. Other errors may be
                // temporary, so the members stay.
                if error.code != ErrorCode::Forbidden {
                    return Err(error);
                }
                None
            }
        };
        if recipe.is_some() && pool.trouble.failures == 0 {
            self.note_trouble(&pool, PoolTrouble::default()).await?;
        }
        let (mut wanted, mut unwanted) = (Vec::new(), Vec::new());
        for member in members {
            let is_usable = member.is_running() || member.state == State::Provisioning;
            let is_wanted = is_usable
                && recipe.as_ref().is_some_and(|r| r.making.is_equivalent_to(&member.making, member.node == d.node))
                && d.nodes.is_alive(&*d.store, &member.node, d.now()).await.map_err(internal)?;
            if is_wanted { wanted.push(member) } else { unwanted.push(member) }
        }
        let surplus = wanted.iter().skip(pool.replicas as usize);
        for member in unwanted.iter().chain(surplus) {
            self.lifecycle.end_pool_member(member, "its pool no longer wants it").await?;
        }
        let Some(recipe) = recipe.filter(|r| r.node == d.node) else { return Ok(()) };
        // After a failure only one start is tried.
        let at_once = match pool.trouble.retry_at {
            Some(retry_at) if d.now() < retry_at => return Ok(()),
            Some(_) => 1,
            None => STARTS_AT_ONCE,
        };
        // The outcome of earlier starts must be stored first.
        let Some(starting) = self.in_progress.begin(&format!("{}/starting", pool.id)).map(Arc::new) else { return Ok(()) };
        let lacking = (pool.replicas as usize).saturating_sub(wanted.len()).min(at_once);
        for _ in 0..lacking {
            let fresh = new_sandbox(d, &owner, None, Access::Owner);
            let fresh = Sandbox { making: recipe.making.clone(), template: recipe.template.clone(), pool: Some(pool.id.clone()), ..fresh };
            let quota = d.policy().quota(&owner.subject(), &d.config);
            let audit = AuditRecord::of_sandbox(d.now(), &fresh, "sandbox.created", &format!("for pool {}", pool.name));
            match d.store.add_pool_member(&fresh, &quota, &audit).await.map_err(internal)? {
                AddedMember::Added => {}
                AddedMember::NotWanted => break,
                AddedMember::QuotaReached(_) => {
                    tracing::warn!(pool = %pool.id, "a pool can't be filled: the limit of sandboxes is reached");
                    break;
                }
                AddedMember::MadeOfGone(what) => return Err(sandbox_spec::gone(&what)),
            }
            let (this, pool, starting) = (self.clone(), pool.clone(), starting.clone());
            d.background.spawn(async move {
                let _starting = starting;
                let trouble = match this.lifecycle.bring_up(&fresh.id, START_WAIT).await {
                    Ok(_) => PoolTrouble::default(),
                    // The start continues by itself, or the sandbox was ended.
                    Err(error) if matches!(error.code, ErrorCode::SandboxStarting | ErrorCode::SessionExpired) => return,
                    Err(error) => {
                        let failures = pool.trouble.failures.saturating_add(1);
                        let retry_at = Some(this.deployment.now().plus(pause_after(failures)));
                        PoolTrouble { failures, retry_at, reason: Some(cut(&error.message)) }
                    }
                };
                if let Err(error) = this.note_trouble(&pool, trouble).await {
                    tracing::error!(pool = %pool.id, %error, "what came of a pool's start could not be written down");
                }
            });
        }
        Ok(())
    }

    /// The spec of the pool's sandboxes, as far as its owner may create them. `None` if no replicas are wanted.
    async fn recipe_of(&self, pool: &Pool, owner: &Caller) -> Result<Option<Recipe>, ApiError> {
        let d = &self.deployment;
        if pool.replicas == 0 {
            return Ok(None);
        }
        if !d.store.has_valid_key(&pool.workspace, &pool.owner, d.now()).await.map_err(internal)? {
            let message = format!("{}, whose pool it is, has no valid key any more; an operator can delete the pool", pool.owner);
            return Err(ApiError::new(ErrorCode::Forbidden, message));
        }
        d.policy().check_provider(&owner.subject(), d.provider.name())?;
        sandbox_spec::resolve(d, owner, &of_template(&pool.template)).await.map(Some)
    }

    async fn note_trouble(&self, pool: &Pool, trouble: PoolTrouble) -> Result<(), ApiError> {
        if pool.trouble != trouble {
            self.deployment.store.note_pool_trouble(pool, &trouble).await.map_err(internal)?;
        }
        Ok(())
    }
}

fn pause_after(failures: u32) -> Duration {
    RETRY_AFTER.saturating_mul(2u32.saturating_pow(failures.saturating_sub(1))).min(RETRY_WITHIN)
}

fn cut(reason: &str) -> String {
    reason.chars().take(MAX_REASON_CHARS).collect()
}

fn of_template(name: &str) -> MakingWish {
    MakingWish { template: Some(name.to_owned()), ..MakingWish::default() }
}

fn check_replicas(replicas: u32) -> Result<(), ApiError> {
    match replicas <= MAX_REPLICAS {
        true => Ok(()),
        false => Err(ApiError::invalid(format!("replicas: {replicas} are too many; at most {MAX_REPLICAS} are kept waiting"))),
    }
}

fn not_found(name: &str) -> ApiError {
    let shown: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    ApiError::new(ErrorCode::PoolNotFound, format!("there is no pool `{shown}`"))
}

fn taken(name: &str) -> ApiError {
    ApiError::new(ErrorCode::NameTaken, format!("name: there is a pool {name} already"))
}
