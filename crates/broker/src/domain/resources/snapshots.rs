//! Snapshots: copies of a sandbox's files from which other sandboxes start. The row is written first; the files are
//! copied in the background.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, Capability, ErrorCode, SnapshotId,
    resources::{Env, Resources, SnapshotInfo, SnapshotState},
    session::Access,
    text::printable,
};
use cobox_provider::{SandboxRoot, SandboxSpec};
use tokio::sync::Semaphore;

use super::{records::Snapshot, running_operations::InProgress, sandbox_spec, sandboxes};
use crate::{
    domain::{
        access::{
            self,
            request_context::RequestContext,
            sandbox_lookup,
            session_access::{find_entry, may_see},
        },
        context::{BrokerContext, store_error},
        model::{AuditRecord, Caller, Sandbox},
    },
    store::{AddedResource, SnapshotFilter, Viewer},
};

/// Tag of a name without one.
pub const DEFAULT_TAG: &str = "latest";
/// Maximum chain of snapshots below a sandbox, each taken of a sandbox created from the previous one: every layer is one
/// more place to look for a file.
const MAX_LAYERS: usize = 16;
/// Snapshots copied at once.
const CONCURRENT_COPIES: usize = 2;
/// Longest stored reason of a failure, in characters.
const MAX_REASON_CHARS: usize = 500;

/// Parameters of a new snapshot.
#[derive(Clone, Debug, Default)]
pub struct SnapshotParams<'a> {
    pub name: &'a str,
    pub tag: Option<&'a str>,
    /// Disk size of sandboxes created from it, if different from its source's.
    pub disk_bytes: Option<u64>,
    /// Environment variables of sandboxes created from it.
    pub env: Env,
}

/// A snapshot that the caller may use: by its id, `name` or `name:tag`.
pub async fn find(context: &BrokerContext, caller: &Caller, reference: &str) -> Result<Snapshot, ApiError> {
    let found = match reference.parse::<SnapshotId>() {
        Ok(id) => context.store.snapshot(&id).await,
        Err(_) => {
            let viewer = Viewer::from(&caller.principal);
            let (name, tag) = reference.split_once(':').map_or((reference, None), |(name, tag)| (name, Some(tag)));
            match context.store.snapshot_named(&viewer, name, Some(tag.unwrap_or(DEFAULT_TAG))).await {
                // A name belongs to one owner, so any of its tags is one that the owner set.
                Ok(None) if tag.is_none() => context.store.snapshot_named(&viewer, name, None).await,
                found => found,
            }
        }
    };
    let found = found.map_err(store_error)?.filter(|s| access::is_visible(&caller.principal, s)).ok_or_else(|| not_found(reference))?;
    access::may_use(&caller.principal, &found)?;
    Ok(found)
}

impl Snapshot {
    pub fn info(self) -> SnapshotInfo {
        let image = match &self.spec.root {
            Some(SandboxRoot::Image(image)) if self.spec.layers.is_empty() => Some(image.clone()),
            _ => None,
        };
        SnapshotInfo {
            id: self.id,
            name: self.name,
            tag: self.tag,
            state: self.state,
            reason: self.reason,
            sandbox_id: self.sandbox,
            image,
            size_bytes: self.size_bytes,
            provider: self.provider,
            owner: self.owner,
            access: self.access,
            created_at: self.created_at,
        }
    }
}

pub struct Snapshots {
    context: Arc<BrokerContext>,
    in_progress: InProgress,
    copying: Semaphore,
}

impl Snapshots {
    pub fn new(context: Arc<BrokerContext>) -> Self {
        Self { context, in_progress: InProgress::default(), copying: Semaphore::new(CONCURRENT_COPIES) }
    }

