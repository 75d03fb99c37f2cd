//! Looking through a folder, or through the parts of it that changed: by descriptors, without following anything, and reading only what
//! is not known already.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::File,
    io::Read,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::SystemTime,
};

use rustix::{
    fs::{Dir, FileType, Mode, OFlags},
    io::Errno,
};
use unicode_normalization::UnicodeNormalization;

use crate::{
    digest::read_all,
    dirs,
    entry::Entry,
    error::SyncError,
    hooks::Hooks,
    path::RelPath,
    problem::Problem,
    rules::{MAX_RULE_FILE_BYTES, RULE_FILES, Rules},
    side::Limits,
    stamp::Stamp,
    watch::Watch,
};

/// Problems that one folder may have and still be synced.
pub const MAX_PROBLEMS: usize = 10_000;

/// What a look found at and beneath some path.
#[derive(Default)]
pub struct Found {
    pub entries: BTreeMap<RelPath, (Entry, Stamp)>,
    pub problems: BTreeMap<RelPath, Problem>,
    /// Folders, nothing for the top, whose names were looked at for clashes though not all in them was.
    pub relisted: BTreeSet<Option<RelPath>>,
}

/// What is known from before.
pub trait Known {
    fn entry(&self, path: &RelPath) -> Option<(&Entry, &Stamp)>;
}

pub struct Scan<'a> {
    pub root: &'a Arc<OwnedFd>,
    pub known: &'a dyn Known,
    pub rules: &'a mut Rules,
    pub watch: Option<&'a Watch>,
    pub limits: &'a Limits,
    pub hooks: &'a Arc<dyn Hooks>,
    /// Never looked into.
    pub own: &'a BTreeSet<RelPath>,
    pub found: Found,
    device: u64,
    seen: SystemTime,
    unread: Vec<(RelPath, u64)>,
}

impl<'a> Scan<'a> {
    pub fn new(
        root: &'a Arc<OwnedFd>,
        known: &'a dyn Known,
        rules: &'a mut Rules,
        watch: Option<&'a Watch>,
        limits: &'a Limits,
        hooks: &'a Arc<dyn Hooks>,
        own: &'a BTreeSet<RelPath>,
    ) -> Result<Self, SyncError> {
        let stat = rustix::fs::fstat(root).map_err(SyncError::root)?;
        if stat.st_nlink == 0 {
            return Err(SyncError::RootGone);
        }
        #[allow(clippy::unnecessary_cast, reason = "the field is narrower on some machines")]
        let device = stat.st_dev as u64;
        let (found, seen, unread) = (Found::default(), SystemTime::now(), Vec::new());
        Ok(Self { root, known, rules, watch, limits, hooks, own, found, device, seen, unread })
    }

    /// Everything.
    pub fn whole(mut self) -> Result<Found, SyncError> {
        let top = dirs::open_beneath(self.root, b"", OFlags::RDONLY | OFlags::DIRECTORY).map_err(SyncError::root)?;
        self.folder(top, None)?;
        self.read()
    }

