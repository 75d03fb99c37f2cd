//! One HTTP call: described once, so that it can be sent again after a wait or with a fresh token.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cobox_protocol::{ErrorCode, Secret};
use futures_util::future::BoxFuture;
use http::{HeaderName, HeaderValue, Method, header};
use tokio::time::Instant;

use crate::{ClientError, session::TokenKeeper};

/// Shortest and longest wait between two tries of a call that was told to wait: a server may say 0, or an hour.
const MIN_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(10);

/// Opens the bytes of an upload from their start; called once per try.
type OpenUpload = dyn Fn() -> BoxFuture<'static, std::io::Result<reqwest::Body>> + Send + Sync;

/// Something to upload that can be opened again, because the first try may meet an expired token or a starting sandbox.
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

    /// A stream that `open` starts anew each time. With a length it is sent with `Content-Length`, otherwise chunked.
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
    /// For the whole answer; `None` for streams and commands, which last as long as they last.
    pub timeout: Option<Duration>,
}

impl Call {
    pub fn new(method: Method, url: String) -> Self {
        Self { method, url, headers: Vec::new(), payload: Payload::Empty, timeout: None }
    }
    pub fn json(mut self, body: &impl serde::Serialize) -> Self {
        // Our own request types hold strings, numbers and maps with string keys: they always serialise.
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

/// What a call shows at the door.
#[derive(Clone)]
pub(crate) enum Credential {
    ApiKey(Secret),
    Token(Arc<TokenKeeper>),
}

/// Sends calls and repeats those the server asked to repeat.
#[derive(Clone)]
pub(crate) struct Sender {
    pub http: reqwest::Client,
    /// Makes a connection of its own for each call. One that was kept can have died unnoticed while this machine slept, and whoever comes back from
    /// there must not wait for it.
    pub fresh: reqwest::Client,
    /// How long a sandbox may take to start before the caller hears of it.
    pub start_deadline: Duration,
}

impl Sender {
    /// As [`Sender::send`], over a connection of its own.
    pub async fn send_afresh(&self, call: &Call, credential: &Credential) -> Result<reqwest::Response, ClientError> {
        Self { http: self.fresh.clone(), ..self.clone() }.send(call, credential).await
    }

    /// Waits out `423` and `429` until the deadline, and refreshes an expired token once.
    pub async fn send(&self, call: &Call, credential: &Credential) -> Result<reqwest::Response, ClientError> {
        let deadline = Instant::now() + self.start_deadline;
        let mut has_refreshed = false;
        loop {
            let secret = match credential {
                Credential::ApiKey(key) => key.clone(),
                Credential::Token(keeper) => keeper.usable().await?,
            };
            let error = match self.send_once(call, &secret).await {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            if let Credential::Token(keeper) = credential
                && error.is(ErrorCode::TokenExpired)
                && !has_refreshed
            {
                has_refreshed = true;
                keeper.replace(&secret).await?;
                continue;
            }
            let is_told_to_wait = error.is(ErrorCode::SandboxStarting) || error.is(ErrorCode::RateLimited);
            let wait = Duration::from_secs(error.api().and_then(|f| f.retry_after).unwrap_or(1)).clamp(MIN_WAIT, MAX_WAIT);
            if !is_told_to_wait || Instant::now() + wait > deadline {
                return Err(error);
            }
            tokio::time::sleep(wait).await;
        }
    }

    /// One try. Anything but a success (or a protocol switch) is an error.
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

/// Reads a JSON answer of bounded size.
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
    // The parse error names field and position, never a value, so that a token can't get into it.
    serde_json::from_slice(&body).map_err(|e| not_cobox(format!("{} at line {} column {}", category(&e), e.line(), e.column())))
}

fn category(e: &serde_json::Error) -> &'static str {
    match e.classify() {
        serde_json::error::Category::Data => "JSON of an unexpected shape",
        _ => "not JSON",
    }
}
