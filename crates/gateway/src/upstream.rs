//! Connections to boxd: a fresh one for each caller, kept for that caller's next request on the same connection.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use axum::body::Body;
use cobox_protocol::{ApiError, Secret};
use cobox_provider::BoxedStream;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use subtle::ConstantTimeEq;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    task::AbortHandle,
};

use crate::{Admission, Caller, Credential, Source, Stamp, Target};

/// Bounds the head of an answer and what is read ahead of its body; large enough to stream files at full speed.
const UPSTREAM_BUFFER_BYTES: usize = 512 * 1024;
/// How long one waits for its caller's next request: well below the time after which boxd closes it.
const KEEP_IDLE: Duration = Duration::from_secs(10);

/// What the gateway keeps for one connection of a client's: the connection to boxd that its last request used, and who that request was
/// of, for the next one of the same caller to the same sandbox. Never another's.
#[derive(Clone, Default)]
pub struct Kept {
    parts: Arc<Mutex<Parts>>,
    source: Source,
    on_authenticated: Option<Arc<OnAuthenticated>>,
}

/// Told the workspace and the principal; says whether they may have one more connection.
type OnAuthenticated = dyn Fn(&str, &str) -> Result<(), ApiError> + Send + Sync;

#[derive(Default)]
struct Parts {
    idle: Option<Idle>,
    admitted: Option<Admitted>,
}

struct Idle {
    of: Arc<Admission>,
    upstream: Upstream,
    since: Instant,
}

/// An admission that holds for as long as the directory stays as it was.
struct Admitted {
    target: Target,
    token: Secret,
    stamp: Stamp,
    admission: Arc<Admission>,
}

/// In the same time wherever they differ: a proxy's other callers must not find out a token letter by letter. Eight letters at a time, as
/// it is done with every request.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let ((one, one_rest), (other, other_rest)) = (one.as_chunks::<8>(), other.as_chunks::<8>());
    let (one, other) = (one.iter().copied().map(u64::from_ne_bytes), other.iter().copied().map(u64::from_ne_bytes));
    let is_same_length = one.len().ct_eq(&other.len());
    let words = one.zip(other).fold(is_same_length, |is_same, (one, other)| is_same & one.ct_eq(&other));
    bool::from(words & one_rest.ct_eq(other_rest))
}

/// Behind a proxy one connection carries many callers; each has connections of its own all the same.
fn is_same_caller(one: &Admission, other: &Admission) -> bool {
    let (Some(a), Some(b)) = (&one.caller, &other.caller) else { return false };
    one.sandbox == other.sandbox && a.workspace == b.workspace && a.principal == b.principal && a.session == b.session
}

/// A connection to boxd whose answer is read also where boxd closed before it had read the request: it may refuse an upload early, and
/// what it answered is there to be read although nothing can be written any more.
struct AnswerFirst {
    stream: BoxedStream,
    is_closed: bool,
}

impl AnswerFirst {
    /// Drops what can't be sent. The answer follows, or the read fails with the reason.
    fn wrote(&mut self, polled: Poll<io::Result<usize>>, length: usize) -> Poll<io::Result<usize>> {
        match polled {
            Poll::Ready(Err(error)) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                self.is_closed = true;
                Poll::Ready(Ok(length))
            }
            polled => polled,
        }
    }
}

impl AsyncRead for AnswerFirst {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for AnswerFirst {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_closed {
            return Poll::Ready(Ok(bytes.len()));
        }
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.wrote(polled, bytes.len())
    }
    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let length = bytes.iter().map(|slice| slice.len()).sum();
        if self.is_closed {
            return Poll::Ready(Ok(length));
        }
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.wrote(polled, length)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_closed { Poll::Ready(Ok(())) } else { Pin::new(&mut self.stream).poll_flush(cx) }
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_closed { Poll::Ready(Ok(())) } else { Pin::new(&mut self.stream).poll_shutdown(cx) }
    }
}

/// An HTTP connection to boxd that ends when this is dropped.
pub(crate) struct Upstream {
    pub sender: SendRequest<Body>,
    connection: AbortHandle,
}