    /// These paths and all beneath them. The folders they are in are known.
    pub fn parts<'p>(mut self, tops: impl Iterator<Item = &'p RelPath>) -> Result<Found, SyncError> {
        for top in tops {
            let parent = match dirs::open_beneath(self.root, top.parent_bytes(), OFlags::RDONLY | OFlags::DIRECTORY) {
                Ok(parent) => parent,
                // With the folder it was in it is gone too; the folder's own change is told separately.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                // What can't be looked at now is not gone for that.
                Err(_) => {
                    self.problem(Some(top), Problem::Changing)?;
                    continue;
                }
            };
            let was_there = self.known.entry(top).is_some();
            self.one(&parent, top.clone())?;
            let is_there = matches!(dirs::look(parent.as_fd(), top.name()), Ok(Some(_)));
            // Another name, or one less, in a folder that is not looked through as a whole.
            if was_there != is_there && self.found.relisted.insert(top.parent()) {
                // One that can't be listed is told when it is looked through.
                let names = names(&parent, self.limits.entries).unwrap_or_default();
                self.note_clashes(top.parent().as_ref(), &names);
            }
        }
        self.read()
    }

    fn folder(&mut self, folder: OwnedFd, path: Option<&RelPath>) -> Result<(), SyncError> {
        // Before it is listed, so that nothing falls between.
        if let Some(watch) = self.watch {
            watch.add(&folder, path);
        }
        let Ok(names) = names(&folder, self.limits.entries) else { return self.problem(path, Problem::Unreadable) };
        if names.len() > self.limits.entries {
            return Err(SyncError::TooMany(self.limits.entries));
        }
        for (which, name) in RULE_FILES.iter().enumerate() {
            let is_there = names.binary_search_by(|n| n.as_slice().cmp(name.as_bytes())).is_ok();
            self.rules.set(path, which as u8, is_there.then(|| read_rules(&folder, name)).flatten());
        }
        self.note_clashes(path, &names);
        for name in names {
            match RelPath::join(path, &name) {
                Some(path) => self.one(&folder, path)?,
                None => self.problem(path, Problem::Unnameable)?,
            }
        }
        Ok(())
    }

    fn problem(&mut self, path: Option<&RelPath>, problem: Problem) -> Result<(), SyncError> {
        match path {
            // Without the top nothing can be said of the rest.
            None if problem == Problem::Unreadable => Err(SyncError::RootGone),
            None => Ok(()),
            Some(path) => {
                // Past the bound they still count as a problem of the folder: nothing that can't be seen may look deleted.
                if self.found.problems.len() < MAX_PROBLEMS {
                    self.found.problems.insert(path.clone(), problem);
                    Ok(())
                } else {
                    Err(SyncError::TooManyProblems(MAX_PROBLEMS))
                }
            }
        }
    }

    fn one(&mut self, parent: &OwnedFd, path: RelPath) -> Result<(), SyncError> {
        let stat = match dirs::look(parent.as_fd(), path.name()) {
            Ok(Some(stat)) => stat,
            Ok(None) => return Ok(()),
            Err(_) => return self.problem(Some(&path), Problem::Unreadable),
        };
        if self.own.contains(&path) {
            return self.problem(Some(&path), Problem::Own);
        }
        let stamp = Stamp::of(&stat, self.seen);
        let kind = stamp.kind();
        if self.rules.leaves_out(&path, kind == FileType::Directory) {
            return Ok(());
        }
        if self.found.entries.len() >= self.limits.entries {
            return Err(SyncError::TooMany(self.limits.entries));
        }
        // Of folders only: on an overlay files have the device of the layer they are in. A file that is a mount can't be opened.
        if kind == FileType::Directory && stamp.device() != self.device {
            return self.problem(Some(&path), Problem::OtherFileSystem);
        }
        match kind {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                match rustix::fs::openat(parent, path.name(), flags, Mode::empty()) {
                    Ok(folder) => {
                        self.found.entries.insert(path.clone(), (Entry::Dir, stamp));
                        self.folder(folder, Some(&path))
                    }
                    Err(Errno::ACCESS | Errno::PERM) => self.problem(Some(&path), Problem::Unreadable),
                    Err(_) => self.problem(Some(&path), Problem::Changing),
                }
            }
            FileType::RegularFile => {
                if stamp.size() > self.limits.file_bytes {
                    return self.problem(Some(&path), Problem::TooLarge);
                }
                match self.known.entry(&path) {
                    Some((entry @ Entry::File { .. }, known)) if known.still_holds(&stamp) => {
                        self.found.entries.insert(path, (entry.clone(), *known));
                    }
                    _ => self.unread.push((path, stamp.size())),
                }
                Ok(())
            }
            FileType::Symlink => match rustix::fs::readlinkat(parent, path.name(), Vec::new()) {
                Ok(target) if stays_inside(&path, target.to_bytes()) => {
                    self.found.entries.insert(path, (Entry::Link { target: target.to_bytes().into() }, stamp));
                    Ok(())
                }
                Ok(_) => self.problem(Some(&path), Problem::LinkOutside),
                Err(_) => self.problem(Some(&path), Problem::Changing),
            },
            _ => self.problem(Some(&path), Problem::Special),
        }
    }

    fn read(mut self) -> Result<Found, SyncError> {
        let read = read_all(self.root, std::mem::take(&mut self.unread), self.hooks);
        let known = self.known;
        // The same file, and less of it: emptied to be written anew, which is told only after it is done.
        let is_shorter = |path: &RelPath, now: &Stamp| {
            known
                .entry(path)
                .is_some_and(|(entry, was)| was.is_same_file(now) && entry.content().is_some_and(|(_, size)| now.size() < size))
        };
        let half = self.watch.map_or_else(HashSet::new, |watch| {
            let whole = read.iter().filter_map(|(path, result)| result.as_ref().ok().map(|(_, stamp)| (path, stamp)));
            watch.half_written(whole.map(|(path, stamp)| (path, is_shorter(path, stamp))))
        });
        for (path, result) in read {
            match result {
                Ok(_) if half.contains(&path) => self.problem(Some(&path), Problem::Changing)?,
                Ok((_, stamp)) if is_shorter(&path, &stamp) && known.entry(&path).is_some_and(|(_, was)| stamp.may_be_midway(was)) => {
                    self.problem(Some(&path), Problem::Changing)?;
                }
                Ok((digest, stamp)) => {
                    let entry = Entry::File { digest, size: stamp.size(), exec: stamp.is_exec() };
                    self.found.entries.insert(path, (entry, stamp));
                }
                Err(problem) => self.problem(Some(&path), problem)?,
            }
        }
        Ok(self.found)
    }

    /// Names that are one on some file systems. Most folders have only plain names, which costs nothing.
    fn note_clashes(&mut self, folder: Option<&RelPath>, names: &[Vec<u8>]) {
        let is_plain = |name: &Vec<u8>| name.iter().all(|b| b.is_ascii() && !b.is_ascii_uppercase());
        if names.iter().all(is_plain) {
            return;
        }
        let mut folded: HashSet<String> = HashSet::new();
        for name in names {
            let Ok(text) = std::str::from_utf8(name) else { continue };
            let key: String = text.nfc().flat_map(char::to_lowercase).collect();
            if !folded.insert(key)
                && self.found.problems.len() < MAX_PROBLEMS
                && let Some(path) = RelPath::join(folder, name)
                && !self.rules.leaves_out(&path, false)
            {
                self.found.problems.insert(path, Problem::Clash);
            }
        }
    }
}