    /// Begins a snapshot of a running or suspended sandbox, and returns while the files are being copied. For its owner
    /// and operators, and for principals that may use it and have the `snapshot` capability. A file that is written
    /// during the copy is kept in the state in which the copy finds it; all others are copied exactly.
    pub async fn take(self: &Arc<Self>, request: &RequestContext<'_>, of: &str, params: SnapshotParams<'_>) -> Result<Snapshot, ApiError> {
        let (context, caller) = (&self.context, request.caller);
        let sandbox = sandbox_lookup::find(context, caller, of).await?;
        // A snapshot has all of the sandbox's files, so taking one needs the same access as reading them.
        let (session, entry) = find_entry(context, &caller.principal, &sandbox).await?;
        let is_shared_with = entry.share.as_ref().is_none_or(|share| share.capabilities.contains(Capability::Snapshot));
        if !is_shared_with || !context.policy().allowed(&caller.subject()).contains(Capability::Snapshot) {
            access::may_end(&caller.principal, &sandbox)?;
        }
        may_see(context, caller, &sandbox, session.as_ref()).await?;
        check(&params)?;
        if !context.provider.features().snapshots {
            return Err(ApiError::invalid(format!("the {} provider can't take snapshots", context.provider.name())));
        }
        if sandbox.counted_until.is_none() && sandbox.suspended_at.is_none() {
            return Err(ApiError::new(ErrorCode::SandboxStarting, format!("sandbox {} is still starting; ask again", sandbox.id)));
        }
        if sandbox.spec.layers.len() >= MAX_LAYERS {
            let message =
                format!("sandbox {} is based on {MAX_LAYERS} snapshots, which is the limit; copy its files to a new sandbox", sandbox.id);
            return Err(ApiError::invalid(message));
        }
        let id = SnapshotId::new();
        let layers = std::iter::once(id.clone()).chain(sandbox.spec.layers.iter().cloned()).collect();
        let resources = Resources { disk_bytes: params.disk_bytes, ..Resources::default() }.or(&sandbox.spec.resources);
        sandbox_spec::check(context, &SandboxSpec { resources: resources.clone(), ..SandboxSpec::default() }, &context.node)?;
        let (root, base) = (sandbox.spec.root.clone(), sandbox.spec.base.clone());
        let made_of = SandboxSpec { root, base, layers, resources, env: params.env.clone(), ..SandboxSpec::default() };
        let snapshot = Snapshot {
            access: access_of(context, &sandbox).await?,
            node: sandbox.node.clone(),
            sandbox: Some(sandbox.id.clone()),
            ..self.new_snapshot(request, id, &params, made_of, SnapshotState::Building)
        };
        self.add_row(request, &snapshot, &format!("{} of {}", label(&snapshot), sandbox.id)).await?;
        self.build(snapshot.clone());
        Ok(snapshot)
    }

    /// Names an image that the provider has: nothing is copied.
    pub async fn create_of_image(
        &self,
        request: &RequestContext<'_>,
        image: &str,
        params: SnapshotParams<'_>,
    ) -> Result<Snapshot, ApiError> {
        let context = &self.context;
        check(&params)?;
        if context.policy().has_listed_templates(&request.caller.subject()) {
            return Err(ApiError::new(ErrorCode::Forbidden, "the policy allows only listed templates, not other images"));
        }
        let resources = Resources { disk_bytes: params.disk_bytes, ..Resources::default() };
        let made_of =
            SandboxSpec { root: Some(SandboxRoot::Image(image.to_owned())), resources, env: params.env.clone(), ..SandboxSpec::default() };
        sandbox_spec::check(context, &made_of, &context.node)?;
        let params = SnapshotParams { tag: params.tag.or_else(|| tag_of_image(image)), ..params };
        let snapshot = self.new_snapshot(request, SnapshotId::new(), &params, made_of, SnapshotState::Ready);
        let snapshot = Snapshot { size_bytes: Some(0), ..snapshot };
        self.add_row(request, &snapshot, &format!("{} of image {image}", label(&snapshot))).await?;
        Ok(snapshot)
    }

    fn new_snapshot(
        &self,
        request: &RequestContext<'_>,
        id: SnapshotId,
        params: &SnapshotParams<'_>,
        spec: SandboxSpec,
        state: SnapshotState,
    ) -> Snapshot {
        let (context, principal) = (&self.context, &request.caller.principal);
        Snapshot {
            id,
            workspace: principal.workspace.clone(),
            name: params.name.to_owned(),
            tag: params.tag.unwrap_or(DEFAULT_TAG).to_owned(),
            owner: principal.name.clone(),
            access: context.policy().default_access(&request.caller.subject()),
            provider: context.provider.name().to_owned(),
            node: context.node.clone(),
            state,
            reason: None,
            sandbox: None,
            spec,
            size_bytes: None,
            created_at: context.now(),
            updated_at: context.now(),
        }
    }

    async fn add_row(&self, request: &RequestContext<'_>, snapshot: &Snapshot, detail: &str) -> Result<(), ApiError> {
        let context = &self.context;
        let audit = AuditRecord { sandbox: snapshot.sandbox.clone(), ..request.audit(self.context.now(), "snapshot.created", detail) };
        let most = context.config.max_snapshots_per_workspace;
        match context
            .store
            .add_snapshot(snapshot, &Viewer::from(&request.caller.principal), &context.resource_limits(most), &audit)
            .await
            .map_err(store_error)?
        {
            AddedResource::Added => Ok(()),
            AddedResource::NameTaken => {
                let message = format!("name: {} is used by another principal's snapshots; choose another name", snapshot.name);
                Err(ApiError::new(ErrorCode::NameTaken, message))
            }
            AddedResource::TooMany => Err(ApiError::new(
                ErrorCode::QuotaExceeded,
                format!("the workspace has {most} snapshots, which is its limit; delete some first"),
            )),
            AddedResource::TooLarge => Err(sandbox_spec::too_large(context)),
        }
    }

