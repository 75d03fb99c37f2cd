//! Init, the first process of the workload namespaces: reaps orphaned processes, and signals and ends programs on
//! boxd's order.
//!
//! It is forked from boxd and never executes another program, so workloads can't access its memory.
#![allow(unsafe_code, reason = "inherited descriptors are taken over by their numbers")]

use std::{fs::File, io, os::fd::OwnedFd};

use cobox_kernel::{adopt, child_events, exit_now, keep_only, reset_signals};
use cobox_protocol::control::{BoxdConfig, WorkloadLimits};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, Resource, Rlimit, Signal, WaitOptions, getrlimit, kill_process_group, setrlimit, wait},
};

use super::{
    memory_limiter::MemoryLimiter,
    messages::{Order, Report, receive, send},
    process_tree,
    procfs::ProcFs,
    protected_limits::ProtectedLimits,
};

/// Interval between checks of the programs' total memory, where no cgroup limits it.
const MEMORY_CHECK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// The kernel counts pending signals per user, not per process; a higher limit would let one sandbox use up the share
/// of others.
const MAX_PENDING_SIGNALS: u64 = 4096;
/// Bytes of POSIX message queues, also counted per user. This is the kernel's default.
const MAX_QUEUE_BYTES: u64 = 819_200;

/// Handles orders until boxd has exited. Then this process exits, and the kernel ends all other processes of the
/// namespace.
pub fn run(socket: OwnedFd, proc: OwnedFd, config: &BoxdConfig) -> ! {
    let outcome = serve(socket, proc, config);
    exit_now(i32::from(outcome.is_err()))
}

pub fn limit_resources(limits: &WorkloadLimits) -> io::Result<()> {
    let set = |resource, requested: u64| {
        // An unprivileged user can't raise a hard limit, so the lower of the two values applies.
        let ceiling = getrlimit(resource).maximum.unwrap_or(u64::MAX);
        let value = Some(requested.min(ceiling));
        setrlimit(resource, Rlimit { current: value, maximum: value })
    };
    // Not 0: a kernel that pipes core dumps to a helper on the host ignores 0. It treats 1 as "no core dump".
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

/// The state of init.
struct Init {
    socket: OwnedFd,
    proc: ProcFs,
    limits: ProtectedLimits,
}

fn serve(socket: OwnedFd, proc: OwnedFd, config: &BoxdConfig) -> io::Result<()> {
    // Workloads must not reach the listeners and the lock that boxd has open.
    // SAFETY: no code of boxd runs in this process any more, and only these two descriptors are used from here on.
    unsafe { keep_only(vec![socket, proc]) }?;
    // SAFETY: keep_only has moved the two descriptors to these numbers.
    let (socket, proc) = unsafe { (adopt(0)?, ProcFs::new(adopt(1)?)) };
    // Occupies the remaining number of standard I/O, so that no later `open` gets it.
    let _null = File::options().read(true).write(true).open("/dev/null")?;
    reset_signals();
    let children = child_events()?;
    let mut init = Init { socket, proc, limits: ProtectedLimits::confine()? };
    let mut has_processes = false;
    let mut memory = config.limits.memory_bytes.map(MemoryLimiter::new);
    send(&init.socket, &Report::Ready, &[])?;
    loop {
        let mut poll_fds = [PollFd::new(&init.socket, PollFlags::IN), PollFd::new(&children, PollFlags::IN)];
        // No check while nothing runs, and none at all where a cgroup limits memory.
        let memory = memory.as_mut().filter(|_| has_processes);
        match poll(&mut poll_fds, memory.as_ref().map(|_| &MEMORY_CHECK_INTERVAL)) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        let (has_order, has_child) = (!poll_fds[0].revents().is_empty(), !poll_fds[1].revents().is_empty());
        if has_child {
            let mut drained = [0u8; 128];
            // An empty read is harmless: `reap_orphans` looks for every ended child in any case.
            let _ = rustix::io::read(&children, &mut drained);
            reap_orphans()?;
        }
        if has_order {
            let Some(order) = receive::<Order>(&init.socket)? else { return Ok(()) };
            init.execute(order.message)?;
            has_processes = true;
        }
        if let Some(memory) = memory {
            has_processes = memory.enforce(&init.proc);
        }
    }
}

impl Init {
    fn execute(&mut self, order: Order) -> io::Result<()> {
        let seq = match order {
            Order::Signal { seq, group, signal } => {
                if let (Some(group), Some(signal)) = (Pid::from_raw(group), Signal::from_named_raw(signal)) {
                    // An error means that the group has already ended.
                    let _ = kill_process_group(group, signal);
                }
                seq
            }
            Order::SignalTree { seq, program, signal } => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    process_tree::signal(&self.proc, &self.limits.process_tree(&program), signal);
                }
                seq
            }
            Order::KillTree { seq, program } => {
                process_tree::kill(&self.proc, &self.limits.process_tree(&program));
                reap_orphans()?;
                seq
            }
            Order::StopWriters { seq, stop } => {
                self.stop_writers(stop);
                seq
            }
            Order::WatchMemory => return Ok(()),
            Order::CreateStandby => return Err(io::Error::new(io::ErrorKind::InvalidData, "this request is for the spawner")),
        };
        send(&self.socket, &Report::Completed { seq }, &[])
    }

    /// Stops ordinary writers at once. The broker suspends a sandbox that fills the disk by other means.
    fn stop_writers(&self, stop: bool) {
        // A process that has ended in the meantime no longer writes either.
        for process in process_tree::processes(&self.proc) {
            let _ = self.limits.stop_writer(process.pid, stop);
        }
    }
}

/// Reaps orphans whose parents have ended. The programs themselves are children of boxd.
fn reap_orphans() -> io::Result<()> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(rustix::io::Errno::INTR) => {}
            Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}
