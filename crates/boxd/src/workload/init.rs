//! The first process of the workloads' namespaces: starts programs for boxd, reaps, and ends them when told to.
//!
//! It is forked from boxd and never runs another program itself, so its memory stays out of the workloads' reach.
#![allow(unsafe_code, reason = "it forks, and hands descriptors to the programs it starts")]

use std::{
    collections::BTreeSet,
    ffi::CString,
    fs::{self, File},
    io,
    os::fd::{AsFd, OwnedFd},
};

use cobox_kernel::{Image, adopt, child_events, drop_all_capabilities, exec_path, exit_now, fork, keep_only, reset_signals};
use cobox_protocol::control::{BoxdConfig, Workload, WorkloadLimits};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{
        Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, ioctl_tiocsctty, kill_process, kill_process_group, prlimit, setrlimit,
        setsid, wait,
    },
    thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};

use super::{
    link::{ImageSpec, Order, Report, Step, receive, send},
    seccomp,
};

/// How often a tree is looked at for new members before what is left is given up on; each look ends all it finds, so
/// more than a few are needed only against a program that forks as fast as it can.
const KILL_ROUNDS: u32 = 100;
/// Between two looks at the memory of all programs together, where no cgroup holds it.
const WATCH_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Counted per user, not per process: more would be taken from others.
const MAX_PENDING_SIGNALS: u64 = 4096;
/// Bytes of POSIX message queues, also per user: the kernel's own default.
const MAX_QUEUE_BYTES: u64 = 819_200;

/// Takes orders until boxd is gone; then this process ends, and the kernel ends all others of the namespace with it.
pub fn run(link: OwnedFd, config: &BoxdConfig) -> ! {
    let outcome = serve(link, config);
    exit_now(i32::from(outcome.is_err()))
}

pub fn limit_resources(limits: &WorkloadLimits) -> io::Result<()> {
    let set = |resource, wanted: u64| {
        // A hard limit can't be raised by an ordinary user: the lower of the two holds.
        let ceiling = getrlimit(resource).maximum.unwrap_or(u64::MAX);
        let value = Some(wanted.min(ceiling));
        setrlimit(resource, Rlimit { current: value, maximum: value })
    };
    // Not 0, which a kernel that pipes core dumps to a helper on the host ignores: 1 is what it takes for "none".
    set(Resource::Core, 1)?;
    set(Resource::Sigpending, MAX_PENDING_SIGNALS)?;
    set(Resource::Msgqueue, MAX_QUEUE_BYTES)?;
    set(Resource::Nofile, limits.open_files)?;
    set(Resource::Nproc, limits.processes)?;
    if let Some(bytes) = limits.memory_bytes {
        set(Resource::Data, bytes)?;
    }
    Ok(())
}

fn serve(link: OwnedFd, config: &BoxdConfig) -> io::Result<()> {
    // The listeners and the lock that boxd inherited are none of the workloads' business.
    // SAFETY: nothing of boxd runs in this process any more; only the link is used from here on.
    unsafe { keep_only(vec![link]) }?;
    // SAFETY: keep_only has just put the link there.
    let link = unsafe { adopt(0) }?;
    // 1 and 2 must not be what some later open happens to get.
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let null2 = null.try_clone()?;
    let children = child_events()?;
    let (mut leaders, mut has_processes) = (BTreeSet::new(), false);
    send(&link, &Report::Ready, &[])?;
    loop {
        let mut waiting = [PollFd::new(&link, PollFlags::IN), PollFd::new(&children, PollFlags::IN)];
        // Nothing to watch while nothing runs, and nothing to watch for where a cgroup does it.
        let watched = config.limits.memory_bytes.filter(|_| has_processes);
        match poll(&mut waiting, watched.map(|_| &WATCH_EVERY)) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        let (has_order, has_child) = (!waiting[0].revents().is_empty(), !waiting[1].revents().is_empty());
        if has_child {
            let mut drained = [0u8; 128];
            // Level-triggered by the loop below; an empty read is no loss.
            let _ = rustix::io::read(&children, &mut drained);
            reap(&link, &mut leaders)?;
        }
        if has_order {
            let Some((order, fds)) = receive::<Order>(&link)? else {
                drop((null, null2));
                return Ok(());
            };
            obey(&link, order, fds, &config.workload, &mut leaders)?;
            has_processes = true;
        }
        if let Some(limit) = watched {
            has_processes = watch_memory(limit);
        }
    }
}

fn reap(link: &OwnedFd, leaders: &mut BTreeSet<i32>) -> io::Result<()> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => {
                let pid = pid.as_raw_nonzero().get();
                if leaders.remove(&pid) {
                    let signal = status.terminating_signal();
                    let code = status.exit_status().or(signal.map(|s| 128 + s)).unwrap_or(-1);
                    send(link, &Report::Exited { pid, code, signal }, &[])?;
                }
            }
            Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

