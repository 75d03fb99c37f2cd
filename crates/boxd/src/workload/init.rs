//! The first process of the workloads' namespaces: starts programs for boxd, reaps, and ends them when told to.
//!
//! It is forked from boxd and never runs another program itself, so its memory stays out of the workloads' reach.
#![allow(unsafe_code, reason = "it forks, and hands descriptors to the programs it starts")]

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
};

use cobox_kernel::{Launch, Pad, Step, Word, adopt, child_events, exit_now, keep_only, set_soft_limit, settle_signals};
use cobox_protocol::control::{BoxdConfig, Workload, WorkloadLimits};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process_group, setrlimit, wait},
};

use super::{
    link::{MAX_IMAGE_BYTES, Order, Received, Report, Unpacked, receive, send},
    memory::MemoryWatch,
    proc::Proc,
    seccomp, tree,
};

/// Between two looks at the memory of all programs together, where no cgroup holds it.
const WATCH_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Counted per user, not per process: more would be taken from others.
const MAX_PENDING_SIGNALS: u64 = 4096;
/// Pads kept for the next programs: as many as start in one moment. Each is a stack of which a page or two was ever touched.
const SPARE_PADS: usize = 8;
/// Bytes of POSIX message queues, also per user: the kernel's own default.
const MAX_QUEUE_BYTES: u64 = 819_200;

/// Takes orders until boxd is gone; then this process ends, and the kernel ends all others of the namespace with it.
pub fn run(link: OwnedFd, proc: OwnedFd, config: &BoxdConfig) -> ! {
    let outcome = serve(link, proc, config);
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

/// What init knows.
struct Init<'a> {
    link: OwnedFd,
    proc: Proc,
    null: File,
    workload: &'a Workload,
    /// By pid, until they are waited for: its number is nobody else's for as long.
    running: HashMap<i32, Running>,
    /// Memory for programs on their way, used again.
    #[allow(clippy::vec_box, reason = "one in use must not move, and it is not unpacked between two uses")]
    pads: Vec<Box<Pad>>,
    word: Word,
    /// Whether programs can be marked: not where whoever started us may have only so many file locks, as then have all.
    has_marks: bool,
}

/// A program that boxd asked for.
struct Running {
    seq: u64,
    pad: Box<Pad>,
}

fn serve(link: OwnedFd, proc: OwnedFd, config: &BoxdConfig) -> io::Result<()> {
    // The listeners and the lock that boxd inherited are none of the workloads' business.
    // SAFETY: nothing of boxd runs in this process any more; only these two are used from here on.
    unsafe { keep_only(vec![link, proc]) }?;
    // SAFETY: keep_only has just put them there.
    let (link, proc) = unsafe { (adopt(0)?, Proc::new(adopt(1)?)) };
    // Gets the number 2, which must not be what some later open happens to get.
    let null = File::options().read(true).write(true).open("/dev/null")?;
    settle_signals();
    let children = child_events()?;
    let mut word = [0; 16];
    getrandom::fill(&mut word).map_err(io::Error::other)?;
    let [a, b] = [0, 8].map(|at| u64::from_ne_bytes(std::array::from_fn(|i| word[at + i])));
    let word = Word([a, b]);
    seccomp::confine_limits(word).map_err(io::Error::other)?;
    // Changes nothing where there is no limit yet, and is refused where there is one.
    let has_marks = set_soft_limit(word, 0, libc::RLIMIT_LOCKS, None).is_ok();
    let (workload, running, pads) = (&config.workload, HashMap::new(), Vec::new());
    let mut init = Init { link, proc, null, workload, running, pads, word, has_marks };
    let mut has_processes = false;
    let mut watch = config.limits.memory_bytes.map(MemoryWatch::new);
    send(&init.link, &Report::Ready, &[])?;
    loop {
        let mut waiting = [PollFd::new(&init.link, PollFlags::IN), PollFd::new(&children, PollFlags::IN)];
        // Nothing to watch while nothing runs, and nothing to watch for where a cgroup does it.
        let watch = watch.as_mut().filter(|_| has_processes);
        match poll(&mut waiting, watch.as_ref().map(|_| &WATCH_EVERY)) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        let (has_order, has_child) = (!waiting[0].revents().is_empty(), !waiting[1].revents().is_empty());
        if has_child {
            let mut drained = [0u8; 128];
            // Level-triggered by the loop below; an empty read is no loss.
            let _ = rustix::io::read(&children, &mut drained);
            init.reap()?;
        }
        if has_order {
            let Some(order) = receive::<Order>(&init.link)? else { return Ok(()) };
            init.obey(order)?;
            has_processes = true;
        }
        if let Some(watch) = watch {
            has_processes = watch.look(&init.proc);
        }
    }
}

