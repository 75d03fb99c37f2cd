//! Assembles a sandbox's root filesystem from the staged mounts and pivots into it. Runs inside the sandbox's namespaces, as its root user.

use std::{
    fs::{self, File},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::symlink,
    },
    path::Path,
};

use anyhow::Context;
use cobox_kernel::{MountFlags as Forbid, set_mount_flags};
use cobox_protocol::control::Workload;
use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, chownat, mkdirat, open, openat2},
    io::Errno,
    mount::{MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_remount, move_mount, open_tree, unmount},
    process::{Gid, Uid, fchdir, pivot_root},
};

use super::{launch_spec::LaunchSpec, staging};

/// Devices that programs expect. None of them accesses hardware or stores data.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// 64 MiB of shared memory, which counts as memory: the default of container engines.
const SHM_OPTIONS: &std::ffi::CStr = c"mode=1777,size=64m";

/// Returns boxd's open binary, because it has no path inside the new root.
pub fn enter(spec: &LaunchSpec) -> anyhow::Result<OwnedFd> {
    let boxd = open(staging::boxd(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).context("opening boxd")?;
    let root = staging::root();
    let data = staging::data();
    // The staged paths are short and contain no colons or commas, which would have to be escaped.
    let lowers: Vec<_> = (0..spec.layers.len()).map(staging::layer).chain([staging::lower()]).map(|p| p.display().to_string()).collect();
    let options = format!(
        "lowerdir={},upperdir={},workdir={},userxattr",
        lowers.join(":"),
        data.join("upper").display(),
        data.join("work").display()
    );
    let options = std::ffi::CString::new(options)?;
    mount("overlay", &root, "overlay", MountFlags::NOSUID | MountFlags::NODEV, Some(options.as_c_str())).context("mounting the overlay")?;

    let root_fd = open(&root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for (index, path) in spec.view.iter().enumerate() {
        mount_host_path(&root_fd, path, &staging::view(index)).with_context(|| format!("mounting the host's {}", path.display()))?;
    }
    for dir in [&spec.config.workload.work_dir, &spec.config.workload.home] {
        create_workload_dir(&root_fd, Path::new(dir), &spec.config.workload).with_context(|| format!("creating {dir}"))?;
    }
    for (index, volume) in spec.volumes.iter().enumerate() {
        mount_volume(&root_fd, &volume.path, &staging::volume(index))
            .with_context(|| format!("mounting a volume at {}", volume.path.display()))?;
    }
    mount_proc(&root_fd).context("mounting /proc")?;
    populate_dev(&root_fd).context("populating /dev")?;

    fchdir(&root_fd)?;
    // Mounts both roots at the same place and unmounts the old one from the top, so that no directory is needed for it.
    pivot_root(".", ".").context("pivot_root")?;
    unmount(".", UnmountFlags::DETACH).context("unmounting the host's root")?;
    rustix::process::chdir("/")?;
    Ok(boxd)
}

/// Creates a directory owned by the workload's user if the root filesystem has none.
fn create_workload_dir(root: &OwnedFd, path: &Path, workload: &Workload) -> anyhow::Result<()> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    match openat2(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve) {
        Err(Errno::NOENT) => {}
        // It exists, or the sandbox's programs replaced it in an earlier run.
        _ => return Ok(()),
    }
    let made = match open_mount_point(root, path, true) {
        Err(Errno::LOOP | Errno::NOTDIR) => return Ok(()),
        other => other?,
    };
    // With a single ID, the workload's user is 0 in this namespace.
    let (uid, gid) = if workload.uid_count > 1 { (workload.uid, workload.gid) } else { (0, 0) };
    Ok(chownat(&made, "", Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)?)
}

/// Opens a mount point in the root, created if it is missing. The sandbox's programs may have put anything there in an earlier run, so no
/// symbolic link is followed.
fn open_mount_point(root: &OwnedFd, path: &Path, is_dir: bool) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let mut at = rustix::io::fcntl_dupfd_cloexec(root, 0)?;
    let parts: Vec<_> = path.components().filter_map(|c| if let std::path::Component::Normal(n) = c { Some(n) } else { None }).collect();
    for (i, part) in parts.iter().enumerate() {
        let wants_dir = is_dir || i + 1 < parts.len();
        let flags = OFlags::PATH | OFlags::CLOEXEC | if wants_dir { OFlags::DIRECTORY } else { OFlags::empty() };
        let next = match openat2(&at, *part, flags, Mode::empty(), resolve) {
            Err(Errno::NOENT) => {
                if wants_dir {
                    mkdirat(&at, *part, Mode::from_raw_mode(0o755))?;
                } else {
                    openat2(
                        &at,
                        *part,
                        OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
                        Mode::from_raw_mode(0o644),
                        resolve,
                    )?;
                }
                openat2(&at, *part, flags, Mode::empty(), resolve)?
            }
            other => other?,
        };
        at = next;
    }
    Ok(at)
}

