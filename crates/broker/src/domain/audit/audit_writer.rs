//! The audit trail. Changes are recorded in the transaction that makes them; uses of the dataplane are queued and written
//! in batches.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::timeout,
};

use super::restore_detection::AuditMark;
use crate::{
    domain::model::AuditRecord,
    store::{Note, Store},
};

/// Records waiting to be written. When the disk can't keep up, requests wait: no record is lost silently. While the
/// database is away they don't: a batch that still can't be written when the queue is full is lost.
const QUEUE_RECORDS: usize = 4096;
/// How long records are collected for one transaction. Each transaction is a disk sync and rewrites the same pages.
const BATCH_WINDOW: Duration = Duration::from_millis(100);
/// Records per transaction. When this many are queued, the batch is written without waiting.
const BATCH_RECORDS: usize = 512;
/// Pauses between attempts to write a batch. They double until a database that is back is noticed within seconds.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// How often the number of records that wait is saved while a batch can't be written. Each time is a disk sync.
const SAVE_UNWRITTEN_INTERVAL: Duration = Duration::from_secs(1);
/// How long a broker that stops goes on trying. Service managers kill it after 90 s.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

enum QueueEntry {
    Record(Box<AuditRecord>),
    Flush(oneshot::Sender<()>),
}

/// Queues records of uses and writes them in the background.
#[derive(Clone)]
pub struct AuditTrail {
    queue: mpsc::Sender<QueueEntry>,
    /// Makes the writer stop collecting and write the batch now.
    write_now: Arc<Notify>,
    lost: Arc<AtomicU64>,
    /// Set when the broker stops.
    closes_at: Arc<OnceLock<Instant>>,
}

impl AuditTrail {
    /// Writing a batch is retried for `retry_for`. The mark has the number of records that are lost, or would be if the
    /// process was killed. The writer ends when the last clone is dropped and everything is written.
    pub fn start(store: Arc<Store>, mark: Arc<AuditMark>, retry_for: Duration) -> Self {
        let (sender, queue) = mpsc::channel(QUEUE_RECORDS);
        let trail = Self { queue: sender, write_now: Arc::default(), lost: Arc::default(), closes_at: Arc::default() };
        let Self { write_now, lost, closes_at, .. } = trail.clone();
        tokio::spawn(Writer { store, mark, queue, write_now, lost, closes_at, retry_for }.run());
        trail
    }

    /// Records that could not be written since the broker started.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    pub async fn add(&self, record: AuditRecord) {
        // The writer lives as long as its sender. The send only fails while the process ends, when nothing can be
        // reported any more.
        let _ = self.queue.send(QueueEntry::Record(Box::new(record))).await;
        if QUEUE_RECORDS - self.queue.capacity() >= BATCH_RECORDS {
            self.write_now.notify_one();
        }
    }

    /// Returns when all records added before are durable.
    pub async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        if self.queue.send(QueueEntry::Flush(done)).await.is_ok() {
            self.write_now.notify_one();
            // An error means that the writer has ended, after writing all its records.
            let _ = is_done.await;
        }
    }

    /// As [`AuditTrail::flush`], for a stop: retries end soon.
    pub async fn close(&self) {
        let _ = self.closes_at.set(Instant::now() + CLOSE_WITHIN);
        self.flush().await;
    }
}

struct Writer {
    store: Arc<Store>,
    mark: Arc<AuditMark>,
    queue: mpsc::Receiver<QueueEntry>,
    write_now: Arc<Notify>,
    lost: Arc<AtomicU64>,
    closes_at: Arc<OnceLock<Instant>>,
    retry_for: Duration,
}

