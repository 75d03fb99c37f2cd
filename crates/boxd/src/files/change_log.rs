//! Remembers for a while which client changed a file through boxd, so that watchers get the author of a change.

use std::{
    collections::{HashMap, VecDeque},
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cobox_token::Claims;
use parking_lot::Mutex;
use rustix::fs::Stat;

/// Maximum number of remembered changes: more than are made in the time until a watcher looks one up.
const REMEMBERED_CHANGES: usize = 64 * 1024;

/// A human or an agent.
#[derive(Debug, PartialEq, Eq)]
pub struct ChangeAuthor {
    pub principal: String,
    pub actor: &'static str,
}

/// boxd's own changes by directory and name. Empty while no tree is watched.
#[derive(Default)]
pub struct ChangeLog {
    is_watched: AtomicBool,
    changes: Mutex<Changes>,
}

#[derive(Default)]
struct Changes {
    count: u64,
    by_name: HashMap<Arc<NameKey>, RecordedChange>,
    oldest_first: VecDeque<(Arc<NameKey>, u64)>,
}

/// The state in which a change left a name, and its author.
#[derive(Clone)]
pub struct RecordedChange {
    number: u64,
    version: Version,
    /// A removal is recorded before it is attempted. Until it is done, an existing file of this name can't be newer
    /// than it.
    is_done: bool,
    /// Listeners for which this removal is used up. Nothing left on disk shows whether a name was removed a second
    /// time.
    reported_to: Vec<u64>,
    pub is_new: bool,
    pub author: Arc<ChangeAuthor>,
}

impl RecordedChange {
    /// When the file was placed; `None` for a removal.
    pub fn placed_at(&self) -> Option<(i64, i64)> {
        self.version.map(|(_, seconds, nanoseconds)| (seconds, nanoseconds))
    }
}

/// A directory's device and inode, and a name in it.
pub type NameKey = (u64, u64, Vec<u8>);
/// A file's inode and ctime; `None` for a removal.
pub type Version = Option<(u64, i64, i64)>;

#[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
pub fn version(stat: &Stat) -> Version {
    Some((stat.st_ino as u64, stat.st_ctime as i64, stat.st_ctime_nsec as i64))
}

impl ChangeLog {
    pub fn set_watched(&self, is_watched: bool) {
        self.is_watched.store(is_watched, Ordering::Release);
        if !is_watched {
            let mut changes = self.changes();
            *changes = Changes { count: changes.count, ..Changes::default() };
        }
    }

    /// Registers a watcher of future changes.
    pub fn subscribe(&self) -> ChangeSubscription {
        let mut changes = self.changes();
        changes.count += 1;
        ChangeSubscription { since: changes.count }
    }

    /// The change that left a name in this state, if it was made through boxd. A directory's ctime changes with its
    /// content, so only its inode is compared. A removal is reported to each listener once, because the next removal of
    /// that name may be a program's.
    pub fn change(&self, key: &NameKey, version: Version, is_directory: bool, subscription: &ChangeSubscription) -> Option<RecordedChange> {
        let inode = |v: Version| v.map(|(inode, ..)| inode);
        let is_same = |recorded: Version| if is_directory { inode(recorded) == inode(version) } else { recorded == version };
        let mut changes = self.changes();
        let change = changes.by_name.get_mut(key)?;
        if change.version.is_some() {
            return is_same(change.version).then(|| change.clone());
        }
        let is_unreported = change.number > subscription.since && !change.reported_to.contains(&subscription.since);
        // Something else at the name after the removal uses the removal up as well.
        if is_unreported && (version.is_none() || change.is_done) {
            change.reported_to.push(subscription.since);
        }
        (is_unreported && version.is_none()).then(|| change.clone())
    }

    fn changes(&self) -> parking_lot::MutexGuard<'_, Changes> {
        // A forgotten change is attributed to a program.
        self.changes.lock()
    }

    /// Records a change and returns what it replaced; `None` while no tree is watched.
    fn record(
        &self,
        directory: impl AsFd,
        name: &[u8],
        version: Version,
        is_new: bool,
        author: &Arc<ChangeAuthor>,
    ) -> Option<LoggedChange> {
        if !self.is_watched.load(Ordering::Acquire) {
            return None;
        }
        let stat = rustix::fs::fstat(directory).ok()?;
        #[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
        let key = Arc::new((stat.st_dev as u64, stat.st_ino as u64, name.to_vec()));
        let mut changes = self.changes();
        changes.count += 1;
        let number = changes.count;
        let change =
            RecordedChange { number, version, is_done: version.is_some(), reported_to: Vec::new(), is_new, author: author.clone() };
        let previous = changes.by_name.insert(key.clone(), change);
        changes.oldest_first.push_back((key.clone(), number));
        if changes.oldest_first.len() > REMEMBERED_CHANGES
            && let Some((oldest, number)) = changes.oldest_first.pop_front()
            && changes.by_name.get(&oldest).is_some_and(|c| c.number == number)
        {
            changes.by_name.remove(&oldest);
        }
        Some(LoggedChange { key, number, previous })
    }
}

/// A watcher, identified by the number of the last change before it.
pub struct ChangeSubscription {
    since: u64,
}

struct LoggedChange {
    key: Arc<NameKey>,
    number: u64,
    previous: Option<RecordedChange>,
}

/// A removal that is about to be attempted. If it is dropped before `commit`, it did not happen.
#[must_use]
pub struct PendingRemoval<'a> {
    log: &'a ChangeLog,
    logged: Option<LoggedChange>,
}

impl PendingRemoval<'_> {
    /// The name was removed.
    pub fn commit(mut self) {
        let Some(LoggedChange { key, number, .. }) = self.logged.take() else { return };
        if let Some(change) = self.log.changes().by_name.get_mut(&key).filter(|c| c.number == number) {
            change.is_done = true;
        }
    }
}

impl Drop for PendingRemoval<'_> {
    fn drop(&mut self) {
        let Some(LoggedChange { key, number, previous }) = self.logged.take() else { return };
        let mut changes = self.log.changes();
        if changes.by_name.get(&key).is_none_or(|c| c.number != number) {
            return;
        }
        match previous {
            // With the newer number, which is the one in the expiry queue.
            Some(previous) if previous.version.is_some() => changes.by_name.insert(key, RecordedChange { number, ..previous }),
            _ => changes.by_name.remove(&key),
        };
    }
}

/// Records the changes of one request under its client.
#[derive(Clone)]
pub struct ChangeRecorder {
    log: Arc<ChangeLog>,
    author: Arc<ChangeAuthor>,
}

impl ChangeRecorder {
    pub fn new(log: Arc<ChangeLog>, claims: &Claims) -> Self {
        Self { log, author: Arc::new(ChangeAuthor { principal: claims.sub.clone(), actor: claims.act.kind.as_str() }) }
    }

    /// A file was created or replaced at this name.
    pub fn record_placed(&self, directory: impl AsFd, name: &[u8], stat: &Stat, is_new: bool) {
        self.log.record(directory, name, version(stat), is_new, &self.author);
    }

    /// A name is about to be removed. Recorded in advance, because a watcher may see the removal before this thread
    /// continues.
    pub fn begin_removal(&self, directory: impl AsFd, name: &[u8]) -> PendingRemoval<'_> {
        PendingRemoval { log: &self.log, logged: self.log.record(directory, name, None, false, &self.author) }
    }
}
