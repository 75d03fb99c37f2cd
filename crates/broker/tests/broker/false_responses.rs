//! A fake boxd that follows HTTP but returns false content: to clients of commands and files, and to a sync.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{
        State, WebSocketUpgrade,
        ws::{Message as Frame, WebSocket},
    },
    response::{IntoResponse, Response},
    routing::{any, get, post},
};
use cobox_sync::{Digest, Entry, Message, RelPath};
use http::StatusCode;
use serde_json::json;

/// Number of different lies for each kind of client.
pub const LIES: usize = 3;

/// Counts earlier requests, so that each response is a different lie.
#[derive(Clone, Default)]
struct LyingServer {
    execs: Arc<AtomicUsize>,
    syncs: Arc<AtomicUsize>,
}

pub fn router() -> Router {
    Router::new()
        .route("/v1/exec", post(exec))
        .route("/v1/exec/ws", any(exec_stream))
        .route("/v1/fs/list", post(|| async { Json(json!({ "entries": "all of them" })) }))
        .route("/v1/files/{*path}", get(|| async { truncated_body() }))
        .route("/v1/sync/ws", any(sync))
        .with_state(LyingServer::default())
}

/// Ends prematurely.
fn truncated_body() -> Body {
    let pieces = [Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("the body is truncated"))];
    Body::from_stream(futures_util::stream::iter(pieces))
}

async fn exec(State(liar): State<LyingServer>) -> Response {
    match liar.execs.fetch_add(1, Ordering::SeqCst) % LIES {
        0 => Json(json!({ "stdout": 5, "exit_code": "fine" })).into_response(),
        1 => truncated_body().into_response(),
        _ => (StatusCode::IM_A_TEAPOT, "<script>").into_response(),
    }
}

/// Output with a gap, which would join unrelated parts.
async fn exec_stream(upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(async |mut socket| {
        if !matches!(socket.recv().await, Some(Ok(Frame::Text(_)))) {
            return;
        }
        let reported = [
            json!({ "type": "ready", "command_id": "another's", "pid": -1, "stdout_offset": 0, "stderr_offset": 0 }),
            json!({ "type": "stdout", "offset": 0, "data": "real" }),
            json!({ "type": "stdout", "offset": 1000, "data": "after a gap" }),
            json!({ "type": "exit", "exit_code": 0 }),
        ];
        for frame in reported {
            // The client may have disconnected.
            let _ = socket.send(Frame::text(frame.to_string())).await;
        }
        while let Some(Ok(_)) = socket.recv().await {}
    })
}

async fn sync(State(liar): State<LyingServer>, upgrade: WebSocketUpgrade) -> Response {
    let lie = liar.syncs.fetch_add(1, Ordering::SeqCst) % LIES;
    upgrade.on_upgrade(move |socket| answer_messages(socket, lie))
}

async fn answer_messages(mut socket: WebSocket, lie: usize) {
    let mut received = Vec::new();
    while let Some(Ok(frame)) = socket.recv().await {
        received.extend_from_slice(&frame.into_data());
        // An incomplete message is read again together with the rest.
        loop {
            let mut rest = received.as_slice();
            let Ok(message) = Message::read(&mut rest) else { break };
            received = rest.to_vec();
            let reply = answer(&message, lie);
            if !reply.is_empty() && socket.send(Frame::binary(reply)).await.is_err() {
                return;
            }
        }
    }
}

fn answer(message: &Message, lie: usize) -> Vec<u8> {
    let path = |text: &str| RelPath::new(text.as_bytes()).unwrap();
    let file = |content: &[u8]| Some(Entry::File { digest: Digest::of(content), size: content.len() as u64, exec: true });
    let scanned = Message::Scanned { has_rules: false, has_problems: false, is_partial: false };
    let all = |messages: &[Message]| messages.iter().flat_map(Message::encode).collect::<Vec<u8>>();
    match (lie, message) {
        (_, Message::Hello { .. }) => all(&[Message::Welcome { version: 1 }]),
        // A path that leads out of the folder.
        (0, Message::Scan { .. }) => {
            let mut reply = all(&[Message::Updates(vec![(path("up"), Some(Entry::Dir)), (path("up/evil"), file(b"evil"))]), scanned]);
            if let Some(at) = reply.windows(7).position(|w| w == b"up/evil") {
                reply[at..at + 2].copy_from_slice(b"..");
            }
            reply
        }
        // Content that differs from its announcement, for an existing file.
        (1, Message::Scan { .. }) => all(&[Message::Updates(vec![(path("mine"), file(b"good"))]), scanned]),
        (1, Message::WantsEnd) => {
            let (whole, done) = (1, 3);
            let stream = [&0u32.to_be_bytes()[..], &[whole], &4u32.to_be_bytes(), b"evil", &[done]].concat();
            all(&[Message::Content { raw: stream.len() as u32, is_packed: false, bytes: stream }, Message::ContentEnd])
        }
        // Not a message at all.
        (2, Message::Scan { .. }) => vec![0xff; 4096],
        _ => Vec::new(),
    }
}