impl Writer {
    async fn run(mut self) {
        // Lost records that no `audit.lost` record explains yet, also of a process that was killed.
        let mut unexplained = self.store.audit_gap().count;
        let mut entries = Vec::with_capacity(BATCH_RECORDS);
        while self.queue.recv_many(&mut entries, BATCH_RECORDS).await > 0 {
            if entries.len() < BATCH_RECORDS && entries.iter().all(|e| matches!(e, QueueEntry::Record(_))) {
                // Ends early when a caller waits for a flush or enough records are queued. After that, takes all that are
                // queued.
                let _ = timeout(BATCH_WINDOW, self.write_now.notified()).await;
                while entries.len() < BATCH_RECORDS
                    && let Ok(entry) = self.queue.try_recv()
                {
                    entries.push(entry);
                }
            }
            let mut audit = Vec::new();
            let mut waiting = Vec::new();
            for entry in entries.drain(..) {
                match entry {
                    QueueEntry::Record(record) => audit.push(*record),
                    QueueEntry::Flush(done) => waiting.push(done),
                }
            }
            let count = audit.len() as u64;
            if unexplained > 0 && count > 0 {
                audit.insert(0, gap_record(&audit[0], unexplained));
            }
            if self.write(Note { audit, ..Note::default() }, count).await {
                unexplained = if count > 0 { 0 } else { unexplained };
                if self.mark.unwritten() > 0 {
                    // Less than a batch is the normal backlog.
                    let backlog = self.queue.len() as u64;
                    self.mark.save_unwritten(&self.store, if backlog < BATCH_RECORDS as u64 { 0 } else { backlog });
                }
            } else {
                // The gap in record numbers shows how many are missing.
                self.store.skip_audit(count);
                self.mark.save_unwritten(&self.store, self.queue.len() as u64);
                self.lost.fetch_add(count, Ordering::Relaxed);
                unexplained += count;
            }
            for done in waiting {
                // The caller of `flush` may have stopped waiting.
                let _ = done.send(());
            }
        }
    }

    /// Writes a batch of `count` records. While that takes long, saves how many wait, so that a process that is killed
    /// leaves a gap. Returns false when the batch is lost.
    async fn write(&self, note: Note, count: u64) -> bool {
        let mut writing = std::pin::pin!(self.write_with_retries(note, count));
        loop {
            match timeout(SAVE_UNWRITTEN_INTERVAL, &mut writing).await {
                Ok(is_written) => return is_written,
                Err(_) => self.save_unwritten(count),
            }
        }
    }

    /// Includes the callers of `flush`, of which there is one at a stop.
    fn save_unwritten(&self, batch: u64) {
        self.mark.save_unwritten(&self.store, batch + self.queue.len() as u64);
    }

    /// Writes the records, with retries. Returns false when the records are lost: the time is over, or the queue is full and
    /// requests wait for it.
    async fn write_with_retries(&self, note: Note, count: u64) -> bool {
        let gives_up_at = Instant::now() + self.retry_for;
        let mut pause = FIRST_PAUSE;
        loop {
            let Err(error) = self.store.note(&note).await else { return true };
            self.save_unwritten(count);
            let is_late = |at: Instant| Instant::now() + pause > at;
            let is_over = is_late(gives_up_at) || self.closes_at.get().copied().is_some_and(is_late);
            if is_over || self.queue.len() >= QUEUE_RECORDS {
                tracing::error!(%error, count, "audit records could not be written and are lost; check the database and its disk");
                return false;
            }
            tracing::warn!(%error, count, "writing audit records failed; retrying");
            let _ = timeout(pause, self.wait_until_queue_is_full()).await;
            pause = (2 * pause).min(MAX_PAUSE);
        }
    }

    async fn wait_until_queue_is_full(&self) {
        while self.queue.len() < QUEUE_RECORDS {
            self.write_now.notified().await;
        }
    }
}

/// The record that explains the gap before it.
fn gap_record(next: &AuditRecord, count: u64) -> AuditRecord {
    AuditRecord::new(next.at, &next.workspace, "audit.lost").detail(format!(
        "{count} records before this one could not be written: the database took no writes for too long, or until the broker was killed"
    ))
}