impl Init<'_> {
    fn reap(&mut self) -> io::Result<()> {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let pid = pid.as_raw_nonzero().get();
                    let Some(Running { seq, mut pad }) = self.running.remove(&pid) else { continue };
                    let report = match pad.failure() {
                        Some((step, errno)) => Report::NotStarted { seq, step: step as u8, errno },
                        None => {
                            let signal = status.terminating_signal();
                            let code = status.exit_status().or(signal.map(|s| 128 + s)).unwrap_or(-1);
                            Report::Exited { seq, pid, code, signal }
                        }
                    };
                    pad.free();
                    if self.pads.len() < SPARE_PADS {
                        self.pads.push(pad);
                    }
                    send(&self.link, &report, &[])?;
                }
                Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn obey(&mut self, Received { message, tail, fds }: Received<Order>) -> io::Result<()> {
        match message {
            Order::Spawn { seq, is_terminal, has_stdin, has_outcome } => {
                match self.spawn(seq, is_terminal, (has_stdin, has_outcome), tail, fds) {
                    Ok(_) => Ok(()),
                    Err(e) => {
                        let errno = e.raw_os_error().unwrap_or(libc::EINVAL);
                        send(&self.link, &Report::NotStarted { seq, step: Step::Setup as u8, errno }, &[])
                    }
                }
            }
            Order::TellPid { seq } => match self.pid_of(seq) {
                Some(pid) => send(&self.link, &Report::Spawned { seq, pid }, &[]),
                // Its end was reported already.
                None => Ok(()),
            },
            Order::Signal { seq, signal } => {
                // Only while it has not been waited for; else the number may be somebody else's by now.
                if let (Some(group), Some(signal)) = (self.pid_of(seq).and_then(Pid::from_raw), Signal::from_named_raw(signal)) {
                    // Gone in the meantime is what was wanted.
                    let _ = kill_process_group(group, signal);
                }
                Ok(())
            }
            Order::SignalTree { seq, signal } => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    tree::signal(&self.proc, &self.root(seq), signal);
                }
                Ok(())
            }
            Order::KillTree { seq, program } => {
                tree::kill(&self.proc, &self.root(program));
                self.reap()?;
                send(&self.link, &Report::TreeKilled { seq }, &[])
            }
            Order::StopWriters { stop } => {
                self.stop_writers(stop);
                Ok(())
            }
        }
    }

    fn root(&self, seq: u64) -> tree::Root {
        tree::Root { mark: self.has_marks.then_some(seq), pid: self.pid_of(seq) }
    }

    fn pid_of(&self, seq: u64) -> Option<i32> {
        self.running.iter().find(|(_, running)| running.seq == seq).map(|(pid, _)| *pid)
    }

    fn spawn(
        &mut self,
        seq: u64,
        is_terminal: bool,
        (has_stdin, has_outcome): (bool, bool),
        tail: Vec<u8>,
        fds: Vec<OwnedFd>,
    ) -> io::Result<i32> {
        let missing = || io::Error::from_raw_os_error(libc::EINVAL);
        let mut fds = fds.into_iter();
        let stdin = if has_stdin { Some(fds.next().ok_or_else(missing)?) } else { None };
        let (stdout, stderr) = (fds.next().ok_or_else(missing)?, fds.next().ok_or_else(missing)?);
        let outcome = if has_outcome { Some(fds.next().ok_or_else(missing)?) } else { None };
        let image = match fds.next() {
            Some(image) => {
                let mut bytes = Vec::new();
                File::from(image).take(MAX_IMAGE_BYTES as u64 + 1).read_to_end(&mut bytes)?;
                bytes
            }
            None => tail,
        };
        for running in self.running.values_mut() {
            running.pad.tidy();
        }
        let launch = self.launch(seq, is_terminal, Unpacked::from_bytes(image)?);
        let mut pad = match self.pads.pop() {
            Some(pad) => pad,
            None => Pad::new()?,
        };
        let stdio = [stdin.as_ref().map_or(self.null.as_fd(), AsFd::as_fd), stdout.as_fd(), stderr.as_fd()];
        // SAFETY: init has one thread, all it opens is closed by exec, its signals are settled. The pad is kept with the running program
        // and used again only when that was waited for.
        let pid = unsafe { pad.launch(launch, stdio, outcome.as_ref().map(AsFd::as_fd)) }?;
        self.running.insert(pid, Running { seq, pad });
        Ok(pid)
    }

    fn launch(&self, seq: u64, is_terminal: bool, Unpacked { cwd, program, image }: Unpacked) -> Launch {
        Launch {
            is_terminal,
            uid: self.workload.uid,
            gid: self.workload.gid,
            has_groups: self.workload.uid_count > 1,
            mark: self.has_marks.then_some(seq),
            word: self.word,
            cwd,
            program,
            image,
        }
    }

    /// With no allowance left a write to a file fails with EFBIG, while deleting still works. It stops the honest and the
    /// careless at once; who fills disks by other means is suspended by the broker.
    fn stop_writers(&self, stop: bool) {
        let limit = if stop { Some(0) } else { None };
        // Init's own limit is what new programs start with. Gone in the meantime: it writes no more either.
        for pid in std::iter::once(0).chain(tree::processes(&self.proc).iter().map(|p| p.pid)) {
            let _ = set_soft_limit(self.word, pid, libc::RLIMIT_FSIZE, limit);
        }
    }
}
