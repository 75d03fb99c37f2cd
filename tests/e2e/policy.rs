//! The policy of a production broker: reloaded on request, and never replaced by an invalid one.

use cobox_protocol::session::Mode;
use cobox_testkit::{BrokerOptions, TestBroker, TestDatabase, eventually, negotiate};
use rustix::process::{Pid, Signal, kill_process};

#[tokio::test]
async fn sighup_reloads_the_policy_unless_it_is_invalid() {
    let database = TestDatabase::new().await;
    let options = BrokerOptions { database: Some(database.secret_url()), ..BrokerOptions::default() };
    let broker = TestBroker::start_with(options).await;
    let file = broker.data_dir().join("policy.toml");
    let hang_up = || kill_process(Pid::from_raw(broker.pid() as i32).unwrap(), Signal::HUP).unwrap();
    let logged = async |text: &str, times: usize| {
        eventually(text, || {
            let is_there = broker.log().matches(text).count() >= times;
            async move { is_there.then_some(()) }
        })
        .await;
    };
    let granted = async || {
        let made = broker.client().negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
        made.credentials.granted_capabilities.names().join(" ")
    };
    assert_eq!(granted().await, "fs_read fs_write exec shell");
    // Written under another name and renamed, so that the broker never reads a partial file.
    let write = |text: &str| {
        std::fs::write(file.with_extension("new"), text).unwrap();
        std::fs::rename(file.with_extension("new"), &file).unwrap();
    };
    write("[operator]\ncapabilities = [\"fs_read\"]\n");
    logged("the policy was read", 1).await;
    assert_eq!(granted().await, "fs_read");
    hang_up();
    logged("the policy was read", 2).await;
    write("[operator]\ncapabilites = []\n");
    hang_up();
    logged("did you mean `capabilities`?", 1).await;
    assert_eq!(granted().await, "fs_read", "the old policy still applies");
}
