//! Notices that the database is older than its data directory, which means that it was restored from a backup.
//!
//! A mark outside the database says how far this broker's audit chain had come. Records about keys and revocations are
//! kept beside it: an operator must know which of them the database no longer has.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use cobox_protocol::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    data_dir::write_atomically,
    store::{AuditGap, AuditProgress, MarkedRecord, Store, Stored},
};

/// File with the end of the chain.
const MARK_FILE: &str = "audit-mark.json";
/// Records about keys and revocations, one JSON object per line.
const RECORDS_FILE: &str = "audit-mark.jsonl";
/// Above this size the older half of the records is dropped: about five thousand records.
const MAX_RECORDS_BYTES: u64 = 1 << 20;
/// Numbers that the chain leaves out for lost records, while no later record shows the gap. During an outage also the
/// number of records that wait to be written: they are lost if the process is killed.
const GAP_FILE: &str = "audit-gap.json";
/// Result of a start with an older database.
const RESTORED_FILE: &str = "restored.json";
/// How often the mark is written while only uses are recorded. Records about keys and revocations are written at the next
/// tick.
const MARK_INTERVAL: Duration = Duration::from_secs(10);
/// A database that lacks no more than this after a crash, and no marked record, lost it in a power cut: not every commit
/// waits for the disk.
const MAX_POWER_CUT_LOSS: Duration = Duration::from_secs(60);
/// How long a stop waits for an unreachable database.
const SYNC_WITHIN: Duration = Duration::from_secs(5);
/// Maximum number of lost records that are logged at start. The file lists all of them.
const MAX_LOGGED: usize = 100;

/// End of this broker's chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    number: u64,
    hash: String,
    at: Timestamp,
    /// Everything up to here is synced to disk, as after a stop: a power cut can't lose it.
    #[serde(default)]
    is_on_disk: bool,
}

/// Description of a database that was older than its data directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    pub noticed_at: Timestamp,
    /// Time of this broker's last record in the database.
    pub database_at: Option<Timestamp>,
    /// Time until which this data directory was in use before.
    pub seen_at: Timestamp,
    /// Numbers of the first and last lost audit record in the chain.
    pub first_lost: u64,
    pub last_lost: u64,
    /// Hash of the last lost record. A database that has it is the one that was in use before.
    last_hash: String,
    /// Lost records about keys and revocations.
    pub lost: Vec<MarkedRecord>,
    /// Set when an operator confirmed that it was dealt with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acknowledged_at: Option<Timestamp>,
}

/// Loss of only a few records, which alone doesn't prove that a backup was restored.
pub struct UnsyncedLoss {
    restored: Restored,
    /// The database is the one that was in use before the last restore.
    is_back: bool,
}

/// Reads the result of the last start with an older database, for a process that is not the broker.
pub fn read_restored(data_dir: &Path) -> io::Result<Option<Restored>> {
    read_json(&data_dir.join(RESTORED_FILE))
}

/// Confirms that an operator dealt with a restored database. Returns whether there was an unacknowledged one. The file
/// stays: it is needed to recognize the database that was in use before.
pub fn acknowledge_restored(data_dir: &Path, now: Timestamp) -> io::Result<bool> {
    let Some(restored) = read_restored(data_dir)?.filter(|r| r.acknowledged_at.is_none()) else { return Ok(false) };
    let text = serde_json::to_vec_pretty(&Restored { acknowledged_at: Some(now), ..restored })?;
    write_atomically(&data_dir.join(RESTORED_FILE), &text)?;
    Ok(true)
}

/// Writes the mark of one data directory.
pub struct AuditMark {
    dir: PathBuf,
    written: Mutex<Option<(u64, Timestamp)>>,
    saved_gap: Mutex<SavedGap>,
    /// Records that wait for an outage of the database to end.
    unwritten: AtomicU64,
}

