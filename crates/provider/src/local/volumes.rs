//! Volumes: files that outlive sandboxes and can be mounted in several of them. A volume is a filesystem image of its size where images
//! are supported, otherwise a directory whose size is measured.

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

/// Prefix of the directory name of a volume that is being created or removed.
const UNFINISHED_PREFIX: &str = ".new-";
const IMAGE_FILE: &str = "disk.img";
const FILES_DIR: &str = "files";
/// File with the size limit, in bytes, of a volume that is a directory.
const SIZE_FILE: &str = "size";

/// The volumes of this node. A directory whose name is a volume ID is complete.
#[derive(Clone)]
pub struct Volumes {
    pub dir: PathBuf,
    /// Directory of the empty filesystem images; `None` if volumes can't be images here.
    pub images: Option<PathBuf>,
    /// Owner of a new volume's top directory, as seen in sandboxes; `None` if sandboxes have a single ID.
    pub owner: Option<WorkloadUser>,
}

impl Volumes {
    /// Removes incomplete volumes of an earlier process.
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

    /// The volume's filesystem image, where disk limits are hard.
    pub fn image(&self, id: &VolumeId) -> PathBuf {
        self.path(id).join(IMAGE_FILE)
    }

    pub fn list(&self) -> io::Result<Vec<VolumeId>> {
        let names = fs::read_dir(&self.dir)?.filter_map(|e| e.ok()?.file_name().into_string().ok());
        Ok(names.filter_map(|n| n.parse().ok()).collect())
    }

    /// The image or directory that a sandbox mounts.
    pub fn files(&self, id: &VolumeId) -> anyhow::Result<VolumeFiles> {
        let image = self.image(id);
        if image.exists() {
            return Ok(VolumeFiles::Image(image));
        }
        let directory = self.path(id).join(FILES_DIR);
        anyhow::ensure!(directory.is_dir(), "volume {id} is not on this node");
        Ok(VolumeFiles::Directory(directory))
    }

    /// Directory and size limit of a volume whose size must be measured; `None` for an image.
    pub fn measured(&self, id: &VolumeId) -> Option<(PathBuf, u64)> {
        let size = fs::read_to_string(self.path(id).join(SIZE_FILE)).ok()?.trim().parse().ok()?;
        Some((self.path(id).join(FILES_DIR), size))
    }

    /// Creates a volume. Blocks; an existing volume is left unchanged.
    pub fn make(&self, id: &VolumeId, size: u64) -> anyhow::Result<()> {
        if self.path(id).is_dir() {
            return Ok(());
        }
        // An image is sparse and grows when it is written to. This only checks that the disk isn't full already.
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

    /// Removes a volume. Blocks; a missing volume is not an error.
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
