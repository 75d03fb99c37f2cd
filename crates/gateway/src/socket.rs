//! A client's WebSocket on its way to boxd. Its `auth` frames are read here and their tokens checked as a header's would be: each use is
//! recorded, a key is swapped, and what isn't good for this sandbox goes no further.
//!
//! They are read as boxd reads them: however the word is written, and in however many pieces. What is too long to be read here boxd takes
//! for no `auth` frame either.

use std::{
    io,
    sync::{Arc, OnceLock},
    time::Duration,
};

use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId, Secret,
    frame::{ClientFrame, MAX_AUTH_FRAME_BYTES, ServerFrame, close},
    json::in_plain_words,
};
use serde::{Deserialize, de::IgnoredAny};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter},
    time::Instant,
};

use crate::{
    Admission, Caller, Credential, Target,
    door::{Gateway, made_room},
    frame,
    slots::Slot,
};

/// How long a connection without a header may take over its first frame; boxd gives it as long.
const AUTH_WITHIN: Duration = Duration::from_secs(5);
/// What a client gets to take the last frames and answer the close.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);
/// How long one direction may go on after the other has ended: enough to say goodbye.
const LINGER: Duration = Duration::from_secs(5);
/// Fresh tokens that one connection may show at once, and how long until one more: a client shows one some minutes after the last, and
/// each costs a record or two.
const FRESH_TOKENS: u32 = 16;
const FRESH_TOKEN_EVERY: Duration = Duration::from_secs(10);
/// In use records, where a method stands: a token shown on a connection that is already there.
const AUTH_METHOD: &str = "AUTH";

/// Everything that is known of a WebSocket.
pub(crate) struct Socket {
    pub gateway: Gateway,
    pub target: Target,
    pub sandbox: SandboxId,
    pub path: String,
    pub request_id: RequestId,
    /// By the header, or by the newest frame.
    pub caller: Option<Caller>,
    pub slot: Slot,
}

/// Why a connection is closed from here.
enum Refusal {
    Told(u16, ApiError),
    /// The client has gone, or boxd has.
    Gone,
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Refusal::Told(close::of(error.code), error)
    }
}

impl From<io::Error> for Refusal {
    fn from(_: io::Error) -> Self {
        Refusal::Gone
    }
}

impl Socket {
    /// Copies both ways until both ends are done, or one is and the other doesn't follow.
    pub async fn carry(mut self, client: impl AsyncRead + AsyncWrite, boxd: impl AsyncRead + AsyncWrite) {
        let (client_reads, mut client_writes) = tokio::io::split(client);
        let (boxd_reads, boxd_writes) = tokio::io::split(boxd);
        let mut client_reads = BufReader::new(client_reads);
        let mut boxd_writes = BufWriter::new(boxd_writes);
        if self.caller.is_none() {
            let must_close = self.slot.must_close();
            let hello = tokio::time::timeout(AUTH_WITHIN, self.hello(&mut client_reads, &mut boxd_writes));
            let refusal = tokio::select! {
                // In this order: a client that has just authenticated doesn't make room any more.
                biased;
                hello = hello => match hello {
                    Ok(Ok(())) => None,
                    Ok(Err(refusal)) => Some(refusal),
                    Err(_) => {
                        let message = format!("no `auth` frame within {} seconds", AUTH_WITHIN.as_secs());
                        Some(Refusal::Told(close::AUTH_TIMEOUT, ApiError::new(ErrorCode::Unauthenticated, message)))
                    }
                },
                () = must_close => Some(made_room().into()),
            };
            match refusal {
                None => {}
                Some(Refusal::Gone) => return,
                Some(Refusal::Told(code, error)) => {
                    // The sandbox takes only so many connections that have not authenticated.
                    drop((boxd_reads, boxd_writes));
                    let farewell = goodbye(&mut client_writes, &mut client_reads, code, &error, &self.request_id);
                    // A client that doesn't listen any more has nothing to be told.
                    let _ = tokio::time::timeout(GOODBYE_WITHIN, farewell).await;
                    return;
                }
            }
        }
        let last_words = OnceLock::new();
        let mut up = std::pin::pin!(async {
            // A reset is an end like any other here: the other side learns of it by its own connection closing.
            if let Err(Refusal::Told(code, error)) = self.pass_frames(&mut client_reads, &mut boxd_writes).await {
                // Said when boxd has ended: before, it could be in the middle of a frame of boxd's.
                last_words.get_or_init(|| farewell(code, &error, &self.request_id));
                let _ = boxd_writes.write_all(&frame::close_for_server(code, error.code.as_str())).await;
            }
            finish(client_reads, boxd_writes).await;
        });
        let mut down = std::pin::pin!(pump(boxd_reads, client_writes, &last_words));
        // An end that doesn't follow within the linger time is dropped with its connection: nobody is left to tell.
        tokio::select! {
            () = &mut up => drop(tokio::time::timeout(LINGER, down).await),
            () = &mut down => drop(tokio::time::timeout(LINGER, up).await),
        }
    }

