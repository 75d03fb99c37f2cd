//! Scans a folder or the changed parts of it, by descriptor, without following links, and reads only files that are not
//! known yet.

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
    beneath,
    digest::digest_files,
    entry::Entry,
    error::SyncError,
    file_stamp::Stamp,
    folder::Limits,
    hooks::Hooks,
    ignore_rules::{IGNORE_FILES, IgnoreRules, MAX_RULE_FILE_BYTES},
    path::RelPath,
    problem::Problem,
    watch::Watch,
};

/// Maximum number of problems in a folder that can still be synced.
pub const MAX_PROBLEMS: usize = 10_000;

/// Entries and problems at and beneath the scanned paths.
#[derive(Default)]
pub struct ScanResult {
    pub entries: BTreeMap<RelPath, (Entry, Stamp)>,
    pub problems: BTreeMap<RelPath, Problem>,
    /// Directories whose names were checked for clashes without a full scan; `None` is the top.
    pub relisted: BTreeSet<Option<RelPath>>,
}

/// Entries and stamps from earlier scans.
pub trait KnownFiles {
    fn entry(&self, path: &RelPath) -> Option<(&Entry, &Stamp)>;
}

pub struct Scan<'a> {
    pub root: &'a Arc<OwnedFd>,
    pub known: &'a dyn KnownFiles,
    pub ignore_rules: &'a mut IgnoreRules,
    pub watch: Option<&'a Watch>,
    pub limits: &'a Limits,
    pub hooks: &'a Arc<dyn Hooks>,
    /// Paths that are never scanned.
    pub excluded: &'a BTreeSet<RelPath>,
    pub result: ScanResult,
    device: u64,
    seen: SystemTime,
    unread: Vec<(RelPath, u64)>,
}

impl<'a> Scan<'a> {
    pub fn new(
        root: &'a Arc<OwnedFd>,
        known: &'a dyn KnownFiles,
        ignore_rules: &'a mut IgnoreRules,
        watch: Option<&'a Watch>,
        limits: &'a Limits,
        hooks: &'a Arc<dyn Hooks>,
        excluded: &'a BTreeSet<RelPath>,
    ) -> Result<Self, SyncError> {
        let stat = rustix::fs::fstat(root).map_err(SyncError::root)?;
        if stat.st_nlink == 0 {
            return Err(SyncError::RootGone);
        }
        #[allow(clippy::unnecessary_cast, reason = "the field is narrower on some machines")]
        let device = stat.st_dev as u64;
        let (result, seen, unread) = (ScanResult::default(), SystemTime::now(), Vec::new());
        Ok(Self { root, known, ignore_rules, watch, limits, hooks, excluded, result, device, seen, unread })
    }

    /// Scans the whole folder.
    pub fn scan_all(mut self) -> Result<ScanResult, SyncError> {
        let top = beneath::open_beneath(self.root, b"", OFlags::RDONLY | OFlags::DIRECTORY).map_err(SyncError::root)?;
        self.scan_directory(top, None)?;
        self.read_files()
    }

