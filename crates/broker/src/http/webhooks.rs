//! `POST /webhooks/threads`: whoever keeps the threads tells that one is gone, with a signature in place of a key.

use axum::{
    Json,
    body::Bytes,
    extract::{Request, State},
    routing::post,
};
use cobox_protocol::{ApiError, ErrorCode, RequestId, json::read_object, thread::ThreadNoticeResponse};
use http::HeaderMap;

use super::{Api, Routes, body, error::Failure};

const TIMESTAMP: &str = "x-cobox-timestamp";
const SIGNATURE: &str = "x-cobox-signature";

/// A notice is below 1 KiB; what a sender that is not known yet can make the broker hold stays small.
const MAX_NOTICE_BYTES: usize = 64 * 1024;

pub fn routes() -> Routes {
    Routes::new().route("/webhooks/threads", post(thread))
}

async fn thread(State(api): State<Api>, request: Request) -> Result<Json<ThreadNoticeResponse>, Failure> {
    let Some(webhook) = &api.webhook else {
        return Err(ApiError::new(ErrorCode::RouteNotFound, "no webhook is set up here; see webhook_secret_file").into());
    };
    let request_id = request.extensions().get::<RequestId>().cloned().unwrap_or_else(RequestId::new);
    let (timestamp, signature) = (header(request.headers(), TIMESTAMP)?.to_owned(), header(request.headers(), SIGNATURE)?.to_owned());
    // The signature is over the body, so this one body is read before its sender is known.
    let bytes: Bytes = body::read_at_most(request.into_body(), MAX_NOTICE_BYTES).await?;
    let sent_at = webhook.verify(&timestamp, &signature, &bytes, api.deployment.now())?;
    let ended = api.sessions.thread_is_gone(&read_object(&bytes)?, sent_at, &request_id).await?;
    Ok(Json(ThreadNoticeResponse { ended }))
}

/// A header that is sent twice is refused: a proxy that checks one of the two values and the broker might not choose the same one.
fn header<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<&'a str, ApiError> {
    let refused = |why: &str| ApiError::new(ErrorCode::Unauthenticated, format!("{name}: {why}"));
    let mut values = headers.get_all(name).iter();
    match (values.next().and_then(|v| v.to_str().ok()), values.next()) {
        (Some(value), None) => Ok(value),
        (_, Some(_)) => Err(refused("must be sent once")),
        (None, None) => Err(refused("is missing or can't be read")),
    }
}
