//! Makes the processes that become programs: in the workloads' namespaces, as boxd's own children, so that boxd hears of their end from
//! the kernel. Each waits for its order, which boxd gives to it directly.
//!
//! It is forked from boxd and never runs a program itself, so its memory stays out of the workloads' reach; it is in boxd's pid
//! namespace, so they can't name it either.
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

/// For a new process to say its number: a moment, on a machine with far more to do than it can too.
const HEARD_WITHIN: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
/// Pads kept for the next programs: as many as start in one moment. Each is some pages of which a few were ever touched.
const FREE_PADS: usize = 8;

/// Takes orders until boxd is gone.
pub fn run(link: OwnedFd, config: &BoxdConfig) -> ! {
    let outcome = serve(link, config);
    exit_now(i32::from(outcome.is_err()))
}

struct Starter {
    link: OwnedFd,
    dress: Credentials,
    /// Of processes on their way, and to be used again.
    #[allow(clippy::vec_box, reason = "one in use must not move, and it is not unpacked between two uses")]
    pads: Vec<Box<ChildMemory>>,
}

fn serve(link: OwnedFd, config: &BoxdConfig) -> io::Result<()> {
    // SAFETY: nothing of boxd runs in this process any more; only this one is used from here on.
    unsafe { keep_only(vec![link]) }?;
    // SAFETY: keep_only has just put it there.
    let link = unsafe { adopt(0)? };
    // Numbers of standard I/O, which must not be what some later open happens to get.
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
                // What new processes start with. Where whoever started us may only write so much, that is what holds.
                let _ = limits.stop_writer(0, stop);
                send(&starter.link, &Report::Obeyed { seq }, &[])?;
            }
            other => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{other:?} is for init"))),
        }
    }
}

impl Starter {
    /// Makes one more, and tells of it, or why it couldn't be made.
    fn add(&mut self) -> io::Result<()> {
        match self.make() {
            Ok((pid, number, socket)) => send(&self.link, &Report::Spare { pid, number }, &[socket.as_fd()]),
            Err(e) => send(&self.link, &Report::NoSpare { errno: e.raw_os_error().unwrap_or(libc::EAGAIN) }, &[]),
        }
    }

    /// Its number here, its number in the sandbox, and our end of its socket.
    fn make(&mut self) -> io::Result<(i32, i32, OwnedFd)> {
        let (ours, low) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let theirs = rustix::io::fcntl_dupfd_cloexec(&low, FIRST_SOCKET)?;
        drop(low);
        let mut pad = self.free_pad()?;
        // SAFETY: the starter has one thread, all it opens is closed by exec, its signals are settled. The pad is kept, and used again
        // only when it is free.
        let made = unsafe { pad.spawn(theirs.as_fd()) };
        self.pads.push(pad);
        let (pid, handle) = made?;
        // Its end is its own now: where nobody has it, there is nobody to hear.
        drop(theirs);
        match heard(&ours) {
            Ok(number) => Ok((pid, number, ours)),
            Err(e) => {
                // Somebody has stopped it, or was faster than this.
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

/// The number that a new process has in the sandbox.
fn heard(socket: &OwnedFd) -> io::Result<i32> {
    if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&HEARD_WITHIN))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut said = [0; 8];
    match recv(socket, &mut said, RecvFlags::empty())? {
        (_, 4) => Ok(i32::from_le_bytes([said[0], said[1], said[2], said[3]])),
        // Ended by somebody before it said a word.
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
