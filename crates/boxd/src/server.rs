//! The daemon: the state that all requests share, the two routers, and the run from the first connection to shutdown.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use axum::{Router, middleware};
use cobox_protocol::{
    audit::SandboxClaim,
    control::{BoxdConfig, DataplaneLimits},
};
use tokio::net::UnixListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    FileWorkers, activity_log::ActivityLog, auth::Authority, clock::Clock, control, exec, files::FileStore, http_listener::accept_loop,
    pending_records::PendingRecords, processes, programs::Spawn, request_layer, routes, shell, socket, sync, watch::WatchService,
};

/// The broker, and a second one during a takeover.
const MAX_CONTROL_CONNECTIONS: usize = 16;
/// Some minutes of a busy sandbox whose broker is unreachable, at most 2 MiB.
const MAX_PENDING_CLAIMS: usize = 2048;
/// Time for running requests and shells to finish or notify their clients at shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// State shared by all requests.
pub struct Server {
    pub authority: Arc<Authority>,
    pub sandbox_claims: PendingRecords<SandboxClaim>,
    pub activity_log: ActivityLog,
    pub programs: Arc<dyn Spawn>,
    pub files: FileStore,
    pub watch_service: WatchService,
    pub commands: exec::Commands,
    pub processes: processes::JobTable,
    pub shells: shell::Shells,
    pub slots: socket::StreamSlots,
    pub syncs: sync::SyncLimiter,
    pub limits: DataplaneLimits,
    pub tasks: TaskTracker,
    pub shutdown: CancellationToken,
}

impl Server {
    /// Runs work that the response doesn't have to wait for: right after the response is written, in order of
    /// submission.
    pub fn run_after_response(&self, work: impl FnOnce() + Send + 'static) {
        // Queued as the thread's next task: the caller writes its response within its current poll.
        self.tasks.spawn(async move { work() });
    }
}

/// Serves until `shutdown` is cancelled: by the caller, by the broker, or here when the lease has run out without
/// contact to a broker. The caller then has to end what runs in the sandbox.
pub async fn serve(
    config: BoxdConfig,
    programs: Arc<dyn Spawn>,
    files: FileWorkers,
    (clients, control): (UnixListener, UnixListener),
    clock: Arc<dyn Clock>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let authority = Authority::new(config.sandbox_id.clone(), &config.state, clock).map_err(anyhow::Error::msg);
    let authority = Arc::new(authority.context("the keys boxd was started with")?);
    let server = Arc::new(Server {
        authority: authority.clone(),
        sandbox_claims: PendingRecords::new(MAX_PENDING_CLAIMS),
        activity_log: ActivityLog::default(),
        programs,
        files: FileStore::new(files),
        watch_service: WatchService::new(config.dataplane.watches),
        commands: exec::Commands::new(&config.dataplane),
        processes: processes::JobTable::default(),
        shells: shell::Shells::new(&config.dataplane),
        slots: socket::StreamSlots::new(&config.dataplane),
        syncs: sync::SyncLimiter::default(),
        limits: config.dataplane.clone(),
        tasks: TaskTracker::new(),
        shutdown: shutdown.clone(),
    });
    let tasks = server.tasks.clone();
    // The client listener stops first; the broker can still send requests in the meantime.
    let control_end = CancellationToken::new();
    tokio::join!(
        accept_loop(clients, client_router(server.clone()), config.dataplane.connections as usize, tasks.clone(), shutdown.clone()),
        accept_loop(control, control_router(server.clone()), MAX_CONTROL_CONNECTIONS, tasks.clone(), control_end.clone()),
        control::enforce_lease(authority, Duration::from_secs(config.dataplane.lease_grace_seconds), shutdown.clone()),
        control::apply_disk_state(server.clone()),
        async {
            shutdown.cancelled().await;
            control_end.cancel();
        },
    );
    tasks.close();
    if tokio::time::timeout(DRAIN_TIMEOUT, tasks.wait()).await.is_err() {
        tracing::warn!(open = tasks.len(), "requests were still under way at the end");
    }
    Ok(())
}

fn client_router(server: Arc<Server>) -> Router {
    routes::client_router()
        .fallback(request_layer::route_not_found)
        .method_not_allowed_fallback(request_layer::method_not_allowed)
        .layer(middleware::from_fn_with_state(server.clone(), request_layer::client_layer))
        .with_state(server)
}

fn control_router(server: Arc<Server>) -> Router {
    routes::control_router()
        .fallback(request_layer::route_not_found)
        .method_not_allowed_fallback(request_layer::method_not_allowed)
        .layer(middleware::from_fn(request_layer::control_layer))
        .with_state(server)
}
