//! A JSON response with long texts, encoded as the client reads it. Encoded at once it could be six times as large as
//! the captured output, for as long as the client leaves it unread.

use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};

use axum::{body::Body, response::Response};
use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::{Buf, Bytes};
use futures_util::stream;
use http::{HeaderValue, header};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{body::STALL_TIMEOUT, exec::MemoryReservation, http_listener::Connection};

/// Bytes of a text encoded at once: a multiple of three for base64, and six times this is still small.
const PIECE_BYTES: usize = 48 * 1024;

/// A text field of the response.
pub enum TextField {
    /// As text, with replacement characters for invalid UTF-8.
    Shown(Bytes),
    Base64(Bytes),
}

/// Builds an object of the fields of `value`, in which these texts replace fields of the same names. `memory` is held
/// until everything is sent. If the client doesn't read for too long, the connection is closed.
pub fn respond(
    value: &impl Serialize,
    texts: Vec<(&'static str, TextField)>,
    memory: MemoryReservation,
    connection: &Connection,
) -> Result<Response, serde_json::Error> {
    let guard = guard(memory, connection.end.clone(), STALL_TIMEOUT);
    let pieces = JsonPieces(parts(value, texts)?);
    let body = stream::unfold((pieces, guard), async |(mut pieces, guard)| {
        let piece = pieces.next()?;
        let sent = Bytes::from_owner(SentPiece { piece, guard: guard.clone() });
        Some((Ok::<_, Infallible>(sent), (pieces, guard)))
    });
    let mut response = Response::new(Body::from_stream(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

enum Part {
    Plain(String),
    Text(TextField),
}

fn parts(value: &impl Serialize, texts: Vec<(&'static str, TextField)>) -> Result<VecDeque<Part>, serde_json::Error> {
    let mut fields = serde_json::to_value(value)?;
    if let Value::Object(fields) = &mut fields {
        fields.retain(|name, _| texts.iter().all(|(other, _)| other != name));
    }
    let mut before = serde_json::to_string(&fields)?;
    // The closing brace follows after the texts.
    before.pop();
    let mut parts = VecDeque::new();
    for (name, text) in texts {
        let comma = if before.ends_with('{') { "" } else { "," };
        parts.push_back(Part::Plain(format!("{before}{comma}\"{name}\":\"")));
        parts.push_back(Part::Text(text));
        before = "\"".to_owned();
    }
    parts.push_back(Part::Plain(before + "}"));
    Ok(parts)
}

struct JsonPieces(VecDeque<Part>);

impl JsonPieces {
    fn next(&mut self) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        while out.len() < PIECE_BYTES {
            match self.0.front_mut() {
                None => break,
                Some(Part::Plain(text)) => out.extend_from_slice(text.as_bytes()),
                Some(Part::Text(TextField::Shown(bytes))) if !bytes.is_empty() => {
                    encode_text(bytes, &mut out);
                    continue;
                }
                Some(Part::Text(TextField::Base64(bytes))) if !bytes.is_empty() => {
                    let taken = bytes.split_to(bytes.len().min(PIECE_BYTES));
                    out.extend_from_slice(STANDARD.encode(taken).as_bytes());
                    continue;
                }
                Some(Part::Text(_)) => {}
            }
            self.0.pop_front();
        }
        (!out.is_empty()).then_some(out)
    }
}

/// Consumes a part of the text that ends at a character boundary.
fn encode_text(bytes: &mut Bytes, out: &mut Vec<u8>) {
    let is_whole_text = bytes.len() <= PIECE_BYTES;
    let window = &bytes[..bytes.len().min(PIECE_BYTES)];
    let mut taken = 0;
    for chunk in window.utf8_chunks() {
        // Serializing a string doesn't fail. The quotes around it are removed.
        let quoted = serde_json::to_vec(chunk.valid()).unwrap_or_default();
        out.extend_from_slice(quoted.get(1..quoted.len().saturating_sub(1)).unwrap_or_default());
        taken += chunk.valid().len();
        let has_more_after = taken + chunk.invalid().len() < window.len() || is_whole_text;
        if !chunk.invalid().is_empty() {
            // Invalid bytes at the end of a piece may be the start of a character, so the next piece starts with them.
            if !has_more_after && taken > 0 {
                break;
            }
            out.extend_from_slice("\u{fffd}".as_bytes());
            taken += chunk.invalid().len();
        }
    }
    bytes.advance(taken);
}

/// Held by a response and by each of its pieces until they are sent.
struct SendGuard {
    _memory: MemoryReservation,
    progress: watch::Sender<()>,
}

/// A piece; dropped when it was sent.
struct SentPiece {
    piece: Vec<u8>,
    guard: Arc<SendGuard>,
}

impl AsRef<[u8]> for SentPiece {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl Drop for SentPiece {
    fn drop(&mut self) {
        self.guard.progress.send_replace(());
    }
}

fn guard(memory: MemoryReservation, connection: CancellationToken, stall: Duration) -> Arc<SendGuard> {
    let (progress, mut progress_seen) = watch::channel(());
    tokio::spawn(async move {
        loop {
            match tokio::time::timeout(stall, progress_seen.changed()).await {
                Ok(Ok(())) => {}
                // Everything was sent, or the client has disconnected.
                Ok(Err(_)) => return,
                Err(_) => return connection.cancel(),
            }
        }
    });
    Arc::new(SendGuard { _memory: memory, progress })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::exec::MemoryBudget;

    fn encoded(texts: Vec<(&'static str, TextField)>) -> Value {
        let mut pieces = JsonPieces(parts(&json!({ "code": 1, "a": "not this" }), texts).unwrap());
        let mut all = Vec::new();
        while let Some(piece) = pieces.next() {
            assert!(piece.len() <= 7 * PIECE_BYTES, "{}", piece.len());
            all.extend_from_slice(&piece);
        }
        serde_json::from_slice(&all).unwrap()
    }

    #[test]
    fn texts_are_encoded_as_if_in_one_piece() {
        let long = "ab€\u{1F980}\u{1}\"\n".repeat(PIECE_BYTES / 4).into_bytes();
        let mut with_invalid_bytes = long.clone();
        for at in (0..with_invalid_bytes.len()).step_by(1009) {
            with_invalid_bytes[at] = 0xff;
        }
        let cases = [
            vec![],
            b"x".to_vec(),
            long[..PIECE_BYTES].to_vec(),
            long.clone(),
            with_invalid_bytes,
            vec![0xe2; 3 * PIECE_BYTES],
            long[..100_001].to_vec(),
        ];
        for bytes in cases {
            let bytes = Bytes::from(bytes);
            let response = encoded(vec![("a", TextField::Shown(bytes.clone())), ("b", TextField::Base64(bytes.clone()))]);
            assert_eq!(response["code"], 1);
            assert!(response["a"].as_str().unwrap() == String::from_utf8_lossy(&bytes), "{} bytes", bytes.len());
            assert!(STANDARD.decode(response["b"].as_str().unwrap()).unwrap() == bytes);
        }
    }

    #[tokio::test]
    async fn an_unread_response_ends_its_connection_and_a_sent_one_frees_its_memory() {
        let budget = MemoryBudget::default();
        let reserve_most = || budget.reserve(200 << 20);
        let stalled_connection = CancellationToken::new();
        let send_guard = guard(reserve_most().unwrap(), stalled_connection.clone(), Duration::from_millis(1));
        let piece = SentPiece { piece: Vec::new(), guard: send_guard };
        stalled_connection.cancelled().await;
        assert!(reserve_most().is_err());
        drop(piece);
        let connection = CancellationToken::new();
        drop(guard(reserve_most().unwrap(), connection.clone(), Duration::from_secs(600)));
        assert!(!connection.is_cancelled() && reserve_most().is_ok());
    }
}
