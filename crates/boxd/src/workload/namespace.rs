//! Makes the namespaces below boxd's in which the workloads live, with init as their first process, and starts the starter in them.
#![allow(unsafe_code, reason = "namespaces are made here")]

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use anyhow::{Context, bail};
use cobox_kernel::{Cloned, MountFlags, clone_process, exit_now, set_mount_flags};
use cobox_protocol::control::BoxdConfig;
use rustix::{
    fs::{CWD, Mode, OFlags, openat},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string,
        fsmount, fsopen, move_mount, open_tree, unmount,
    },
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{DumpableBehavior, set_dumpable_behavior},
    thread::{ThreadNameSpaceType, UnshareFlags, move_into_thread_name_spaces, unshare_unsafe},
};

use super::{
    init,
    link::{Received, Report, receive, send},
    seccomp, starter,
};

/// Of /proc: settings of the machine or of the network, which nobody inside changes.
const READ_ONLY: [&str; 5] = ["sys", "sysrq-trigger", "irq", "bus", "fs"];
/// Of /proc: what tells about the host and helps no program.
const MASKED: [&str; 6] = ["kcore", "keys", "key-users", "timer_list", "kallsyms", "vmallocinfo"];

/// Of what a user has a number of on the whole machine, what one sandbox may use: enough for an editor and a build watcher.
const USER_SETTINGS: [(&str, &[u8]); 2] = [("max_inotify_instances", b"64"), ("max_inotify_watches", b"65536")];

/// Of the sandbox's memory, the part that may be in shared segments, where no cgroup counts it: they stay when no process has them,
/// so that nobody could be ended for them.
const SHARED_PART: u64 = 4;

/// Boxd's ends of the links to the two.
pub struct Links {
    pub init: OwnedFd,
    pub starter: OwnedFd,
}

/// Starts init and the starter. Must run before any thread is started.
pub fn start(config: &BoxdConfig) -> anyhow::Result<Links> {
    let (init, namespaces) = start_init(config)?;
    let starter = start_starter(&namespaces, config)?;
    Ok(Links { init, starter })
}

fn link() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).context("making a link")
}

/// Gives the handle of init as well, which is one to the namespaces it is in.
fn start_init(config: &BoxdConfig) -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = link()?;
    // SAFETY: boxd has one thread until the runtime starts, which is after this.
    match unsafe { clone_process(libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP) }.context("cloning init")? {
        Cloned::Child => {
            drop(ours);
            match enter(&theirs, config) {
                Ok(proc) => init::run(theirs, proc, config),
                Err(e) => fail(&theirs, &e),
            }
        }
        Cloned::Parent { pid, pidfd } => {
            drop(theirs);
            expect(&ours, |r| matches!(r, Report::Unshared))?;
            write_id_maps(pid, config).context("mapping the workloads' ids")?;
            // Any packet says "go on".
            send(&ours, &Report::Ready, &[])?;
            expect(&ours, |r| matches!(r, Report::Ready))?;
            Ok((ours, pidfd))
        }
    }
}

fn start_starter(namespaces: &OwnedFd, config: &BoxdConfig) -> anyhow::Result<OwnedFd> {
    let (ours, theirs) = link()?;
    // SAFETY: as above.
    match unsafe { clone_process(0) }.context("cloning the starter")? {
        Cloned::Child => {
            drop(ours);
            match follow(namespaces, config) {
                Ok(()) => starter::run(theirs, config),
                Err(e) => fail(&theirs, &e),
            }
        }
        Cloned::Parent { .. } => {
            drop(theirs);
            expect(&ours, |r| matches!(r, Report::Ready))?;
            Ok(ours)
        }
    }
}

/// Boxd reports it; if even that fails the closed link tells.
fn fail(link: &OwnedFd, e: &anyhow::Error) -> ! {
    let what: String = format!("{e:#}").chars().filter(char::is_ascii).filter(|c| !c.is_control()).take(200).collect();
    let _ = send(link, &Report::Failed { what }, &[]);
    exit_now(1)
}

/// Into the namespaces init is in, this process itself still in boxd's pid namespace.
fn follow(namespaces: &OwnedFd, config: &BoxdConfig) -> anyhow::Result<()> {
    let all = ThreadNameSpaceType::PROCESS_ID | ThreadNameSpaceType::MOUNT | ThreadNameSpaceType::CONTROL_GROUP | ThreadNameSpaceType::USER;
    move_into_thread_name_spaces(namespaces.as_fd(), all).context("entering the workloads' namespaces")?;
    lose_powers(config)
}

fn expect(link: &OwnedFd, wanted: impl Fn(&Report) -> bool) -> anyhow::Result<()> {
    match receive::<Report>(link)? {
        Some(r) if wanted(&r.message) => Ok(()),
        Some(Received { message: Report::Failed { what }, .. }) => bail!("setting up the workloads' namespaces failed: {what}"),
        Some(r) => bail!("a process of the workloads' namespaces said {:?} out of turn", r.message),
        None => bail!("a process of the workloads' namespaces died while it was being set up"),
    }
}

