//! Translates the kernel's errors into errors for the client that named the path.

use cobox_protocol::{ApiError, ErrorCode};
use rustix::{fs::FileType, io::Errno};

use super::root::SymbolicLinks;

/// The protocol's error for an errno. `shown` is the path as the client may see it.
pub fn file_error(errno: Errno, shown: impl std::fmt::Display) -> ApiError {
    let (code, why) = match errno {
        Errno::NOENT => (ErrorCode::FileNotFound, "no such file or directory"),
        Errno::ACCESS | Errno::PERM => (ErrorCode::Forbidden, "permission denied for the sandbox's user"),
        Errno::ROFS => (ErrorCode::Forbidden, "read-only file system"),
        Errno::NOTDIR => (ErrorCode::InvalidRequest, "a component of the path is not a directory"),
        Errno::LOOP => (ErrorCode::InvalidRequest, "too many symbolic links, or a magic link of the kernel"),
        Errno::NAMETOOLONG => (ErrorCode::InvalidRequest, "a component of the path is longer than 255 bytes"),
        Errno::ISDIR => (ErrorCode::InvalidRequest, "it is a directory"),
        Errno::NOTEMPTY => (ErrorCode::InvalidRequest, "the directory is not empty; delete its contents first"),
        Errno::EXIST => (ErrorCode::InvalidRequest, "the path already exists"),
        Errno::XDEV => (ErrorCode::InvalidRequest, "the path leads out of the directory"),
        Errno::INVAL | Errno::ILSEQ => (ErrorCode::InvalidRequest, "the file system does not support this name"),
        Errno::BUSY | Errno::TXTBSY => (ErrorCode::Forbidden, "the path is in use or a mount point"),
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => return disk_full(),
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => (ErrorCode::RateLimited, "too many open files in the sandbox; try again later"),
        other => return ApiError::new(ErrorCode::Internal, format!("{shown}: {other}")),
    };
    ApiError::new(code, format!("{shown}: {why}"))
}

/// Like [`file_error`], for operations that may refuse links.
pub fn link_error(errno: Errno, links: SymbolicLinks, shown: impl std::fmt::Display) -> ApiError {
    if errno == Errno::LOOP && links == SymbolicLinks::Refuse {
        let message = format!("{shown}: the path contains a symbolic link, and the request forbids following it; use the resolved path");
        return ApiError::new(ErrorCode::Forbidden, message);
    }
    file_error(errno, shown)
}

pub fn disk_full() -> ApiError {
    ApiError::new(ErrorCode::DiskFull, "the disk of the sandbox or of its host is full; delete files and try again")
}

/// The error for something that exists and is not a regular file.
pub fn not_a_regular_file(kind: FileType, shown: impl std::fmt::Display) -> ApiError {
    let type_name = file_type_name(kind);
    let message = match kind {
        FileType::Directory => format!("{shown} is a directory; GET /v1/archive?path= returns its contents as a tar"),
        FileType::Unknown => format!("{shown} is not a regular file"),
        _ => format!("{shown} is a {type_name}, not a regular file"),
    };
    ApiError::invalid(message).with_details(serde_json::json!({ "kind": type_name }))
}

pub fn file_type_name(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::CharacterDevice | FileType::BlockDevice => "device",
        FileType::Unknown => "unknown",
    }
}
