//! The launcher: a single-threaded process that creates a sandbox's namespaces and starts boxd in them.
//!
//! It is this program run as `… __launch`, in its own session, so that it completes a start even if the broker dies. When it exits, boxd
//! is reparented and doesn't depend on it.
#![allow(unsafe_code, reason = "creates namespaces")]

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixListener,
    },
    path::Path,
};

use anyhow::{Context, bail};
use cobox_kernel::{Cloned, ExecArgs, adopt, clone_process, exec_fd, exit_now, keep_only};
use rustix::{
    fs::{Mode, memfd_create},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Gid, Pid, Signal, Uid, WaitOptions, kill_process, setsid, umask, waitpid},
    system::sethostname,
    thread::{UnshareFlags, set_thread_groups, set_thread_res_gid, set_thread_res_uid, unshare_unsafe},
};

use super::{
    launch_spec::{LaunchSpec, RunRecord, UID_RANGE},
    root_mount, staging,
};

/// Maximum size of the launcher's input, in bytes. A typical one is a few kilobytes; a revocation list can make it much larger.
const MAX_SPEC_BYTES: u64 = 16 * 1024 * 1024;
/// Makes the kernel end workloads before boxd and the host's processes when memory runs out.
const WORKLOAD_OOM_SCORE: i32 = 500;
const NAMESPACES: libc::c_int =
    libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP;

/// The launcher's main function: reads a [`LaunchSpec`], starts the sandbox, and prints `ok` or an error.
pub fn launch_main() -> ! {
    let mut stdout = io::stdout();
    let code = match launch() {
        Ok(()) => {
            let _ = stdout.write_all(b"ok\n");
            0
        }
        Err(e) => {
            let _ = writeln!(stdout, "{e:#}");
            1
        }
    };
    // Ignored: a broker that has died can't receive the result; its successor finds the sandbox by its lock.
    let _ = stdout.flush();
    exit_now(code)
}

fn launch() -> anyhow::Result<()> {
    // Fails only if it is a session leader already.
    let _ = setsid();
    let mut text = String::new();
    io::stdin().take(MAX_SPEC_BYTES).read_to_string(&mut text).context("reading the spec")?;
    let spec: LaunchSpec = serde_json::from_str(&text).context("reading the spec")?;

    // Locked by the broker before it started the launcher. boxd inherits the lock and holds it until it exits.
    let alive = io::stderr().as_fd().try_clone_to_owned().context("taking over the lock")?;
    let inherited = Inherited::open(&spec, alive)?;

    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if spec.uid_base.is_some() {
        // Later mounts are invisible to other processes and are removed when the launcher exits.
        // SAFETY: the launcher has one thread and shares nothing.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("leaving the host's mounts")?;
        staging::make_private().context("making the mounts private")?;
    }
    // Later processes start in the workloads' groups; boxd moves itself to its own after it has started its init.
    spec.cgroups.enter_workloads().context("entering the control groups")?;
    // The creator of a user namespace owns it and is charged for resources used in it (signals, queues, watches). Root must not be charged,
    // so the sandbox's first uid creates it.
    if let Some(owner) = spec.uid_base {
        set_thread_res_uid(Uid::ROOT, Uid::from_raw(owner), Uid::ROOT)?;
    }
    // SAFETY: the launcher has one thread.
    match unsafe { clone_process(NAMESPACES) }.context("creating the namespaces; run `cobox doctor` to see what this machine supports")? {
        Cloned::Child => {
            drop(ours);
            run_in_namespaces(&spec, inherited, theirs)
        }
        Cloned::Parent { pid, .. } => {
            drop((theirs, inherited));
            let started = match spec.uid_base {
                Some(_) => set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).map_err(Into::into),
                None => Ok(()),
            };
            let started = started.and_then(|()| configure_from_host(&spec, pid, ours));
            if started.is_err() {
                end_child(pid);
            }
            started
        }
    }
}

/// Runs in the launcher's own process: sets ID maps and limits of the new namespaces, and waits until boxd is ready.
fn configure_from_host(spec: &LaunchSpec, pid: i32, link: OwnedFd) -> anyhow::Result<()> {
    // If the launcher dies from now on, the record identifies the process to end. The child waits until it is released.
    RunRecord::of(pid)?.write_to(&spec.dir).context("writing run.json")?;
    map_ids(pid, spec.uid_base).context("mapping ids")?;
    if spec.uid_base.is_some() {
        let user_namespace = File::open(format!("/proc/{pid}/ns/user"))?;
        staging::build(spec, Some(user_namespace.as_fd())).context("building the root")?;
    }
    // If the broker may set it, a workload can't lower it below this value. init and its children inherit it.
    set_oom_score(pid, WORKLOAD_OOM_SCORE);
    let mut link = File::from(link);
    link.write_all(b"g")?;
    // Either a single "r", or an error message up to the end of the stream.
    let mut answer = [0u8; 1];
    match link.read(&mut answer)? {
        1 if &answer == b"r" => {}
        got => {
            let mut words = answer[..got].to_vec();
            link.take(4096).read_to_end(&mut words)?;
            let words = String::from_utf8_lossy(&words);
            bail!(
                "{}",
                if words.is_empty() { "boxd exited before it was ready; see its log (boxd.log)" } else { words.trim_start_matches('!') }
            );
        }
    }
    // Its init keeps the workloads' score; boxd itself must not be ended before them.
    set_oom_score(pid, 0);
    link.write_all(b"g")?;
    Ok(())
}

