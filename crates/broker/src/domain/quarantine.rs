//! Sandboxes that the provider has and no record knows. A record is written before a sandbox is made, so an unknown sandbox means that an
//! older database was restored, or that its directory came from elsewhere. Its processes are ended and its files are kept: until the
//! database that knows it comes back, or until its time in quarantine is over.

use std::{
    collections::{HashMap, HashSet},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use cobox_protocol::{SandboxId, Timestamp};
use serde::{Deserialize, Serialize};

use super::{audit::AuditRecord, deployment::Deployment};
use crate::{
    data_dir::write_whole,
    store::{Note, Stored},
};

/// In the data directory: it must not be in the database, which may be replaced by an older one.
const FILE: &str = "quarantine.json";
/// How often the listed sandboxes are compared with what the provider has.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// A sandbox in quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantined {
    pub sandbox_id: SandboxId,
    pub since: Timestamp,
    /// When its files are removed.
    pub until: Timestamp,
}

/// The sandboxes in quarantine, in a file of the data directory.
pub struct Quarantine {
    path: PathBuf,
    keep: Duration,
    listed: Mutex<Vec<Quarantined>>,
    looked_at: Mutex<Option<Timestamp>>,
}

/// What a data directory has in quarantine, for a reader that is not its broker.
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
            // Everything in it begins its time again, which loses nothing.
            tracing::error!(%error, "{FILE} can't be read; sandboxes in quarantine are kept for their whole time again");
            Vec::new()
        });
        Self { path: data_dir.join(FILE), keep, listed: Mutex::new(listed), looked_at: Mutex::default() }
    }

    pub fn count(&self) -> usize {
        self.listed().len()
    }

    fn listed(&self) -> std::sync::MutexGuard<'_, Vec<Quarantined>> {
        self.listed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the list; one that is in it already keeps its time. Returns those that are new, and those that left it.
    fn set(&self, unknown: &HashSet<SandboxId>, now: Timestamp) -> (Vec<Quarantined>, Vec<SandboxId>) {
        let mut listed = self.listed();
        let before: HashMap<SandboxId, Quarantined> = listed.drain(..).map(|q| (q.sandbox_id.clone(), q)).collect();
        let mut added = Vec::new();
        for id in unknown {
            let since = before.get(id).map_or(now, |q| q.since);
            let entry = Quarantined { sandbox_id: id.clone(), since, until: since.plus(self.keep) };
            if !before.contains_key(id) {
                added.push(entry.clone());
            }
            listed.push(entry);
        }
        listed.sort_by(|a, b| a.sandbox_id.cmp(&b.sandbox_id));
        let left: Vec<SandboxId> = before.into_keys().filter(|id| !unknown.contains(id)).collect();
        if !listed.is_empty() || !left.is_empty() {
            self.save(&listed);
        }
        (added, left)
    }

    fn save(&self, listed: &[Quarantined]) {
        let saved = serde_json::to_vec_pretty(listed).map_err(io::Error::from).and_then(|text| write_whole(&self.path, &text));
        if let Err(error) = saved {
            // Without the file they would begin their time again at the next start, which loses nothing.
            tracing::error!(%error, "{FILE} could not be written");
        }
    }

    fn remove(&self, id: &SandboxId) {
        let mut listed = self.listed();
        listed.retain(|q| q.sandbox_id != *id);
        self.save(&listed);
    }

    fn expired(&self, now: Timestamp) -> Vec<Quarantined> {
        self.listed().iter().filter(|q| q.until <= now).cloned().collect()
    }

    /// Whether it is time to look at them again; if so it counts as done now.
    fn is_due(&self, now: Timestamp) -> bool {
        let mut looked_at = self.looked_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = looked_at.is_none_or(|at| now.saturating_since(at) >= LOOK_EVERY);
        if is_due {
            *looked_at = Some(now);
        }
        is_due && !self.listed().is_empty()
    }
}

