//! `POST /webhooks/threads`: receives a signed notice that a thread was deleted. The signature replaces an API key.

use axum::{
    Json,
    body::Bytes,
    extract::{Request, State},
};
use cobox_protocol::{ApiError, ErrorCode, RequestId, json::read_object, thread::ThreadNoticeResponse};
use http::HeaderMap;

use super::{Api, body, error::Failure};

const TIMESTAMP: &str = "x-cobox-timestamp";
const SIGNATURE: &str = "x-cobox-signature";

/// A notice is smaller than 1 KiB. The limit bounds the memory that an unauthenticated sender can occupy.
const MAX_NOTICE_BYTES: usize = 64 * 1024;

pub async fn thread(State(api): State<Api>, request: Request) -> Result<Json<ThreadNoticeResponse>, Failure> {
    let Some(webhook) = &api.webhook else {
        return Err(ApiError::new(ErrorCode::RouteNotFound, "no webhook is configured; set webhook_secret_file").into());
    };
    let request_id = request.extensions().get::<RequestId>().cloned().unwrap_or_else(RequestId::new);
    let (timestamp, signature) = (header(request.headers(), TIMESTAMP)?.to_owned(), header(request.headers(), SIGNATURE)?.to_owned());
    // The signature covers the body, so this body is read before its sender is authenticated.
    let bytes: Bytes = body::read_at_most(request.into_body(), MAX_NOTICE_BYTES).await?;
    let sent_at = webhook.verify(&timestamp, &signature, &bytes, api.context.now())?;
    let ended = api.services.threads.end_by_notice(&read_object(&bytes)?, sent_at, &request_id).await?;
    Ok(Json(ThreadNoticeResponse { ended }))
}

/// A repeated header is refused: a proxy that checks one of the two values and the broker might choose different ones.
fn header<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<&'a str, ApiError> {
    let refused = |why: &str| ApiError::new(ErrorCode::Unauthenticated, format!("{name}: {why}"));
    let mut values = headers.get_all(name).iter();
    match (values.next().and_then(|v| v.to_str().ok()), values.next()) {
        (Some(value), None) => Ok(value),
        (_, Some(_)) => Err(refused("must be sent once")),
        (None, None) => Err(refused("is missing or can't be read")),
    }
}