/// Ends and reaps the child of a failed start: as an orphan it would remain a zombie of the broker.
fn end_child(pid: i32) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    // It may have exited already. Its PID isn't reused before it is reaped.
    let _ = kill_process(pid, Signal::KILL);
    while let Err(Errno::INTR) = waitpid(Some(pid), WaitOptions::empty()) {}
}

/// Sets how likely the kernel is to end a process when memory runs out.
fn set_oom_score(pid: i32, score: i32) {
    // Not fatal: if it can't be set, all processes have the same score.
    let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string());
}

fn map_ids(pid: i32, uid_base: Option<u32>) -> io::Result<()> {
    let file = |name: &str| format!("/proc/{pid}/{name}");
    let (uid_map, gid_map) = match uid_base {
        Some(base) => (format!("0 {base} {UID_RANGE}"), format!("0 {base} {UID_RANGE}")),
        None => {
            // An ordinary user may map their own group only after disabling setgroups.
            fs::write(file("setgroups"), "deny")?;
            (format!("0 {} 1", rustix::process::getuid().as_raw()), format!("0 {} 1", rustix::process::getgid().as_raw()))
        }
    };
    fs::write(file("gid_map"), gid_map)?;
    fs::write(file("uid_map"), uid_map)
}

/// The descriptors that boxd inherits, in the order it expects.
struct Inherited {
    null: OwnedFd,
    log: OwnedFd,
    clients: OwnedFd,
    control: OwnedFd,
    config: OwnedFd,
    alive: OwnedFd,
    groups: Vec<File>,
}

impl Inherited {
    fn open(spec: &LaunchSpec, alive: OwnedFd) -> anyhow::Result<Self> {
        let mut config = File::from(memfd_create("boxd-config", rustix::fs::MemfdFlags::CLOEXEC)?);
        config.write_all(&serde_json::to_vec(&spec.config)?)?;
        rustix::fs::seek(&config, rustix::fs::SeekFrom::Start(0))?;
        // Truncated at each start, so that it only covers the current run and doesn't grow over time.
        let log = File::options().create(true).write(true).truncate(true).open(spec.dir.join("boxd.log")).context("opening boxd.log")?;
        Ok(Self {
            null: File::options().read(true).write(true).open("/dev/null")?.into(),
            log: log.into(),
            clients: listen(&spec.client_socket)?,
            control: listen(&spec.control_socket)?,
            config: config.into(),
            alive,
            groups: spec.cgroups.open_boxd_entry_files().context("opening boxd's control groups")?,
        })
    }
}

/// Creates a listener on the host. Unlike a TCP socket, it can't be used from inside to reach the host's network.
fn listen(path: &Path) -> anyhow::Result<OwnedFd> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e).context(format!("removing the old {}", path.display())),
        _ => {}
    }
    let listener = UnixListener::bind(path).with_context(|| format!("binding {}", path.display()))?;
    Ok(listener.into())
}

/// Runs in the new namespaces: builds the root, then executes boxd. Errors are sent over the link.
fn run_in_namespaces(spec: &LaunchSpec, inherited: Inherited, link: OwnedFd) -> ! {
    let mut link = File::from(link);
    let error = match enter(spec, &mut link) {
        Ok(boxd) => become_boxd(inherited, link, boxd),
        Err(e) => {
            // Ignored: if the launcher has died, no process reads the error.
            let _ = write!(link, "!{e:#}");
            1
        }
    };
    exit_now(error)
}

fn enter(spec: &LaunchSpec, link: &mut File) -> anyhow::Result<OwnedFd> {
    let mut go = [0u8; 1];
    link.read_exact(&mut go).context("the launcher exited")?;
    if spec.uid_base.is_some() {
        set_thread_groups(&[])?;
    }
    set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    umask(Mode::from_raw_mode(0o022));
    // SAFETY: this process has one thread and shares nothing.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("creating the mount namespace")?;
    staging::make_private()?;
    if spec.uid_base.is_none() {
        staging::build(spec, None).context("building the root")?;
    }
    let boxd = root_mount::enter(spec)?;
    cobox_kernel::raise_loopback().context("bringing up the loopback interface")?;
    sethostname(spec.hostname.as_bytes())?;
    Ok(boxd)
}

/// Returns only on failure, with an exit code.
fn become_boxd(inherited: Inherited, link: File, boxd: OwnedFd) -> i32 {
    let Inherited { null, log, clients, control, config, alive, groups } = inherited;
    let Ok(log_too) = log.try_clone() else { return 1 };
    // crates/boxd/src/main.rs expects the descriptors at these numbers, except for the program itself (8).
    let mut fds = vec![null, log, log_too, clients, control, config, link.into(), alive, boxd];
    fds.extend(groups.into_iter().map(OwnedFd::from));
    let image = ExecArgs::new(&[c"boxd"], &[]);
    // SAFETY: all descriptors that this process still uses are in the list and are adopted again right here.
    let taken = unsafe { keep_only(fds).and_then(|()| Ok((adopt(8)?, rustix::io::fcntl_dupfd_cloexec(BorrowedFd::borrow_raw(6), 64)?))) };
    let Ok((boxd, link)) = taken else { return 1 };
    let error = exec_fd(boxd.as_fd(), &image);
    let _ = write!(File::from(link), "!starting boxd: {error}");
    1
}
