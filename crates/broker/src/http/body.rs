//! Request bodies: JSON of a bounded size, and an error that names the field.

use axum::{
    body::{Body, Bytes, to_bytes},
    extract::{FromRequest, Request},
};
use cobox_protocol::{ApiError, ErrorCode, json::read_object};
use serde::de::DeserializeOwned;

use super::error::Failure;

/// Largest control-plane request, in bytes: the longest sensible one is a few KiB.
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// A JSON body, whatever its content type says.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        Ok(Self(read_object(&read(request.into_body()).await?)?))
    }
}

/// As [`JsonBody`], but nothing at all counts as `{}`.
pub struct MaybeJsonBody<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for MaybeJsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &S) -> Result<Self, Failure> {
        let bytes = read(request.into_body()).await?;
        Ok(Self(read_object(if bytes.is_empty() { b"{}" } else { &bytes })?))
    }
}

/// What a route without a body takes: nothing, or `{}`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoFields {}

pub async fn read(body: Body) -> Result<Bytes, Failure> {
    to_bytes(body, MAX_BODY_BYTES).await.map_err(|e| {
        use std::error::Error;
        let is_too_large = e.source().is_some_and(|s| s.is::<http_body_util::LengthLimitError>());
        Failure::from(if is_too_large {
            ApiError::new(ErrorCode::TooLarge, format!("the body is larger than {MAX_BODY_BYTES} bytes"))
        } else {
            ApiError::invalid("the body could not be read to its end")
        })
    })
}
