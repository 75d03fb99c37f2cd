//! Staying awake between two messages of a brisk conversation. A thread that waits gives its processor away, and to get it back takes
//! longer than to answer a small request: some 5 µs, and some 30 where the processor is a virtual one that has halted meanwhile. So a thread
//! whose last wait for a peer was a short one looks for the next message for a moment before it sleeps; after a long one it sleeps at once.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    task::{Poll, Waker},
    time::{Duration, Instant},
};

use rustix::thread::sched_yield;

/// Longest that a thread stays awake: as long as the kernel's own idle loop would wait on a virtual machine, where it is asked to. It is
/// what the end of each conversation costs.
const MOMENT: Duration = Duration::from_micros(200);
/// A message of this many bytes is one of many: who moves a file has its processors busy anyway, and needs them.
const LARGE_BYTES: usize = 16 * 1024;

/// Whom a thread talks with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Sends requests.
    Asking,
    /// Passes requests on, and waits on the same machine.
    Forwarding,
    /// Gets them.
    Asked,
}

/// What a thread knows of its conversations, all connections of a kind taken for one.
#[derive(Default)]
struct Awake {
    waits: Cell<Option<(Peer, Instant)>>,
    /// When the last request was passed on to here.
    forwarded_at: Cell<Option<Instant>>,
    is_asking_brisk: Cell<bool>,
    is_forwarding_brisk: Cell<bool>,
    is_asked_brisk: Cell<bool>,
    /// Of [`stay_awake`], while there is nothing to stay awake for.
    sleeper: RefCell<Option<Waker>>,
}

thread_local! {
    static AWAKE: Awake = Awake::default();
}

/// A message was sent, and the thread may wait for the next one from there.
pub fn said(to: Peer, bytes: usize) {
    AWAKE.with(|awake| awake.said(to, bytes, Instant::now()));
}

/// A message came.
pub fn heard(from: Peer, bytes: usize) {
    AWAKE.with(|awake| awake.heard(from, bytes, Instant::now()));
}

/// Keeps this thread from sleeping while a message is likely to come at once. For a runtime of one thread, which this is a task of; it
/// never ends.
pub async fn stay_awake() {
    loop {
        poll_fn(|cx| {
            AWAKE.with(|awake| {
                if awake.is_expecting(Instant::now()) {
                    return Poll::Ready(());
                }
                awake.sleeper.replace(Some(cx.waker().clone()));
                Poll::Pending
            })
        })
        .await;
        while AWAKE.with(|awake| awake.is_expecting(Instant::now())) {
            // Whoever else has something to do on this processor comes first: it may be the one that is waited for.
            sched_yield();
            // Between two turns the runtime looks at its sockets, without waiting.
            tokio::task::yield_now().await;
        }
    }
}

impl Awake {
    fn said(&self, to: Peer, bytes: usize, now: Instant) {
        // After long work who passes it on has slept, and is about to be woken up on this processor: it would wait for us to sleep first.
        let was_long = to == Peer::Forwarding && self.forwarded_at.take().is_some_and(|at| now.duration_since(at) > MOMENT);
        self.waits.set((bytes < LARGE_BYTES && !was_long).then_some((to, now)));
        if self.is_expecting(now)
            && let Some(sleeper) = self.sleeper.take()
        {
            sleeper.wake();
        }
    }

    fn heard(&self, from: Peer, bytes: usize, now: Instant) {
        if from == Peer::Forwarding {
            self.forwarded_at.set(Some(now));
        }
        if let Some((peer, since)) = self.waits.take()
            && peer == from
        {
            self.brisk(peer).set(bytes < LARGE_BYTES && now.duration_since(since) <= MOMENT);
        }
    }

    fn is_expecting(&self, now: Instant) -> bool {
        self.waits.get().is_some_and(|(peer, since)| self.brisk(peer).get() && now.duration_since(since) <= MOMENT)
    }

