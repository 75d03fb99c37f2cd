//! Looks after what sandboxes are made of: finishes snapshots and volumes that were begun, and keeps pools full.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use cobox_protocol::{ApiError, ErrorCode};
use cobox_provider::ProviderError;
use tokio::sync::Semaphore;

use super::{
    deployment::{Deployment, internal},
    lifecycle::Lifecycle,
};

/// Snapshots copied at once.
const CONCURRENT_COPIES: usize = 2;

pub struct Kinds {
    pub deployment: Arc<Deployment>,
    pub lifecycle: Arc<Lifecycle>,
    /// Ids of what somebody is busy with.
    under_way: Arc<Mutex<HashSet<String>>>,
    pub(super) copying: Semaphore,
}

/// Held while something is being done about one snapshot or volume.
pub struct UnderWay {
    all: Arc<Mutex<HashSet<String>>>,
    id: String,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

impl Kinds {
    pub fn new(deployment: Arc<Deployment>, lifecycle: Arc<Lifecycle>) -> Self {
        Self { deployment, lifecycle, under_way: Arc::default(), copying: Semaphore::new(CONCURRENT_COPIES) }
    }

    /// `None` when somebody is at it.
    pub(super) fn begin(&self, id: &str) -> Option<UnderWay> {
        let is_new = self.under_way.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned());
        is_new.then(|| UnderWay { all: self.under_way.clone(), id: id.to_owned() })
    }

    /// At start: removes files that no record knows. What was begun is finished by the first [`Kinds::tick`].
    pub async fn reconcile(&self) -> Result<(), ApiError> {
        let d = &self.deployment;
        let unreachable = |e: ProviderError| ApiError::new(e.code(), format!("the provider can't say what it has: {e}"));
        let (snapshots, volumes) = (d.provider.snapshots().await.map_err(unreachable)?, d.provider.volumes().await.map_err(unreachable)?);
        let (mut strange_snapshots, mut strange_volumes) = (Vec::new(), Vec::new());
        for id in snapshots {
            if d.store.snapshot(&id).await.map_err(internal)?.is_none() {
                strange_snapshots.push(id);
            }
        }
        for id in volumes {
            if d.store.volume(&id).await.map_err(internal)?.is_none() {
                strange_volumes.push(id);
            }
        }
        // A record is written before a file is: files without any record mean that the records are gone.
        let is_in_use = d.store.has_sandboxes(Some(&d.node)).await.map_err(internal)?;
        let are_strange = !strange_snapshots.is_empty() || !strange_volumes.is_empty();
        if !is_in_use && are_strange {
            let message = "the database knows nothing of this node, but snapshots or volumes are there with their files; put the database \
                           back, or remove the `snapshots` and `volumes` directories if they can go";
            return Err(ApiError::new(ErrorCode::Internal, message));
        }
        for id in strange_snapshots {
            tracing::warn!(snapshot = %id, "removing a snapshot that no record knows");
            if let Err(error) = d.provider.remove_snapshot(&id).await {
                tracing::error!(snapshot = %id, %error, "a snapshot that no record knows could not be removed; it is tried at the next start");
            }
        }
        for id in strange_volumes {
            tracing::warn!(volume = %id, "removing a volume that no record knows");
            if let Err(error) = d.provider.remove_volume(&id).await {
                tracing::error!(volume = %id, %error, "a volume that no record knows could not be removed; it is tried at the next start");
            }
        }
        Ok(())
    }

    /// One look at everything of this node. Failures are logged and met again at the next.
    pub async fn tick(self: &Arc<Self>) {
        let d = &self.deployment;
        match d.store.snapshots_due(&d.node).await {
            Ok(due) => {
                for snapshot in due {
                    self.keep_snapshot(snapshot);
                }
            }
            Err(error) => tracing::error!(%error, "the snapshots of this node could not be read"),
        }
        match d.store.volumes_due(&d.node).await {
            Ok(due) => {
                for volume in due {
                    self.keep_volume(volume);
                }
            }
            Err(error) => tracing::error!(%error, "the volumes of this node could not be read"),
        }
        for node in d.nodes.dead(d.now()) {
            if let Err(error) = self.give_up_snapshots(&node).await {
                tracing::warn!(%error, node, "a dead node's snapshots could not be given up; it is tried again");
            }
        }
        if let Err(error) = self.keep_pools().await {
            tracing::error!(%error, "the pools could not be looked after");
        }
    }
}