    pub async fn list(&self, request: &RequestContext<'_>, filter: &SnapshotFilter) -> Result<Vec<Snapshot>, ApiError> {
        self.context.store.snapshots(&Viewer::from(&request.caller.principal), filter).await.map_err(store_error)
    }

    pub async fn get(&self, request: &RequestContext<'_>, reference: &str) -> Result<Snapshot, ApiError> {
        find(&self.context, request.caller, reference).await
    }

    /// Its tag, if `name:tag` refers to this snapshot and not to a newer one.
    pub async fn tag_of(&self, request: &RequestContext<'_>, snapshot: &Snapshot) -> Result<Option<String>, ApiError> {
        if snapshot.state != SnapshotState::Ready {
            return Ok(None);
        }
        let viewer = Viewer::from(&request.caller.principal);
        let meant = self.context.store.snapshot_named(&viewer, &snapshot.name, Some(&snapshot.tag)).await.map_err(store_error)?;
        Ok(meant.filter(|s| s.id == snapshot.id).map(|s| s.tag))
    }

    /// No sandbox can be created from it any more. Its files stay for as long as a sandbox or another snapshot is based
    /// on them.
    pub async fn delete(self: &Arc<Self>, request: &RequestContext<'_>, reference: &str) -> Result<(), ApiError> {
        let context = &self.context;
        let found = find(context, request.caller, reference).await?;
        access::may_end(&request.caller.principal, &found)?;
        let deleting = Snapshot { state: SnapshotState::Deleting, updated_at: context.now(), ..found.clone() };
        let audit = request.audit(self.context.now(), "snapshot.deleted", &format!("{} {}", label(&found), found.id));
        if found.state != SnapshotState::Deleting
            && !context.store.settle_snapshot(&found, &deleting, Some(&audit)).await.map_err(store_error)?
        {
            // Its state changed concurrently: delete it in its current state.
            let found = context.store.snapshot(&found.id).await.map_err(store_error)?.ok_or_else(|| not_found(reference))?;
            let deleting = Snapshot { state: SnapshotState::Deleting, updated_at: context.now(), ..found.clone() };
            context.store.settle_snapshot(&found, &deleting, Some(&audit)).await.map_err(store_error)?;
        }
        self.reconcile(deleting);
        Ok(())
    }

    /// Copies the files, unless another task is at it. The outcome is stored; after a crash the row remains and the copy
    /// is done again.
    fn build(self: &Arc<Self>, snapshot: Snapshot) {
        let context = &self.context;
        if snapshot.node != context.node {
            return;
        }
        let Some(guard) = self.in_progress.begin(snapshot.id.as_str()) else { return };
        let this = self.clone();
        context.background.spawn(async move {
            let _guard = guard;
            // Limited concurrency: each copy reads and writes as fast as the disk can.
            let _turn = this.copying.acquire().await;
            let context = &this.context;
            let copied = this.copy(&snapshot).await;
            let now = context.now();
            let settled = match copied {
                Ok((size, access)) => {
                    Snapshot { state: SnapshotState::Ready, size_bytes: Some(size), access, updated_at: now, ..snapshot.clone() }
                }
                Err(error) => {
                    tracing::warn!(snapshot = %snapshot.id, %error, "taking a snapshot failed");
                    let reason = error.message.chars().take(MAX_REASON_CHARS).collect();
                    Snapshot { state: SnapshotState::Failed, reason: Some(reason), updated_at: now, ..snapshot.clone() }
                }
            };
            let action = if settled.state == SnapshotState::Ready { "snapshot.ready" } else { "snapshot.failed" };
            let audit = AuditRecord {
                sandbox: snapshot.sandbox.clone(),
                ..AuditRecord::new(now, &snapshot.workspace, action).detail(label(&snapshot))
            };
            match context.store.settle_snapshot(&snapshot, &settled, Some(&audit)).await {
                // Deleted while it was taken: the next reconcile pass removes the files.
                Ok(_) => {}
                Err(error) => tracing::error!(snapshot = %snapshot.id, %error, "recording the outcome of a snapshot failed; retrying"),
            }
        });
    }

    /// Returns its size and its access rule.
    async fn copy(&self, snapshot: &Snapshot) -> Result<(u64, Access), ApiError> {
        let context = &self.context;
        let lost = || ApiError::new(ErrorCode::SandboxNotFound, "its sandbox ended while it was taken");
        let Some(of) = &snapshot.sandbox else { return Err(lost()) };
        let live_sandbox = async || -> Result<Sandbox, ApiError> {
            context.store.sandbox(of).await.map_err(store_error)?.filter(|s| s.ended_at.is_none()).ok_or_else(lost)
        };
        let sandbox = live_sandbox().await?;
        let copied = context.provider.take_snapshot(of, &snapshot.id, &sandbox.spec).await.map_err(|e| sandbox_spec::refused(&e))?;
        // If the sandbox ended in the meantime, it was being removed during the copy. If its access became private,
        // files may have been copied after that.
        let access = match live_sandbox().await {
            Ok(sandbox) => access_of(context, &sandbox).await,
            Err(error) => Err(error),
        };
        match access {
            Ok(Access::Workspace) => Ok((copied, snapshot.access)),
            Ok(Access::Owner) => Ok((copied, Access::Owner)),
            Err(error) => {
                context.provider.remove_snapshot(&snapshot.id).await.map_err(|e| sandbox_spec::refused(&e))?;
                Err(error)
            }
        }
    }

