//! Volumes: files that outlive the sandboxes they are mounted in, and can be mounted in several at once.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, SandboxId, VolumeId,
    resources::{CreateVolume, VolumeInfo},
    text::{MAX_SHOWN_CHARS, printable},
};
use tokio::task::JoinHandle;

use super::{
    records::{Volume, VolumeState},
    running_operations::InProgress,
    sandbox_spec, sandboxes,
};
use crate::{
    domain::{
        access::{self, request_context::RequestContext},
        context::{BrokerContext, store_error},
        model::{Caller, Sandbox},
    },
    store::{AddedResource, ChangedResource, RemovedResource, Viewer},
};

/// How long a response waits for a removal; SDKs wait for ten seconds.
const REMOVE_WAIT: Duration = Duration::from_secs(1);

/// A volume visible to the caller, by name or id.
pub async fn find(context: &BrokerContext, caller: &Caller, name_or_id: &str) -> Result<Volume, ApiError> {
    let found = match name_or_id.parse::<VolumeId>() {
        Ok(id) => context.store.volume(&id).await,
        Err(_) => context.store.volume_named(&caller.principal.workspace, name_or_id).await,
    };
    let is_there = |v: &Volume| access::is_visible(&caller.principal, v) && v.state != VolumeState::Deleting;
    found.map_err(store_error)?.filter(is_there).ok_or_else(|| not_found(name_or_id))
}

pub struct Volumes {
    context: Arc<BrokerContext>,
    in_progress: InProgress,
}

impl Volumes {
    pub fn new(context: Arc<BrokerContext>) -> Self {
        Self { context, in_progress: InProgress::default() }
    }

    pub async fn create(self: &Arc<Self>, request: &RequestContext<'_>, params: CreateVolume) -> Result<VolumeInfo, ApiError> {
        let (context, principal) = (&self.context, &request.caller.principal);
        sandboxes::check_name(&params.name)?;
        context.provider.check_volume(params.size_bytes).map_err(|e| sandbox_spec::refused(&e))?;
        let volume = Volume {
            id: VolumeId::new(),
            workspace: principal.workspace.clone(),
            name: params.name,
            owner: principal.name.clone(),
            access: params.access.unwrap_or_else(|| context.policy().default_access(&request.caller.subject())),
            provider: context.provider.name().to_owned(),
            node: context.node.clone(),
            state: VolumeState::Creating,
            size_bytes: params.size_bytes,
            created_at: context.now(),
            updated_at: context.now(),
        };
        let audit =
            request.audit(self.context.now(), "volume.created", &format!("{} {} of {} bytes", volume.name, volume.id, volume.size_bytes));
        let most = context.config.max_volumes_per_workspace;
        match context.store.add_volume(&volume, &context.resource_limits(most), &audit).await.map_err(store_error)? {
            AddedResource::Added => {}
            AddedResource::NameTaken => return Err(name_taken(&volume.name)),
            AddedResource::TooMany => {
                let message = format!("the workspace has {most} volumes, which is its limit; delete some first");
                return Err(ApiError::new(ErrorCode::QuotaExceeded, message));
            }
            AddedResource::TooLarge => return Err(sandbox_spec::too_large(context)),
        }
        let (this, created) = (self.clone(), volume.clone());
        // In a task: if the caller disconnects, the volume must not stay half created until the next pass.
        let creation = context.background.spawn(async move { this.create_files(&created).await });
        creation
            .await
            .map_err(|_| ApiError::new(ErrorCode::Internal, "creating the volume was interrupted; check whether it exists"))??;
        Ok(info(Volume { state: VolumeState::Ready, ..volume }, Vec::new()))
    }

    async fn create_files(&self, volume: &Volume) -> Result<(), ApiError> {
        let context = &self.context;
        let Some(_guard) = self.in_progress.begin(volume.id.as_str()) else { return Ok(()) };
        let creation = context.provider.make_volume(&volume.id, volume.size_bytes).await;
        let state = if creation.is_ok() { VolumeState::Ready } else { VolumeState::Deleting };
        context.store.settle_volume(volume, state).await.map_err(store_error)?;
        creation.map_err(|e| sandbox_spec::refused(&e))
    }

    pub async fn list(&self, request: &RequestContext<'_>) -> Result<Vec<VolumeInfo>, ApiError> {
        let context = &self.context;
        let found = context.store.volumes(&Viewer::from(&request.caller.principal)).await.map_err(store_error)?;
        let mut list = Vec::with_capacity(found.len());
        for volume in found {
            list.push(self.volume_info(request, volume).await?);
        }
        Ok(list)
    }

    pub async fn get(&self, request: &RequestContext<'_>, name_or_id: &str) -> Result<VolumeInfo, ApiError> {
        let volume = find(&self.context, request.caller, name_or_id).await?;
        access::may_use(&request.caller.principal, &volume)?;
        self.volume_info(request, volume).await
    }

