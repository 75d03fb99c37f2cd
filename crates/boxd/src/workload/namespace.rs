//! Creates the namespaces in which the workloads run, with init as their first process, and starts the spawner in them.
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
    messages::{ReceivedMessage, Report, receive, send},
    seccomp, spawner,
};

/// Entries of /proc with settings of the machine or the network, which workloads must not change.
const READ_ONLY: [&str; 5] = ["sys", "sysrq-trigger", "irq", "bus", "fs"];
/// Entries of /proc that reveal information about the host and that no program needs.
const MASKED: [&str; 6] = ["kcore", "keys", "key-users", "timer_list", "kallsyms", "vmallocinfo"];

/// Per-sandbox values of limits that the kernel counts per user on the whole machine. Enough for an editor and a build
/// watcher.
const USER_SETTINGS: [(&str, &[u8]); 2] = [("max_inotify_instances", b"64"), ("max_inotify_watches", b"65536")];

/// Divisor of the sandbox's memory: the part that may be in shared memory segments where no cgroup counts them.
/// Segments remain when no process uses them, so ending a process could not free them.
const SHARED_MEMORY_DIVISOR: u64 = 4;

/// boxd's ends of the links to init and the spawner.
pub struct WorkloadSockets {
    pub init: OwnedFd,
    pub spawner: OwnedFd,
}

/// Starts init and the spawner. Must run before any thread is started.
pub fn start(config: &BoxdConfig) -> anyhow::Result<WorkloadSockets> {
    let (init, namespaces) = start_init(config)?;
    let spawner = start_spawner(&namespaces, config)?;
    Ok(WorkloadSockets { init, spawner })
}

fn socket_pair() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).context("creating a symbolic link")
}

/// Also returns init's pidfd, which gives access to the namespaces that init is in.
fn start_init(config: &BoxdConfig) -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let (boxd_end, child_end) = socket_pair()?;
    // SAFETY: boxd has one thread until the runtime starts, which is after this.
    match unsafe { clone_process(libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWCGROUP) }.context("cloning init")? {
        Cloned::Child => {
            drop(boxd_end);
            match set_up_init(&child_end, config) {
                Ok(procfs) => init::run(child_end, procfs, config),
                Err(e) => report_failure_and_exit(&child_end, &e),
            }
        }
        Cloned::Parent { pid, pidfd } => {
            drop(child_end);
            expect_report(&boxd_end, |r| matches!(r, Report::Unshared))?;
            write_id_maps(pid, config).context("mapping the workloads' ids")?;
            // Any packet means "continue".
            send(&boxd_end, &Report::Ready, &[])?;
            expect_report(&boxd_end, |r| matches!(r, Report::Ready))?;
            Ok((boxd_end, pidfd))
        }
    }
}

fn start_spawner(namespaces: &OwnedFd, config: &BoxdConfig) -> anyhow::Result<OwnedFd> {
    let (boxd_end, child_end) = socket_pair()?;
    // SAFETY: as above.
    match unsafe { clone_process(0) }.context("cloning the spawner")? {
        Cloned::Child => {
            drop(boxd_end);
            match join_namespaces(namespaces, config) {
                Ok(()) => spawner::run(child_end, config),
                Err(e) => report_failure_and_exit(&child_end, &e),
            }
        }
        Cloned::Parent { .. } => {
            drop(child_end);
            expect_report(&boxd_end, |r| matches!(r, Report::Ready))?;
            Ok(boxd_end)
        }
    }
}

/// Boxd reports the error. If sending it fails too, boxd detects the closed link.
fn report_failure_and_exit(socket: &OwnedFd, e: &anyhow::Error) -> ! {
    let what: String = format!("{e:#}").chars().filter(char::is_ascii).filter(|c| !c.is_control()).take(200).collect();
    let _ = send(socket, &Report::Failed { what }, &[]);
    exit_now(1)
}

/// Enters init's namespaces. This process itself remains in boxd's pid namespace.
fn join_namespaces(namespaces: &OwnedFd, config: &BoxdConfig) -> anyhow::Result<()> {
    let all = ThreadNameSpaceType::PROCESS_ID | ThreadNameSpaceType::MOUNT | ThreadNameSpaceType::CONTROL_GROUP | ThreadNameSpaceType::USER;
    move_into_thread_name_spaces(namespaces.as_fd(), all).context("entering the workloads' namespaces")?;
    drop_privileges(config)
}

fn expect_report(socket: &OwnedFd, is_expected: impl Fn(&Report) -> bool) -> anyhow::Result<()> {
    match receive::<Report>(socket)? {
        Some(r) if is_expected(&r.message) => Ok(()),
        Some(ReceivedMessage { message: Report::Failed { what }, .. }) => bail!("setting up the workloads' namespaces failed: {what}"),
        Some(r) => bail!("unexpected message {:?} from a process of the workloads' namespaces", r.message),
        None => bail!("a process of the workloads' namespaces died while it was being set up"),
    }
}

