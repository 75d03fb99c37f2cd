//! The audit chain of this broker: each record is linked to the one before it, in commit order.
//!
//! A lock is held from the moment a record gets its number until its commit has completed, so that no record is linked to
//! one that isn't committed in the end. It is the last lock a transaction takes, and it is held for a bounded time: a
//! database that doesn't answer in time is given up. If it is unknown whether a commit succeeded, the next lock holder
//! reads the chain's end from the database. A second process that writes under the same name fails on the number, which
//! is unique; so does a commit that was given up and arrives late.

use std::sync::{
    Arc, LazyLock, OnceLock,
    atomic::{AtomicU64, Ordering},
};

use cobox_protocol::{RequestId, Timestamp};
use sqlx::{AnyConnection, Row, any::AnyRow};
use tokio::{
    sync::{Mutex, MutexGuard},
    time::timeout,
};

use super::{
    asked, audit_records, multi_row, rows,
    transaction::{DatabaseTimeouts, timed_out},
};
use crate::{
    audit_hash::{Content, Hash, NOTHING, from_hex, link, seal},
    domain::model::AuditRecord,
    store::{AuditGap, AuditProgress, AuditSeal, ChainHead, ChainLink, MarkedRecord, Store, Stored},
};

/// Writer of a record that is not linked yet: a random value that is in no committed row and unknown outside this
/// process, so that rows inserted by other parties never become links.
pub fn pending_writer() -> &'static str {
    static WORD: LazyLock<String> = LazyLock::new(|| {
        let mut random = [0u8; 16];
        // A guessable value would let others write into the chain.
        getrandom::fill(&mut random).expect("the kernel's random source is available");
        format!("pending-{}", hex::encode(random))
    });
    &WORD
}

/// Name of a seal in the table of agreed values.
fn seal_name(writer: &str) -> String {
    format!("audit seal of {writer}")
}

/// Actions that are also recorded outside the database: restoring an older database would forget new keys and revive
/// revoked ones.
const MARKED_ACTIONS: [&str; 8] = [
    "key.created",
    "key.revoked",
    "key.expires",
    "principal.disabled",
    "principal.enabled",
    "tokens.revoked",
    "session.unshared",
    "sandbox.key_rotated",
];
/// Maximum number of marked records waiting to be collected; a broker collects them every second. Above it the oldest are
/// dropped.
const MAX_MARKED: usize = 10_000;

pub struct Chain {
    writer: OnceLock<String>,
    /// Numbers that the next record leaves out.
    gap: parking_lot::Mutex<AuditGap>,
    /// Committed records of [`MARKED_ACTIONS`] that were not collected yet.
    marked: parking_lot::Mutex<Vec<MarkedRecord>>,
    sealing: OnceLock<[u8; 32]>,
    /// The last link, if known.
    head: Mutex<Option<Head>>,
    /// Number of connections opened to the database. A new one may lead to a server that was restarted and has lost
    /// commits without a sync, so the last link is read again.
    connections: Arc<AtomicU64>,
    timeouts: DatabaseTimeouts,
}

#[derive(Clone, Copy)]
struct Head {
    number: u64,
    hash: Hash,
    connections: u64,
}

impl Chain {
    pub fn new(connections: Arc<AtomicU64>, timeouts: DatabaseTimeouts) -> Self {
        Self {
            writer: OnceLock::new(),
            gap: parking_lot::Mutex::default(),
            marked: parking_lot::Mutex::default(),
            sealing: OnceLock::new(),
            head: Mutex::new(None),
            connections,
            timeouts,
        }
    }

    /// Must be called before anything is written; only the first call has an effect.
    pub fn write_as(&self, writer: &str) {
        let _ = self.writer.set(writer.to_owned());
    }

    pub fn seal_with(&self, key: [u8; 32]) {
        let _ = self.sealing.set(key);
    }

    pub fn sealing(&self) -> Option<&[u8; 32]> {
        self.sealing.get()
    }

    /// A store without a configured name gets a unique one, so that no two stores write the same chain.
    pub fn writer(&self) -> &str {
        self.writer.get_or_init(|| format!("unnamed-{}", RequestId::new().as_str().trim_start_matches("req_")))
    }

