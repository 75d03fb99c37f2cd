//! One watched tree: keeps track of its watched directories, interprets the kernel's events, and reports changes.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use cobox_protocol::{
    Timestamp,
    exec::text_and_b64,
    fs::FileKind,
    watch::{ChangedBy, OverflowReason, WatchEvent, WatchOverflow},
};
use rustix::{
    fs::{FileType, OFlags, Stat, inotify::ReadFlags},
    io::Errno,
};
use serde::Serialize;

use super::{
    inotify::{AddError, Inotify},
    journal::Journal,
    pending::{Change, Entry, Pending},
};
use crate::{
    files::{ChangeLog, ChangeSubscription, is_temp_file_name, kind, open_beneath, refuse_kernel_files, version},
    fs::{each_name, file_kind, kind_of},
};

/// How long changes are merged before they are reported: shorter than a user notices, longer than a program's burst of
/// writes.
const WINDOW: Duration = Duration::from_millis(50);
/// Maximum number of merged changes. When it is reached they are reported at once.
const MAX_PENDING: usize = 4096;
/// Longest path of a watched directory. Deeper directories are reported as exceeding a limit.
const MAX_PATH_BYTES: usize = 4000;

pub struct Tree {
    pub key: (Vec<u8>, bool),
    pub journal: Arc<Journal>,
    /// Since when the tree has had no reader.
    pub unread_since: Option<Instant>,
    pub is_gone: bool,
    root: OwnedFd,
    top: i32,
    nodes: HashMap<i32, Node>,
    pending: Pending,
    moving: HashMap<u32, Moving>,
    /// When the first of the pending changes arrived.
    since: Option<Instant>,
    has_told_limit: bool,
    listener: ChangeSubscription,
}

struct Node {
    /// `None` for the watched directory itself.
    parent: Option<i32>,
    name: Vec<u8>,
    id: (u64, u64),
    children: HashMap<Vec<u8>, i32>,
}

/// The first half of a rename.
struct Moving {
    path: Vec<u8>,
    is_directory: bool,
    parent: (u64, u64),
    parent_wd: i32,
    name: Vec<u8>,
    /// A temporary file of boxd. Only its final path is reported.
    is_temp: bool,
}

/// State shared by all trees: run id, event numbers and the authors of changes.
pub struct Teller<'a> {
    pub life: &'a str,
    pub numbers: &'a AtomicU64,
    pub changes: &'a ChangeLog,
}

#[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
fn id(stat: &Stat) -> (u64, u64) {
    (stat.st_dev as u64, stat.st_ino as u64)
}

impl Tree {
    /// Watches a directory and, if the request is recursive, those below it.
    pub fn start(key: (Vec<u8>, bool), root: OwnedFd, inotify: &mut Inotify, teller: &Teller<'_>) -> Result<Self, AddError> {
        let top = inotify.add(&root)?;
        let stat = rustix::fs::fstat(&root).map_err(AddError::Refused)?;
        let node = Node { parent: None, name: Vec::new(), id: id(&stat), children: HashMap::new() };
        let mut tree = Self {
            key,
            journal: Arc::new(Journal::new(teller.numbers.load(Ordering::Relaxed))),
            unread_since: None,
            is_gone: false,
            root,
            top,
            nodes: HashMap::from([(top, node)]),
            pending: Pending::default(),
            moving: HashMap::new(),
            since: None,
            has_told_limit: false,
            listener: teller.changes.subscribe(),
        };
        tree.watch_below(top, None, inotify, teller);
        Ok(tree)
    }

    pub fn is_watching(&self, wd: i32) -> bool {
        self.nodes.contains_key(&wd)
    }

    /// The kernel sends no event for the removal of a directory that is open, so this is polled.
    pub fn check_top(&mut self, inotify: &mut Inotify, teller: &Teller<'_>) {
        if !self.is_gone && rustix::fs::fstat(&self.root).is_ok_and(|s| s.st_nlink == 0) {
            self.end(inotify, teller);
        }
    }

