//! The launcher: a process of its own, with one thread, that makes a sandbox's namespaces and starts boxd in them.
//!
//! It is this program run as `… __launch`, in a session of its own, so that it finishes its work even if the broker
//! dies meanwhile. When it ends, boxd is nobody's child that matters.
#![allow(unsafe_code, reason = "namespaces are made here")]

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
    root,
    spec::{LaunchSpec, RunRecord, UID_RANGE},
    stage,
};

/// The spec is a few kilobytes; a revocation list may make it longer.
const MAX_SPEC_BYTES: u64 = 16 * 1024 * 1024;
/// Workloads go before boxd and the host's own when memory runs out.
const WORKLOAD_OOM_SCORE: i32 = 500;
const NAMESPACES: libc::c_int =
    libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP;

/// The whole life of the launcher: reads a spec, starts the sandbox, prints `ok` or what went wrong.
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
    // A broker that is gone doesn't hear the answer, and finds out by itself.
    let _ = stdout.flush();
    exit_now(code)
}

fn launch() -> anyhow::Result<()> {
    // Fails only when it leads a session already, which is as good.
    let _ = setsid();
    let mut text = String::new();
    io::stdin().take(MAX_SPEC_BYTES).read_to_string(&mut text).context("reading the spec")?;
    let spec: LaunchSpec = serde_json::from_str(&text).context("reading the spec")?;

    // Locked by the broker before we were started and held by boxd for as long as it lives.
    let alive = io::stderr().as_fd().try_clone_to_owned().context("taking over the lock")?;
    let inherited = Inherited::open(&spec, alive)?;

    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    if spec.uid_base.is_some() {
        // What is mounted from here on is seen by nobody else and goes with us.
        // SAFETY: one thread, sharing nothing.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("leaving the host's mounts")?;
        stage::make_private().context("making the mounts private")?;
    }
    // Everything from here on is born in the workloads' groups; boxd leaves them when its init is there.
    spec.cgroups.enter_workloads().context("entering the control groups")?;
    // Whoever makes a user namespace owns it, and is charged for what is used in it (signals, queues, watches). Root must
    // not be: the owner is the sandbox's own first uid.
    if let Some(owner) = spec.uid_base {
        set_thread_res_uid(Uid::ROOT, Uid::from_raw(owner), Uid::ROOT)?;
    }
    // SAFETY: the launcher has one thread.
    match unsafe { clone_process(NAMESPACES) }.context("making the namespaces; `cobox doctor` tells what this machine allows")? {
        Cloned::Child => {
            drop(ours);
            inside(&spec, inherited, theirs)
        }
        Cloned::Parent { pid, .. } => {
            drop((theirs, inherited));
            let started = match spec.uid_base {
                Some(_) => set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).map_err(Into::into),
                None => Ok(()),
            };
            let started = started.and_then(|()| outside(&spec, pid, ours));
            if started.is_err() {
                end_child(pid);
            }
            started
        }
    }
}

/// On the host: gives the new namespaces their ids and limits, and waits until boxd is ready.
fn outside(spec: &LaunchSpec, pid: i32, link: OwnedFd) -> anyhow::Result<()> {
    // From here on the record tells who to end, should this process die: the child does nothing until told to.
    RunRecord::of(pid)?.write_to(&spec.dir).context("writing run.json")?;
    map_ids(pid, spec.uid_base).context("mapping ids")?;
    if spec.uid_base.is_some() {
        let user_namespace = File::open(format!("/proc/{pid}/ns/user"))?;
        stage::build(spec, Some(user_namespace.as_fd())).context("building the root")?;
    }
    // The floor below which a workload can't lower itself, where the broker may set one; init and all after it inherit it.
    prefer_for_oom(pid, WORKLOAD_OOM_SCORE);
    let mut link = File::from(link);
    link.write_all(b"g")?;
    // Either a lone "r", or the words of what failed and the end.
    let mut answer = [0u8; 1];
    match link.read(&mut answer)? {
        1 if &answer == b"r" => {}
        got => {
            let mut words = answer[..got].to_vec();
            link.take(4096).read_to_end(&mut words)?;
            let words = String::from_utf8_lossy(&words);
            bail!(
                "{}",
                if words.is_empty() { "boxd ended before it was ready; its log may say why" } else { words.trim_start_matches('!') }
            );
        }
    }
    // Its init is among the workloads; boxd itself is not to be ended before them.
    prefer_for_oom(pid, 0);
    link.write_all(b"g")?;
    Ok(())
}

