//! Removes a tree that programs may be changing: by descriptors, without following links, at any depth with two
//! descriptors.

use std::os::fd::OwnedFd;

use cobox_protocol::{
    ApiError,
    fs::{ChangeResponse, RemoveRequest},
};
use rustix::{
    fs::{AtFlags, Dir, FileType, OFlags, Stat},
    io::Errno,
};

use super::stop::Stop;
use crate::files::{ChangeRecorder, Root, SandboxPath, file_error, kind, locate_entry, open_beneath, refuse_kernel_files, sync_directory};

/// Maximum depth of directories. Only the name of each level is kept.
const MAX_DEPTH: usize = 20_000;
/// Maximum entries of one request. Limits the time if a program creates files as fast as they are removed.
const MAX_ENTRIES: u64 = 10_000_000;
/// How often a directory is scanned again if entries appeared during its removal.
const MAX_LOOKS: u32 = 16;

pub fn remove(
    root: &Root,
    path: &SandboxPath,
    request: &RemoveRequest,
    recorder: &ChangeRecorder,
    stop: &Stop,
) -> Result<ChangeResponse, ApiError> {
    let to_api_error = |e| file_error(e, path);
    let (shown, path_b64) = path.to_json();
    let mut done = ChangeResponse { path: shown, path_b64, ..ChangeResponse::default() };
    let place = match locate_entry(root, path.bytes()) {
        Err(Errno::NOENT) if request.missing_ok => return Ok(done),
        other => other.map_err(to_api_error)?,
    };
    let Some(existing) = place.existing else {
        return if request.missing_ok { Ok(done) } else { Err(to_api_error(Errno::NOENT)) };
    };
    let removal = recorder.begin_removal(&place.parent, &place.name);
    let is_directory = kind(&existing) == FileType::Directory;
    let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    match rustix::fs::unlinkat(&place.parent, place.name.as_slice(), flags) {
        Err(Errno::NOTEMPTY) if request.recursive => {
            drop(removal);
            done.entries += empty_and_remove(&place.parent, &place.name, recorder, stop).map_err(to_api_error)?
        }
        Err(Errno::NOTEMPTY) => {
            return Err(ApiError::invalid(format!("{path}: the directory is not empty; set `recursive` to remove what is in it too")));
        }
        other => {
            other.map_err(to_api_error)?;
            removal.commit();
            done.entries += 1;
        }
    }
    done.changed = true;
    sync_directory(&place.parent).map_err(to_api_error)?;
    Ok(done)
}

/// A directory above the one being emptied.
struct Above {
    name: Vec<u8>,
    id: (u64, u64),
    looks: u32,
}

#[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
fn id(stat: &Stat) -> (u64, u64) {
    (stat.st_dev as u64, stat.st_ino as u64)
}

/// Removes a directory and everything below it. Returns the number of entries.
pub fn empty_and_remove(parent: &OwnedFd, name: &[u8], recorder: &ChangeRecorder, stop: &Stop) -> Result<u64, Errno> {
    let mut count = 0u64;
    let mut above = vec![Above { name: name.to_vec(), id: id(&rustix::fs::fstat(parent)?), looks: 0 }];
    let mut here = enter(parent, name)?;
    loop {
        if let Some(below) = clear(&here, &mut count, recorder, stop)? {
            if above.len() == MAX_DEPTH {
                return Err(Errno::TOOBIG);
            }
            let next = enter(&here, &below)?;
            above.push(Above { name: below, id: id(&rustix::fs::fstat(&here)?), looks: 0 });
            here = next;
            continue;
        }
        let is_top = above.len() == 1;
        let Some(level) = above.last_mut() else { return Ok(count) };
        let up = if is_top { parent.try_clone().map_err(|_| Errno::MFILE)? } else { open_up(&here, level.id)? };
        let removal = recorder.begin_removal(&up, &level.name);
        match rustix::fs::unlinkat(&up, level.name.as_slice(), AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY) if level.looks < MAX_LOOKS => {
                level.looks += 1;
                continue;
            }
            other => other?,
        }
        removal.commit();
        count += 1;
        above.pop();
        if above.is_empty() {
            return Ok(count);
        }
        here = up;
    }
}

/// Removes entries until it finds a directory that is not empty, and returns its name.
fn clear(here: &OwnedFd, count: &mut u64, recorder: &ChangeRecorder, stop: &Stop) -> Result<Option<Vec<u8>>, Errno> {
    for entry in Dir::read_from(here)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        *count += 1;
        if *count > MAX_ENTRIES {
            return Err(Errno::TOOBIG);
        }
        if stop.is_stopped() {
            return Err(Errno::INTR);
        }
        let removal = recorder.begin_removal(here, name);
        let is_directory = match entry.file_type() {
            FileType::Directory => true,
            FileType::Unknown => kind(&rustix::fs::statat(here, name, AtFlags::SYMLINK_NOFOLLOW)?) == FileType::Directory,
            _ => false,
        };
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match rustix::fs::unlinkat(here, name, flags) {
            Ok(()) => removal.commit(),
            Err(Errno::NOENT) => {}
            Err(Errno::NOTEMPTY) => {
                *count -= 1;
                return Ok(Some(name.to_vec()));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

fn enter(directory: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let below = open_beneath(directory, name, OFlags::RDONLY | OFlags::DIRECTORY)?;
    refuse_kernel_files(&below)?;
    Ok(below)
}

/// Opens the parent directory if it is still the one this was entered from: a program may have moved it.
fn open_up(here: &OwnedFd, expected: (u64, u64)) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let up = rustix::fs::openat(here, "..", flags, rustix::fs::Mode::empty())?;
    if id(&rustix::fs::fstat(&up)?) == expected { Ok(up) } else { Err(Errno::BUSY) }
}
