//! Delegation with a real boxd: delegated and opaque tokens, links for browsers, and shares from the command line.

use cobox_protocol::{
    key::PrincipalKind,
    session::{Access, Mode},
    token::{DelegateRequest, FileLinkRequest},
};
use cobox_testkit::{TestBroker, ensure, negotiate, sh};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest};

async fn exec(base: &str, token: &str) -> u16 {
    let request = reqwest::Client::new().post(format!("{base}/exec")).bearer_auth(token);
    request.json(&json!({ "command": "true" })).send().await.unwrap().status().as_u16()
}

#[tokio::test]
async fn a_delegated_token_grants_only_its_capabilities() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let info = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let base = &info.sandbox.http_base_url;
    let request = DelegateRequest { capabilities: Some(vec!["exec".into()]), ..DelegateRequest::default() };
    let own = client.delegate(&info.session_id, &request).await.unwrap();
    let child =
        client.delegate(&info.session_id, &DelegateRequest { parent_token: Some(own.token.clone()), ..request.clone() }).await.unwrap();
    for token in [&own.token, &child.token] {
        assert_eq!(exec(base, token.expose()).await, 200);
        let read = reqwest::Client::new().get(format!("{base}/files/etc/hostname")).bearer_auth(token.expose()).send().await.unwrap();
        assert_eq!(read.status(), 403);
    }
}

#[tokio::test]
async fn an_opaque_token_works_through_the_gateway_and_is_in_no_log() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let info = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let base = &info.sandbox.http_base_url;
    let request = DelegateRequest {
        capabilities: Some(vec!["exec".into(), "fs_read".into()]),
        token_format: Some("opaque".into()),
        ..DelegateRequest::default()
    };
    let token = client.delegate(&info.session_id, &request).await.unwrap().token;
    assert!(token.expose().starts_with("cbo_"));
    // Twice: the second time boxd has cached the gateway's token.
    for _ in 0..2 {
        assert_eq!(exec(base, token.expose()).await, 200);
    }
    // Also in an auth frame, which browsers need.
    let url = format!("{}/exec/ws", info.sandbox.ws_base_url);
    let tcp = TcpStream::connect(broker.url().strip_prefix("http://").unwrap()).await.unwrap();
    let (mut socket, _) = tokio_tungstenite::client_async(url.into_client_request().unwrap(), tcp).await.unwrap();
    socket.send(Message::text(json!({ "type": "auth", "token": token.expose() }).to_string())).await.unwrap();
    let first: Value = serde_json::from_str(socket.next().await.unwrap().unwrap().to_text().unwrap()).unwrap();
    assert_eq!(first["type"], "auth_ok", "{first}");
    assert!(!broker.log().contains(token.expose()));
    let looked = reqwest::Client::new()
        .get(format!("{}/internal/tokens/{}", broker.url(), token.expose()))
        .bearer_auth(broker.key().expose())
        .send()
        .await
        .unwrap();
    assert_eq!(looked.json::<Value>().await.unwrap()["active"], true);
    assert!(!broker.log().contains(token.expose()), "nor does the path of a look into it");
}

#[tokio::test]
async fn a_browser_reads_and_writes_a_file_with_only_its_link() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let info = client.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let browser = reqwest::Client::new();
    let path = "/workspace/a page & more?.html";
    let link = async |method: &str| {
        let request = FileLinkRequest { path: path.into(), method: Some(method.into()), ttl: None };
        client.file_link(&info.session_id, &request).await.unwrap().url.expose().to_owned()
    };
    let (put, get) = (link("PUT").await, link("GET").await);
    assert_eq!(browser.put(&put).body("<script>").send().await.unwrap().status(), 201);
    let got = browser.get(&get).send().await.unwrap();
    assert_eq!(got.status(), 200);
    let headers = got.headers().clone();
    assert_eq!(
        (&headers["x-content-type-options"], &headers["content-security-policy"]),
        (&"nosniff".parse().unwrap(), &"sandbox".parse().unwrap())
    );
    if headers["content-type"].to_str().unwrap().contains("html") {
        assert!(headers["content-disposition"].to_str().unwrap().starts_with("attachment"));
    }
    assert_eq!(got.text().await.unwrap(), "<script>");
    assert_eq!(browser.head(&get).send().await.unwrap().status(), 200);
    let range = browser.get(&get).header("range", "bytes=1-6").send().await.unwrap();
    assert_eq!((range.status().as_u16(), range.text().await.unwrap()), (206, "script".to_owned()));
    assert_eq!(browser.put(&get).body("x").send().await.unwrap().status(), 403);
    assert_eq!(browser.delete(&put).send().await.unwrap().status(), 403);
    client.release(&info.session_id).await.unwrap();
    assert!(matches!(browser.get(&get).send().await.unwrap().status().as_u16(), 401 | 404));
    let secret = get.split_once("link=").unwrap().1;
    assert!(!broker.log().contains(secret));
}

