//! boxd: takes over the descriptors its launcher left, puts the workloads' namespaces below its own, gives up its powers, and serves.
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
    workload::{Links, Workloads},
};
use cobox_protocol::control::{BoxdConfig, Workload};
use rustix::{
    fs::{Mode, OFlags},
    mount::{MountFlags, UnmountFlags, mount, unmount},
    process::{DumpableBehavior, Gid, Resource, Rlimit, Uid, getrlimit, set_dumpable_behavior, setrlimit, umask},
    thread::{CapabilitySet, set_keep_capabilities, set_no_new_privs, set_thread_res_gid, set_thread_res_uid},
};
use tokio_util::sync::CancellationToken;

/// The numbers the launcher puts them at; 0, 1 and 2 are /dev/null and the log.
mod descriptor {
    pub const CLIENTS: i32 = 3;
    pub const CONTROL: i32 = 4;
    pub const CONFIG: i32 = 5;
    pub const LAUNCHER: i32 = 6;
    pub const ALIVE: i32 = 7;
    /// 8 was this program. Then come the control groups to move to.
    pub const FIRST_GROUP: i32 = 9;
}

/// Tasks that have their turn before the sockets are looked at again: who types comes before most of those who watch.
const TURNS_BETWEEN_LOOKS: u32 = 8;
/// What boxd may have of its own, so that no request can make it grow without end. Twice the 512 MiB that its buffers stay well below: it
/// is address space that counts, and half of a buffer that doubles may be empty.
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
            // The log, when there is one, is where an operator looks.
            let _ = writeln!(io::stderr(), "boxd: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    let text = format!(
        "boxd {}: the daemon inside a Cobox sandbox.\nIt is started by the broker, which passes it listeners and a configuration; there is nothing to run by hand.\n",
        env!("CARGO_PKG_VERSION")
    );
    // Nobody listening is not an error.
    let _ = io::stdout().write_all(text.as_bytes());
    ExitCode::from(u8::from(!matches!(std::env::args().nth(1).as_deref(), Some("--help" | "-h" | "--version" | "-V"))))
}

fn run() -> anyhow::Result<()> {
    // Nobody reads boxd's memory, whatever uid they have.
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

    let links = match prepare(&config) {
        Ok(links) => links,
        Err(e) => {
            // The launcher passes it on to whoever asked for the sandbox.
            let _ = write!(launcher, "!{e:#}");
            return Err(e);
        }
    };
    launcher.write_all(b"r")?;
    let mut go = [0u8; 1];
    if launcher.read(&mut go)? == 0 {
        bail!("the launcher died before everything was in place");
    }
    drop(launcher);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().event_interval(TURNS_BETWEEN_LOOKS).build()?;
    let result = runtime.block_on(async {
        let (workloads, init_ended) = Workloads::new(links, &config)?;
        let ids = file_ids(&config.workload);
        let files = FileWorkers::start(root()?, move || cobox_kernel::set_fs_ids(ids.0, ids.1)).context("starting the file workers")?;
        files.share_this_thread().context("taking on the workload's user")?;
        tokio::spawn(cobox_kernel::keep_polling());
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        tokio::spawn(async move {
            // Without init and the starter nothing can be started: end, and be started anew with the next use.
            let _ = init_ended.await;
            stop.cancel();
        });
        let doors = (listener(clients)?, listener(control)?);
        serve(config, Arc::new(workloads), files, doors, Arc::new(SystemClock), shutdown).await
    });
    runtime.shutdown_background();
    // Init, and all that runs below it, ends with this process. The lock is let go of last, by the kernel.
    drop(alive);
    result
}

/// Everything that needs power, then no power: returns the links to those who serve it in the workloads' namespaces.
fn prepare(config: &BoxdConfig) -> anyhow::Result<Links> {
    boxd::log::start();
    let links = boxd::workload::start(config)?;
    // What is made for a client gets the mode it asked for, in one step.
    umask(Mode::empty());
    take_all_descriptors()?;
    bound_own_memory()?;
    leave_the_workloads_groups(config.groups).context("moving to boxd's control groups")?;
    // Clients' paths are resolved in this mount namespace: what isn't here can't be reached through the files API, and
    // the place where it was takes no files either.
    unmount("/proc", UnmountFlags::DETACH).context("taking /proc away")?;
    let nothing = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("none", "/proc", "tmpfs", nothing, Some(c"size=4k,mode=0555")).context("covering /proc")?;
    set_no_new_privs(true)?;
    if config.workload.uid_count > 1 {
        // An id that no workload has, with the one power to judge file accesses as theirs.
        let (uid, gid) = (Uid::from_raw(config.workload.uid_count - 1), Gid::from_raw(config.workload.uid_count - 1));
        set_keep_capabilities(true)?;
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        cobox_kernel::keep_capabilities(CapabilitySet::SETUID | CapabilitySet::SETGID)?;
    } else {
        cobox_kernel::drop_all_capabilities()?;
    }
    // Changing ids makes the kernel forget this.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(links)
}

/// The usual limit of 1024 is less than the connections that are let in, and an accept that fails is a client that waits. Init has
/// set the workloads' own limit.
fn take_all_descriptors() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// The limit of boxd's control group, where there is one, counts the pages of clients' files too.
fn bound_own_memory() -> io::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Data);
    let bound = Some(maximum.map_or(MAX_DATA_BYTES, |most| most.min(MAX_DATA_BYTES)));
    Ok(setrlimit(Resource::Data, Rlimit { current: bound, maximum: bound })?)
}

/// Init is among the workloads and stays; boxd is charged apart. Before there is a second thread, which would stay behind.
fn leave_the_workloads_groups(count: u32) -> io::Result<()> {
    for number in (descriptor::FIRST_GROUP..).take(count as usize) {
        // SAFETY: the launcher put it there; nothing has taken it over yet.
        let group = unsafe { cobox_kernel::adopt(number) }?;
        rustix::io::write(&group, b"0")?;
    }
    Ok(())
}

/// Whom file accesses are judged as, in boxd's user namespace: with a single id the workload's is 0 there.
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