impl Upstream {
    pub async fn new(stream: BoxedStream) -> Result<Self, hyper::Error> {
        let stream = TokioIo::new(AnswerFirst { stream, is_closed: false });
        let (sender, connection) = Builder::new().max_buf_size(UPSTREAM_BUFFER_BYTES).handshake::<_, Body>(stream).await?;
        let connection = tokio::spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "a connection to boxd ended");
            }
        });
        Ok(Self { sender, connection: connection.abort_handle() })
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Kept {
    /// For a connection whose owner decides whether a client may authenticate on it. It is asked with every request.
    pub fn new(source: Source, on_authenticated: impl Fn(&str, &str) -> Result<(), ApiError> + Send + Sync + 'static) -> Self {
        Self { parts: Arc::default(), source, on_authenticated: Some(Arc::new(on_authenticated)) }
    }

    /// Where the client's connection comes from.
    pub(crate) fn source(&self) -> Source {
        self.source
    }

    /// Called by each part of the broker that has accepted a credential of a workspace's principal on this connection.
    pub fn authenticated_as(&self, workspace: &str, principal: &str) -> Result<(), ApiError> {
        self.on_authenticated.as_ref().map_or(Ok(()), |on_authenticated| on_authenticated(workspace, principal))
    }

    pub(crate) fn authenticated(&self, caller: &Caller) -> Result<(), ApiError> {
        self.authenticated_as(&caller.workspace, &caller.principal)
    }

    /// The caller's idle connection to the sandbox, if it is still good.
    pub(crate) async fn take(&self, admission: &Admission) -> Option<Upstream> {
        let idle = self.parts().idle.take()?;
        if !is_same_caller(admission, &idle.of) || idle.since.elapsed() > KEEP_IDLE || idle.upstream.sender.is_closed() {
            return None;
        }
        let mut upstream = idle.upstream;
        // The last answer may have been passed on before its connection noticed that it was complete.
        upstream.sender.ready().await.ok()?;
        Some(upstream)
    }

    /// Where the connection of a request goes when its answer is complete.
    pub(crate) fn place(&self, admission: &Arc<Admission>) -> Option<KeepFor> {
        admission.caller.as_ref()?;
        Some(KeepFor { kept: self.clone(), of: admission.clone() })
    }

    /// Who was last let in here, where the same is shown for the same and nothing has changed since.
    pub(crate) fn admitted(&self, target: &Target, credential: Option<&Credential>, stamp: Stamp) -> Option<Arc<Admission>> {
        let Some(Credential::Token(token)) = credential else { return None };
        let parts = self.parts();
        let known = parts.admitted.as_ref().filter(|known| known.stamp == stamp && known.target == *target)?;
        is_same(known.token.expose().as_bytes(), token.expose().as_bytes()).then(|| known.admission.clone())
    }

    /// Remembers it; the stamp is of before it was decided.
    pub(crate) fn admit(&self, target: Target, credential: Option<Credential>, stamp: Stamp, admission: &Arc<Admission>) {
        if let Some(Credential::Token(token)) = credential.filter(|_| admission.is_lasting) {
            self.parts().admitted = Some(Admitted { target, token, stamp, admission: admission.clone() });
        }
    }

    fn parts(&self) -> MutexGuard<'_, Parts> {
        // Each change is a single assignment.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place for one connection once it is idle again.
pub(crate) struct KeepFor {
    kept: Kept,
    of: Arc<Admission>,
}

impl KeepFor {
    pub fn keep(self, upstream: Upstream) {
        self.kept.parts().idle = Some(Idle { of: self.of, upstream, since: Instant::now() });
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::{CapabilitySet, SandboxId};

    use super::*;

    fn admission(sandbox: &SandboxId, principal: &str) -> Arc<Admission> {
        let (workspace, principal, actor) = ("w".to_owned(), principal.to_owned(), "human".to_owned());
        let caller =
            Caller { workspace, principal, actor, session: None, thread: None, jti: "tok".to_owned(), capabilities: CapabilitySet::EMPTY };
        Arc::new(Admission { sandbox: sandbox.clone(), is_running: true, is_lasting: true, token: None, caller: Some(caller) })
    }

    async fn keep(kept: &Kept, admission: &Arc<Admission>) -> (tokio::io::DuplexStream, AbortHandle) {
        let (ours, theirs) = tokio::io::duplex(1024);
        let upstream = Upstream::new(Box::new(ours)).await.unwrap();
        let connection = upstream.connection.clone();
        kept.place(admission).unwrap().keep(upstream);
        (theirs, connection)
    }

    #[tokio::test]
    async fn a_kept_connection_is_its_callers_alone_and_used_once() {
        let (kept, sandbox) = (Kept::default(), SandboxId::new());
        let ann = admission(&sandbox, "ann");
        let _boxd = keep(&kept, &ann).await;
        assert!(kept.take(&ann).await.is_some());
        assert!(kept.take(&ann).await.is_none());
        for other in [admission(&sandbox, "bob"), admission(&SandboxId::new(), "ann")] {
            let _boxd = keep(&kept, &ann).await;
            assert!(kept.take(&other).await.is_none());
        }
    }

    #[tokio::test]
    async fn one_that_ended_while_it_was_kept_is_not_used() {
        let (kept, ann) = (Kept::default(), admission(&SandboxId::new(), "ann"));
        let (boxd, connection) = keep(&kept, &ann).await;
        drop(boxd);
        while !connection.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(kept.take(&ann).await.is_none());
    }

    #[test]
    fn who_was_let_in_is_known_by_the_same_token_for_the_same_target_until_something_changes() {
        let sandbox = SandboxId::new();
        let (kept, ann) = (Kept::default(), admission(&sandbox, "ann"));
        let (target, other) = (Target::Sandbox(sandbox), Target::Sandbox(SandboxId::new()));
        let token = |text: &str| Some(Credential::Token(Secret::new(text)));
        let (now, later) = (Stamp { change: 1, second: 7 }, Stamp { change: 1, second: 8 });
        kept.admit(target.clone(), token("a.b.c"), now, &ann);
        assert!(kept.admitted(&target, token("a.b.c").as_ref(), now).is_some());
        for (target, credential, stamp) in [
            (&target, token("a.b.d"), now),
            (&target, token("a.b.cc"), now),
            (&target, None, now),
            (&target, Some(Credential::ApiKey(Secret::new("a.b.c"))), now),
            (&other, token("a.b.c"), now),
            (&target, token("a.b.c"), later),
            (&target, token("a.b.c"), Stamp { change: 2, second: 7 }),
        ] {
            assert!(kept.admitted(target, credential.as_ref(), stamp).is_none());
        }
        // One that is decided anew each time is not remembered.
        let kept = Kept::default();
        let once = Arc::new(Admission { is_lasting: false, ..Admission::clone(&ann) });
        kept.admit(target.clone(), token("a.b.c"), now, &once);
        assert!(kept.admitted(&target, token("a.b.c").as_ref(), now).is_none());
    }
}
