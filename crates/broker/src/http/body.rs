//! Request bodies: JSON of limited size that must arrive in time, with errors that name the field.

use std::{error::Error, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes, to_bytes},
    extract::{FromRequest, Request},
};
use cobox_gateway::TooSlow;
use cobox_protocol::{
    ApiError, ErrorCode,
    json::{must_be_empty, read_object},
};
use http::Extensions;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;

use super::error::Failure;

/// Maximum size of a control-plane request, in bytes; the longest sensible one has a few KiB.
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// Maximum time for a control-plane request to arrive: the largest one fits at 35 KiB a second.
const BODY_WITHIN: Duration = Duration::from_secs(30);

/// A JSON body, regardless of its content type.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        Ok(Self(read_object(&read(request.into_body()).await?)?))
    }
}

/// Like [`JsonBody`], but treats an empty body as `{}`.
pub struct MaybeJsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for MaybeJsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let bytes = read(request.into_body()).await?;
        Ok(Self(read_object(if bytes.is_empty() { b"{}" } else { &bytes })?))
    }
}

/// Body of a route that takes none: empty, or `{}`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoFields {}

/// The body of a request whose route takes none. It stays unread until the sender is authenticated.
#[derive(Clone)]
pub struct UnexpectedBody(Arc<Mutex<Option<Body>>>);

impl UnexpectedBody {
    pub fn new(body: Body) -> Self {
        Self(Arc::new(Mutex::new(Some(body))))
    }

    /// Called once the sender of a request is authenticated.
    pub async fn must_be_empty(extensions: &Extensions) -> Result<(), Failure> {
        let Some(Self(body)) = extensions.get::<Self>() else { return Ok(()) };
        let body = body.lock().take();
        match body {
            Some(body) => Ok(must_be_empty(&read(body).await?)?),
            None => Ok(()),
        }
    }
}

pub async fn read(body: Body) -> Result<Bytes, Failure> {
    read_at_most(body, MAX_BODY_BYTES).await
}

pub async fn read_at_most(body: Body, limit: usize) -> Result<Bytes, Failure> {
    let collecting = tokio::time::timeout(BODY_WITHIN, to_bytes(body, limit));
    let Ok(collected) = collecting.await else {
        let message = format!("the body took longer than {} s; send it at once", BODY_WITHIN.as_secs());
        return Err(ApiError::invalid(message).into());
    };
    collected.map_err(|e| {
        let causes = || std::iter::successors(Some(&e as &dyn Error), |e| (*e).source());
        Failure::from(match TooSlow::among_causes(&e) {
            Some(too_slow) => ApiError::invalid(too_slow.to_string()),
            None if causes().any(|cause| cause.is::<http_body_util::LengthLimitError>()) => {
                ApiError::new(ErrorCode::TooLarge, format!("the body is larger than {limit} bytes"))
            }
            None => ApiError::invalid("the body ended early"),
        })
    })
}