/// Where the sandbox has a range, the workloads get all of it but boxd's own id, the last; where it has one id, that
/// one under the workload's number.
fn write_id_maps(pid: i32, config: &BoxdConfig) -> io::Result<()> {
    let w = &config.workload;
    let map = |id: u32| if w.uid_count > 1 { format!("0 0 {}", w.uid_count - 1) } else { format!("{id} 0 1") };
    fs::write(format!("/proc/{pid}/gid_map"), map(w.gid))?;
    fs::write(format!("/proc/{pid}/uid_map"), map(w.uid))
}

/// In the child: its own /proc, then a user namespace that owns nothing, then no way back. Returns a mount of /proc for init alone.
fn enter(link: &OwnedFd, config: &BoxdConfig) -> anyhow::Result<OwnedFd> {
    // A user namespace made now, after the mount and pid namespaces, has power over neither: full capabilities in it
    // would still not unmount anything.
    let (settings, proc) = replace_proc().context("mounting the workloads' /proc")?;
    if let Some(bytes) = config.limits.memory_bytes {
        let pages = bytes / SHARED_PART / rustix::param::page_size() as u64;
        let limit = openat(&settings, "kernel/shmall", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
        // Some kernels let nobody but the machine's root set it, though each namespace has its own.
        let _ = limit.map(|limit| rustix::io::write(&limit, pages.to_string().as_bytes()));
    }
    // SAFETY: this process has one thread and shares no memory or descriptors with another.
    unsafe { unshare_unsafe(UnshareFlags::NEWUSER) }.context("making the workloads' user namespace")?;
    send(link, &Report::Unshared, &[])?;
    if receive::<Report>(link)?.is_none() {
        bail!("boxd is gone");
    }
    // Through the handle from before, because what programs see there is read-only by now.
    let limit = openat(&settings, "user/max_user_namespaces", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
        .context("opening the limit of nested user namespaces")?;
    rustix::io::write(&limit, b"0").context("forbidding nested user namespaces")?;
    for (name, value) in USER_SETTINGS {
        // Counted per user on the whole machine; a kernel without such a count has nothing to limit.
        if let Ok(file) = openat(&settings, format!("user/{name}"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
            rustix::io::write(&file, value).with_context(|| format!("setting {name}"))?;
        }
    }
    drop((limit, settings));
    lose_powers(config)?;
    Ok(proc)
}

/// In a new user namespace: what every process below inherits.
fn lose_powers(config: &BoxdConfig) -> anyhow::Result<()> {
    // Coming into the user namespace let the kernel forget this.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;

    if config.workload.uid_count > 1 {
        rustix::thread::set_thread_groups(&[]).context("leaving all groups")?;
    }
    init::limit_resources(&config.limits).context("setting limits")?;
    rustix::thread::set_no_new_privs(true)?;
    cobox_kernel::drop_bounding_set().context("emptying the bounding set")?;
    seccomp::confine().map_err(|e| anyhow::anyhow!("confining system calls: {e}"))
}

/// Puts this pid namespace's /proc in the place of boxd's, machine settings read-only. Returns a handle to the settings
/// through which they are still writable, and a second mount in which no process is hidden, which is in no directory.
fn replace_proc() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    // Init is not for the workloads to look at, not even as a list of descriptors; a process they can't trace isn't shown.
    // Made before the old one goes: the kernel lets a user namespace have a new /proc only where one is already visible.
    let proc = new_proc("invisible")?;
    let whole = new_proc("off")?;
    unmount("/proc", UnmountFlags::DETACH)?;
    move_mount(&proc, "", CWD, "/proc", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    let settings = openat(CWD, "/proc/sys", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for name in READ_ONLY {
        cover(&format!("/proc/{name}"), &format!("/proc/{name}"), true)?;
    }
    for name in MASKED {
        cover("/dev/null", &format!("/proc/{name}"), false)?;
    }
    Ok((settings, whole))
}

fn new_proc(hidepid: &str) -> anyhow::Result<OwnedFd> {
    let fs = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "hidepid", hidepid)?;
    fsconfig_create(&fs)?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

/// Mounts one path over another; one the kernel doesn't have needs no cover.
fn cover(source: &str, target: &str, read_only: bool) -> anyhow::Result<()> {
    if !fs::exists(target)? {
        return Ok(());
    }
    let tree = open_tree(CWD, source, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC).context(target.to_owned())?;
    if read_only {
        set_mount_flags(tree.as_fd(), MountFlags { read_only, no_dev: true, no_exec: true }, false).context(target.to_owned())?;
    }
    move_mount(&tree, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).context(target.to_owned())
}
