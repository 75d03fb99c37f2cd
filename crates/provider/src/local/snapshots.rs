//! Snapshots: copies of a sandbox's own files, used as overlay layers below other sandboxes' files.

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

/// Prefix of the directory name of an incomplete snapshot.
const UNFINISHED_PREFIX: &str = ".new-";

/// The snapshots of this node. A directory whose name is a snapshot ID is complete.
#[derive(Clone)]
pub struct Snapshots {
    dir: PathBuf,
}

impl Snapshots {
    /// Removes incomplete snapshots of an earlier process.
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

    /// Copies the files of a sandbox's directory and returns their size in bytes. Blocks until they are copied.
    pub fn take(&self, sandbox: &Path, id: &SnapshotId, uid_base: Option<u32>, max_bytes: u64) -> anyhow::Result<u64> {
        let (layer, unfinished) = (self.layer(id), self.dir.join(format!("{UNFINISHED_PREFIX}{id}")));
        if self.has(id) {
            // Completed by an earlier process that crashed before it could record it.
            return Ok(untrusted_tree::measure(&layer));
        }
        let upper = open_upper(sandbox)?.context("it has no files yet")?;
        if unfinished.exists() {
            untrusted_tree::remove(&unfinished)?;
        }
        let max_copied = disk_limit::writable_bytes(&self.dir, max_bytes)?;
        DirBuilder::new().mode(0o700).create(&unfinished)?;
        let copied = snapshot_copy::copy_tree(&upper, &unfinished, uid_base, max_copied).context("copying its files");
        // Set explicitly: if the sandbox changed nothing, the top directory still has the private mode from its creation.
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
            tracing::warn!(snapshot = %id, %error, "removing an incomplete snapshot failed; it is removed at the next start");
        }
        finished
    }

    /// Removes a snapshot. Blocks; a missing snapshot is not an error.
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

/// Opens the directory of a sandbox's own files, in its data directory or its disk image. The image's mount ends with the descriptor.
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
