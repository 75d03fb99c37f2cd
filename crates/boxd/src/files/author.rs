//! Who changed a file through boxd: remembered for a while, so that whoever watches is told a name and not just that something happened.

use std::{
    collections::{HashMap, VecDeque},
    os::fd::AsFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use cobox_token::Claims;
use rustix::fs::Stat;

/// How many of boxd's own changes are remembered: more than are made within the moment in which a watcher asks.
const REMEMBERED_CHANGES: usize = 64 * 1024;

/// A person or an agent.
#[derive(Debug, PartialEq, Eq)]
pub struct Who {
    pub principal: String,
    pub actor: &'static str,
}

/// boxd's own changes by directory and name. Empty while nobody watches.
#[derive(Default)]
pub struct ChangeLog {
    is_watched: AtomicBool,
    changes: Mutex<Changes>,
}

#[derive(Default)]
struct Changes {
    by_name: HashMap<Arc<NameKey>, Change>,
    oldest_first: VecDeque<Arc<NameKey>>,
}

/// How a change left a name, and who made it.
#[derive(Clone)]
pub struct Change {
    version: Version,
    pub is_new: bool,
    pub who: Arc<Who>,
}

impl Change {
    /// When it was put there; nothing for what was taken away.
    pub fn placed_at(&self) -> Option<(i64, i64)> {
        self.version.map(|(_, seconds, nanoseconds)| (seconds, nanoseconds))
    }
}

/// A directory's device and inode, and a name in it.
pub type NameKey = (u64, u64, Vec<u8>);
/// A file's inode and the moment of its last change; nothing for what was taken away.
pub type Version = Option<(u64, i64, i64)>;

#[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
pub fn version(stat: &Stat) -> Version {
    Some((stat.st_ino as u64, stat.st_ctime as i64, stat.st_ctime_nsec as i64))
}

impl ChangeLog {
    pub fn set_watched(&self, is_watched: bool) {
        self.is_watched.store(is_watched, Ordering::Release);
        if !is_watched {
            *self.changes() = Changes::default();
        }
    }

    /// The change that left a name in this state, if it was done through boxd.
    /// A directory's own version changes with what is put into it, so only its inode counts.
    pub fn change(&self, key: &NameKey, version: Version, is_directory: bool) -> Option<Change> {
        let inode = |v: Version| v.map(|(inode, ..)| inode);
        let is_same = |seen: Version| if is_directory { inode(seen) == inode(version) } else { seen == version };
        self.changes().by_name.get(key).filter(|change| is_same(change.version)).cloned()
    }

    fn changes(&self) -> std::sync::MutexGuard<'_, Changes> {
        // A change forgotten is told as a program's.
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, directory: impl AsFd, name: &[u8], change: Change) {
        if !self.is_watched.load(Ordering::Acquire) {
            return;
        }
        let Ok(stat) = rustix::fs::fstat(directory) else { return };
        #[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
        let key = Arc::new((stat.st_dev as u64, stat.st_ino as u64, name.to_vec()));
        let mut changes = self.changes();
        let changes = &mut *changes;
        if changes.by_name.insert(key.clone(), change).is_none() {
            changes.oldest_first.push_back(key);
            if changes.oldest_first.len() > REMEMBERED_CHANGES
                && let Some(oldest) = changes.oldest_first.pop_front()
            {
                changes.by_name.remove(&oldest);
            }
        }
    }
}

/// Signs the changes of one request.
#[derive(Clone)]
pub struct Author {
    log: Arc<ChangeLog>,
    who: Arc<Who>,
}

impl Author {
    pub fn new(log: Arc<ChangeLog>, claims: &Claims) -> Self {
        Self { log, who: Arc::new(Who { principal: claims.sub.clone(), actor: claims.act.kind.word() }) }
    }

    /// A name now stands for something else, or is there for the first time.
    pub fn placed(&self, directory: impl AsFd, name: &[u8], stat: &Stat, is_new: bool) {
        self.log.record(directory, name, Change { version: version(stat), is_new, who: self.who.clone() });
    }

    /// A name is about to be taken away.
    pub fn removes(&self, directory: impl AsFd, name: &[u8]) {
        self.log.record(directory, name, Change { version: None, is_new: false, who: self.who.clone() });
    }
}
