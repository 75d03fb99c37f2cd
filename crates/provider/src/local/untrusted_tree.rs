//! Measures and removes directory trees that untrusted programs created: with any depth, modes and number of entries, and links to any
//! path. Directories are opened relative to their parent's descriptor, so no link is ever followed.

use std::{ffi::CString, io, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, chmodat, openat, renameat, statat, unlinkat},
    io::Errno,
};

use crate::WrittenFiles;

/// Entries processed before the directory is read again: bounds memory for directories of any size.
const BATCH: usize = 1024;
/// Maximum depth, beyond any real project. Deeper trees can't be measured with few descriptors and count as over the limit.
const MAX_DEPTH: usize = 100;
/// Bounds the time of one measurement to about ten seconds.
const MAX_ENTRIES: u64 = 4_000_000;
/// Minimum size that an entry counts: an inode takes space on the host even if the file is empty.
const ENTRY_BYTES: u64 = 4096;

fn open_dir(at: impl std::os::fd::AsFd, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    openat(at, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Reads the first entries of a directory.
fn read_batch(dir: &OwnedFd) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
        if names.len() == BATCH {
            break;
        }
    }
    Ok(names)
}

/// Removes a tree, which must no longer be written to.
///
/// The subdirectories of each directory are moved to the top before it is removed, so that neither the stack nor the number of open
/// descriptors grows with depth.
pub fn remove(path: &Path) -> io::Result<()> {
    let top = match open_dir(CWD, path) {
        Err(Errno::NOTDIR | Errno::LOOP) => return Ok(unlinkat(CWD, path, AtFlags::empty())?),
        other => other?,
    };
    let mut moved = 0u64;
    loop {
        let names = read_batch(&top)?;
        if names.is_empty() {
            break;
        }
        for name in names {
            match unlinkat(&top, &name, AtFlags::empty()) {
                Err(Errno::ISDIR | Errno::PERM) => remove_dir_after_hoisting(&top, &name, &mut moved)?,
                other => other?,
            }
        }
    }
    drop(top);
    Ok(unlinkat(CWD, path, AtFlags::REMOVEDIR)?)
}

/// Removes one directory at the top after moving its subdirectories to the top.
fn remove_dir_after_hoisting(top: &OwnedFd, name: &CString, moved: &mut u64) -> Result<(), Errno> {
    // Its mode may deny its owner access. It is known to be a directory, because unlink failed.
    chmodat(top, name, Mode::RWXU, AtFlags::empty())?;
    let dir = open_dir(top, name)?;
    loop {
        let names = read_batch(&dir)?;
        if names.is_empty() {
            break;
        }
        for child in names {
            match unlinkat(&dir, &child, AtFlags::empty()) {
                Err(Errno::ISDIR | Errno::PERM) => {
                    // To be moved, a directory must be writable itself.
                    chmodat(&dir, &child, Mode::RWXU, AtFlags::empty())?;
                    loop {
                        *moved += 1;
                        match rustix::fs::renameat_with(&dir, &child, top, format!(".{moved}"), rustix::fs::RenameFlags::NOREPLACE) {
                            Err(Errno::EXIST) => {}
                            // The filesystem doesn't support the flag. This name is unlikely to exist.
                            Err(Errno::INVAL) => break renameat(&dir, &child, top, format!(".cobox-removed-{moved}"))?,
                            other => break other?,
                        }
                    }
                }
                other => other?,
            }
        }
    }
    unlinkat(top, name, AtFlags::REMOVEDIR)
}

/// Set-user-id and set-group-id.
pub const SET_ID_BITS: u32 = 0o6000;