    fn brisk(&self, peer: Peer) -> &Cell<bool> {
        match peer {
            Peer::Asking => &self.is_asking_brisk,
            Peer::Forwarding => &self.is_forwarding_brisk,
            Peer::Asked => &self.is_asked_brisk,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(50);

    /// A message that comes so long after the last was sent; whether the next is then waited for awake.
    fn is_awake_after(awake: &Awake, from: Peer, wait: Duration, bytes: usize) -> bool {
        let began = Instant::now();
        awake.said(from, 100, began);
        awake.heard(from, bytes, began + wait);
        assert!(!awake.is_expecting(began + wait), "there is something to do");
        awake.said(from, 100, began + wait);
        awake.is_expecting(began + wait)
    }

    #[test]
    fn a_thread_stays_awake_after_a_short_wait_and_sleeps_after_a_long_one() {
        let awake = Awake::default();
        awake.said(Peer::Asking, 100, Instant::now());
        assert!(!awake.is_expecting(Instant::now()), "nothing is known yet");
        assert!(is_awake_after(&awake, Peer::Asking, SHORT, 100));
        assert!(!is_awake_after(&awake, Peer::Asking, MOMENT * 2, 100));
        assert!(is_awake_after(&awake, Peer::Asking, SHORT, 100));
        assert!(!is_awake_after(&awake, Peer::Asking, SHORT, LARGE_BYTES), "a file is on its way");
    }

    #[test]
    fn it_is_for_a_moment_only() {
        let awake = Awake::default();
        assert!(is_awake_after(&awake, Peer::Asked, SHORT, 100));
        let (_, since) = awake.waits.get().unwrap();
        assert!(awake.is_expecting(since + MOMENT));
        assert!(!awake.is_expecting(since + MOMENT + Duration::from_nanos(1)));
    }

    #[test]
    fn a_slow_peer_says_nothing_of_the_other() {
        let awake = Awake::default();
        assert!(is_awake_after(&awake, Peer::Asking, SHORT, 100));
        assert!(!is_awake_after(&awake, Peer::Asked, MOMENT * 2, 100));
        assert!(is_awake_after(&awake, Peer::Asking, SHORT, 100));
    }

    #[test]
    fn after_long_work_who_passes_it_on_is_not_waited_for_awake() {
        let awake = Awake::default();
        let began = Instant::now();
        let answer_after = |work: Duration| {
            awake.said(Peer::Forwarding, 100, began);
            awake.heard(Peer::Forwarding, 100, began + SHORT);
            awake.said(Peer::Forwarding, 100, began + SHORT + work);
            awake.is_expecting(began + SHORT + work)
        };
        assert!(answer_after(MOMENT));
        assert!(!answer_after(MOMENT * 2));
        assert!(answer_after(MOMENT));
        assert!(is_awake_after(&awake, Peer::Asking, SHORT, 100));
    }

    #[test]
    fn what_is_large_is_not_waited_behind() {
        let awake = Awake::default();
        assert!(is_awake_after(&awake, Peer::Asking, SHORT, 100));
        let now = Instant::now();
        awake.said(Peer::Asking, LARGE_BYTES, now);
        assert!(!awake.is_expecting(now));
    }

    #[tokio::test]
    async fn a_runtime_stays_awake_for_its_sockets_and_then_sleeps() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let is_asleep = || AWAKE.with(|awake| awake.sleeper.borrow().is_some());
        let keeper = tokio::spawn(stay_awake());
        while !is_asleep() {
            tokio::task::yield_now().await;
        }
        // A short wait, whatever this machine is doing.
        let began = Instant::now();
        AWAKE.with(|awake| awake.said(Peer::Asked, 1, began));
        AWAKE.with(|awake| awake.heard(Peer::Asked, 1, began));
        said(Peer::Asked, 1);
        assert!(!is_asleep());
        let (mut one, mut other) = tokio::net::UnixStream::pair().unwrap();
        one.write_all(b"!").await.unwrap();
        assert_eq!(other.read_u8().await.unwrap(), b'!');
        while !is_asleep() {
            tokio::task::yield_now().await;
        }
        keeper.abort();
    }
}
