//! The broker's side of the control channel: small HTTP requests over boxd's second listener.

use std::time::Duration;

use bytes::Bytes;
use cobox_protocol::{
    SandboxId,
    control::{BoxdStatus, ControlState},
    report::{ReportBatch, ReportCursor, ReportQuery, Reports},
};
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;

use crate::{BoxdSocket, Provider, ProviderError};

/// Maximum response time of a healthy boxd, which only copies a structure.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// A status takes a few hundred bytes, two full batches of reports just below a megabyte. Reading a larger response is aborted.
const MAX_RESPONSE_BYTES: usize = 1024 * 1024;

/// Replaces boxd's keys, revocations and lease. Does nothing for a provider without boxd, where the gateway checks each request against
/// the store.
pub async fn push_state(provider: &dyn Provider, id: &SandboxId, state: &ControlState) -> Result<BoxdStatus, ProviderError> {
    if provider.adapter().is_some() {
        return Ok(without_boxd(id, state.version));
    }
    let body = serde_json::to_vec(state).map_err(|e| ProviderError::Refused(e.to_string()))?;
    call(provider, id, Method::PUT, "/control/state", body).await
}

/// Fetches boxd's status.
pub async fn fetch_status(provider: &dyn Provider, id: &SandboxId) -> Result<BoxdStatus, ProviderError> {
    if provider.adapter().is_some() {
        return if provider.is_running(id).await { Ok(without_boxd(id, 0)) } else { Err(ProviderError::NotRunning(id.clone())) };
    }
    call(provider, id, Method::GET, "/control/status", Vec::new()).await
}

/// Long-polls boxd's reports. `None` if this boxd doesn't have the route, or reports a kind in a form that this broker can't read: then
/// [`fetch_reports_singly`] gets the other.
pub async fn fetch_reports(provider: &dyn Provider, id: &SandboxId, query: &ReportQuery) -> Result<Option<Reports>, ProviderError> {
    let wait = Duration::from_millis(query.wait_ms);
    if provider.adapter().is_some() {
        // Without boxd nothing is reported.
        tokio::time::sleep(wait).await;
        return Ok(Some(Reports::default()));
    }
    let mut path = format!("/control/reports?wait_ms={}", query.wait_ms);
    for (kind, cursor) in [("claims", &query.claims), ("activities", &query.activities)] {
        if let Some(cursor) = cursor {
            path.push_str(&format!("&{kind}={cursor}"));
        }
    }
    let (status, bytes) = send(provider, id, Method::GET, &path, Vec::new(), wait + RESPONSE_TIMEOUT).await?;
    Ok(parse(id, status, &bytes).ok())
}

/// As [`fetch_reports`], each kind by a route of its own. boxd waits for activities only.
pub async fn fetch_reports_singly(provider: &dyn Provider, id: &SandboxId, query: &ReportQuery) -> Result<Reports, ProviderError> {
    let wait = Duration::from_millis(query.wait_ms);
    let claims = fetch_single(provider, id, "claims", query.claims.as_ref(), Duration::ZERO).await?;
    match fetch_single(provider, id, "happenings", query.activities.as_ref(), wait).await {
        Err(error) if claims.is_none() => Err(error),
        // The next request without claims returns the error. Activities may be too long or unreadable for this broker.
        activities => Ok(Reports { claims, activities: activities.unwrap_or_default() }),
    }
}

async fn fetch_single<T: DeserializeOwned>(
    provider: &dyn Provider,
    id: &SandboxId,
    route: &str,
    cursor: Option<&ReportCursor>,
    wait: Duration,
) -> Result<Option<ReportBatch<T>>, ProviderError> {
    let Some(cursor) = cursor.map(ReportCursor::to_string) else { return Ok(None) };
    let (run_id, seq) = cursor.split_once(':').unwrap_or_default();
    // A boxd of that age waits for whole seconds.
    let path = format!("/control/{route}?life={run_id}&after={seq}&wait={}", wait.as_millis().div_ceil(1000));
    let (status, bytes) = send(provider, id, Method::GET, &path, Vec::new(), wait + RESPONSE_TIMEOUT).await?;
    parse(id, status, &bytes).map(Some)
}

/// The status of a sandbox without boxd. Its requests pass through the gateway, which counts them.
fn without_boxd(id: &SandboxId, state_version: u64) -> BoxdStatus {
    BoxdStatus { sandbox_id: id.clone(), state_version, requests: 0, open_streams: 0, version: String::new() }
}

async fn call<T: DeserializeOwned>(
    provider: &dyn Provider,
    id: &SandboxId,
    method: Method,
    path: &str,
    body: Vec<u8>,
) -> Result<T, ProviderError> {
    let (status, bytes) = send(provider, id, method, path, body, RESPONSE_TIMEOUT).await?;
    parse(id, status, &bytes)
}

async fn send(
    provider: &dyn Provider,
    id: &SandboxId,
    method: Method,
    path: &str,
    body: Vec<u8>,
    timeout: Duration,
) -> Result<(StatusCode, Bytes), ProviderError> {
    let exchange = async {
        let stream = provider.dial(id, BoxdSocket::Control).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| failed(id, "the HTTP handshake on the control channel failed", &e))?;
        // Closes the connection with this call, also when the call is cancelled.
        let connection = AbortOnDrop(tokio::spawn(connection).abort_handle());
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "boxd")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| failed(id, "building the request failed", &e))?;
        let response = sender.send_request(request).await.map_err(|e| failed(id, "it sent no response", &e))?;
        let status = response.status();
        let bytes = Limited::new(response.into_body(), MAX_RESPONSE_BYTES)
            .collect()
            .await
            .map_err(|e| failed(id, "reading the response failed", &e))?
            .to_bytes();
        drop(connection);
        Ok((status, bytes))
    };
    tokio::time::timeout(timeout, exchange)
        .await
        .map_err(|_| ProviderError::Unavailable(format!("boxd of {id} did not respond within {} s", timeout.as_secs())))?
}

fn parse<T: DeserializeOwned>(id: &SandboxId, status: StatusCode, bytes: &[u8]) -> Result<T, ProviderError> {
    if !status.is_success() {
        return Err(failed(id, "it refused the request", &status));
    }
    serde_json::from_slice(bytes).map_err(|e| failed(id, "its response is malformed", &e))
}

fn failed(id: &SandboxId, what: &str, cause: &dyn std::fmt::Display) -> ProviderError {
    ProviderError::Unavailable(format!("boxd of {id}: {what}: {cause}"))
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
