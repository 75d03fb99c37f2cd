//! Gathers, under one directory nobody else sees, the mounts a sandbox's root is made of.
//!
//! Done by root on the host's side, which may show owners through the sandbox's ids; by an ordinary user inside the
//! sandbox's own namespaces, where they may mount.

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

/// Covered by a fresh tmpfs in the launcher's own mount namespace; every host has it.
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

/// Nothing mounted from here on is seen outside, nor the other way round.
pub fn make_private() -> rustix::io::Result<()> {
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
}

pub fn build(spec: &LaunchSpec, user_namespace: Option<BorrowedFd<'_>>) -> anyhow::Result<()> {
    // All sources first: some may lie where the stage goes.
    let lower = |path: &Path| -> anyhow::Result<OwnedFd> {
        let tree = clone_tree(path)?;
        set_mount_flags(&tree, MountFlags { read_only: true, no_dev: true, ..Default::default() }, true)?;
        if let Some(ns) = user_namespace {
            idmap(&tree, ns).with_context(|| format!("showing {} through the sandbox's ids", path.display()))?;
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
    // Read-only, so that not even a program that got hold of it through /proc could write to the host's file.
    set_mount_flags(&boxd_tree, MountFlags { read_only: true, no_dev: true, ..Default::default() }, false)?;
    let mut views = Vec::new();
    for path in &spec.view {
        let tree = clone_tree(path)?;
        set_mount_flags(&tree, MountFlags { read_only: true, no_dev: true, ..Default::default() }, true)?;
        views.push((path, tree));
    }

    mount("tmpfs", STAGING_DIR, "tmpfs", OldMountFlags::NOSUID | OldMountFlags::NODEV, Some(c"mode=0755,size=1m"))
        .context("mounting the stage")?;
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

/// A volume's files with the sandbox's ids: on disk they have those that programs see.
fn volume_tree(volume: &VolumeSpec, user_namespace: Option<BorrowedFd<'_>>) -> anyhow::Result<OwnedFd> {
    let tree = match &volume.files {
        VolumeFiles::Directory(path) => clone_tree(path)?,
        VolumeFiles::Image(image) => disk_image::mount(image).context("mounting a volume")?,
    };
    set_mount_flags(&tree, MountFlags { read_only: volume.read_only, no_dev: true, ..Default::default() }, false)?;
    if let Some(ns) = user_namespace {
        idmap(&tree, ns).context("showing a volume through the sandbox's ids")?;
    }
    Ok(tree)
}

/// A copy of the mount at a path, without what is mounted below it where the kernel lets us leave that out.
fn clone_tree(path: &Path) -> anyhow::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    match open_tree(CWD, path, flags) {
        // Inside a user namespace mounts below are locked on: to leave one out would uncover what it hides.
        Err(Errno::INVAL) => open_tree(CWD, path, flags | OpenTreeFlags::AT_RECURSIVE),
        other => other,
    }
    .with_context(|| format!("taking {}", path.display()))
}

fn attach(tree: &OwnedFd, at: &Path, is_dir: bool) -> anyhow::Result<()> {
    if is_dir {
        DirBuilder::new().mode(0o755).create(at)?;
    } else {
        File::create(at)?;
    }
    move_mount(tree, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).with_context(|| format!("placing {}", at.display()))
}