    /// Locks the end of the chain, for a caller that is about to write and commit on this connection.
    pub async fn lock(&self, db: &mut AnyConnection) -> Stored<Links<'_>> {
        let DatabaseTimeouts { turn, .. } = self.timeouts;
        let mut guard = timeout(turn, self.head.lock()).await.map_err(|_| timed_out("another commit", turn))?;
        let connections = self.connections.load(Ordering::SeqCst);
        let known = guard.take().filter(|head| head.connections == connections);
        let head = match known {
            Some(head) => head,
            None => {
                let (number, hash) = self.in_time(begin(db, self.writer())).await?;
                Head { number, hash, connections }
            }
        };
        let skipped = {
            let mut gap = self.gap.lock();
            gap.after = head.number;
            gap.count
        };
        Ok(Links { chain: self, writer: self.writer(), guard, head, to_skip: skipped, skipped: 0, marked: Vec::new() })
    }

    /// Lost records leave a gap, which a verification finds.
    pub fn skip(&self, count: u64) {
        self.gap.lock().count += count;
    }

    pub fn gap(&self) -> AuditGap {
        *self.gap.lock()
    }

    pub fn set_gap(&self, gap: AuditGap) {
        *self.gap.lock() = gap;
    }

    pub fn take_marked(&self) -> Vec<MarkedRecord> {
        std::mem::take(&mut *self.marked.lock())
    }

    /// Limits a database operation of the lock holder. After the limit its result is unknown.
    pub async fn in_time<T>(&self, asked: impl Future<Output = Stored<T>>) -> Stored<T> {
        let DatabaseTimeouts { commit, .. } = self.timeouts;
        timeout(commit, asked).await.map_err(|_| timed_out("a commit", commit))?
    }

    /// The last link as this process knows it.
    pub async fn head(&self) -> Option<(u64, Hash)> {
        self.head.lock().await.map(|h| (h.number, h.hash))
    }
}

/// If this is dropped before [`Links::mark_committed`], the end of the chain is unknown until it is read from the
/// database.
pub struct Links<'a> {
    chain: &'a Chain,
    pub writer: &'a str,
    guard: MutexGuard<'a, Option<Head>>,
    head: Head,
    /// Numbers to leave out before the first link. Without a link they stay for the next commit.
    to_skip: u64,
    /// Numbers that were left out.
    skipped: u64,
    marked: Vec<MarkedRecord>,
}

impl Links<'_> {
    pub fn add(&mut self, record: &AuditRecord) -> (u64, Hash) {
        self.skipped += self.to_skip;
        let number = self.head.number.saturating_add(std::mem::take(&mut self.to_skip)) + 1;
        let hash = link(self.writer, number, &self.head.hash, &content(record).digest());
        self.head = Head { number, hash, ..self.head };
        if MARKED_ACTIONS.contains(&&*record.action) {
            self.marked.push(MarkedRecord {
                number,
                hash: hex::encode(hash),
                at: record.at,
                action: record.action.clone().into_owned(),
                workspace: record.workspace.clone(),
                principal: record.principal.clone(),
                detail: record.detail.clone(),
            });
        }
        (number, hash)
    }

    pub fn mark_committed(mut self) {
        *self.guard = Some(self.head);
        {
            let mut gap = self.chain.gap.lock();
            *gap = AuditGap { after: self.head.number, count: gap.count.saturating_sub(self.skipped) };
        }
        if !self.marked.is_empty() {
            let mut marked = self.chain.marked.lock();
            marked.append(&mut self.marked);
            let excess = marked.len().saturating_sub(MAX_MARKED);
            marked.drain(..excess);
        }
    }
}

pub fn content(r: &AuditRecord) -> Content<'_> {
    Content {
        at: r.at,
        workspace: &r.workspace,
        action: &r.action,
        request_id: r.request_id.as_ref().map(|i| i.as_str()),
        principal: r.principal.as_deref(),
        actor: r.actor.as_deref(),
        thread: r.thread.as_deref(),
        session: r.session.as_ref().map(|i| i.as_str()),
        sandbox: r.sandbox.as_ref().map(|i| i.as_str()),
        jti: r.jti.as_deref(),
        detail: r.detail.as_deref(),
    }
}

/// The end of a writer's chain in the database; creates the chain if it is new.
async fn begin(db: &mut AnyConnection, writer: &str) -> Stored<(u64, Hash)> {
    sqlx::query("INSERT INTO audit_anchors (writer, number, hash) VALUES ($1, 0, $2) ON CONFLICT (writer) DO NOTHING")
        .bind(writer)
        .bind(&NOTHING[..])
        .execute(&mut *db)
        .await?;
    last(db, writer).await
}

async fn last(db: &mut AnyConnection, writer: &str) -> Stored<(u64, Hash)> {
    let newest = sqlx::query("SELECT number, hash FROM audit WHERE writer = $1 AND number IS NOT NULL ORDER BY number DESC LIMIT 1")
        .bind(writer)
        .fetch_optional(&mut *db)
        .await?;
    match newest {
        Some(row) => Ok((rows::count(&row, "number")?, hash(&row)?)),
        None => anchor(db, writer).await,
    }
}

