//! Change listener: acts at once on what other brokers changed about this node's sandboxes. The reaper finds changes
//! whose hint was missed.

use std::sync::Arc;

use cobox_protocol::{ApiError, SandboxId};
use futures_util::{StreamExt, stream};
use tokio::sync::broadcast::error::RecvError;

use super::transitions::{CONCURRENT_SANDBOXES, Lifecycle};
use crate::{domain::context::internal, store::Hint};

/// Runs as long as the store exists.
pub async fn hear(lifecycle: Arc<Lifecycle>) {
    let hints = lifecycle.deployment.store.hints();
    let heard = stream::unfold(hints, |mut hints| async move {
        loop {
            match hints.recv().await {
                Ok(hint) => return Some((hint, hints)),
                // The reaper checks everything anyway.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    });
    heard
        .for_each_concurrent(CONCURRENT_SANDBOXES, |hint| {
            let lifecycle = &lifecycle;
            async move {
                match hint {
                    Hint::Sandbox(id) => {
                        if let Err(error) = look_at(lifecycle, &id).await {
                            tracing::warn!(sandbox = %id, %error, "what another broker wants of a sandbox could not be done; the reaper tries again");
                        }
                    }
                    Hint::Workspace(workspace) => lifecycle.control_push.tell_workspace(&workspace).await,
                    Hint::Beat(node) => beat_if_own(lifecycle, &node).await,
                    Hint::News(_) | Hint::Anything => {}
                }
            }
        })
        .await;
}

/// Another broker asks whether this one is alive.
async fn beat_if_own(lifecycle: &Arc<Lifecycle>, node: &str) {
    let d = &lifecycle.deployment;
    if node == d.node
        && let Err(error) = d.nodes.beat(&*d.store, &*d.clock).await
    {
        tracing::warn!(%error, "another broker's question whether this one lives could not be answered; the next regular beat does");
    }
}

async fn look_at(lifecycle: &Arc<Lifecycle>, id: &SandboxId) -> Result<(), ApiError> {
    let sandbox = lifecycle.deployment.load_sandbox(id).await?;
    // If another task holds the lock, the reaper checks the sandbox once that task is done.
    if !lifecycle.deployment.is_here(&sandbox) || lifecycle.is_busy(id) {
        return Ok(());
    }
    if sandbox.intent.is_some() {
        lifecycle.finish_intent(&sandbox).await;
        return Ok(());
    }
    let d = &lifecycle.deployment;
    if sandbox.is_running() {
        let revocations = d.store.revocations(&sandbox, d.now()).await.map_err(internal)?;
        let revocations = (revocations.sequence, revocations.last_start);
        let keys = (sandbox.keys_from(d.now()), sandbox.generation);
        if lifecycle.control_push.told(id).is_none_or(|told| told.revocations != revocations || told.keys != keys) {
            lifecycle.control_push.tell(id).await?;
        }
    }
    Ok(())
}
