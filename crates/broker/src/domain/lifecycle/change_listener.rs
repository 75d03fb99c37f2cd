//! Change listener: acts at once on what other brokers changed about this node's sandboxes. The reaper finds changes
//! whose notice was missed.

use std::sync::Arc;

use cobox_protocol::{ApiError, SandboxId};
use futures_util::{StreamExt, stream};
use tokio::sync::broadcast::error::RecvError;

use super::transitions::{CONCURRENT_SANDBOXES, Lifecycle};
use crate::{domain::context::store_error, store::ChangeNotice};

/// Runs as long as the store exists.
pub async fn listen_for_changes(lifecycle: Arc<Lifecycle>) {
    let notices = lifecycle.context.store.notices();
    let hints_received = stream::unfold(notices, |mut notices| async move {
        loop {
            match notices.recv().await {
                Ok(hint) => return Some((hint, notices)),
                // The reaper checks everything anyway.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    });
    hints_received
        .for_each_concurrent(CONCURRENT_SANDBOXES, |hint| {
            let lifecycle = &lifecycle;
            async move {
                match hint {
                    ChangeNotice::Sandbox(id) => {
                        if let Err(error) = apply_change(lifecycle, &id).await {
                            tracing::warn!(sandbox = %id, %error, "applying another broker's change failed; the reaper retries");
                        }
                    }
                    ChangeNotice::Workspace(workspace) => lifecycle.control_push.push_to_workspace(&workspace).await,
                    ChangeNotice::HeartbeatRequest(node) => answer_probe(lifecycle, &node).await,
                    ChangeNotice::Events(_) | ChangeNotice::Any => {}
                }
            }
        })
        .await;
}

/// Another broker asks whether this one is alive.
async fn answer_probe(lifecycle: &Arc<Lifecycle>, node: &str) {
    let context = &lifecycle.context;
    if node == context.node
        && let Err(error) = context.nodes.send_heartbeat(&context.store, &*context.clock).await
    {
        tracing::warn!(%error, "answering another broker's heartbeat request failed; the next regular heartbeat answers it");
    }
}

async fn apply_change(lifecycle: &Arc<Lifecycle>, id: &SandboxId) -> Result<(), ApiError> {
    let sandbox = lifecycle.context.load_sandbox(id).await?;
    // If another task holds the lock, the reaper checks the sandbox once that task is done.
    if !lifecycle.context.is_here(&sandbox) || lifecycle.is_busy(id) {
        return Ok(());
    }
    if sandbox.intent.is_some() {
        lifecycle.finish_intent(&sandbox).await;
        return Ok(());
    }
    let context = &lifecycle.context;
    if sandbox.is_running() {
        let revocations = context.store.revocations(&sandbox, context.now()).await.map_err(store_error)?;
        let revocations = (revocations.sequence, revocations.last_start);
        let keys = (sandbox.keys_from(context.now()), sandbox.generation);
        if lifecycle.control_push.pushed_state(id).is_none_or(|pushed| pushed.revocations != revocations || pushed.keys != keys) {
            lifecycle.control_push.push(id).await?;
        }
    }
    Ok(())
}
