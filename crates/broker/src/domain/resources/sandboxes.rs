//! Operations on sandboxes, with or without a session.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId,
    sandbox::{CreateSandbox, MAX_LIFETIME_SECONDS, PatchSandbox, SandboxInfo, is_sandbox_name},
    tags::{self, MAX_TAGS, TagFilter, Tags},
};

use super::{
    deleted_sandboxes::purge,
    sandbox_spec::{self, SandboxSpecParams, new_sandbox},
};
use crate::{
    domain::{
        access::{
            self,
            request_context::RequestContext,
            sandbox_lookup::{find, not_found},
        },
        context::{BrokerContext, store_error},
        lifecycle::{control_push::PUSH_WAIT, transitions::Lifecycle},
        model::{AuditRecord, Caller, Principal, Sandbox, Session},
    },
    policy::Quota,
    store::{AddedSandbox, ChangedSandbox, PageParams, QuotaReached, QuotaSubject, SandboxChange, Viewer},
};

/// Number of sandboxes named in a quota error: enough to choose one to delete.
const NAMED_AT_LIMIT: u32 = 3;
/// A caller's own tags plus those the broker sets.
const MAX_ALL_TAGS: usize = MAX_TAGS + 3;

pub struct Sandboxes {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
}

impl Sandboxes {
    /// Creates a sandbox without a session, from a template, a snapshot, resources, variables and volumes as `params` names
    /// them (see [`sandbox_spec::resolve`]); takes a standby sandbox from the template's pool if there is one. What can't be
    /// created is refused before anything is written, with a message for the caller. Returns a running sandbox, or one
    /// that is still starting when that takes longer than the caller waits: a second request would create another one.
    pub async fn create(&self, request: &RequestContext<'_>, params: CreateSandbox) -> Result<SandboxInfo, ApiError> {
        let context = &self.context;
        let spec_params = SandboxSpecParams::from(&params);
        params.name.as_deref().map_or(Ok(()), check_name)?;
        tags::check(&params.tags)?;
        let mut tags = params.tags;
        tags.entry(tags::CREATED_BY.to_owned()).or_insert_with(|| request.client.to_owned());
        tags.insert(tags::PRINCIPAL.to_owned(), request.caller.principal.name.clone());
        let (policy, subject) = (context.policy(), request.caller.subject());
        policy.check_provider(&subject, context.provider.name())?;
        let access = params.access.unwrap_or_else(|| policy.default_access(&subject));
        let resolved = sandbox_spec::resolve(context, &policy, request.caller, &spec_params).await?;
        let sandbox = new_sandbox(context, request.caller, params.name, access);
        let own_lease = params.lease_seconds.map(|seconds| parse_lifetime("lease_seconds", seconds)).transpose()?;
        let own_keep = params.keep_suspended_seconds.map(|seconds| parse_lifetime("keep_suspended_seconds", seconds)).transpose()?;
        let taking = resolved.taking.clone();
        let sandbox = resolved.into_sandbox(Sandbox { is_kept: params.keep.unwrap_or_default(), own_lease, own_keep, ..sandbox });
        let audit =
            AuditRecord::of_sandbox(context.now(), &sandbox, "sandbox.created", sandbox.name.as_deref().unwrap_or("without a name"))
                .by(request.caller, request.request_id);
        let quota = policy.quota(&subject, &context.config);
        if let Some(taking) = &taking
            && let Some(member) = context.store.take_pool_member(taking, &sandbox, &tags, &quota, &audit).await.map_err(store_error)?
        {
            return self.start_or_give_up(request, member, tags).await;
        }
        match context.store.add_sandbox(&sandbox, &tags, &quota, &audit).await.map_err(store_error)? {
            AddedSandbox::Added => {}
            AddedSandbox::NameTaken(id) => return Err(name_taken(&sandbox.name.unwrap_or_default(), &id)),
            AddedSandbox::QuotaReached(reached) => return Err(quota_reached(context, &request.caller.principal, &quota, reached).await),
            AddedSandbox::SpecPartMissing(what) => return Err(sandbox_spec::gone(&what)),
        }
        self.start_or_give_up(request, sandbox, tags).await
    }