/// Puts sandboxes that no record knows into quarantine, and takes out those that are known again. `found` says which of them run.
pub async fn quarantine_unknown(d: &Deployment, unknown: &HashSet<SandboxId>, found: &HashMap<SandboxId, bool>) {
    let (added, left) = d.quarantine.set(unknown, d.now());
    for id in left {
        tracing::info!(sandbox = %id, "a sandbox has left quarantine: the database knows it, or its files are gone");
    }
    for id in unknown.iter().filter(|id| found.get(*id).copied().unwrap_or(false)) {
        if !d.provider.can_suspend() {
            tracing::warn!(sandbox = %id, "a sandbox in quarantine goes on running: its provider can't suspend");
        } else if let Err(error) = d.provider.suspend(id).await {
            tracing::error!(sandbox = %id, %error, "the processes of a sandbox in quarantine could not be ended; the next start tries again");
        }
    }
    for Quarantined { sandbox_id, until, .. } in &added {
        tracing::error!(
            sandbox = %sandbox_id, %until,
            "the database does not know this sandbox: its processes are ended and its files are kept until then; `cobox doctor` says how to get it back"
        );
        record(d, "sandbox.quarantined", sandbox_id, format!("no record knows it; its files are kept until {until}")).await;
    }
}

/// Removes what was in quarantine for long enough, unless a record knows it by now.
pub async fn tick(d: &Deployment, now: Timestamp) {
    if !d.quarantine.is_due(now) {
        return;
    }
    match d.provider.list().await {
        Ok(found) => {
            let present: HashSet<SandboxId> = found.into_iter().map(|f| f.id).collect();
            let gone: Vec<_> = d.quarantine.listed().iter().filter(|q| !present.contains(&q.sandbox_id)).cloned().collect();
            for Quarantined { sandbox_id, .. } in gone {
                tracing::info!(sandbox = %sandbox_id, "the files of a sandbox in quarantine are gone");
                d.quarantine.remove(&sandbox_id);
            }
        }
        Err(error) => return tracing::warn!(%error, "the provider can't say what it has; quarantine is looked at again"),
    }
    for Quarantined { sandbox_id, since, .. } in d.quarantine.expired(now) {
        match is_known(d, &sandbox_id).await {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(sandbox = %sandbox_id, "a record knows a sandbox in quarantine by now; it is adopted at the next start");
                continue;
            }
            Err(error) => {
                tracing::warn!(sandbox = %sandbox_id, %error, "whether a sandbox in quarantine can go could not be read; tried again");
                continue;
            }
        }
        if let Err(error) = d.provider.destroy(&sandbox_id).await {
            tracing::error!(sandbox = %sandbox_id, %error, "a sandbox in quarantine could not be removed; tried again");
            continue;
        }
        d.quarantine.remove(&sandbox_id);
        tracing::warn!(sandbox = %sandbox_id, %since, "a sandbox was in quarantine for its whole time and is removed");
        record(d, "sandbox.destroyed", &sandbox_id, format!("no record knew it; it was in quarantine since {since}")).await;
    }
}

async fn is_known(d: &Deployment, id: &SandboxId) -> Stored<bool> {
    Ok(d.store.sandbox(id).await?.is_some_and(|sandbox| sandbox.ended_at.is_none() || sandbox.intent.is_some()))
}

async fn record(d: &Deployment, action: &'static str, id: &SandboxId, detail: String) {
    let mut audit = AuditRecord::new(d.now(), &d.config.workspace, action).detail(detail);
    audit.sandbox = Some(id.clone());
    if let Err(error) = d.store.note(&Note { audit: vec![audit], ..Note::default() }).await {
        tracing::error!(sandbox = %id, %error, action, "an audit record could not be written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listed_sandbox_keeps_its_time_over_restarts_and_leaves_when_it_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (SandboxId::new(), SandboxId::new());
        let (first, later) = (Timestamp::from_unix(1000), Timestamp::from_unix(5000));
        let keep = Duration::from_secs(10_000);
        let (added, left) = Quarantine::open(dir.path(), keep).set(&HashSet::from([a.clone()]), first);
        assert_eq!((added.len(), left.len()), (1, 0));
        let again = Quarantine::open(dir.path(), keep);
        let (added, _) = again.set(&HashSet::from([a.clone(), b.clone()]), later);
        assert_eq!(added.iter().map(|q| &q.sandbox_id).collect::<Vec<_>>(), [&b]);
        assert_eq!(again.expired(Timestamp::from_unix(11_000)).iter().map(|q| &q.sandbox_id).collect::<Vec<_>>(), [&a]);
        let (_, left) = again.set(&HashSet::from([b]), later);
        assert_eq!(left, [a]);
        assert_eq!(read(dir.path()).unwrap().len(), 1);
        std::fs::write(dir.path().join(FILE), "half").unwrap();
        assert_eq!(Quarantine::open(dir.path(), keep).count(), 0);
    }
}
