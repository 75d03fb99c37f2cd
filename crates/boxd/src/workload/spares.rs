//! The pool of standby processes. Some are kept ready, so that most programs start without creating a process first.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard},
};

use tokio::sync::oneshot;

use super::{
    Shared, init_gone,
    link::{self, Order},
    stdio::{Ends, Stdio},
};

/// Standby processes to keep ready: one for the next program, and one for a program that starts before the first is
/// replaced. Each takes about 40 KiB of kernel memory.
const KEPT: usize = 2;
/// More than `KEPT` can become ready if their requesters have gone. Beyond this number the oldest are ended.
const MAX_READY: usize = 4;

/// A standby process, reached through its socket. Dropping this ends it.
pub struct Spare {
    /// The pid for boxd, and the pid in the sandbox.
    pub pid: i32,
    pub number: i32,
    pub socket: OwnedFd,
    /// Standard I/O as most programs need it, opened in advance.
    pub ends: Option<Ends>,
}

#[derive(Default)]
pub struct Spares(Mutex<Supply>);

#[derive(Default)]
struct Supply {
    /// Newest first.
    ready: VecDeque<Spare>,
    waiting: VecDeque<oneshot::Sender<io::Result<Spare>>>,
    /// Number requested from the spawner without an answer yet.
    coming: usize,
}

impl Supply {
    /// How many to request so that `kept` remain after all waiting requests are served.
    fn missing(&self, kept: usize) -> usize {
        (self.waiting.len() + kept).saturating_sub(self.ready.len() + self.coming)
    }
}

impl Spares {
    fn supply(&self) -> MutexGuard<'_, Supply> {
        // Each change is one push or pop, so a panic leaves the state consistent.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Adds a new standby process: for the longest-waiting request, or else for the next.
    fn made(&self, mut spare: Spare) {
        let mut supply = self.supply();
        supply.coming = supply.coming.saturating_sub(1);
        supply.waiting.retain(|who| !who.is_closed());
        if let Some(first) = supply.waiting.pop_front() {
            // If the receiver has just gone, the dropped process ends.
            return drop(first.send(Ok(spare)));
        }
        // On failure the requester opens these itself and sees the error.
        spare.ends = Ends::open(Stdio::Pipes { stdin: false }).ok();
        supply.ready.push_front(spare);
        supply.ready.truncate(MAX_READY);
    }

    /// Reports to all waiting requests why a standby process could not be created.
    pub fn not_made(&self, errno: i32) {
        let mut supply = self.supply();
        supply.coming = supply.coming.saturating_sub(1);
        for who in supply.waiting.drain(..) {
            // An error means that the requester has gone.
            let _ = who.send(Err(io::Error::from_raw_os_error(errno)));
        }
    }

    /// Removes an ended child if it was a ready one: where programs run as the same user as standby processes, they can
    /// end them.
    pub fn ended(&self, pid: i32) {
        self.supply().ready.retain(|spare| spare.pid != pid);
    }

    /// Fails all waiting requests, because the spawner has exited.
    pub fn clear(&self) {
        *self.supply() = Supply::default();
    }
}

impl Shared {
    /// A ready standby process, or the next one that is created.
    pub async fn spare(&self) -> io::Result<Spare> {
        let made = {
            let mut supply = self.spares.supply();
            if let Some(spare) = supply.ready.pop_front() {
                return Ok(spare);
            }
            let (tell, made) = oneshot::channel();
            supply.waiting.push_back(tell);
            made
        };
        self.keep_spares();
        made.await.unwrap_or_else(|_| Err(init_gone()))
    }

    pub fn spare_was_made(&self, spare: Spare) {
        self.spares.made(spare);
        // Requests more for those waiting whose request could not be sent before. Replenishing the pool is left to
        // `keep_spares`.
        self.ask_for_spares(0);
    }

    /// Requests as many as should be ready. None are kept ready where init checks the programs' memory, because they
    /// would keep it checking permanently.
    pub fn keep_spares(&self) {
        self.ask_for_spares(if self.is_watched { 0 } else { KEPT });
    }

    fn ask_for_spares(&self, kept: usize) {
        let mut supply = self.spares.supply();
        for _ in 0..supply.missing(kept) {
            // If the socket buffer is full, the next new process triggers another request for those that wait. If the
            // spawner has exited, everything ends.
            if link::send(self.starter.get_ref(), &Order::Spare, &[]).is_err() {
                return;
            }
            supply.coming += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

    use super::*;

    /// Adds a standby process and returns its end of the socket.
    fn make(spares: &Spares) -> OwnedFd {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        spares.made(Spare { pid: 1, number: 1, socket: ours, ends: None });
        theirs
    }

    fn has_ended(theirs: &OwnedFd) -> bool {
        matches!(recv(theirs, &mut [0u8; 1], RecvFlags::DONTWAIT), Ok((_, 0)))
    }

    #[tokio::test]
    async fn whoever_is_not_needed_ends() {
        let spares = Spares::default();
        let all: Vec<_> = (0..MAX_READY + 2).map(|_| make(&spares)).collect();
        let ended: Vec<bool> = all.iter().map(has_ended).collect();
        assert_eq!(ended, [[true; 2].as_slice(), &[false; MAX_READY]].concat(), "the oldest end");
        spares.clear();
        assert!(all.iter().all(has_ended));
    }

    #[tokio::test]
    async fn one_that_somebody_has_ended_is_not_ready_any_more() {
        let spares = Spares::default();
        let theirs = make(&spares);
        spares.ended(2);
        assert_eq!(spares.supply().missing(KEPT), KEPT - 1);
        spares.ended(1);
        assert!(has_ended(&theirs));
        assert_eq!(spares.supply().missing(KEPT), KEPT);
    }

    #[tokio::test]
    async fn one_is_for_who_waits_and_ends_where_they_have_left() {
        let spares = Spares::default();
        let wait = || {
            let (tell, made) = oneshot::channel();
            spares.supply().waiting.push_back(tell);
            made
        };
        let (gone, here, left) = (wait(), wait(), wait());
        drop(gone);
        let theirs = make(&spares);
        let spare = here.await.unwrap().unwrap();
        assert!(!has_ended(&theirs));
        drop(spare);
        assert!(has_ended(&theirs));
        let theirs = make(&spares);
        drop(left);
        assert!(has_ended(&theirs));
        let told = wait();
        spares.not_made(libc::EAGAIN);
        assert_eq!(told.await.unwrap().err().unwrap().raw_os_error(), Some(libc::EAGAIN));
    }

    #[test]
    fn as_many_are_asked_for_as_wait_and_are_kept_less_those_that_are_there_or_coming() {
        let spares = Spares::default();
        let missing = |kept| spares.supply().missing(kept);
        assert_eq!(missing(KEPT), KEPT);
        let who: Vec<_> = (0..3).map(|_| oneshot::channel()).collect();
        let _made: Vec<_> = who.into_iter().map(|(tell, made)| (spares.supply().waiting.push_back(tell), made)).collect();
        spares.supply().coming = 3;
        assert_eq!([missing(0), missing(KEPT)], [0, KEPT]);
        let _ends = [make(&spares), make(&spares)];
        assert_eq!([missing(0), missing(KEPT)], [0, KEPT], "one waits, and one is coming");
        spares.not_made(libc::EAGAIN);
        assert_eq!([missing(0), missing(KEPT)], [0, KEPT], "nobody waits any more");
        let _end = make(&spares);
        assert_eq!(missing(KEPT), KEPT - 1);
    }
}
