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

use super::stop_signal::StopSignal;
use crate::files::{ChangeRecorder, Root, SandboxPath, file_error, kind, locate_entry, open_beneath, refuse_kernel_files, sync_directory};

/// Maximum depth of directories. Only the name of each level is kept.
const MAX_DEPTH: usize = 20_000;
/// Maximum entries of one request. Limits the time if a program creates files as fast as they are removed.
const MAX_ENTRIES: u64 = 10_000_000;
/// How often a directory is scanned again if entries appeared during its removal.
const MAX_SCANS: u32 = 16;

pub fn remove(
    root: &Root,
    path: &SandboxPath,
    request: &RemoveRequest,
    recorder: &ChangeRecorder,
    stop: &StopSignal,
) -> Result<ChangeResponse, ApiError> {
    let to_api_error = |e| file_error(e, path);
    let (shown, path_b64) = path.to_json();
    let mut response = ChangeResponse { path: shown, path_b64, ..ChangeResponse::default() };
    let location = match locate_entry(root, path.bytes()) {
        Err(Errno::NOENT) if request.missing_ok => return Ok(response),
        other => other.map_err(to_api_error)?,
    };
    let Some(existing) = location.existing else {
        return if request.missing_ok { Ok(response) } else { Err(to_api_error(Errno::NOENT)) };
    };
    let removal = recorder.begin_removal(&location.parent, &location.name);
    let is_directory = kind(&existing) == FileType::Directory;
    let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    match rustix::fs::unlinkat(&location.parent, location.name.as_slice(), flags) {
        Err(Errno::NOTEMPTY) if request.recursive => {
            drop(removal);
            response.entries += remove_tree(&location.parent, &location.name, recorder, stop).map_err(to_api_error)?
        }
        Err(Errno::NOTEMPTY) => {
            return Err(ApiError::invalid(format!("{path}: the directory is not empty; set `recursive` to delete its contents, too")));
        }
        other => {
            other.map_err(to_api_error)?;
            removal.commit();
            response.entries += 1;
        }
    }
    response.changed = true;
    sync_directory(&location.parent).map_err(to_api_error)?;
    Ok(response)
}

/// A directory above the one being emptied.
struct ParentLevel {
    name: Vec<u8>,
    id: (u64, u64),
    scans: u32,
}

#[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
fn id(stat: &Stat) -> (u64, u64) {
    (stat.st_dev as u64, stat.st_ino as u64)
}

/// Removes a directory and everything below it. Returns the number of entries.
pub fn remove_tree(parent: &OwnedFd, name: &[u8], recorder: &ChangeRecorder, stop: &StopSignal) -> Result<u64, Errno> {
    let mut count = 0u64;
    let mut levels = vec![ParentLevel { name: name.to_vec(), id: id(&rustix::fs::fstat(parent)?), scans: 0 }];
    let mut directory = open_child(parent, name)?;
    loop {
        if let Some(child) = remove_entries(&directory, &mut count, recorder, stop)? {
            if levels.len() == MAX_DEPTH {
                return Err(Errno::TOOBIG);
            }
            let next = open_child(&directory, &child)?;
            levels.push(ParentLevel { name: child, id: id(&rustix::fs::fstat(&directory)?), scans: 0 });
            directory = next;
            continue;
        }
        let is_top = levels.len() == 1;
        let Some(level) = levels.last_mut() else { return Ok(count) };
        let parent_directory = if is_top { parent.try_clone().map_err(|_| Errno::MFILE)? } else { open_parent(&directory, level.id)? };
        let removal = recorder.begin_removal(&parent_directory, &level.name);
        match rustix::fs::unlinkat(&parent_directory, level.name.as_slice(), AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY) if level.scans < MAX_SCANS => {
                level.scans += 1;
                continue;
            }
            other => other?,
        }
        removal.commit();
        count += 1;
        levels.pop();
        if levels.is_empty() {
            return Ok(count);
        }
        directory = parent_directory;
    }
}

/// Removes entries until it finds a directory that is not empty, and returns its name.
fn remove_entries(directory: &OwnedFd, count: &mut u64, recorder: &ChangeRecorder, stop: &StopSignal) -> Result<Option<Vec<u8>>, Errno> {
    for entry in Dir::read_from(directory)? {
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
        let removal = recorder.begin_removal(directory, name);
        let is_directory = match entry.file_type() {
            FileType::Directory => true,
            FileType::Unknown => kind(&rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?) == FileType::Directory,
            _ => false,
        };
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        match rustix::fs::unlinkat(directory, name, flags) {
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

fn open_child(parent: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let child = open_beneath(parent, name, OFlags::RDONLY | OFlags::DIRECTORY)?;
    refuse_kernel_files(&child)?;
    Ok(child)
}

/// Opens the parent directory if it is still the one this was entered from: a program may have moved it.
fn open_parent(directory: &OwnedFd, expected: (u64, u64)) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent_directory = rustix::fs::openat(directory, "..", flags, rustix::fs::Mode::empty())?;
    if id(&rustix::fs::fstat(&parent_directory)?) == expected { Ok(parent_directory) } else { Err(Errno::BUSY) }
}
