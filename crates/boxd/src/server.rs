//! The daemon: the state that all requests share, the two routers, and the run from the first connection to shutdown.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use axum::{
    Json, Router, middleware,
    routing::{MethodRouter, delete, get, post, put},
};
use cobox_protocol::{
    audit::SandboxClaim,
    control::{BoxdConfig, DataplaneLimits},
    langsmith::{DOWNLOAD, EXECUTE, EXECUTE_RESUME, EXECUTE_START, EXECUTE_WS, GLOB, GREP, TUNNEL, UPLOAD},
};
use tokio::net::UnixListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    FileWorkers,
    activity_log::ActivityLog,
    auth::Authority,
    clock::Clock,
    control, exec,
    files::{self, FileStore},
    fs,
    http_listener::accept_loop,
    langsmith,
    pending_records::PendingRecords,
    processes,
    programs::Spawn,
    reports, request_layer, shell, socket, sync,
    watch::{self, WatchService},
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
    client_routes()
        .router
        .fallback(request_layer::route_not_found)
        .method_not_allowed_fallback(request_layer::method_not_allowed)
        .layer(middleware::from_fn_with_state(server.clone(), request_layer::client_layer))
        .with_state(server)
}

/// A router that records its paths, because axum's `Router` doesn't expose them.
#[derive(Default)]
struct Routes {
    router: Router<Arc<Server>>,
    paths: Vec<&'static str>,
}

impl Routes {
    fn route(mut self, path: &'static str, methods: MethodRouter<Arc<Server>>) -> Self {
        self.paths.push(path);
        Self { router: self.router.route(path, methods), ..self }
    }
}

/// The paths of all client routes; a test compares the documentation with it.
pub fn client_paths() -> Vec<&'static str> {
    client_routes().paths
}

/// Served at the root and below the base URL that clients are given.
async fn health() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "status": "ok" }))
}

fn client_routes() -> Routes {
    let file = || get(files::get).head(files::get).put(files::put).delete(files::delete);
    Routes::default()
        .route("/healthz", get(health))
        .route("/v1/healthz", get(health))
        .route("/v1/exec", post(exec::run))
        .route("/v1/exec/ws", get(exec::open))
        .route("/v1/processes", get(processes::list))
        .route("/v1/processes/{id}", delete(processes::cancel))
        .route("/v1/processes/{id}/signal", post(processes::signal))
        .route("/v1/files", file())
        .route("/v1/files/", file())
        .route("/v1/files/upload", file().post(files::multipart::upload))
        .route("/v1/files/download", get(files::multipart::download).head(files::get).put(files::put).delete(files::delete))
        .route("/v1/files/{*path}", file())
        .route("/v1/watch", get(watch::watch))
        .route("/v1/sync/ws", get(sync::open))
        .route("/v1/fs/list", post(fs::list))
        .route("/v1/fs/stat", post(fs::stat))
        .route("/v1/fs/mkdir", post(fs::mkdir))
        .route("/v1/fs/move", post(fs::move_))
        .route("/v1/fs/copy", post(fs::copy))
        .route("/v1/fs/remove", post(fs::remove))
        .route("/v1/fs/edit", post(fs::edit))
        .route("/v1/fs/glob", post(fs::glob))
        .route("/v1/fs/grep", post(fs::grep))
        .route("/v1/archive", get(files::archive::get).put(files::archive::put))
        .route("/v1/shell/ws", get(shell::open))
        .route("/v1/ws", get(shell::open))
        .route("/v1/shells", get(shell::routes::list).post(shell::routes::create))
        .route("/v1/shells/{shell}", get(shell::routes::inspect).delete(shell::routes::end))
        .route("/v1/shells/{shell}/run", post(shell::routes::run))
        .route(EXECUTE, post(langsmith::command::execute))
        .route(EXECUTE_WS, get(langsmith::socket::open))
        .route(EXECUTE_START, post(langsmith::events::start))
        .route(EXECUTE_RESUME, post(langsmith::events::resume))
        .route(UPLOAD, post(langsmith::upload))
        .route(DOWNLOAD, get(langsmith::download).head(langsmith::download))
        .route(GLOB, post(langsmith::glob))
        .route(GREP, post(langsmith::grep))
        .route(TUNNEL, get(langsmith::tunnel))
}

fn control_router(server: Arc<Server>) -> Router {
    Router::new()
        .route("/control/state", put(control::put_state))
        .route("/control/status", get(control::get_status))
        .route("/control/reports", get(reports::get_reports))
        .route("/control/claims", get(reports::get_claims))
        .route("/control/happenings", get(reports::get_activity))
        .route("/control/shutdown", post(control::shutdown))
        .fallback(request_layer::route_not_found)
        .method_not_allowed_fallback(request_layer::method_not_allowed)
        .layer(middleware::from_fn(request_layer::control_layer))
        .with_state(server)
}
