//! One HTTP call, in a form that can be sent again after a wait or with a new token.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cobox_protocol::{ErrorCode, Secret};
use futures_util::future::BoxFuture;
use http::{HeaderName, HeaderValue, Method, header};
use tokio::time::Instant;

use crate::{ClientError, session::TokenRefresher};

/// Bounds of the wait before a retry: a server's `Retry-After` may be 0, or an hour.
const MIN_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Opens the bytes of an upload from the start; called once per attempt.
type OpenUpload = dyn Fn() -> BoxFuture<'static, std::io::Result<reqwest::Body>> + Send + Sync;

/// Data to upload. It can be opened again, because the first attempt may find an expired token or a starting sandbox.
#[derive(Clone)]
pub struct Upload {
    open: Arc<OpenUpload>,
    length: Option<u64>,
}

impl Upload {
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        let length = Some(bytes.len() as u64);
        Self {
            open: Arc::new(move || {
                let bytes = bytes.clone();
                Box::pin(async move { Ok(reqwest::Body::from(bytes)) })
            }),
            length,
        }
    }

    /// A stream that `open` creates for each attempt. With a length it is sent with `Content-Length`, otherwise chunked.
    pub fn from_stream<S, F, Fut>(length: Option<u64>, open: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = std::io::Result<S>> + Send + 'static,
        S: futures_util::Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    {
        Self {
            open: Arc::new(move || {
                let opening = open();
                Box::pin(async move { Ok(reqwest::Body::wrap_stream(opening.await?)) })
            }),
            length,
        }
    }
}

#[derive(Clone)]
pub(crate) enum Payload {
    Empty,
    Json(Bytes),
    Upload(Upload),
}

#[derive(Clone)]
pub(crate) struct Call {
    pub method: Method,
    pub url: String,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub payload: Payload,
    /// Timeout of the whole response; `None` for streams and commands, which have no limit.
    pub timeout: Option<Duration>,
}

impl Call {
    pub fn new(method: Method, url: String) -> Self {
        Self { method, url, headers: Vec::new(), payload: Payload::Empty, timeout: None }
    }
    pub fn json(mut self, body: &impl serde::Serialize) -> Self {
        // Request types contain only strings, numbers and maps with string keys, so serialization cannot fail.
        self.payload = Payload::Json(serde_json::to_vec(body).expect("request types serialise").into());
        self
    }
    pub fn upload(mut self, upload: Upload) -> Self {
        self.payload = Payload::Upload(upload);
        self
    }
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// Credential of a call.
#[derive(Clone)]
pub(crate) enum Credential {
    ApiKey(Secret),
    Token(Arc<TokenRefresher>),
}

/// Sends calls, and repeats those that the server asks to repeat.
#[derive(Clone)]
pub(crate) struct Sender {
    pub http: reqwest::Client,
    /// Opens a new connection for each call. A pooled connection may have died unnoticed while this machine was asleep, and a reconnect must
    /// not wait for it.
    pub unpooled: reqwest::Client,
    /// How long to wait for a starting sandbox before the error is returned.
    pub start_deadline: Duration,
}

impl Sender {
    /// As [`Sender::send`], over a new connection.
    pub async fn send_on_new_connection(&self, call: &Call, credential: &Credential) -> Result<reqwest::Response, ClientError> {
        Self { http: self.unpooled.clone(), ..self.clone() }.send(call, credential).await
    }

    /// Repeats the call after `423` and `429` until the deadline, and refreshes an expired token once.
    pub async fn send(&self, call: &Call, credential: &Credential) -> Result<reqwest::Response, ClientError> {
        let deadline = Instant::now() + self.start_deadline;
        let mut has_refreshed = false;
        loop {
            let secret = match credential {
                Credential::ApiKey(key) => key.clone(),
                Credential::Token(refresher) => refresher.valid_token().await?,
            };
            let error = match self.send_once(call, &secret).await {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            if let Credential::Token(refresher) = credential
                && error.is(ErrorCode::TokenExpired)
                && !has_refreshed
            {
                has_refreshed = true;
                refresher.replace(&secret).await?;
                continue;
            }
            let is_asked_to_wait = error.is(ErrorCode::SandboxStarting) || error.is(ErrorCode::RateLimited);
            let wait = Duration::from_secs(error.api().and_then(|f| f.retry_after).unwrap_or(1)).clamp(MIN_WAIT, MAX_WAIT);
            if !is_asked_to_wait || Instant::now() + wait > deadline {
                return Err(error);
            }
            tokio::time::sleep(wait).await;
        }
    }

    /// Makes one attempt. Any response except a success or a protocol switch is an error.
    pub async fn send_once(&self, call: &Call, secret: &Secret) -> Result<reqwest::Response, ClientError> {
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", secret.expose())).map_err(|_| ClientError::InvalidKey)?;
        bearer.set_sensitive(true);
        let mut request = self.http.request(call.method.clone(), &call.url).header(header::AUTHORIZATION, bearer);
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        if let Some(timeout) = call.timeout {
            request = request.timeout(timeout);
        }
        match &call.payload {
            Payload::Empty => {}
            Payload::Json(bytes) => request = request.header(header::CONTENT_TYPE, "application/json").body(bytes.clone()),
            Payload::Upload(upload) => {
                if let Some(length) = upload.length {
                    request = request.header(header::CONTENT_LENGTH, length);
                }
                request = request.body((upload.open)().await?);
            }
        }
        let response = request.send().await.map_err(|e| ClientError::transport(&call.url, &e))?;
        if response.status().is_success() || response.status() == http::StatusCode::SWITCHING_PROTOCOLS {
            Ok(response)
        } else {
            Err(ClientError::from_response(&call.url, response).await)
        }
    }
}

/// Reads a JSON response of bounded size.
pub(crate) async fn read_json<T: serde::de::DeserializeOwned>(
    url: &str,
    mut response: reqwest::Response,
    max_bytes: usize,
) -> Result<T, ClientError> {
    let status = response.status().as_u16();
    let not_cobox = |excerpt: String| ClientError::NotCobox { url: url.to_owned(), status, excerpt };
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|e| ClientError::transport(url, &e))? {
        if body.len() + chunk.len() > max_bytes {
            return Err(not_cobox(format!("more than {max_bytes} bytes of JSON")));
        }
        body.extend_from_slice(&chunk);
    }
    // The error has the position but no value, so that it cannot contain a token.
    serde_json::from_slice(&body).map_err(|e| not_cobox(format!("{} at line {} column {}", category(&e), e.line(), e.column())))
}

fn category(e: &serde_json::Error) -> &'static str {
    match e.classify() {
        serde_json::error::Category::Data => "JSON of an unexpected shape",
        _ => "not JSON",
    }
}
