//! Batched writes: notes that wait at the same time share a transaction, because a commit is a disk sync and one sync can
//! serve many.
//!
//! No note is delayed to fill a batch: a note that arrives while nothing is being written is written at once, alone;
//! those that arrive during a write are written together after it. So a single caller waits for one commit, and many wait
//! for at most two. The first caller starts the writing on its own thread, so that a single caller wakes no other thread.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use parking_lot::{Mutex, MutexGuard};
use sqlx::AnyConnection;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::timeout,
};

use super::{
    StoreInner, audit_chain, multi_row,
    transaction::{BoundedConnection, timed_out},
    usage,
};
use crate::store::{Note, StoreError, Stored};

/// Callers that may wait in the queue; further ones wait to enter it. More than a broker has connections in use at once.
const MAX_QUEUED: usize = 1024;
/// Notes per batch: a transaction of a few milliseconds.
const MAX_BATCH: usize = 256;

struct PendingWrite {
    note: Note,
    done: oneshot::Sender<Stored<()>>,
    _room: OwnedSemaphorePermit,
}

pub struct BatchWriter {
    base: Arc<StoreInner>,
    queue: WriteQueue,
    room: Arc<Semaphore>,
}

#[derive(Clone, Default)]
struct WriteQueue(Arc<Mutex<WriteQueueState>>);

#[derive(Default)]
struct WriteQueueState {
    waiting: VecDeque<PendingWrite>,
    /// A task is writing them, until the queue is empty.
    is_served: bool,
}

impl WriteQueue {
    fn state(&self) -> MutexGuard<'_, WriteQueueState> {
        self.0.lock()
    }

    /// The next batch. If it is empty, no task serves the queue any more.
    fn next(&self) -> Vec<PendingWrite> {
        let mut parts = self.state();
        let count = parts.waiting.len().min(MAX_BATCH);
        parts.is_served = count > 0;
        parts.waiting.drain(..count).collect()
    }
}

impl BatchWriter {
    pub fn new(base: Arc<StoreInner>) -> Self {
        Self { base, queue: WriteQueue::default(), room: Arc::new(Semaphore::new(MAX_QUEUED)) }
    }

    /// Returns when the note is durable. It is also written if its caller disconnects.
    pub async fn write(&self, note: Note) -> Stored<()> {
        let ended = || StoreError::Unreachable("the broker is stopping".to_owned());
        let room = self.room.clone().acquire_owned().await.map_err(|_| ended())?;
        let (done, is_done) = oneshot::channel();
        let is_served = {
            let mut parts = self.queue.state();
            parts.waiting.push_back(PendingWrite { note, done, _room: room });
            std::mem::replace(&mut parts.is_served, true)
        };
        if !is_served {
            tokio::spawn(serve(self.base.clone(), QueueServer { queue: self.queue.clone(), is_done: false }));
        }
        is_done.await.map_err(|_| ended())?
    }
}

/// The task that serves the queue. If it is dropped half-way, with the thread it ran on, it fails all waiting callers.
struct QueueServer {
    queue: WriteQueue,
    is_done: bool,
}

impl Drop for QueueServer {
    fn drop(&mut self) {
        if !self.is_done {
            let mut parts = self.queue.state();
            parts.is_served = false;
            parts.waiting.clear();
        }
    }
}

async fn serve(base: Arc<StoreInner>, mut serving: QueueServer) {
    loop {
        let waiting = serving.queue.next();
        if waiting.is_empty() {
            // From here on another task may serve the queue.
            serving.is_done = true;
            return;
        }
        let together = write_one(&base, &joined(waiting.iter().map(|w| &w.note))).await;
        // A note that the database refuses must not fail the others. Without a database, each retry would wait as long
        // again.
        let is_each_tried = waiting.len() > 1 && matches!(together, Err(StoreError::Failed(_) | StoreError::Corrupt(_)));
        for PendingWrite { note, done, .. } in waiting {
            let outcome = if is_each_tried { write_one(&base, &note).await } else { together.clone() };
            // The caller may have disconnected.
            let _ = done.send(outcome);
        }
    }
}

