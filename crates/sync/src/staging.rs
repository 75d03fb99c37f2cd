//! Staging area for content that is incomplete or not verified yet: a directory for each run, on the same file system
//! as the folder, so that placing a file takes one rename.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::SystemTime,
};

use rustix::{
    fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, RenameFlags},
    io::Errno,
};

use crate::{beneath, digest::READ_BUFFER_BYTES, entry::Digest, error::SyncError, file_stamp::Stamp, ignore_rules::STAGING_DIRECTORY};

/// Up to this many files are synced to disk one by one; for more, one sync of the whole file system is faster.
pub const MAX_SEPARATE_SYNCS: usize = 8;
/// Makes git ignore staged content.
pub const GITIGNORE: (&str, &[u8]) = (".gitignore", b"*\n");
/// Part of the names of files that were moved in from the folder.
const OUT_MARKER: &str = "out";
/// Mode of new files; the umask may reduce it.
const FILE_MODE: Mode = Mode::from_bits_retain(0o644);
pub const DIRECTORY_MODE: Mode = Mode::from_bits_retain(0o755);
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub struct Staging {
    root: Arc<OwnedFd>,
    run: Option<RunDirectory>,
    next: u64,
    ready: HashMap<Digest, String>,
    /// Files written since the last sync to disk.
    unsynced: Vec<String>,
}

struct RunDirectory {
    top: OwnedFd,
    folder: OwnedFd,
    name: String,
}

impl Staging {
    pub fn new(root: Arc<OwnedFd>) -> Self {
        Self { root, run: None, next: 0, ready: HashMap::new(), unsynced: Vec::new() }
    }

