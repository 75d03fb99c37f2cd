//! Creates directories.

use cobox_protocol::{
    ApiError, ErrorCode,
    fs::{ChangeResponse, MkdirRequest},
};
use rustix::{
    fs::{FileType, Mode, OFlags},
    io::Errno,
};

use crate::files::{
    ChangeRecorder, Root, SandboxPath, create_directories, file_error, kind, open_beneath, parse_mode, split_parent, stat_entry,
    sync_directory,
};

const DIRECTORY_MODE: u32 = 0o755;

pub fn mkdir(root: &Root, path: &SandboxPath, request: &MkdirRequest, recorder: &ChangeRecorder) -> Result<ChangeResponse, ApiError> {
    let to_api_error = |e| file_error(e, path);
    let mode = match &request.mode {
        Some(mode) => parse_mode(mode).ok_or_else(|| ApiError::invalid("mode: must be permission bits in octal, such as 755"))?,
        None => DIRECTORY_MODE,
    };
    let respond = |changed| {
        let (shown, path_b64) = path.to_json();
        Ok(ChangeResponse { path: shown, path_b64, changed, entries: u64::from(changed), ..ChangeResponse::default() })
    };
    let end = path.bytes().iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
    let Some((parent_path, name)) = split_parent(&path.bytes()[..end]) else {
        // The root, or a path that ends in `..`: it exists if it can be opened.
        root.open_directory(path.bytes()).map_err(to_api_error)?;
        return if request.exist_ok { respond(false) } else { Err(already_exists(path)) };
    };
    let parent = if request.parents { create_directories(root, parent_path, true, recorder) } else { root.open_directory(parent_path) }
        .map_err(to_api_error)?;
    match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(mode)) {
        Ok(()) => {}
        Err(Errno::EXIST) if request.exist_ok && root.open_directory(path.bytes()).is_ok() => return respond(false),
        Err(Errno::EXIST) => return Err(already_exists(path)),
        Err(e) => return Err(to_api_error(e)),
    }
    // The umask of boxd may have reduced the mode. If the directory can't be opened, a program has changed it in the
    // meantime, and that change stands.
    if let Ok(created) = open_beneath(&parent, name, OFlags::RDONLY | OFlags::DIRECTORY) {
        rustix::fs::fchmod(&created, Mode::from_raw_mode(mode)).map_err(to_api_error)?;
    }
    if let Ok(Some(stat)) = stat_entry(&parent, name)
        && kind(&stat) == FileType::Directory
    {
        recorder.record_placed(&parent, name, &stat, true);
    }
    sync_directory(&parent).map_err(to_api_error)?;
    respond(true)
}

pub fn already_exists(path: &SandboxPath) -> ApiError {
    ApiError::new(ErrorCode::FileExists, format!("{path} already exists"))
}
