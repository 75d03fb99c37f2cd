//! Outages of the network, the broker, the token or the user's laptop have no effect on an attached shell.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use cobox_client::{Dataplane, Session, ShellEvent};
use cobox_protocol::frame::ShellStart;
use cobox_testkit::{TestTerminal, ensure, eventually, sh};
use rustix::process::Signal;
use tokio_util::task::AbortOnDropHandle;

use super::*;

const TOO_OLD: &str = "too old";
const LOST: &str = "no connection for";
const BACK: &str = "reconnected";

/// A second client whose network is never cut: its screen is the reference for Ada's.
struct ReferenceViewer {
    screen: Arc<Mutex<vt100::Parser>>,
    direct: Dataplane,
    _session: Session,
    _watching: AbortOnDropHandle<()>,
}

impl ReferenceViewer {
    async fn watch(broker: &TestBroker) -> Self {
        let session = ensure(&broker.client(), "demo").await;
        let direct = broker.client().sandbox(&session.info().sandbox.id);
        let mut shell = direct.shell(ShellStart { observe: true, ..ShellStart::default() }).await.unwrap();
        let screen = Arc::new(Mutex::new(vt100::Parser::new(SIZE.1, SIZE.0, 0)));
        let seen = screen.clone();
        let watching = tokio::spawn(async move {
            while let Some(Ok(event)) = shell.output.next().await {
                let mut screen = seen.lock().unwrap();
                match event {
                    ShellEvent::Output(bytes) => screen.process(&bytes),
                    ShellEvent::Keyframe { cols, rows, bytes } => {
                        *screen = vt100::Parser::new(rows, cols, 0);
                        screen.process(&bytes);
                    }
                    ShellEvent::Resized { cols, rows } => screen.screen_mut().set_size(rows, cols),
                    _ => {}
                }
            }
        });
        Self { screen, direct, _session: session, _watching: AbortOnDropHandle::new(watching) }
    }

    fn screen_text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    async fn wait_for(&self, text: &str) {
        eventually(&format!("`{text}` on eve's screen"), || async { self.screen_text().contains(text).then_some(()) }).await;
    }

    /// Once the notice about an outage has disappeared, the screens are identical.
    async fn wait_for_same_screen(&self, ada: &TestTerminal) {
        let picture = |s: &vt100::Screen| (s.contents(), s.contents_formatted(), s.cursor_position());
        eventually("the same screen for both", || async {
            let hers = picture(self.screen.lock().unwrap().screen());
            (ada.look(picture) == hers).then_some(())
        })
        .await;
    }
}

/// Ada behind the proxy, and a reference viewer with a direct connection.
async fn ada_and_eve(broker: &TestBroker, proxy: &CuttingProxy) -> (TestTerminal, ReferenceViewer) {
    let mut ada = attach_through(broker, proxy, "ada", &[]).await;
    ada.wait_for("$ ").await;
    ada.press("PS1='> '; clear\r");
    ada.wait_for("> ").await;
    let eve = ReferenceViewer::watch(broker).await;
    eve.wait_for("> ").await;
    (ada, eve)
}

