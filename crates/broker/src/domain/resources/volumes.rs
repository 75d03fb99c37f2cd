//! Volumes: files that outlive the sandboxes they are mounted in, and can be mounted in several at once.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, SandboxId, VolumeId,
    resources::{CreateVolume, VolumeInfo},
};
use tokio::task::JoinHandle;

use super::{
    in_progress::InProgress,
    records::{Volume, VolumeState},
    sandbox_spec, sandboxes,
};
use crate::{
    domain::{
        access::{self, request_context::Asking},
        context::{Deployment, internal},
        model::{Caller, Sandbox},
    },
    store::{AddedKind, ChangedKind, RemovedKind, Viewer},
};

/// How long a response waits for a removal; SDKs wait for ten seconds.
const REMOVE_WAIT: Duration = Duration::from_secs(1);

/// A volume visible to the caller, by name or id.
pub async fn find(d: &Deployment, caller: &Caller, name_or_id: &str) -> Result<Volume, ApiError> {
    let found = match name_or_id.parse::<VolumeId>() {
        Ok(id) => d.store.volume(&id).await,
        Err(_) => d.store.volume_named(&caller.principal.workspace, name_or_id).await,
    };
    let is_there = |v: &Volume| access::is_visible(&caller.principal, v) && v.state != VolumeState::Deleting;
    found.map_err(internal)?.filter(is_there).ok_or_else(|| not_found(name_or_id))
}

pub struct Volumes {
    deployment: Arc<Deployment>,
    in_progress: InProgress,
}

impl Volumes {
    pub fn new(deployment: Arc<Deployment>) -> Self {
        Self { deployment, in_progress: InProgress::default() }
    }

    pub async fn create_volume(self: &Arc<Self>, asking: &Asking<'_>, wish: CreateVolume) -> Result<VolumeInfo, ApiError> {
        let (d, principal) = (&self.deployment, &asking.caller.principal);
        sandboxes::check_name(&wish.name)?;
        d.provider.check_volume(wish.size_bytes).map_err(|e| sandbox_spec::refused(&e))?;
        let volume = Volume {
            id: VolumeId::new(),
            workspace: principal.workspace.clone(),
            name: wish.name,
            owner: principal.name.clone(),
            access: wish.access.unwrap_or_else(|| d.policy().default_access(&asking.caller.subject())),
            provider: d.provider.name().to_owned(),
            node: d.node.clone(),
            state: VolumeState::Making,
            size_bytes: wish.size_bytes,
            created_at: d.now(),
            updated_at: d.now(),
        };
        let audit =
            asking.audit(self.deployment.now(), "volume.created", &format!("{} {} of {} bytes", volume.name, volume.id, volume.size_bytes));
        let most = d.config.max_volumes_per_workspace;
        match d.store.add_volume(&volume, &d.room(most), &audit).await.map_err(internal)? {
            AddedKind::Added => {}
            AddedKind::NameTaken => return Err(taken(&volume.name)),
            AddedKind::TooMany => {
                let message = format!("the workspace has {most} volumes, which is its storage limit; delete some first");
                return Err(ApiError::new(ErrorCode::QuotaExceeded, message));
            }
            AddedKind::TooLarge => return Err(sandbox_spec::too_large(d)),
        }
        let (this, making) = (self.clone(), volume.clone());
        // In a task: if the caller disconnects, the volume must not stay half created until the next pass.
        let made = d.background.spawn(async move { this.make_volume(&making).await });
        made.await.map_err(|_| ApiError::new(ErrorCode::Internal, "making it was interrupted; look whether it is there"))??;
        Ok(info(Volume { state: VolumeState::Ready, ..volume }, Vec::new()))
    }

    async fn make_volume(&self, volume: &Volume) -> Result<(), ApiError> {
        let d = &self.deployment;
        let Some(_under_way) = self.in_progress.begin(volume.id.as_str()) else { return Ok(()) };
        let made = d.provider.make_volume(&volume.id, volume.size_bytes).await;
        let state = if made.is_ok() { VolumeState::Ready } else { VolumeState::Deleting };
        d.store.settle_volume(volume, state).await.map_err(internal)?;
        made.map_err(|e| sandbox_spec::refused(&e))
    }

    pub async fn volumes(&self, asking: &Asking<'_>) -> Result<Vec<VolumeInfo>, ApiError> {
        let d = &self.deployment;
        let found = d.store.volumes(&Viewer::from(&asking.caller.principal)).await.map_err(internal)?;
        let mut list = Vec::with_capacity(found.len());
        for volume in found {
            list.push(self.volume_info(asking, volume).await?);
        }
        Ok(list)
    }

