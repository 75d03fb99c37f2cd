//! Reconciles the resources that sandboxes are made of: finishes snapshots and volumes that were begun, and keeps pools
//! full.

use std::sync::Arc;

use async_trait::async_trait;

use super::{pools::Pools, snapshots::Snapshots, volumes::Volumes};
use crate::domain::{context::Deployment, lifecycle::reaper::ResourceUpkeep};

pub struct ResourceReconciler {
    pub deployment: Arc<Deployment>,
    pub snapshots: Arc<Snapshots>,
    pub volumes: Arc<Volumes>,
    pub pools: Arc<Pools>,
}

#[async_trait]
impl ResourceUpkeep for ResourceReconciler {
    async fn tick(&self) {
        let d = &self.deployment;
        match d.store.snapshots_due(&d.node).await {
            Ok(due) => {
                for snapshot in due {
                    self.snapshots.keep_snapshot(snapshot);
                }
            }
            Err(error) => tracing::error!(%error, "the snapshots of this node could not be read"),
        }
        match d.store.volumes_due(&d.node).await {
            Ok(due) => {
                for volume in due {
                    self.volumes.keep_volume(volume);
                }
            }
            Err(error) => tracing::error!(%error, "the volumes of this node could not be read"),
        }
        for node in d.nodes.dead(d.now()) {
            if let Err(error) = self.snapshots.give_up_snapshots(&node).await {
                tracing::warn!(%error, node, "a dead node's snapshots could not be given up; it is tried again");
            }
        }
        if let Err(error) = self.pools.keep_pools().await {
            tracing::error!(%error, "the pools could not be looked after");
        }
    }
}
