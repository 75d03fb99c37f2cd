//! Reconciles the resources that sandboxes are made of: finishes snapshots and volumes that were begun, and keeps pools
//! full.

use std::sync::Arc;

use async_trait::async_trait;

use super::{pools::Pools, snapshots::Snapshots, volumes::Volumes};
use crate::domain::{context::BrokerContext, lifecycle::reaper::ResourceUpkeep};

pub struct ResourceReconciler {
    pub context: Arc<BrokerContext>,
    pub snapshots: Arc<Snapshots>,
    pub volumes: Arc<Volumes>,
    pub pools: Arc<Pools>,
}

#[async_trait]
impl ResourceUpkeep for ResourceReconciler {
    async fn tick(&self) {
        let context = &self.context;
        match context.store.snapshots_due(&context.node).await {
            Ok(due) => {
                for snapshot in due {
                    self.snapshots.reconcile(snapshot);
                }
            }
            Err(error) => tracing::error!(%error, "listing the snapshots of this node failed"),
        }
        match context.store.volumes_due(&context.node).await {
            Ok(due) => {
                for volume in due {
                    self.volumes.reconcile(volume);
                }
            }
            Err(error) => tracing::error!(%error, "listing the volumes of this node failed"),
        }
        for node in context.nodes.dead(context.now()) {
            if let Err(error) = self.snapshots.fail_unfinished(&node).await {
                tracing::warn!(%error, node, "giving up a dead node's unfinished snapshots failed; retrying");
            }
        }
        if let Err(error) = self.pools.reconcile_all().await {
            tracing::error!(%error, "maintaining the pools failed");
        }
    }
}
