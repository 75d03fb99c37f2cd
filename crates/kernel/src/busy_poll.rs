//! Busy polling between the messages of a fast exchange. A thread that sleeps until the next message takes longer to
//! wake up than a small request takes to answer: about 5 µs, and about 30 µs on a virtual CPU that was halted in the
//! meantime. So a thread whose last wait for a peer was short polls for the next message for a moment before it sleeps.
//! After a long wait it sleeps at once.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    task::{Poll, Waker},
    time::{Duration, Instant},
};

use rustix::thread::sched_yield;

/// Maximum time that a thread polls, which is the cost at the end of each exchange. The kernel's own idle loop waits
/// this long on a virtual machine where halt polling is enabled.
const MAX_BUSY_POLL: Duration = Duration::from_micros(200);
/// A message of at least this many bytes is taken for a part of a bulk transfer. A bulk transfer keeps both CPUs busy
/// anyway, and polling would take CPU time from it.
const LARGE_MESSAGE_BYTES: usize = 16 * 1024;

/// The role of the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Sends requests to this process.
    Client,
    /// Forwards requests to this process, and waits for the answers on the same machine.
    Proxy,
    /// Answers requests of this process.
    Server,
}

/// What a thread knows about its exchanges. All connections to peers of one role are treated as one.
#[derive(Default)]
struct BusyPollState {
    awaited: Cell<Option<(Peer, Instant)>>,
    /// When the last request came from a proxy.
    proxied_at: Cell<Option<Instant>>,
    is_client_fast: Cell<bool>,
    is_proxy_fast: Cell<bool>,
    is_server_fast: Cell<bool>,
    /// Wakes [`keep_polling`], which sleeps while there is nothing to poll for.
    idle_waker: RefCell<Option<Waker>>,
}

thread_local! {
    static STATE: BusyPollState = BusyPollState::default();
}

/// Records that a message was sent and that the thread may now wait for the answer.
pub fn message_sent(to: Peer, bytes: usize) {
    STATE.with(|state| state.message_sent(to, bytes, Instant::now()));
}

/// Records that a message has arrived.
pub fn message_received(from: Peer, bytes: usize) {
    STATE.with(|state| state.message_received(from, bytes, Instant::now()));
}

/// Keeps this thread from sleeping while a message is likely to arrive soon. To be spawned as a task of a
/// single-threaded runtime; never returns.
pub async fn keep_polling() {
    loop {
        poll_fn(|cx| {
            STATE.with(|state| {
                if state.should_poll(Instant::now()) {
                    return Poll::Ready(());
                }
                state.idle_waker.replace(Some(cx.waker().clone()));
                Poll::Pending
            })
        })
        .await;
        while STATE.with(|state| state.should_poll(Instant::now())) {
            // Other threads that are ready to run on this CPU go first: one of them may be the peer that this thread
            // waits for.
            sched_yield();
            // Between two polls of this task the runtime checks its sockets without blocking.
            tokio::task::yield_now().await;
        }
    }
}

impl BusyPollState {
    fn message_sent(&self, to: Peer, bytes: usize, now: Instant) {
        // After long work the proxy is asleep, and the kernel may wake it on this CPU. It could then run only when this
        // thread sleeps.
        let was_long = to == Peer::Proxy && self.proxied_at.take().is_some_and(|at| now.duration_since(at) > MAX_BUSY_POLL);
        self.awaited.set((bytes < LARGE_MESSAGE_BYTES && !was_long).then_some((to, now)));
        if self.should_poll(now)
            && let Some(idle_waker) = self.idle_waker.take()
        {
            idle_waker.wake();
        }
    }

    fn message_received(&self, from: Peer, bytes: usize, now: Instant) {
        if from == Peer::Proxy {
            self.proxied_at.set(Some(now));
        }
        if let Some((peer, since)) = self.awaited.take()
            && peer == from
        {
            self.is_fast(peer).set(bytes < LARGE_MESSAGE_BYTES && now.duration_since(since) <= MAX_BUSY_POLL);
        }
    }

    fn should_poll(&self, now: Instant) -> bool {
        self.awaited.get().is_some_and(|(peer, since)| self.is_fast(peer).get() && now.duration_since(since) <= MAX_BUSY_POLL)
    }

