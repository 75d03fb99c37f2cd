//! Translates file metadata into the protocol's types.

use std::os::fd::AsFd;

use cobox_protocol::{
    ApiError, Timestamp,
    exec::text_and_b64,
    fs::{FileEntry, FileKind},
};
use rustix::fs::{FileType, OFlags, Stat};

use crate::files::{Root, SandboxPath, WriteLog, file_error, kind, refuse_kernel_files, split_parent};

pub fn file_kind(kind: FileType) -> FileKind {
    match kind {
        FileType::RegularFile => FileKind::File,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        FileType::Fifo => FileKind::Fifo,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice | FileType::BlockDevice => FileKind::Device,
        FileType::Unknown => FileKind::Unknown,
    }
}

/// The description of an entry in an open directory.
pub fn file_entry(directory: impl AsFd, name: &[u8], path: Vec<u8>, stat: &Stat, writes: &WriteLog) -> FileEntry {
    let target = (kind(stat) == FileType::Symlink).then(|| rustix::fs::readlinkat(directory, name, Vec::new()).ok()).flatten();
    build_entry(name, path, stat, writes, target.map(std::ffi::CString::into_bytes))
}

fn build_entry(name: &[u8], path: Vec<u8>, stat: &Stat, writes: &WriteLog, target: Option<Vec<u8>>) -> FileEntry {
    let (name, name_b64) = text_and_b64(name.to_vec());
    let (path, path_b64) = text_and_b64(path);
    let (target, target_b64) = target.map(text_and_b64).map_or((None, None), |(text, b64)| (Some(text), b64));
    #[allow(clippy::unnecessary_cast, reason = "the field is narrower on some machines")]
    let mtime = Timestamp::from_unix(stat.st_mtime as i64);
    FileEntry {
        name,
        name_b64,
        path,
        path_b64,
        kind: file_kind(kind(stat)),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: format!("{:03o}", stat.st_mode & 0o7777),
        mtime,
        etag: (kind(stat) == FileType::RegularFile).then(|| writes.etag(stat)),
        target,
        target_b64,
    }
}

pub fn stat(root: &Root, path: &SandboxPath, follow: bool, writes: &WriteLog) -> Result<FileEntry, ApiError> {
    let to_api_error = |e| file_error(e, path);
    let flags = if follow { OFlags::PATH } else { OFlags::PATH | OFlags::NOFOLLOW };
    let file = root.open(path.bytes(), flags).map_err(to_api_error)?;
    refuse_kernel_files(&file).map_err(to_api_error)?;
    let stat = rustix::fs::fstat(&file).map_err(to_api_error)?;
    let target = (kind(&stat) == FileType::Symlink).then(|| rustix::fs::readlinkat(&file, "", Vec::new()).ok()).flatten();
    let name = split_parent(path.bytes()).map_or(path.bytes(), |(_, name)| name);
    Ok(build_entry(name, path.bytes().to_vec(), &stat, writes, target.map(std::ffi::CString::into_bytes)))
}
