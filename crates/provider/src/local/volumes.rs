//! Volumes: files that outlive sandboxes and may be mounted in several at once. Where filesystem images can be had a volume is one of
//! its size; elsewhere it is a directory that is measured.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt, chown},
    path::PathBuf,
};

use anyhow::Context;
use cobox_protocol::VolumeId;
use rustix::fs::{AtFlags, Mode, unlinkat};

use super::{config::WorkloadUser, disk_image, disk_limit, launch_spec::VolumeFiles, untrusted_tree};
use crate::private_dir::private_dir;

/// What is being made or removed has it before its name.
const UNFINISHED_PREFIX: &str = ".new-";
const IMAGE_FILE: &str = "disk.img";
const FILES_DIR: &str = "files";
/// Holds a soft volume's size, in bytes.
const SIZE_FILE: &str = "size";

/// Where a node's volumes are. A directory with a volume's name is a whole one.
#[derive(Clone)]
pub struct Volumes {
    pub dir: PathBuf,
    /// Where empty filesystems are kept, if volumes can be images here.
    pub images: Option<PathBuf>,
    /// Whose a new volume's top is, as programs see it, where that isn't everybody.
    pub owner: Option<WorkloadUser>,
}

impl Volumes {
    /// Removes what an earlier life left unfinished.
    pub fn open(self) -> anyhow::Result<Self> {
        private_dir(&self.dir)?;
        for entry in fs::read_dir(&self.dir)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED_PREFIX) {
                untrusted_tree::remove(&entry.path()).with_context(|| format!("removing {}", entry.path().display()))?;
            }
        }
        Ok(self)
    }

    fn path(&self, id: &VolumeId) -> PathBuf {
        self.dir.join(id.as_str())
    }

    pub fn list(&self) -> io::Result<Vec<VolumeId>> {
        let names = fs::read_dir(&self.dir)?.filter_map(|e| e.ok()?.file_name().into_string().ok());
        Ok(names.filter_map(|n| n.parse().ok()).collect())
    }

    /// What a sandbox mounts.
    pub fn files(&self, id: &VolumeId) -> anyhow::Result<VolumeFiles> {
        let image = self.path(id).join(IMAGE_FILE);
        if image.exists() {
            return Ok(VolumeFiles::Image(image));
        }
        let directory = self.path(id).join(FILES_DIR);
        anyhow::ensure!(directory.is_dir(), "volume {id} is not here");
        Ok(VolumeFiles::Directory(directory))
    }

    /// Directory and size of a volume that must be measured.
    pub fn measured(&self, id: &VolumeId) -> Option<(PathBuf, u64)> {
        let size = fs::read_to_string(self.path(id).join(SIZE_FILE)).ok()?.trim().parse().ok()?;
        Some((self.path(id).join(FILES_DIR), size))
    }

    /// Blocks. One that is there stays as it is.
    pub fn make(&self, id: &VolumeId, size: u64) -> anyhow::Result<()> {
        if self.path(id).is_dir() {
            return Ok(());
        }
        // It grows as it is written to; that there is something to begin with can be said now.
        disk_limit::writable_bytes(&self.dir, size)?;
        let unfinished = self.dir.join(format!("{UNFINISHED_PREFIX}{id}"));
        if unfinished.exists() {
            untrusted_tree::remove(&unfinished)?;
        }
        DirBuilder::new().mode(0o700).create(&unfinished)?;
        match &self.images {
            Some(images) => {
                let image = unfinished.join(IMAGE_FILE);
                disk_limit::copy_sparse(&disk_limit::template(images, size)?, &image)?;
                let mounted = disk_image::mount(&image)?;
                match unlinkat(&mounted, "lost+found", AtFlags::REMOVEDIR) {
                    Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                    Err(e) => return Err(e.into()),
                }
                let top = rustix::fs::openat(&mounted, ".", rustix::fs::OFlags::DIRECTORY, Mode::empty())?;
                if let Some(owner) = self.owner {
                    let (uid, gid) = (rustix::process::Uid::from_raw(owner.id()), rustix::process::Gid::from_raw(owner.id()));
                    rustix::fs::fchown(&top, Some(uid), Some(gid))?;
                }
                rustix::fs::syncfs(&top)?;
            }
            None => {
                let directory = unfinished.join(FILES_DIR);
                DirBuilder::new().mode(0o755).create(&directory)?;
                fs::set_permissions(&directory, fs::Permissions::from_mode(0o755))?;
                if let Some(owner) = self.owner {
                    chown(&directory, Some(owner.id()), Some(owner.id()))?;
                }
                fs::write(unfinished.join(SIZE_FILE), size.to_string())?;
            }
        }
        super::snapshot_copy::sync_filesystem(&unfinished)?;
        fs::rename(&unfinished, self.path(id))?;
        Ok(File::open(&self.dir)?.sync_all()?)
    }

    /// Blocks. One that isn't there is removed.
    pub fn remove(&self, id: &VolumeId) -> io::Result<()> {
        let leaving = self.dir.join(format!("{UNFINISHED_PREFIX}removed-{id}"));
        match fs::rename(self.path(id), &leaving) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
        match untrusted_tree::remove(&leaving) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }
}
