//! `cobox shell` from the user's view: the real program in a real terminal, its screen compared with that of the same
//! program run locally.

mod outages;
mod screens;
mod shared;
mod terminal_restore;
mod tmux_and_ssh;

use std::process::Command;

use cobox_protocol::key::PrincipalKind;
use cobox_testkit::{BrokerOptions, CuttingProxy, TestBroker, TestTerminal, ensure};

const SIZE: (u16, u16) = (80, 24);

/// A broker behind a proxy that can interrupt the network; the thread's sandbox exists already.
async fn broker_behind_proxy(config: &str) -> (TestBroker, CuttingProxy) {
    let proxy = CuttingProxy::without_target().await;
    let config = format!("node_url = \"{}\"\n{config}", proxy.url());
    let broker = TestBroker::start_with(BrokerOptions { config, ..BrokerOptions::default() }).await;
    proxy.point_at(broker.url());
    ensure(&broker.client(), "demo").await;
    (broker, proxy)
}

/// A broker with an existing sandbox: the notice about a new one would change the screen.
async fn broker_with_sandbox() -> TestBroker {
    let broker = TestBroker::start().await;
    ensure(&broker.client(), "demo").await;
    broker
}

/// The command `cobox shell demo …` as this user.
async fn shell_command(broker: &TestBroker, name: &str, more: &[&str]) -> Command {
    let key = broker.key_of(name, PrincipalKind::Human, None).await;
    let mut command = broker.cobox();
    command.env("COBOX_API_KEY", key.expose()).env("LANG", "C.UTF-8").args(["shell", "demo"]).args(more);
    command
}

/// Starts a user's terminal attached to the thread's shell.
async fn attach(broker: &TestBroker, name: &'static str, more: &[&str]) -> TestTerminal {
    TestTerminal::start(name, &shell_command(broker, name, more).await, SIZE)
}

/// Like [`attach`], through the proxy.
async fn attach_through(broker: &TestBroker, proxy: &CuttingProxy, name: &'static str, more: &[&str]) -> TestTerminal {
    let mut command = shell_command(broker, name, more).await;
    command.env("COBOX_URL", proxy.url());
    TestTerminal::start(name, &command, SIZE)
}

/// The same program in a plain terminal, without a sandbox.
fn run_locally(name: &'static str, dir: &std::path::Path, program: &str) -> TestTerminal {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", program]).env("PATH", "/usr/bin:/bin").env("LANG", "C.UTF-8").env("HOME", dir).current_dir(dir);
    TestTerminal::start(name, &command, SIZE)
}