    pub async fn volume(&self, asking: &Asking<'_>, name_or_id: &str) -> Result<VolumeInfo, ApiError> {
        let volume = find(&self.deployment, asking.caller, name_or_id).await?;
        access::may_use(&asking.caller.principal, &volume)?;
        self.volume_info(asking, volume).await
    }

    async fn volume_info(&self, asking: &Asking<'_>, volume: Volume) -> Result<VolumeInfo, ApiError> {
        let (users, _) = self.users_of(asking, &volume).await?;
        Ok(info(volume, users))
    }

    /// The sandboxes that mount it and that the caller may know of, and the number of others.
    async fn users_of(&self, asking: &Asking<'_>, volume: &Volume) -> Result<(Vec<SandboxId>, usize), ApiError> {
        let users = self.deployment.store.sandboxes_made_of(&volume.workspace, volume.id.as_str()).await.map_err(internal)?;
        let is_known = |s: &Sandbox| s.pool.is_none() && access::may_use(&asking.caller.principal, s).is_ok();
        let (known, others): (Vec<_>, Vec<_>) = users.into_iter().partition(is_known);
        Ok((known.into_iter().map(|s| s.id).collect(), others.len()))
    }

    pub async fn rename_volume(&self, asking: &Asking<'_>, name_or_id: &str, to: &str) -> Result<VolumeInfo, ApiError> {
        let d = &self.deployment;
        sandboxes::check_name(to)?;
        let volume = find(d, asking.caller, name_or_id).await?;
        access::may_end(&asking.caller.principal, &volume)?;
        let audit = asking.audit(self.deployment.now(), "volume.renamed", &format!("{} {} to {to}", volume.name, volume.id));
        match d.store.rename_volume(&volume, to, d.now(), &audit).await.map_err(internal)? {
            ChangedKind::Changed => self.volume_info(asking, Volume { name: to.to_owned(), updated_at: d.now(), ..volume }).await,
            ChangedKind::NameTaken => Err(taken(to)),
            ChangedKind::Gone => Err(not_found(name_or_id)),
        }
    }

    /// Removes it with its files; refused while a sandbox mounts it.
    pub async fn delete_volume(self: &Arc<Self>, asking: &Asking<'_>, name_or_id: &str) -> Result<(), ApiError> {
        let d = &self.deployment;
        let volume = find(d, asking.caller, name_or_id).await?;
        access::may_end(&asking.caller.principal, &volume)?;
        let audit = asking.audit(self.deployment.now(), "volume.deleted", &format!("{} {}", volume.name, volume.id));
        match d.store.remove_volume(&volume, &audit).await.map_err(internal)? {
            RemovedKind::Removed => {}
            RemovedKind::InUse(_) => {
                let (known, others) = self.users_of(asking, &volume).await?;
                let mut users: Vec<String> = known.iter().map(ToString::to_string).collect();
                users.extend((others > 0).then(|| format!("{others} of other people or of pools")));
                let message = format!("volume {} is used by {}; delete them first", volume.name, users.join(", "));
                return Err(ApiError::new(ErrorCode::InUse, message));
            }
            RemovedKind::Gone => return Err(not_found(name_or_id)),
        }
        let removing = self.keep_volume(Volume { state: VolumeState::Deleting, ..volume });
        // Most are removed at once; one with many files is removed in the background.
        let _ = tokio::time::timeout(REMOVE_WAIT, removing).await;
        Ok(())
    }

    /// Finishes an operation on a volume of this node, in a task.
    pub fn keep_volume(self: &Arc<Self>, volume: Volume) -> JoinHandle<()> {
        let this = self.clone();
        self.deployment.background.spawn(async move {
            if volume.node != this.deployment.node {
                return;
            }
            let kept = match volume.state {
                VolumeState::Making => this.make_volume(&volume).await,
                VolumeState::Deleting => this.remove_volume(&volume).await,
                VolumeState::Ready => Ok(()),
            };
            if let Err(error) = kept {
                tracing::warn!(volume = %volume.id, %error, "a volume could not be made or removed; it is tried again");
            }
        })
    }

    async fn remove_volume(&self, volume: &Volume) -> Result<(), ApiError> {
        let d = &self.deployment;
        let Some(_under_way) = self.in_progress.begin(volume.id.as_str()) else { return Ok(()) };
        d.provider.remove_volume(&volume.id).await.map_err(|e| sandbox_spec::refused(&e))?;
        d.store.forget_volume(&volume.id).await.map_err(internal)
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
    let shown: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    ApiError::new(ErrorCode::VolumeNotFound, format!("there is no volume `{shown}`"))
}

fn taken(name: &str) -> ApiError {
    ApiError::new(ErrorCode::NameTaken, format!("name: there is a volume {name} already"))
}
