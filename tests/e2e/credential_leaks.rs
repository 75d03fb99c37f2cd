//! After every feature was used and misused, no key or token is found where it must not be: logs, events, audit,
//! errors, database files, boxd's memory, data visible to programs in a sandbox.

use std::{
    fs,
    io::{Read, Seek, SeekFrom},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use base64::{
    Engine,
    engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD},
};
use cobox_client::{Client, EventsFrom, Upload};
use cobox_protocol::{
    ErrorCode, Secret,
    key::{CreateKey, PrincipalKind},
    session::{Mode, NegotiateResponse, RefreshRequest},
};
use cobox_testkit::{BrokerOptions, EVENT_TIMEOUT, TestBroker, TestDatabase, eventually, negotiate, sh};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

/// Larger files are a sandbox's disk, which is searched from inside.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Secrets that must not be found, each under a name for failure messages.
#[derive(Clone, Default)]
struct Secrets(Vec<(String, Vec<u8>)>);

impl Secrets {
    /// Adds the secret as it is, in hexadecimal, and in base64 at each of the three alignments within a group.
    fn add(&mut self, name: &str, secret: &[u8]) {
        let hex: String = secret.iter().map(|b| format!("{b:02x}")).collect();
        let mut forms = vec![secret.to_vec(), hex.to_uppercase().into_bytes(), hex.into_bytes()];
        for skip in 0..3 {
            let whole = &secret[skip.min(secret.len())..];
            let whole = &whole[..whole.len() / 3 * 3];
            forms.push(STANDARD_NO_PAD.encode(whole).into_bytes());
            forms.push(URL_SAFE_NO_PAD.encode(whole).into_bytes());
        }
        self.0.extend(forms.into_iter().map(|form| (name.to_owned(), form)));
    }

    fn add_key(&mut self, name: &str, key: &Secret) {
        // The id part of a key is public.
        let secret = &key.expose()[key.expose().len() - 43..];
        self.add(name, secret.as_bytes());
        self.add(&format!("{name}, decoded"), &URL_SAFE_NO_PAD.decode(secret).unwrap());
    }

    fn add_token(&mut self, name: &str, token: &Secret) {
        // A token's claims are public; only its signature is secret.
        self.add(name, token.expose().rsplit('.').next().unwrap().as_bytes());
    }

    fn found_in(&self, text: &[u8]) -> Option<&str> {
        // Fast path: most pairs of bytes begin no secret.
        let pair = |bytes: &[u8]| usize::from(bytes[0]) << 8 | usize::from(bytes[1]);
        let mut begins = vec![false; 1 << 16];
        self.0.iter().for_each(|(_, needle)| begins[pair(needle)] = true);
        text.windows(2)
            .enumerate()
            .filter(|(_, two)| begins[pair(two)])
            .find_map(|(at, _)| self.0.iter().find(|(_, needle)| text[at..].starts_with(needle)).map(|(name, _)| name.as_str()))
    }

    #[track_caller]
    fn assert_absent_from(&self, place: &str, text: &[u8]) {
        if let Some(name) = self.found_in(text) {
            panic!("{place} has {name}");
        }
    }

    /// Searches every file below a directory, except those.
    fn assert_absent_below(&self, directory: &Path, except: &[PathBuf]) -> usize {
        let mut count = 0;
        let mut left = vec![directory.to_owned()];
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                let (path, Ok(kind)) = (entry.path(), entry.file_type()) else { continue };
                if kind.is_dir() {
                    left.push(path);
                } else if kind.is_file() && !except.contains(&path) && entry.metadata().is_ok_and(|m| m.len() <= MAX_FILE_BYTES) {
                    self.assert_absent_from(&path.display().to_string(), &fs::read(&path).unwrap_or_default());
                    count += 1;
                }
            }
        }
        count
    }
}