    /// Lets a stranger in by its first frame. Until then nothing of boxd's is passed on.
    async fn hello(&mut self, from: &mut (impl AsyncBufReadExt + Unpin), to: &mut (impl AsyncWrite + Unpin)) -> Result<(), Refusal> {
        let first = || {
            Refusal::from(ApiError::new(
                ErrorCode::Unauthenticated,
                "the first frame must be `auth` with a token, or send the token as a header",
            ))
        };
        loop {
            let head = frame::read_head(from).await?.ok_or(Refusal::Gone)?;
            if head.is_control() {
                // A client may ping, or think better of it.
                let is_close = head.is_close();
                let rest = head.read_payload(from).await?;
                if is_close {
                    return Err(Refusal::Gone);
                }
                to.write_all(&head.and(&rest)).await?;
                continue;
            }
            if !head.is_whole_text() || head.payload_bytes() > MAX_AUTH_FRAME_BYTES as u64 {
                return Err(first());
            }
            let payload = head.read_payload(from).await?;
            let token = read_token(&head.unmasked(&payload)).ok_or_else(first)??;
            let admission = self.admit(&token).await?;
            let session = admission.caller.as_ref().and_then(|c| c.session.as_ref());
            // Among its own now, and no longer among the strangers.
            self.slot = self.gateway.slots.take(&self.sandbox, session, true)?;
            self.gateway.directory.touch(&admission);
            to.write_all(&auth_frame(admission.token.as_ref())).await?;
            to.flush().await?;
            self.caller = admission.caller.clone();
            self.used(admission, "GET").await;
            return Ok(());
        }
    }

    /// From frame to frame, as they come.
    async fn pass_frames(
        &mut self,
        from: &mut BufReader<impl AsyncRead + Unpin>,
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), Refusal> {
        // A text of which more pieces are to come, kept until it is known whether it is a token's. Only its text, however many they are.
        let mut begun: Option<Vec<u8>> = None;
        let mut turns = Turns { free_at: Instant::now() };
        while let Some(head) = frame::read_head(from).await? {
            let is_text = match &begun {
                None => head.is_text(),
                Some(_) if head.is_control() => false,
                Some(_) if head.is_continuation() => true,
                Some(_) => return Err(Refusal::Gone),
            };
            let before = begun.take_if(|_| is_text);
            let length = head.payload_bytes().saturating_add(before.as_ref().map_or(0, Vec::len) as u64);
            if is_text && length <= MAX_AUTH_FRAME_BYTES as u64 {
                let payload = head.read_payload(from).await?;
                let is_whole = before.is_none();
                let mut text = before.unwrap_or_default();
                text.append(&mut head.unmasked(&payload));
                if head.is_last_piece() {
                    let fresh = match shown_token(&text) {
                        Some(_) if !turns.take(Instant::now()) => return Err(too_often()),
                        Some(token) => self.renew(&token?).await,
                        None => None,
                    };
                    let frame = fresh.unwrap_or_else(|| if is_whole { head.and(&payload) } else { frame::text_for_server(&text) });
                    to.write_all(&frame).await?;
                } else {
                    begun = Some(text);
                }
            } else {
                if let Some(before) = before {
                    to.write_all(&frame::begun_text_for_server(&before)).await?;
                }
                to.write_all(head.bytes()).await?;
                let copied = tokio::io::copy_buf(&mut AsyncReadExt::take(&mut *from, head.payload_bytes()), to).await?;
                if copied < head.payload_bytes() {
                    return Ok(());
                }
            }
            // What waits already goes out in one write.
            if from.buffer().is_empty() {
                to.flush().await?;
            }
        }
        Ok(())
    }

    /// A fresh token on a connection that is there: the frame boxd gets in place of the client's, where it gets another one.
    async fn renew(&mut self, token: &Secret) -> Option<Vec<u8>> {
        match self.admit(token).await {
            Ok(admission) => {
                let frame = auth_frame(admission.token.as_ref());
                let is_same = match (&self.caller, &admission.caller) {
                    (Some(known), Some(fresh)) => known.principal == fresh.principal && known.session == fresh.session,
                    _ => false,
                };
                // Another's is refused by boxd, which says so.
                if is_same {
                    self.gateway.directory.touch(&admission);
                    self.used(admission, AUTH_METHOD).await;
                }
                Some(frame)
            }
            // One of this sandbox that is over: boxd says which.
            Err(e) if matches!(e.code, ErrorCode::TokenExpired | ErrorCode::TokenRevoked) => None,
            // Whatever else it is may be good elsewhere. boxd is shown that there was one, and complains to the client.
            Err(_) => Some(auth_frame(None)),
        }
    }

    async fn admit(&self, token: &Secret) -> Result<Admission, ApiError> {
        let credential = Credential::read(token.expose())?;
        let admission = self.gateway.directory.admit(self.target.clone(), Some(credential), &self.request_id).await?;
        if admission.sandbox == self.sandbox {
            return Ok(admission);
        }
        Err(ApiError::new(ErrorCode::ProviderUnavailable, "the session has another sandbox by now; connect again"))
    }

    async fn used(&self, admission: Admission, method: &str) {
        self.gateway.used(Arc::new(admission), &self.request_id, method, &self.path, 101).await;
    }
}

