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

use cobox_kernel::{Dress, FIRST_SOCKET, Pad, adopt, exit_now, keep_only, settle_signals};
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

/// Processes that wait: one for the next program, and another for the one that comes before the next was made. Each takes some 40 KiB of
/// the kernel's memory.
const KEPT: usize = 2;
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
    dress: Dress,
    /// How many wait without being asked for. None where programs' memory is watched, as theirs would be all the time.
    kept: usize,
    /// Our ends of the sockets of those that wait, or are on their way to become a program. They say nothing to us, only close.
    waiting: Vec<OwnedFd>,
    /// Of processes on their way, and to be used again.
    #[allow(clippy::vec_box, reason = "one in use must not move, and it is not unpacked between two uses")]
    pads: Vec<Box<Pad>>,
}

fn serve(link: OwnedFd, config: &BoxdConfig) -> io::Result<()> {
    // SAFETY: nothing of boxd runs in this process any more; only this one is used from here on.
    unsafe { keep_only(vec![link]) }?;
    // SAFETY: keep_only has just put it there.
    let link = unsafe { adopt(0)? };
    // Numbers of standard I/O, which must not be what some later open happens to get.
    let _null = [File::open("/dev/null")?, File::open("/dev/null")?];
    settle_signals();
    let limits = Limits::confine()?;
    let workload = &config.workload;
    let dress =
        Dress { uid: workload.uid, gid: workload.gid, has_groups: workload.uid_count > 1, has_marks: limits.has_marks, word: limits.word };
    let kept = if config.limits.memory_bytes.is_some() { 0 } else { KEPT };
    let mut starter = Starter { link, dress, kept, waiting: Vec::new(), pads: Vec::new() };
    send(&starter.link, &Report::Ready, &[])?;
    loop {
        starter.fill()?;
        if !starter.wait_for_order()? {
            continue;
        }
        let Some(order) = receive::<Order>(&starter.link)? else { return Ok(()) };
        match order.message {
            Order::Spare => drop(starter.add()?),
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
    /// Waits for an order, or until one of those that waited has become a program or ended. Says whether there is an order.
    fn wait_for_order(&mut self) -> io::Result<bool> {
        let link = PollFd::new(&self.link, PollFlags::IN);
        let waiting = self.waiting.iter().map(|socket| PollFd::new(socket, PollFlags::empty()));
        let mut all: Vec<_> = std::iter::once(link).chain(waiting).collect();
        rustix::io::retry_on_intr(|| poll(&mut all, None))?;
        let mut news = all.iter().map(|fd| !fd.revents().is_empty()).collect::<Vec<_>>().into_iter();
        let has_order = news.next() == Some(true);
        self.waiting.retain(|_| news.next() != Some(true));
        Ok(has_order)
    }

    /// Makes as many as are missing. Where one can't be made, the next are made when they are asked for.
    fn fill(&mut self) -> io::Result<()> {
        while self.waiting.len() < self.kept && self.add()? {}
        Ok(())
    }

    /// Makes one more, and tells of it. Says whether it could be made.
    fn add(&mut self) -> io::Result<bool> {
        match self.make() {
            Ok((pid, number, socket)) => {
                send(&self.link, &Report::Spare { pid, number }, &[socket.as_fd()])?;
                self.waiting.push(socket);
                Ok(true)
            }
            Err(e) => {
                send(&self.link, &Report::NoSpare { errno: e.raw_os_error().unwrap_or(libc::EAGAIN) }, &[])?;
                Ok(false)
            }
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
        let made = unsafe { pad.wait(theirs.as_fd()) };
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

    fn free_pad(&mut self) -> io::Result<Box<Pad>> {
        let (free, mut used): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pads).into_iter().partition(|pad| pad.is_free());
        let mut free = free.into_iter().take(FREE_PADS);
        let next = free.next();
        for mut pad in free {
            pad.tidy();
            used.push(pad);
        }
        self.pads = used;
        next.map_or_else(|| Pad::new(self.dress), Ok)
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
