//! Connection runtimes: threads with one single-threaded runtime each. Everything of a connection stays on its thread,
//! so that the gateway forwards a request without one thread waking another.

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

/// More threads would not help: connections wait for other resources.
const MAX_LANES: usize = 16;
/// Period of a timer that is always pending. When a new timer is earlier than all others, tokio wakes the runtime
/// through its own event descriptor, which costs extra system calls. Each request sets a timer for the next request's
/// head; with this earlier one pending, that costs nothing.
const TICK: Duration = Duration::from_secs(5);
/// Number of tasks that run before the sockets are polled again: input from a user is handled before most of the
/// connections that only observe.
const TURNS_BETWEEN_LOOKS: u32 = 8;

/// The runtimes; dropping this ends them and the connections they serve.
pub struct Lanes {
    lanes: Vec<Lane>,
    end: CancellationToken,
}

struct Lane {
    runtime: Handle,
    open: Arc<AtomicUsize>,
}

impl Lanes {
    /// Starts one runtime per core.
    pub fn start() -> io::Result<Self> {
        let count = thread::available_parallelism().map_or(1, |n| n.get()).min(MAX_LANES);
        let end = CancellationToken::new();
        let lanes = (0..count).map(|number| Lane::start(number, end.clone())).collect::<io::Result<_>>()?;
        Ok(Self { lanes, end })
    }

    /// Serves a connection on the runtime with the fewest connections.
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

/// Decrements the count also when a connection's task is dropped before it finishes.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