fn obey(link: &OwnedFd, order: Order, fds: Vec<OwnedFd>, workload: &Workload, leaders: &mut BTreeSet<i32>) -> io::Result<()> {
    match order {
        Order::Spawn { seq, is_terminal } => {
            let report = match spawn(fds, is_terminal, workload) {
                Ok(pid) => {
                    leaders.insert(pid);
                    Report::Spawned { seq, pid }
                }
                Err(e) => Report::NotSpawned { seq, errno: e.raw_os_error().unwrap_or(libc::EINVAL) },
            };
            send(link, &report, &[])
        }
        Order::Signal { pid, signal } => {
            // Only what boxd started and has not been told the end of; else the number may be somebody else's by now.
            if leaders.contains(&pid)
                && let (Some(group), Some(signal)) = (Pid::from_raw(pid), Signal::from_named_raw(signal))
            {
                // Gone in the meantime is what was wanted.
                let _ = kill_process_group(group, signal);
            }
            Ok(())
        }
        Order::KillTree { seq, pid } => {
            kill_tree(pid, leaders.contains(&pid));
            reap(link, leaders)?;
            send(link, &Report::TreeKilled { seq }, &[])
        }
        Order::StopWriters { stop } => {
            stop_writers(stop);
            Ok(())
        }
    }
}

fn spawn(fds: Vec<OwnedFd>, is_terminal: bool, workload: &Workload) -> io::Result<i32> {
    let Ok([image, stdin, stdout, stderr, outcome]) = <[OwnedFd; 5]>::try_from(fds) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    let spec = ImageSpec::read_from(&mut File::from(image))?;
    // SAFETY: init has one thread.
    match unsafe { fork() }? {
        Some(pid) => Ok(pid),
        None => become_program(spec, [stdin, stdout, stderr], outcome, is_terminal, workload),
    }
}

/// In the child: takes off everything of init and becomes the program. On failure the outcome pipe tells where and why.
fn become_program(spec: ImageSpec, stdio: [OwnedFd; 3], outcome: OwnedFd, is_terminal: bool, workload: &Workload) -> ! {
    let mut fds = Vec::from(stdio);
    fds.push(outcome);
    // SAFETY: the link and everything else of init is closed in this child, which only execs from here on.
    let outcome = unsafe { keep_only(fds).and_then(|()| adopt(3)) };
    let Ok(outcome) = outcome else { exit_now(126) };
    let fail = |step: Step, e: io::Error| -> ! {
        let mut bytes = [0u8; 5];
        bytes[0] = step as u8;
        bytes[1..].copy_from_slice(&e.raw_os_error().unwrap_or(libc::EINVAL).to_le_bytes());
        // Nobody is left to tell when this fails.
        let _ = rustix::io::write(&outcome, &bytes);
        exit_now(126)
    };
    if let Err(e) = take_off(is_terminal, workload) {
        fail(Step::Setup, e);
    }
    if let Err(e) = CString::new(spec.cwd).map_err(io::Error::from).and_then(|dir| Ok(rustix::process::chdir(dir)?)) {
        fail(Step::WorkingDirectory, e);
    }
    let error = exec(spec.argv, spec.env);
    fail(Step::Program, error)
}

fn take_off(is_terminal: bool, workload: &Workload) -> io::Result<()> {
    setsid()?;
    if is_terminal {
        ioctl_tiocsctty(io::stdin().as_fd())?;
    }
    let (uid, gid) = (Uid::from_raw(workload.uid), Gid::from_raw(workload.gid));
    if workload.uid_count > 1 {
        set_thread_groups(&[gid])?;
    }
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    drop_all_capabilities()?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    reset_signals();
    seccomp::confine_program().map_err(io::Error::other)
}

/// Runs argv[0], found along PATH when it names no directory. Returns why it couldn't.
fn exec(argv: Vec<Vec<u8>>, env: Vec<Vec<u8>>) -> io::Error {
    let program = argv[0].clone();
    let path = env.iter().find_map(|e| e.strip_prefix(b"PATH=".as_slice())).unwrap_or(b"/usr/bin:/bin").to_vec();
    let strings = |list: Vec<Vec<u8>>| list.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>();
    let (Ok(argv), Ok(env)) = (strings(argv), strings(env)) else { return io::ErrorKind::InvalidInput.into() };
    let image = Image::new(argv, env);
    let run = |path: Vec<u8>| match CString::new(path) {
        Ok(path) => exec_path(&path, &image),
        Err(e) => e.into(),
    };
    if program.contains(&b'/') {
        return run(program);
    }
    let mut worst = io::Error::from_raw_os_error(libc::ENOENT);
    for dir in path.split(|b| *b == b':').filter(|d| !d.is_empty()) {
        let error = run([dir, b"/", &program].concat());
        // "Found but not allowed" says more than "not found in the last directory".
        if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) {
            worst = error;
        }
    }
    worst
}

