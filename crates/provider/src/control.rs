//! The broker's side of the control channel: small HTTP requests over boxd's second listener.

use std::time::Duration;

use bytes::Bytes;
use cobox_protocol::{
    SandboxId,
    audit::ClaimBatch,
    control::{BoxdStatus, ControlState},
    event::ActivityBatch,
};
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;

use crate::{BoxdSocket, Provider, ProviderError};

/// Maximum response time of a healthy boxd, which only copies a structure.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// A status takes a few hundred bytes, a full batch of claims half a megabyte. Reading a larger response is aborted.
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

/// Fetches the records of boxd's audit log that follow number `after` of the boxd run named `life`. boxd may discard those up to `after`.
pub async fn fetch_claims(provider: &dyn Provider, id: &SandboxId, life: &str, after: u64) -> Result<ClaimBatch, ProviderError> {
    if provider.adapter().is_some() {
        return Ok(ClaimBatch { life: life.to_owned(), items: Vec::new(), lost: 0, more: false });
    }
    // The name of a run comes from the sandbox: only letters and digits are put into the path.
    let life: String = life.chars().filter(char::is_ascii_alphanumeric).collect();
    call(provider, id, Method::GET, &format!("/control/claims?life={life}&after={after}"), Vec::new()).await
}

/// Long-polls boxd's activity feed: returns the entries that follow number `after` of the boxd run named `life`, or none after `wait`.
pub async fn fetch_activity(
    provider: &dyn Provider,
    id: &SandboxId,
    (life, after): (&str, u64),
    wait: Duration,
) -> Result<ActivityBatch, ProviderError> {
    let life: String = life.chars().filter(char::is_ascii_alphanumeric).collect();
    let path = format!("/control/happenings?life={life}&after={after}&wait={}", wait.as_secs());
    call_with_timeout(provider, id, Method::GET, &path, Vec::new(), wait + RESPONSE_TIMEOUT).await
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
    call_with_timeout(provider, id, method, path, body, RESPONSE_TIMEOUT).await
}

async fn call_with_timeout<T: DeserializeOwned>(
    provider: &dyn Provider,
    id: &SandboxId,
    method: Method,
    path: &str,
    body: Vec<u8>,
    timeout: Duration,
) -> Result<T, ProviderError> {
    let exchange = async {
        let stream = provider.dial(id, BoxdSocket::Control).await?;
        let failed = |what: &str, e: &dyn std::fmt::Display| ProviderError::Unavailable(format!("boxd of {id}: {what}: {e}"));
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|e| failed("the HTTP handshake on the control channel failed", &e))?;
        // Closes the connection with this call, also when the call is cancelled.
        let connection = AbortOnDrop(tokio::spawn(connection).abort_handle());
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "boxd")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| failed("building the request failed", &e))?;
        let response = sender.send_request(request).await.map_err(|e| failed("it sent no response", &e))?;
        let status = response.status();
        let bytes = Limited::new(response.into_body(), MAX_RESPONSE_BYTES)
            .collect()
            .await
            .map_err(|e| failed("reading the response failed", &e))?
            .to_bytes();
        drop(connection);
        if !status.is_success() {
            return Err(failed("it refused the request", &status));
        }
        serde_json::from_slice(&bytes).map_err(|e| failed("its response is malformed", &e))
    };
    tokio::time::timeout(timeout, exchange)
        .await
        .map_err(|_| ProviderError::Unavailable(format!("boxd of {id} did not respond within {} s", timeout.as_secs())))?
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
