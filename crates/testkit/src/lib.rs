//! Test infrastructure with real components: broker processes, API keys, PostgreSQL servers, users at terminals, certificates, proxies that
//! cut or stall connections, and a check for resources left on the machine.

#![forbid(unsafe_code)]

mod authority;
mod broker;
mod cutting_proxy;
mod leftovers;
mod postgres;
mod seeded_rng;
mod small_disk;
mod stalling_proxy;
mod terminal;

pub use authority::{TestAuthority, TestCertificate};
pub use broker::{BrokerOptions, TestBroker};
pub use cutting_proxy::{CutPolicy, CuttingProxy};
pub use leftovers::{Leftovers, cgroups};
pub use postgres::{DATABASE_PASSWORD, TestDatabase};
pub use seeded_rng::SeededRng;
pub use small_disk::SmallDisk;
pub use stalling_proxy::{Silence, StallingProxy};
pub use terminal::{ScreenState, TestTerminal};

use std::{future::Future, time::Duration};

use cobox_client::{Client, Dataplane};
use cobox_protocol::{
    exec::{ExecRequest, ExecResponse},
    session::{Mode, NegotiateRequest},
};

/// Maximum wait of a test for one condition. Long enough for a machine under load; a test that exceeds it is considered hung.
pub const EVENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Polls until the condition returns a value; panics after [`EVENT_TIMEOUT`].
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut poll: impl FnMut() -> F) -> T {
    let deadline = tokio::time::Instant::now() + EVENT_TIMEOUT;
    loop {
        if let Some(found) = poll().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "timed out after {EVENT_TIMEOUT:?} waiting for: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Request for a thread's sandbox with default options.
pub fn negotiate(thread: &str, mode: Mode) -> NegotiateRequest {
    NegotiateRequest::new(thread, mode)
}

/// Opens a thread's sandbox and creates it if it does not exist.
pub async fn ensure(client: &Client, thread: &str) -> cobox_client::Session {
    client.open(&negotiate(thread, Mode::Ensure)).await.expect("the session is ensured")
}

/// Runs a shell command and returns its output.
pub async fn sh(dataplane: &Dataplane, command: &str) -> ExecResponse {
    let request = ExecRequest { command: Some(command.to_owned()), ..ExecRequest::default() };
    dataplane.exec(&request).await.unwrap_or_else(|e| panic!("exec of `{command}`: {e}"))
}
