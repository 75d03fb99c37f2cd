//! Quarantine for sandboxes, snapshots and volumes that the provider has without a record in the store. A record is
//! written before its files are created, so files without a record mean that an older database was restored, or that they
//! came from elsewhere. Processes are ended and files are kept: until the database that has their records comes back, or
//! until their time in quarantine is over.

use std::{
    collections::{HashMap, HashSet},
    fmt, io,
    path::{Path, PathBuf},
    time::Duration,
};

use cobox_protocol::{ApiError, SandboxId, SnapshotId, Timestamp, VolumeId};
use cobox_provider::ProviderError;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::{
    data_dir::write_atomically,
    domain::{
        context::{BrokerContext, store_error},
        model::{AuditRecord, Sandbox},
    },
    store::{Note, Stored, TimeAccounting},
};

/// In the data directory: it must not be in the database, which may be replaced by an older one.
const FILE: &str = "quarantine.json";
/// How often the list is compared with the provider's files.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// An item that can be in quarantine. In JSON the id is in a field named after its kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum QuarantinedItem {
    #[serde(rename = "sandbox_id")]
    Sandbox(SandboxId),
    #[serde(rename = "snapshot_id")]
    Snapshot(SnapshotId),
    #[serde(rename = "volume_id")]
    Volume(VolumeId),
}

impl QuarantinedItem {
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Sandbox(_) => "sandbox",
            Self::Snapshot(_) => "snapshot",
            Self::Volume(_) => "volume",
        }
    }

    pub fn id(&self) -> &str {
        match self {
            Self::Sandbox(id) => id.as_str(),
            Self::Snapshot(id) => id.as_str(),
            Self::Volume(id) => id.as_str(),
        }
    }
}

impl fmt::Display for QuarantinedItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.id())
    }
}

/// Number of items in quarantine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuarantinedCounts {
    pub sandboxes: usize,
    pub snapshots: usize,
    pub volumes: usize,
}

/// A sandbox, snapshot or volume in quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantined {
    #[serde(flatten)]
    pub item: QuarantinedItem,
    pub since: Timestamp,
    /// When its files are removed, if a broker runs until then.
    pub until: Timestamp,
    /// Time in quarantine during which a broker ran; only this time counts.
    #[serde(default)]
    counted_seconds: u64,
    #[serde(default)]
    counted_until: Option<Timestamp>,
}

impl Quarantined {
    fn new(item: QuarantinedItem, now: Timestamp, keep: Duration) -> Self {
        Self { item, since: now, until: now.plus(keep), counted_seconds: 0, counted_until: Some(now) }
    }

    /// Adds the time since the last call, at most `max_gap` of it.
    fn count(&mut self, now: Timestamp, max_gap: Duration, keep: Duration) {
        let gap = self.counted_until.map_or(Duration::ZERO, |at| now.saturating_since(at));
        self.counted_seconds += gap.min(max_gap).as_secs();
        self.counted_until = Some(now);
        self.until = now.plus(keep.saturating_sub(Duration::from_secs(self.counted_seconds)));
    }
}

/// The list of quarantined items, in a file of the data directory.
pub struct Quarantine {
    path: PathBuf,
    keep: Duration,
    listed: Mutex<Vec<Quarantined>>,
    checked_at: Mutex<Option<Timestamp>>,
}

