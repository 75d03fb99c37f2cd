//! Every route of boxd: for clients, and for the broker on the control socket. A new client route must also be described in `openapi/`.

use std::sync::Arc;

use axum::{
    Json, Router,
    routing::{MethodRouter, delete, get, post, put},
};
use cobox_protocol::langsmith::{DOWNLOAD, EXECUTE, EXECUTE_RESUME, EXECUTE_START, EXECUTE_WS, GLOB, GREP, TUNNEL, UPLOAD};

use crate::{control, exec, files, fs, langsmith, processes, reports, server::Server, shell, sync, watch};

/// Path and handlers.
type Route = (&'static str, fn() -> MethodRouter<Arc<Server>>);

const CLIENT_ROUTES: &[Route] = &[
    ("/healthz", || get(health)),
    ("/v1/healthz", || get(health)),
    ("/v1/exec", || post(exec::run)),
    ("/v1/exec/ws", || get(exec::open)),
    ("/v1/processes", || get(processes::list)),
    ("/v1/processes/{id}", || delete(processes::cancel)),
    ("/v1/processes/{id}/signal", || post(processes::signal)),
    ("/v1/files", file),
    ("/v1/files/", file),
    ("/v1/files/upload", || file().post(files::multipart::upload)),
    ("/v1/files/download", || get(files::multipart::download).head(files::get).put(files::put).delete(files::delete)),
    ("/v1/files/{*path}", file),
    ("/v1/watch", || get(watch::watch)),
    ("/v1/sync/ws", || get(sync::open)),
    ("/v1/fs/list", || post(fs::list)),
    ("/v1/fs/stat", || post(fs::stat)),
    ("/v1/fs/mkdir", || post(fs::mkdir)),
    ("/v1/fs/move", || post(fs::move_)),
    ("/v1/fs/copy", || post(fs::copy)),
    ("/v1/fs/remove", || post(fs::remove)),
    ("/v1/fs/edit", || post(fs::edit)),
    ("/v1/fs/glob", || post(fs::glob)),
    ("/v1/fs/grep", || post(fs::grep)),
    ("/v1/archive", || get(files::archive::get).put(files::archive::put)),
    ("/v1/shell/ws", || get(shell::open)),
    ("/v1/ws", || get(shell::open)),
    ("/v1/shells", || get(shell::routes::list).post(shell::routes::create)),
    ("/v1/shells/{shell}", || get(shell::routes::inspect).delete(shell::routes::end)),
    ("/v1/shells/{shell}/run", || post(shell::routes::run)),
    (EXECUTE, || post(langsmith::command::execute)),
    (EXECUTE_WS, || get(langsmith::socket::open)),
    (EXECUTE_START, || post(langsmith::events::start)),
    (EXECUTE_RESUME, || post(langsmith::events::resume)),
    (UPLOAD, || post(langsmith::upload)),
    (DOWNLOAD, || get(langsmith::download).head(langsmith::download)),
    (GLOB, || post(langsmith::glob)),
    (GREP, || post(langsmith::grep)),
    (TUNNEL, || get(langsmith::tunnel)),
];

const CONTROL_ROUTES: &[Route] = &[
    ("/control/state", || put(control::put_state)),
    ("/control/status", || get(control::get_status)),
    ("/control/reports", || get(reports::get_reports)),
    // For brokers that don't know `/control/reports`.
    ("/control/claims", || get(reports::get_claims)),
    ("/control/happenings", || get(reports::get_activity)),
    ("/control/shutdown", || post(control::shutdown)),
];

pub fn client_router() -> Router<Arc<Server>> {
    router(CLIENT_ROUTES)
}

pub fn control_router() -> Router<Arc<Server>> {
    router(CONTROL_ROUTES)
}

fn router(routes: &[Route]) -> Router<Arc<Server>> {
    routes.iter().fold(Router::new(), |router, (path, methods)| router.route(path, methods()))
}

/// The paths of all client routes; a test compares the documentation with it.
pub fn client_paths() -> impl Iterator<Item = &'static str> {
    CLIENT_ROUTES.iter().map(|(path, _)| *path)
}

fn file() -> MethodRouter<Arc<Server>> {
    get(files::get).head(files::get).put(files::put).delete(files::delete)
}

/// Served at the root and below the base URL that clients are given.
async fn health() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "status": "ok" }))
}
