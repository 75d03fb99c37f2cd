//! Builds a sandbox's root from the staged mounts and moves into it. Runs inside the sandbox's namespaces, as its root.

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

/// Devices every program may expect. None of them reaches hardware or keeps anything.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// Shared memory counts as memory; this is what container engines give too.
const SHM_OPTIONS: &std::ffi::CStr = c"mode=1777,size=64m";

/// Returns boxd's binary, open, because no path leads to it from inside.
pub fn enter(spec: &LaunchSpec) -> anyhow::Result<OwnedFd> {
    let boxd = open(staging::boxd(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).context("opening boxd")?;
    let root = staging::root();
    let data = staging::data();
    // Short names of our own, without the colons and commas that would have to be escaped.
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
        mount_host_path(&root_fd, path, &staging::view(index)).with_context(|| format!("showing {}", path.display()))?;
    }
    for dir in [&spec.config.workload.work_dir, &spec.config.workload.home] {
        create_workload_dir(&root_fd, Path::new(dir), &spec.config.workload).with_context(|| format!("making {dir}"))?;
    }
    for (index, volume) in spec.volumes.iter().enumerate() {
        mount_volume(&root_fd, &volume.path, &staging::volume(index))
            .with_context(|| format!("mounting a volume at {}", volume.path.display()))?;
    }
    mount_proc(&root_fd).context("mounting /proc")?;
    populate_dev(&root_fd).context("making /dev")?;

    fchdir(&root_fd)?;
    // Old and new root at one place, then the old one taken off the top: no directory is needed for it.
    pivot_root(".", ".").context("pivot_root")?;
    unmount(".", UnmountFlags::DETACH).context("leaving the host's files")?;
    rustix::process::chdir("/")?;
    Ok(boxd)
}

/// Makes a directory of the workload's, where the root filesystem has none.
fn create_workload_dir(root: &OwnedFd, path: &Path, workload: &Workload) -> anyhow::Result<()> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    match openat2(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve) {
        Err(Errno::NOENT) => {}
        // There, or something the sandbox put there in an earlier life.
        _ => return Ok(()),
    }
    let made = match open_mount_point(root, path, true) {
        Err(Errno::LOOP | Errno::NOTDIR) => return Ok(()),
        other => other?,
    };
    // With a single id the workload's is 0 in this namespace.
    let (uid, gid) = if workload.uid_count > 1 { (workload.uid, workload.gid) } else { (0, 0) };
    Ok(chownat(&made, "", Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)?)
}

/// A place in the root to mount on, made if it is missing. The sandbox's programs may have put anything there in an
/// earlier life, so no symbolic link is followed.
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
        // Replaced from inside in an earlier life: the sandbox sees what it put there.
        Err(Errno::LOOP | Errno::NOTDIR) => return Ok(()),
        other => other?,
    };
    let tree = open_tree(CWD, staged, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE)?;
    attach(&tree, &mount_point)
}

/// Unlike what is only shown, a volume is promised: a sandbox that put something else in its place doesn't start.
fn mount_volume(root: &OwnedFd, path: &Path, staged: &Path) -> anyhow::Result<()> {
    let mount_point = match open_mount_point(root, path, true) {
        Err(Errno::LOOP | Errno::NOTDIR) => anyhow::bail!("a program has put a link or a file in its place"),
        other => other?,
    };
    attach(&open_tree(CWD, staged, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?, &mount_point)
}

fn attach(tree: &OwnedFd, mount_point: &OwnedFd) -> anyhow::Result<()> {
    Ok(move_mount(tree, "", mount_point, "", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH)?)
}

/// Boxd's own: it writes its init's id maps through it and then takes it away.
fn mount_proc(root: &OwnedFd) -> anyhow::Result<()> {
    let mount_point = open_mount_point(root, Path::new("proc"), true)?;
    Ok(mount("proc", fd_path(&mount_point), "proc", MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC, None)?)
}

fn populate_dev(root: &OwnedFd) -> anyhow::Result<()> {
    let mount_point = open_mount_point(root, Path::new("dev"), true)?;
    mount("tmpfs", fd_path(&mount_point), "tmpfs", MountFlags::NOSUID | MountFlags::NOEXEC, Some(c"mode=0755,size=64k"))?;
    // The descriptor is of what lies below the mount just made: look it up again.
    let dev = open_mounted_dir(root, "dev")?;
    let base = fd_path(&dev);
    for name in DEVICES {
        File::create(base.join(name))?;
        let node = open_tree(CWD, Path::new("/dev").join(name), OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)
            .with_context(|| format!("taking /dev/{name}"))?;
        set_mount_flags(&node, Forbid { no_exec: true, ..Default::default() }, false)?;
        move_mount(&node, "", CWD, base.join(name), MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    for dir in ["pts", "shm"] {
        fs::create_dir(base.join(dir))?;
    }
    // Terminals are counted for the whole machine: one sandbox must not have them all.
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

/// A path to an open directory, for calls that take only paths.
fn fd_path(fd: &OwnedFd) -> std::path::PathBuf {
    use std::os::fd::AsRawFd;
    Path::new("/proc/self/fd").join(fd.as_fd().as_raw_fd().to_string())
}
