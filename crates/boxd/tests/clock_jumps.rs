//! A sandbox whose clock is set forward or back by an hour or a day: tokens count by the new time, streams end with theirs or go on with a
//! fresh one, and the lease ends nothing while the broker is there.

mod support;

use std::time::Duration;

use boxd::clock::Clock;
use cobox_protocol::frame::close;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use support::{
    EVERYTHING, SOON, TestBoxd,
    exec_client::{ClientFrame, ExecClient, ServerFrame, command, named},
};
use tokio_tungstenite::tungstenite::Message;

const HOUR: i64 = 3600;
const DAY: i64 = 86_400;
const TRUE: &str = r#"{"command": "true"}"#;

#[tokio::test]
async fn a_token_follows_the_clock_as_set_and_a_fresh_one_is_accepted() {
    for jump in [-DAY, -HOUR, HOUR, DAY] {
        let boxd = TestBoxd::start();
        let before = boxd.token(EVERYTHING);
        boxd.post("/v1/exec", TRUE).token(&before).send().await.ok(200);
        boxd.clock.advance(jump);
        let code = if jump > 0 { "TOKEN_EXPIRED" } else { "UNAUTHENTICATED" };
        boxd.post("/v1/exec", TRUE).token(&before).send().await.refused(401, code);
        boxd.post("/v1/exec", TRUE).send().await.ok(200);
        // A clock that is set right again makes both what they were.
        let during = boxd.token(EVERYTHING);
        boxd.clock.advance(-jump);
        boxd.post("/v1/exec", TRUE).token(&before).send().await.ok(200);
        let code = if jump > 0 { "UNAUTHENTICATED" } else { "TOKEN_EXPIRED" };
        boxd.post("/v1/exec", TRUE).token(&during).send().await.refused(401, code);
    }
}

#[tokio::test]
async fn open_streams_end_when_the_clock_passes_their_token_and_can_be_resumed_with_a_fresh_one() {
    for jump in [HOUR, DAY] {
        let boxd = TestBoxd::start();
        let mut client = ExecClient::start(&boxd, named("build", command("exec sleep 1000"))).await;
        let events = boxd.post("/v1/exec", r#"{"command_id": "build"}"#).header("accept", "text/event-stream").open().await;
        let watch = boxd.get("/v1/watch").open().await;
        boxd.clock.advance(jump);
        match client.answer().await {
            Some(ServerFrame::Error { error }) => assert_eq!(error.code, "TOKEN_EXPIRED"),
            other => panic!("{other:?}"),
        }
        let closed = tokio::time::timeout(SOON, client.socket.next()).await.unwrap().unwrap().unwrap();
        assert!(matches!(&closed, Message::Close(Some(frame)) if u16::from(frame.code) == close::UNAUTHENTICATED), "{closed:?}");
        for stream in [events, watch] {
            let rest = tokio::time::timeout(SOON, stream.into_body().collect()).await.unwrap().unwrap().to_bytes();
            assert!(String::from_utf8_lossy(&rest).contains("TOKEN_EXPIRED"), "{rest:?}");
        }
        boxd.delete("/v1/processes/build").send().await.ok(204);
    }
}

#[tokio::test]
async fn an_open_stream_continues_after_a_jump_back_and_accepts_a_new_token() {
    for jump in [-DAY, -HOUR] {
        let boxd = TestBoxd::start();
        let mut client = ExecClient::start(&boxd, command("exec sleep 1000")).await;
        boxd.clock.advance(jump);
        client.send(ClientFrame::Auth { token: boxd.token(EVERYTHING) }).await;
        assert!(matches!(client.answer().await, Some(ServerFrame::AuthOk { .. })));
        client.send(ClientFrame::Ping { id: None }).await;
        assert!(matches!(client.answer().await, Some(ServerFrame::Pong { .. })));
    }
}

#[tokio::test]
async fn a_reachable_broker_decides_about_a_lease_that_a_clock_jump_ended() {
    for jump in [-DAY, -HOUR, HOUR, DAY] {
        let mut boxd = TestBoxd::start();
        boxd.clock.advance(jump);
        // Whoever waits for the lease has looked at the clock several times since.
        let enough = boxd.clock.reads() + 10;
        support::wait_for(|| boxd.clock.reads() >= enough).await;
        assert!(!boxd.served.as_ref().unwrap().is_finished(), "{jump}");
        // The broker's next push is by the new time.
        boxd.state.lease_expires_at = boxd.clock.now().plus(Duration::from_secs(3600));
        boxd.push().await;
        boxd.post("/v1/exec", TRUE).send().await.ok(200);
    }
}

#[tokio::test]
async fn boxd_ends_when_a_clock_jump_ends_its_lease_and_no_broker_is_reachable() {
    for jump in [HOUR, DAY] {
        let mut boxd = TestBoxd::start_limited(|limits| limits.lease_grace_seconds = 1);
        boxd.clock.advance(jump + 1);
        let served = boxd.served.take().unwrap();
        tokio::time::timeout(SOON, served).await.expect("boxd ends").unwrap().unwrap();
    }
}
