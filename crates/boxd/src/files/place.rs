//! Where a file will be: the directory that holds its name, made if it isn't there, with links followed the way a program would.

use std::os::fd::OwnedFd;

use rustix::{
    fs::{FileType, Mode, Stat},
    io::Errno,
};

use super::{
    author::Author,
    path::split,
    root::{Root, kind},
    write::{current, sync_directory},
};

/// As many links as the kernel itself follows in one path.
const MAX_LINKS: usize = 40;
/// What the kernel takes as one path.
const MAX_PATH_BYTES: usize = 4095;
const DIRECTORY_MODE: Mode = Mode::from_bits_retain(0o755);

pub struct Place {
    pub parent: OwnedFd,
    pub name: Vec<u8>,
    /// What has the name now; never a link.
    pub existing: Option<Stat>,
}

/// The place a program that opens this path for writing would write to.
pub fn locate(root: &Root, path: &[u8], is_durable: bool, author: &Author) -> Result<Place, Errno> {
    let mut path = path.to_vec();
    for _ in 0..=MAX_LINKS {
        let (directory, name) = split(&path).ok_or(Errno::ISDIR)?;
        let parent = make_directory(root, directory, is_durable, author)?;
        let existing = current(&parent, name)?;
        if existing.as_ref().is_none_or(|s| kind(s) != FileType::Symlink) {
            return Ok(Place { parent, name: name.to_vec(), existing });
        }
        if root.refuses_links() {
            return Err(Errno::LOOP);
        }
        let target = rustix::fs::readlinkat(&parent, name, Vec::new())?.into_bytes();
        // A relative target starts where the link is. The result is only a name again: the kernel resolves it within the root.
        path = if target.starts_with(b"/") { target } else { [directory, target.as_slice()].concat() };
        if path.len() > MAX_PATH_BYTES {
            return Err(Errno::NAMETOOLONG);
        }
    }
    Err(Errno::LOOP)
}

/// The name itself, for taking it away: a link is not followed and nothing is made.
pub fn locate_name(root: &Root, path: &[u8]) -> Result<Place, Errno> {
    let end = path.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
    let (directory, name) = split(&path[..end]).ok_or(Errno::BUSY)?;
    let parent = root.directory(directory)?;
    let existing = current(&parent, name)?;
    Ok(Place { parent, name: name.to_vec(), existing })
}

/// A directory and those above it, made where they are missing.
pub fn make_directory(root: &Root, path: &[u8], is_durable: bool, author: &Author) -> Result<OwnedFd, Errno> {
    match root.directory(path) {
        Err(Errno::NOENT) => {}
        other => return other,
    }
    let mut directory = root.directory(b"")?;
    let mut end = 0;
    for part in path.split(|b| *b == b'/') {
        end = (end + part.len() + 1).min(path.len());
        if part.is_empty() {
            continue;
        }
        directory = match root.directory(&path[..end]) {
            Err(Errno::NOENT) => {
                match rustix::fs::mkdirat(&directory, part, DIRECTORY_MODE) {
                    // Somebody else was faster, or it is a link to nowhere; opening it tells.
                    Err(Errno::EXIST) => {}
                    other => {
                        other?;
                        if let Ok(Some(stat)) = current(&directory, part) {
                            author.placed(&directory, part, &stat, true);
                        }
                    }
                }
                if is_durable {
                    sync_directory(&directory)?;
                }
                root.directory(&path[..end])?
            }
            other => other?,
        };
    }
    Ok(directory)
}