async fn survives_an_outage_of(outage: Duration) {
    let (broker, proxy) = broker_behind_proxy("").await;
    let (mut ada, eve) = ada_and_eve(&broker, &proxy).await;
    ada.press("until test -e go; do sleep 0.05; done; seq 1 60; echo fin''ished\r");
    eve.wait_for("seq 1 60").await;
    let since = tokio::time::Instant::now();
    proxy.set_down(true);
    ada.wait_until_printed(LOST).await;
    sh(&eve.direct, "touch go").await;
    eve.wait_for("finished").await;
    assert!(!ada.screen_text().contains("finished"));
    // A fixed duration, because the test is about the outage itself.
    tokio::time::sleep_until(since + outage).await;
    ada.press("echo typed-$((6*7))\r");
    proxy.set_down(false);
    ada.wait_for("typed-42").await;
    eve.wait_for("typed-42").await;
    ada.wait_until_printed(BACK).await;
    assert!(!ada.has_printed(TOO_OLD));
    // After the notice has disappeared, no trace of it is left.
    eve.wait_for_same_screen(&ada).await;
    assert!(ada.screen_text().contains("finished"));
    ada.press("exit 4\r");
    assert_eq!(ada.ended().await.code(), Some(4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_outage_loses_no_output_and_no_input() {
    survives_an_outage_of(Duration::from_secs(2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_outage_of_30_s_loses_no_output_and_no_input() {
    survives_an_outage_of(Duration::from_secs(30)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keystrokes_from_a_long_outage_are_dropped_with_a_notice() {
    let (broker, proxy) = broker_behind_proxy("").await;
    let (mut ada, eve) = ada_and_eve(&broker, &proxy).await;
    proxy.set_down(true);
    ada.wait_until_printed(LOST).await;
    ada.press("echo rash-$((6*7))\r");
    ada.wait_until_printed(TOO_OLD).await;
    proxy.set_down(false);
    ada.wait_until_printed(BACK).await;
    ada.press("echo wise-$((6*7))\r");
    ada.wait_for("wise-42").await;
    eve.wait_for("wise-42").await;
    assert!(!eve.screen_text().contains("rash") && !ada.screen_text().contains("rash"), "{}", ada.screen_text());
    eve.wait_for_same_screen(&ada).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shell_survives_a_restart_of_the_broker() {
    let (mut broker, proxy) = broker_behind_proxy("").await;
    let mut ada = attach_through(&broker, &proxy, "ada", &[]).await;
    ada.wait_for("$ ").await;
    ada.press("vim -u NONE -i NONE -n -N notes.txt\r");
    ada.wait_for("[New]").await;
    ada.press("ibefore it died, ");
    ada.wait_for("before it died").await;
    broker.kill();
    ada.wait_until_printed(LOST).await;
    broker.launch().await;
    proxy.point_at(broker.url());
    ada.wait_until_printed(BACK).await;
    ada.press("and after\x1b:wq\r");
    ada.wait_for("written").await;
    eventually("its own screen gone", || async { (!ada.look(|s| s.alternate_screen())).then_some(()) }).await;
    ada.press("cat notes.txt; exit 3\r");
    assert_eq!(ada.ended().await.code(), Some(3));
    assert!(ada.screen_text().contains("before it died, and after"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_connection_is_replaced_at_once_after_a_laptop_slept() {
    let (broker, proxy) = broker_behind_proxy("").await;
    let (mut ada, eve) = ada_and_eve(&broker, &proxy).await;
    ada.press("echo before-$((6*7))\r");
    eve.wait_for("before-42").await;
    ada.signal(Signal::STOP);
    // Neither side is informed that this connection is dead.
    proxy.stall();
    // The sleep itself: shorter than the time after which silence would be detected.
    tokio::time::sleep(Duration::from_secs(6)).await;
    ada.signal(Signal::CONT);
    ada.press("echo after-$((6*7))\r");
    ada.wait_for("after-42").await;
    eve.wait_for("after-42").await;
    // Without sleep detection this would take 45 seconds, longer than any wait in this test.
    eve.wait_for_same_screen(&ada).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_expires_during_a_shell_is_renewed_without_interruption() {
    // The shortest possible lifetime of a token; it is renewed after two thirds of that.
    let (broker, proxy) = broker_behind_proxy("token_ttl_seconds = 60\n").await;
    let mut ada = attach_through(&broker, &proxy, "ada", &[]).await;
    // Bob's laptop sleeps during this time, and wakes up with an expired token.
    let mut bob = attach_through(&broker, &proxy, "bob", &["--name", "bobs"]).await;
    let started = tokio::time::Instant::now();
    for person in [&mut ada, &mut bob] {
        person.wait_for("$ ").await;
        person.press("counted=0\r");
    }
    bob.signal(Signal::STOP);
    // The token's lifetime plus the tolerated clock difference.
    let ends = started + Duration::from_secs(60 + 7);
    let mut typed = 0;
    while tokio::time::Instant::now() < ends {
        typed += 1;
        ada.press("clear; counted=$((counted+1)); echo counted-$counted\r");
        ada.wait_for(&format!("counted-{typed}\n")).await;
        // At intervals: only the token's expiry matters, and other tests need the machine.
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    assert!(!ada.has_printed(LOST) && !ada.has_printed(BACK) && !ada.has_printed("expired"));
    bob.signal(Signal::CONT);
    bob.press("echo awake-$((counted+42))\r");
    bob.wait_for("awake-42").await;
    assert!(!bob.has_printed("expired"));
    bob.press("exit 5\r");
    ada.press("exit 6\r");
    assert_eq!((bob.ended().await.code(), ada.ended().await.code()), (Some(5), Some(6)));
}
