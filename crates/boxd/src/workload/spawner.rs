//! The spawner: creates standby processes in the workload namespaces. They are boxd's own children, so the kernel
//! reports their end to boxd. Each waits for its order, which boxd sends to it directly.
//!
//! The spawner is forked from boxd and never executes a program itself, so workloads can't access its memory. It is in
//! boxd's pid namespace, so they can't refer to it either.
#![allow(unsafe_code, reason = "it creates processes and takes ownership of an inherited descriptor by number")]

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
};

use cobox_kernel::{ChildMemory, Credentials, FIRST_SOCKET, adopt, exit_now, keep_only, reset_signals};
use cobox_protocol::control::BoxdConfig;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair},
    process::{Signal, pidfd_send_signal},
};

use super::{
    messages::{Order, Report, receive, send},
    protected_limits::ProtectedLimits,
};

/// Maximum time for a new process to report its pid. It takes microseconds, and this is enough on an overloaded machine
/// too.
const PID_REPORT_TIMEOUT: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
/// Number of free `ChildMemory` blocks to keep: as many programs as start in one burst. Each is a few pages, of which
/// only some were ever touched.
const MAX_FREE_BLOCKS: usize = 8;

/// Handles orders until boxd has exited.
pub fn run(socket: OwnedFd, config: &BoxdConfig) -> ! {
    let outcome = serve(socket, config);
    exit_now(i32::from(outcome.is_err()))
}

struct Spawner {
    socket: OwnedFd,
    credentials: Credentials,
    /// Memory of processes that have not executed their program yet, and free memory for new ones.
    #[allow(clippy::vec_box, reason = "one in use must not move, and it is not unpacked between two uses")]
    memory_blocks: Vec<Box<ChildMemory>>,
}

fn serve(socket: OwnedFd, config: &BoxdConfig) -> io::Result<()> {
    // SAFETY: no code of boxd runs in this process any more, and only this descriptor is used from here on.
    unsafe { keep_only(vec![socket]) }?;
    // SAFETY: keep_only has moved the descriptor to this number.
    let socket = unsafe { adopt(0)? };
    // Occupies the other two numbers of standard I/O, so that no later `open` gets them.
    let _null = [File::open("/dev/null")?, File::open("/dev/null")?];
    reset_signals();
    let limits = ProtectedLimits::confine()?;
    let workload = &config.workload;
    let credentials = Credentials {
        uid: workload.uid,
        gid: workload.gid,
        has_groups: workload.uid_count > 1,
        has_marks: limits.has_marks,
        limit_secret: limits.secret,
    };
    let mut spawner = Spawner { socket, credentials, memory_blocks: Vec::new() };
    send(&spawner.socket, &Report::Ready, &[])?;
    loop {
        let Some(order) = receive::<Order>(&spawner.socket)? else { return Ok(()) };
        match order.message {
            Order::CreateStandby => spawner.create_and_report()?,
            Order::StopWriters { seq, stop } => {
                // The limit that new processes inherit. If boxd was started with a lower file size limit, that one
                // remains in force.
                let _ = limits.stop_writer(0, stop);
                send(&spawner.socket, &Report::Completed { seq }, &[])?;
            }
            other => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{other:?} is for init"))),
        }
    }
}

impl Spawner {
    /// Creates a standby process and reports it, or reports the error.
    fn create_and_report(&mut self) -> io::Result<()> {
        match self.create_standby() {
            Ok((pid, sandbox_pid, socket)) => send(&self.socket, &Report::StandbyCreated { pid, sandbox_pid }, &[socket.as_fd()]),
            Err(e) => send(&self.socket, &Report::StandbyFailed { errno: e.raw_os_error().unwrap_or(libc::EAGAIN) }, &[]),
        }
    }

    /// Returns the pid for boxd, the pid in the sandbox, and boxd's end of the socket.
    fn create_standby(&mut self) -> io::Result<(i32, i32, OwnedFd)> {
        let (boxd_end, low_fd) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let child_end = rustix::io::fcntl_dupfd_cloexec(&low_fd, FIRST_SOCKET)?;
        drop(low_fd);
        let mut block = self.free_block()?;
        // SAFETY: the spawner has one thread, all its descriptors are close-on-exec, and its signal actions are set.
        // The memory is kept, and reused only when it is free.
        let spawned = unsafe { block.spawn(child_end.as_fd()) };
        self.memory_blocks.push(block);
        let (pid, pidfd) = spawned?;
        // Only the new process must hold this end, so that its death closes the connection.
        drop(child_end);
        match receive_sandbox_pid(&boxd_end) {
            Ok(sandbox_pid) => Ok((pid, sandbox_pid, boxd_end)),
            Err(e) => {
                // Another process has stopped the new one, or has killed it before it reported.
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
                Err(e)
            }
        }
    }

    fn free_block(&mut self) -> io::Result<Box<ChildMemory>> {
        let (free, mut in_use): (Vec<_>, Vec<_>) = std::mem::take(&mut self.memory_blocks).into_iter().partition(|block| block.is_free());
        let mut free = free.into_iter().take(MAX_FREE_BLOCKS);
        let next = free.next();
        for mut block in free {
            block.release_order();
            in_use.push(block);
        }
        self.memory_blocks = in_use;
        next.map_or_else(|| ChildMemory::new(self.credentials), Ok)
    }
}

/// The pid that a new process has in the sandbox.
fn receive_sandbox_pid(socket: &OwnedFd) -> io::Result<i32> {
    if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&PID_REPORT_TIMEOUT))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut bytes = [0; 8];
    match recv(socket, &mut bytes, RecvFlags::empty())? {
        (_, 4) => Ok(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
        // Another process has killed it before it reported.
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
