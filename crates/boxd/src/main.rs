//! The boxd binary: takes over the descriptors from its launcher, creates the workload namespaces, drops its
//! privileges, and serves.
#![allow(unsafe_code, reason = "inherited descriptors are taken over by their numbers")]

use std::{
    fs::File,
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixListener},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, bail};
use boxd::{
    FileWorkers,
    clock::SystemClock,
    serve,
    workload::{WorkloadSockets, Workloads},
};
use cobox_protocol::control::{BoxdConfig, Workload};
use rustix::{
    fs::{Mode, OFlags},
    mount::{MountFlags, UnmountFlags, mount, unmount},
    process::{DumpableBehavior, Gid, Resource, Rlimit, Uid, getrlimit, set_dumpable_behavior, setrlimit, umask},
    thread::{CapabilitySet, set_keep_capabilities, set_no_new_privs, set_thread_res_gid, set_thread_res_uid},
};
use tokio_util::sync::CancellationToken;

/// Descriptor numbers used by the launcher. 0, 1 and 2 are /dev/null and the log.
mod descriptor {
    pub const CLIENTS: i32 = 3;
    pub const CONTROL: i32 = 4;
    pub const CONFIG: i32 = 5;
    pub const LAUNCHER: i32 = 6;
    pub const ALIVE: i32 = 7;
    /// Number 8 was the boxd executable. From here on come the control groups to move to.
    pub const FIRST_GROUP: i32 = 9;
}

/// Number of tasks that run between polls of the sockets. Small, so that a shell's controller is served before most of
/// its observers.
const TASKS_BETWEEN_POLLS: u32 = 8;
/// Limit on boxd's own memory, so that no request can make it grow without bound. Twice the 512 MiB that its buffers
/// stay well below, because the limit counts address space, and half of a growing buffer may be unused.
const MAX_DATA_BYTES: u64 = 1 << 30;
/// The configuration is a few kilobytes and a revocation list.
const MAX_CONFIG_BYTES: u64 = 16 * 1024 * 1024;

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some() {
        return usage();
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // Standard error is the log if there is one.
            let _ = writeln!(io::stderr(), "boxd: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    let text = format!(
        "boxd {}: the daemon inside a Cobox sandbox.\nThe broker starts it and passes it listeners and a configuration. It can't be started manually.\n",
        env!("CARGO_PKG_VERSION")
    );
    // A closed standard output is not an error.
    let _ = io::stdout().write_all(text.as_bytes());
    ExitCode::from(u8::from(!matches!(std::env::args().nth(1).as_deref(), Some("--help" | "-h" | "--version" | "-V"))))
}

fn run() -> anyhow::Result<()> {
    // Prevents processes of any uid from reading boxd's memory.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let [clients, control, config, launcher, alive] =
        [descriptor::CLIENTS, descriptor::CONTROL, descriptor::CONFIG, descriptor::LAUNCHER, descriptor::ALIVE].map(|number| {
            // SAFETY: at the start of main nothing else has opened or owns these numbers.
            unsafe { cobox_kernel::adopt(number) }.with_context(|| format!("descriptor {number} is missing: boxd is started by the broker"))
        });
    let (clients, control, mut launcher, alive) = (clients?, control?, File::from(launcher?), alive?);
    let mut text = Vec::new();
    File::from(config?).take(MAX_CONFIG_BYTES).read_to_end(&mut text)?;
    let config: BoxdConfig = serde_json::from_slice(&text).context("reading the configuration")?;

    let sockets = match prepare(&config) {
        Ok(sockets) => sockets,
        Err(e) => {
            // The launcher forwards it to the caller that requested the sandbox.
            let _ = write!(launcher, "!{e:#}");
            return Err(e);
        }
    };
    launcher.write_all(b"r")?;
    let mut proceed = [0u8; 1];
    if launcher.read(&mut proceed)? == 0 {
        bail!("the launcher died before the sandbox was set up");
    }
    drop(launcher);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().event_interval(TASKS_BETWEEN_POLLS).build()?;
    let result = runtime.block_on(async {
        let (workloads, init_ended) = Workloads::new(sockets, &config)?;
        let ids = file_ids(&config.workload);
        let files = FileWorkers::start(root()?, move || cobox_kernel::set_fs_ids(ids.0, ids.1)).context("starting the file workers")?;
        files.allow_inline_steps().context("switching to the workload's user")?;
        tokio::spawn(cobox_kernel::keep_polling());
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        tokio::spawn(async move {
            // Without init or the spawner no program can be started, so boxd exits, and the next use of the sandbox
            // starts it again.
            let _ = init_ended.await;
            stop.cancel();
        });
        let listeners = (listener(clients)?, listener(control)?);
        serve(config, Arc::new(workloads), files, listeners, Arc::new(SystemClock), shutdown).await
    });
    runtime.shutdown_background();
    // Init and everything below it end with this process. The kernel releases the lock last.
    drop(alive);
    result
}

