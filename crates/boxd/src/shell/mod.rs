//! Shells: terminals that outlive connections and that humans and agents share. `WS /v1/shell/ws` and `/v1/shells`.

mod command;
mod output_sender;
mod participants;
mod prompt;
mod registry;
pub mod routes;
mod shared_shell;
mod task;
mod terminal;
mod websocket;

use std::sync::Arc;

use axum::{
    Extension,
    extract::{State, WebSocketUpgrade, ws::rejection::WebSocketUpgradeRejection},
    response::Response,
};
use http::HeaderMap;

pub use self::registry::Shells;
use crate::{
    request_layer::{ErrorResponse, RequestRecord},
    server::Server,
    socket,
};

pub async fn open(
    State(server): State<Arc<Server>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ErrorResponse> {
    socket::open(server, record, headers, upgrade, websocket::ShellSocket).await
}
