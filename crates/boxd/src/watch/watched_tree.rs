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
    pending_changes::{PathChange, PendingChange, PendingChanges},
};
use crate::{
    files::{ChangeLog, ChangeSubscription, is_temp_file_name, kind, open_beneath, refuse_kernel_files, version},
    fs::{entry_type, file_kind, for_each_name},
};

/// How long changes are merged before they are reported: shorter than a user notices, longer than a program's burst of
/// writes.
const WINDOW: Duration = Duration::from_millis(50);
/// Maximum number of merged changes. When it is reached they are reported at once.
const MAX_PENDING: usize = 4096;
/// Longest path of a watched directory. Deeper directories are reported as exceeding a limit.
const MAX_PATH_BYTES: usize = 4000;

pub struct WatchedTree {
    pub key: (Vec<u8>, bool),
    pub journal: Arc<Journal>,
    /// Since when the tree has had no reader.
    pub unread_since: Option<Instant>,
    pub is_gone: bool,
    root: OwnedFd,
    root_wd: i32,
    nodes: HashMap<i32, Node>,
    pending: PendingChanges,
    pending_renames: HashMap<u32, PendingRename>,
    /// When the first of the pending changes arrived.
    first_pending_at: Option<Instant>,
    has_published_limit: bool,
    subscription: ChangeSubscription,
}

struct Node {
    /// `None` for the watched directory itself.
    parent: Option<i32>,
    name: Vec<u8>,
    id: (u64, u64),
    children: HashMap<Vec<u8>, i32>,
}

/// The first half of a rename.
struct PendingRename {
    path: Vec<u8>,
    is_directory: bool,
    parent: (u64, u64),
    parent_wd: i32,
    name: Vec<u8>,
    /// A temporary file of boxd. Only its final path is reported.
    is_temp: bool,
}

/// State shared by all trees: run id, event numbers and the authors of changes.
pub struct EventPublisher<'a> {
    pub run_id: &'a str,
    pub numbers: &'a AtomicU64,
    pub changes: &'a ChangeLog,
}

#[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
fn id(stat: &Stat) -> (u64, u64) {
    (stat.st_dev as u64, stat.st_ino as u64)
}

impl WatchedTree {
    /// Watches a directory and, if the request is recursive, those below it.
    pub fn start(key: (Vec<u8>, bool), root: OwnedFd, inotify: &mut Inotify, publisher: &EventPublisher<'_>) -> Result<Self, AddError> {
        let root_wd = inotify.add(&root)?;
        let stat = rustix::fs::fstat(&root).map_err(AddError::Refused)?;
        let node = Node { parent: None, name: Vec::new(), id: id(&stat), children: HashMap::new() };
        let mut tree = Self {
            key,
            journal: Arc::new(Journal::new(publisher.numbers.load(Ordering::Relaxed))),
            unread_since: None,
            is_gone: false,
            root,
            root_wd,
            nodes: HashMap::from([(root_wd, node)]),
            pending: PendingChanges::default(),
            pending_renames: HashMap::new(),
            first_pending_at: None,
            has_published_limit: false,
            subscription: publisher.changes.subscribe(),
        };
        tree.watch_below(root_wd, None, inotify, publisher);
        Ok(tree)
    }

    pub fn is_watching(&self, wd: i32) -> bool {
        self.nodes.contains_key(&wd)
    }

    /// The kernel sends no event for the removal of a directory that is open, so this is polled.
    pub fn check_root(&mut self, inotify: &mut Inotify, publisher: &EventPublisher<'_>) {
        if !self.is_gone && rustix::fs::fstat(&self.root).is_ok_and(|s| s.st_nlink == 0) {
            self.end(inotify, publisher);
        }
    }