/// Reads the quarantine list of a data directory, for a process that is not its broker.
pub fn read(data_dir: &Path) -> io::Result<Vec<Quarantined>> {
    match std::fs::read(data_dir.join(FILE)) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

impl Quarantine {
    pub fn open(data_dir: &Path, keep: Duration) -> Self {
        let listed = read(data_dir).unwrap_or_else(|error| {
            // All items begin their time again, which loses nothing.
            tracing::error!(%error, "{FILE} can't be read; the quarantine time of every item starts again");
            Vec::new()
        });
        Self { path: data_dir.join(FILE), keep, listed: Mutex::new(listed), checked_at: Mutex::default() }
    }

    pub fn counts(&self) -> QuarantinedCounts {
        let mut counts = QuarantinedCounts::default();
        for quarantined in &*self.listed() {
            *match quarantined.item {
                QuarantinedItem::Sandbox(_) => &mut counts.sandboxes,
                QuarantinedItem::Snapshot(_) => &mut counts.snapshots,
                QuarantinedItem::Volume(_) => &mut counts.volumes,
            } += 1;
        }
        counts
    }

    fn listed(&self) -> parking_lot::MutexGuard<'_, Vec<Quarantined>> {
        self.listed.lock()
    }

    /// Replaces the list; an item that is already in it keeps its time. Returns the new items and those that left.
    fn set(&self, unknown: &HashSet<QuarantinedItem>, now: Timestamp) -> (Vec<Quarantined>, Vec<QuarantinedItem>) {
        let mut listed = self.listed();
        let before: HashMap<QuarantinedItem, Quarantined> = listed.drain(..).map(|q| (q.item.clone(), q)).collect();
        let mut added = Vec::new();
        for item in unknown {
            let entry = match before.get(item) {
                Some(entry) => entry.clone(),
                None => {
                    let entry = Quarantined::new(item.clone(), now, self.keep);
                    added.push(entry.clone());
                    entry
                }
            };
            listed.push(entry);
        }
        listed.sort_by(|a, b| a.item.cmp(&b.item));
        let left: Vec<QuarantinedItem> = before.into_keys().filter(|item| !unknown.contains(item)).collect();
        if !listed.is_empty() || !left.is_empty() {
            self.save(&listed);
        }
        (added, left)
    }

    fn save(&self, listed: &[Quarantined]) {
        let saved = serde_json::to_vec_pretty(listed).map_err(io::Error::from).and_then(|text| write_atomically(&self.path, &text));
        if let Err(error) = saved {
            // Without the file the items begin their time again at the next start, which loses nothing.
            tracing::error!(%error, "{FILE} could not be written");
        }
    }

    fn remove(&self, item: &QuarantinedItem) {
        let mut listed = self.listed();
        listed.retain(|q| q.item != *item);
        self.save(&listed);
    }

    fn expired(&self) -> Vec<Quarantined> {
        self.listed().iter().filter(|q| q.counted_seconds >= self.keep.as_secs()).cloned().collect()
    }

    /// Adds the time for which a broker ran to the listed items.
    pub fn count(&self, now: Timestamp, counting: TimeAccounting) {
        let mut listed = self.listed();
        let is_due = |q: &Quarantined| q.counted_until.is_none_or(|at| at.is_due(counting.every, now));
        if listed.iter().any(is_due) {
            listed.iter_mut().for_each(|q| q.count(now, counting.max_gap, self.keep));
            self.save(&listed);
        }
    }

    /// Whether the list is due for a check; if so, marks it as checked now.
    fn is_due(&self, now: Timestamp) -> bool {
        let mut checked_at = self.checked_at.lock();
        let is_due = checked_at.is_none_or(|at| at.is_due(CHECK_INTERVAL, now));
        if is_due {
            *checked_at = Some(now);
        }
        is_due && !self.listed().is_empty()
    }
}

/// At start: quarantines everything without a record, and releases what has a record again. `sandboxes` are those without
/// a record, and whether they run. Returns the number of new items.
pub async fn quarantine_unknown(
    context: &BrokerContext,
    quarantine: &Quarantine,
    sandboxes: &HashMap<SandboxId, bool>,
) -> Result<usize, ApiError> {
    let unreachable =
        |e: ProviderError| ApiError::new(e.code(), format!("listing the provider's sandboxes, snapshots and volumes failed: {e}"));
    let mut unknown: HashSet<QuarantinedItem> = sandboxes.keys().cloned().map(QuarantinedItem::Sandbox).collect();
    for item in stored_files(context).await.map_err(unreachable)? {
        if !is_known(context, &item).await.map_err(store_error)? {
            unknown.insert(item);
        }
    }
    let (added, left) = quarantine.set(&unknown, context.now());
    for item in left {
        tracing::info!(kind = item.kind(), id = item.id(), "released from quarantine: it has a record again, or its files no longer exist");
    }
    for id in sandboxes.iter().filter_map(|(id, is_running)| is_running.then_some(id)) {
        if !context.provider.can_suspend() {
            tracing::warn!(sandbox = %id, "a quarantined sandbox keeps running, because its provider can't suspend");
        } else if let Err(error) = context.provider.suspend(id).await {
            tracing::error!(sandbox = %id, %error, "ending the processes of a quarantined sandbox failed; the next start retries");
        }
    }
    for Quarantined { item, until, .. } in &added {
        tracing::error!(
            kind = item.kind(), id = item.id(), %until,
            "quarantined a {} without a record in the database; `cobox doctor` explains how to restore it", item.kind()
        );
        let action = match item {
            QuarantinedItem::Sandbox(_) => "sandbox.quarantined",
            QuarantinedItem::Snapshot(_) => "snapshot.quarantined",
            QuarantinedItem::Volume(_) => "volume.quarantined",
        };
        record(context, action, item, format!("no record knows it; its files are kept until {until}")).await;
    }
    Ok(added.len())
}

