//! A client's WebSocket on its way to boxd. Its `auth` frames are read here and their tokens checked as a header's would be: each use is
//! recorded, a key is swapped, and what isn't good for this sandbox goes no further.
//!
//! Frames in several pieces pass as they are; no client of ours sends a token in pieces.

use std::{io, sync::Arc, time::Duration};

use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId, Secret,
    frame::{ServerFrame, close},
};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};

use crate::{
    Admission, Caller, Credential, Target,
    door::Gateway,
    frame::{self, Head},
    slots::{Slot, Visitor},
};

/// How long a connection without a header may take over its first frame; boxd gives it as long.
const AUTH_WITHIN: Duration = Duration::from_secs(5);
/// What a client gets to take the last frames and answer the close.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);
/// How long one direction may go on after the other has ended: enough to say goodbye.
const LINGER: Duration = Duration::from_secs(5);
/// Longest frame that is looked at: several times the longest token.
const MAX_AUTH_FRAME_BYTES: u64 = 16 * 1024;
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

#[derive(Deserialize)]
struct AuthFrame {
    #[serde(rename = "type")]
    kind: String,
    token: Secret,
}

impl Socket {
    /// Copies both ways until both ends are done, or one is and the other doesn't follow.
    pub async fn carry(mut self, client: impl AsyncRead + AsyncWrite, boxd: impl AsyncRead + AsyncWrite) {
        let (client_reads, mut client_writes) = tokio::io::split(client);
        let (boxd_reads, boxd_writes) = tokio::io::split(boxd);
        let mut client_reads = BufReader::new(client_reads);
        let mut boxd_writes = BufWriter::new(boxd_writes);
        if self.caller.is_none() {
            let hello = tokio::time::timeout(AUTH_WITHIN, self.hello(&mut client_reads, &mut boxd_writes)).await;
            let refusal = match hello {
                Ok(Ok(())) => None,
                Ok(Err(refusal)) => Some(refusal),
                Err(_) => {
                    let message = format!("no `auth` frame within {} seconds", AUTH_WITHIN.as_secs());
                    Some(Refusal::Told(close::AUTH_TIMEOUT, ApiError::new(ErrorCode::Unauthenticated, message)))
                }
            };
            match refusal {
                None => {}
                Some(Refusal::Gone) => return,
                Some(Refusal::Told(code, error)) => {
                    let farewell = goodbye(&mut client_writes, &mut client_reads, code, &error, &self.request_id);
                    // A client that doesn't listen any more has nothing to be told.
                    let _ = tokio::time::timeout(GOODBYE_WITHIN, farewell).await;
                    return;
                }
            }
        }
        let mut up = std::pin::pin!(async {
            // A reset is an end like any other here: the other side learns of it by its own connection closing.
            let _ = self.pass_frames(&mut client_reads, &mut boxd_writes).await;
            finish(client_reads, boxd_writes).await;
        });
        let mut down = std::pin::pin!(pump(boxd_reads, client_writes));
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
            if !head.is_whole_text() || head.payload_bytes() > MAX_AUTH_FRAME_BYTES {
                return Err(first());
            }
            let payload = head.read_payload(from).await?;
            let frame: AuthFrame = serde_json::from_slice(&head.unmasked(&payload)).map_err(|_| first())?;
            if frame.kind != "auth" {
                return Err(first());
            }
            let admission = self.admit(&frame.token).await?;
            let session = admission.caller.as_ref().and_then(|c| c.session.as_ref());
            // Among its own now, and no longer among the strangers.
            self.slot = self.gateway.slots.take(&self.sandbox, Visitor::Known(session), true)?;
            self.gateway.directory.touch(&admission);
            to.write_all(&auth_frame(admission.token.as_ref())).await?;
            to.flush().await?;
            self.caller = admission.caller.clone();
            self.used(admission, "GET").await;
            return Ok(());
        }
    }

    /// From frame to frame, as they come.
    async fn pass_frames(&mut self, from: &mut BufReader<impl AsyncRead + Unpin>, to: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        while let Some(head) = frame::read_head(from).await? {
            if head.is_whole_text() && head.payload_bytes() <= MAX_AUTH_FRAME_BYTES {
                let payload = head.read_payload(from).await?;
                match shown_token(&head, &payload) {
                    Some(token) => {
                        let frame = self.renew(&token).await.unwrap_or_else(|| head.and(&payload));
                        to.write_all(&frame).await?;
                    }
                    None => to.write_all(&head.and(&payload)).await?,
                }
            } else {
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

fn shown_token(head: &Head, payload: &[u8]) -> Option<Secret> {
    const WORD: &[u8] = b"\"auth\"";
    let text = head.unmasked(payload);
    // Most frames are keystrokes; only what has the word in it is read.
    if !text.windows(WORD.len()).any(|w| w == WORD) {
        return None;
    }
    serde_json::from_slice::<AuthFrame>(&text).ok().filter(|f| f.kind == "auth").map(|f| f.token)
}

fn auth_frame(token: Option<&Secret>) -> Vec<u8> {
    // A string always serialises.
    let token = serde_json::to_string(token.map_or("", Secret::expose)).unwrap_or_default();
    frame::text_for_server(&format!("{{\"type\":\"auth\",\"token\":{token}}}"))
}

/// Says why, closes, and waits for the client to have heard it.
async fn goodbye(
    to: &mut (impl AsyncWrite + Unpin),
    from: &mut (impl AsyncRead + Unpin),
    code: u16,
    error: &ApiError,
    request_id: &RequestId,
) -> io::Result<()> {
    let told = ServerFrame::<()>::Error { error: error.envelope(request_id).error };
    to.write_all(&frame::text_for_client(&serde_json::to_string(&told)?)).await?;
    to.write_all(&frame::close_for_client(code, error.code.as_str())).await?;
    finish(from, to).await;
    Ok(())
}

async fn pump(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    // A reset is an end like any other here, as above.
    let _ = tokio::io::copy(&mut from, &mut to).await;
    finish(from, to).await;
}

/// Ends one direction. What still comes is read and dropped: closing over unread bytes would reset the connection, and lose what we said last.
async fn finish(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let _ = to.shutdown().await;
    let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
}