/// A sandbox with a range of ids maps all of them except boxd's own, which is the last. A sandbox with one id maps it
/// to the workload's id.
fn write_id_maps(pid: i32, config: &BoxdConfig) -> io::Result<()> {
    let w = &config.workload;
    let map = |id: u32| if w.uid_count > 1 { format!("0 0 {}", w.uid_count - 1) } else { format!("{id} 0 1") };
    fs::write(format!("/proc/{pid}/gid_map"), map(w.gid))?;
    fs::write(format!("/proc/{pid}/uid_map"), map(w.uid))
}

/// Runs in the child: mounts its own /proc, enters a user namespace that owns nothing, then drops all privileges.
/// Returns a mount of /proc for init alone.
fn set_up_init(socket: &OwnedFd, config: &BoxdConfig) -> anyhow::Result<OwnedFd> {
    // The user namespace is created after the mount and pid namespaces and so has no power over them: even full
    // capabilities in it would not allow unmounting anything.
    let (settings, procfs) = replace_procfs().context("mounting the workloads' /proc")?;
    if let Some(bytes) = config.limits.memory_bytes {
        let pages = bytes / SHARED_MEMORY_DIVISOR / rustix::param::page_size() as u64;
        let limit = openat(&settings, "kernel/shmall", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
        // Some kernels let only the machine's root set it, although each namespace has its own value.
        let _ = limit.map(|limit| rustix::io::write(&limit, pages.to_string().as_bytes()));
    }
    // SAFETY: this process has one thread and shares no memory or descriptors with another.
    unsafe { unshare_unsafe(UnshareFlags::NEWUSER) }.context("creating the workloads' user namespace")?;
    send(socket, &Report::Unshared, &[])?;
    if receive::<Report>(socket)?.is_none() {
        bail!("boxd has exited");
    }
    // Uses the handle opened earlier, because the /proc that programs see is already read-only.
    let limit = openat(&settings, "user/max_user_namespaces", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
        .context("opening the limit of nested user namespaces")?;
    rustix::io::write(&limit, b"0").context("forbidding nested user namespaces")?;
    for (name, value) in USER_SETTINGS {
        // Counted per user on the whole machine. A kernel without this count has nothing to limit.
        if let Ok(file) = openat(&settings, format!("user/{name}"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
            rustix::io::write(&file, value).with_context(|| format!("setting {name}"))?;
        }
    }
    drop((limit, settings));
    drop_privileges(config)?;
    Ok(procfs)
}

/// Drops privileges in the new user namespace. Every process below inherits the result.
fn drop_privileges(config: &BoxdConfig) -> anyhow::Result<()> {
    // The kernel resets this when a process enters a user namespace.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;

    if config.workload.uid_count > 1 {
        rustix::thread::set_thread_groups(&[]).context("dropping supplementary groups")?;
    }
    init::limit_resources(&config.limits).context("setting limits")?;
    rustix::thread::set_no_new_privs(true)?;
    cobox_kernel::drop_bounding_set().context("clearing the capability bounding set")?;
    seccomp::confine().map_err(|e| anyhow::anyhow!("installing the seccomp filter: {e}"))
}

/// Replaces boxd's /proc with one of this pid namespace, with machine settings read-only. Returns a handle through
/// which the settings are still writable, and a second mount, attached to no directory, in which no process is hidden.
fn replace_procfs() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    // Workloads must not inspect init, not even the list of its descriptors; this mode hides processes that the caller
    // can't trace. Both mounts are created before the old one is removed, because the kernel allows a new /proc in a
    // user namespace only while one is visible.
    let procfs = mount_procfs("invisible")?;
    let unfiltered = mount_procfs("off")?;
    unmount("/proc", UnmountFlags::DETACH)?;
    move_mount(&procfs, "", CWD, "/proc", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    let settings = openat(CWD, "/proc/sys", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for name in READ_ONLY {
        mount_over(&format!("/proc/{name}"), &format!("/proc/{name}"), true)?;
    }
    for name in MASKED {
        mount_over("/dev/null", &format!("/proc/{name}"), false)?;
    }
    Ok((settings, unfiltered))
}

fn mount_procfs(hidepid: &str) -> anyhow::Result<OwnedFd> {
    let fs = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "hidepid", hidepid)?;
    fsconfig_create(&fs)?;
    let flags = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, flags)?)
}

/// Mounts one path over another. A path that the kernel doesn't have is skipped.
fn mount_over(source: &str, target: &str, read_only: bool) -> anyhow::Result<()> {
    if !fs::exists(target)? {
        return Ok(());
    }
    let mount = open_tree(CWD, source, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC).context(target.to_owned())?;
    if read_only {
        set_mount_flags(mount.as_fd(), MountFlags { read_only, no_dev: true, no_exec: true }, false).context(target.to_owned())?;
    }
    move_mount(&mount, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).context(target.to_owned())
}
