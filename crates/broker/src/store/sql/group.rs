//! Notes that wait at the same time share a transaction: a commit is a sync of the disk, and one can be for many.
//!
//! Nobody waits for company: whoever comes while nothing is being written is written at once, alone; those who come meanwhile
//! are written together after it. So one caller has one commit's delay, and many have at most two.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{
    Base, chain,
    lent::{Lent, gave_up},
    notes,
};
use crate::store::{Note, StoreError, Stored};

/// Callers that may wait in line; the next ones wait to get into it. More than a broker has connections in use at once.
const QUEUE: usize = 1024;
/// Notes written together: a transaction of a few milliseconds.
const AT_ONCE: usize = 256;

struct Waiting {
    note: Note,
    done: oneshot::Sender<Stored<()>>,
}

pub struct Group(mpsc::Sender<Waiting>);

impl Group {
    /// Its writer ends with the last sender, when everything is written.
    pub fn start(base: Arc<Base>) -> Self {
        let (sender, queue) = mpsc::channel(QUEUE);
        tokio::spawn(write(base, queue));
        Self(sender)
    }

    /// Returns when the note is durable. It is written also when its caller goes away.
    pub async fn write(&self, note: Note) -> Stored<()> {
        let ended = || StoreError::Failed("the broker is ending".to_owned());
        let (done, is_done) = oneshot::channel();
        self.0.send(Waiting { note, done }).await.map_err(|_| ended())?;
        is_done.await.map_err(|_| ended())?
    }
}

async fn write(base: Arc<Base>, mut queue: mpsc::Receiver<Waiting>) {
    let mut waiting = Vec::with_capacity(AT_ONCE);
    while queue.recv_many(&mut waiting, AT_ONCE).await > 0 {
        let together = write_one(&base, &joined(waiting.iter().map(|w| &w.note))).await;
        // One that the database refuses must not take the others with it; when there is no database, each would wait as long again.
        let is_each_tried = waiting.len() > 1 && matches!(together, Err(StoreError::Failed(_) | StoreError::Corrupt(_)));
        for Waiting { note, done } in waiting.drain(..) {
            let outcome = if is_each_tried { write_one(&base, &note).await } else { together.clone() };
            // Whoever waited may have gone away.
            let _ = done.send(outcome);
        }
    }
}

/// Everybody else's notes wait for this one: it doesn't wait for the database without end.
async fn write_one(base: &Base, note: &Note) -> Stored<()> {
    let patience = base.engine.patience.turn + base.engine.patience.commit;
    timeout(patience, write_now(base, note)).await.map_err(|_| gave_up("writing", patience))?
}

async fn write_now(base: &Base, note: &Note) -> Stored<()> {
    let is_audit_only = note.sandboxes.is_empty() && note.keys.is_empty() && note.tokens.is_empty();
    if is_audit_only && note.audit.len() <= notes::ROWS_AT_ONCE && !base.engine.is_only_writer {
        // One statement is a transaction of its own, without two more trips to the server.
        let mut db = Lent::from(&base.engine.writers).await?;
        let mut links = base.chain.lock(&mut db).await?;
        let began = Instant::now();
        let inserted = base.chain.in_time(chain::insert(&mut db, &note.audit, &mut links)).await;
        base.commit_times.add(began.elapsed());
        if let Err(error) = inserted {
            if matches!(error, StoreError::Unreachable(_)) {
                db.cut();
            }
            return Err(error);
        }
        links.are_committed();
        return Ok(());
    }
    let mut tx = base.begin().await?;
    notes::note(&mut tx, note).await?;
    let mut links = base.chain.lock(&mut tx).await?;
    let committing = async {
        chain::insert(&mut tx, &note.audit, &mut links).await?;
        // Nobody remembers audit records, which come with every request.
        if is_audit_only { base.commit_timed(tx).await } else { base.finish(tx).await }
    };
    base.chain.in_time(committing).await?;
    links.are_committed();
    note.sandboxes.iter().for_each(|(id, _)| base.tell_news(id));
    Ok(())
}

/// All of them as one: the last use of each thing, and the records in the order they came.
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

    use crate::store::{Note, Store, sql::sqlite};

    #[tokio::test]
    async fn those_who_wait_at_the_same_time_share_a_commit() {
        const CALLERS: usize = 100;
        let dir = tempfile::tempdir().unwrap();
        let store = std::sync::Arc::new(sqlite::open(&dir.path().join("db")).await.unwrap());
        // Nobody can write until this is given up.
        let held = store.base.begin().await.unwrap();
        let before = store.base.changes.count();
        let writing: Vec<_> = (0..CALLERS)
            .map(|_| {
                let (store, note) = (store.clone(), Note { keys: vec![(KeyId::new(), Timestamp::now())], ..Note::default() });
                tokio::spawn(async move { store.note(&note).await })
            })
            .collect();
        // The writer has taken some of them along already, and waits for its turn.
        while store.group.0.capacity() > super::QUEUE - CALLERS / 2 {
            tokio::task::yield_now().await;
        }
        drop(held);
        for done in writing {
            done.await.unwrap().unwrap();
        }
        let commits = store.base.changes.count() - before;
        assert!(commits < 5, "{CALLERS} notes took {commits} commits");
    }
}
