//! Tests of a dataplane with its own address: by host name per sandbox, or on a second listener. The broker's API is
//! not served there.

use axum::body::Bytes;
use cobox_broker::Cors;
use cobox_protocol::SandboxId;
use futures_util::{SinkExt, StreamExt};
use http::{Method, Request};
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest};

use crate::harness::{Answer, Client, World, sandbox_id};

const DOMAIN: &str = "box.example.com";
const PAGE: &str = "http://localhost:5173";

fn with_domain() -> World {
    let mut world = World::new();
    world.config.dataplane_domain = Some(DOMAIN.to_owned());
    world
}

/// A request with a chosen host.
async fn on(client: &Client, host: &str, method: Method, path: &str, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::builder().method(method).uri(path).header("host", host);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    client.send(request.body(Full::new(Bytes::new())).unwrap()).await
}

fn host(id: &SandboxId) -> String {
    format!("{id}.{DOMAIN}")
}

/// All URLs of the sandbox in a response.
fn urls(made: &Value) -> Vec<String> {
    ["/sandbox/http_base_url", "/dataplane/http_base_url"].iter().map(|p| made.pointer(p).unwrap().as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_host_name_leads_to_its_sandbox_with_the_whole_path() {
    let world = with_domain();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    let port = broker.addr.port();
    for rest in ["/v1/files/a%2Fb?x=%2F", "/v1/sandbox/sessions", "/dp/x/v1/y", "/", "/healthz", "/v1/keys"] {
        on(&ann, &format!("{}:{port}", host(&id)), Method::GET, rest, &[]).await.ok(200);
    }
    let seen = world.provider.boxd(&id).seen.lock().unwrap().clone();
    let uris: Vec<_> = seen.iter().map(|s| s.uri.as_str()).collect();
    assert_eq!(uris, ["/v1/files/a%2Fb?x=%2F", "/v1/sandbox/sessions", "/dp/x/v1/y", "/", "/healthz", "/v1/keys"]);
    assert!(seen.iter().all(|s| s.headers["host"] == "boxd"));
    on(&ann, &host(&id).to_uppercase(), Method::GET, "/v1/x", &[]).await.ok(200);
    on(&ann, &host(&id).replace('_', "-"), Method::GET, "/v1/x", &[]).await.ok(200);
    let nobody = Client { key: None, ..ann.clone() };
    assert_eq!(on(&nobody, &host(&id), Method::GET, "/v1/x", &[]).await.error(401), "UNAUTHENTICATED");
    let eve = broker.stranger().await;
    assert_eq!(on(&eve, &host(&id), Method::GET, "/v1/x", &[]).await.error(404), "SANDBOX_NOT_FOUND");
    let url = format!("http://{}:{port}/v1", host(&id));
    assert_eq!(urls(&made), [url.clone(), url.clone()]);
    assert_eq!(made["dataplane"]["ws_base_url"], format!("ws://{}:{port}/v1", host(&id)));
    let thread = ann.get("/threads/t/sandbox").await.ok(200);
    assert_eq!(
        (&thread["endpoints"]["http"], &thread["endpoints"]["ws"]),
        (&json!(url), &json!(format!("{}/ws", url.replacen("http", "ws", 1))))
    );
    assert_eq!(ann.get("/capabilities?thread_id=t").await.ok(200)["services"]["sandbox"]["url"], url.trim_end_matches("/v1"));
    assert_eq!(ann.get(&format!("/v1/sandboxes/{id}")).await.ok(200)["http_base_url"], url);
}

#[tokio::test]
async fn hosts_of_the_domain_serve_no_broker_routes() {
    let world = with_domain();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    for path in
        ["/v1/sandbox/sessions", "/v1/sandboxes", "/healthz", "/readyz", "/threads/t/sandbox", "/capabilities?thread_id=t", "/v1/audit"]
    {
        for name in [format!("other.{DOMAIN}"), DOMAIN.to_owned(), format!("{DOMAIN}.:1"), format!("x.{}", host(&id))] {
            assert_eq!(on(&ann, &name, Method::GET, path, &[]).await.error(404), "ROUTE_NOT_FOUND", "{name}{path}");
        }
    }
    // The domain itself serves the gateway's paths, and the broker's own host no longer does.
    on(&ann, DOMAIN, Method::GET, &format!("/dp/{id}/v1/x"), &[]).await.ok(200);
    let moved = ann.get(&format!("/dp/{id}/v1/x")).await;
    assert!(moved.json()["error"]["message"].as_str().unwrap().contains("http_base_url"));
    assert_eq!(moved.error(404), "ROUTE_NOT_FOUND");
    // A request with two hosts is refused, in either order.
    let request = Request::get("/v1/sandboxes").header("host", host(&id)).header("host", "broker");
    assert_eq!(ann.send(request.body(Full::new(Bytes::new())).unwrap()).await.error(400), "INVALID_REQUEST");
}

#[tokio::test]
async fn the_main_host_serves_sandbox_paths_if_configured() {
    let mut world = with_domain();
    world.config.dataplane_on_main_origin = true;
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    ann.get(&format!("/dp/{}/v1/x", sandbox_id(&made))).await.ok(200);
    assert!(urls(&made)[0].contains(DOMAIN), "URLs still use the dataplane's origin");
}

#[tokio::test]
async fn only_pages_of_allowed_origins_may_access_the_host_of_a_sandbox() {
    let mut world = with_domain();
    world.config.cors = Cors { allow_origins: vec![PAGE.to_owned()], ..Cors::default() };
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let nobody = Client { key: None, ..ann.clone() };
    let ask = [("origin", PAGE), ("access-control-request-method", "PUT"), ("access-control-request-headers", "authorization,if-match")];
    let preflight = on(&nobody, &host(&id), Method::OPTIONS, "/v1/files/a", &ask).await;
    assert_eq!((preflight.status.as_u16(), &preflight.headers["access-control-allow-origin"]), (204, &PAGE.parse().unwrap()));
    assert!(world.provider.boxd(&id).seen.lock().unwrap().is_empty(), "no sandbox receives the request");
    let answer = on(&ann, &host(&id), Method::GET, "/v1/x", &[("origin", PAGE)]).await;
    assert_eq!(answer.headers["access-control-allow-origin"], PAGE);
    // A page served by a sandbox is an untrusted origin.
    let of_a_sandbox = format!("https://{}", host(&id));
    let ask = [("origin", of_a_sandbox.as_str()), ("access-control-request-method", "POST")];
    assert_eq!(nobody.call(Method::OPTIONS, "/v1/sandbox/sessions", None, &ask).await.error(403), "FORBIDDEN");
}

#[tokio::test]
async fn a_websocket_passes_by_host_name() {
    let world = with_domain();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let mut request = format!("ws://{}/v1/ws", host(&sandbox_id(&made))).into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {}", made["token"].as_str().unwrap()).parse().unwrap());
    let stream = TcpStream::connect(broker.addr).await.unwrap();
    let (mut socket, _) = tokio_tungstenite::client_async(request, stream).await.unwrap();
    socket.send(Message::text("hello")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("hello"));
}

#[tokio::test]
async fn a_second_listener_serves_only_the_dataplane() {
    for is_on_both in [false, true] {
        let mut world = World::new();
        world.config.gateway_listen = Some("127.0.0.1:0".parse().unwrap());
        world.config.dataplane_on_main_origin = is_on_both;
        let broker = world.start().await;
        let ann = broker.human("ann").await;
        let made = ann.ensure("t").await;
        let (id, own) = (sandbox_id(&made), broker.broker.as_ref().unwrap().gateway_address().unwrap());
        let there = Client { addr: own, ..ann.clone() };
        there.get(&format!("/dp/{id}/v1/x")).await.ok(200);
        there.get(&format!("/v1/sandbox/relay/{}/v1/x", made["session_id"].as_str().unwrap())).await.ok(200);
        assert_eq!(urls(&made)[0], format!("http://{own}/dp/{id}/v1"));
        for path in ["/v1/sandbox/sessions", "/v1/sandboxes", "/healthz", "/threads/t/sandbox", "/v1/keys"] {
            assert_eq!(on(&there, "anything", Method::GET, path, &[]).await.error(404), "ROUTE_NOT_FOUND", "{path}");
        }
        let here = ann.get(&format!("/dp/{id}/v1/x")).await;
        if is_on_both { drop(here.ok(200)) } else { assert_eq!(here.error(404), "ROUTE_NOT_FOUND") }
    }
}
