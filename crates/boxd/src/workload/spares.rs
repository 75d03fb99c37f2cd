//! Processes that wait to become programs. Some are kept ready, so that most programs begin without one having to be made.

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

/// Processes that wait: one for the next program, and another for the one that comes before the next was made. Each takes some 40 KiB of
/// the kernel's memory.
const KEPT: usize = 2;
/// More than are kept may come when those who asked for them have left. Beyond this the oldest end.
const MAX_READY: usize = 4;

/// A process that waits at the other end of its socket. It ends when this is dropped.
pub struct Spare {
    /// Its number here, and in the sandbox.
    pub pid: i32,
    pub number: i32,
    pub socket: OwnedFd,
    /// What most programs want, opened while there was time.
    pub ends: Option<Ends>,
}

#[derive(Default)]
pub struct Spares(Mutex<Supply>);

#[derive(Default)]
struct Supply {
    /// The newest first.
    ready: VecDeque<Spare>,
    waiting: VecDeque<oneshot::Sender<io::Result<Spare>>>,
    /// Asked for, and neither made nor known not to be.
    coming: usize,
}

impl Supply {
    /// How many are to be asked for, if so many are to be left.
    fn missing(&self, kept: usize) -> usize {
        (self.waiting.len() + kept).saturating_sub(self.ready.len() + self.coming)
    }
}

impl Spares {
    fn supply(&self) -> MutexGuard<'_, Supply> {
        // Each change is one push or pop.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// One was made: for who has waited the longest, else for the next.
    fn made(&self, mut spare: Spare) {
        let mut supply = self.supply();
        supply.coming = supply.coming.saturating_sub(1);
        supply.waiting.retain(|who| !who.is_closed());
        if let Some(first) = supply.waiting.pop_front() {
            // Left just now: it ends.
            return drop(first.send(Ok(spare)));
        }
        // Whoever takes it finds out what is wrong.
        spare.ends = Ends::open(Stdio::Pipes { stdin: false }).ok();
        supply.ready.push_front(spare);
        supply.ready.truncate(MAX_READY);
    }

    /// One could not be made: everybody who waits is told why.
    pub fn not_made(&self, errno: i32) {
        let mut supply = self.supply();
        supply.coming = supply.coming.saturating_sub(1);
        for who in supply.waiting.drain(..) {
            // Has left.
            let _ = who.send(Err(io::Error::from_raw_os_error(errno)));
        }
    }

    /// A child has ended, which may be one that was ready: where programs have the user it was made as, they can end it.
    pub fn ended(&self, pid: i32) {
        self.supply().ready.retain(|spare| spare.pid != pid);
    }

    /// Nobody makes any more.
    pub fn clear(&self) {
        *self.supply() = Supply::default();
    }
}

impl Shared {
    /// One that is ready, or the next that is made.
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
        // For who waits and could not be asked for before. What could not be made to be kept waits for another reason.
        self.ask_for_spares(0);
    }

    /// Asks for as many as should be ready. None is where programs' memory is watched, as theirs would be all the time.
    pub fn keep_spares(&self) {
        self.ask_for_spares(if self.is_watched { 0 } else { KEPT });
    }

    fn ask_for_spares(&self, kept: usize) {
        let mut supply = self.spares.supply();
        for _ in 0..supply.missing(kept) {
            // No room: with the next that is made, those who wait are asked for again. Nobody there: everything ends.
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

    /// One that was made: the waiting process's end.
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
