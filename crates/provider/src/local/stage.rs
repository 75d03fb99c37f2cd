//! Gathers, under one directory nobody else sees, the mounts a sandbox's root is made of.
//!
//! Done by root on the host's side, which may show owners through the sandbox's ids; by an ordinary user inside the
//! sandbox's own namespaces, where they may mount.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt, chown},
    },
    path::{Path, PathBuf},
};

use anyhow::Context;
use cobox_kernel::{MountFlags, attach_loop, idmap, set_mount_flags};
use rustix::{
    fs::{CWD, FlockOperation, flock},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags as OldMountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
        fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount, mount_change, move_mount, open_tree,
    },
};

use super::spec::LaunchSpec;

/// Covered by a fresh tmpfs in the launcher's own mount namespace; every host has it.
const STAGE: &str = "/tmp";

pub fn lower() -> PathBuf {
    Path::new(STAGE).join("lower")
}
pub fn data() -> PathBuf {
    Path::new(STAGE).join("data")
}
pub fn boxd() -> PathBuf {
    Path::new(STAGE).join("boxd")
}
pub fn root() -> PathBuf {
    Path::new(STAGE).join("root")
}
pub fn view(index: usize) -> PathBuf {
    Path::new(STAGE).join(format!("view{index}"))
}

/// Nothing mounted from here on is seen outside, nor the other way round.
pub fn make_private() -> rustix::io::Result<()> {
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
}

pub fn build(spec: &LaunchSpec, user_namespace: Option<BorrowedFd<'_>>) -> anyhow::Result<()> {
    // All sources first: some may lie where the stage goes.
    let lower_tree = clone_tree(&spec.base)?;
    set_mount_flags(&lower_tree, MountFlags { read_only: true, no_dev: true, ..Default::default() }, true)?;
    if let Some(ns) = user_namespace {
        idmap(&lower_tree, ns).context("showing the lower layer through the sandbox's ids")?;
    }
    let data_tree = match &spec.disk_image {
        Some(image) => mount_image(image).context("mounting the disk image")?,
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

    mount("tmpfs", STAGE, "tmpfs", OldMountFlags::NOSUID | OldMountFlags::NODEV, Some(c"mode=0755,size=1m"))
        .context("mounting the stage")?;
    place(&lower_tree, &lower(), true)?;
    place(&data_tree, &data(), true)?;
    if let (Some(_), Some(owner)) = (&spec.disk_image, spec.uid_base) {
        for dir in [data(), data().join("upper"), data().join("work")] {
            match DirBuilder::new().mode(0o755).create(&dir) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e.into()),
                _ => chown(&dir, Some(owner), Some(owner))?,
            }
        }
    }
    place(&boxd_tree, &boxd(), false)?;
    for (index, (path, tree)) in views.iter().enumerate() {
        place(tree, &view(index), fs::metadata(path)?.is_dir())?;
    }
    DirBuilder::new().mode(0o755).create(root())?;
    Ok(())
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

fn place(tree: &OwnedFd, at: &Path, is_dir: bool) -> anyhow::Result<()> {
    if is_dir {
        DirBuilder::new().mode(0o755).create(at)?;
    } else {
        File::create(at)?;
    }
    move_mount(tree, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).with_context(|| format!("placing {}", at.display()))
}

fn mount_image(image: &Path) -> anyhow::Result<OwnedFd> {
    let file = File::options().read(true).write(true).open(image)?;
    // Held by the loop device with the file: an image is never mounted twice, not even while the kernel is still busy
    // taking down an earlier mount.
    flock(&file, FlockOperation::NonBlockingLockExclusive).context("the disk image is still in use")?;
    let (_device, path) = attach_loop(&file)?;
    let fs = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "source", path)?;
    fsconfig_create(&fs)?;
    Ok(fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV)?)
}