/// All readable and writable memory of a process.
fn memory_of(pid: i32) -> Vec<u8> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its maps");
    let mut memory = fs::File::open(format!("/proc/{pid}/mem")).expect("its memory");
    let mut all = Vec::new();
    for line in maps.lines().filter(|l| l.split(' ').nth(1).is_some_and(|p| p.starts_with("rw"))) {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let (from, to) = (u64::from_str_radix(from, 16).unwrap(), u64::from_str_radix(to, 16).unwrap());
        let mut region = vec![0; usize::try_from(to - from).unwrap()];
        // Some pages of a region can't be read; they contain no data.
        if memory.seek(SeekFrom::Start(from)).is_ok() && memory.read_exact(&mut region).is_ok() {
            all.extend(region);
        }
    }
    all
}

#[test]
fn a_planted_secret_is_found_in_every_form() {
    let mut secrets = Secrets::default();
    let secret = b"0123456789abcdef0123456789ABCDEF";
    secrets.add("planted", secret);
    let in_base64 = |before: &str| STANDARD_NO_PAD.encode([before.as_bytes(), secret, b"after"].concat());
    let hex: String = secret.iter().map(|b| format!("{b:02x}")).collect();
    for text in [
        format!("log {} end", String::from_utf8_lossy(secret)),
        format!("x{hex}"),
        hex.to_uppercase(),
        in_base64(""),
        in_base64("a"),
        in_base64("ab"),
        in_base64("abc"),
    ] {
        assert_eq!(secrets.found_in(text.as_bytes()), Some("planted"), "{text}");
    }
    assert_eq!(secrets.found_in(b"0123456789abcdef0123456789ABCDEE and nothing else"), None);
    let mut key = Secrets::default();
    key.add_key("key", &Secret::new(format!("cbx_01j8xq6x0ye8rf2zt9n5b3c7dm_{}", URL_SAFE_NO_PAD.encode(secret))));
    assert!(key.found_in(secret).is_some() && key.found_in(&memory_of(std::process::id().cast_signed())).is_some());
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("below")).unwrap();
    fs::write(dir.path().join("below/file"), hex).unwrap();
    let searched = std::panic::catch_unwind(|| secrets.assert_absent_below(dir.path(), &[]));
    assert!(searched.is_err());
}

/// Sends requests as any client could, and keeps the responses to search them.
struct Prober {
    http: reqwest::Client,
    answers: Vec<u8>,
}

impl Prober {
    async fn send(&mut self, request: reqwest::RequestBuilder) -> u16 {
        let answer = request.send().await.expect("an answer");
        let status = answer.status().as_u16();
        self.answers.extend(format!("{:?}", answer.headers()).into_bytes());
        if status >= 400 {
            self.answers.extend(answer.bytes().await.unwrap_or_default());
        }
        status
    }
}