    /// Returns a sandbox that was just created or taken, or gives it up with its name if it can't start.
    async fn start_or_give_up(&self, request: &RequestContext<'_>, sandbox: Sandbox, tags: Tags) -> Result<SandboxInfo, ApiError> {
        if let Some(logged) = request.logged {
            logged.set_sandbox(&sandbox.id);
        }
        match self.lifecycle.ensure_found_running(sandbox.clone(), request.wait).await {
            Ok(sandbox) => self.info(sandbox, tags).await,
            Err(e) if e.code == ErrorCode::SandboxStarting => self.info(sandbox, tags).await,
            Err(e) => {
                self.give_up(&sandbox.id).await?;
                Err(e)
            }
        }
    }

    /// A sandbox reported as failed must not appear later: the client will request another one.
    async fn give_up(&self, id: &SandboxId) -> Result<(), ApiError> {
        const REASON: &str = "it could not be made in time";
        let sandbox = self.context.load_sandbox(id).await?;
        if sandbox.ended_at.is_some() {
            return Ok(());
        }
        let audit = AuditRecord::of_sandbox(self.context.now(), &sandbox, "sandbox.ended", REASON);
        self.lifecycle.terminate_permanently(&sandbox, REASON, audit).await
    }

    pub async fn list(&self, caller: &Caller, filters: &[TagFilter], page: &PageParams) -> Result<Vec<SandboxInfo>, ApiError> {
        let store = &self.context.store;
        let found = store.sandboxes(&Viewer::from(&caller.principal), filters, page).await.map_err(store_error)?;
        let mut tags = store.sandbox_tags(&found.iter().map(|s| &s.id).collect::<Vec<_>>()).await.map_err(store_error)?;
        let mut list = Vec::with_capacity(found.len());
        for sandbox in found {
            let tags = tags.remove(sandbox.id.as_str()).unwrap_or_default();
            list.push(self.info(sandbox, tags).await?);
        }
        Ok(list)
    }

    /// Changes its name, tags, access and lifetimes. For its owner and operators.
    pub async fn patch(&self, request: &RequestContext<'_>, id_or_name: &str, params: PatchSandbox) -> Result<SandboxInfo, ApiError> {
        let context = &self.context;
        let sandbox = find(context, request.caller, id_or_name).await?;
        access::may_end(&request.caller.principal, &sandbox)?;
        if let Some(Some(name)) = &params.name {
            check_name(name)?;
        }
        let mut change = SandboxChange { is_kept: params.keep, access: params.access, max_tags: MAX_ALL_TAGS, ..SandboxChange::default() };
        for (key, value) in params.tags {
            tags::check_key(&key)?;
            match value {
                Some(value) => {
                    tags::check_value(&key, &value)?;
                    change.set_tags.insert(key, value);
                }
                None => change.remove_tags.push(key),
            }
        }
        change.name = params.name;
        let span = |field, params: Option<Option<u64>>| {
            params.map(|params| params.map(|seconds| parse_lifetime(field, seconds)).transpose()).transpose()
        };
        change.own_lease = span("lease_seconds", params.lease_seconds)?;
        change.own_keep = span("keep_suspended_seconds", params.keep_suspended_seconds)?;
        let audit =
            AuditRecord::of_sandbox(context.now(), &sandbox, "sandbox.changed", &describe(&change)).by(request.caller, request.request_id);
        match context.store.change_sandbox(&sandbox.id, &change, &audit).await.map_err(store_error)? {
            ChangedSandbox::Changed(changed) => {
                if changed.generation != sandbox.generation {
                    // Its tokens are revoked; connections that use them end once the sandbox is notified.
                    self.lifecycle.control_push.push_soon(&changed.id, PUSH_WAIT).await;
                }
                self.info_with_tags(*changed).await
            }
            ChangedSandbox::NameTaken(id) => Err(name_taken(&change.name.flatten().unwrap_or_default(), &id)),
            ChangedSandbox::TooManyTags(count) => Err(ApiError::invalid(format!(
                "tags: the sandbox would have {count}; the maximum is {MAX_ALL_TAGS}, including the broker's"
            ))),
            ChangedSandbox::Gone => Err(not_found()),
        }
    }