/// Removes items whose time in quarantine is over, unless a record has appeared.
pub async fn tick(context: &BrokerContext, quarantine: &Quarantine, now: Timestamp) {
    if !quarantine.is_due(now) {
        return;
    }
    let found = async {
        let mut found: HashSet<QuarantinedItem> = stored_files(context).await?.into_iter().collect();
        found.extend(context.provider.list().await?.into_iter().map(|f| QuarantinedItem::Sandbox(f.id)));
        Ok::<_, ProviderError>(found)
    };
    let present = match found.await {
        Ok(found) => found,
        Err(error) => {
            return tracing::warn!(%error, "listing the provider's objects failed; checking quarantine again later");
        }
    };
    let gone: Vec<_> = quarantine.listed().iter().filter(|q| !present.contains(&q.item)).cloned().collect();
    for Quarantined { item, .. } in gone {
        tracing::info!(kind = item.kind(), id = item.id(), "the files of a quarantined item no longer exist");
        quarantine.remove(&item);
    }
    for Quarantined { item, since, .. } in quarantine.expired() {
        let (kind, id) = (item.kind(), item.id());
        match is_known(context, &item).await {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(kind, id, "a quarantined item has a record again; it is adopted at the next start");
                continue;
            }
            Err(error) => {
                tracing::warn!(kind, id, %error, "reading the record of a quarantined item failed; retrying");
                continue;
            }
        }
        let (removed, action) = match &item {
            QuarantinedItem::Sandbox(id) => (context.provider.destroy(id).await, "sandbox.destroyed"),
            QuarantinedItem::Snapshot(id) => (context.provider.remove_snapshot(id).await, "snapshot.deleted"),
            QuarantinedItem::Volume(id) => (context.provider.remove_volume(id).await, "volume.deleted"),
        };
        if let Err(error) = removed {
            tracing::error!(kind, id, %error, "removing a quarantined item failed; retrying");
            continue;
        }
        quarantine.remove(&item);
        tracing::warn!(kind, id, %since, "removed a quarantined item; its quarantine time is over");
        record(context, action, &item, format!("no record knew it; it was in quarantine since {since}")).await;
    }
}

/// The snapshots and volumes that the provider has.
async fn stored_files(context: &BrokerContext) -> Result<Vec<QuarantinedItem>, ProviderError> {
    let (snapshots, volumes) = (context.provider.snapshots().await?, context.provider.volumes().await?);
    Ok(snapshots.into_iter().map(QuarantinedItem::Snapshot).chain(volumes.into_iter().map(QuarantinedItem::Volume)).collect())
}

async fn is_known(context: &BrokerContext, item: &QuarantinedItem) -> Stored<bool> {
    Ok(match item {
        QuarantinedItem::Sandbox(id) => {
            let has_files = |s: &Sandbox| s.ended_at.is_none() || s.intent.is_some() || s.restore_until.is_some();
            context.store.sandbox(id).await?.as_ref().is_some_and(has_files)
        }
        QuarantinedItem::Snapshot(id) => context.store.snapshot(id).await?.is_some(),
        QuarantinedItem::Volume(id) => context.store.volume(id).await?.is_some(),
    })
}

async fn record(context: &BrokerContext, action: &'static str, item: &QuarantinedItem, detail: String) {
    let mut audit = AuditRecord::new(context.now(), &context.config.workspace, action);
    audit.detail = match item {
        QuarantinedItem::Sandbox(id) => {
            audit.sandbox = Some(id.clone());
            Some(detail)
        }
        QuarantinedItem::Snapshot(_) | QuarantinedItem::Volume(_) => Some(format!("{}: {detail}", item.id())),
    };
    if let Err(error) = context.store.note(&Note { audit: vec![audit], ..Note::default() }).await {
        tracing::error!(%item, %error, action, "writing an audit record failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarantined_item_keeps_its_time_across_restarts_and_leaves_when_it_has_a_record() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (QuarantinedItem::Sandbox(SandboxId::new()), QuarantinedItem::Volume(VolumeId::new()));
        let (first, later) = (Timestamp::from_unix(1000), Timestamp::from_unix(1060));
        let keep = Duration::from_secs(60);
        let quarantine = Quarantine::open(dir.path(), keep);
        let (added, left) = quarantine.set(&HashSet::from([a.clone()]), first);
        assert_eq!((added.len(), left.len()), (1, 0));
        quarantine.count(later, TimeAccounting::REGULAR);
        let again = Quarantine::open(dir.path(), keep);
        let (added, _) = again.set(&HashSet::from([a.clone(), b.clone()]), later);
        assert_eq!(added.iter().map(|q| &q.item).collect::<Vec<_>>(), [&b]);
        assert_eq!(again.expired().iter().map(|q| &q.item).collect::<Vec<_>>(), [&a]);
        let (_, left) = again.set(&HashSet::from([b]), later);
        assert_eq!(left, [a]);
        assert_eq!(read(dir.path()).unwrap().len(), 1);
        std::fs::write(dir.path().join(FILE), "half").unwrap();
        assert_eq!(Quarantine::open(dir.path(), keep).counts(), QuarantinedCounts::default());
    }

    #[test]
    fn time_without_a_broker_and_clock_jumps_do_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let keep = Duration::from_secs(100);
        let at = Timestamp::from_unix;
        Quarantine::open(dir.path(), keep).set(&HashSet::from([QuarantinedItem::Sandbox(SandboxId::new())]), at(0));
        let quarantine = Quarantine::open(dir.path(), keep);
        quarantine.count(at(1_000_000), TimeAccounting::START);
        quarantine.count(at(1_000_000 + 86_400), TimeAccounting::REGULAR);
        quarantine.count(at(500_000), TimeAccounting::REGULAR);
        assert!(quarantine.expired().is_empty());
        assert_eq!(read(dir.path()).unwrap()[0].until, at(500_000 + 40));
        quarantine.count(at(500_040), TimeAccounting::REGULAR);
        assert_eq!(quarantine.expired().len(), 1);
    }
}