fn mount_host_path(root: &OwnedFd, path: &Path, staged: &Path) -> anyhow::Result<()> {
    let is_dir = fs::metadata(staged)?.is_dir();
    let mount_point = match open_mount_point(root, path, is_dir) {
        // A program replaced it in an earlier run: the sandbox sees the replacement instead.
        Err(Errno::LOOP | Errno::NOTDIR) => return Ok(()),
        other => other?,
    };
    let tree = open_tree(CWD, staged, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE)?;
    attach(&tree, &mount_point)
}

/// Unlike a host path, a volume must not be missing: the start fails if a program replaced its mount point.
fn mount_volume(root: &OwnedFd, path: &Path, staged: &Path) -> anyhow::Result<()> {
    let mount_point = match open_mount_point(root, path, true) {
        Err(Errno::LOOP | Errno::NOTDIR) => anyhow::bail!("a program in the sandbox replaced its mount point with a link or a file"),
        other => other?,
    };
    attach(&open_tree(CWD, staged, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?, &mount_point)
}

fn attach(tree: &OwnedFd, mount_point: &OwnedFd) -> anyhow::Result<()> {
    Ok(move_mount(tree, "", mount_point, "", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH)?)
}

/// Mounts /proc for boxd, which writes its init's ID maps through it and then unmounts it.
fn mount_proc(root: &OwnedFd) -> anyhow::Result<()> {
    let mount_point = open_mount_point(root, Path::new("proc"), true)?;
    Ok(mount("proc", fd_path(&mount_point), "proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)?)
}

fn populate_dev(root: &OwnedFd) -> anyhow::Result<()> {
    let mount_point = open_mount_point(root, Path::new("dev"), true)?;
    mount("tmpfs", fd_path(&mount_point), "tmpfs", MountFlags::NOSUID | MountFlags::NOEXEC, Some(c"mode=0755,size=64k"))?;
    // The descriptor refers to the directory below the new mount, so it must be opened again.
    let dev = open_mounted_dir(root, "dev")?;
    let base = fd_path(&dev);
    for name in DEVICES {
        File::create(base.join(name))?;
        let node = open_tree(CWD, Path::new("/dev").join(name), OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)
            .with_context(|| format!("cloning the mount of /dev/{name}"))?;
        set_mount_flags(&node, Forbid { no_exec: true, ..Default::default() }, false)?;
        move_mount(&node, "", CWD, base.join(name), MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    for dir in ["pts", "shm"] {
        fs::create_dir(base.join(dir))?;
    }
    // The kernel limits terminals for the whole machine: one sandbox must not use up all of them.
    mount(
        "devpts",
        base.join("pts"),
        "devpts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        Some(c"newinstance,ptmxmode=0666,mode=0620,max=256"),
    )?;
    mount("tmpfs", base.join("shm"), "tmpfs", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, Some(SHM_OPTIONS))?;
    for (name, to) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        symlink(to, base.join(name))?;
    }
    mount_remount(&base, MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::BIND, c"")?;
    Ok(())
}

fn open_mounted_dir(root: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    openat2(
        root,
        name,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS,
    )
}

/// A path to an open directory, for system calls that only accept paths.
fn fd_path(fd: &OwnedFd) -> std::path::PathBuf {
    use std::os::fd::AsRawFd;
    Path::new("/proc/self/fd").join(fd.as_fd().as_raw_fd().to_string())
}