/// Puts a credential everywhere a user might put it by mistake.
async fn misuse(prober: &mut Prober, url: &str, info: &NegotiateResponse, secret: &str, api_key: &str) {
    let (session, sandbox) = (&info.session_id, &info.sandbox.id);
    for path in [
        format!("/v1/sandbox/sessions/{secret}"),
        format!("/v1/sandbox/sessions/{secret}/events"),
        format!("/v1/sandboxes/{secret}"),
        format!("/v1/sandboxes?tag={secret}&cursor={secret}"),
        format!("/v1/keys/{secret}"),
        format!("/v1/audit?sandbox={secret}&cursor={secret}"),
        format!("/dp/{secret}/v1/exec"),
        format!("/v1/sandbox/relay/{secret}/v1/exec"),
        format!("/threads/{secret}x/sandbox"),
        format!("/v1/snapshots/{secret}"),
        format!("/v1/volumes/{secret}"),
        format!("/v2/sandboxes/boxes/{secret}"),
        format!("/v2/sandboxes/boxes?cursor={secret}&created_by={secret}"),
        format!("/v2/sandboxes/snapshots/{secret}:{secret}"),
        format!("/v2/sandboxes/templates/{secret}"),
        format!("/api/v2/sandboxes/volumes/{secret}"),
        format!("/api/v2/sandboxes/pools/{secret}"),
        format!("/{secret}?{secret}"),
    ] {
        for header in [api_key, secret, "nonsense"] {
            let status = prober.send(prober.http.get(format!("{url}{path}")).bearer_auth(header)).await;
            assert!(status >= 400, "{path}: {status}");
        }
    }
    let wrong = secret.to_owned() + "x";
    for credential in [&wrong, secret] {
        for request in [
            prober.http.get(format!("{url}/v1/sandboxes")).header("x-api-key", credential),
            prober.http.get(format!("{url}/v1/sandboxes")).header("authorization", format!("Basic {credential}")),
            prober.http.post(format!("{url}/dp/{sandbox}/v1/exec")).header("cookie", credential.to_string()).bearer_auth(&wrong).body("{}"),
        ] {
            prober.send(request).await;
        }
    }
    let sessions = format!("{url}/v1/sandbox/sessions");
    for (to, body) in [
        (sessions.clone(), json!({ "thread_id": "t", "mode": secret }).to_string()),
        (sessions.clone(), json!({ "thread_id": "t", "mode": "get", "scopes": [secret] }).to_string()),
        (sessions.clone(), json!({ "thread_id": "t", "mode": "get", "sandbox_hint": secret }).to_string()),
        (sessions.clone(), json!({ "thread_id": "without a session", "mode": "ensure", "template": secret }).to_string()),
        (sessions.clone(), json!({ "thread_id": "t", "mode": "ensure", "provider_preference": secret }).to_string()),
        (sessions.clone(), format!("{{\"{secret}\": ")),
        (sessions.clone(), format!("\"{secret}\"")),
        (format!("{sessions}/{session}/refresh"), json!({ "current_token": wrong }).to_string()),
        (format!("{sessions}/{session}/refresh"), json!({ "current_token": api_key }).to_string()),
        (format!("{url}/v1/keys"), json!({ "name": "x", "kind": secret }).to_string()),
        (format!("{url}/v2/sandboxes/boxes"), json!({ "template_name": secret }).to_string()),
        (format!("{url}/v2/sandboxes/boxes"), json!({ "snapshot": secret }).to_string()),
        (format!("{url}/v2/sandboxes/boxes"), json!({ "volumes": [{ "volume": secret, "mount_path": "/x" }] }).to_string()),
        (format!("{url}/v2/sandboxes/boxes"), json!({ "run_config": { "user": secret } }).to_string()),
        (format!("{url}/v2/sandboxes/snapshots"), json!({ "name": "x", "docker_image": secret }).to_string()),
        (format!("{url}/v2/sandboxes/templates"), json!({ "name": "x", "image": secret }).to_string()),
        (format!("{url}/v2/sandboxes/volumes"), json!({ "name": "x", "size": secret }).to_string()),
        (format!("{url}/v2/sandboxes/pools"), json!({ "name": "x", "template_name": secret, "replicas": 1 }).to_string()),
    ] {
        let status = prober.send(prober.http.post(&to).bearer_auth(api_key).body(body.clone())).await;
        assert!(status >= 400, "{to} {body}: {status}");
    }
}

/// The same for requests to the sandbox itself, which forwards the value unchanged: a token can't be distinguished
/// from a file name.
async fn misuse_inside(prober: &mut Prober, base: &str, token: &str, api_key: &str) {
    for path in [format!("files/workspace/{token}"), format!("files/workspace/x?token={token}"), token.to_owned()] {
        let status = prober.send(prober.http.get(format!("{base}/{path}")).bearer_auth(api_key)).await;
        assert!(status >= 400, "{path}: {status}");
    }
    for (route, body) in [
        ("exec", json!({ "command": "true", "cwd": token })),
        ("fs/stat", json!({ "path": format!("/workspace/{token}") })),
        ("fs/move", json!({ "from": format!("/workspace/{token}"), "to": "/workspace/b" })),
    ] {
        let status = prober.send(prober.http.post(format!("{base}/{route}")).bearer_auth(api_key).body(body.to_string())).await;
        assert!(status >= 400, "{body}: {status}");
    }
}

