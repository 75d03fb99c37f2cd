//! The spawner: creates standby processes in the workload namespaces. They are boxd's own children, so the kernel
//! reports their end to boxd. Each waits for its order, which boxd sends to it directly.
//!
//! The spawner is forked from boxd and never executes a program itself, so workloads can't access its memory. It is in
//! boxd's pid namespace, so they can't refer to it either.
#![allow(unsafe_code, reason = "it makes processes, and takes over an inherited descriptor by its number")]

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
    limits::Limits,
    link::{Order, Report, receive, send},
};

/// Maximum time for a new process to report its pid. It takes microseconds, and this is enough on an overloaded machine
/// too.
const HEARD_WITHIN: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
/// Number of free `ChildMemory` blocks to keep: as many programs as start in one burst. Each is a few pages, of which
/// only some were ever touched.
const FREE_PADS: usize = 8;

/// Handles orders until boxd has exited.
pub fn run(link: OwnedFd, config: &BoxdConfig) -> ! {
    let outcome = serve(link, config);
    exit_now(i32::from(outcome.is_err()))
}

struct Starter {
    link: OwnedFd,
    dress: Credentials,
    /// Memory of processes that have not executed their program yet, and free memory for new ones.
    #[allow(clippy::vec_box, reason = "one in use must not move, and it is not unpacked between two uses")]
    pads: Vec<Box<ChildMemory>>,
}

fn serve(link: OwnedFd, config: &BoxdConfig) -> io::Result<()> {
    // SAFETY: no code of boxd runs in this process any more, and only this descriptor is used from here on.
    unsafe { keep_only(vec![link]) }?;
    // SAFETY: keep_only has moved the descriptor to this number.
    let link = unsafe { adopt(0)? };
    // Occupies the other two numbers of standard I/O, so that no later `open` gets them.
    let _null = [File::open("/dev/null")?, File::open("/dev/null")?];
    reset_signals();
    let limits = Limits::confine()?;
    let workload = &config.workload;
    let dress = Credentials {
        uid: workload.uid,
        gid: workload.gid,
        has_groups: workload.uid_count > 1,
        has_marks: limits.has_marks,
        limit_secret: limits.word,
    };
    let mut starter = Starter { link, dress, pads: Vec::new() };
    send(&starter.link, &Report::Ready, &[])?;
    loop {
        let Some(order) = receive::<Order>(&starter.link)? else { return Ok(()) };
        match order.message {
            Order::Spare => starter.add()?,
            Order::StopWriters { seq, stop } => {
                // The limit that new processes inherit. If boxd was started with a lower file size limit, that one
                // remains in force.
                let _ = limits.stop_writer(0, stop);
                send(&starter.link, &Report::Obeyed { seq }, &[])?;
            }
            other => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{other:?} is for init"))),
        }
    }
}

impl Starter {
    /// Creates a standby process and reports it, or reports the error.
    fn add(&mut self) -> io::Result<()> {
        match self.make() {
            Ok((pid, number, socket)) => send(&self.link, &Report::Spare { pid, number }, &[socket.as_fd()]),
            Err(e) => send(&self.link, &Report::NoSpare { errno: e.raw_os_error().unwrap_or(libc::EAGAIN) }, &[]),
        }
    }

    /// Returns the pid for boxd, the pid in the sandbox, and boxd's end of the socket.
    fn make(&mut self) -> io::Result<(i32, i32, OwnedFd)> {
        let (ours, low) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let theirs = rustix::io::fcntl_dupfd_cloexec(&low, FIRST_SOCKET)?;
        drop(low);
        let mut pad = self.free_pad()?;
        // SAFETY: the spawner has one thread, all its descriptors are close-on-exec, and its signal actions are set.
        // The memory is kept, and reused only when it is free.
        let made = unsafe { pad.spawn(theirs.as_fd()) };
        self.pads.push(pad);
        let (pid, handle) = made?;
        // Only the new process must hold this end, so that its death closes the connection.
        drop(theirs);
        match heard(&ours) {
            Ok(number) => Ok((pid, number, ours)),
            Err(e) => {
                // Another process has stopped the new one, or has killed it before it reported.
                let _ = pidfd_send_signal(&handle, Signal::KILL);
                Err(e)
            }
        }
    }

    fn free_pad(&mut self) -> io::Result<Box<ChildMemory>> {
        let (free, mut used): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pads).into_iter().partition(|pad| pad.is_free());
        let mut free = free.into_iter().take(FREE_PADS);
        let next = free.next();
        for mut pad in free {
            pad.release_order();
            used.push(pad);
        }
        self.pads = used;
        next.map_or_else(|| ChildMemory::new(self.dress), Ok)
    }
}

/// The pid that a new process has in the sandbox.
fn heard(socket: &OwnedFd) -> io::Result<i32> {
    if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&HEARD_WITHIN))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut said = [0; 8];
    match recv(socket, &mut said, RecvFlags::empty())? {
        (_, 4) => Ok(i32::from_le_bytes([said[0], said[1], said[2], said[3]])),
        // Another process has killed it before it reported.
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