    fn is_fast(&self, peer: Peer) -> &Cell<bool> {
        match peer {
            Peer::Client => &self.is_client_fast,
            Peer::Proxy => &self.is_proxy_fast,
            Peer::Server => &self.is_server_fast,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(50);

    /// Simulates a message that arrives `wait` after the last one was sent. Returns whether the thread polls for the
    /// next one.
    fn polls_after(state: &BusyPollState, from: Peer, wait: Duration, bytes: usize) -> bool {
        let began = Instant::now();
        state.message_sent(from, 100, began);
        state.message_received(from, bytes, began + wait);
        assert!(!state.should_poll(began + wait), "nothing is awaited after a message");
        state.message_sent(from, 100, began + wait);
        state.should_poll(began + wait)
    }

    #[test]
    fn a_thread_polls_after_a_short_wait_and_sleeps_after_a_long_one() {
        let state = BusyPollState::default();
        state.message_sent(Peer::Client, 100, Instant::now());
        assert!(!state.should_poll(Instant::now()), "no wait was measured yet");
        assert!(polls_after(&state, Peer::Client, SHORT, 100));
        assert!(!polls_after(&state, Peer::Client, MAX_BUSY_POLL * 2, 100));
        assert!(polls_after(&state, Peer::Client, SHORT, 100));
        assert!(!polls_after(&state, Peer::Client, SHORT, LARGE_MESSAGE_BYTES), "a bulk transfer is in progress");
    }

    #[test]
    fn polling_stops_after_its_maximum_time() {
        let state = BusyPollState::default();
        assert!(polls_after(&state, Peer::Server, SHORT, 100));
        let (_, since) = state.awaited.get().unwrap();
        assert!(state.should_poll(since + MAX_BUSY_POLL));
        assert!(!state.should_poll(since + MAX_BUSY_POLL + Duration::from_nanos(1)));
    }

    #[test]
    fn a_slow_peer_does_not_affect_polling_for_another() {
        let state = BusyPollState::default();
        assert!(polls_after(&state, Peer::Client, SHORT, 100));
        assert!(!polls_after(&state, Peer::Server, MAX_BUSY_POLL * 2, 100));
        assert!(polls_after(&state, Peer::Client, SHORT, 100));
    }

    #[test]
    fn after_long_work_the_thread_does_not_poll_for_the_proxy() {
        let state = BusyPollState::default();
        let began = Instant::now();
        let answer_after = |work: Duration| {
            state.message_sent(Peer::Proxy, 100, began);
            state.message_received(Peer::Proxy, 100, began + SHORT);
            state.message_sent(Peer::Proxy, 100, began + SHORT + work);
            state.should_poll(began + SHORT + work)
        };
        assert!(answer_after(MAX_BUSY_POLL));
        assert!(!answer_after(MAX_BUSY_POLL * 2));
        assert!(answer_after(MAX_BUSY_POLL));
        assert!(polls_after(&state, Peer::Client, SHORT, 100));
    }

    #[test]
    fn the_thread_does_not_poll_after_a_large_message() {
        let state = BusyPollState::default();
        assert!(polls_after(&state, Peer::Client, SHORT, 100));
        let now = Instant::now();
        state.message_sent(Peer::Client, LARGE_MESSAGE_BYTES, now);
        assert!(!state.should_poll(now));
    }

    #[tokio::test]
    async fn a_polling_runtime_serves_its_sockets_and_then_sleeps() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let is_idle = || STATE.with(|state| state.idle_waker.borrow().is_some());
        let polling = tokio::spawn(keep_polling());
        while !is_idle() {
            tokio::task::yield_now().await;
        }
        // Simulates a short wait, independent of how busy this machine is.
        let began = Instant::now();
        STATE.with(|state| state.message_sent(Peer::Server, 1, began));
        STATE.with(|state| state.message_received(Peer::Server, 1, began));
        message_sent(Peer::Server, 1);
        assert!(!is_idle());
        let (mut one, mut other) = tokio::net::UnixStream::pair().unwrap();
        one.write_all(b"!").await.unwrap();
        assert_eq!(other.read_u8().await.unwrap(), b'!');
        while !is_idle() {
            tokio::task::yield_now().await;
        }
        polling.abort();
    }
}
