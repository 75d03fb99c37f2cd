//! Collects the mounts of a sandbox's root in one directory that is only visible in the launcher's mount namespace.
//!
//! Root does this outside the sandbox's namespaces, where it may create ID-mapped mounts. An ordinary user does it inside them, where
//! mounting is permitted.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt, chown},
    },
    path::{Path, PathBuf},
};

use anyhow::Context;
use cobox_kernel::{MountFlags, idmap, set_mount_flags};
use rustix::{
    fs::CWD,
    io::Errno,
    mount::{
        MountFlags as OldMountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount, open_tree,
    },
};

use super::{
    disk_image,
    launch_spec::{LaunchSpec, VolumeFiles, VolumeSpec},
};

/// Covered by a new tmpfs in the launcher's mount namespace. Chosen because it exists on every host.
const STAGING_DIR: &str = "/tmp";

pub fn lower() -> PathBuf {
    Path::new(STAGING_DIR).join("lower")
}
pub fn data() -> PathBuf {
    Path::new(STAGING_DIR).join("data")
}
pub fn boxd() -> PathBuf {
    Path::new(STAGING_DIR).join("boxd")
}
pub fn root() -> PathBuf {
    Path::new(STAGING_DIR).join("root")
}
pub fn view(index: usize) -> PathBuf {
    Path::new(STAGING_DIR).join(format!("view{index}"))
}
pub fn layer(index: usize) -> PathBuf {
    Path::new(STAGING_DIR).join(format!("layer{index}"))
}
pub fn volume(index: usize) -> PathBuf {
    Path::new(STAGING_DIR).join(format!("volume{index}"))
}

/// Stops mount propagation in both directions between this mount namespace and others.
pub fn make_private() -> rustix::io::Result<()> {
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
}

pub fn build(spec: &LaunchSpec, user_namespace: Option<BorrowedFd<'_>>) -> anyhow::Result<()> {
    // Opens all sources first: some may be below the directory that the staging tmpfs covers.
    let lower = |path: &Path| -> anyhow::Result<OwnedFd> {
        let tree = clone_tree(path)?;
        set_mount_flags(&tree, MountFlags { read_only: true, no_dev: true, ..Default::default() }, true)?;
        if let Some(ns) = user_namespace {
            idmap(&tree, ns).with_context(|| format!("mapping the IDs of {}", path.display()))?;
        }
        Ok(tree)
    };
    let lower_tree = lower(&spec.base)?;
    let layers = spec.layers.iter().map(|path| lower(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let volumes = spec.volumes.iter().map(|v| volume_tree(v, user_namespace)).collect::<anyhow::Result<Vec<_>>>()?;
    let data_tree = match &spec.disk_image {
        Some(image) => disk_image::mount(image).context("mounting the disk image")?,
        None => clone_tree(&spec.dir.join("data"))?,
    };
    set_mount_flags(&data_tree, MountFlags { no_dev: true, ..Default::default() }, false)?;
    let boxd_tree = clone_tree(&spec.boxd)?;
    // Read-only, so that a program that opens it through /proc can't write to the host's file.
    set_mount_flags(&boxd_tree, MountFlags { read_only: true, no_dev: true, ..Default::default() }, false)?;
    let mut views = Vec::new();
    for path in &spec.view {
        let tree = clone_tree(path)?;
        set_mount_flags(&tree, MountFlags { read_only: true, no_dev: true, ..Default::default() }, true)?;
        views.push((path, tree));
    }

    mount("tmpfs", STAGING_DIR, "tmpfs", OldMountFlags::NOSUID | OldMountFlags::NODEV, Some(c"mode=0755,size=1m"))
        .context("mounting the staging directory")?;
    attach(&lower_tree, &self::lower(), true)?;
    for (index, tree) in layers.iter().enumerate() {
        attach(tree, &layer(index), true)?;
    }
    for (index, tree) in volumes.iter().enumerate() {
        attach(tree, &volume(index), true)?;
    }
    attach(&data_tree, &data(), true)?;
    if let (Some(_), Some(owner)) = (&spec.disk_image, spec.uid_base) {
        for dir in [data(), data().join("upper"), data().join("work")] {
            match DirBuilder::new().mode(0o755).create(&dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e.into()),
                _ => chown(&dir, Some(owner), Some(owner))?,
            }
        }
    }
    attach(&boxd_tree, &boxd(), false)?;
    for (index, (path, tree)) in views.iter().enumerate() {
        attach(tree, &view(index), fs::metadata(path)?.is_dir())?;
    }
    DirBuilder::new().mode(0o755).create(root())?;
    Ok(())
}

/// Clones a volume's mount with mapped IDs: on disk, files have the IDs that programs in the sandbox see.
fn volume_tree(volume: &VolumeSpec, user_namespace: Option<BorrowedFd<'_>>) -> anyhow::Result<OwnedFd> {
    let tree = match &volume.files {
        VolumeFiles::Directory(path) => clone_tree(path)?,
        VolumeFiles::Image(image) => disk_image::mount(image).context("mounting a volume")?,
    };
    set_mount_flags(&tree, MountFlags { read_only: volume.read_only, no_dev: true, ..Default::default() }, false)?;
    if let Some(ns) = user_namespace {
        idmap(&tree, ns).context("mapping the IDs of a volume")?;
    }
    Ok(tree)
}

/// Clones the mount at a path, without the mounts below it where the kernel permits that.
fn clone_tree(path: &Path) -> anyhow::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    match open_tree(CWD, path, flags) {
        // Inside a user namespace, inherited submounts are locked: omitting one would reveal the files that it hides.
        Err(Errno::INVAL) => open_tree(CWD, path, flags | OpenTreeFlags::AT_RECURSIVE),
        other => other,
    }
    .with_context(|| format!("cloning the mount of {}", path.display()))
}

fn attach(tree: &OwnedFd, at: &Path, is_dir: bool) -> anyhow::Result<()> {
    if is_dir {
        DirBuilder::new().mode(0o755).create(at)?;
    } else {
        File::create(at)?;
    }
    move_mount(tree, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .with_context(|| format!("attaching the mount at {}", at.display()))
}