struct Member {
    pid: i32,
    parent: i32,
    session: i32,
}

fn processes() -> Vec<Member> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| *pid != 1)
        .filter_map(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The name in parentheses may hold anything, so count from the last one.
            let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
            let is_zombie = fields.next()? == "Z";
            let parent = fields.next()?.parse().ok()?;
            let session = fields.nth(1)?.parse().ok()?;
            (!is_zombie).then_some(Member { pid, parent, session })
        })
        .collect()
}

/// Ends a program, its session and its descendants, looking again until none is left. Of a program that has ended already
/// only its session is left to end: its number may be another's.
fn kill_tree(root: i32, is_running: bool) {
    let mut doomed: BTreeSet<i32> = is_running.then_some(root).into_iter().collect();
    for _ in 0..KILL_ROUNDS {
        let all = processes();
        loop {
            let found: Vec<i32> = all
                .iter()
                .filter(|p| doomed.contains(&p.parent) || p.session == root)
                .map(|p| p.pid)
                .filter(|p| !doomed.contains(p))
                .collect();
            if found.is_empty() {
                break;
            }
            doomed.extend(found);
        }
        let living: Vec<i32> = all.iter().map(|p| p.pid).filter(|pid| doomed.contains(pid)).collect();
        if living.is_empty() {
            return;
        }
        // Stopped first, so that none forks while its neighbours die and its child escapes the next look.
        for signal in [Signal::STOP, Signal::KILL] {
            for pid in &living {
                if let Some(pid) = Pid::from_raw(*pid) {
                    // Gone in the meantime is what was wanted.
                    let _ = kill_process(pid, signal);
                }
            }
        }
    }
}

/// Ends the largest programs until the rest fits. Says whether any program runs.
fn watch_memory(limit: u64) -> bool {
    let all = processes();
    let mut seen = BTreeSet::new();
    let in_files: u64 = all.iter().map(|p| memory_files(p.pid, &mut seen)).sum();
    // What is shared counts for each here, so this is never too little; only past the limit is a closer look worth its price.
    let page = rustix::param::page_size() as u64;
    let resident = |pid: i32| {
        Some(fs::read_to_string(format!("/proc/{pid}/statm")).ok()?.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()? * page)
    };
    if all.iter().filter_map(|p| resident(p.pid)).sum::<u64>() + in_files <= limit {
        return !all.is_empty();
    }
    let mut seen = BTreeSet::new();
    let mut sizes: Vec<(u64, i32)> = all.iter().map(|p| (own_share(p.pid) + memory_files(p.pid, &mut seen), p.pid)).collect();
    sizes.sort_unstable();
    let mut total: u64 = sizes.iter().map(|(bytes, _)| bytes).sum();
    while total > limit
        && let Some((bytes, pid)) = sizes.pop()
    {
        if let Some(pid) = Pid::from_raw(pid) {
            // Gone in the meantime: its memory is, too.
            let _ = kill_process(pid, Signal::KILL);
        }
        total -= bytes;
    }
    !all.is_empty()
}

/// Memory of a process, what it shares counted by its share.
fn own_share(pid: i32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let kib = rollup.lines().find_map(|l| l.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Memory in files without a name that a process holds open, each file once.
fn memory_files(pid: i32, seen: &mut BTreeSet<u64>) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries
        .filter(|e| fs::read_link(e.path()).is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"/memfd:")))
        .filter_map(|e| fs::metadata(e.path()).ok())
        .filter(|m| seen.insert(m.ino()))
        .map(|m| m.blocks() * 512)
        .sum()
}

/// With no allowance left a write to a file fails with EFBIG, while deleting still works. It stops the honest and the
/// careless at once; who fills disks by other means is suspended by the broker.
fn stop_writers(stop: bool) {
    let current = if stop { Some(0) } else { None };
    let limit = Rlimit { current, maximum: None };
    // Init's own limit is what new programs start with.
    let _ = setrlimit(Resource::Fsize, limit);
    for p in processes() {
        if let Some(pid) = Pid::from_raw(p.pid) {
            // Gone in the meantime: it writes no more either.
            let _ = prlimit(Some(pid), Resource::Fsize, Rlimit { current, maximum: None });
        }
    }
}