/// What is in a folder, in order; it ends after one more than may be.
fn names(folder: &OwnedFd, most: usize) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut listing = Dir::read_from(folder)?;
    while let Some(entry) = listing.read() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
        if names.len() > most {
            break;
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// A relative target that can't lead out of the folder, whatever other links it goes through: `..` only where it begins, and not more often
/// than the link is deep.
pub fn stays_inside(link: &RelPath, target: &[u8]) -> bool {
    if target.is_empty() || target.starts_with(b"/") || target.contains(&0) {
        return false;
    }
    let is_up = |part: &&[u8]| *part == b"..";
    let parts: Vec<&[u8]> = target.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".").collect();
    let ups = parts.iter().take_while(|p| is_up(p)).count();
    ups <= link.depth() && !parts[ups..].iter().any(is_up)
}

fn read_rules(folder: &OwnedFd, name: &str) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, name, flags, Mode::empty()).ok()?;
    if FileType::from_raw_mode(rustix::fs::fstat(&file).ok()?.st_mode) != FileType::RegularFile {
        return None;
    }
    let mut text = Vec::new();
    File::from(file).take(MAX_RULE_FILE_BYTES as u64).read_to_end(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_stays_inside_by_its_words_alone() {
        let at = |text: &str| RelPath::new(text.as_bytes()).unwrap();
        for (link, target) in [("a", "b"), ("d/l", "../x"), ("d/e/l", "../../x/y"), ("l", "./x"), ("d/l", "..")] {
            assert!(stays_inside(&at(link), target.as_bytes()), "{link} -> {target}");
        }
        for (link, target) in [("a", "/etc/passwd"), ("a", ".."), ("d/l", "../../x"), ("d/l", "x/../.."), ("d/l", "x/.."), ("a", "")] {
            assert!(!stays_inside(&at(link), target.as_bytes()), "{link} -> {target}");
        }
    }
}
