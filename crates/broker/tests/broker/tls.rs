//! Tests of TLS on the broker's own listener: real certificates by openssl, and three real clients: curl, openssl and
//! the project's own.

use std::{
    path::Path,
    process::{Command, Output},
    sync::Arc,
    time::Duration,
};

use cobox_broker::{Broker, StartError, SystemClock, TlsFiles};
use cobox_client::Client;
use cobox_protocol::{
    key::PrincipalKind,
    session::{Mode, NegotiateRequest},
};
use cobox_testkit::{TestAuthority, TestCertificate};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::harness::{TestBroker, World, eventually};

fn files(signed: &TestCertificate) -> TlsFiles {
    TlsFiles { cert: signed.cert.clone(), key: signed.key.clone() }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

async fn run(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().expect("the program is installed")).await.unwrap()
}

async fn curl(authority: &TestAuthority, args: &[&str]) -> Output {
    let mut command = Command::new("curl");
    command.args(["-sS", "--noproxy", "*", "--max-time", "20", "--cacert", text(&authority.certificate())]).args(args);
    run(command).await
}

/// The subject of the current certificate.
async fn subject(broker: &TestBroker) -> String {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("openssl s_client -connect {} </dev/null 2>/dev/null | openssl x509 -noout -subject", broker.addr)]);
    String::from_utf8(run(command).await.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn curl_and_the_client_connect_over_tls_and_urls_are_https() {
    let authority = TestAuthority::new();
    let mut world = World::new();
    world.config.tls = Some(files(&authority.sign("broker")));
    let broker = world.start().await;
    let url = format!("https://{}", broker.addr);

    let answer = curl(&authority, &["--http2", "-w", "%{http_version} %{http_code}", &format!("{url}/healthz")]).await;
    let message = String::from_utf8(answer.stdout).unwrap();
    assert!(message.ends_with("1.1 200"), "{message} {}", String::from_utf8_lossy(&answer.stderr));
    let plain = curl(&authority, &[&format!("http://{}/healthz", broker.addr)]).await;
    assert!(!plain.status.success(), "plain HTTP is refused on the same port");

    let key = broker.broker.as_ref().unwrap().bootstrap_key("ann", PrincipalKind::Human).await.unwrap();
    let ann = Client::trusting(&url, key.clone(), &authority.pem()).unwrap();
    let session = ann.negotiate(&NegotiateRequest::new("t", Mode::Ensure)).await.unwrap();
    assert!(session.sandbox.http_base_url.starts_with("https://127.0.0.1:"), "{}", session.sandbox.http_base_url);
    assert!(session.sandbox.ws_base_url.starts_with("wss://127.0.0.1:"), "{}", session.sandbox.ws_base_url);

    // A WebSocket through the gateway, on the same listener.
    let upgrade = [
        "-i",
        "-N",
        "--http1.1",
        "-H",
        "Connection: Upgrade",
        "-H",
        "Upgrade: websocket",
        "-H",
        "Sec-WebSocket-Version: 13",
        "-H",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "--max-time",
        "2",
        "-H",
    ];
    let bearer = format!("Authorization: Bearer {}", session.token.expose());
    let path = format!("{}/ws", session.sandbox.http_base_url);
    let switched = curl(&authority, &[&upgrade[..], &[&*bearer, &*path]].concat()).await;
    assert!(String::from_utf8_lossy(&switched.stdout).starts_with("HTTP/1.1 101"), "{}", String::from_utf8_lossy(&switched.stdout));

    let stranger = Client::new(&url, key).unwrap().negotiate(&NegotiateRequest::new("t", Mode::Get)).await.unwrap_err();
    assert!(stranger.advice().unwrap().contains("--ca-file"), "{stranger}");
}

#[tokio::test]
async fn a_renewed_certificate_is_served_without_a_restart_and_a_broken_one_is_not() {
    let authority = TestAuthority::new();
    let (first, other) = (authority.sign("first"), authority.sign("second"));
    let mut world = World::new();
    world.config.tls = Some(files(&first));
    let broker = world.start().await;
    let running = broker.broker.clone().unwrap();
    assert!(subject(&broker).await.ends_with("CN = first"));

    std::fs::copy(&other.cert, &first.cert).unwrap();
    let mismatch = running.reload_tls().unwrap_err().to_string();
    assert!(mismatch.contains("don't match"), "{mismatch}");
    assert!(subject(&broker).await.ends_with("CN = first"), "an incomplete renewal has no effect");
    std::fs::copy(&other.key, &first.key).unwrap();
    assert!(running.reload_tls().unwrap());
    assert!(!running.reload_tls().unwrap(), "the files have not changed since");
    eventually("the new certificate", async || subject(&broker).await.ends_with("CN = second")).await;
}

#[tokio::test]
async fn an_unfinished_handshake_delays_no_other_connection() {
    let authority = TestAuthority::new();
    let mut world = World::new();
    world.config.tls = Some(files(&authority.sign("broker")));
    let broker = world.start().await;
    let silent = TcpStream::connect(broker.addr).await.unwrap();
    let mut rude = TcpStream::connect(broker.addr).await.unwrap();
    rude.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut message = Vec::new();
    // The server sends at most an alert, then closes.
    tokio::time::timeout(Duration::from_secs(20), rude.read_to_end(&mut message)).await.unwrap().unwrap();
    assert!(!message.starts_with(b"HTTP"));
    let answer = curl(&authority, &["-o", "/dev/null", "-w", "%{http_code}", &format!("https://{}/healthz", broker.addr)]).await;
    assert_eq!(answer.stdout, b"200");
    drop(silent);
}

async fn start_error(world: &World, listen: &str) -> StartError {
    let listener = TcpListener::bind(listen).await.unwrap();
    let started = Broker::start_with_clock(world.whole_config().await, world.provider.clone(), listener, Arc::new(SystemClock)).await;
    started.err().expect("the broker must not start")
}

#[tokio::test]
async fn listening_beyond_localhost_needs_tls_or_an_explicit_setting() {
    let mut world = World::new();
    let refused = start_error(&world, "0.0.0.0:0").await.to_string();
    assert!(refused.contains("--tls-cert") && refused.contains("--insecure-listen"), "{refused}");
    world.config.gateway_listen = Some("0.0.0.0:0".parse().unwrap());
    assert!(matches!(start_error(&world, "127.0.0.1:0").await, StartError::Exposed(_)), "the dataplane's listener requires TLS too");
    for allowed in ["insecure", "tls"] {
        let (mut world, authority) = (World::new(), TestAuthority::new());
        world.config.insecure_listen = allowed == "insecure";
        world.config.tls = (allowed == "tls").then(|| files(&authority.sign("broker")));
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let config = world.whole_config().await;
        Broker::start_with_clock(config, world.provider.clone(), listener, Arc::new(SystemClock)).await.map(drop).unwrap();
    }
}

#[tokio::test]
async fn unusable_certificate_files_are_named_with_the_reason() {
    let authority = TestAuthority::new();
    let (good, other) = (authority.sign("good"), authority.sign("other"));
    let junk = authority.path("junk");
    std::fs::write(&junk, "no PEM").unwrap();
    let large = authority.path("large");
    std::fs::write(&large, vec![b'x'; 1 << 20]).unwrap();
    let missing = authority.path("missing");
    for (cert, key, file, words) in [
        (&missing, &good.key, &missing, "can't be read"),
        (&good.cert, &missing, &missing, "can't be read"),
        (&junk, &good.key, &junk, "no PEM certificate"),
        (&good.cert, &junk, &junk, "no PEM private key"),
        (&good.cert, &good.cert, &good.cert, "no PEM private key"),
        (&good.cert, &large, &large, "larger than"),
        (&good.cert, &other.key, &other.key, "don't match"),
    ] {
        let mut world = World::new();
        world.config.tls = Some(TlsFiles { cert: cert.clone(), key: key.clone() });
        let error = start_error(&world, "127.0.0.1:0").await.to_string();
        assert!(error.contains(text(file)) && error.contains(words), "{error}");
        assert!(!error.contains("PRIVATE KEY--"), "{error}");
    }
}