    /// Removes the directories of killed runs. Active runs hold a lock on theirs.
    pub fn sweep(&self) -> Result<(), Errno> {
        let top = match beneath::open_beneath(&self.root, STAGING_DIRECTORY.as_bytes(), FLAGS) {
            Ok(top) => top,
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(e),
        };
        for name in list(&top)? {
            let Ok(folder) = rustix::fs::openat(&top, name.as_slice(), FLAGS, Mode::empty()) else { continue };
            if rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
                clear(&folder, &self.root)?;
                rustix::fs::unlinkat(&top, name.as_slice(), AtFlags::REMOVEDIR)?;
            }
        }
        self.remove_top(&top);
        Ok(())
    }

    /// Only if no other run is active.
    fn remove_top(&self, top: &OwnedFd) {
        let is_unused = list(top).is_ok_and(|names| names.iter().all(|n| n == GITIGNORE.0.as_bytes()));
        if is_unused {
            // Another run may start at this moment; its files remain.
            let _ = rustix::fs::unlinkat(top, GITIGNORE.0, AtFlags::empty());
            let _ = rustix::fs::unlinkat(&self.root, STAGING_DIRECTORY, AtFlags::REMOVEDIR);
        }
    }

    /// The directory of this run, created when it is first needed.
    fn folder(&mut self) -> Result<BorrowedFd<'_>, Errno> {
        if self.run.is_none() {
            self.run = Some(self.make()?);
        }
        self.run.as_ref().map(|run| run.folder.as_fd()).ok_or(Errno::NOENT)
    }

    fn make(&self) -> Result<RunDirectory, Errno> {
        let mode = Mode::from_raw_mode(0o700);
        match rustix::fs::mkdirat(&self.root, STAGING_DIRECTORY, mode) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
        let top = beneath::open_beneath(&self.root, STAGING_DIRECTORY.as_bytes(), FLAGS)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::openat(&top, GITIGNORE.0, flags, Mode::from_raw_mode(0o600)) {
            // Without it git would briefly show an untracked directory.
            let _ = rustix::io::write(&file, GITIGNORE.1);
        }
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|_| Errno::IO)?;
        let name = format!("{:016x}", u64::from_ne_bytes(random));
        rustix::fs::mkdirat(&top, name.as_str(), mode)?;
        let folder = rustix::fs::openat(&top, name.as_str(), FLAGS, Mode::empty())?;
        rustix::fs::flock(&folder, FlockOperation::NonBlockingLockExclusive)?;
        Ok(RunDirectory { top, folder, name })
    }

    fn next_name(&mut self) -> String {
        self.next += 1;
        format!("{:x}", self.next)
    }

    pub fn has(&self, digest: &Digest) -> bool {
        self.ready.contains_key(digest)
    }

    /// Creates a file for incoming content.
    pub fn begin(&mut self) -> Result<Incoming, Errno> {
        let name = self.next_name();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.folder()?, name.as_str(), flags, FILE_MODE)?;
        Ok(Incoming { file: File::from(file), name, hasher: blake3::Hasher::new(), size: 0 })
    }

    /// Keeps the file if it has the expected digest and size, and discards it otherwise.
    pub fn finish(&mut self, incoming: Incoming, digest: Digest, size: u64) -> bool {
        let Incoming { name, hasher, size: got, .. } = incoming;
        if got == size && Digest(hasher.finalize().into()) == digest {
            self.unsynced.push(name.clone());
            if let Some(duplicate) = self.ready.insert(digest, name) {
                self.discard(&duplicate);
            }
            return true;
        }
        self.discard(&name);
        false
    }

    pub fn abandon(&mut self, incoming: Incoming) {
        self.discard(&incoming.name);
    }

    fn discard(&mut self, name: &str) {
        self.unsynced.retain(|n| n != name);
        if let Some(run) = &self.run {
            // A file that can't be removed now is swept at the next start.
            let _ = rustix::fs::unlinkat(&run.folder, name, AtFlags::empty());
        }
    }

    /// Hands out staged content for placement: a copy if other paths need it too.
    pub fn take_content(&mut self, digest: &Digest, is_last: bool) -> Result<String, Errno> {
        let name = self.ready.get(digest).cloned().ok_or(Errno::NOENT)?;
        if is_last {
            self.ready.remove(digest);
            return Ok(name);
        }
        let from = rustix::fs::openat(self.folder()?, name.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut copy = self.begin()?;
        copy_all(&mut File::from(from), &mut copy).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        copy.file.sync_data().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        Ok(copy.name)
    }

    pub fn stage_link(&mut self, target: &[u8]) -> Result<String, Errno> {
        let name = self.next_name();
        rustix::fs::symlinkat(target, self.folder()?, name.as_str())?;
        Ok(name)
    }

    pub fn stage_empty_directory(&mut self) -> Result<String, Errno> {
        let name = self.next_name();
        rustix::fs::mkdirat(self.folder()?, name.as_str(), DIRECTORY_MODE)?;
        Ok(name)
    }

    /// Sets permission bits: those of the replaced file or the defaults of a new one, with or without execute
    /// permission.
    pub fn set_mode(&mut self, name: &str, mode_from: Option<u32>, exec: bool) -> Result<(), Errno> {
        let file = rustix::fs::openat(self.folder()?, name, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let now = rustix::fs::fstat(&file)?.st_mode & 0o777;
        let wanted = with_exec(mode_from.map_or(now, |mode| mode & 0o777), exec);
        if wanted == now { Ok(()) } else { rustix::fs::fchmod(file, Mode::from_raw_mode(wanted)) }
    }

    /// Renames to another directory; depending on `flags`, the two names are exchanged.
    pub fn rename(&mut self, name: &str, to: BorrowedFd, as_name: &[u8], flags: RenameFlags) -> Result<(), Errno> {
        match flags {
            RenameFlags::NOREPLACE => rename_noreplace(self.folder()?, name.as_bytes(), to, as_name),
            flags => rustix::fs::renameat_with(self.folder()?, name, to, as_name, flags),
        }
    }

    /// A name for a file that is about to be moved in. It records the expected file and the inode that replaces it, so
    /// that a sweep after a kill can recognize an unexpected version and keep it.
    fn outgoing_name(&mut self, expected: &Stamp, instead_of: u64) -> String {
        format!("{}-{}-{instead_of:x}-{}", self.next_name(), OUT_MARKER, expected.key())
    }

    /// Renames staged content so that the file it replaces gets a name of this kind in the swap.
    pub fn rename_for_swap(&mut self, name: &str, expected: &Stamp) -> Result<String, Errno> {
        let staged = self.stat(name)?.ok_or(Errno::NOENT)?;
        let swap = self.outgoing_name(expected, Stamp::of(&staged, SystemTime::now()).inode());
        let folder = self.folder()?;
        rustix::fs::renameat(folder, name, folder, swap.as_str())?;
        Ok(swap)
    }

    /// Moves a file here under a new name, so that it can be verified where no other program changes it.
    pub fn move_in(&mut self, from: BorrowedFd, name: &[u8], expected: &Stamp) -> Result<String, Errno> {
        let name_here = self.outgoing_name(expected, 0);
        rename_noreplace(from, name, self.folder()?, name_here.as_bytes())?;
        Ok(name_here)
    }

    pub fn stat(&mut self, name: &str) -> Result<Option<rustix::fs::Stat>, Errno> {
        beneath::stat(self.folder()?, name.as_bytes())
    }

    pub fn remove(&mut self, name: &str) -> Result<(), Errno> {
        rustix::fs::unlinkat(self.folder()?, name, AtFlags::empty())
    }

    /// Makes staged content durable before it is placed.
    pub fn sync(&mut self) -> Result<(), SyncError> {
        let names = std::mem::take(&mut self.unsynced);
        let Some(run) = &self.run else { return Ok(()) };
        let synced = if names.len() <= MAX_SEPARATE_SYNCS {
            names.iter().try_for_each(|name| {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::fdatasync(rustix::fs::openat(&run.folder, name.as_str(), flags, Mode::empty())?)
            })
        } else {
            rustix::fs::syncfs(&self.root)
        };
        synced.map_err(|e| SyncError::writing("sync incoming content to disk", e))
    }

    /// Discards staged content that was not placed.
    pub fn clear(&mut self) {
        for name in std::mem::take(&mut self.ready).into_values() {
            self.discard(&name);
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(run) = self.run.take() {
            // Files that can't be removed now are swept at the next start.
            let _ = clear(&run.folder, &self.root).and_then(|()| rustix::fs::unlinkat(&run.top, run.name.as_str(), AtFlags::REMOVEDIR));
            self.remove_top(&run.top);
        }
    }
}

/// Grants execute permission to all users with read permission, or to none.
pub fn with_exec(mode: u32, exec: bool) -> u32 {
    if exec { mode | ((mode & 0o444) >> 2) | 0o100 } else { mode & !0o111 }
}

/// Incoming content with its running digest.
pub struct Incoming {
    file: File,
    name: String,
    hasher: blake3::Hasher,
    size: u64,
}

impl Write for Incoming {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        self.size += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub fn copy_all(from: &mut impl Read, to: &mut impl Write) -> io::Result<u64> {
    let (mut buffer, mut size) = (vec![0; READ_BUFFER_BYTES], 0);
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(size),
            Ok(n) => {
                to.write_all(&buffer[..n])?;
                size += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Renames to a name that must not exist yet.
pub fn rename_noreplace(from: BorrowedFd, name: &[u8], to: BorrowedFd, as_name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::renameat_with(from, name, to, as_name, RenameFlags::NOREPLACE) {
        // NFS, 9p and older FUSE file systems don't support the flag.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => rename_by_link(from, name, to, as_name),
        other => other,
    }
}

/// Creates a second link, which also fails if the name exists, and removes the first.
fn rename_by_link(from: BorrowedFd, name: &[u8], to: BorrowedFd, as_name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::linkat(from, name, to, as_name, AtFlags::empty()) {
        Ok(()) => rustix::fs::unlinkat(from, name, AtFlags::empty()),
        // For directories, and on file systems without hard links, a check before the rename has to suffice.
        Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => match beneath::stat(to, as_name)? {
            None => rustix::fs::renameat(from, name, to, as_name),
            Some(_) => Err(Errno::EXIST),
        },
        Err(e) => Err(e),
    }
}

/// Whether a file moved in from the folder is neither the expected version nor its replacement.
fn is_unexpected(name: &[u8], now: &Stamp) -> bool {
    let Ok(name) = std::str::from_utf8(name) else { return false };
    let mut parts = name.splitn(4, '-');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(_), Some(OUT_MARKER), Some(instead_of), Some(key)) => key != now.key() && instead_of != format!("{:x}", now.inode()),
        _ => false,
    }
}

/// The names in a directory.
pub fn list(folder: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    let mut listing = Dir::read_from(folder)?;
    while let Some(entry) = listing.read() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}

/// Removes files and empty directories; a staging directory contains nothing else. A version that was written in the
/// moment before it was moved in goes back to the folder under another name.
fn clear(folder: &OwnedFd, root: &OwnedFd) -> Result<(), Errno> {
    for name in list(folder)? {
        let Some(stat) = beneath::stat(folder.as_fd(), &name)? else { continue };
        let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_folder && is_unexpected(&name, &Stamp::of(&stat, SystemTime::now())) {
            let kept = format!("{}.cobox-kept", Stamp::of(&stat, SystemTime::now()).key());
            tracing::warn!(kept, "kept an unseen version of a file that a killed sync had moved away");
            match rename_noreplace(folder.as_fd(), &name, root.as_fd(), kept.as_bytes()) {
                // The same version from an earlier attempt.
                Err(Errno::EXIST) => {}
                other => {
                    other?;
                    continue;
                }
            }
        }
        let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        rustix::fs::unlinkat(folder, name.as_slice(), flags)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unseen_version_that_a_killed_run_moved_to_staging_is_put_back() {
        let dir = tempfile::tempdir().unwrap();
        let run_path = dir.path().join(STAGING_DIRECTORY).join("0123");
        std::fs::create_dir_all(&run_path).unwrap();
        let key = |name: &str| Stamp::of(&rustix::fs::stat(run_path.join(name)).unwrap(), SystemTime::now());
        for name in ["seen", "staged", "unseen", "4"] {
            std::fs::write(run_path.join(name), name).unwrap();
        }
        let (seen, staged, unseen) = (key("seen"), key("staged"), key("unseen"));
        std::fs::rename(run_path.join("seen"), run_path.join(format!("1-out-0-{}", seen.key()))).unwrap();
        std::fs::rename(run_path.join("staged"), run_path.join(format!("2-out-{:x}-{}", staged.inode(), seen.key()))).unwrap();
        std::fs::rename(run_path.join("unseen"), run_path.join(format!("3-out-{:x}-{}", staged.inode(), seen.key()))).unwrap();
        let root = Arc::new(OwnedFd::from(File::open(dir.path()).unwrap()));
        Staging::new(root).sweep().unwrap();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        assert_eq!(left, [format!("{}.cobox-kept", unseen.key())]);
        assert_eq!(std::fs::read_to_string(dir.path().join(&left[0])).unwrap(), "unseen");
    }

    #[test]
    fn rename_by_link_never_replaces_an_existing_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let folder = File::open(dir.path()).unwrap();
        let renamed = |name: &str, new: &str| rename_by_link(folder.as_fd(), name.as_bytes(), folder.as_fd(), new.as_bytes());
        std::fs::write(at("file"), "file").unwrap();
        std::fs::write(at("other"), "other").unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        for name in ["file", "folder", "link"] {
            assert_eq!(renamed(name, "other"), Err(Errno::EXIST), "{name}");
            assert_eq!(renamed(name, &format!("new-{name}")), Ok(()), "{name}");
            assert!(std::fs::symlink_metadata(at(name)).is_err());
        }
        assert_eq!(std::fs::read_to_string(at("new-file")).unwrap(), "file");
        assert_eq!(std::fs::read_to_string(at("other")).unwrap(), "other");
        assert!(at("new-folder").is_dir() && at("new-link").is_symlink());
    }
}