    /// Scans these paths and everything beneath them. The directories that contain them are known.
    pub fn scan_paths<'p>(mut self, tops: impl Iterator<Item = &'p RelPath>) -> Result<ScanResult, SyncError> {
        for top in tops {
            let parent = match beneath::open_beneath(self.root, top.parent_bytes(), OFlags::RDONLY | OFlags::DIRECTORY) {
                Ok(parent) => parent,
                // The containing directory is gone as well; its own change is reported separately.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                // A path that can't be scanned now must not count as deleted.
                Err(_) => {
                    self.add_problem(Some(top), Problem::Changing)?;
                    continue;
                }
            };
            let was_there = self.known.entry(top).is_some();
            self.scan_entry(&parent, top.clone())?;
            let is_there = matches!(beneath::stat(parent.as_fd(), top.name()), Ok(Some(_)));
            // A name appeared or disappeared in a directory that is not scanned as a whole.
            if was_there != is_there && self.result.relisted.insert(top.parent()) {
                // A directory that can't be listed is reported when it is scanned itself.
                let names = list_names(&parent, self.limits.entries).unwrap_or_default();
                self.record_name_clashes(top.parent().as_ref(), &names);
            }
        }
        self.read_files()
    }

    fn scan_directory(&mut self, directory: OwnedFd, path: Option<&RelPath>) -> Result<(), SyncError> {
        // The watch starts before the listing, so that no change is missed in between.
        if let Some(watch) = self.watch {
            watch.add(&directory, path);
        }
        let Ok(names) = list_names(&directory, self.limits.entries) else { return self.add_problem(path, Problem::Unreadable) };
        if names.len() > self.limits.entries {
            return Err(SyncError::TooMany(self.limits.entries));
        }
        for (which, name) in IGNORE_FILES.iter().enumerate() {
            let is_there = names.binary_search_by(|n| n.as_slice().cmp(name.as_bytes())).is_ok();
            self.ignore_rules.set(path, which as u8, is_there.then(|| read_ignore_file(&directory, name)).flatten());
        }
        self.record_name_clashes(path, &names);
        for name in names {
            match RelPath::join(path, &name) {
                Some(path) => self.scan_entry(&directory, path)?,
                None => self.add_problem(path, Problem::PathTooLong)?,
            }
        }
        Ok(())
    }

    fn add_problem(&mut self, path: Option<&RelPath>, problem: Problem) -> Result<(), SyncError> {
        match path {
            // Without the top directory nothing else can be scanned.
            None if problem == Problem::Unreadable => Err(SyncError::RootGone),
            None => Ok(()),
            Some(path) => {
                // Beyond the limit the scan fails, because a path that can't be read must not look deleted.
                if self.result.problems.len() < MAX_PROBLEMS {
                    self.result.problems.insert(path.clone(), problem);
                    Ok(())
                } else {
                    Err(SyncError::TooManyProblems(MAX_PROBLEMS))
                }
            }
        }
    }

    fn scan_entry(&mut self, parent: &OwnedFd, path: RelPath) -> Result<(), SyncError> {
        let stat = match beneath::stat(parent.as_fd(), path.name()) {
            Ok(Some(stat)) => stat,
            Ok(None) => return Ok(()),
            Err(_) => return self.add_problem(Some(&path), Problem::Unreadable),
        };
        if self.excluded.contains(&path) {
            return self.add_problem(Some(&path), Problem::OwnState);
        }
        let stamp = Stamp::of(&stat, self.seen);
        let kind = stamp.kind();
        if self.ignore_rules.is_ignored(&path, kind == FileType::Directory) {
            return Ok(());
        }
        if self.result.entries.len() >= self.limits.entries {
            return Err(SyncError::TooMany(self.limits.entries));
        }
        // Checked for directories only: on an overlay, files have the device of their layer. A file that is a mount
        // point can't be opened.
        if kind == FileType::Directory && stamp.device() != self.device {
            return self.add_problem(Some(&path), Problem::OtherFileSystem);
        }
        match kind {
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                match rustix::fs::openat(parent, path.name(), flags, Mode::empty()) {
                    Ok(directory) => {
                        self.result.entries.insert(path.clone(), (Entry::Dir, stamp));
                        self.scan_directory(directory, Some(&path))
                    }
                    Err(Errno::ACCESS | Errno::PERM) => self.add_problem(Some(&path), Problem::Unreadable),
                    Err(_) => self.add_problem(Some(&path), Problem::Changing),
                }
            }
            FileType::RegularFile => {
                if stamp.size() > self.limits.file_bytes {
                    return self.add_problem(Some(&path), Problem::TooLarge);
                }
                match self.known.entry(&path) {
                    Some((entry @ Entry::File { .. }, known)) if known.is_unchanged(&stamp) => {
                        self.result.entries.insert(path, (entry.clone(), *known));
                    }
                    _ => self.unread.push((path, stamp.size())),
                }
                Ok(())
            }
            FileType::Symlink => match rustix::fs::readlinkat(parent, path.name(), Vec::new()) {
                Ok(target) if stays_inside(&path, target.to_bytes()) => {
                    self.result.entries.insert(path, (Entry::Link { target: target.to_bytes().into() }, stamp));
                    Ok(())
                }
                Ok(_) => self.add_problem(Some(&path), Problem::LinkOutside),
                Err(_) => self.add_problem(Some(&path), Problem::Changing),
            },
            _ => self.add_problem(Some(&path), Problem::SpecialFile),
        }
    }

    fn read_files(mut self) -> Result<ScanResult, SyncError> {
        let read = digest_files(self.root, std::mem::take(&mut self.unread), self.hooks);
        let known = self.known;
        // The same file with less content: it was truncated to be rewritten, and the watch reports the end of a long
        // write only when it is done.
        let is_shorter = |path: &RelPath, now: &Stamp| {
            known
                .entry(path)
                .is_some_and(|(entry, was)| was.is_same_file(now) && entry.content().is_some_and(|(_, size)| now.size() < size))
        };
        let half_written = self.watch.map_or_else(HashSet::new, |watch| {
            let scan_all = read.iter().filter_map(|(path, digest)| digest.as_ref().ok().map(|(_, stamp)| (path, stamp)));
            watch.half_written(scan_all.map(|(path, stamp)| (path, is_shorter(path, stamp))))
        });
        for (path, digest) in read {
            match digest {
                Ok(_) if half_written.contains(&path) => self.add_problem(Some(&path), Problem::Changing)?,
                Ok((_, stamp)) if is_shorter(&path, &stamp) && known.entry(&path).is_some_and(|(_, was)| stamp.may_be_mid_write(was)) => {
                    self.add_problem(Some(&path), Problem::Changing)?;
                }
                Ok((digest, stamp)) => {
                    let entry = Entry::File { digest, size: stamp.size(), exec: stamp.is_executable() };
                    self.result.entries.insert(path, (entry, stamp));
                }
                Err(problem) => self.add_problem(Some(&path), problem)?,
            }
        }
        Ok(self.result)
    }

    /// Records names that some file systems treat as equal. Most directories only have plain names, which skips the
    /// check.
    fn record_name_clashes(&mut self, directory: Option<&RelPath>, names: &[Vec<u8>]) {
        let is_plain = |name: &Vec<u8>| name.iter().all(|b| b.is_ascii() && !b.is_ascii_uppercase());
        if names.iter().all(is_plain) {
            return;
        }
        let mut folded: HashSet<String> = HashSet::new();
        for name in names {
            let Ok(text) = std::str::from_utf8(name) else { continue };
            let key: String = text.nfc().flat_map(char::to_lowercase).collect();
            if !folded.insert(key)
                && self.result.problems.len() < MAX_PROBLEMS
                && let Some(path) = RelPath::join(directory, name)
                && !self.ignore_rules.is_ignored(&path, false)
            {
                self.result.problems.insert(path, Problem::NameClash);
            }
        }
    }
}

