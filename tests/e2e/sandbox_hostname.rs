//! A sandbox under its own host name, as a browser uses it: without headers on its WebSockets.

use cobox_client::AuditFilter;
use cobox_protocol::session::Mode;
use cobox_testkit::{BrokerOptions, TestBroker, eventually, negotiate};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{Message, client::IntoClientRequest},
};

type Socket = WebSocketStream<TcpStream>;

async fn send(socket: &mut Socket, frame: Value) {
    socket.send(Message::text(frame.to_string())).await.unwrap();
}

/// Returns the next frame of this type and skips others.
async fn receive(socket: &mut Socket, kind: &str) -> Value {
    loop {
        let message = socket.next().await.expect("the connection is open").unwrap();
        let Message::Text(text) = message else { panic!("{message} before `{kind}`") };
        let frame: Value = serde_json::from_str(&text).unwrap();
        if frame["type"] == kind {
            return frame;
        }
    }
}

#[tokio::test]
async fn a_browser_opens_a_shell_at_the_host_name_of_its_sandbox_and_is_audited() {
    let broker = TestBroker::start_with(BrokerOptions { config: "dataplane_domain = \"box.test\"".into(), ..Default::default() }).await;
    let client = broker.client();
    let info = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let address = broker.url().strip_prefix("http://").unwrap();
    let port = address.rsplit(':').next().unwrap();
    assert_eq!(info.sandbox.ws_base_url, format!("ws://{}.box.test:{port}/v1", info.sandbox.id));
    let request = format!("{}/shell/ws", info.sandbox.ws_base_url).into_client_request().unwrap();
    // Connects to the address, because no DNS knows the name.
    let (mut socket, _) = tokio_tungstenite::client_async(request, TcpStream::connect(address).await.unwrap()).await.unwrap();
    send(&mut socket, json!({ "type": "auth", "token": info.token.expose() })).await;
    assert_eq!(receive(&mut socket, "auth_ok").await["session_id"], json!(info.session_id));
    send(&mut socket, json!({ "type": "start", "command": "cat" })).await;
    receive(&mut socket, "ready").await;
    // A new token, then an API key: the gateway passes a token to the sandbox in both cases.
    let fresh = client.refresh(&info.session_id, &Default::default()).await.unwrap();
    for credential in [fresh.token.expose(), broker.key().expose()] {
        send(&mut socket, json!({ "type": "auth", "token": credential })).await;
        receive(&mut socket, "auth_ok").await;
    }
    send(&mut socket, json!({ "type": "stdin", "data": "hello\n" })).await;
    receive(&mut socket, "stdout").await;
    let request = format!("{}/shell/ws", info.sandbox.ws_base_url).into_client_request().unwrap();
    let (mut unauthenticated, _) = tokio_tungstenite::client_async(request, TcpStream::connect(address).await.unwrap()).await.unwrap();
    send(&mut unauthenticated, json!({ "type": "start" })).await;
    assert_eq!(receive(&mut unauthenticated, "error").await["error"]["code"], "UNAUTHENTICATED");
    let filter = AuditFilter { sandbox: Some(info.sandbox.id.to_string()), ..Default::default() };
    eventually("the records of use", || async {
        let items = client.list_audit(&filter, Some(100), None).await.unwrap().items;
        let mut used: Vec<_> = items.into_iter().filter(|e| e.action == "dataplane.used").filter_map(|e| e.detail).collect();
        used.sort();
        (used == ["AUTH /v1/shell/ws 101", "AUTH /v1/shell/ws 101", "GET /v1/shell/ws 101"]).then_some(())
    })
    .await;
}