#[derive(Default)]
struct SavedGap {
    /// The gap in its file.
    gap: Option<AuditGap>,
    /// The last attempt to write the file failed, which is in the log.
    has_failed: bool,
}

impl AuditMark {
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), written: Mutex::default(), saved_gap: Mutex::default(), unwritten: AtomicU64::default() }
    }

    /// Compares the database with the mark, before anything is written to the chain. A small loss must be passed to
    /// [`AuditMark::settle`].
    pub async fn compare(&self, store: &Store, writer: &str, now: Timestamp) -> Stored<Option<UnsyncedLoss>> {
        let is_back = match self.read::<Restored>(RESTORED_FILE) {
            Some(before) => hash_of(store, writer, before.last_lost).await? == Some(before.last_hash),
            None => false,
        };
        let Some((restored, is_on_disk)) = self.loss(store, writer, now).await? else {
            if is_back {
                self.forget_restore();
            }
            return Ok(None);
        };
        let is_recent = restored.database_at.is_some_and(|at| restored.seen_at.saturating_since(at) <= MAX_POWER_CUT_LOSS);
        if restored.lost.is_empty() && (is_back || is_recent && !is_on_disk) {
            return Ok(Some(UnsyncedLoss { restored, is_back }));
        }
        self.report(&restored);
        Ok(None)
    }

    /// Classifies a small loss once the number of newly quarantined items is known: new items prove that a backup was
    /// restored.
    pub fn settle(&self, loss: UnsyncedLoss, quarantined: usize) {
        let UnsyncedLoss { restored, is_back } = loss;
        if quarantined > 0 {
            self.report(&restored);
        } else if is_back {
            self.forget_restore();
        } else {
            let Restored { first_lost, last_lost, .. } = restored;
            tracing::warn!(first_lost, last_lost, "the last audit records before a crash were not on disk");
        }
    }

    /// Marks that were written since the restore belong to the other database.
    fn forget_restore(&self) {
        tracing::info!("the database from before the last restore is in use again");
        [MARK_FILE, RECORDS_FILE, RESTORED_FILE].into_iter().for_each(|file| self.remove(file));
    }

    /// What the database lacks, and whether all of it had been synced to disk.
    async fn loss(&self, store: &Store, writer: &str, now: Timestamp) -> Stored<Option<(Restored, bool)>> {
        let Some(mark) = self.newest() else { return Ok(None) };
        let head = store.audit_heads().await?.into_iter().find(|h| h.writer == writer);
        let (end, kept_after) = head.map_or((0, 0), |h| (h.number, h.kept_after));
        let is_there = mark.number <= kept_after || hash_of(store, writer, mark.number).await?.as_ref() == Some(&mark.hash);
        if is_there {
            return Ok(None);
        }
        // A database that was restored and written to since has different records under the same numbers.
        let mut shared = end.min(mark.number.saturating_sub(1));
        let lost = self.lost(store, writer, &mut shared).await?;
        let last = store.audit_links(writer, shared.saturating_sub(1), 1).await?.into_iter().next();
        let restored = Restored {
            noticed_at: now,
            database_at: last.filter(|_| shared > 0).map(|l| l.record.at),
            seen_at: mark.at,
            first_lost: shared + 1,
            last_lost: mark.number,
            last_hash: mark.hash.clone(),
            lost,
            acknowledged_at: None,
        };
        Ok(Some((restored, mark.is_on_disk)))
    }

    /// The mark, or the last marked record if a crash prevented the mark from being written.
    fn newest(&self) -> Option<Mark> {
        let record = self.records().pop().map(|r| Mark { number: r.number, hash: r.hash, at: r.at, is_on_disk: false });
        record.into_iter().chain(self.read::<Mark>(MARK_FILE)).max_by_key(|mark| mark.number)
    }

    /// The marked records that the database lacks. Lowers `shared` to the last number known to be common to both.
    async fn lost(&self, store: &Store, writer: &str, shared: &mut u64) -> Stored<Vec<MarkedRecord>> {
        let mut lost = Vec::new();
        for record in self.records() {
            let is_lost = record.number > *shared || hash_of(store, writer, record.number).await?.is_some_and(|hash| hash != record.hash);
            if is_lost {
                *shared = (*shared).min(record.number.saturating_sub(1));
                lost.push(record);
            }
        }
        Ok(lost)
    }

    fn report(&self, restored: &Restored) {
        let Restored { database_at, seen_at, first_lost, last_lost, lost, .. } = restored;
        let age = database_at.map_or_else(|| "of unknown age".to_owned(), |at| format!("from {at}"));
        tracing::error!(
            %age, %seen_at, records = last_lost.saturating_sub(*first_lost) + 1,
            "the database is older than this data directory: a backup was restored; later changes are lost"
        );
        for record in lost.iter().take(MAX_LOGGED) {
            tracing::error!(%record, "lost with the newer database; repeat it if it still matters");
        }
        if lost.len() > MAX_LOGGED {
            tracing::error!(count = lost.len() - MAX_LOGGED, "more records were lost; {RESTORED_FILE} lists all of them");
        }
        let written = serde_json::to_vec_pretty(restored).map_err(io::Error::from);
        if let Err(error) = written.and_then(|text| write_atomically(&self.dir.join(RESTORED_FILE), &text)) {
            tracing::error!(%error, "writing {RESTORED_FILE} failed");
        }
        // From here on, the restored database is the reference.
        self.remove(MARK_FILE);
        self.remove(RECORDS_FILE);
    }

    /// Hands the gap of a process that was killed to the store, so that its lost records are still missed. Call before
    /// anything is written to the chain.
    pub async fn restore_gap(&self, store: &Store, writer: &str) -> Stored<()> {
        let after = store.audit_heads().await?.into_iter().find(|h| h.writer == writer).map_or(0, |h| h.number);
        let saved = self.read::<AuditGap>(GAP_FILE);
        // What was written since has the first of these numbers, or comes after the gap. An older database has none of it.
        let count = saved.map_or(0, |gap| gap.after.saturating_add(gap.count).saturating_sub(after).min(gap.count));
        store.set_audit_gap(AuditGap { after, count });
        self.saved_gap.lock().gap = saved;
        Ok(())
    }

    /// Records that wait for an outage of the database to end.
    pub fn unwritten(&self) -> u64 {
        self.unwritten.load(Ordering::Relaxed)
    }

    /// Sets how many records wait for an outage of the database to end, and saves the gap that they leave if this process
    /// is killed.
    pub fn save_unwritten(&self, store: &Store, count: u64) {
        self.unwritten.store(count, Ordering::Relaxed);
        self.save_gap(store);
    }

    /// Saves the numbers that the next record will leave out, and those of records that still wait. Best effort: on a full
    /// disk this fails too, and is retried in each round of the reaper.
    pub fn save_gap(&self, store: &Store) {
        let mut saved = self.saved_gap.lock();
        let AuditGap { after, count } = store.audit_gap();
        let gap = Some(AuditGap { after, count: count.saturating_add(self.unwritten()) }).filter(|gap| gap.count > 0);
        if saved.gap == gap {
            return;
        }
        let done = match &gap {
            Some(gap) => {
                serde_json::to_vec(gap).map_err(io::Error::from).and_then(|text| write_atomically(&self.dir.join(GAP_FILE), &text))
            }
            None => fs::remove_file(self.dir.join(GAP_FILE)),
        };
        match done {
            Ok(()) => *saved = SavedGap { gap, has_failed: false },
            Err(error) => {
                if !std::mem::replace(&mut saved.has_failed, true) {
                    tracing::warn!(%error, "updating {GAP_FILE} failed; retrying");
                }
            }
        }
    }

    /// Saves how far the chain has come.
    pub async fn save(&self, store: &Store, now: Timestamp) {
        self.save_gap(store);
        let (head, is_new) = self.append_new(store).await;
        let Some((number, hash)) = head else { return };
        let written = *self.written.lock();
        let is_due = written.is_none_or(|(last, at)| last != number && (is_new || now.saturating_since(at) >= MARK_INTERVAL));
        if !is_due {
            return;
        }
        self.write(&Mark { number, hash: hex::encode(hash), at: now, is_on_disk: false });
    }

    /// As [`AuditMark::save`], for a stop: first syncs everything recorded so far to disk.
    pub async fn close(&self, store: &Store, now: Timestamp) {
        self.save_gap(store);
        let mark = match self.append_new(store).await.0 {
            Some((number, hash)) => Mark { number, hash: hex::encode(hash), at: now, is_on_disk: true },
            // Nothing was recorded since the start.
            None => match self.newest() {
                Some(mark) => Mark { is_on_disk: true, ..mark },
                None => return,
            },
        };
        // A synced write also brings everything before it to disk.
        match tokio::time::timeout(SYNC_WITHIN, store.probe_write(now)).await {
            Ok(Ok(())) => self.write(&mark),
            Ok(Err(error)) => tracing::warn!(%error, "syncing the last changes to disk failed"),
            Err(_) => tracing::warn!("syncing the last changes to disk timed out"),
        }
    }

    /// Saves the new records about keys and revocations. Returns the end of the chain, and whether there were any.
    async fn append_new(&self, store: &Store) -> (Option<(u64, [u8; 32])>, bool) {
        let AuditProgress { head, records } = store.audit_progress().await;
        if !records.is_empty()
            && let Err(error) = self.append(&records)
        {
            tracing::warn!(%error, "writing {RECORDS_FILE} failed");
        }
        (head, !records.is_empty())
    }

    fn write(&self, mark: &Mark) {
        let text = serde_json::to_vec(mark).map_err(io::Error::from);
        match text.and_then(|text| write_atomically(&self.dir.join(MARK_FILE), &text)) {
            Ok(()) => *self.written.lock() = Some((mark.number, mark.at)),
            Err(error) => tracing::warn!(%error, "writing {MARK_FILE} failed"),
        }
    }

    fn append(&self, records: &[MarkedRecord]) -> io::Result<()> {
        let path = self.dir.join(RECORDS_FILE);
        if fs::metadata(&path).is_ok_and(|m| m.len() > MAX_RECORDS_BYTES) {
            let kept = self.records();
            let newer = &kept[kept.len() / 2..];
            write_atomically(&path, lines(newer)?.as_bytes())?;
        }
        let mut file = File::options().create(true).append(true).mode(0o600).open(&path)?;
        file.write_all(lines(records)?.as_bytes())
    }

    /// A line that can't be parsed was cut off by a crash.
    fn records(&self) -> Vec<MarkedRecord> {
        let text = fs::read_to_string(self.dir.join(RECORDS_FILE)).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// An unreadable file counts as absent.
    fn read<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        read_json(&self.dir.join(name)).unwrap_or_else(|error| {
            tracing::warn!(%error, name, "a file of the data directory can't be read");
            None
        })
    }

    fn remove(&self, name: &str) {
        match fs::remove_file(self.dir.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => tracing::warn!(%error, name, "removing an old file failed"),
            _ => {}
        }
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

fn lines(records: &[MarkedRecord]) -> io::Result<String> {
    let mut text = String::new();
    for record in records {
        text += &serde_json::to_string(record)?;
        text.push('\n');
    }
    Ok(text)
}

/// Hash of a record of a chain, if the database has it.
async fn hash_of(store: &Store, writer: &str, number: u64) -> Stored<Option<String>> {
    let found = store.audit_links(writer, number.saturating_sub(1), 1).await?;
    Ok(found.into_iter().next().filter(|l| l.number == number).map(|l| hex::encode(l.hash)))
}
