//! `POST /webhooks/threads`: whoever keeps the threads tells that one is gone, with a signature in place of a key.

use axum::{
    Json,
    body::Bytes,
    extract::{Request, State},
    routing::post,
};
use cobox_protocol::{ApiError, ErrorCode, RequestId, json::read_object, thread::NoticeTaken};
use http::HeaderMap;

use super::{Api, Routes, body, error::Failure};

const TIMESTAMP: &str = "x-cobox-timestamp";
const SIGNATURE: &str = "x-cobox-signature";

/// A notice is below 1 KiB; what a sender that is not known yet can make the broker hold stays small.
const MAX_NOTICE_BYTES: usize = 64 * 1024;

pub fn routes() -> Routes {
    Routes::new().route("/webhooks/threads", post(thread))
}

async fn thread(State(api): State<Api>, request: Request) -> Result<Json<NoticeTaken>, Failure> {
    let Some(webhook) = &api.webhook else {
        return Err(ApiError::new(ErrorCode::RouteNotFound, "no webhook is set up here; see webhook_secret_file").into());
    };
    let request_id = request.extensions().get::<RequestId>().cloned().unwrap_or_else(RequestId::new);
    let (timestamp, signature) = (header(request.headers(), TIMESTAMP)?.to_owned(), header(request.headers(), SIGNATURE)?.to_owned());
    // The signature is over the body, so this one body is read before its sender is known.
    let bytes: Bytes = body::read_at_most(request.into_body(), MAX_NOTICE_BYTES).await?;
    let sent_at = webhook.verify(&timestamp, &signature, &bytes, api.deployment.now())?;
    let ended = api.sessions.thread_is_gone(&read_object(&bytes)?, sent_at, &request_id).await?;
    Ok(Json(NoticeTaken { ended }))
}

fn header<'a>(headers: &'a HeaderMap, name: &'static str) -> Result<&'a str, ApiError> {
    let missing = || ApiError::new(ErrorCode::Unauthenticated, format!("{name}: is missing or can't be read"));
    headers.get(name).and_then(|v| v.to_str().ok()).ok_or_else(missing)
}
