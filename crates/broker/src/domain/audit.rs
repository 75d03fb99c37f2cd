//! The audit trail: what changed is recorded with the change; uses of the dataplane are gathered and written together.

use std::{sync::Arc, time::Duration};

use cobox_protocol::{RequestId, SandboxId, SessionId, Timestamp, audit::AuditEntry};
use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::timeout,
};

use super::model::{Bound, Caller, Sandbox};
use crate::store::{Note, Store};

/// Records waiting to be written. When the disk can't keep up, requests wait: none of them is lost silently.
const QUEUE_RECORDS: usize = 4096;
/// Uses come one after the other; each transaction is a sync of the disk and writes the same pages again, so those of a moment share one.
const GATHER: Duration = Duration::from_millis(100);
/// Written in one transaction; when as many wait, nothing more is waited for.
const BATCH_RECORDS: usize = 512;
/// How often records that the database didn't take are tried again, and how long after the first time; the pause doubles, so that a
/// database may be away for half a minute.
const ATTEMPTS: u32 = 7;
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Append-only; the protocol's fields, and one line of detail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRecord {
    pub at: Timestamp,
    pub workspace: String,
    /// `session.created`, `token.issued`, `dataplane.used`, …
    pub action: std::borrow::Cow<'static, str>,
    pub request_id: Option<RequestId>,
    pub principal: Option<String>,
    pub actor: Option<String>,
    pub thread: Option<String>,
    pub session: Option<SessionId>,
    pub sandbox: Option<SandboxId>,
    pub jti: Option<String>,
    pub detail: Option<String>,
}

impl AuditRecord {
    pub fn new(at: Timestamp, workspace: &str, action: &'static str) -> Self {
        Self {
            at,
            workspace: workspace.to_owned(),
            action: action.into(),
            request_id: None,
            principal: None,
            actor: None,
            thread: None,
            session: None,
            sandbox: None,
            jti: None,
            detail: None,
        }
    }
    /// Of a sandbox, by the broker itself.
    pub fn of_sandbox(at: Timestamp, sandbox: &Sandbox, action: &'static str, detail: &str) -> Self {
        Self { sandbox: Some(sandbox.id.clone()), detail: Some(detail.to_owned()), ..Self::new(at, &sandbox.workspace, action) }
    }
    pub fn by(mut self, caller: &Caller, request_id: &RequestId) -> Self {
        self.principal = Some(caller.principal.name.clone());
        self.actor = Some(caller.actor.kind.word().to_owned());
        self.request_id = Some(request_id.clone());
        self
    }
    pub fn about(mut self, bound: &Bound) -> Self {
        self.thread = bound.session.thread().map(str::to_owned);
        self.session = Some(bound.session.id.clone());
        self.sandbox = Some(bound.sandbox.id.clone());
        self
    }
    pub fn entry(self, sequence: u64) -> AuditEntry {
        AuditEntry {
            sequence,
            at: self.at,
            action: self.action.into_owned(),
            request_id: self.request_id,
            principal: self.principal,
            actor: self.actor,
            thread_id: self.thread,
            session_id: self.session,
            sandbox_id: self.sandbox,
            jti: self.jti,
            detail: self.detail,
        }
    }
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }
}

enum Entry {
    Record(Box<AuditRecord>),
    Flush(oneshot::Sender<()>),
}

/// Takes records of uses and writes them behind the request.
#[derive(Clone)]
pub struct AuditTrail {
    queue: mpsc::Sender<Entry>,
    /// Ends the gathering.
    hurry: Arc<Notify>,
}

impl AuditTrail {
    /// Its writer ends when the last clone is dropped and everything is written.
    pub fn start(store: Arc<dyn Store>) -> Self {
        let (queue, receiver) = mpsc::channel(QUEUE_RECORDS);
        let hurry = Arc::<Notify>::default();
        tokio::spawn(write(store, receiver, hurry.clone()));
        Self { queue, hurry }
    }

    pub async fn add(&self, record: AuditRecord) {
        // The writer lives as long as its sender, unless the process is ending, when there is nobody to tell.
        let _ = self.queue.send(Entry::Record(Box::new(record))).await;
        if QUEUE_RECORDS - self.queue.capacity() >= BATCH_RECORDS {
            self.hurry.notify_one();
        }
    }

    /// Returns when everything added before is durable.
    pub async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        if self.queue.send(Entry::Flush(done)).await.is_ok() {
            self.hurry.notify_one();
            // An error means the writer has ended, after writing all it had.
            let _ = is_done.await;
        }
    }
}

async fn write(store: Arc<dyn Store>, mut queue: mpsc::Receiver<Entry>, hurry: Arc<Notify>) {
    let mut entries = Vec::with_capacity(BATCH_RECORDS);
    while queue.recv_many(&mut entries, BATCH_RECORDS).await > 0 {
        if entries.len() < BATCH_RECORDS && entries.iter().all(|e| matches!(e, Entry::Record(_))) {
            // Ended early where somebody waits for the records, or enough are there; past it, all that came.
            let _ = timeout(GATHER, hurry.notified()).await;
            while entries.len() < BATCH_RECORDS
                && let Ok(entry) = queue.try_recv()
            {
                entries.push(entry);
            }
        }
        let mut audit = Vec::new();
        let mut waiting = Vec::new();
        for entry in entries.drain(..) {
            match entry {
                Entry::Record(record) => audit.push(*record),
                Entry::Flush(done) => waiting.push(done),
            }
        }
        keep(&*store, Note { audit, ..Note::default() }).await;
        for done in waiting {
            // Whoever asked may have stopped waiting.
            let _ = done.send(());
        }
    }
}

/// Whoever has more to record meanwhile waits, where the queue is full.
async fn keep(store: &dyn Store, note: Note) {
    let mut pause = FIRST_PAUSE;
    for attempt in 1.. {
        let Err(error) = store.note(&note).await else { return };
        let count = note.audit.len();
        if attempt == ATTEMPTS {
            tracing::error!(%error, count, "audit records could not be written and are lost; check the database and its disk");
            return;
        }
        tracing::warn!(%error, count, "audit records could not be written yet; they are tried again");
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
}
