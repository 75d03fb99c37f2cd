//! Reconciles the resources that sandboxes are made of: finishes snapshots and volumes that were begun, and keeps pools
//! full.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::Semaphore;

use super::{deployment::Deployment, lifecycle::Lifecycle};

/// Snapshots copied at once.
const CONCURRENT_COPIES: usize = 2;

pub struct Kinds {
    pub deployment: Arc<Deployment>,
    pub lifecycle: Arc<Lifecycle>,
    /// Ids of snapshots and volumes that a task is working on.
    under_way: Arc<Mutex<HashSet<String>>>,
    pub(super) copying: Semaphore,
}

/// Held while a task works on one snapshot or volume.
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

    /// `None` if another task is working on it.
    pub(super) fn begin(&self, id: &str) -> Option<UnderWay> {
        let is_new = self.under_way.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned());
        is_new.then(|| UnderWay { all: self.under_way.clone(), id: id.to_owned() })
    }

    /// One pass over all resources of this node. Failures are logged and retried in the next pass.
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
