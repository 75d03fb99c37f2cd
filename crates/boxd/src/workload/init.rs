//! The first process of the workloads' namespaces: reaps what programs leave behind, and signals and ends programs when told to.
//!
//! It is forked from boxd and never runs another program itself, so its memory stays out of the workloads' reach.
#![allow(unsafe_code, reason = "inherited descriptors are taken over by their numbers")]

use std::{fs::File, io, os::fd::OwnedFd};

use cobox_kernel::{adopt, child_events, exit_now, keep_only, reset_signals};
use cobox_protocol::control::{BoxdConfig, WorkloadLimits};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process_group, setrlimit, wait},
};

use super::{
    limits::Limits,
    link::{Order, Report, receive, send},
    memory::MemoryWatch,
    proc::Proc,
    tree,
};

/// Between two looks at the memory of all programs together, where no cgroup holds it.
const WATCH_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Counted per user, not per process: more would be taken from others.
const MAX_PENDING_SIGNALS: u64 = 4096;
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
struct Init {
    link: OwnedFd,
    proc: Proc,
    limits: Limits,
}

fn serve(link: OwnedFd, proc: OwnedFd, config: &BoxdConfig) -> io::Result<()> {
    // The listeners and the lock that boxd inherited are none of the workloads' business.
    // SAFETY: nothing of boxd runs in this process any more; only these two are used from here on.
    unsafe { keep_only(vec![link, proc]) }?;
    // SAFETY: keep_only has just put them there.
    let (link, proc) = unsafe { (adopt(0)?, Proc::new(adopt(1)?)) };
    // A number of standard I/O, which must not be what some later open happens to get.
    let _null = File::options().read(true).write(true).open("/dev/null")?;
    reset_signals();
    let children = child_events()?;
    let mut init = Init { link, proc, limits: Limits::confine()? };
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
            reap()?;
        }
        if has_order {
            let Some(order) = receive::<Order>(&init.link)? else { return Ok(()) };
            init.obey(order.message)?;
            has_processes = true;
        }
        if let Some(watch) = watch {
            has_processes = watch.look(&init.proc);
        }
    }
}

impl Init {
    fn obey(&mut self, order: Order) -> io::Result<()> {
        let seq = match order {
            Order::Signal { seq, group, signal } => {
                if let (Some(group), Some(signal)) = (Pid::from_raw(group), Signal::from_named_raw(signal)) {
                    // Gone in the meantime is what was wanted.
                    let _ = kill_process_group(group, signal);
                }
                seq
            }
            Order::SignalTree { seq, program, signal } => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    tree::signal(&self.proc, &self.limits.root(&program), signal);
                }
                seq
            }
            Order::KillTree { seq, program } => {
                tree::kill(&self.proc, &self.limits.root(&program));
                reap()?;
                seq
            }
            Order::StopWriters { seq, stop } => {
                self.stop_writers(stop);
                seq
            }
            Order::Watch => return Ok(()),
            Order::Spare => return Err(io::Error::new(io::ErrorKind::InvalidData, "that is for the starter")),
        };
        send(&self.link, &Report::Obeyed { seq }, &[])
    }

    /// It stops the honest and the careless at once; who fills disks by other means is suspended by the broker.
    fn stop_writers(&self, stop: bool) {
        // Gone in the meantime: it writes no more either.
        for process in tree::processes(&self.proc) {
            let _ = self.limits.stop_writer(process.pid, stop);
        }
    }
}

/// What programs left behind when they ended. The programs themselves are boxd's children.
fn reap() -> io::Result<()> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}
