//! TLS on the broker's own listener: real certificates by openssl, real clients: curl, openssl and our own.

use std::{
    path::{Path, PathBuf},
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
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::harness::{TestBroker, World, eventually};

/// An authority and what it signed, in a directory.
struct Authority {
    dir: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let authority = Self { dir: tempfile::tempdir().unwrap() };
        let (key, cert) = (authority.path("ca.key"), authority.path("ca.crt"));
        let new =
            ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test"];
        openssl(new.iter().copied().chain(["-keyout", text(&key), "-out", text(&cert)]));
        authority
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A certificate for this machine under `name`, and its key.
    fn sign(&self, name: &str) -> TlsFiles {
        let files = TlsFiles { cert: self.path(&format!("{name}.crt")), key: self.path(&format!("{name}.key")) };
        let (request, about) = (self.path(&format!("{name}.csr")), self.path(&format!("{name}.ext")));
        std::fs::write(&about, "subjectAltName=IP:127.0.0.1,DNS:localhost\n").unwrap();
        let new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj"];
        let subject = format!("/CN={name}");
        openssl(new.iter().copied().chain([&*subject, "-keyout", text(&files.key), "-out", text(&request)]));
        let sign = ["x509", "-req", "-days", "1", "-CAcreateserial", "-in"];
        let (ca, ca_key) = (self.path("ca.crt"), self.path("ca.key"));
        let rest = [text(&request), "-CA", text(&ca), "-CAkey", text(&ca_key), "-extfile", text(&about), "-out", text(&files.cert)];
        openssl(sign.iter().copied().chain(rest));
        files
    }

    fn pem(&self) -> Vec<u8> {
        std::fs::read(self.path("ca.crt")).unwrap()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn openssl<'a>(args: impl IntoIterator<Item = &'a str>) {
    let output = Command::new("openssl").args(args).output().expect("openssl is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

async fn run(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().expect("the program is installed")).await.unwrap()
}

async fn curl(authority: &Authority, args: &[&str]) -> Output {
    let mut command = Command::new("curl");
    command.args(["-sS", "--noproxy", "*", "--max-time", "20", "--cacert", text(&authority.path("ca.crt"))]).args(args);
    run(command).await
}

/// Whose certificate is shown now.
async fn subject(broker: &TestBroker) -> String {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("openssl s_client -connect {} </dev/null 2>/dev/null | openssl x509 -noout -subject", broker.addr)]);
    String::from_utf8(run(command).await.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn curl_and_our_own_client_speak_to_it_and_urls_say_https() {
    let authority = Authority::new();
    let mut world = World::new();
    world.config.tls = Some(authority.sign("broker"));
    let broker = world.start().await;
    let url = format!("https://{}", broker.addr);

    let answer = curl(&authority, &["--http2", "-w", "%{http_version} %{http_code}", &format!("{url}/healthz")]).await;
    let said = String::from_utf8(answer.stdout).unwrap();
    assert!(said.ends_with("1.1 200"), "{said} {}", String::from_utf8_lossy(&answer.stderr));
    let plain = curl(&authority, &[&format!("http://{}/healthz", broker.addr)]).await;
    assert!(!plain.status.success(), "plain HTTP is not spoken on the same port");

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
async fn a_renewed_certificate_is_shown_without_a_restart_and_a_broken_one_is_not() {
    let authority = Authority::new();
    let (files, other) = (authority.sign("first"), authority.sign("second"));
    let mut world = World::new();
    world.config.tls = Some(files.clone());
    let broker = world.start().await;
    let running = broker.broker.clone().unwrap();
    assert!(subject(&broker).await.ends_with("CN = first"));

    std::fs::copy(&other.cert, &files.cert).unwrap();
    let mismatch = running.reload_tls().unwrap_err().to_string();
    assert!(mismatch.contains("don't belong together"), "{mismatch}");
    assert!(subject(&broker).await.ends_with("CN = first"), "half a renewal changes nothing");
    std::fs::copy(&other.key, &files.key).unwrap();
    assert!(running.reload_tls().unwrap());
    assert!(!running.reload_tls().unwrap(), "nothing has changed since");
    eventually("the new one is shown", async || subject(&broker).await.ends_with("CN = second")).await;
}

#[tokio::test]
async fn one_who_never_shakes_hands_holds_up_nobody() {
    let authority = Authority::new();
    let mut world = World::new();
    world.config.tls = Some(authority.sign("broker"));
    let broker = world.start().await;
    let silent = TcpStream::connect(broker.addr).await.unwrap();
    let mut rude = TcpStream::connect(broker.addr).await.unwrap();
    rude.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut said = Vec::new();
    // An alert or nothing, and the end.
    tokio::time::timeout(Duration::from_secs(20), rude.read_to_end(&mut said)).await.unwrap().unwrap();
    assert!(!said.starts_with(b"HTTP"));
    let answer = curl(&authority, &["-o", "/dev/null", "-w", "%{http_code}", &format!("https://{}/healthz", broker.addr)]).await;
    assert_eq!(answer.stdout, b"200");
    drop(silent);
}

async fn start_error(world: &World, listen: &str) -> StartError {
    let listener = TcpListener::bind(listen).await.unwrap();
    let started = Broker::start_with_clock(world.whole_config().await, world.provider.clone(), listener, Arc::new(SystemClock)).await;
    started.err().expect("it must not start")
}

#[tokio::test]
async fn beyond_this_machine_it_listens_with_tls_or_when_told_to() {
    let mut world = World::new();
    let refused = start_error(&world, "0.0.0.0:0").await.to_string();
    assert!(refused.contains("--tls-cert") && refused.contains("--insecure-listen"), "{refused}");
    world.config.gateway_listen = Some("0.0.0.0:0".parse().unwrap());
    assert!(matches!(start_error(&world, "127.0.0.1:0").await, StartError::Exposed(_)), "the dataplane's own listener too");
    for allowed in ["insecure", "tls"] {
        let (mut world, authority) = (World::new(), Authority::new());
        world.config.insecure_listen = allowed == "insecure";
        world.config.tls = (allowed == "tls").then(|| authority.sign("broker"));
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let config = world.whole_config().await;
        Broker::start_with_clock(config, world.provider.clone(), listener, Arc::new(SystemClock)).await.map(drop).unwrap();
    }
}

#[tokio::test]
async fn files_that_can_not_be_used_are_named_with_what_is_wrong() {
    let authority = Authority::new();
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
        (&good.cert, &other.key, &other.key, "don't belong together"),
    ] {
        let mut world = World::new();
        world.config.tls = Some(TlsFiles { cert: cert.clone(), key: key.clone() });
        let error = start_error(&world, "127.0.0.1:0").await.to_string();
        assert!(error.contains(text(file)) && error.contains(words), "{error}");
        assert!(!error.contains("PRIVATE KEY--"), "{error}");
    }
}