/// All other notes wait for this one, so its wait for the database is bounded.
async fn write_one(base: &StoreInner, note: &Note) -> Stored<()> {
    let timeouts = base.engine.timeouts.turn + base.engine.timeouts.commit;
    timeout(timeouts, write_now(base, note)).await.map_err(|_| timed_out("writing", timeouts))?
}

async fn write_now(base: &StoreInner, note: &Note) -> Stored<()> {
    let is_audit_only = note.sandboxes.is_empty() && note.keys.is_empty() && note.tokens.is_empty();
    if is_audit_only && note.audit.len() <= multi_row::ROWS_AT_ONCE {
        // A single statement is its own transaction, without two more round trips to the database. Audit records, which
        // come with every request, are never cached, so the change counter stays as it is.
        if base.engine.is_only_writer {
            let mut db = BoundedConnection::from(&base.engine.writers, &base.engine.statements.waits).await?;
            base.sync_by(&mut db).await?;
            let appended = append(base, &mut db, note).await;
            if matches!(appended, Err(StoreError::Unreachable(_))) {
                db.cut();
            }
            return appended;
        }
        let mut db = base.engine.statements.take().await?;
        let appended = append(base, &mut db, note).await;
        db.give_back(&appended);
        return appended;
    }
    let mut tx = base.begin().await?;
    usage::note(&mut tx, note).await?;
    let mut links = base.chain.lock(&mut tx).await?;
    let committing = async {
        audit_chain::insert(&mut tx, &note.audit, &mut links).await?;
        // Audit records are never cached, so the change counter stays as it is.
        if is_audit_only { base.commit_timed(tx).await } else { base.finish(tx).await }
    };
    base.chain.in_time(committing).await?;
    links.mark_committed();
    note.sandboxes.iter().for_each(|(id, _)| base.notify_of_event(id));
    Ok(())
}

/// One statement.
async fn append(base: &StoreInner, db: &mut AnyConnection, note: &Note) -> Stored<()> {
    let mut links = base.chain.lock(db).await?;
    let began = Instant::now();
    let inserted = base.chain.in_time(audit_chain::insert(db, &note.audit, &mut links)).await;
    base.commit_times.add(began.elapsed());
    inserted?;
    links.mark_committed();
    Ok(())
}

/// Merges them: the last use of each item, and the records in their order.
fn joined<'a>(notes: impl Iterator<Item = &'a Note>) -> Note {
    let (mut sandboxes, mut keys, mut tokens, mut audit) = (BTreeMap::new(), BTreeMap::new(), Vec::new(), Vec::new());
    for note in notes {
        for (id, at) in &note.sandboxes {
            let last = sandboxes.entry(id.clone()).or_insert(*at);
            *last = (*at).max(*last);
        }
        for (id, at) in &note.keys {
            let last = keys.entry(id.clone()).or_insert(*at);
            *last = (*at).max(*last);
        }
        tokens.extend(note.tokens.iter().cloned());
        audit.extend(note.audit.iter().cloned());
    }
    Note { sandboxes: sandboxes.into_iter().collect(), keys: keys.into_iter().collect(), tokens, audit }
}

#[cfg(test)]
mod tests {
    use cobox_protocol::{KeyId, Timestamp};

    use crate::store::{Note, sqlite};

    #[tokio::test]
    async fn concurrent_writes_share_a_commit() {
        const CALLERS: usize = 100;
        let dir = tempfile::tempdir().unwrap();
        let store = std::sync::Arc::new(sqlite::open(&dir.path().join("db")).await.unwrap());
        // Blocks all writes until it is dropped.
        let held = store.base.begin().await.unwrap();
        let before = store.base.changes.count();
        let writing: Vec<_> = (0..CALLERS)
            .map(|_| {
                let (store, note) = (store.clone(), Note { keys: vec![(KeyId::new(), Timestamp::now())], ..Note::default() });
                tokio::spawn(async move { store.note(&note).await })
            })
            .collect();
        // The writer has already taken some of them, and waits for the transaction.
        while store.batch_writer.queue.state().waiting.len() < CALLERS / 2 {
            tokio::task::yield_now().await;
        }
        drop(held);
        for done in writing {
            done.await.unwrap().unwrap();
        }
        let commits = store.base.changes.count() - before;
        assert!(commits < 5, "{CALLERS} notes needed {commits} commits");
    }
}
