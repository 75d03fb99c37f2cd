//! The directory for the sockets of running sandboxes.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

/// Creates a directory that is owned by this user, closed to others, and has a short path: a socket's path has at most 108 bytes.
pub fn create(tag: &str) -> anyhow::Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let mut candidates = vec![PathBuf::from("/run/cobox")];
    candidates.extend(std::env::var_os("XDG_RUNTIME_DIR").map(|d| Path::new(&d).join("cobox")));
    candidates.push(PathBuf::from(format!("/tmp/cobox-{uid}")));
    let try_create = |parent: &Path| -> io::Result<PathBuf> {
        let dir = parent.join(tag);
        for d in [parent, dir.as_path()] {
            match DirBuilder::new().mode(0o700).create(d) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                other => other?,
            }
            // In a directory that other users can write to, another user may have created it first.
            let m = fs::symlink_metadata(d)?;
            if !m.is_dir() || m.uid() != uid || m.mode() & 0o077 != 0 {
                return Err(io::Error::other(format!("{} is not a directory that only this user can access", d.display())));
            }
        }
        Ok(dir)
    };
    let mut last = None;
    for parent in candidates {
        match try_create(&parent) {
            Ok(dir) => return Ok(dir),
            Err(e) => last = Some(anyhow::anyhow!("{}: {e}", parent.display())),
        }
    }
    Err(last.unwrap_or_else(|| anyhow::anyhow!("found no directory for sockets")))
}
