//! Snapshots: copies of sandboxes' own files, as layers that other sandboxes have below theirs.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use anyhow::Context;
use cobox_protocol::SnapshotId;
use rustix::fs::{CWD, Mode, OFlags, openat};

use super::{disk_image, disk_limit, snapshot_copy, untrusted_tree};
use crate::private_dir::private_dir;

/// What is being made has it before its name.
const UNFINISHED_PREFIX: &str = ".new-";

/// Where a node's snapshots are. A directory with a snapshot's name is a whole one.
#[derive(Clone)]
pub struct Snapshots {
    dir: PathBuf,
}

impl Snapshots {
    /// Removes what an earlier life left unfinished.
    pub fn open(dir: PathBuf) -> anyhow::Result<Self> {
        private_dir(&dir)?;
        for entry in fs::read_dir(&dir)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED_PREFIX) {
                untrusted_tree::remove(&entry.path()).with_context(|| format!("removing {}", entry.path().display()))?;
            }
        }
        Ok(Self { dir })
    }

    pub fn layer(&self, id: &SnapshotId) -> PathBuf {
        self.dir.join(id.as_str())
    }

    pub fn has(&self, id: &SnapshotId) -> bool {
        self.layer(id).is_dir()
    }

    pub fn list(&self) -> io::Result<Vec<SnapshotId>> {
        let names = fs::read_dir(&self.dir)?.filter_map(|e| e.ok()?.file_name().into_string().ok());
        Ok(names.filter_map(|n| n.parse().ok()).collect())
    }

    /// Copies the files of a sandbox's directory. Blocks, for as long as that takes.
    pub fn take(&self, sandbox: &Path, id: &SnapshotId, uid_base: Option<u32>, max_bytes: u64) -> anyhow::Result<u64> {
        let (layer, unfinished) = (self.layer(id), self.dir.join(format!("{UNFINISHED_PREFIX}{id}")));
        if self.has(id) {
            // Finished by an earlier life that could not say so any more.
            return Ok(untrusted_tree::measure(&layer));
        }
        let upper = open_upper(sandbox)?.context("it has no files yet")?;
        if unfinished.exists() {
            untrusted_tree::remove(&unfinished)?;
        }
        let max_copied = disk_limit::writable_bytes(&self.dir, max_bytes)?;
        DirBuilder::new().mode(0o700).create(&unfinished)?;
        let copied = snapshot_copy::copy_tree(&upper, &unfinished, uid_base, max_copied).context("copying its files");
        // Also when nothing was changed in it: then the top has the mode it was made with.
        let finished = copied.and_then(|bytes| {
            fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o755))?;
            snapshot_copy::sync_filesystem(&unfinished)?;
            fs::rename(&unfinished, &layer)?;
            File::open(&self.dir)?.sync_all()?;
            Ok(bytes)
        });
        if finished.is_err()
            && let Err(error) = untrusted_tree::remove(&unfinished)
        {
            tracing::warn!(snapshot = %id, %error, "an unfinished snapshot is still there; it goes at the next start");
        }
        finished
    }

    /// Blocks. One that isn't there is removed.
    pub fn remove(&self, id: &SnapshotId) -> io::Result<()> {
        let leaving = self.dir.join(format!("{UNFINISHED_PREFIX}removed-{id}"));
        match fs::rename(self.layer(id), &leaving) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
        match untrusted_tree::remove(&leaving) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}

/// A sandbox's own files, wherever they are. What is mounted for it goes with the descriptor.
pub fn open_upper(sandbox: &Path) -> anyhow::Result<Option<rustix::fd::OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let data = sandbox.join("data");
    if data.exists() {
        return openat(CWD, data.join("upper"), flags, Mode::empty()).map(Some).context("opening its files");
    }
    let image = sandbox.join("disk.img");
    if !image.exists() {
        return Ok(None);
    }
    let mounted = disk_image::mount(&image).context("mounting its disk image")?;
    openat(&mounted, "upper", flags, Mode::empty()).map(Some).context("opening its files")
}
