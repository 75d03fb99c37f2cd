//! The real thing on port 0, for tests: a broker process, keys for it, a PostgreSQL, people at terminals, certificates, networks that cut and forget, and a
//! look at what is left on the machine.

#![forbid(unsafe_code)]

mod authority;
mod broker;
mod cuts;
mod dice;
mod leftovers;
mod postgres;
mod small_disk;
mod stalls;
mod terminal;

pub use authority::{TestAuthority, TestCertificate};
pub use broker::{BrokerOptions, TestBroker};
pub use cuts::{Cuts, CuttingProxy};
pub use dice::Dice;
pub use leftovers::{Leftovers, cgroups};
pub use postgres::{DATABASE_PASSWORD, TestDatabase};
pub use small_disk::SmallDisk;
pub use stalls::{Silence, StallingProxy};
pub use terminal::{Shown, TestTerminal};

use std::{future::Future, time::Duration};

use cobox_client::{Client, Dataplane};
use cobox_protocol::{
    exec::{ExecRequest, ExecResponse},
    session::{Mode, NegotiateRequest},
};

/// Longest any test waits for one thing to happen; a machine under load is slow, one that hangs is broken.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Looks again and again until the thing is so.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "waited {PATIENCE:?} in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The plain request for a thread's sandbox.
pub fn negotiate(thread: &str, mode: Mode) -> NegotiateRequest {
    NegotiateRequest::new(thread, mode)
}

/// Opens a thread's sandbox, making it if need be.
pub async fn ensure(client: &Client, thread: &str) -> cobox_client::Session {
    client.open(&negotiate(thread, Mode::Ensure)).await.expect("the session is ensured")
}

/// Runs a shell command and hands back all it said.
pub async fn sh(dataplane: &Dataplane, command: &str) -> ExecResponse {
    let request = ExecRequest { command: Some(command.to_owned()), ..ExecRequest::default() };
    dataplane.exec(&request).await.unwrap_or_else(|e| panic!("exec of `{command}`: {e}"))
}
