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
    count: u64,
    by_name: HashMap<Arc<NameKey>, Change>,
    oldest_first: VecDeque<(Arc<NameKey>, u64)>,
}

/// How a change left a name, and who made it.
#[derive(Clone)]
pub struct Change {
    number: u64,
    version: Version,
    /// A removal is recorded before it is tried; until then nothing that is seen of the name can be later than it.
    is_done: bool,
    /// Whom a removal can tell nothing more: nothing is left that shows whether a name went away a second time.
    spent_for: Vec<u64>,
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
            let mut changes = self.changes();
            *changes = Changes { count: changes.count, ..Changes::default() };
        }
    }

    /// For somebody who watches from now on.
    pub fn listen(&self) -> Listener {
        let mut changes = self.changes();
        changes.count += 1;
        Listener { since: changes.count }
    }

    /// The change that left a name in this state, if it was done through boxd.
    /// A directory's own version changes with what is put into it, so only its inode counts.
    /// A removal is told to each listener once: the next one of that name may be a program's.
    pub fn change(&self, key: &NameKey, version: Version, is_directory: bool, to: &Listener) -> Option<Change> {
        let inode = |v: Version| v.map(|(inode, ..)| inode);
        let is_same = |seen: Version| if is_directory { inode(seen) == inode(version) } else { seen == version };
        let mut changes = self.changes();
        let change = changes.by_name.get_mut(key)?;
        if change.version.is_some() {
            return is_same(change.version).then(|| change.clone());
        }
        let is_news = change.number > to.since && !change.spent_for.contains(&to.since);
        // Something else at the name, after it was taken away, is the end of that removal too.
        if is_news && (version.is_none() || change.is_done) {
            change.spent_for.push(to.since);
        }
        (is_news && version.is_none()).then(|| change.clone())
    }

    fn changes(&self) -> std::sync::MutexGuard<'_, Changes> {
        // A change forgotten is told as a program's.
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing where nobody watches; else where it was recorded, and what it took the place of.
    fn record(&self, directory: impl AsFd, name: &[u8], version: Version, is_new: bool, who: &Arc<Who>) -> Option<Recorded> {
        if !self.is_watched.load(Ordering::Acquire) {
            return None;
        }
        let stat = rustix::fs::fstat(directory).ok()?;
        #[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
        let key = Arc::new((stat.st_dev as u64, stat.st_ino as u64, name.to_vec()));
        let mut changes = self.changes();
        changes.count += 1;
        let number = changes.count;
        let change = Change { number, version, is_done: version.is_some(), spent_for: Vec::new(), is_new, who: who.clone() };
        let before = changes.by_name.insert(key.clone(), change);
        changes.oldest_first.push_back((key.clone(), number));
        if changes.oldest_first.len() > REMEMBERED_CHANGES
            && let Some((oldest, number)) = changes.oldest_first.pop_front()
            && changes.by_name.get(&oldest).is_some_and(|c| c.number == number)
        {
            changes.by_name.remove(&oldest);
        }
        Some(Recorded { key, number, before })
    }
}

/// One who watches, known by the number of the last change before.
pub struct Listener {
    since: u64,
}

struct Recorded {
    key: Arc<NameKey>,
    number: u64,
    before: Option<Change>,
}

/// A removal about to be tried. Dropped before it is `done`, it was none.
#[must_use]
pub struct Removal<'a> {
    log: &'a ChangeLog,
    recorded: Option<Recorded>,
}

impl Removal<'_> {
    /// The name is gone.
    pub fn done(mut self) {
        let Some(Recorded { key, number, .. }) = self.recorded.take() else { return };
        if let Some(change) = self.log.changes().by_name.get_mut(&key).filter(|c| c.number == number) {
            change.is_done = true;
        }
    }
}

impl Drop for Removal<'_> {
    fn drop(&mut self) {
        let Some(Recorded { key, number, before }) = self.recorded.take() else { return };
        let mut changes = self.log.changes();
        if changes.by_name.get(&key).is_none_or(|c| c.number != number) {
            return;
        }
        match before {
            // With the newer number, by which it is forgotten in time.
            Some(before) if before.version.is_some() => changes.by_name.insert(key, Change { number, ..before }),
            _ => changes.by_name.remove(&key),
        };
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
        Self { log, who: Arc::new(Who { principal: claims.sub.clone(), actor: claims.act.kind.as_str() }) }
    }

    /// A name now stands for something else, or is there for the first time.
    pub fn placed(&self, directory: impl AsFd, name: &[u8], stat: &Stat, is_new: bool) {
        self.log.record(directory, name, version(stat), is_new, &self.who);
    }

    /// A name is about to be taken away: said before, because a watcher may hear of it sooner than this thread goes on.
    pub fn removes(&self, directory: impl AsFd, name: &[u8]) -> Removal<'_> {
        Removal { log: &self.log, recorded: self.log.record(directory, name, None, false, &self.who) }
    }
}