/// Does everything that needs privileges, then drops them. Returns the links to init and the spawner.
fn prepare(config: &BoxdConfig) -> anyhow::Result<WorkloadSockets> {
    boxd::log::start();
    let sockets = boxd::workload::start(config)?;
    // Files created for a client get the requested mode in one step.
    umask(Mode::empty());
    raise_descriptor_limit()?;
    limit_own_memory()?;
    leave_workload_cgroups(config.groups).context("moving to boxd's control groups")?;
    // The files API resolves paths in this mount namespace, so this makes /proc unreachable through it. The tmpfs over
    // it accepts no files either.
    unmount("/proc", UnmountFlags::DETACH).context("unmounting /proc")?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("none", "/proc", "tmpfs", flags, Some(c"size=4k,mode=0555")).context("covering /proc")?;
    set_no_new_privs(true)?;
    if config.workload.uid_count > 1 {
        // An id that no workload has, with only the capabilities to access files as a workload.
        let (uid, gid) = (Uid::from_raw(config.workload.uid_count - 1), Gid::from_raw(config.workload.uid_count - 1));
        set_keep_capabilities(true)?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        cobox_kernel::keep_capabilities(CapabilitySet::SETUID | CapabilitySet::SETGID)?;
    } else {
        cobox_kernel::drop_all_capabilities()?;
    }
    // Changing ids resets this in the kernel.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(sockets)
}

/// Raises the usual limit of 1024 descriptors, which is below the number of admitted connections: a failing accept
/// would leave clients waiting. Init has already set the workloads' own limit.
fn raise_descriptor_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// A separate limit, because that of boxd's control group, if there is one, also counts the page cache of clients'
/// files.
fn limit_own_memory() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Data);
    let limit = Some(maximum.map_or(MAX_DATA_BYTES, |maximum_bytes| maximum_bytes.min(MAX_DATA_BYTES)));
    Ok(setrlimit(Resource::Data, Rlimit { current: limit, maximum: limit })?)
}

/// Moves boxd to its own control groups, so that it is accounted separately; init remains with the workloads. Must run
/// before there is a second thread, which would not be moved.
fn leave_workload_cgroups(count: u32) -> io::Result<()> {
    for number in (descriptor::FIRST_GROUP..).take(count as usize) {
        // SAFETY: the launcher put it there; nothing has taken it over yet.
        let group = unsafe { cobox_kernel::adopt(number) }?;
        rustix::io::write(&group, b"0")?;
    }
    Ok(())
}

/// The ids for file accesses, in boxd's user namespace: with a single id, that of the workload is 0 there.
fn file_ids(workload: &Workload) -> (u32, u32) {
    if workload.uid_count > 1 { (workload.uid, workload.gid) } else { (0, 0) }
}

fn root() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn listener(fd: OwnedFd) -> io::Result<tokio::net::UnixListener> {
    let listener = UnixListener::from(fd);
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}
