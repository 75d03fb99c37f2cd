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
const MAX_RUNTIMES: usize = 16;
/// Period of a timer that is always pending. When a new timer is earlier than all others, tokio wakes the runtime
/// through its own event descriptor, which costs extra system calls. Each request sets a timer for the next request's
/// head; with this earlier one pending, that costs nothing.
const TIMER_PERIOD: Duration = Duration::from_secs(5);
/// Number of tasks that run before the sockets are polled again: input from a user is handled before most of the
/// connections that only observe.
const TASKS_BETWEEN_POLLS: u32 = 8;

/// The runtimes; dropping this ends them and the connections they serve.
pub struct ConnectionRuntimes {
    runtimes: Vec<ConnectionRuntime>,
    end: CancellationToken,
}

struct ConnectionRuntime {
    runtime: Handle,
    open: Arc<AtomicUsize>,
}

impl ConnectionRuntimes {
    /// Starts one runtime per core.
    pub fn start() -> io::Result<Self> {
        let count = thread::available_parallelism().map_or(1, |n| n.get()).min(MAX_RUNTIMES);
        let end = CancellationToken::new();
        let runtimes = (0..count).map(|number| ConnectionRuntime::start(number, end.clone())).collect::<io::Result<_>>()?;
        Ok(Self { runtimes, end })
    }

    /// Serves a connection on the runtime with the fewest connections.
    pub fn spawn(&self, connection: impl Future<Output = ()> + Send + 'static) {
        let Some(chosen) = self.runtimes.iter().min_by_key(|chosen| chosen.open.load(Ordering::Relaxed)) else { return };
        chosen.open.fetch_add(1, Ordering::Relaxed);
        let open_connection = OpenConnection(chosen.open.clone());
        chosen.runtime.spawn(async move {
            connection.await;
            drop(open_connection);
        });
    }
}

impl Drop for ConnectionRuntimes {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

impl ConnectionRuntime {
    fn start(number: usize, end: CancellationToken) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().event_interval(TASKS_BETWEEN_POLLS).build()?;
        let handle = runtime.handle().clone();
        handle.spawn(keep_polling());
        thread::Builder::new().name(format!("lane-{number}")).spawn(move || runtime.block_on(end.run_until_cancelled(tick())))?;
        Ok(Self { runtime: handle, open: Arc::default() })
    }
}

async fn tick() {
    let mut ticks = interval(TIMER_PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
    }
}

/// Decrements the count also when a connection's task is dropped before it finishes.
struct OpenConnection(Arc<AtomicUsize>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
