//! Creates directories.

use cobox_protocol::{
    ApiError, ErrorCode,
    fs::{ChangeResponse, MkdirRequest},
};
use rustix::{
    fs::{FileType, Mode, OFlags},
    io::Errno,
};

use crate::files::{Author, Root, SandboxPath, current, kind, make_directory, open_beneath, parse_mode, refusal, split, sync_directory};

const DIRECTORY_MODE: u32 = 0o755;

pub fn mkdir(root: &Root, path: &SandboxPath, request: &MkdirRequest, author: &Author) -> Result<ChangeResponse, ApiError> {
    let refused = |e| refusal(e, path);
    let mode = match &request.mode {
        Some(mode) => parse_mode(mode).ok_or_else(|| ApiError::invalid("mode: must be permission bits in octal, such as 755"))?,
        None => DIRECTORY_MODE,
    };
    let is_there = |changed| {
        let (shown, path_b64) = path.in_json();
        Ok(ChangeResponse { path: shown, path_b64, changed, entries: u64::from(changed), ..ChangeResponse::default() })
    };
    let end = path.bytes().iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
    let Some((above, name)) = split(&path.bytes()[..end]) else {
        // The root, or a path that ends in `..`: it exists if it can be opened.
        root.directory(path.bytes()).map_err(refused)?;
        return if request.exist_ok { is_there(false) } else { Err(taken(path)) };
    };
    let parent = if request.parents { make_directory(root, above, true, author) } else { root.directory(above) }.map_err(refused)?;
    match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(mode)) {
        Ok(()) => {}
        Err(Errno::EXIST) if request.exist_ok && root.directory(path.bytes()).is_ok() => return is_there(false),
        Err(Errno::EXIST) => return Err(taken(path)),
        Err(e) => return Err(refused(e)),
    }
    // The umask of boxd may have reduced the mode. If the directory can't be opened, a program has changed it in the
    // meantime, and that change stands.
    if let Ok(made) = open_beneath(&parent, name, OFlags::RDONLY | OFlags::DIRECTORY) {
        rustix::fs::fchmod(&made, Mode::from_raw_mode(mode)).map_err(refused)?;
    }
    if let Ok(Some(stat)) = current(&parent, name)
        && kind(&stat) == FileType::Directory
    {
        author.placed(&parent, name, &stat, true);
    }
    sync_directory(&parent).map_err(refused)?;
    is_there(true)
}

pub fn taken(path: &SandboxPath) -> ApiError {
    ApiError::new(ErrorCode::FileExists, format!("{path} is there already"))
}