/// The link that the oldest kept record refers to.
async fn anchor(db: &mut AnyConnection, writer: &str) -> Stored<(u64, Hash)> {
    let row = sqlx::query("SELECT number, hash FROM audit_anchors WHERE writer = $1").bind(writer).fetch_optional(db).await?;
    row.map_or(Ok((0, NOTHING)), |row| Ok((rows::count(&row, "number")?, hash(&row)?)))
}

fn hash(row: &AnyRow) -> Stored<Hash> {
    row.try_get::<&[u8], _>("hash")?.try_into().map_err(|_| rows::corrupt("hash", "not 32 bytes"))
}

/// The records that this transaction has added and that are not linked yet, oldest first.
pub async fn pending(tx: &mut AnyConnection) -> Stored<Vec<(i64, AuditRecord)>> {
    let found = sqlx::query("SELECT * FROM audit WHERE writer = $1 AND number IS NULL ORDER BY sequence")
        .bind(pending_writer())
        .fetch_all(tx)
        .await?;
    found.iter().map(|row| Ok((row.try_get("sequence")?, rows::audit(row)?))).collect()
}

pub async fn link_all(tx: &mut AnyConnection, pending: &[(i64, AuditRecord)], links: &mut Links<'_>) -> Stored<()> {
    for (sequence, record) in pending {
        let (number, hash) = links.add(record);
        sqlx::query("UPDATE audit SET writer = $2, number = $3, hash = $4 WHERE sequence = $1")
            .bind(sequence)
            .bind(links.writer)
            .bind(i64::try_from(number).unwrap_or(i64::MAX))
            .bind(&hash[..])
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}

/// Every chain that has a beginning or records.
pub async fn heads(db: &mut AnyConnection, sealing: Option<&[u8; 32]>) -> Stored<Vec<ChainHead>> {
    let mut heads = Vec::new();
    let mut after = String::new();
    loop {
        // One after the other by the index: reading all records would be too many.
        let row = sqlx::query(
            "SELECT min(writer) AS writer FROM
             (SELECT min(writer) AS writer FROM audit WHERE writer > $1 UNION ALL SELECT min(writer) AS writer FROM audit_anchors WHERE writer > $1) AS w",
        )
        .bind(&after)
        .fetch_one(&mut *db)
        .await?;
        let Some(writer) = row.try_get::<Option<String>, _>("writer")? else { return Ok(heads) };
        let (number, hash) = last(db, &writer).await?;
        let (kept_after, kept_after_hash) = anchor(db, &writer).await?;
        // Without a sealing key this can't be verified.
        let is_beginning_sealed = match sealing.filter(|_| kept_after > 0) {
            Some(key) => sealed(db, &writer).await? == Some((kept_after, seal(key, &writer, kept_after, &kept_after_hash))),
            None => true,
        };
        heads.push(ChainHead { writer: writer.clone(), number, hash, kept_after, kept_after_hash, is_beginning_sealed });
        after = writer;
    }
}

/// The last seal of a writer's chain.
async fn sealed(db: &mut AnyConnection, writer: &str) -> Stored<Option<(u64, Hash)>> {
    let row = sqlx::query("SELECT value FROM agreed WHERE name = $1").bind(seal_name(writer)).fetch_optional(db).await?;
    let Some(row) = row else { return Ok(None) };
    let value: &str = row.try_get("value")?;
    // An unreadable seal counts as none.
    Ok(value.split_once(' ').and_then(|(number, seal)| Some((number.parse().ok()?, from_hex(seal)?))))
}

pub async fn write_seal(tx: &mut AnyConnection, AuditSeal { writer, number, seal }: &AuditSeal) -> Stored<()> {
    sqlx::query("INSERT INTO agreed (name, value) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value")
        .bind(seal_name(writer))
        .bind(format!("{number} {}", hex::encode(seal)))
        .execute(tx)
        .await?;
    Ok(())
}

/// A writer's links after a number, oldest first.
pub async fn links(db: &mut AnyConnection, writer: &str, after: u64, limit: u32) -> Stored<Vec<ChainLink>> {
    let found = sqlx::query("SELECT * FROM audit WHERE writer = $1 AND number > $2 ORDER BY number LIMIT $3")
        .bind(writer)
        .bind(i64::try_from(after).unwrap_or(i64::MAX))
        .bind(i64::from(limit))
        .fetch_all(db)
        .await?;
    let read = |row: &AnyRow| {
        // Returned unchecked: verification is the reader's task.
        let hash: Option<Vec<u8>> = row.try_get("hash")?;
        Ok(ChainLink {
            number: rows::count(row, "number")?,
            hash: hash.unwrap_or_default(),
            sequence: rows::count(row, "sequence")?,
            record: rows::audit(row)?,
        })
    };
    found.iter().map(read).collect()
}

/// Removes older records, but only from the beginning of each chain, and stores the chain's new beginning. A record's
/// time may come from an untrusted sandbox; an old record among newer ones stays until those are old.
pub async fn prune(tx: &mut AnyConnection, before: Timestamp, sealing: Option<&[u8; 32]>) -> Stored<()> {
    sqlx::query("DELETE FROM audit WHERE writer IS NULL AND at < $1").bind(before.unix()).execute(&mut *tx).await?;
    for head in heads(tx, sealing).await? {
        let first_kept = sqlx::query("SELECT number FROM audit WHERE writer = $1 AND at >= $2 ORDER BY number LIMIT 1")
            .bind(&head.writer)
            .bind(before.unix())
            .fetch_optional(&mut *tx)
            .await?;
        let cut = first_kept.map_or(Ok(head.number), |row| rows::count(&row, "number").map(|n| n.saturating_sub(1)))?;
        // A beginning that was cut by another party must not be sealed.
        if cut <= head.kept_after || !head.is_beginning_sealed {
            continue;
        }
        let row = sqlx::query("SELECT hash FROM audit WHERE writer = $1 AND number = $2")
            .bind(&head.writer)
            .bind(i64::try_from(cut).unwrap_or(i64::MAX))
            .fetch_optional(&mut *tx)
            .await?;
        // A missing record is found by a verification; nothing after it is removed.
        let Some(row) = row else { continue };
        let last = hash(&row)?;
        sqlx::query("UPDATE audit_anchors SET number = $2, hash = $3 WHERE writer = $1")
            .bind(&head.writer)
            .bind(i64::try_from(cut).unwrap_or(i64::MAX))
            .bind(&last[..])
            .execute(&mut *tx)
            .await?;
        if let Some(key) = sealing {
            let seal = seal(key, &head.writer, cut, &last);
            write_seal(tx, &AuditSeal { writer: head.writer.clone(), number: cut, seal }).await?;
        }
        sqlx::query("DELETE FROM audit WHERE writer = $1 AND number <= $2")
            .bind(&head.writer)
            .bind(i64::try_from(cut).unwrap_or(i64::MAX))
            .execute(&mut *tx)
            .await?;
    }
    Ok(())
}

/// Inserts records with their links in one statement.
pub async fn insert(tx: &mut AnyConnection, records: &[AuditRecord], links: &mut Links<'_>) -> Stored<()> {
    for records in records.chunks(multi_row::ROWS_AT_ONCE) {
        let linked: Vec<(u64, Hash)> = records.iter().map(|record| links.add(record)).collect();
        audit_records::insert(tx, records, links.writer, &linked).await?;
    }
    Ok(())
}

impl Store {
    /// Sets the writer whose chain this store's audit records are linked into. Must be called before anything is written.
    pub fn write_as(&self, writer: &str) {
        self.base.chain.write_as(writer);
    }

    /// Sets the key that signs the removal of old records. Must be called before anything is removed.
    pub fn seal_with(&self, key: [u8; 32]) {
        self.base.chain.seal_with(key);
    }

    /// Leaves a gap of `count` numbers before the next record of this store's own chain, for records that could not be
    /// written.
    pub fn skip_audit(&self, count: u64) {
        self.base.chain.skip(count);
    }

    /// The gap that the next record will leave; its count is 0 if there is none.
    pub fn audit_gap(&self) -> AuditGap {
        self.base.chain.gap()
    }

    /// Sets the gap of a process that ended before it wrote the next record. Must be called before anything is written.
    pub fn set_audit_gap(&self, gap: AuditGap) {
        self.base.chain.set_gap(gap);
    }

    /// End of this store's own chain, and the records committed since the last call that a data directory keeps in its
    /// mark.
    pub async fn audit_progress(&self) -> AuditProgress {
        // The records first: if the head is newer than them, the rest follows next time.
        let records = self.base.chain.take_marked();
        AuditProgress { head: self.base.chain.head().await, records }
    }

    /// The end of every chain of audit records. For this store's own chain, as far as this process has written it.
    pub async fn audit_heads(&self) -> Stored<Vec<ChainHead>> {
        let own = self.base.chain.head().await;
        let mut heads = asked!(self, db => heads(db, self.base.chain.sealing()))?;
        if let (Some((number, hash)), Some(head)) = (own, heads.iter_mut().find(|h| h.writer == self.base.chain.writer()))
            && number > head.number
        {
            // The database has less than was written to it.
            (head.number, head.hash) = (number, hash);
        }
        Ok(heads)
    }

    /// A chain's links after a number, oldest first.
    pub async fn audit_links(&self, writer: &str, after: u64, limit: u32) -> Stored<Vec<ChainLink>> {
        asked!(self, db => links(db, writer, after, limit))
    }
}
