//! Attempts to escape from a sandbox, executed inside it in four configurations: the broker started as root or as an
//! ordinary user, and the sandbox's programs running as its ordinary user or as its root.
//!
//! An attempt is a script that prints `REACHED` if it succeeded and `TRIED` at its end, so that a script that failed
//! early is not mistaken for one that was stopped.

mod attempts;
mod limits;

use cobox_client::Session;
use cobox_protocol::exec::ExecRequest;
use cobox_testkit::{BrokerOptions, TestBroker, ensure};

/// A uid without an account: the broker runs as this ordinary user.
const ORDINARY_UID: u32 = 61_234;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokerAs {
    Root,
    OrdinaryUser,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsideAs {
    User,
    Root,
}

/// A broker with one sandbox, in one of the four configurations.
pub struct TestSandbox {
    pub broker: TestBroker,
    pub session: Session,
}

impl TestSandbox {
    pub async fn new(broker_as: BrokerAs, inside_as: InsideAs, options: &str) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "the isolation suite changes users and needs root; without it, leave it out: cargo nextest run -E 'not test(isolation)'"
        );
        let user = if inside_as == InsideAs::Root { "root" } else { "user" };
        let uid = (broker_as == BrokerAs::OrdinaryUser).then_some(ORDINARY_UID);
        let config = format!("reaper_interval_ms = 100\n[local]\nuser = \"{user}\"\n{options}");
        let broker = TestBroker::start_with(BrokerOptions { config, uid, ..BrokerOptions::default() }).await;
        let session = ensure(&broker.client(), "attacker").await;
        Self { broker, session }
    }

    /// Runs a script inside and returns its output, both streams together.
    pub async fn run(&self, script: &str) -> String {
        let request = ExecRequest { command: Some(script.to_owned()), timeout_seconds: Some(60.0), ..ExecRequest::default() };
        let answer = self.session.dataplane().exec(&request).await.expect("the script runs");
        format!("{}{}", answer.stdout, answer.stderr)
    }

    pub async fn attempt(&self, script: &str) {
        let output = self.run(script).await;
        assert!(!output.contains("REACHED"), "the attempt succeeded:\n{output}");
        assert!(output.contains("TRIED"), "the attempt failed early, so it proves nothing:\n{output}");
    }
}

/// Generates a test for each attempt in each of the four configurations.
macro_rules! in_every_configuration {
    ($($name:ident => $body:expr;)*) => {
        in_every_configuration!(@configuration as_root_from_user, Root, User, $($name => $body;)*);
        in_every_configuration!(@configuration as_root_from_root_inside, Root, Root, $($name => $body;)*);
        in_every_configuration!(@configuration as_ordinary_user_from_user, OrdinaryUser, User, $($name => $body;)*);
        in_every_configuration!(@configuration as_ordinary_user_from_root_inside, OrdinaryUser, Root, $($name => $body;)*);
    };
    (@configuration $configuration:ident, $broker:ident, $inside:ident, $($name:ident => $body:expr;)*) => {
        mod $configuration {
            use super::*;
            $(
                #[tokio::test]
                async fn $name() {
                    let body = $body;
                    body($crate::isolation::BrokerAs::$broker, $crate::isolation::InsideAs::$inside).await;
                }
            )*
        }
    };
}
pub(crate) use in_every_configuration;