    fn end(&mut self, inotify: &mut Inotify, teller: &Teller<'_>) {
        self.flush(inotify, teller);
        self.overflow(OverflowReason::Gone, "what was watched was removed or moved away; watch it again when it is back", teller);
        self.is_gone = true;
    }

    pub fn stop(&mut self, inotify: &mut Inotify) {
        for (wd, _) in self.nodes.drain() {
            inotify.release(wd);
        }
        self.journal.end();
    }

    /// When the pending changes are due.
    pub fn due(&self) -> Option<Instant> {
        self.since.map(|at| at + WINDOW)
    }

    /// Path relative to the watched directory, with a trailing slash unless empty.
    fn path_of(&self, wd: i32) -> Vec<u8> {
        let mut names = Vec::new();
        let mut at = self.nodes.get(&wd);
        while let Some(node) = at {
            names.push(node.name.as_slice());
            at = node.parent.and_then(|p| self.nodes.get(&p));
        }
        let mut path = Vec::new();
        for name in names.iter().rev().filter(|n| !n.is_empty()) {
            path.extend_from_slice(name);
            path.push(b'/');
        }
        path
    }

    /// Handles an event of one of this tree's directories.
    pub fn take(&mut self, wd: i32, flags: ReadFlags, cookie: u32, name: Option<&[u8]>, inotify: &mut Inotify, teller: &Teller<'_>) {
        if flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT) && wd == self.top {
            return self.end(inotify, teller);
        }
        let (Some(name), Some(node)) = (name, self.nodes.get(&wd)) else { return };
        let parent = node.id;
        let is_directory = flags.contains(ReadFlags::ISDIR);
        let path = [self.path_of(wd).as_slice(), name].concat();
        // A temporary file is not reported until it is at its final path.
        let is_temp = is_temp_file_name(name);
        if is_temp && !flags.contains(ReadFlags::MOVED_FROM) {
            return;
        }
        self.since.get_or_insert_with(Instant::now);
        if flags.contains(ReadFlags::CREATE) {
            self.pending.add(path.clone(), Change::Created, is_directory, parent, None);
            self.enter_new(wd, name, path, is_directory, inotify, teller);
        } else if flags.intersects(ReadFlags::MODIFY | ReadFlags::ATTRIB) {
            self.pending.add(path, Change::Modified, is_directory, parent, None);
        } else if flags.contains(ReadFlags::DELETE) {
            self.forget(wd, name, inotify);
            self.pending.add(path, Change::Removed, is_directory, parent, None);
        } else if flags.contains(ReadFlags::MOVED_FROM) {
            self.moving.insert(cookie, Moving { path, is_directory, parent, parent_wd: wd, name: name.to_vec(), is_temp });
        } else if flags.contains(ReadFlags::MOVED_TO) {
            self.arrive(wd, cookie, name, path, is_directory, parent, inotify, teller);
        }
        if self.pending.len() >= MAX_PENDING {
            self.flush(inotify, teller);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "one event's parts, and what is needed to act on it")]
    fn arrive(
        &mut self,
        wd: i32,
        cookie: u32,
        name: &[u8],
        path: Vec<u8>,
        is_directory: bool,
        parent: (u64, u64),
        inotify: &mut Inotify,
        teller: &Teller<'_>,
    ) {
        let from = self.moving.remove(&cookie);
        let is_finished = from.as_ref().is_some_and(|f| f.is_temp);
        let Some(from) = from.filter(|f| !f.is_temp) else {
            // Moved here from outside the tree, or finished by boxd.
            self.forget(wd, name, inotify);
            let change = if is_finished && !is_directory { Change::Placed } else { Change::Created };
            self.pending.add(path.clone(), change, is_directory, parent, None);
            self.enter_new(wd, name, path, is_directory, inotify, teller);
            return;
        };
        if is_directory {
            // Pending changes below this directory have paths that are about to become invalid.
            self.tell_pending(teller);
            self.since.get_or_insert_with(Instant::now);
        }
        self.forget(wd, name, inotify);
        let moved = self.nodes.get_mut(&from.parent_wd).and_then(|n| n.children.remove(&from.name));
        if let Some(moved) = moved {
            if let Some(node) = self.nodes.get_mut(&moved) {
                node.parent = Some(wd);
                node.name = name.to_vec();
            }
            if let Some(node) = self.nodes.get_mut(&wd) {
                node.children.insert(name.to_vec(), moved);
            }
        }
        self.pending.rename(from.path, path, is_directory, parent);
    }

    /// Watches a new directory and reports its existing content.
    fn enter_new(&mut self, wd: i32, name: &[u8], path: Vec<u8>, is_directory: bool, inotify: &mut Inotify, teller: &Teller<'_>) {
        if is_directory && self.key.1 && self.watch_one(wd, name, &path, inotify, teller) {
            let child = self.nodes.get(&wd).and_then(|n| n.children.get(name)).copied();
            if let Some(child) = child {
                self.watch_below(child, Some(&path), inotify, teller);
            }
        }
    }

    /// Watches one directory below a watched one.
    fn watch_one(&mut self, parent: i32, name: &[u8], path: &[u8], inotify: &mut Inotify, teller: &Teller<'_>) -> bool {
        if path.len() > MAX_PATH_BYTES {
            self.tell_limit("directories are nested too deep to be watched", teller);
            return false;
        }
        let opened = open_beneath(&self.root, path, OFlags::RDONLY | OFlags::DIRECTORY).and_then(|fd| {
            refuse_kernel_files(&fd)?;
            let stat = rustix::fs::fstat(&fd)?;
            Ok((fd, stat))
        });
        // Removed again, or not readable for boxd.
        let Ok((directory, stat)) = opened else { return false };
        let wd = match inotify.add(&directory) {
            Ok(wd) => wd,
            Err(AddError::Limit(message)) => {
                self.tell_limit(&message, teller);
                return false;
            }
            Err(AddError::Refused(_)) => return false,
        };
        if self.nodes.contains_key(&wd) {
            // Already watched: it was moved here, and its event has not been handled yet.
            inotify.release(wd);
            self.move_node(wd, parent, name);
            return false;
        }
        self.nodes.insert(wd, Node { parent: Some(parent), name: name.to_vec(), id: id(&stat), children: HashMap::new() });
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children.insert(name.to_vec(), wd);
        }
        true
    }

    fn move_node(&mut self, wd: i32, parent: i32, name: &[u8]) {
        if wd == self.top {
            return;
        }
        let Some(node) = self.nodes.get_mut(&wd) else { return };
        let (old_parent, old_name) = (node.parent.replace(parent), std::mem::replace(&mut node.name, name.to_vec()));
        if let Some(old) = old_parent.and_then(|p| self.nodes.get_mut(&p))
            && old.children.get(&old_name) == Some(&wd)
        {
            old.children.remove(&old_name);
        }
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children.insert(name.to_vec(), wd);
        }
    }

    /// Watches everything below a directory. With `found_in`, reports existing entries too, because they may have been
    /// created before the watch.
    fn watch_below(&mut self, wd: i32, found_in: Option<&[u8]>, inotify: &mut Inotify, teller: &Teller<'_>) {
        if !self.key.1 {
            return;
        }
        // Bounded by the number of watches.
        let mut left = vec![wd];
        while let Some(wd) = left.pop() {
            let path = self.path_of(wd);
            let Some(parent) = self.nodes.get(&wd).map(|n| n.id) else { continue };
            let directory = match open_beneath(&self.root, path.strip_suffix(b"/").unwrap_or(&path), OFlags::RDONLY | OFlags::DIRECTORY) {
                Ok(directory) => directory,
                Err(_) => continue,
            };
            let mut below: Vec<Vec<u8>> = Vec::new();
            let mut is_short = false;
            // An error means that the directory has changed during the listing, which events report.
            let _ = each_name(&directory, |name, told| {
                let is_directory = kind_of(&directory, name, told) == FileType::Directory;
                if let Some(top) = found_in {
                    self.pending.add([path.as_slice(), name].concat(), Change::Created, is_directory, parent, Some(top.to_vec()));
                    if self.pending.len() >= MAX_PENDING {
                        self.tell_pending(teller);
                    }
                }
                if is_directory {
                    is_short = below.len() >= inotify.room();
                    if !is_short {
                        below.push(name.to_vec());
                    }
                }
                !is_short || found_in.is_some()
            });
            if is_short {
                self.tell_limit(&inotify.limit_message(), teller);
            }
            for name in below {
                if self.watch_one(wd, &name, &[path.as_slice(), &name].concat(), inotify, teller)
                    && let Some(child) = self.nodes.get(&wd).and_then(|n| n.children.get(&name))
                {
                    left.push(*child);
                }
            }
        }
    }

    /// Stops watching the directory that had this name, and those below it.
    fn forget(&mut self, wd: i32, name: &[u8], inotify: &mut Inotify) {
        let Some(child) = self.nodes.get_mut(&wd).and_then(|n| n.children.remove(name)) else { return };
        let mut left = vec![child];
        while let Some(wd) = left.pop() {
            if let Some(node) = self.nodes.remove(&wd) {
                inotify.release(wd);
                left.extend(node.children.into_values());
            }
        }
    }

    /// The kernel removed a watch itself because its directory is gone.
    pub fn ignored(&mut self, wd: i32, inotify: &mut Inotify) {
        if wd != self.top
            && let Some((parent, name)) = self.nodes.get(&wd).and_then(|n| Some((n.parent?, n.name.clone())))
        {
            self.forget(parent, &name, inotify);
        }
    }

    /// The kernel dropped events, so new directories may have been missed.
    pub fn kernel_overflow(&mut self, inotify: &mut Inotify, teller: &Teller<'_>) {
        self.flush(inotify, teller);
        self.overflow(OverflowReason::KernelQueue, "there were more changes than the kernel keeps; look at the files again", teller);
        self.watch_below(self.top, None, inotify, teller);
    }

    fn tell_limit(&mut self, message: &str, teller: &Teller<'_>) {
        if !std::mem::replace(&mut self.has_told_limit, true) {
            self.overflow(OverflowReason::WatchLimit, message, teller);
        }
    }

    fn overflow(&mut self, reason: OverflowReason, message: &str, teller: &Teller<'_>) {
        let number = self.tell("overflow", &WatchOverflow { reason, message: message.to_owned() }, teller);
        self.journal.publish(number);
    }

    fn tell(&self, event: &str, data: &impl Serialize, teller: &Teller<'_>) -> u64 {
        let number = teller.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        self.journal.append(number, frame(event, Some(&super::cursor(teller.life, number)), data));
        number
    }

    /// Reports all pending changes.
    pub fn flush(&mut self, inotify: &mut Inotify, teller: &Teller<'_>) {
        for (_, from) in std::mem::take(&mut self.moving) {
            if !from.is_temp {
                // Moved to a place outside this tree.
                self.forget(from.parent_wd, &from.name, inotify);
                self.pending.add(from.path, Change::Removed, from.is_directory, from.parent, None);
            }
        }
        self.since = None;
        self.tell_pending(teller);
    }

    fn tell_pending(&mut self, teller: &Teller<'_>) {
        if self.pending.is_empty() {
            return;
        }
        let mut last = None;
        // Reported new directories, with the time and author of their creation.
        let mut makers = Makers::new();
        for (path, entry) in self.pending.take() {
            if let Some(number) = self.tell_change(path, entry, &mut makers, teller) {
                last = Some(number);
            }
        }
        if let Some(last) = last {
            self.journal.publish(last);
        }
    }

    fn tell_change(&self, path: Vec<u8>, entry: Entry, makers: &mut Makers, teller: &Teller<'_>) -> Option<u64> {
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
        let stat = open_beneath(&self.root, &path, OFlags::PATH | OFlags::NOFOLLOW).and_then(rustix::fs::fstat);
        let is_removed = entry.change == Change::Removed;
        let stat = match stat {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT | Errno::NOTDIR) if !is_removed && !matches!(entry.change, Change::Renamed { .. }) => return None,
            Err(_) => None,
        };
        let key = (entry.parent.0, entry.parent.1, name);
        let seen = if is_removed { None } else { stat.as_ref().and_then(version) };
        let change = teller.changes.change(&key, seen, entry.is_directory, &self.listener);
        // The log's entry is from boxd's creation of the directory. A later modification is a program's.
        let change = change.filter(|_| !(entry.is_directory && entry.change == Change::Modified));
        let by = match &change {
            Some(change) => client(change),
            None => inherited(&entry, stat.as_ref(), makers),
        };
        let told_kind = match &stat {
            Some(stat) if !is_removed => file_kind(kind(stat)),
            _ if entry.is_directory => FileKind::Directory,
            _ => FileKind::File,
        };
        if let (true, Some(at)) = (entry.is_directory, change.as_ref().and_then(|c| c.placed_at())) {
            makers.insert(path.clone(), (at, by.clone()));
        }
        let event = match &entry.change {
            Change::Created => "created",
            Change::Modified => "modified",
            Change::Placed if change.is_some_and(|c| c.is_new) => "created",
            Change::Placed => "modified",
            Change::Removed => "removed",
            Change::Renamed { .. } => "renamed",
        };
        let full = |path: &[u8]| text_and_b64([self.key.0.as_slice(), path].concat());
        let (shown, path_b64) = full(&path);
        let at = Timestamp::now();
        let mut data = WatchEvent { path: shown, path_b64, kind: told_kind, by, at, from: None, from_b64: None, to: None, to_b64: None };
        let Change::Renamed { from, is_modified } = &entry.change else { return Some(self.tell(event, &data, teller)) };
        let (from, from_b64) = full(from);
        let plain = data.clone();
        (data.from, data.from_b64, data.to, data.to_b64) = (Some(from), from_b64, Some(data.path.clone()), data.path_b64.clone());
        let number = self.tell(event, &data, teller);
        Some(if *is_modified { self.tell("modified", &plain, teller) } else { number })
    }
}

/// New directories that were created through boxd: time and author.
type Makers = HashMap<Vec<u8>, ((i64, i64), ChangedBy)>;

fn client(change: &crate::files::RecordedChange) -> ChangedBy {
    ChangedBy::Client { principal: change.author.principal.clone(), actor: change.author.actor.to_owned() }
}

/// The author of an entry found in a new directory: the client that placed the complete directory. An entry that
/// changed after that was written by a program.
fn inherited(entry: &Entry, stat: Option<&Stat>, makers: &Makers) -> ChangedBy {
    let maker = entry.found_in.as_ref().and_then(|top| makers.get(top));
    match (maker, stat) {
        #[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
        (Some((at, by)), Some(stat)) if (stat.st_ctime as i64, stat.st_ctime_nsec as i64) <= *at => by.clone(),
        _ => ChangedBy::Process("process".into()),
    }
}

/// A server-sent event. JSON contains no line ends.
pub fn frame(event: &str, id: Option<&str>, data: &impl Serialize) -> Bytes {
    // Serializing strings and numbers doesn't fail. If it did, an empty event would be better than a panic.
    let data = serde_json::to_string(data).unwrap_or_default();
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    format!("{id}event: {event}\ndata: {data}\n\n").into()
}