    /// Finishes an operation on a snapshot of this node, in the background: there may be many files.
    pub fn reconcile(self: &Arc<Self>, snapshot: Snapshot) {
        match snapshot.state {
            SnapshotState::Building => self.build(snapshot),
            SnapshotState::Deleting if snapshot.node == self.context.node => self.remove(snapshot),
            _ => {}
        }
    }

    fn remove(self: &Arc<Self>, snapshot: Snapshot) {
        let Some(guard) = self.in_progress.begin(snapshot.id.as_str()) else { return };
        let this = self.clone();
        self.context.background.spawn(async move {
            let _guard = guard;
            let context = &this.context;
            let removed = async {
                if context.store.is_snapshot_used(&snapshot).await.map_err(store_error)? {
                    return Ok(());
                }
                if context.provider.features().snapshots {
                    context.provider.remove_snapshot(&snapshot.id).await.map_err(|e| sandbox_spec::refused(&e))?;
                }
                context.store.forget_snapshot(&snapshot.id).await.map_err(store_error)
            };
            if let Err(error) = removed.await {
                tracing::warn!(snapshot = %snapshot.id, %error, "removing a snapshot failed; retrying");
            }
        });
    }

    /// A copy on a dead node will not be completed.
    pub async fn fail_unfinished(&self, node: &str) -> Result<(), ApiError> {
        let context = &self.context;
        for snapshot in context.store.snapshots_due(node).await.map_err(store_error)? {
            if snapshot.state == SnapshotState::Building {
                let reason = Some("its node died before it was taken".to_owned());
                let failed = Snapshot { state: SnapshotState::Failed, reason, updated_at: context.now(), ..snapshot.clone() };
                context.store.settle_snapshot(&snapshot, &failed, None).await.map_err(store_error)?;
            }
        }
        Ok(())
    }
}

/// Access rule of a snapshot: owner-only if the sandbox or one of its sessions is owner-only. Also owner-only if threads
/// left files in it, because the thread authority could not be asked about them later.
async fn access_of(context: &BrokerContext, sandbox: &Sandbox) -> Result<Access, ApiError> {
    let sessions = context.store.sessions_on(&sandbox.id).await.map_err(store_error)?;
    if sandbox.access == Access::Owner || sessions.iter().any(|s| s.access == Access::Owner) {
        return Ok(Access::Owner);
    }
    let is_threads = context.thread_authority.is_some()
        && (sessions.iter().any(|s| s.thread().is_some())
            || !context.store.past_threads(&sandbox.id, 1).await.map_err(store_error)?.is_empty());
    Ok(if is_threads { Access::Owner } else { Access::Workspace })
}

fn check(params: &SnapshotParams<'_>) -> Result<(), ApiError> {
    sandboxes::check_name(params.name)?;
    params.env.check()?;
    if params.tag.is_some_and(|tag| !cobox_protocol::sandbox::is_sandbox_name(tag)) {
        return Err(ApiError::invalid("tag: must be 1 to 63 letters, digits, `-`, `_` or `.`"));
    }
    Ok(())
}

/// The image's tag, if it is a valid snapshot tag: the last part of `python:3.12`, but none for `host:5000/python` or
/// `python@sha256:…`.
fn tag_of_image(image: &str) -> Option<&str> {
    let (_, tag) = image.split('@').next()?.rsplit_once(':')?;
    cobox_protocol::sandbox::is_sandbox_name(tag).then_some(tag)
}

fn label(snapshot: &Snapshot) -> String {
    format!("{}:{}", snapshot.name, snapshot.tag)
}

fn not_found(reference: &str) -> ApiError {
    let reference = printable(reference, 128);
    ApiError::new(ErrorCode::SnapshotNotFound, format!("there is no snapshot `{reference}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_of_an_image_is_read_from_its_name() {
        assert_eq!(tag_of_image("python:3.12-slim"), Some("3.12-slim"));
        assert_eq!(tag_of_image("host:5000/python:3"), Some("3"));
        for none in ["python", "host:5000/python", "python@sha256:0123", "python:", "python:a b"] {
            assert_eq!(tag_of_image(none), None, "{none}");
        }
    }
}
