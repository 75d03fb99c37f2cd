//! Connections to boxd: a fresh one for each caller, kept for that caller's next request on the same connection.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::body::Body;
use cobox_protocol::SandboxId;
use cobox_provider::BoxedStream;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::task::AbortHandle;

use crate::Admission;

/// Bounds the head of an answer and what is read ahead of its body; large enough to stream files at full speed.
const UPSTREAM_BUFFER_BYTES: usize = 256 * 1024;
/// How long one waits for its caller's next request: well below the time after which boxd closes it.
const KEEP_IDLE: Duration = Duration::from_secs(10);

/// One caller's connection to the gateway, put among the extensions of each of its requests: remembers the connection to
/// boxd that its last request used, for the next one of the same caller to the same sandbox. Never another's.
#[derive(Clone, Default)]
pub struct KeptUpstream(Arc<Mutex<Option<Idle>>>);

struct Idle {
    of: Whose,
    upstream: Upstream,
    since: Instant,
}

/// Behind a proxy one connection carries many callers; each has connections of its own all the same.
#[derive(Clone, PartialEq, Eq)]
struct Whose {
    sandbox: SandboxId,
    workspace: String,
    principal: String,
    session: Option<String>,
}

impl Whose {
    fn of(admission: &Admission) -> Option<Self> {
        let caller = admission.caller.as_ref()?;
        Some(Self {
            sandbox: admission.sandbox.clone(),
            workspace: caller.workspace.clone(),
            principal: caller.principal.clone(),
            session: caller.session.as_ref().map(|s| s.to_string()),
        })
    }
}

/// An HTTP connection to boxd that ends when this is dropped.
pub(crate) struct Upstream {
    pub sender: SendRequest<Body>,
    connection: AbortHandle,
}

impl Upstream {
    pub async fn new(stream: BoxedStream) -> Result<Self, hyper::Error> {
        let (sender, connection) = Builder::new().max_buf_size(UPSTREAM_BUFFER_BYTES).handshake::<_, Body>(TokioIo::new(stream)).await?;
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

impl KeptUpstream {
    /// The caller's idle connection to the sandbox, if it is still good.
    pub(crate) async fn take(&self, admission: &Admission) -> Option<Upstream> {
        let idle = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        if Whose::of(admission)? != idle.of || idle.since.elapsed() > KEEP_IDLE || idle.upstream.sender.is_closed() {
            return None;
        }
        let mut upstream = idle.upstream;
        // The last answer may have been passed on before its connection noticed that it was complete.
        upstream.sender.ready().await.ok()?;
        Some(upstream)
    }

    /// Where the connection of a request goes when its answer is complete.
    pub(crate) fn place(&self, admission: &Admission) -> Option<KeepFor> {
        Some(KeepFor { kept: self.clone(), of: Whose::of(admission)? })
    }
}

/// A place for one connection once it is idle again.
pub(crate) struct KeepFor {
    kept: KeptUpstream,
    of: Whose,
}

impl KeepFor {
    pub fn keep(self, upstream: Upstream) {
        let idle = Idle { of: self.of, upstream, since: Instant::now() };
        *self.kept.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(idle);
    }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::CapabilitySet;

    use super::*;
    use crate::Caller;

    fn admission(sandbox: &SandboxId, principal: &str) -> Admission {
        let (workspace, principal, actor) = ("w".to_owned(), principal.to_owned(), "human".to_owned());
        let caller =
            Caller { workspace, principal, actor, session: None, thread: None, jti: "tok".to_owned(), capabilities: CapabilitySet::EMPTY };
        Admission { sandbox: sandbox.clone(), is_running: true, token: None, caller: Some(caller) }
    }

    async fn keep(kept: &KeptUpstream, admission: &Admission) -> (tokio::io::DuplexStream, AbortHandle) {
        let (ours, theirs) = tokio::io::duplex(1024);
        let upstream = Upstream::new(Box::new(ours)).await.unwrap();
        let connection = upstream.connection.clone();
        kept.place(admission).unwrap().keep(upstream);
        (theirs, connection)
    }

    #[tokio::test]
    async fn a_kept_connection_is_its_callers_alone_and_used_once() {
        let (kept, sandbox) = (KeptUpstream::default(), SandboxId::new());
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
        let (kept, ann) = (KeptUpstream::default(), admission(&SandboxId::new(), "ann"));
        let (boxd, connection) = keep(&kept, &ann).await;
        drop(boxd);
        while !connection.is_finished() {
            tokio::task::yield_now().await;
        }
        assert!(kept.take(&ann).await.is_none());
    }
}
