//! Where the sockets of running sandboxes are.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

/// A directory for sockets that is short (a socket's path has 108 bytes), ours, and closed to others.
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
            // In a place others can write to, somebody may have been here first.
            let m = fs::symlink_metadata(d)?;
            if !m.is_dir() || m.uid() != uid || m.mode() & 0o077 != 0 {
                return Err(io::Error::other(format!("{} is not a directory of ours alone", d.display())));
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
    Err(last.unwrap_or_else(|| anyhow::anyhow!("nowhere to put sockets")))
}
