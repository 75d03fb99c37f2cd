//! Copies a sandbox's own files into a snapshot. The tree belongs to untrusted programs and may change during the copy: directories are
//! opened relative to their parent's descriptor, no link is followed, and the size of the copy is bounded.

use std::{
    collections::HashMap,
    ffi::{CString, OsStr},
    fs::File,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, XattrFlags, chownat, copy_file_range, fchmod,
        fchown, fgetxattr, flistxattr, fsetxattr, fstat, ftruncate, futimens, ioctl_ficlone, linkat, mkdirat, mknodat, openat, readlinkat,
        seek, statat, symlinkat, utimensat,
    },
    io::Errno,
    process::{Gid, Uid},
};

use super::{
    launch_spec::UID_RANGE,
    temporary_access::{self, ModeRestore},
};

/// Maximum depth, beyond any real project; each level needs two descriptors.
const MAX_DEPTH: usize = 100;
/// Bounds the time of one copy.
const MAX_ENTRIES: u64 = 4_000_000;
/// Minimum size that an entry counts: an inode takes space on the host even if the file is empty.
const ENTRY_BYTES: u64 = 4096;
/// Maximum number of files with several hard links whose first copy is remembered, which takes about 12 MB. The links of further files are
/// copied as separate files.
const MAX_TRACKED_LINKS: usize = 100_000;
/// Maximum total length of the extended attributes' names of one file, and of one value, in bytes.
const MAX_XATTR_NAMES: usize = 4096;
const MAX_XATTR_VALUE: usize = 4096;
/// Bytes read and written at a time where the kernel can't copy.
const CHUNK_BYTES: usize = 256 << 10;
/// Owner in the copy of files that belong to no ID of the sandbox.
const NOBODY: u32 = 65_534;
/// Marks a directory as opaque: it hides the contents of the same directory in lower layers.
const OPAQUE_XATTR: &[u8] = b"user.overlay.opaque";
/// Prefix of the overlay's other attributes, which refer to the original layers and are not copied.
const OVERLAY_XATTR_PREFIX: &[u8] = b"user.overlay.";

/// Copies the contents of a directory into an empty one. `uid_base` is the first ID of the sandbox's range, which becomes 0 in the copy, as
/// in every lower layer. Set-user-ID bits are not copied. Returns the size of the copy, which is at most `max_bytes`.
pub fn copy_tree(from: &OwnedFd, to: &Path, uid_base: Option<u32>, max_bytes: u64) -> io::Result<u64> {
    let top = openat(CWD, to, dir_flags(), Mode::empty())?;
    let first = openat(&top, ".", dir_flags(), Mode::empty())?;
    let mut copy = TreeCopy { uid_base, max_bytes, bytes: 0, entries: 0, top, first_copies: HashMap::new() };
    let stat = fstat(from)?;
    let mut open = vec![OpenDirectory { entries: Dir::read_from(from)?, stat, to: first, path: PathBuf::new(), _mode_restore: None }];
    while let Some(level) = open.last_mut() {
        let Some(entry) = level.entries.read() else {
            if let Some(done) = open.pop() {
                copy.finish_dir(&done)?;
            }
            continue;
        };
        let entry = entry?;
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        let below = copy.entry(level, &entry.file_name().to_owned())?;
        if let Some(below) = below {
            if open.len() >= MAX_DEPTH {
                return Err(io::Error::other(format!("its directories are nested more than {MAX_DEPTH} deep")));
            }
            open.push(below);
        }
    }
    Ok(copy.bytes)
}

struct TreeCopy {
    uid_base: Option<u32>,
    max_bytes: u64,
    bytes: u64,
    entries: u64,
    /// The top directory of the copy.
    top: OwnedFd,
    /// Path of the first copy of a file with several hard links, by device, inode, size and modification time. Device and inode alone are
    /// not enough: the inode number of a deleted file may be reused during the copy.
    first_copies: HashMap<(u64, u64, i64, i64), PathBuf>,
}

/// A directory whose entries are being copied.
struct OpenDirectory {
    entries: Dir,
    stat: Stat,
    to: OwnedFd,
    /// Relative to the top.
    path: PathBuf,
    _mode_restore: Option<ModeRestore>,
}