/// Names in a directory, sorted; the list ends one entry beyond the limit.
fn list_names(directory: &OwnedFd, most: usize) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut listing = Dir::read_from(directory)?;
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

/// Whether a relative target stays inside the folder no matter which other links it passes through: `..` may only occur
/// at the start, and not more often than the link is deep.
pub fn stays_inside(link: &RelPath, target: &[u8]) -> bool {
    if target.is_empty() || target.starts_with(b"/") || target.contains(&0) {
        return false;
    }
    let is_up = |part: &&[u8]| *part == b"..";
    let scan_paths: Vec<&[u8]> = target.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".").collect();
    let ups = scan_paths.iter().take_while(|p| is_up(p)).count();
    ups <= link.depth() && !scan_paths[ups..].iter().any(is_up)
}

fn read_ignore_file(directory: &OwnedFd, name: &str) -> Option<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, name, flags, Mode::empty()).ok()?;
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
    fn link_targets_are_judged_by_their_text() {
        let at = |text: &str| RelPath::new(text.as_bytes()).unwrap();
        for (link, target) in [("a", "b"), ("d/l", "../x"), ("d/e/l", "../../x/y"), ("l", "./x"), ("d/l", "..")] {
            assert!(stays_inside(&at(link), target.as_bytes()), "{link} -> {target}");
        }
        for (link, target) in [("a", "/etc/passwd"), ("a", ".."), ("d/l", "../../x"), ("d/l", "x/../.."), ("d/l", "x/.."), ("a", "")] {
            assert!(!stays_inside(&at(link), target.as_bytes()), "{link} -> {target}");
        }
    }
}