/// Clears the set-id bits of all files of a tree that no sandbox has written to. Fails for a tree deeper than [`MAX_DEPTH`].
pub fn clear_set_id(path: &Path) -> io::Result<()> {
    let mut open = vec![Dir::new(open_dir(CWD, path)?)?];
    loop {
        let depth = open.len();
        let Some(dir) = open.last_mut() else { return Ok(()) };
        let Some(entry) = dir.read().transpose()? else {
            open.pop();
            continue;
        };
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        let fd = dir.fd()?;
        let stat = statat(fd, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if depth >= MAX_DEPTH => return Err(io::Error::other("its directories are too deep")),
            FileType::Directory => {
                let child = Dir::new(open_dir(fd, entry.file_name())?)?;
                open.push(child);
            }
            FileType::RegularFile if stat.st_mode & SET_ID_BITS != 0 => {
                chmodat(fd, entry.file_name(), Mode::from_raw_mode(stat.st_mode & 0o1777), AtFlags::empty())?;
            }
            _ => {}
        }
    }
}

/// Measures a tree's disk usage in bytes, at least [`ENTRY_BYTES`] per entry. Returns `u64::MAX` for a tree that can't be read, is deeper
/// than [`MAX_DEPTH`] or has more than [`MAX_ENTRIES`]. Entries that are deleted during the measurement don't count.
pub fn measure(path: &Path) -> u64 {
    let Ok(top) = open_dir(CWD, path) else { return 0 };
    let mut total = 0u64;
    let is_complete = visit(top, |stat| total = total.saturating_add((stat.st_blocks as u64 * 512).max(ENTRY_BYTES)));
    if is_complete { total } else { u64::MAX }
}

/// Counts the files and symbolic links of a tree within [`MAX_DEPTH`] and [`MAX_ENTRIES`].
pub fn count_files(top: OwnedFd) -> WrittenFiles {
    let mut written = WrittenFiles::default();
    let is_complete = visit(top, |stat| {
        if matches!(FileType::from_raw_mode(stat.st_mode), FileType::RegularFile | FileType::Symlink) {
            written.files += 1;
            written.bytes = written.bytes.saturating_add(stat.st_size as u64);
        }
    });
    WrittenFiles { is_complete, ..written }
}

/// Calls a function for every entry of a tree. Stops and returns false at a directory that can't be read or is too deep, or after too many
/// entries.
fn visit(top: OwnedFd, mut show: impl FnMut(&Stat)) -> bool {
    let mut entries = 0u64;
    let Ok(top) = Dir::new(top) else { return false };
    let mut open = vec![top];
    while let Some(dir) = open.last_mut() {
        entries += 1;
        if entries > MAX_ENTRIES {
            return false;
        }
        let Some(Ok(entry)) = dir.read() else {
            open.pop();
            continue;
        };
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        let Ok(fd) = dir.fd() else { return false };
        let Ok(stat) = statat(fd, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) else { continue };
        show(&stat);
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            match open_dir(fd, entry.file_name()).and_then(Dir::new) {
                Ok(_) if open.len() >= MAX_DEPTH => return false,
                Ok(child) => open.push(child),
                // Deleted or replaced in the meantime.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                Err(_) => return false,
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_tree_of_any_depth_and_modes_is_removed_without_touching_its_siblings() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, beside) = (dir.path().join("tree"), dir.path().join("beside"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir(&beside).unwrap();
        fs::write(beside.join("kept"), "").unwrap();
        fs::write(tree.join("a/b/f"), "").unwrap();
        std::os::unix::fs::symlink(&beside, tree.join("a/link")).unwrap();
        fs::set_permissions(tree.join("a/b"), fs::Permissions::from_mode(0o000)).unwrap();
        let mut at = open_dir(CWD, &tree).unwrap();
        for _ in 0..5_000 {
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
            at = open_dir(&at, "d").unwrap();
        }
        drop(at);
        assert_eq!(measure(&tree), u64::MAX, "too deep to measure");
        remove(&tree).unwrap();
        assert!(!tree.exists() && beside.join("kept").exists());
    }

    #[test]
    fn every_entry_counts_and_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..100 {
            fs::write(dir.path().join(format!("empty{i}")), "").unwrap();
        }
        fs::write(dir.path().join("big"), vec![1; 1 << 20]).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("root")).unwrap();
        let used = measure(dir.path());
        assert!(((1 << 20) + 100 * ENTRY_BYTES..4 << 20).contains(&used), "{used}");
    }
}