    fn end(&mut self, inotify: &mut Inotify, publisher: &EventPublisher<'_>) {
        self.flush(inotify, publisher);
        self.overflow(OverflowReason::Gone, "the watched path was deleted or moved; watch it again when it exists", publisher);
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
        self.first_pending_at.map(|at| at + WINDOW)
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
    pub fn handle_event(
        &mut self,
        wd: i32,
        flags: ReadFlags,
        cookie: u32,
        name: Option<&[u8]>,
        inotify: &mut Inotify,
        publisher: &EventPublisher<'_>,
    ) {
        if flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT) && wd == self.root_wd {
            return self.end(inotify, publisher);
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
        self.first_pending_at.get_or_insert_with(Instant::now);
        if flags.contains(ReadFlags::CREATE) {
            self.pending.add(path.clone(), PathChange::Created, is_directory, parent, None);
            self.watch_new(wd, name, path, is_directory, inotify, publisher);
        } else if flags.intersects(ReadFlags::MODIFY | ReadFlags::ATTRIB) {
            self.pending.add(path, PathChange::Modified, is_directory, parent, None);
        } else if flags.contains(ReadFlags::DELETE) {
            self.unwatch(wd, name, inotify);
            self.pending.add(path, PathChange::Removed, is_directory, parent, None);
        } else if flags.contains(ReadFlags::MOVED_FROM) {
            self.pending_renames.insert(cookie, PendingRename { path, is_directory, parent, parent_wd: wd, name: name.to_vec(), is_temp });
        } else if flags.contains(ReadFlags::MOVED_TO) {
            self.handle_moved_to(wd, cookie, name, path, is_directory, parent, inotify, publisher);
        }
        if self.pending.len() >= MAX_PENDING {
            self.flush(inotify, publisher);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "an event's fields and the context to handle it")]
    fn handle_moved_to(
        &mut self,
        wd: i32,
        cookie: u32,
        name: &[u8],
        path: Vec<u8>,
        is_directory: bool,
        parent: (u64, u64),
        inotify: &mut Inotify,
        publisher: &EventPublisher<'_>,
    ) {
        let from = self.pending_renames.remove(&cookie);
        let is_finished = from.as_ref().is_some_and(|f| f.is_temp);
        let Some(from) = from.filter(|f| !f.is_temp) else {
            // Moved here from outside the tree, or finished by boxd.
            self.unwatch(wd, name, inotify);
            let change = if is_finished && !is_directory { PathChange::Placed } else { PathChange::Created };
            self.pending.add(path.clone(), change, is_directory, parent, None);
            self.watch_new(wd, name, path, is_directory, inotify, publisher);
            return;
        };
        if is_directory {
            // Pending changes below this directory have paths that are about to become invalid.
            self.publish_pending(publisher);
            self.first_pending_at.get_or_insert_with(Instant::now);
        }
        self.unwatch(wd, name, inotify);
        let moved_wd = self.nodes.get_mut(&from.parent_wd).and_then(|n| n.children.remove(&from.name));
        if let Some(moved_wd) = moved_wd {
            if let Some(node) = self.nodes.get_mut(&moved_wd) {
                node.parent = Some(wd);
                node.name = name.to_vec();
            }
            if let Some(node) = self.nodes.get_mut(&wd) {
                node.children.insert(name.to_vec(), moved_wd);
            }
        }
        self.pending.rename(from.path, path, is_directory, parent);
    }

    /// Watches a new directory and reports its existing content.
    fn watch_new(
        &mut self,
        wd: i32,
        name: &[u8],
        path: Vec<u8>,
        is_directory: bool,
        inotify: &mut Inotify,
        publisher: &EventPublisher<'_>,
    ) {
        if is_directory && self.key.1 && self.watch_directory(wd, name, &path, inotify, publisher) {
            let child = self.nodes.get(&wd).and_then(|n| n.children.get(name)).copied();
            if let Some(child) = child {
                self.watch_below(child, Some(&path), inotify, publisher);
            }
        }
    }

    /// Watches one directory below a watched one.
    fn watch_directory(&mut self, parent: i32, name: &[u8], path: &[u8], inotify: &mut Inotify, publisher: &EventPublisher<'_>) -> bool {
        if path.len() > MAX_PATH_BYTES {
            self.publish_limit_once("directories are nested too deep to be watched", publisher);
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
                self.publish_limit_once(&message, publisher);
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
        if wd == self.root_wd {
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
    fn watch_below(&mut self, wd: i32, found_in: Option<&[u8]>, inotify: &mut Inotify, publisher: &EventPublisher<'_>) {
        if !self.key.1 {
            return;
        }
        // Bounded by the number of watches.
        let mut queue = vec![wd];
        while let Some(wd) = queue.pop() {
            let path = self.path_of(wd);
            let Some(parent) = self.nodes.get(&wd).map(|n| n.id) else { continue };
            let directory = match open_beneath(&self.root, path.strip_suffix(b"/").unwrap_or(&path), OFlags::RDONLY | OFlags::DIRECTORY) {
                Ok(directory) => directory,
                Err(_) => continue,
            };
            let mut children: Vec<Vec<u8>> = Vec::new();
            let mut exceeds_limit = false;
            // An error means that the directory has changed during the listing, which events report.
            let _ = for_each_name(&directory, |name, listed_type| {
                let is_directory = entry_type(&directory, name, listed_type) == FileType::Directory;
                if let Some(new_directory) = found_in {
                    self.pending.add(
                        [path.as_slice(), name].concat(),
                        PathChange::Created,
                        is_directory,
                        parent,
                        Some(new_directory.to_vec()),
                    );
                    if self.pending.len() >= MAX_PENDING {
                        self.publish_pending(publisher);
                    }
                }
                if is_directory {
                    exceeds_limit = children.len() >= inotify.remaining();
                    if !exceeds_limit {
                        children.push(name.to_vec());
                    }
                }
                !exceeds_limit || found_in.is_some()
            });
            if exceeds_limit {
                self.publish_limit_once(&inotify.limit_message(), publisher);
            }
            for name in children {
                if self.watch_directory(wd, &name, &[path.as_slice(), &name].concat(), inotify, publisher)
                    && let Some(child) = self.nodes.get(&wd).and_then(|n| n.children.get(&name))
                {
                    queue.push(*child);
                }
            }
        }
    }

    /// Stops watching the directory that had this name, and those below it.
    fn unwatch(&mut self, wd: i32, name: &[u8], inotify: &mut Inotify) {
        let Some(child) = self.nodes.get_mut(&wd).and_then(|n| n.children.remove(name)) else { return };
        let mut queue = vec![child];
        while let Some(wd) = queue.pop() {
            if let Some(node) = self.nodes.remove(&wd) {
                inotify.release(wd);
                queue.extend(node.children.into_values());
            }
        }
    }

    /// The kernel removed a watch itself because its directory is gone.
    pub fn handle_removed_watch(&mut self, wd: i32, inotify: &mut Inotify) {
        if wd != self.root_wd
            && let Some((parent, name)) = self.nodes.get(&wd).and_then(|n| Some((n.parent?, n.name.clone())))
        {
            self.unwatch(parent, &name, inotify);
        }
    }

    /// The kernel dropped events, so new directories may have been missed.
    pub fn kernel_overflow(&mut self, inotify: &mut Inotify, publisher: &EventPublisher<'_>) {
        self.flush(inotify, publisher);
        self.overflow(
            OverflowReason::KernelQueue,
            "the kernel dropped changes because its queue was full; list the files again",
            publisher,
        );
        self.watch_below(self.root_wd, None, inotify, publisher);
    }

    fn publish_limit_once(&mut self, message: &str, publisher: &EventPublisher<'_>) {
        if !std::mem::replace(&mut self.has_published_limit, true) {
            self.overflow(OverflowReason::WatchLimit, message, publisher);
        }
    }

    fn overflow(&mut self, reason: OverflowReason, message: &str, publisher: &EventPublisher<'_>) {
        let number = self.publish_event("overflow", &WatchOverflow { reason, message: message.to_owned() }, publisher);
        self.journal.publish(number);
    }

    fn publish_event(&self, event: &str, data: &impl Serialize, publisher: &EventPublisher<'_>) -> u64 {
        let number = publisher.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        self.journal.append(number, sse_frame(event, Some(&super::cursor(publisher.run_id, number)), data));
        number
    }

    /// Reports all pending changes.
    pub fn flush(&mut self, inotify: &mut Inotify, publisher: &EventPublisher<'_>) {
        for (_, from) in std::mem::take(&mut self.pending_renames) {
            if !from.is_temp {
                // Moved to a place outside this tree.
                self.unwatch(from.parent_wd, &from.name, inotify);
                self.pending.add(from.path, PathChange::Removed, from.is_directory, from.parent, None);
            }
        }
        self.first_pending_at = None;
        self.publish_pending(publisher);
    }

    fn publish_pending(&mut self, publisher: &EventPublisher<'_>) {
        if self.pending.is_empty() {
            return;
        }
        let mut last = None;
        // Reported new directories, with the time and author of their creation.
        let mut directory_authors = DirectoryAuthors::new();
        for (path, entry) in self.pending.drain() {
            if let Some(number) = self.publish_change(path, entry, &mut directory_authors, publisher) {
                last = Some(number);
            }
        }
        if let Some(last) = last {
            self.journal.publish(last);
        }
    }

    fn publish_change(
        &self,
        path: Vec<u8>,
        entry: PendingChange,
        directory_authors: &mut DirectoryAuthors,
        publisher: &EventPublisher<'_>,
    ) -> Option<u64> {
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default().to_vec();
        let stat = open_beneath(&self.root, &path, OFlags::PATH | OFlags::NOFOLLOW).and_then(rustix::fs::fstat);
        let is_removed = entry.change == PathChange::Removed;
        let stat = match stat {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT | Errno::NOTDIR) if !is_removed && !matches!(entry.change, PathChange::Renamed { .. }) => return None,
            Err(_) => None,
        };
        let key = (entry.parent.0, entry.parent.1, name);
        let version_on_disk = if is_removed { None } else { stat.as_ref().and_then(version) };
        let change = publisher.changes.change(&key, version_on_disk, entry.is_directory, &self.subscription);
        // The log's entry is from boxd's creation of the directory. A later modification is a program's.
        let change = change.filter(|_| !(entry.is_directory && entry.change == PathChange::Modified));
        let by = match &change {
            Some(change) => client_author(change),
            None => inherited_author(&entry, stat.as_ref(), directory_authors),
        };
        let reported_kind = match &stat {
            Some(stat) if !is_removed => file_kind(kind(stat)),
            _ if entry.is_directory => FileKind::Directory,
            _ => FileKind::File,
        };
        if let (true, Some(at)) = (entry.is_directory, change.as_ref().and_then(|c| c.placed_at())) {
            directory_authors.insert(path.clone(), (at, by.clone()));
        }
        let event = match &entry.change {
            PathChange::Created => "created",
            PathChange::Modified => "modified",
            PathChange::Placed if change.is_some_and(|c| c.is_new) => "created",
            PathChange::Placed => "modified",
            PathChange::Removed => "removed",
            PathChange::Renamed { .. } => "renamed",
        };
        let full_path = |path: &[u8]| text_and_b64([self.key.0.as_slice(), path].concat());
        let (shown, path_b64) = full_path(&path);
        let at = Timestamp::now();
        let mut data =
            WatchEvent { path: shown, path_b64, kind: reported_kind, by, at, from: None, from_b64: None, to: None, to_b64: None };
        let PathChange::Renamed { from, is_modified } = &entry.change else { return Some(self.publish_event(event, &data, publisher)) };
        let (from, from_b64) = full_path(from);
        let without_rename = data.clone();
        (data.from, data.from_b64, data.to, data.to_b64) = (Some(from), from_b64, Some(data.path.clone()), data.path_b64.clone());
        let number = self.publish_event(event, &data, publisher);
        Some(if *is_modified { self.publish_event("modified", &without_rename, publisher) } else { number })
    }
}

/// New directories that were created through boxd: time and author.
type DirectoryAuthors = HashMap<Vec<u8>, ((i64, i64), ChangedBy)>;

fn client_author(change: &crate::files::RecordedChange) -> ChangedBy {
    ChangedBy::Client { principal: change.author.principal.clone(), actor: change.author.actor.to_owned() }
}

/// The author of an entry found in a new directory: the client that placed the complete directory. An entry that
/// changed after that was written by a program.
fn inherited_author(entry: &PendingChange, stat: Option<&Stat>, directory_authors: &DirectoryAuthors) -> ChangedBy {
    let directory_author = entry.found_in.as_ref().and_then(|directory| directory_authors.get(directory));
    match (directory_author, stat) {
        #[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
        (Some((at, by)), Some(stat)) if (stat.st_ctime as i64, stat.st_ctime_nsec as i64) <= *at => by.clone(),
        _ => ChangedBy::Process("process".into()),
    }
}

/// A server-sent event. JSON contains no line ends.
pub fn sse_frame(event: &str, id: Option<&str>, data: &impl Serialize) -> Bytes {
    // Serializing strings and numbers doesn't fail. If it did, an empty event would be better than a panic.
    let data = serde_json::to_string(data).unwrap_or_default();
    let id = id.map(|id| format!("id: {id}\n")).unwrap_or_default();
    format!("{id}event: {event}\ndata: {data}\n\n").into()
}
