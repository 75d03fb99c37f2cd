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

use crate::{Door, Provider, ProviderError};

/// Longest a healthy boxd takes to answer; it does no more than copy a structure.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// A status is a few hundred bytes, a full batch of claims half a megabyte; a sandbox that sends more is not heard out.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;

/// Replaces what boxd knows: keys, revocations, lease. Where there is none the gateway decides, which asks the store each time.
pub async fn push(provider: &dyn Provider, id: &SandboxId, state: &ControlState) -> Result<BoxdStatus, ProviderError> {
    if provider.adapter().is_some() {
        return Ok(without_boxd(id, state.version));
    }
    let body = serde_json::to_vec(state).map_err(|e| ProviderError::Refused(e.to_string()))?;
    call(provider, id, Method::PUT, "/control/state", body).await
}

/// Asks boxd how it is.
pub async fn status(provider: &dyn Provider, id: &SandboxId) -> Result<BoxdStatus, ProviderError> {
    if provider.adapter().is_some() {
        return if provider.is_running(id).await { Ok(without_boxd(id, 0)) } else { Err(ProviderError::NotRunning(id.clone())) };
    }
    call(provider, id, Method::GET, "/control/status", Vec::new()).await
}

/// Fetches the lines of boxd's audit after those of this life up to `after`, which it may forget.
pub async fn claims(provider: &dyn Provider, id: &SandboxId, life: &str, after: u64) -> Result<ClaimBatch, ProviderError> {
    if provider.adapter().is_some() {
        return Ok(ClaimBatch { life: life.to_owned(), items: Vec::new(), lost: 0, more: false });
    }
    // A life is what boxd once called it: nothing but letters and digits goes into a path.
    let life: String = life.chars().filter(char::is_ascii_alphanumeric).collect();
    call(provider, id, Method::GET, &format!("/control/claims?life={life}&after={after}"), Vec::new()).await
}

/// What was done through boxd after what was taken of this life, as soon as there is some, or nothing when `wait` is over.
pub async fn happenings(
    provider: &dyn Provider,
    id: &SandboxId,
    (life, after): (&str, u64),
    wait: Duration,
) -> Result<ActivityBatch, ProviderError> {
    let life: String = life.chars().filter(char::is_ascii_alphanumeric).collect();
    let path = format!("/control/happenings?life={life}&after={after}&wait={}", wait.as_secs());
    call_within(provider, id, Method::GET, &path, Vec::new(), wait + ANSWER_WITHIN).await
}

/// All that can be said of a sandbox without boxd: every use of it passes through the gateway, and is counted there.
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
    call_within(provider, id, method, path, body, ANSWER_WITHIN).await
}

async fn call_within<T: DeserializeOwned>(
    provider: &dyn Provider,
    id: &SandboxId,
    method: Method,
    path: &str,
    body: Vec<u8>,
    within: Duration,
) -> Result<T, ProviderError> {
    let answer = async {
        let stream = provider.dial(id, Door::Control).await?;
        let failed = |what: &str, e: &dyn std::fmt::Display| ProviderError::Unavailable(format!("boxd of {id}: {what}: {e}"));
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| failed("no HTTP on the control channel", &e))?;
        // Ends with this call, also where nobody waits for the answer any more.
        let connection = AbortOnDrop(tokio::spawn(connection).abort_handle());
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "boxd")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| failed("building the request", &e))?;
        let response = sender.send_request(request).await.map_err(|e| failed("no answer", &e))?;
        let status = response.status();
        let bytes =
            Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await.map_err(|e| failed("reading the answer", &e))?.to_bytes();
        drop(connection);
        if !status.is_success() {
            return Err(failed("it refused", &status));
        }
        serde_json::from_slice(&bytes).map_err(|e| failed("an answer that can't be read", &e))
    };
    tokio::time::timeout(within, answer)
        .await
        .map_err(|_| ProviderError::Unavailable(format!("boxd of {id} did not answer within {} s", within.as_secs())))?
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
