//! Finds the directory and name at which a file will be written. Missing directories are created, and links are
//! followed as for a program.

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

/// The number of links that the kernel itself follows in one path.
const MAX_LINKS: usize = 40;
/// The kernel's limit on a path, without its NUL.
const MAX_PATH_BYTES: usize = 4095;
const DIRECTORY_MODE: Mode = Mode::from_bits_retain(0o755);

pub struct Place {
    pub parent: OwnedFd,
    pub name: Vec<u8>,
    /// What currently has this name; never a link.
    pub existing: Option<Stat>,
}

/// The place to which a program that opens this path for writing would write.
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
pub fn locate_name(root: &Root, path: &[u8]) -> Result<Place, Errno> {
    let end = path.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
    let (directory, name) = split(&path[..end]).ok_or(Errno::BUSY)?;
    let parent = root.directory(directory)?;
    let existing = current(&parent, name)?;
    Ok(Place { parent, name: name.to_vec(), existing })
}

/// Opens a directory, and creates it and its parents if they are missing.
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
                    // Created concurrently, or a dangling link. Opening it distinguishes the two.
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
