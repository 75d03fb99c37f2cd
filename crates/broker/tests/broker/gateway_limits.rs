//! Tests of the gateway's limits per session, and of the cost of a client that doesn't read: its own permit and little
//! memory.

use std::sync::atomic::Ordering;

use cobox_broker::GatewayLimits;
use http::Request;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpSocket, TcpStream};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{self, client::IntoClientRequest},
};

use crate::harness::{Answer, Client, TestBroker, World, eventually, sandbox_id};

/// Far more than the sockets and buffers between boxd and a client hold.
const LONG: u64 = 64 << 20;

fn limited(limits: GatewayLimits) -> World {
    let mut world = World::new();
    world.config.gateway_limits = limits;
    world
}

#[track_caller]
fn refused(answer: Answer, limit: &str) {
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(answer.json()["error"]["details"]["limit"], limit);
    assert_eq!(answer.error(429), "RATE_LIMITED");
}

async fn websocket(broker: &TestBroker, made: &Value) -> Result<WebSocketStream<TcpStream>, tungstenite::Error> {
    let mut request = format!("ws://{}/dp/{}/v1/ws", broker.addr, sandbox_id(made)).into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {}", made["token"].as_str().unwrap()).parse().unwrap());
    let stream = TcpStream::connect(broker.addr).await.unwrap();
    tokio_tungstenite::client_async(request, stream).await.map(|(socket, _)| socket)
}

/// A long response of which only the head is read.
async fn open_unread(client: &Client, path: &str) -> Incoming {
    // A small receive buffer on the client's side bounds the bytes in flight.
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(64 * 1024).unwrap();
    let stream = socket.connect(client.addr).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_buf_size(64 * 1024)
        .handshake::<_, Empty<axum::body::Bytes>>(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    let request =
        Request::get(path).header("host", "broker").header("authorization", format!("Bearer {}", client.key.as_ref().unwrap().expose()));
    let answer = sender.send_request(request.body(Empty::new()).unwrap()).await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.into_body()
}

#[tokio::test]
async fn a_session_at_its_request_limit_waits_and_other_sessions_do_not() {
    let world = limited(GatewayLimits { requests_per_session: 3, ..GatewayLimits::default() });
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "a", "mode": "ensure", "name": "shared" })).await.ok(200);
    let other = ann.post("/v1/sandbox/sessions", json!({ "thread_id": "b", "mode": "ensure", "name": "shared" })).await.ok(200);
    let id = sandbox_id(&made);
    assert_eq!(id, sandbox_id(&other));
    let (busy, quiet) = (ann.with(&made["token"]), ann.with(&other["token"]));
    let boxd = world.provider.boxd(&id);
    let hanging: Vec<_> = (0..3)
        .map(|_| {
            let (busy, id) = (busy.clone(), id.clone());
            tokio::spawn(async move { busy.get(&format!("/dp/{id}/v1/hang")).await })
        })
        .collect();
    eventually("the requests", || async { boxd.seen.lock().unwrap().len() == 3 }).await;
    refused(busy.get(&format!("/dp/{id}/v1/x")).await, "requests_per_session");
    quiet.get(&format!("/dp/{id}/v1/x")).await.ok(200);
    hanging.iter().for_each(|h| h.abort());
    // A client that disconnects frees its permit for the next one.
    eventually("a place", || async { busy.get(&format!("/dp/{id}/v1/x")).await.status == 200 }).await;
}

#[tokio::test]
async fn websockets_of_a_session_are_counted_until_they_are_closed() {
    let world = limited(GatewayLimits { websockets_per_session: 2, ..GatewayLimits::default() });
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let held = [websocket(&broker, &made).await.unwrap(), websocket(&broker, &made).await.unwrap()];
    match websocket(&broker, &made).await {
        Err(tungstenite::Error::Http(answer)) => {
            assert_eq!((answer.status().as_u16(), &answer.headers()["retry-after"]), (429, &"1".parse().unwrap()))
        }
        other => panic!("{other:?}"),
    }
    ann.with(&made["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
    drop(held);
    eventually("a place", || async { websocket(&broker, &made).await.is_ok() }).await;
}

#[tokio::test]
async fn a_client_that_reads_late_makes_boxd_wait_and_receives_everything() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let boxd = world.provider.boxd(&sandbox_id(&made));
    let mut body = open_unread(&ann.with(&made["token"]), &format!("/dp/{}/v1/long?{LONG}", sandbox_id(&made))).await;
    // The gateway reads no more from boxd than the buffers in between hold: the count stops and stays there while other
    // requests are served.
    let mut stopped_at = 0;
    loop {
        for _ in 0..20 {
            ann.get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
        }
        let produced = boxd.produced.load(Ordering::SeqCst);
        if produced > 0 && produced == stopped_at {
            break;
        }
        stopped_at = produced;
    }
    assert!(stopped_at < LONG / 4, "{stopped_at} bytes of {LONG} were taken from boxd for a client that reads none");
    let mut received = 0;
    while let Some(frame) = body.frame().await {
        received += frame.unwrap().into_data().unwrap().len() as u64;
    }
    assert_eq!((received, boxd.produced.load(Ordering::SeqCst)), (LONG, LONG));
}

#[tokio::test]
async fn unread_bytes_are_counted_and_block_the_next_request_of_the_session() {
    let world = limited(GatewayLimits { bytes_in_flight_per_session: 64 * 1024, ..GatewayLimits::default() });
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let (made, other) = (ann.ensure("t").await, ann.ensure("other").await);
    let busy = ann.with(&made["token"]);
    let path = format!("/dp/{}/v1/x", sandbox_id(&made));
    let mut body = open_unread(&busy, &format!("/dp/{}/v1/long?{LONG}", sandbox_id(&made))).await;
    // The client's own buffers may still absorb data, so this checks the first refusal.
    let answers = std::sync::Mutex::new(None);
    eventually("the buffers to be full", || async {
        let answer = busy.get(&path).await;
        let is_refused = answer.status == 429;
        *answers.lock().unwrap() = Some(answer);
        is_refused
    })
    .await;
    refused(answers.into_inner().unwrap().unwrap(), "bytes_in_flight_per_session");
    ann.with(&other["token"]).get(&format!("/dp/{}/v1/x", sandbox_id(&other))).await.ok(200);
    while let Some(frame) = body.frame().await {
        frame.unwrap();
    }
    eventually("the bytes to be taken", || async { busy.get(&path).await.status == 200 }).await;
}