    async fn volume_info(&self, request: &RequestContext<'_>, volume: Volume) -> Result<VolumeInfo, ApiError> {
        let (users, _) = self.users_of(request, &volume).await?;
        Ok(info(volume, users))
    }

    /// The sandboxes that mount it and that the caller may know of, and the number of others.
    async fn users_of(&self, request: &RequestContext<'_>, volume: &Volume) -> Result<(Vec<SandboxId>, usize), ApiError> {
        let users = self.context.store.sandboxes_made_of(&volume.workspace, volume.id.as_str()).await.map_err(store_error)?;
        let is_known = |s: &Sandbox| s.pool.is_none() && access::may_use(&request.caller.principal, s).is_ok();
        let (known, others): (Vec<_>, Vec<_>) = users.into_iter().partition(is_known);
        Ok((known.into_iter().map(|s| s.id).collect(), others.len()))
    }

    pub async fn rename(&self, request: &RequestContext<'_>, name_or_id: &str, to: &str) -> Result<VolumeInfo, ApiError> {
        let context = &self.context;
        sandboxes::check_name(to)?;
        let volume = find(context, request.caller, name_or_id).await?;
        access::may_end(&request.caller.principal, &volume)?;
        let audit = request.audit(self.context.now(), "volume.renamed", &format!("{} {} to {to}", volume.name, volume.id));
        match context.store.rename_volume(&volume, to, context.now(), &audit).await.map_err(store_error)? {
            ChangedResource::Changed => {
                self.volume_info(request, Volume { name: to.to_owned(), updated_at: context.now(), ..volume }).await
            }
            ChangedResource::NameTaken => Err(name_taken(to)),
            ChangedResource::Gone => Err(not_found(name_or_id)),
        }
    }

    /// Removes it with its files; refused while a sandbox mounts it.
    pub async fn delete(self: &Arc<Self>, request: &RequestContext<'_>, name_or_id: &str) -> Result<(), ApiError> {
        let context = &self.context;
        let volume = find(context, request.caller, name_or_id).await?;
        access::may_end(&request.caller.principal, &volume)?;
        let audit = request.audit(self.context.now(), "volume.deleted", &format!("{} {}", volume.name, volume.id));
        match context.store.remove_volume(&volume, &audit).await.map_err(store_error)? {
            RemovedResource::Removed => {}
            RemovedResource::InUse(_) => {
                let (known, others) = self.users_of(request, &volume).await?;
                let mut users: Vec<String> = known.iter().map(ToString::to_string).collect();
                users.extend((others > 0).then(|| format!("{others} of other principals or pools")));
                let message = format!("volume {} is used by {}; delete them first", volume.name, users.join(", "));
                return Err(ApiError::new(ErrorCode::InUse, message));
            }
            RemovedResource::Gone => return Err(not_found(name_or_id)),
        }
        let removing = self.reconcile(Volume { state: VolumeState::Deleting, ..volume });
        // Most are removed at once; one with many files is removed in the background.
        let _ = tokio::time::timeout(REMOVE_WAIT, removing).await;
        Ok(())
    }

    /// Finishes an operation on a volume of this node, in a task.
    pub fn reconcile(self: &Arc<Self>, volume: Volume) -> JoinHandle<()> {
        let this = self.clone();
        self.context.background.spawn(async move {
            if volume.node != this.context.node {
                return;
            }
            let outcome = match volume.state {
                VolumeState::Creating => this.create_files(&volume).await,
                VolumeState::Deleting => this.remove_volume(&volume).await,
                VolumeState::Ready => Ok(()),
            };
            if let Err(error) = outcome {
                tracing::warn!(volume = %volume.id, %error, "creating or removing a volume failed; retrying");
            }
        })
    }

    async fn remove_volume(&self, volume: &Volume) -> Result<(), ApiError> {
        let context = &self.context;
        let Some(_guard) = self.in_progress.begin(volume.id.as_str()) else { return Ok(()) };
        context.provider.remove_volume(&volume.id).await.map_err(|e| sandbox_spec::refused(&e))?;
        context.store.forget_volume(&volume.id).await.map_err(store_error)
    }
}

fn info(volume: Volume, sandboxes: Vec<SandboxId>) -> VolumeInfo {
    VolumeInfo {
        id: volume.id,
        name: volume.name,
        size_bytes: volume.size_bytes,
        provider: volume.provider,
        owner: volume.owner,
        access: volume.access,
        created_at: volume.created_at,
        sandboxes,
    }
}

fn not_found(name: &str) -> ApiError {
    let name = printable(name, MAX_SHOWN_CHARS);
    ApiError::new(ErrorCode::VolumeNotFound, format!("there is no volume `{name}`"))
}

fn name_taken(name: &str) -> ApiError {
    ApiError::new(ErrorCode::NameTaken, format!("name: a volume {name} already exists"))
}