#[tokio::test]
async fn a_link_opens_no_file_that_a_symbolic_link_in_its_place_points_to() {
    let broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "t").await;
    sh(session.dataplane(), "mkdir private reports; echo SECRET > private/key; echo plain | tee report > reports/key").await;
    let link = async |path: &str, method: &str| {
        let request = FileLinkRequest { path: path.into(), method: Some(method.into()), ttl: None };
        broker.client().file_link(&session.info().session_id, &request).await.unwrap().url.expose().to_owned()
    };
    let browser = reqwest::Client::new();
    let mut links = Vec::new();
    for path in ["/workspace/report", "/workspace/reports/key"] {
        links.push((link(path, "GET").await, link(path, "PUT").await));
    }
    for (get, _) in &links {
        assert_eq!(browser.get(get).send().await.unwrap().text().await.unwrap(), "plain\n");
    }
    sh(session.dataplane(), "rm -r report reports; ln -s private/key report; ln -s private reports").await;
    for (get, put) in &links {
        for request in [browser.get(get), browser.get(get).header("x-file-follow", "true"), browser.put(put).body("changed")] {
            let answer = request.send().await.unwrap();
            let (status, text) = (answer.status(), answer.text().await.unwrap());
            assert!(status == 403 && !text.contains("SECRET"), "{status} {text}");
        }
    }
    assert_eq!(sh(session.dataplane(), "cat private/key").await.stdout, "SECRET\n");
}

#[tokio::test]
async fn a_session_is_shared_from_the_command_line() {
    let broker = TestBroker::start().await;
    let mut private = negotiate("demo", Mode::Ensure);
    private.access = Some(Access::Owner);
    broker.client().negotiate(&private).await.unwrap();
    let bob = broker.client_of("bob", PrincipalKind::Human, None).await;
    let share = |args: &[&str]| {
        let output = broker.cobox().arg("share").args(args).output().unwrap();
        (output.status.success(), format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
    };
    assert!(bob.negotiate(&negotiate("demo", Mode::Get)).await.is_err());
    let (is_done, output) = share(&["grant", "demo", "bob", "--capability", "fs_read", "--expires", "2h"]);
    assert!(is_done && output.contains("fs_read"), "{output}");
    let (is_done, output) = share(&["list", "demo"]);
    assert!(is_done && output.contains("bob") && output.contains("PRINCIPAL"), "{output}");
    assert_eq!(bob.negotiate(&negotiate("demo", Mode::Get)).await.unwrap().scopes, ["fs:ro"]);
    let (is_done, output) = share(&["grant", "demo", "nobody", "--capability", "exec"]);
    assert!(!is_done && output.contains("nobody"), "{output}");
    let (is_done, output) = share(&["revoke", "demo", "bob"]);
    assert!(is_done, "{output}");
    assert!(bob.negotiate(&negotiate("demo", Mode::Get)).await.is_err());
    assert!(!share(&["list", "demo"]).1.contains("bob"));
}

#[tokio::test]
async fn the_master_key_is_replaced_from_the_command_line_while_a_sandbox_runs() {
    let mut broker = TestBroker::start().await;
    let info = broker.client().negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let rotate = |broker: &TestBroker, more: &[&str]| {
        let output = broker.cobox().args(["master-key", "rotate", "--data-dir"]).arg(broker.data_dir()).args(more).output().unwrap();
        (output.status.success(), format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
    };
    let (is_done, output) = rotate(&broker, &[]);
    assert!(!is_done && output.contains("in use"), "{output}");
    broker.kill();
    let (is_done, output) = rotate(&broker, &[]);
    assert!(is_done && output.contains("valid until"), "{output}");
    broker.launch().await;
    // The broker's address has changed.
    let base = |broker: &TestBroker| format!("{}/dp/{}/v1", broker.url(), info.sandbox.id);
    assert_eq!(exec(&base(&broker), info.token.expose()).await, 200, "a token of before lives out its time");
    let fresh = broker.client().negotiate(&negotiate("t", Mode::Get)).await.unwrap();
    assert_eq!(exec(&base(&broker), fresh.token.expose()).await, 200);
    broker.kill();
    let (is_done, output) = rotate(&broker, &["--immediate"]);
    assert!(is_done && output.contains("ended"), "{output}");
    broker.launch().await;
    for token in [&info.token, &fresh.token] {
        assert_eq!(exec(&base(&broker), token.expose()).await, 401);
    }
    let last = broker.client().negotiate(&negotiate("t", Mode::Get)).await.unwrap();
    assert_eq!(last.session_id, info.session_id);
    assert_eq!(exec(&base(&broker), last.token.expose()).await, 200);
}
