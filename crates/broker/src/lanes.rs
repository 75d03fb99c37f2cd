//! Threads that serve connections, each with a runtime of its own: what belongs to one connection stays on one thread, so that a
//! request passes through the gateway without one thread having to wake another.

use std::{
    future::Future,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use cobox_kernel::keep_polling;
use tokio::{
    runtime::{Builder, Handle},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

/// More than this would serve no more connections: what they wait for is elsewhere.
const MAX_LANES: usize = 16;
/// A timer earlier than all others makes a runtime write itself a note to wake up in time, and wake up at once to read it. Each request
/// sets one for the next request's head; with this one before it that costs nothing.
const TICK: Duration = Duration::from_secs(5);
/// Tasks that have their turn before the sockets are looked at again: who types comes before most of those who watch.
const TURNS_BETWEEN_LOOKS: u32 = 8;

/// They end, with what they serve, when this is dropped.
pub struct Lanes {
    lanes: Vec<Lane>,
    end: CancellationToken,
}

struct Lane {
    runtime: Handle,
    open: Arc<AtomicUsize>,
}

impl Lanes {
    /// One for each core.
    pub fn start() -> io::Result<Self> {
        let count = thread::available_parallelism().map_or(1, |n| n.get()).min(MAX_LANES);
        let end = CancellationToken::new();
        let lanes = (0..count).map(|number| Lane::start(number, end.clone())).collect::<io::Result<_>>()?;
        Ok(Self { lanes, end })
    }

    /// Serves a connection on the lane that has the fewest.
    pub fn spawn(&self, connection: impl Future<Output = ()> + Send + 'static) {
        let Some(lane) = self.lanes.iter().min_by_key(|lane| lane.open.load(Ordering::Relaxed)) else { return };
        lane.open.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(lane.open.clone());
        lane.runtime.spawn(async move {
            connection.await;
            drop(counted);
        });
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

impl Lane {
    fn start(number: usize, end: CancellationToken) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().event_interval(TURNS_BETWEEN_LOOKS).build()?;
        let handle = runtime.handle().clone();
        handle.spawn(keep_polling());
        thread::Builder::new().name(format!("lane-{number}")).spawn(move || runtime.block_on(end.run_until_cancelled(tick())))?;
        Ok(Self { runtime: handle, open: Arc::default() })
    }
}

async fn tick() {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
    }
}

/// Also for a connection whose task is dropped half-way.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
