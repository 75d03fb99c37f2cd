//! `WS /v1/shell/ws`: a terminal in the sandbox. It lives as long as its connection.

mod session;
mod terminal;

use std::sync::Arc;

use axum::{
    Extension,
    extract::{State, WebSocketUpgrade, ws::rejection::WebSocketUpgradeRejection},
    response::Response,
};
use cobox_protocol::{ApiError, ErrorCode};
use http::HeaderMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    answer::{Failure, RequestRecord},
    server::Server,
    socket,
};

pub struct Limits {
    shells: Arc<Semaphore>,
    limit: u32,
}

impl Limits {
    pub fn new(limit: u32) -> Self {
        Self { shells: Arc::new(Semaphore::new(limit as usize)), limit }
    }

    fn slot(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.shells.clone().try_acquire_owned().map_err(|_| {
            ApiError::new(ErrorCode::RateLimited, format!("{} shells are already open here; close one and try again", self.limit))
        })
    }
}

pub async fn open(
    State(server): State<Arc<Server>>,
    Extension(record): Extension<Arc<RequestRecord>>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Failure> {
    socket::open(server, record, headers, upgrade, session::Session).await
}
