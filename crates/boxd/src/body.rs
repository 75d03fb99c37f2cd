//! Request bodies: bounded in size, and aborted when the client stalls.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use cobox_protocol::{ApiError, ErrorCode, json::must_be_empty};
use futures_util::{Stream, StreamExt, stream};
use http::Extensions;
use parking_lot::Mutex;

/// Maximum pause of a client within a body, or in reading an archive: covers a Wi-Fi reconnect, but not an abandoned
/// client.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum read from a body that is not expected, to describe it in the error.
const MAX_UNWANTED_BYTES: usize = 64 * 1024;

/// The body as a stream. Ends with an error if the client sent less than it announced, or nothing for too long.
pub fn chunks(body: Body) -> impl Stream<Item = Result<Bytes, ApiError>> + Send + Unpin + 'static {
    let next = |mut data: axum::body::BodyDataStream| async move {
        let item = match tokio::time::timeout(STALL_TIMEOUT, data.next()).await {
            Ok(Some(Ok(bytes))) => Ok(bytes),
            Ok(Some(Err(error))) => Err(ApiError::invalid(format!("the request body ended early: {error}"))),
            Ok(None) => return None,
            Err(_) => Err(ApiError::invalid(format!("no request body data received for {} s", STALL_TIMEOUT.as_secs()))),
        };
        Some((item, data))
    };
    stream::unfold(body.into_data_stream(), next).boxed()
}

/// Reads the whole body, at most `limit` bytes.
pub async fn collect(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let mut chunks = chunks(body);
    let mut whole = BytesMut::new();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        if whole.len() + chunk.len() > limit {
            return Err(too_large("the request body", limit as u64));
        }
        whole.extend_from_slice(&chunk);
    }
    Ok(whole.freeze())
}

/// The body of a request whose route takes none. It stays unread until the sender is authenticated.
#[derive(Clone)]
pub struct UnexpectedBody(Arc<Mutex<Option<Body>>>);

impl UnexpectedBody {
    pub fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(Some(body))))
    }

    /// Checks that the body is empty; called once the sender of the request is authenticated.
    pub async fn must_be_empty(extensions: &Extensions) -> Result<(), ApiError> {
        let Some(Self(body)) = extensions.get::<Self>() else { return Ok(()) };
        let body = body.lock().take();
        match body {
            Some(body) => must_be_empty(&collect(body, MAX_UNWANTED_BYTES).await?),
            None => Ok(()),
        }
    }
}

pub fn too_large(what: &str, limit: u64) -> ApiError {
    ApiError::new(ErrorCode::TooLarge, format!("{what} is larger than {limit} bytes"))
        .with_details(serde_json::json!({ "limit_bytes": limit }))
}