/// Ends a child that did not become a sandbox and reaps it: as an orphan it would stay a zombie of the broker.
fn end_child(pid: i32) {
    let Some(pid) = Pid::from_raw(pid) else { return };
    // It may have ended by itself, and until it is reaped its number is not another process's.
    let _ = kill_process(pid, Signal::KILL);
    while let Err(Errno::INTR) = waitpid(Some(pid), WaitOptions::empty()) {}
}

/// How readily the kernel ends it when memory runs out.
fn prefer_for_oom(pid: i32, score: i32) {
    // Where it can't be set, all are equal: no reason not to start.
    let _ = fs::write(format!("/proc/{pid}/oom_score_adj"), score.to_string());
}

fn map_ids(pid: i32, uid_base: Option<u32>) -> io::Result<()> {
    let file = |name: &str| format!("/proc/{pid}/{name}");
    let (uid_map, gid_map) = match uid_base {
        Some(base) => (format!("0 {base} {UID_RANGE}"), format!("0 {base} {UID_RANGE}")),
        None => {
            // An ordinary user may map their own group only after giving up changing groups.
            fs::write(file("setgroups"), "deny")?;
            (format!("0 {} 1", rustix::process::getuid().as_raw()), format!("0 {} 1", rustix::process::getgid().as_raw()))
        }
    };
    fs::write(file("gid_map"), gid_map)?;
    fs::write(file("uid_map"), uid_map)
}

/// The descriptors boxd starts with, in the order it expects them.
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
        // Begun anew with each start, so that it holds what matters and doesn't grow over the years.
        let log = File::options().create(true).write(true).truncate(true).open(spec.dir.join("boxd.log")).context("opening boxd.log")?;
        Ok(Self {
            null: File::options().read(true).write(true).open("/dev/null")?.into(),
            log: log.into(),
            clients: listen(&spec.client_socket)?,
            control: listen(&spec.control_socket)?,
            config: config.into(),
            alive,
            groups: spec.cgroups.boxd_entrances().context("opening boxd's control groups")?,
        })
    }
}

/// A listener made on the host: unlike a TCP one it can't be turned round to reach the host's network.
fn listen(path: &Path) -> anyhow::Result<OwnedFd> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e).context(format!("removing the old {}", path.display())),
        _ => {}
    }
    let listener = UnixListener::bind(path).with_context(|| format!("binding {}", path.display()))?;
    Ok(listener.into())
}

/// In the new namespaces: builds the root, then becomes boxd. What goes wrong is told over the link.
fn inside(spec: &LaunchSpec, inherited: Inherited, link: OwnedFd) -> ! {
    let mut link = File::from(link);
    let error = match enter(spec, &mut link) {
        Ok(boxd) => become_boxd(inherited, link, boxd),
        Err(e) => {
            // The launcher is the only one to tell; if it is gone nobody asks.
            let _ = write!(link, "!{e:#}");
            1
        }
    };
    exit_now(error)
}

fn enter(spec: &LaunchSpec, link: &mut File) -> anyhow::Result<OwnedFd> {
    let mut go = [0u8; 1];
    link.read_exact(&mut go).context("the launcher is gone")?;
    if spec.uid_base.is_some() {
        set_thread_groups(&[])?;
    }
    set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
    umask(Mode::from_raw_mode(0o022));
    // SAFETY: one thread, sharing nothing.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.context("making the mount namespace")?;
    stage::make_private()?;
    if spec.uid_base.is_none() {
        stage::build(spec, None).context("building the root")?;
    }
    let boxd = root::enter(spec)?;
    cobox_kernel::raise_loopback().context("raising the loopback interface")?;
    sethostname(spec.hostname.as_bytes())?;
    Ok(boxd)
}

/// Returns an exit code, and only when it failed.
fn become_boxd(inherited: Inherited, link: File, boxd: OwnedFd) -> i32 {
    let Inherited { null, log, clients, control, config, alive, groups } = inherited;
    let Ok(log_too) = log.try_clone() else { return 1 };
    // crates/boxd/src/main.rs takes them over by these numbers, the program itself (8) excepted.
    let mut fds = vec![null, log, log_too, clients, control, config, link.into(), alive, boxd];
    fds.extend(groups.into_iter().map(OwnedFd::from));
    let image = ExecArgs::new(&[c"boxd"], &[]);
    // SAFETY: everything this process still uses is in the list, and is taken over again right here.
    let taken = unsafe { keep_only(fds).and_then(|()| Ok((adopt(8)?, rustix::io::fcntl_dupfd_cloexec(BorrowedFd::borrow_raw(6), 64)?))) };
    let Ok((boxd, link)) = taken else { return 1 };
    let error = exec_fd(boxd.as_fd(), &image);
    let _ = write!(File::from(link), "!starting boxd: {error}");
    1
}