/// How many fresh tokens a connection may still show, as the time at which all may be shown again.
struct Turns {
    free_at: Instant,
}

impl Turns {
    fn take(&mut self, now: Instant) -> bool {
        let free_at = self.free_at.max(now) + FRESH_TOKEN_EVERY;
        let is_free = free_at <= now + FRESH_TOKEN_EVERY * FRESH_TOKENS;
        if is_free {
            self.free_at = free_at;
        }
        is_free
    }
}

fn shown_token(text: &[u8]) -> Option<Result<Secret, ApiError>> {
    const WORD: &[u8] = b"\"auth\"";
    // The one other way to write a letter in JSON.
    const ESCAPE: &[u8] = b"\\u";
    let has = |part: &[u8]| text.windows(part.len()).any(|w| w == part);
    // Most frames are keystrokes; only what may have the word in it is read.
    if has(WORD) || has(ESCAPE) { read_token(text) } else { None }
}

/// Reads an `auth` frame with boxd's own type, so that both see a token in the same texts. One with an unknown field is refused here: it
/// must not reach an older boxd, which would ignore the field, and a frame of our own would drop it.
fn read_token(text: &[u8]) -> Option<Result<Secret, ApiError>> {
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
            let told = in_plain_words("`auth`", &error.to_string());
            Err(ApiError::invalid(format!("a frame can't be read: {told}")))
        }),
    }
}

fn auth_frame(token: Option<&Secret>) -> Vec<u8> {
    // A string always serialises.
    let token = serde_json::to_string(token.map_or("", Secret::expose)).unwrap_or_default();
    frame::text_for_server(format!("{{\"type\":\"auth\",\"token\":{token}}}").as_bytes())
}

/// Says why, closes, and waits for the client to have heard it.
async fn goodbye(
    to: &mut (impl AsyncWrite + Unpin),
    from: &mut (impl AsyncRead + Unpin),
    code: u16,
    error: &ApiError,
    request_id: &RequestId,
) -> io::Result<()> {
    to.write_all(&farewell(code, error, request_id)).await?;
    finish(from, to).await;
    Ok(())
}

/// Why, and the close.
fn farewell(code: u16, error: &ApiError, request_id: &RequestId) -> Vec<u8> {
    let told = ServerFrame::<()>::Error { error: error.envelope(request_id).error };
    // Strings, numbers and maps with string keys always serialise.
    let told = serde_json::to_string(&told).unwrap_or_default();
    [frame::text_for_client(&told), frame::close_for_client(code, error.code.as_str())].concat()
}

fn too_often() -> Refusal {
    let message = format!("more than {FRESH_TOKENS} `auth` frames at once; show a fresh token shortly before the last one expires");
    ApiError::new(ErrorCode::RateLimited, message).into()
}

async fn pump(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, last_words: &OnceLock<Vec<u8>>) {
    // A reset is an end like any other here, as above.
    let _ = tokio::io::copy(&mut from, &mut to).await;
    if let Some(words) = last_words.get() {
        let _ = to.write_all(words).await;
    }
    finish(from, to).await;
}

/// Ends one direction. What still comes is read and dropped: closing over unread bytes would reset the connection, and lose what we said last.
async fn finish(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let _ = to.shutdown().await;
    let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_seen_in_whatever_boxd_takes_for_an_auth_frame() {
        for text in [
            r#"{"type":"auth","token":"t"}"#,
            r#"{"token":"t","type":"auth"}"#,
            r#"{"type":"\u0061uth","token":"t"}"#,
            r#"{"\u0074ype":"aut\u0068","token":"\u0074"}"#,
            r#" ["auth","t"]"#,
        ] {
            assert!(matches!(serde_json::from_str(text), Ok(ClientFrame::<IgnoredAny>::Auth { .. })), "{text}");
            assert_eq!(shown_token(text.as_bytes()).unwrap().unwrap(), Secret::new("t"), "{text}");
        }
        for text in [r#"{"type":"stdin","data":"\u001b \"auth\""}"#, r#"{"type":"auth"}"#, r#"{"type":"auths","token":"t"}"#, "auth", "\\u"]
        {
            assert!(shown_token(text.as_bytes()).is_none(), "{text}");
        }
    }

    #[test]
    fn an_auth_frame_with_an_unknown_field_is_refused_by_name() {
        let refused = shown_token(br#"{"token":"t","only":["fs_read"],"type":"auth"}"#).unwrap().unwrap_err();
        assert!(refused.message.contains("only: is not a field of this request"), "{}", refused.message);
    }

    #[test]
    fn fresh_tokens_are_taken_so_many_at_once_and_then_one_after_each_pause() {
        let now = Instant::now();
        let mut turns = Turns { free_at: now };
        assert_eq!((0..100).filter(|_| turns.take(now)).count(), FRESH_TOKENS as usize);
        let later = now + FRESH_TOKEN_EVERY;
        assert_eq!((turns.take(later), turns.take(later)), (true, false));
        let much_later = now + FRESH_TOKEN_EVERY * 1000;
        assert_eq!((0..100).filter(|_| turns.take(much_later)).count(), FRESH_TOKENS as usize);
    }
}
