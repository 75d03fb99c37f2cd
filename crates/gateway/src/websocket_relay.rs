//! Relays a client's WebSocket to boxd and handles its `auth` frames. Their credentials are checked like those of a header: each use is
//! recorded, an API key is exchanged for a token, and a credential that isn't valid for this sandbox is not forwarded.
//!
//! The relay recognizes the same `auth` frames as boxd, in any JSON spelling and any number of fragments. boxd doesn't accept a text
//! that is too long for the relay as an `auth` frame either.

use std::{
    io,
    sync::{Arc, OnceLock},
    time::Duration,
};

use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId, Secret,
    frame::{ClientFrame, MAX_AUTH_FRAME_BYTES, ServerFrame, close},
    json::describe_parse_error,
};
use serde::{Deserialize, de::IgnoredAny};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter},
    time::Instant,
};

use crate::{
    Admission, Caller, Credential, Target,
    request_limiter::RequestPermit,
    service::{Gateway, closed_for_newer},
    websocket_frame,
};

/// Time for the first frame of a connection without a credential in its headers. boxd uses the same limit.
const AUTH_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a client to receive the last frames and answer the close frame.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long one direction may continue after the other has ended: enough for the closing handshake.
const LINGER: Duration = Duration::from_secs(5);
/// Fresh tokens that a connection may send at once, and the interval after which it may send another. Clients send one every few
/// minutes, and each costs one or two records.
const FRESH_TOKEN_BURST: u32 = 16;
const FRESH_TOKEN_INTERVAL: Duration = Duration::from_secs(10);
/// Method in the usage record of a token that was sent on an open connection.
const AUTH_METHOD: &str = "AUTH";

/// A WebSocket with the state of its admission.
pub(crate) struct WebSocketRelay {
    pub gateway: Gateway,
    pub target: Target,
    pub sandbox: SandboxId,
    pub path: String,
    pub request_id: RequestId,
    /// From the headers or the first `auth` frame; `None` until one of them was accepted.
    pub caller: Option<Caller>,
    pub permit: RequestPermit,
}

/// Why the gateway closes a connection.
enum CloseCause {
    Error(u16, ApiError),
    /// The client or boxd disconnected.
    Gone,
}

impl From<ApiError> for CloseCause {
    fn from(error: ApiError) -> Self {
        CloseCause::Error(close::code_for(error.code), error)
    }
}

impl From<io::Error> for CloseCause {
    fn from(_: io::Error) -> Self {
        CloseCause::Gone
    }
}

impl WebSocketRelay {
    /// Copies in both directions until both have ended, or until [`LINGER`] after the first one has.
    pub async fn run(mut self, client: impl AsyncRead + AsyncWrite, boxd: impl AsyncRead + AsyncWrite) {
        let (client_reads, mut client_writes) = tokio::io::split(client);
        let (boxd_reads, boxd_writes) = tokio::io::split(boxd);
        let mut client_reads = BufReader::new(client_reads);
        let mut boxd_writes = BufWriter::new(boxd_writes);
        if self.caller.is_none() {
            let must_close = self.permit.must_close();
            let outcome = tokio::time::timeout(AUTH_TIMEOUT, self.authenticate(&mut client_reads, &mut boxd_writes));
            let cause = tokio::select! {
                // In this order: a client that has just authenticated is not closed.
                biased;
                outcome = outcome => match outcome {
                    Ok(Ok(())) => None,
                    Ok(Err(cause)) => Some(cause),
                    Err(_) => {
                        let message = format!("no `auth` frame within {} seconds", AUTH_TIMEOUT.as_secs());
                        Some(CloseCause::Error(close::AUTH_TIMEOUT, ApiError::new(ErrorCode::Unauthenticated, message)))
                    }
                },
                () = must_close => Some(closed_for_newer().into()),
            };
            match cause {
                None => {}
                Some(CloseCause::Gone) => return,
                Some(CloseCause::Error(code, error)) => {
                    // The sandbox accepts only a limited number of connections that have not authenticated.
                    drop((boxd_reads, boxd_writes));
                    let closing = send_close(&mut client_writes, &mut client_reads, code, &error, &self.request_id);
                    // Ignored: a client that no longer reads can't receive the reason.
                    let _ = tokio::time::timeout(CLOSE_TIMEOUT, closing).await;
                    return;
                }
            }
        }
        let final_message = OnceLock::new();
        let mut up = std::pin::pin!(async {
            // A reset is handled like an orderly end: the other side's connection is closed.
            if let Err(CloseCause::Error(code, error)) = self.pass_frames(&mut client_reads, &mut boxd_writes).await {
                // Sent when boxd's direction has ended: earlier, it could be inserted into one of boxd's frames.
                final_message.get_or_init(|| close_message(code, &error, &self.request_id));
                let _ = boxd_writes.write_all(&websocket_frame::close_for_server(code, error.code.as_str())).await;
            }
            finish(client_reads, boxd_writes).await;
        });
        let mut down = std::pin::pin!(copy_to_client(boxd_reads, client_writes, &final_message));
        // A direction that hasn't ended after the linger time is dropped with its connection.
        tokio::select! {
            () = &mut up => drop(tokio::time::timeout(LINGER, down).await),
            () = &mut down => drop(tokio::time::timeout(LINGER, up).await),
        }
    }