    pub async fn get(&self, caller: &Caller, id_or_name: &str) -> Result<SandboxInfo, ApiError> {
        let sandbox = find(&self.context, caller, id_or_name).await?;
        access::may_use(&caller.principal, &sandbox)?;
        self.info_with_tags(sandbox).await
    }

    /// Ends it and every session that uses it. It can be restored for a while, unless the caller requests a permanent
    /// deletion.
    pub async fn delete(&self, caller: &Caller, id_or_name: &str, is_permanent: bool, request_id: &RequestId) -> Result<(), ApiError> {
        let sandbox = match find(&self.context, caller, id_or_name).await {
            Err(e) if e.code == ErrorCode::SandboxNotFound && is_permanent => {
                return purge(&self.context, &self.lifecycle, caller, id_or_name, request_id).await;
            }
            found => found?,
        };
        access::may_end(&caller.principal, &sandbox)?;
        let audit = AuditRecord::of_sandbox(self.context.now(), &sandbox, "sandbox.deleted", "asked for").by(caller, request_id);
        let lifecycle = self.lifecycle.clone();
        // In a task: if the caller disconnects, the deletion must not stay half done until the reaper's next round.
        let deleting = self.context.background.spawn(async move {
            match is_permanent {
                true => lifecycle.terminate_permanently(&sandbox, "it was deleted", audit).await,
                false => lifecycle.terminate(&sandbox, "it was deleted", audit).await,
            }
        });
        deleting.await.map_err(|_| ApiError::new(ErrorCode::Internal, "deleting was interrupted; try again"))?
    }

    pub(super) async fn info_with_tags(&self, sandbox: Sandbox) -> Result<SandboxInfo, ApiError> {
        let mut tags = self.context.store.sandbox_tags(&[&sandbox.id]).await.map_err(store_error)?;
        let tags = tags.remove(sandbox.id.as_str()).unwrap_or_default();
        self.info(sandbox, tags).await
    }

    async fn info(&self, sandbox: Sandbox, tags: Tags) -> Result<SandboxInfo, ApiError> {
        let sessions = self.context.store.sessions_on(&sandbox.id).await.map_err(store_error)?;
        Ok(self.info_of(sandbox, tags, sessions))
    }

    pub(super) fn info_of(&self, sandbox: Sandbox, tags: Tags, sessions: Vec<Session>) -> SandboxInfo {
        // The gateway's URL: this response contains no token.
        let dataplane = self.context.gateway(&sandbox);
        SandboxInfo {
            last_active_at: self.lifecycle.last_use(&sandbox),
            lease_expires_at: self.lifecycle.lease_end(&sandbox),
            id: sandbox.id,
            name: sandbox.name,
            keep: sandbox.is_kept,
            lease_seconds: sandbox.own_lease.map(|own| own.as_secs()),
            keep_suspended_seconds: sandbox.own_keep.map(|own| own.as_secs()),
            suspended_at: sandbox.suspended_at,
            deleted_at: sandbox.ended_at.filter(|_| sandbox.restore_until.is_some()),
            restore_until: sandbox.restore_until,
            tags,
            provider: sandbox.provider,
            state: sandbox.state,
            reason: sandbox.reason,
            owner: sandbox.owner,
            access: sandbox.access,
            created_at: sandbox.created_at,
            http_base_url: dataplane.http_base_url,
            ws_base_url: dataplane.ws_base_url,
            threads: sessions.iter().filter_map(|s| s.thread().map(str::to_owned)).collect(),
            sessions: sessions.into_iter().map(|s| s.id).collect(),
            template: sandbox.template,
            snapshot_id: sandbox.spec.layers.into_iter().next(),
            resources: sandbox.spec.resources,
        }
    }
}

