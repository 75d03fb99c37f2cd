//! Processes that wait to become programs. The starter keeps some ready, so that most programs begin without one having to be made.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

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

/// A process that waits at the other end of its socket.
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
            // Left just now: it ends with its socket.
            return drop(first.send(Ok(spare)));
        }
        // Whoever takes it finds out what is wrong.
        spare.ends = Ends::open(Stdio::Pipes { stdin: false }).ok();
        supply.ready.push_front(spare);
        supply.ready.truncate(MAX_READY);
    }

    /// One could not be made: so says everybody's who waits.
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