    /// Authenticates a client by its first frame. Until then nothing from boxd is forwarded.
    async fn authenticate(
        &mut self,
        from: &mut (impl AsyncBufReadExt + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), CloseCause> {
        let first = || {
            CloseCause::from(ApiError::new(
                ErrorCode::Unauthenticated,
                "the first frame must be `auth` with a token, or send the token as a header",
            ))
        };
        loop {
            let header = websocket_frame::read_header(from).await?.ok_or(CloseCause::Gone)?;
            if header.is_control() {
                // A client may send a ping or close.
                let is_close = header.is_close();
                let rest = header.read_payload(from).await?;
                if is_close {
                    return Err(CloseCause::Gone);
                }
                to.write_all(&header.with_payload(&rest)).await?;
                continue;
            }
            if !header.is_whole_text() || header.payload_bytes() > MAX_AUTH_FRAME_BYTES as u64 {
                return Err(first());
            }
            let payload = header.read_payload(from).await?;
            let token = parse_auth_frame(&header.unmasked(&payload)).ok_or_else(first)??;
            let admission = self.admit(&token).await?;
            let session = admission.caller.as_ref().and_then(|c| c.session.as_ref());
            // Replaces the permit for unauthenticated clients.
            self.permit = self.gateway.limiter.acquire(&self.sandbox, session, true)?;
            self.gateway.directory.touch(&admission);
            to.write_all(&auth_frame(admission.token.as_ref())).await?;
            to.flush().await?;
            self.caller = admission.caller.clone();
            self.record_usage(admission, "GET").await;
            return Ok(());
        }
    }

    /// Forwards the client's frames and replaces the tokens in its `auth` frames.
    async fn pass_frames(
        &mut self,
        from: &mut BufReader<impl AsyncRead + Unpin>,
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), CloseCause> {
        // The text of an incomplete message, buffered until it is known whether it is an `auth` frame. Bounded by the message's
        // length, not by its number of fragments.
        let mut partial_text: Option<Vec<u8>> = None;
        let mut rate_limiter = TokenRateLimiter { free_at: Instant::now() };
        while let Some(header) = websocket_frame::read_header(from).await? {
            let is_text = match &partial_text {
                None => header.is_text(),
                Some(_) if header.is_control() => false,
                Some(_) if header.is_continuation() => true,
                Some(_) => return Err(CloseCause::Gone),
            };
            let before = partial_text.take_if(|_| is_text);
            let length = header.payload_bytes().saturating_add(before.as_ref().map_or(0, Vec::len) as u64);
            if is_text && length <= MAX_AUTH_FRAME_BYTES as u64 {
                let payload = header.read_payload(from).await?;
                let is_whole = before.is_none();
                let mut text = before.unwrap_or_default();
                text.append(&mut header.unmasked(&payload));
                if header.is_final() {
                    let fresh = match find_token(&text) {
                        Some(_) if !rate_limiter.allow(Instant::now()) => return Err(too_many_tokens()),
                        Some(token) => self.replace_token(&token?).await,
                        None => None,
                    };
                    let frame = fresh
                        .unwrap_or_else(|| if is_whole { header.with_payload(&payload) } else { websocket_frame::text_for_server(&text) });
                    to.write_all(&frame).await?;
                } else {
                    partial_text = Some(text);
                }
            } else {
                if let Some(before) = before {
                    to.write_all(&websocket_frame::text_start_for_server(&before)).await?;
                }
                to.write_all(header.bytes()).await?;
                let copied = tokio::io::copy_buf(&mut AsyncReadExt::take(&mut *from, header.payload_bytes()), to).await?;
                if copied < header.payload_bytes() {
                    return Ok(());
                }
            }
            // Frames that have already arrived are sent in one write.
            if from.buffer().is_empty() {
                to.flush().await?;
            }
        }
        Ok(())
    }

    /// Checks a fresh token on an open connection. Returns the frame to send to boxd instead of the client's, or `None` to forward the
    /// client's.
    async fn replace_token(&mut self, token: &Secret) -> Option<Vec<u8>> {
        match self.admit(token).await {
            Ok(admission) => {
                let frame = auth_frame(admission.token.as_ref());
                let is_same = match (&self.caller, &admission.caller) {
                    (Some(known), Some(fresh)) => known.principal == fresh.principal && known.session == fresh.session,
                    _ => false,
                };
                // boxd refuses the token of another principal or session, and sends the error.
                if is_same {
                    self.gateway.directory.touch(&admission);
                    self.record_usage(admission, AUTH_METHOD).await;
                }
                Some(frame)
            }
            // An expired or revoked token of this sandbox: boxd sends the specific error.
            Err(e) if matches!(e.code, ErrorCode::TokenExpired | ErrorCode::TokenRevoked) => None,
            // Any other credential might be valid elsewhere and must not reach the sandbox. boxd gets an empty token and sends the
            // error to the client.
            Err(_) => Some(auth_frame(None)),
        }
    }

    async fn admit(&self, token: &Secret) -> Result<Admission, ApiError> {
        let credential = Credential::parse(token.expose())?;
        let admission = self.gateway.directory.admit(self.target.clone(), Some(credential), &self.request_id).await?;
        if admission.sandbox == self.sandbox {
            return Ok(admission);
        }
        Err(ApiError::new(ErrorCode::ProviderUnavailable, "the session has been moved to another sandbox; reconnect"))
    }

    async fn record_usage(&self, admission: Admission, method: &str) {
        self.gateway.record_usage(Arc::new(admission), &self.request_id, method, &self.path, 101).await;
    }
}

/// Token bucket for fresh tokens, stored as the time at which it is full again.
struct TokenRateLimiter {
    free_at: Instant,
}

impl TokenRateLimiter {
    fn allow(&mut self, now: Instant) -> bool {
        let free_at = self.free_at.max(now) + FRESH_TOKEN_INTERVAL;
        let is_free = free_at <= now + FRESH_TOKEN_INTERVAL * FRESH_TOKEN_BURST;
        if is_free {
            self.free_at = free_at;
        }
        is_free
    }
}

fn find_token(text: &[u8]) -> Option<Result<Secret, ApiError>> {
    const AUTH_STRING: &[u8] = b"\"auth\"";
    // The only other way to write a letter in JSON.
    const UNICODE_ESCAPE: &[u8] = b"\\u";
    let has = |part: &[u8]| text.windows(part.len()).any(|w| w == part);
    // Most frames are keystrokes. Only those that may contain the string are parsed.
    if has(AUTH_STRING) || has(UNICODE_ESCAPE) { parse_auth_frame(text) } else { None }
}

/// Parses an `auth` frame with boxd's own type, so that both find a token in the same texts. A frame with an unknown field is refused:
/// an older boxd would ignore the field, and the frame that the gateway writes would omit it.
fn parse_auth_frame(text: &[u8]) -> Option<Result<Secret, ApiError>> {
    #[derive(Deserialize)]
    #[serde(tag = "type", rename_all = "snake_case")]
    enum AnyAuth {
        Auth {
            #[serde(rename = "token")]
            _token: IgnoredAny,
        },
    }
    match serde_json::from_slice(text) {
        Ok(ClientFrame::<IgnoredAny>::Auth { token }) => Some(Ok(token)),
        Ok(_) => None,
        Err(error) => serde_json::from_slice::<AnyAuth>(text).ok().map(|_| {
            let reason = describe_parse_error("`auth`", &error.to_string());
            Err(ApiError::invalid(format!("a frame can't be read: {reason}")))
        }),
    }
}

fn auth_frame(token: Option<&Secret>) -> Vec<u8> {
    // Serializing a string can't fail.
    let token = serde_json::to_string(token.map_or("", Secret::expose)).unwrap_or_default();
    websocket_frame::text_for_server(format!("{{\"type\":\"auth\",\"token\":{token}}}").as_bytes())
}

/// Sends the error and a close frame, and waits until the client has received them.
async fn send_close(
    to: &mut (impl AsyncWrite + Unpin),
    from: &mut (impl AsyncRead + Unpin),
    code: u16,
    error: &ApiError,
    request_id: &RequestId,
) -> io::Result<()> {
    to.write_all(&close_message(code, error, request_id)).await?;
    finish(from, to).await;
    Ok(())
}

/// An error frame followed by a close frame.
fn close_message(code: u16, error: &ApiError, request_id: &RequestId) -> Vec<u8> {
    let error_frame = ServerFrame::<()>::Error { error: error.envelope(request_id).error };
    // Serializing strings, numbers and maps with string keys can't fail.
    let error_frame = serde_json::to_string(&error_frame).unwrap_or_default();
    [websocket_frame::text_for_client(&error_frame), websocket_frame::close_for_client(code, error.code.as_str())].concat()
}

fn too_many_tokens() -> CloseCause {
    let message = format!("more than {FRESH_TOKEN_BURST} `auth` frames at once; send a fresh token shortly before the last one expires");
    ApiError::new(ErrorCode::RateLimited, message).into()
}

async fn copy_to_client(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, final_message: &OnceLock<Vec<u8>>) {
    // A reset is handled like an orderly end.
    let _ = tokio::io::copy(&mut from, &mut to).await;
    if let Some(message) = final_message.get() {
        let _ = to.write_all(message).await;
    }
    finish(from, to).await;
}

/// Ends one direction. Remaining input is read and discarded: closing a socket with unread bytes resets the connection and loses the
/// last frames sent.
async fn finish(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let _ = to.shutdown().await;
    let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_found_in_every_spelling_of_an_auth_frame_that_boxd_accepts() {
        for text in [
            r#"{"type":"auth","token":"t"}"#,
            r#"{"token":"t","type":"auth"}"#,
            r#"{"type":"\u0061uth","token":"t"}"#,
            r#"{"\u0074ype":"aut\u0068","token":"\u0074"}"#,
            r#" ["auth","t"]"#,
        ] {
            assert!(matches!(serde_json::from_str(text), Ok(ClientFrame::<IgnoredAny>::Auth { .. })), "{text}");
            assert_eq!(find_token(text.as_bytes()).unwrap().unwrap(), Secret::new("t"), "{text}");
        }
        for text in [r#"{"type":"stdin","data":"\u001b \"auth\""}"#, r#"{"type":"auth"}"#, r#"{"type":"auths","token":"t"}"#, "auth", "\\u"]
        {
            assert!(find_token(text.as_bytes()).is_none(), "{text}");
        }
    }

    #[test]
    fn an_auth_frame_with_an_unknown_field_is_refused_by_name() {
        let refused = find_token(br#"{"token":"t","only":["fs_read"],"type":"auth"}"#).unwrap().unwrap_err();
        assert!(refused.message.contains("only: is not a field of this request"), "{}", refused.message);
    }

    #[test]
    fn fresh_tokens_are_limited_to_a_burst_and_then_one_per_interval() {
        let now = Instant::now();
        let mut rate_limiter = TokenRateLimiter { free_at: now };
        assert_eq!((0..100).filter(|_| rate_limiter.allow(now)).count(), FRESH_TOKEN_BURST as usize);
        let later = now + FRESH_TOKEN_INTERVAL;
        assert_eq!((rate_limiter.allow(later), rate_limiter.allow(later)), (true, false));
        let much_later = now + FRESH_TOKEN_INTERVAL * 1000;
        assert_eq!((0..100).filter(|_| rate_limiter.allow(much_later)).count(), FRESH_TOKEN_BURST as usize);
    }
}