fn dir_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

impl TreeCopy {
    fn count(&mut self, bytes: u64) -> io::Result<()> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.max_bytes {
            return Err(io::Error::other(format!("its files take more than {} bytes", self.max_bytes)));
        }
        Ok(())
    }

    /// Copies one entry. For a directory, returns it so that its entries are copied next.
    fn entry(&mut self, level: &OpenDirectory, name: &CString) -> io::Result<Option<OpenDirectory>> {
        let from = level.entries.fd()?;
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(io::Error::other(format!("it has more than {MAX_ENTRIES} files")));
        }
        let before = self.bytes;
        let copied = match statat(from, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => self.copy(level, name, &stat),
            Err(e) => Err(e.into()),
        };
        self.count(ENTRY_BYTES.saturating_sub(self.bytes - before))?;
        match copied {
            // Deleted or replaced before it was copied.
            Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO)) => Ok(None),
            Err(e) => Err(io::Error::new(e.kind(), format!("{}: {e}", name.to_string_lossy().escape_default()))),
            Ok(below) => Ok(below),
        }
    }

    fn copy(&mut self, level: &OpenDirectory, name: &CString, stat: &Stat) -> io::Result<Option<OpenDirectory>> {
        let (from, to) = (level.entries.fd()?, &level.to);
        let is_overlays_whiteout = stat.st_rdev == 0;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                // Entries of a directory that is readable but not searchable can't be looked up.
                let needs_access = self.uid_base.is_none() && stat.st_mode & 0o500 != 0o500;
                let (dir, mode_restore) = temporary_access::open(from, name, dir_flags(), needs_access)?;
                mkdirat(to, name, Mode::RWXU)?;
                let made = openat(to, name, dir_flags(), Mode::empty())?;
                self.copy_attributes(dir.as_fd(), &made)?;
                let path = level.path.join(OsStr::from_bytes(name.to_bytes()));
                // Uses the mode from before it was opened, which may have changed it.
                return Ok(Some(OpenDirectory { stat: *stat, entries: Dir::new(dir)?, to: made, path, _mode_restore: mode_restore }));
            }
            FileType::RegularFile => self.file(level, name, stat)?,
            FileType::Symlink => {
                symlinkat(&readlinkat(from, name, Vec::new())?, to, name)?;
                self.set_metadata_at(to, name, stat)?;
            }
            // A whiteout: the name is deleted from the layers below.
            FileType::CharacterDevice if is_overlays_whiteout => mknodat(to, name, FileType::CharacterDevice, Mode::empty(), 0)?,
            FileType::Fifo => {
                mknodat(to, name, FileType::Fifo, Mode::from_raw_mode(stat.st_mode & 0o777), 0)?;
                self.set_metadata_at(to, name, stat)?;
            }
            // Skipped: sockets belong to a running program, and devices can't be opened.
            _ => {}
        }
        Ok(None)
    }

    fn file(&mut self, level: &OpenDirectory, name: &CString, before: &Stat) -> io::Result<()> {
        let (from, to) = (level.entries.fd()?, &level.to);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let (source, mode_restore) = temporary_access::open(from, name, flags, false)?;
        drop(mode_restore);
        let mut stat = fstat(&source)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::NXIO.into());
        }
        if stat.st_ino == before.st_ino {
            // Opening it may have changed the mode temporarily.
            stat.st_mode = before.st_mode;
        }
        let inode = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime);
        if stat.st_nlink > 1
            && let Some(first) = self.first_copies.get(&inode)
            && linkat(&self.top, first, to, name, AtFlags::empty()).is_ok()
        {
            return Ok(());
        }
        if stat.st_nlink > 1 && self.first_copies.len() < MAX_TRACKED_LINKS {
            self.first_copies.insert(inode, level.path.join(OsStr::from_bytes(name.to_bytes())));
        }
        let made =
            openat(to, name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?;
        self.content(&source, &made, u64::try_from(stat.st_size).unwrap_or(0))?;
        self.copy_attributes(source.as_fd(), &made)?;
        self.set_metadata(&made, &stat)
    }

    /// Copies a file's content. A file that grows during the copy is truncated to its initial length; one that shrinks is padded with
    /// zeros.
    fn content(&mut self, source: &OwnedFd, made: &OwnedFd, len: u64) -> io::Result<()> {
        if len > 0 && ioctl_ficlone(made, source).is_ok() {
            // The blocks are shared with the original but count in full, because sharing ends when either file changes.
            self.count(u64::try_from(fstat(made)?.st_blocks).unwrap_or(0).saturating_mul(512))?;
            return Ok(());
        }
        ftruncate(made, len)?;
        let mut at = 0;
        while at < len {
            let start = match seek(source, SeekFrom::Data(at)) {
                Ok(start) if start < len => start,
                Ok(_) | Err(Errno::NXIO) => break,
                Err(e) => return Err(e.into()),
            };
            let end = match seek(source, SeekFrom::Hole(start)) {
                Ok(end) => end.min(len),
                Err(Errno::NXIO) => len,
                Err(e) => return Err(e.into()),
            };
            self.count(end.saturating_sub(start))?;
            copy_range(source, made, start, end)?;
            at = end.max(start + 1);
        }
        Ok(())
    }

    /// Copies user attributes, and of the overlay's only the opaque marker. Access control lists are not copied, because they contain IDs
    /// of the sandbox's range.
    fn copy_attributes(&self, from: BorrowedFd<'_>, to: &OwnedFd) -> io::Result<()> {
        let mut names = vec![0u8; MAX_XATTR_NAMES];
        let len = match flistxattr(from, &mut names[..]) {
            Ok(len) => len,
            Err(Errno::OPNOTSUPP) => return Ok(()),
            Err(Errno::RANGE) => return Err(io::Error::other("it has too many extended attributes")),
            Err(e) => return Err(e.into()),
        };
        for name in names[..len]
            .split(|b| *b == 0)
            .filter(|n| n.starts_with(b"user.") && (*n == OPAQUE_XATTR || !n.starts_with(OVERLAY_XATTR_PREFIX)))
        {
            let mut value = vec![0u8; MAX_XATTR_VALUE];
            match fgetxattr(from, name, &mut value[..]) {
                Ok(len) => fsetxattr(to, name, &value[..len], XattrFlags::empty())?,
                // Removed in the meantime.
                Err(Errno::NODATA) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn owner(&self, stat: &Stat) -> Option<(Uid, Gid)> {
        let base = self.uid_base?;
        let inside = |id: u32| id.checked_sub(base).filter(|id| *id < UID_RANGE).unwrap_or(NOBODY);
        Some((Uid::from_raw(inside(stat.st_uid)), Gid::from_raw(inside(stat.st_gid))))
    }

    fn set_metadata(&self, made: &OwnedFd, stat: &Stat) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner(stat) {
            fchown(made, Some(uid), Some(gid))?;
        }
        // The copy may belong to the host's uid 0: without set-id bits, it can't be used to become root. The sticky bit and the
        // set-group-ID bit of directories are kept.
        let kept = if FileType::from_raw_mode(stat.st_mode) == FileType::Directory { 0o3777 } else { 0o777 };
        fchmod(made, Mode::from_raw_mode(stat.st_mode & kept))?;
        Ok(futimens(made, &times(stat))?)
    }

    fn finish_dir(&self, level: &OpenDirectory) -> io::Result<()> {
        self.set_metadata(&level.to, &level.stat)
    }

    /// Sets the owner and times of an entry that isn't opened.
    fn set_metadata_at(&self, to: &OwnedFd, name: &CString, stat: &Stat) -> io::Result<()> {
        if let Some((uid, gid)) = self.owner(stat) {
            chownat(to, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(utimensat(to, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)?)
    }
}

/// Copies a range in the kernel where possible, which it isn't between an image's filesystem and the one that contains the image. If the
/// source was truncated in the meantime, the rest stays a hole.
pub fn copy_range(source: impl AsFd + Copy, made: impl AsFd + Copy, start: u64, end: u64) -> io::Result<()> {
    let (mut from_at, mut to_at) = (start, start);
    while from_at < end {
        let wanted = usize::try_from(end - from_at).unwrap_or(usize::MAX).min(1 << 30);
        match copy_file_range(source, Some(&mut from_at), made, Some(&mut to_at), wanted) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => return copy_by_read_and_write(source, made, from_at, end),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn copy_by_read_and_write(source: impl AsFd + Copy, made: impl AsFd + Copy, start: u64, end: u64) -> io::Result<()> {
    let mut chunk = vec![0u8; CHUNK_BYTES];
    let mut at = start;
    while at < end {
        let wanted = usize::try_from(end - at).unwrap_or(usize::MAX).min(CHUNK_BYTES);
        let got = rustix::io::pread(source, &mut chunk[..wanted], at)?;
        if got == 0 {
            return Ok(());
        }
        let mut written = 0;
        while written < got {
            written += rustix::io::pwrite(made, &chunk[written..got], at + written as u64)?;
        }
        at += got as u64;
    }
    Ok(())
}

fn times(stat: &Stat) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: stat.st_atime, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec as _ },
    }
}

/// Flushes the filesystem of a directory to disk.
pub fn sync_filesystem(dir: &Path) -> io::Result<()> {
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    };

    use super::*;

    fn copied(from: &Path, max_bytes: u64) -> (tempfile::TempDir, io::Result<u64>) {
        let to = tempfile::tempdir().unwrap();
        let source = openat(CWD, from, dir_flags(), Mode::empty()).unwrap();
        let done = copy_tree(&source, to.path(), None, max_bytes);
        (to, done)
    }

    #[test]
    fn files_links_modes_and_whiteouts_are_copied_and_nothing_else_is() {
        let from = tempfile::tempdir().unwrap();
        let at = |name: &str| from.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/b/program"), "#!/bin/sh\n").unwrap();
        fs::set_permissions(at("a/b/program"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::set_permissions(at("a"), fs::Permissions::from_mode(0o1555)).unwrap();
        symlink("/etc/passwd", at("link")).unwrap();
        mknodat(CWD, at("gone"), FileType::CharacterDevice, Mode::empty(), 0).unwrap();
        mknodat(CWD, at("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let (to, done) = copied(from.path(), 1 << 20);
        assert!(done.unwrap() >= 10);
        let of = |name: &str| fs::symlink_metadata(to.path().join(name));
        assert_eq!(of("a/b/program").unwrap().mode() & 0o7777, 0o755, "without set-id bits");
        assert_eq!(of("a").unwrap().mode() & 0o7777, 0o1555);
        assert_eq!(of("a/b/program").unwrap().mtime(), fs::metadata(at("a/b/program")).unwrap().mtime());
        assert_eq!(fs::read_link(to.path().join("link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(of("gone").unwrap().rdev(), 0);
        assert!(of("fifo").is_ok() && of("socket").is_err());
    }

    #[test]
    fn sparse_files_stay_sparse_and_oversized_trees_are_refused() {
        let from = tempfile::tempdir().unwrap();
        let sparse = File::create(from.path().join("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        std::os::unix::fs::FileExt::write_at(&sparse, b"x", 1 << 39).unwrap();
        let (to, done) = copied(from.path(), 1 << 20);
        done.unwrap();
        let made = fs::metadata(to.path().join("sparse")).unwrap();
        assert_eq!((made.len(), made.blocks() < 64), (1 << 40, true));
        fs::write(from.path().join("full"), vec![1; 2 << 20]).unwrap();
        assert!(copied(from.path(), 1 << 20).1.unwrap_err().to_string().contains("more than 1048576 bytes"));
    }

    #[test]
    fn small_files_and_hard_linked_files_are_counted_once() {
        let from = tempfile::tempdir().unwrap();
        fs::create_dir(from.path().join("d")).unwrap();
        for n in 0..100 {
            fs::write(from.path().join(format!("d/{n}")), [1; 4096]).unwrap();
        }
        let (_to, done) = copied(from.path(), 1 << 20);
        assert_eq!(done.unwrap(), 101 * 4096);
        fs::write(from.path().join("big"), vec![1; 512 << 10]).unwrap();
        for n in 0..50 {
            fs::hard_link(from.path().join("big"), from.path().join(format!("d/big{n}"))).unwrap();
        }
        let (to, done) = copied(from.path(), 2 << 20);
        assert!(done.unwrap() < 1300 << 10);
        let of = |name: &str| fs::metadata(to.path().join(name)).unwrap();
        assert_eq!((of("big").ino(), of("big").nlink()), (of("d/big49").ino(), 51));
        assert_eq!(fs::read(to.path().join("d/big7")).unwrap(), vec![1; 512 << 10]);
    }

    /// Affects only the calling thread.
    fn as_ordinary_user() {
        use rustix::thread::{set_thread_res_gid, set_thread_res_uid};
        let (uid, gid) = (Uid::from_raw(61_240), Gid::from_raw(61_240));
        set_thread_res_gid(gid, gid, gid).unwrap();
        set_thread_res_uid(uid, uid, uid).unwrap();
    }

    #[test]
    fn files_that_deny_access_to_their_owner_are_copied_with_their_mode() {
        let from = tempfile::tempdir().unwrap();
        let at = |name: &str| from.path().join(name);
        fs::create_dir(at("shut")).unwrap();
        fs::write(at("shut/f"), "in it").unwrap();
        fs::write(at("secret"), "text").unwrap();
        fs::create_dir(at("dull")).unwrap();
        fs::write(at("dull/g"), "in it").unwrap();
        fs::set_permissions(at("dull"), fs::Permissions::from_mode(0o400)).unwrap();
        symlink("secret", at("link")).unwrap();
        for name in ["secret", "shut"] {
            fs::set_permissions(at(name), fs::Permissions::from_mode(0o000)).unwrap();
        }
        let to = tempfile::tempdir().unwrap();
        let copy = |from: &Path, to: &Path| {
            let source = openat(CWD, from, dir_flags(), Mode::empty()).unwrap();
            copy_tree(&source, to, None, 1 << 20)
        };
        if rustix::process::geteuid().is_root() {
            // Run in a thread with an ordinary user's IDs.
            for dir in [from.path(), to.path(), &at("secret"), &at("shut"), &at("dull")] {
                std::os::unix::fs::chown(dir, Some(61_240), Some(61_240)).unwrap();
            }
            std::thread::scope(|scope| {
                let copied = scope.spawn(|| {
                    as_ordinary_user();
                    copy(from.path(), to.path())
                });
                copied.join().unwrap().unwrap();
            });
        } else {
            copy(from.path(), to.path()).unwrap();
        }
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o7777;
        for of in [from.path(), to.path()] {
            assert_eq!(["secret", "shut", "dull"].map(|name| mode(&of.join(name))), [0, 0, 0o400], "the modes are unchanged");
            for name in ["shut", "dull"] {
                fs::set_permissions(of.join(name), fs::Permissions::from_mode(0o700)).unwrap();
            }
        }
        assert_eq!(fs::metadata(to.path().join("secret")).unwrap().len(), 4);
        assert!(to.path().join("shut/f").exists() && to.path().join("dull/g").exists());
    }

    #[test]
    fn ranges_that_the_kernel_cannot_copy_are_read_and_written() {
        let mut from = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..3 * CHUNK_BYTES / 2).map(|n| n as u8).collect();
        io::Write::write_all(&mut from, &content).unwrap();
        let made = tempfile::NamedTempFile::new().unwrap();
        copy_by_read_and_write(&from, &made.reopen().unwrap(), 100, content.len() as u64).unwrap();
        let copied = fs::read(made.path()).unwrap();
        assert!(copied[..100].iter().all(|b| *b == 0) && copied[100..] == content[100..]);
    }

    #[test]
    fn a_tree_that_is_too_deep_is_refused() {
        let from = tempfile::tempdir().unwrap();
        let mut at = openat(CWD, from.path(), dir_flags(), Mode::empty()).unwrap();
        for _ in 0..150 {
            mkdirat(&at, "d", Mode::RWXU).unwrap();
            at = openat(&at, "d", dir_flags(), Mode::empty()).unwrap();
        }
        assert!(copied(from.path(), 1 << 30).1.unwrap_err().to_string().contains("deep"));
    }
}
