//! Reconciles the store with the provider at start.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use cobox_protocol::{ApiError, SandboxId, session::State};
use futures_util::{StreamExt, stream};

use super::{
    quarantine::quarantine_unknown,
    transitions::{CONCURRENT_SANDBOXES, Lifecycle},
};
use crate::domain::{
    context::store_error,
    model::{AuditRecord, Intent, Sandbox},
};

/// Returns when no sandbox can receive traffic without the state it missed. Starts continue in the background. Returns
/// the number of items that are new in quarantine.
pub async fn reconcile(lifecycle: &Arc<Lifecycle>) -> Result<usize, ApiError> {
    let context = &lifecycle.context;
    let unreachable = |e: cobox_provider::ProviderError| ApiError::new(e.code(), format!("listing the provider's sandboxes failed: {e}"));
    let found: HashMap<SandboxId, bool> =
        context.provider.list().await.map_err(unreachable)?.into_iter().map(|f| (f.id, f.is_running)).collect();
    let known = context.store.sandboxes_of_node(&context.node).await.map_err(store_error)?;
    let known_ids: HashSet<&SandboxId> = known.iter().map(|s| &s.id).collect();
    let unknown = found.iter().filter(|(id, _)| !known_ids.contains(id)).map(|(id, is_running)| (id.clone(), *is_running)).collect();
    let quarantined = quarantine_unknown(context, &lifecycle.quarantine, &unknown).await?;

    let found = &found;
    stream::iter(&known)
        .for_each_concurrent(CONCURRENT_SANDBOXES, |sandbox| async move {
            if let Err(error) = reconcile_one(lifecycle, sandbox, found.get(&sandbox.id).copied()).await {
                tracing::error!(sandbox = %sandbox.id, %error, "reconciling a sandbox failed; the reaper retries");
            }
        })
        .await;
    Ok(quarantined)
}

/// `is_running` is `None` when the provider doesn't have the sandbox.
async fn reconcile_one(lifecycle: &Arc<Lifecycle>, sandbox: &Sandbox, is_running: Option<bool>) -> Result<(), ApiError> {
    match (sandbox.intent, sandbox.state, is_running) {
        // A client may be requesting it again at this moment.
        (Some(Intent::Create), ..) | (Some(Intent::Destroy | Intent::Suspend), ..) => {
            lifecycle.finish_intent(sandbox).await;
            Ok(())
        }
        // A deleted sandbox whose files are gone before their time.
        (None, State::Terminated, None) => {
            let audit = AuditRecord::of_sandbox(lifecycle.context.now(), sandbox, "sandbox.purged", "its files were gone");
            lifecycle.purge(sandbox, &audit).await
        }
        (_, _, None) => fail_lost(lifecycle, sandbox).await,
        (Some(Intent::Resume), _, Some(true)) => {
            let context = &lifecycle.context;
            context.store.replace_sandbox(sandbox, &sandbox.started(context.now()), None).await.map_err(store_error)?;
            adopt(lifecycle, sandbox).await
        }
        (Some(Intent::Resume), _, Some(false)) => {
            let undone = Sandbox { intent: None, ..sandbox.clone() };
            lifecycle.context.store.replace_sandbox(sandbox, &undone, None).await.map_err(store_error)?;
            Ok(())
        }
        (None, State::Active | State::Idle, Some(true)) => adopt(lifecycle, sandbox).await,
        (None, State::Active | State::Idle, Some(false)) => {
            lifecycle.suspend(&sandbox.id, "it ended while no broker ran", |_| true).await?;
            Ok(())
        }
        (None, State::Suspended | State::Terminated, Some(true)) => {
            let stopped = lifecycle.context.provider.suspend(&sandbox.id).await;
            stopped.map_err(|e| ApiError::new(e.code(), format!("{} runs but should be stopped: {e}", sandbox.id)))
        }
        (None, ..) => Ok(()),
    }
}

/// A sandbox that can't be sent the state it missed must not serve clients.
async fn adopt(lifecycle: &Arc<Lifecycle>, sandbox: &Sandbox) -> Result<(), ApiError> {
    if let Err(error) = lifecycle.adopt(&sandbox.id).await {
        tracing::warn!(sandbox = %sandbox.id, %error, "adopting a running sandbox failed; suspending it");
        lifecycle.suspend(&sandbox.id, "it could not be adopted", |_| true).await?;
    }
    Ok(())
}

/// Its files are gone: resuming it would give clients an empty sandbox.
async fn fail_lost(lifecycle: &Arc<Lifecycle>, sandbox: &Sandbox) -> Result<(), ApiError> {
    const REASON: &str = "the provider no longer has its files";
    let context = &lifecycle.context;
    let audit = AuditRecord::of_sandbox(context.now(), sandbox, "sandbox.failed", REASON);
    context.store.end_sandbox(&sandbox.id, State::Failed, &context.ending(REASON, audit)).await.map_err(store_error)?;
    lifecycle.destroy(&sandbox.id).await;
    Ok(())
}