fn parse_lifetime(field: &str, seconds: u64) -> Result<Duration, ApiError> {
    match (1..=MAX_LIFETIME_SECONDS).contains(&seconds) {
        true => Ok(Duration::from_secs(seconds)),
        false => Err(ApiError::invalid(format!("{field}: must be from 1 to {MAX_LIFETIME_SECONDS} seconds"))),
    }
}

/// Names the limit and what to delete: the caller's least recently used sandboxes, or deleted ones of other owners, which
/// no new sandbox evicts.
pub async fn quota_reached(context: &BrokerContext, caller: &Principal, quota: &Quota, reached: QuotaReached) -> ApiError {
    let (holder, limit, setting) = match reached.by {
        QuotaSubject::Workspace => (format!("workspace {} has", caller.workspace), quota.of_workspace, "max_sandboxes_per_workspace"),
        QuotaSubject::Owner => ("you have".to_owned(), quota.of_owner.unwrap_or_default(), "max_sandboxes in the policy"),
    };
    // If they can't be read, the error is sent without them.
    let unused = context.store.least_used(&caller.workspace, &caller.name, NAMED_AT_LIMIT).await.unwrap_or_default();
    let named: Vec<&str> = unused.iter().map(|s| s.name.as_deref().unwrap_or(s.id.as_str())).collect();
    let own_unused = || format!("your least recently used: {}", named.join(", "));
    let deleted = match reached.deleted {
        1 => "1 deleted sandbox whose files are kept".to_owned(),
        n => format!("{n} deleted sandboxes whose files are kept"),
    };
    let (counted, advice) = match (reached.deleted, named.is_empty()) {
        (0, true) => (String::new(), "none of them is yours, so ask their owners or an operator to delete some".to_owned()),
        (0, false) => (String::new(), format!("delete one first; {}", own_unused())),
        (_, is_empty) => {
            let freed = "the owner of a deleted sandbox or an operator can purge it with `cobox sandbox delete --permanent`";
            let or = if is_empty { String::new() } else { format!("; or purge one, {}", own_unused()) };
            (format!(", including {deleted}"), format!("{freed}{or}"))
        }
    };
    let details: Vec<_> = unused
        .iter()
        .map(|s| serde_json::json!({ "id": s.id, "name": s.name, "state": s.state.as_str(), "last_active_at": s.last_active_at }))
        .collect();
    let message = format!("{holder} {limit} sandboxes{counted}, which is the limit ({setting}); {advice}");
    ApiError::new(ErrorCode::QuotaExceeded, message)
        .with_details(serde_json::json!({ "limit": limit, "deleted": reached.deleted, "least_used": details }))
}

pub fn check_name(name: &str) -> Result<(), ApiError> {
    if is_sandbox_name(name) {
        return Ok(());
    }
    Err(ApiError::invalid("name: must be 1 to 63 letters, digits, `-`, `_` or `.`, and start with neither `.`, `-` nor `sb_`"))
}

pub(super) fn name_taken(name: &str, by: &SandboxId) -> ApiError {
    let message = format!("name: {name} is taken by {by}");
    ApiError::new(ErrorCode::SandboxConflict, message).with_details(serde_json::json!({ "sandbox_id": by }))
}

/// A change as recorded in the audit: the changed fields, and of tags only the keys.
fn describe(change: &SandboxChange) -> String {
    let mut describe = Vec::new();
    if let Some(name) = &change.name {
        describe.push(format!("name={}", name.as_deref().unwrap_or("-")));
    }
    describe.extend(change.is_kept.map(|keep| format!("keep={keep}")));
    describe.extend(change.access.map(|access| format!("access={access:?}").to_lowercase()));
    let spans = [("lease_seconds", change.own_lease), ("keep_suspended_seconds", change.own_keep)];
    let audit = |own: Option<Duration>| own.map_or("-".to_owned(), |own| own.as_secs().to_string());
    describe.extend(spans.into_iter().filter_map(|(name, own)| own.map(|own| format!("{name}={}", audit(own)))));
    describe.extend(change.set_tags.keys().map(|key| format!("+{key}")));
    describe.extend(change.remove_tags.iter().map(|key| format!("-{key}")));
    describe.join(" ")
}
