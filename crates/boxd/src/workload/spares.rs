//! Processes that wait to become programs. The starter keeps some ready, so that most programs begin without one having to be made.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use rustix::net::{Shutdown, shutdown};
use tokio::sync::oneshot;

use super::{
    Shared, init_gone,
    link::Order,
    send,
    stdio::{Ends, Stdio},
};

/// More than the starter keeps: beyond that, the oldest are ones that somebody has ended.
const MAX_READY: usize = 4;
/// After which one is asked for. The starter makes the next by itself as soon as one becomes a program, but somebody may have stopped
/// those on their way.
const PATIENCE: Duration = Duration::from_millis(50);

/// A process that waits at the other end of its socket. It ends when this is dropped: the starter has the socket too, to see it close.
pub struct Spare {
    /// Its number here, and in the sandbox.
    pub pid: i32,
    pub number: i32,
    /// Taken out of here when it has its order.
    pub socket: Option<OwnedFd>,
    /// What most programs want, opened while there was time.
    pub ends: Option<Ends>,
}

impl Drop for Spare {
    fn drop(&mut self) {
        if let Some(socket) = &self.socket {
            // It has ended already.
            let _ = shutdown(socket, Shutdown::Both);
        }
    }
}

#[derive(Default)]
pub struct Spares(Mutex<Supply>);

#[derive(Default)]
struct Supply {
    /// The newest first.
    ready: VecDeque<Spare>,
    waiting: VecDeque<oneshot::Sender<io::Result<Spare>>>,
    /// The last could not be made, and the next is not before it is asked for.
    is_short: bool,
}

impl Spares {
    fn supply(&self) -> MutexGuard<'_, Supply> {
        // Each change is one push or pop.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// One was made: for who has waited the longest, else for the next.
    pub fn made(&self, mut spare: Spare) {
        let mut supply = self.supply();
        supply.is_short = false;
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
        supply.is_short = true;
        for who in supply.waiting.drain(..) {
            // Has left.
            let _ = who.send(Err(io::Error::from_raw_os_error(errno)));
        }
    }

    /// Nobody makes any more.
    pub fn clear(&self) {
        *self.supply() = Supply::default();
    }
}

impl Shared {
    /// One that is ready, or the next that is made.
    pub async fn spare(&self) -> io::Result<Spare> {
        let (mut made, is_short) = {
            let mut supply = self.spares.supply();
            if let Some(spare) = supply.ready.pop_front() {
                return Ok(spare);
            }
            let (tell, made) = oneshot::channel();
            supply.waiting.push_back(tell);
            (made, supply.is_short)
        };
        let comes_by_itself = !is_short && !self.is_watched;
        if comes_by_itself && let Ok(made) = tokio::time::timeout(PATIENCE, &mut made).await {
            return made.unwrap_or_else(|_| Err(init_gone()));
        }
        send(&self.starter, &Order::Spare).await?;
        made.await.unwrap_or_else(|_| Err(init_gone()))
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

    use super::*;

    /// One that was made: the waiting process's end, and the starter's copy of ours.
    fn make(spares: &Spares) -> (OwnedFd, OwnedFd) {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let copy = ours.try_clone().unwrap();
        spares.made(Spare { pid: 1, number: 1, socket: Some(ours), ends: None });
        (theirs, copy)
    }

    fn has_ended(theirs: &OwnedFd) -> bool {
        matches!(recv(theirs, &mut [0u8; 1], RecvFlags::DONTWAIT), Ok((_, 0)))
    }

    #[tokio::test]
    async fn whoever_is_not_needed_ends_though_the_starter_has_its_socket() {
        let spares = Spares::default();
        let all: Vec<_> = (0..MAX_READY + 2).map(|_| make(&spares)).collect();
        let ended: Vec<bool> = all.iter().map(|(theirs, _)| has_ended(theirs)).collect();
        assert_eq!(ended, [[true; 2].as_slice(), &[false; MAX_READY]].concat(), "the oldest end");
        spares.clear();
        assert!(all.iter().all(|(theirs, _)| has_ended(theirs)));
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
        let (theirs, _copy) = make(&spares);
        let mut spare = here.await.unwrap().unwrap();
        assert!(!has_ended(&theirs));
        drop(spare.socket.take());
        drop(spare);
        assert!(!has_ended(&theirs), "it has its order");
        let (theirs, _copy) = make(&spares);
        drop(left);
        assert!(has_ended(&theirs));
        let told = wait();
        spares.not_made(libc::EAGAIN);
        assert_eq!(told.await.unwrap().err().unwrap().raw_os_error(), Some(libc::EAGAIN));
        assert!(spares.supply().is_short);
    }
}