/// Shells and commands over WebSockets, with the token in the first frame.
async fn sockets(info: &NegotiateResponse, token: &Secret) {
    let url = format!("{}/shell/ws", info.sandbox.ws_base_url);
    let address = url.trim_start_matches("ws://").split('/').next().unwrap();
    let stream = tokio::net::TcpStream::connect(address).await.expect("a connection");
    let (mut socket, _) = tokio_tungstenite::client_async(&url, stream).await.expect("a socket");
    for frame in [
        json!({ "type": "auth", "token": token }),
        json!({ "type": "start", "cols": 80, "rows": 24 }),
        json!({ "type": "stdin", "data": "env; exit\n" }),
    ] {
        socket.send(Message::text(frame.to_string())).await.unwrap();
    }
    while let Ok(Some(Ok(message))) = tokio::time::timeout(EVENT_TIMEOUT, socket.next()).await {
        if message.to_text().is_ok_and(|t| t.contains("\"exit\"")) {
            break;
        }
    }
}

async fn assert_no_leaks_in_a_full_run(options: BrokerOptions, database: Option<&TestDatabase>) {
    let broker = TestBroker::start_with(options).await;
    let url = broker.url().to_owned();
    // First, because it chooses the process's TLS provider.
    let operator = broker.client();
    let mut prober = Prober { http: reqwest::Client::builder().no_proxy().build().unwrap(), answers: Vec::new() };
    let mut keys = Secrets::default();
    let master = fs::read(broker.data_dir().join("master.key")).unwrap();
    keys.add("the master key", &master);
    keys.add_key("the operator's key", broker.key());
    let mut named = Vec::new();
    for (name, kind) in [("ann", PrincipalKind::Human), ("bot", PrincipalKind::Agent), ("gone", PrincipalKind::Human)] {
        let request = CreateKey { name: name.into(), kind, workspace: None, expires_at: None };
        let made = operator.create_key(&request).await.unwrap();
        keys.add_key(&format!("{name}'s key"), &made.api_key);
        named.push(made);
    }
    let [ann_key, bot_key, gone_key] = <[_; 3]>::try_from(named).unwrap();
    let client = |key: &Secret| Client::new(&url, key.clone()).unwrap();
    let (ann, bot, gone) = (client(&ann_key.api_key), client(&bot_key.api_key), client(&gone_key.api_key));

    let mut all = keys.clone();
    let mine = ann.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap();
    let mut tokens = vec![mine.token.clone(), bot.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap().token];
    tokens.push(gone.negotiate(&negotiate("t", Mode::Ensure)).await.unwrap().token);
    tokens.push(ann.get_session(&mine.session_id).await.unwrap().token);
    let rotate = RefreshRequest { current_token: Some(mine.token.clone()), rotate: Some(true), ..RefreshRequest::default() };
    tokens.push(ann.refresh(&mine.session_id, &rotate).await.unwrap().token);
    ann.heartbeat(&mine.session_id).await.unwrap();
    for (method, path) in [(http::Method::POST, "/threads/t/sandbox"), (http::Method::GET, "/capabilities?thread_id=t")] {
        let answer = prober.http.request(method, format!("{url}{path}")).bearer_auth(ann_key.api_key.expose()).send().await.unwrap();
        let response: Value = answer.error_for_status().unwrap().json().await.unwrap();
        let token = response.get("token").or(response.pointer("/services/sandbox/token")).and_then(Value::as_str);
        tokens.push(Secret::new(token.expect("a token")));
    }
    // Delegated tokens, opaque ones, and links.
    let own = format!("/v1/sandbox/sessions/{}", mine.session_id);
    let ask = async |path: &str, body: Value| -> Value {
        let asked = prober.http.post(format!("{url}{path}")).bearer_auth(ann_key.api_key.expose()).body(body.to_string());
        asked.send().await.unwrap().error_for_status().unwrap().json().await.unwrap()
    };
    let token_of = |answer: &Value| Secret::new(answer["token"].as_str().expect("a token"));
    tokens.push(token_of(&ask(&format!("{own}/delegate"), json!({ "capabilities": ["fs_read"] })).await));
    tokens.push(token_of(&ask(&format!("{own}/delegate"), json!({ "capabilities": ["exec"], "parent_token": tokens[1] })).await));
    ask(&format!("{own}/share"), json!({ "principal": "bot", "capabilities": ["fs_read"] })).await;
    let opaque = json!({ "thread_id": "t", "mode": "get", "token_format": "opaque" });
    let opaque = token_of(&ask("/v1/sandbox/sessions", opaque).await);
    all.add("an opaque token", &opaque.expose().as_bytes()[opaque.expose().len() - 32..]);
    let link = ask(&format!("{own}/file-links"), json!({ "path": "/workspace/a.txt", "method": "GET" })).await;
    let link = link["url"].as_str().expect("a link").to_owned();
    all.add("a file link", &link.as_bytes()[link.len() - 40..]);
    tokens.iter().enumerate().for_each(|(n, token)| all.add_token(&format!("token {n}"), token));

    // The same through the LangSmith API.
    let made = ask("/v2/sandboxes/boxes", json!({ "name": "box", "labels": { "a": "b" } })).await;
    let download = ask("/v2/sandboxes/boxes/box/download-url", json!({ "path": "/workspace/f" })).await;
    let download = download["token"].as_str().expect("a link").to_owned();
    all.add("a download URL", &download.as_bytes()[download.len() - 40..]);
    ask("/v2/sandboxes/boxes/box/snapshot", json!({ "name": "kept" })).await;
    let base = made["dataplane_url"].as_str().unwrap();
    for request in [
        prober.http.post(format!("{base}/execute")).body(json!({ "command": "echo x > f" }).to_string()),
        prober.http.get(format!("{base}/download?path=f")),
    ] {
        assert_eq!(prober.send(request.header("x-api-key", ann_key.api_key.expose())).await, 200);
    }

    // Requests through the gateway, with a key and with a token.
    let session = ann.open(&negotiate("t", Mode::Ensure)).await.unwrap();
    all.add_token("the session's token", &session.info().token);
    sh(session.dataplane(), "echo hello").await;
    session.dataplane().write_file(b"/workspace/a.txt", None, Upload::from_bytes("hello")).await.unwrap();
    sh(&ann.sandbox(&mine.sandbox.id), "echo by key").await;
    for stream in ["text/event-stream", "*/*"] {
        let request = prober.http.post(format!("{}/exec", mine.sandbox.http_base_url)).header("accept", stream);
        let ran =
            request.header("x-api-key", bot_key.api_key.expose()).body(json!({ "command": "true" }).to_string()).send().await.unwrap();
        ran.error_for_status().unwrap().bytes().await.unwrap();
    }
    assert_eq!(prober.send(prober.http.get(&link)).await, 200);
    let by_opaque = prober.http.post(format!("{}/exec", mine.sandbox.http_base_url)).bearer_auth(opaque.expose());
    assert_eq!(prober.send(by_opaque.body(json!({ "command": "true" }).to_string())).await, 200);
    for token in [&opaque, &tokens[1]] {
        let introspect = prober.http.post(format!("{url}/internal/tokens/introspect")).bearer_auth(broker.key().expose());
        prober.send(introspect.header("content-type", "application/x-www-form-urlencoded").body(format!("token={}", token.expose()))).await;
        let get = prober.http.get(format!("{url}/internal/tokens/{}", token.expose())).bearer_auth(broker.key().expose());
        assert_eq!(prober.send(get).await, 200);
    }
    // Other headers of a request that the gateway forwards.
    let with_everything = prober.http.get(format!("{}/files/workspace/a.txt", mine.sandbox.http_base_url)).bearer_auth(tokens[1].expose());
    let with_everything = with_everything.header("cookie", format!("k={}", ann_key.api_key.expose()));
    assert_eq!(prober.send(with_everything).await, 200);
    sockets(&mine, &tokens[1]).await;
    misuse_inside(&mut prober, &mine.sandbox.http_base_url, tokens[1].expose(), ann_key.api_key.expose()).await;
    for secret in [ann_key.api_key.expose(), tokens[1].expose(), gone_key.api_key.expose(), opaque.expose()] {
        misuse(&mut prober, &url, &mine, secret, broker.key().expose()).await;
    }
    operator.revoke_key(&gone_key.info.id).await.unwrap();
    assert!(gone.heartbeat(&mine.session_id).await.unwrap_err().is(ErrorCode::Unauthenticated));
    prober.send(prober.http.post(format!("{}/exec", mine.sandbox.http_base_url)).bearer_auth(tokens[2].expose()).body("{}")).await;

    // Everything that a program in the sandbox can see.
    let look = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; \
                find / -xdev -type f -size -1024k -exec cat {} + 2>/dev/null; cat /workspace/a.txt; true";
    let seen = sh(session.dataplane(), look).await;
    assert!(seen.stdout.contains("hello") && !seen.truncated);
    all.assert_absent_from("what a program sees", seen.stdout.as_bytes());
    all.assert_absent_from(
        "what a program sees",
        &STANDARD_NO_PAD.decode(seen.stdout_b64.unwrap_or_default().trim_end_matches('=')).unwrap_or_default(),
    );

    // boxd must know tokens to verify them, but never a key.
    let (_, pid) = broker.sandbox_pids().into_iter().find(|(id, _)| *id == mine.sandbox.id.as_str()).expect("it runs");
    let memory = memory_of(pid);
    let mut known = Secrets::default();
    known.add("its own id", mine.sandbox.id.as_str().as_bytes());
    assert!(known.found_in(&memory).is_some(), "boxd's memory was not read");
    keys.assert_absent_from("boxd's memory", &memory);

    // All recorded output.
    let mut events = Vec::new();
    let mut stream = ann.events(&mine.session_id, EventsFrom::Start);
    ann.release(&mine.session_id).await.unwrap();
    while let Some(event) = tokio::time::timeout(EVENT_TIMEOUT, stream.next()).await.expect("it ends").unwrap() {
        events.extend(serde_json::to_vec(&event).unwrap());
    }
    assert!(String::from_utf8_lossy(&events).contains("echo hello"));
    all.assert_absent_from("the events", &events);
    let audit = eventually("all uses to be in the audit", || {
        let exported = broker.cobox().args(["audit", "export"]).output().expect("cobox runs").stdout;
        async { String::from_utf8_lossy(&exported).contains("dataplane.used").then_some(exported) }
    })
    .await;
    all.assert_absent_from("the audit", &audit);
    all.assert_absent_from("an answer to a wrong request", &prober.answers);
    assert!(prober.answers.windows(10).any(|w| w == b"[redacted]"), "nothing was redacted: the misuse had no effect");
    let log = broker.log();
    assert!(log.contains("request") && log.lines().count() > 200, "it should log everything");
    all.assert_absent_from("the log", log.as_bytes());
    let data = broker.data_dir();
    // Files that contain a key on purpose; only the broker's user may read them.
    let own = ["master.key", "api_key"].map(|name| data.join(name));
    for file in &own {
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600, "{}", file.display());
    }
    let searched = all.assert_absent_below(&data, &own);
    assert!(searched >= 3, "only {searched} files were searched");
    if let Some(database) = database {
        assert!(all.assert_absent_below(&database.server_dir(), &[]) > 100);
        let dump = database.sql("SELECT row_to_json(a) FROM audit a UNION ALL SELECT row_to_json(e) FROM events e UNION ALL SELECT row_to_json(k) FROM api_keys k");
        assert!(dump.contains("token.issued"));
        all.assert_absent_from("a dump", dump.as_bytes());
    }
}

#[tokio::test]
async fn no_credential_leaks_in_a_full_run() {
    assert_no_leaks_in_a_full_run(BrokerOptions { is_verbose: true, ..BrokerOptions::default() }, None).await;
}

#[tokio::test]
async fn no_credential_leaks_with_postgres_and_json_logs() {
    let database = TestDatabase::new().await;
    let options = BrokerOptions { database: Some(database.secret_url()), is_verbose: true, ..BrokerOptions::default() };
    assert_no_leaks_in_a_full_run(options, Some(&database)).await;
}
