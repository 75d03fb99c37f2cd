//! Tests of CORS and of what a front end requests: pages of allowed origins may access the broker, others get no
//! information.

use cobox_broker::Cors;
use http::Method;
use serde_json::json;

use crate::harness::{Answer, Client, World, sandbox_id};

const PAGE: &str = "http://localhost:5173";

fn world_allowing(origins: &[&str]) -> World {
    let mut world = World::new();
    world.config.cors = Cors { allow_origins: origins.iter().map(|o| (*o).to_owned()).collect(), ..Cors::default() };
    world
}

async fn preflight(client: &Client, path: &str, origin: &str) -> Answer {
    let headers =
        [("origin", origin), ("access-control-request-method", "POST"), ("access-control-request-headers", "authorization,content-type")];
    client.call(Method::OPTIONS, path, None, &headers).await
}

fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    answer.headers.get(name).map(|v| v.to_str().unwrap())
}

#[tokio::test]
async fn a_preflight_of_an_allowed_origin_needs_no_credentials() {
    let world = world_allowing(&["https://app.example.com", PAGE]);
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    let nobody = Client { key: None, ..ann.clone() };
    for path in ["/v1/sandbox/sessions".to_owned(), format!("/dp/{id}/v1/exec"), "/capabilities?thread_id=t".to_owned()] {
        let answer = preflight(&nobody, &path, PAGE).await;
        assert_eq!(answer.status, 204);
        assert_eq!(header(&answer, "access-control-allow-origin"), Some(PAGE));
        assert!(header(&answer, "access-control-allow-methods").unwrap().contains("PATCH"));
        assert!(header(&answer, "access-control-allow-headers").unwrap().contains("authorization"));
        assert_eq!(header(&answer, "access-control-allow-credentials"), None, "credentials are sent in headers, never in cookies");
        assert!(header(&answer, "vary").unwrap().contains("origin"));
    }
    assert!(world.provider.boxd(&id).seen.lock().unwrap().is_empty(), "no sandbox receives the request");
    for stranger in
        ["http://localhost:5174", "http://localhost:5173.evil.example", "https://localhost:5173", "null", "http://LOCALHOST:5173"]
    {
        let answer = preflight(&nobody, "/v1/sandbox/sessions", stranger).await;
        assert_eq!(header(&answer, "access-control-allow-origin"), None, "{stranger}");
        assert_eq!(answer.error(403), "FORBIDDEN");
    }
}

#[tokio::test]
async fn responses_and_errors_are_readable_by_pages_of_allowed_origins_only() {
    let world = world_allowing(&[PAGE]);
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let id = sandbox_id(&ann.ensure("t").await);
    for (path, status) in [("/v1/sandboxes".to_owned(), 200), (format!("/dp/{id}/v1/x"), 200), ("/nothing".to_owned(), 404)] {
        let answer = ann.call(Method::GET, &path, None, &[("origin", PAGE)]).await;
        assert_eq!(answer.status, status);
        assert_eq!(header(&answer, "access-control-allow-origin"), Some(PAGE), "{path}");
        assert!(header(&answer, "access-control-expose-headers").unwrap().contains("x-request-id"));
        let other = ann.call(Method::GET, &path, None, &[("origin", "http://evil.example")]).await;
        assert_eq!((other.status.as_u16(), header(&other, "access-control-allow-origin")), (status, None));
        assert_eq!(header(&ann.get(&path).await, "access-control-allow-origin"), None);
    }
    let nobody = Client { key: None, ..ann };
    let answer = nobody.call(Method::GET, "/v1/sandboxes", None, &[("origin", PAGE)]).await;
    assert_eq!(header(&answer, "access-control-allow-origin"), Some(PAGE), "a page must be able to read a 401");
    assert_eq!(answer.error(401), "UNAUTHENTICATED");
}

#[tokio::test]
async fn without_origins_no_cors_header_is_sent_and_a_wildcard_never_allows_credentials() {
    let world = World::new();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    assert_eq!(preflight(&ann, "/v1/sandboxes", PAGE).await.error(405), "METHOD_NOT_ALLOWED");
    let answer = ann.call(Method::GET, "/v1/sandboxes", None, &[("origin", PAGE)]).await;
    assert_eq!((header(&answer, "access-control-allow-origin"), header(&answer, "vary")), (None, None));

    let world = world_allowing(&["*"]);
    let broker = world.start().await;
    let answer = preflight(&broker.human("ann").await, "/v1/sandboxes", PAGE).await;
    assert_eq!(header(&answer, "access-control-allow-origin"), Some("*"));
    assert_eq!(header(&answer, "access-control-allow-credentials"), None);
}

#[tokio::test]
async fn reading_the_capabilities_creates_nothing() {
    let world = World::new();
    let broker = world.start().await;
    let (ann, bob, eve) = (broker.human("ann").await, broker.human("bob").await, broker.stranger().await);
    assert_eq!(ann.get("/capabilities?thread_id=t").await.ok(200), json!({ "services": {} }));
    assert_eq!(ann.get("/capabilities").await.error(400), "INVALID_REQUEST");
    let private = json!({ "thread_id": "t", "mode": "ensure", "access": "owner" });
    let made = ann.post("/v1/sandbox/sessions", private).await.ok(200);
    world.clock.advance(3600);
    broker.tick().await;
    let service = ann.get("/capabilities?thread_id=t").await.ok(200)["services"]["sandbox"].clone();
    assert_eq!(world.provider.running(), 0, "reading starts no sandbox");
    let url = service["url"].as_str().unwrap().strip_prefix(&format!("http://{}", broker.addr)).unwrap().to_owned();
    assert_eq!((url.as_str(), &service["protocol"]), (format!("/dp/{}", sandbox_id(&made)).as_str(), &json!("rest+ws")));
    ann.with(&service["token"]).get(&format!("{url}/v1/x")).await.ok(200);
    assert_eq!(bob.get("/capabilities?thread_id=t").await.error(403), "FORBIDDEN");
    assert_eq!(eve.get("/capabilities?thread_id=t").await.ok(200), json!({ "services": {} }));
}
