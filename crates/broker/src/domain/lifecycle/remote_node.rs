//! Sandboxes of remote nodes: only their own broker may act on them, so an intent is written to the store for it.

use std::time::Duration;

use cobox_protocol::{ApiError, ErrorCode, SandboxId, session::State};
use tokio::{sync::broadcast::error::RecvError, time::Instant};

use super::transitions::{RESUME_FAILED, StartResult, gone, starting, unavailable};
use crate::{
    domain::{
        context::{BrokerContext, store_error},
        model::{AuditRecord, Intent, Sandbox},
    },
    store::ChangeNotice,
};

/// How often the store is polled for the other broker's result when no change notice arrives.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// As `Lifecycle::ensure_running`, for a sandbox of another node: stores the intent for its broker.
pub async fn ensure_running_on_remote_node(context: &BrokerContext, id: &SandboxId, wait: Duration) -> StartResult {
    let deadline = Instant::now() + wait;
    // Before the first read, so that no change in between is missed.
    let mut notices = context.store.notices();
    let mut has_requested = false;
    loop {
        let sandbox = context.load_sandbox(id).await?;
        if sandbox.ended_at.is_some() {
            return Err(gone(&sandbox));
        }
        if !context.nodes.is_alive(&context.store, &sandbox.node, context.now()).await.map_err(store_error)? {
            return Err(dead_node_error(context, &sandbox).await?);
        }
        match (sandbox.state, sandbox.intent) {
            (State::Active | State::Idle, None) => {
                // A change that its node made a moment ago shows that the node is alive.
                let is_there =
                    has_requested || context.nodes.answers(&context.store, &sandbox.node, context.now()).await.map_err(store_error)?;
                return if is_there { Ok(sandbox) } else { Err(unreachable(&sandbox)) };
            }
            (State::Suspended, None) if has_requested => {
                let why = sandbox.reason.as_deref().unwrap_or("it was suspended again");
                return Err(unavailable(id, "could not be resumed", why.strip_prefix(RESUME_FAILED).unwrap_or(why)));
            }
            (State::Suspended, None) => {
                // A concurrent change wins; the next iteration sees it.
                has_requested =
                    context.store.replace_sandbox(&sandbox, &sandbox.with_intent(Intent::Resume), None).await.map_err(store_error)?;
                continue;
            }
            // Its broker is working on it.
            _ => {}
        }
        let changed = async {
            loop {
                match notices.recv().await {
                    Ok(ChangeNotice::Sandbox(hinted)) if hinted == *id => return,
                    Ok(ChangeNotice::Any) | Err(RecvError::Lagged(_)) => return,
                    Ok(_) => {}
                    Err(RecvError::Closed) => std::future::pending().await,
                }
            }
        };
        if Instant::now() >= deadline {
            return Err(starting(id));
        }
        // Notice or timeout: either way the next iteration reads the sandbox again.
        let _ = tokio::time::timeout_at(deadline.min(Instant::now() + POLL_INTERVAL), changed).await;
    }
}

/// Error for a sandbox whose node is dead. One that was never created completely is given up, so that another can be
/// created.
async fn dead_node_error(context: &BrokerContext, sandbox: &Sandbox) -> Result<ApiError, ApiError> {
    if fail_unprovisioned(context, sandbox).await? {
        return Ok(gone(&context.load_sandbox(&sandbox.id).await?));
    }
    Ok(unreachable(sandbox))
}

async fn fail_unprovisioned(context: &BrokerContext, sandbox: &Sandbox) -> Result<bool, ApiError> {
    const REASON: &str = "its node died before it was made";
    if sandbox.state != State::Provisioning {
        return Ok(false);
    }
    let audit = AuditRecord::of_sandbox(context.now(), sandbox, "sandbox.failed", REASON);
    context.store.end_sandbox(&sandbox.id, State::Failed, &context.ending(REASON, audit)).await.map_err(store_error)?;
    Ok(true)
}

/// Applies the lease to a sandbox whose broker is dead, as far as the store knows it. The sandbox is suspended but
/// never ended: time in which its node does not run does not count.
pub async fn apply_lease_of_orphan(context: &BrokerContext, sandbox: &Sandbox) -> Result<(), ApiError> {
    let now = context.now();
    if sandbox.ended_at.is_some() || fail_unprovisioned(context, sandbox).await? {
        return Ok(());
    }
    if sandbox.intent == Some(Intent::Resume) {
        let undone = Sandbox { intent: None, ..sandbox.clone() };
        context.store.replace_sandbox(sandbox, &undone, None).await.map_err(store_error)?;
    } else if sandbox.is_running() && now >= context.lease_end(sandbox) {
        // Its boxd, without a broker, has ended itself by then.
        const REASON: &str = "its node died and its lease ran out";
        let suspended = Sandbox { suspended_at: Some(now), ..sandbox.suspended(context.lease_end(sandbox), REASON) };
        let audit = AuditRecord::of_sandbox(now, sandbox, "sandbox.suspended", REASON);
        context.store.replace_sandbox(sandbox, &suspended, Some(&audit)).await.map_err(store_error)?;
    }
    Ok(())
}

/// Seconds until a retry makes sense for a sandbox whose node doesn't answer: a broker restarts within a few.
const NODE_RETRY_AFTER: u32 = 5;

/// Must not advise to release the session: that would erase files that are available again once the node is back.
fn unreachable(sandbox: &Sandbox) -> ApiError {
    let Sandbox { id, node, .. } = sandbox;
    let message =
        format!("node {node} of sandbox {id} does not answer; its files are kept there: try again, or ask the operator to start the node");
    let details = serde_json::json!({ "sandbox_id": id, "node": node });
    ApiError { retry_after: Some(NODE_RETRY_AFTER), ..ApiError::new(ErrorCode::ProviderUnavailable, message).with_details(details) }
}
