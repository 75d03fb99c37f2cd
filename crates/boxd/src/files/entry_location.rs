//! Finds the directory and name at which a file will be written. Missing directories are created, and links are
//! followed as for a program.

use std::os::fd::OwnedFd;

use rustix::{
    fs::{FileType, Mode, Stat},
    io::Errno,
};

use super::{
    change_log::ChangeRecorder,
    path::split_parent,
    root::{Root, kind},
    write::{stat_entry, sync_directory},
};

/// The number of links that the kernel itself follows in one path.
const MAX_LINKS: usize = 40;
/// The kernel's limit on a path, without its NUL.
const MAX_PATH_BYTES: usize = 4095;
const DIRECTORY_MODE: Mode = Mode::from_bits_retain(0o755);

pub struct EntryLocation {
    pub parent: OwnedFd,
    pub name: Vec<u8>,
    /// What currently has this name; never a link.
    pub existing: Option<Stat>,
}

/// The place to which a program that opens this path for writing would write.
pub fn locate_for_write(root: &Root, path: &[u8], is_durable: bool, recorder: &ChangeRecorder) -> Result<EntryLocation, Errno> {
    let mut path = path.to_vec();
    for _ in 0..=MAX_LINKS {
        let (directory, name) = split_parent(&path).ok_or(Errno::ISDIR)?;
        let parent = create_directories(root, directory, is_durable, recorder)?;
        let existing = stat_entry(&parent, name)?;
        if existing.as_ref().is_none_or(|s| kind(s) != FileType::Symlink) {
            return Ok(EntryLocation { parent, name: name.to_vec(), existing });
        }
        if root.refuses_links() {
            return Err(Errno::LOOP);
        }
        let target = rustix::fs::readlinkat(&parent, name, Vec::new())?.into_bytes();
        // A relative target starts at the link's directory. The result is again only a path, which the kernel resolves
        // within the root.
        path = if target.starts_with(b"/") { target } else { [directory, target.as_slice()].concat() };
        if path.len() > MAX_PATH_BYTES {
            return Err(Errno::NAMETOOLONG);
        }
    }
    Err(Errno::LOOP)
}

/// The place of the name itself, for removal: links are not followed and nothing is created.
pub fn locate_entry(root: &Root, path: &[u8]) -> Result<EntryLocation, Errno> {
    let end = path.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
    let (directory, name) = split_parent(&path[..end]).ok_or(Errno::BUSY)?;
    let parent = root.open_directory(directory)?;
    let existing = stat_entry(&parent, name)?;
    Ok(EntryLocation { parent, name: name.to_vec(), existing })
}

/// Opens a directory, and creates it and its parents if they are missing.
pub fn create_directories(root: &Root, path: &[u8], is_durable: bool, recorder: &ChangeRecorder) -> Result<OwnedFd, Errno> {
    match root.open_directory(path) {
        Err(Errno::NOENT) => {}
        other => return other,
    }
    let mut directory = root.open_directory(b"")?;
    let mut end = 0;
    for part in path.split(|b| *b == b'/') {
        end = (end + part.len() + 1).min(path.len());
        if part.is_empty() {
            continue;
        }
        directory = match root.open_directory(&path[..end]) {
            Err(Errno::NOENT) => {
                match rustix::fs::mkdirat(&directory, part, DIRECTORY_MODE) {
                    // Created concurrently, or a dangling link. Opening it distinguishes the two.
                    Err(Errno::EXIST) => {}
                    other => {
                        other?;
                        if let Ok(Some(stat)) = stat_entry(&directory, part) {
                            recorder.record_placed(&directory, part, &stat, true);
                        }
                    }
                }
                if is_durable {
                    sync_directory(&directory)?;
                }
                root.open_directory(&path[..end])?
            }
            other => other?,
        };
    }
    Ok(directory)
}
