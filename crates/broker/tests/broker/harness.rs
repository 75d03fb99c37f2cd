//! Test harness: a broker on a free port in its own runtime, so that it can be killed like a process, and a client for
//! it.

use std::{
    os::unix::fs::PermissionsExt,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use axum::body::Bytes;
use cobox_broker::{Broker, Clock, Config, TraceSink, store::PageParams};
use cobox_protocol::{SandboxId, Secret, Timestamp, key::PrincipalKind};
use cobox_testkit::TestDatabase;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{net::TcpStream, runtime::Runtime, sync::OnceCell};

use crate::{fake_provider::FakeProvider, openapi::must_be_documented};

/// The newest audit records; the limit is above the number that a test creates.
pub const NEWEST: PageParams = PageParams { before: None, limit: 100 };

/// A clock that advances only when a test does so.
pub struct ManualClock {
    seconds: AtomicI64,
    /// Total adjustment, in seconds.
    moved: AtomicI64,
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_unix(self.seconds.load(Ordering::SeqCst))
    }
    /// Follows the real time, so that it can be compared with a database's clock.
    fn unix_millis(&self) -> i64 {
        cobox_broker::SystemClock.unix_millis() + self.moved.load(Ordering::SeqCst) * 1000
    }
}

impl ManualClock {
    /// A copy of this clock that is ahead by the given number of seconds.
    pub fn ahead(&self, seconds: i64) -> Arc<Self> {
        let ahead = Self { seconds: AtomicI64::new(self.now().unix()), moved: AtomicI64::default() };
        ahead.advance(seconds);
        Arc::new(ahead)
    }

    pub fn advance(&self, seconds: i64) {
        self.seconds.fetch_add(seconds, Ordering::SeqCst);
        self.moved.fetch_add(seconds, Ordering::SeqCst);
    }
}

/// State that outlives a broker: its data directory, its sandboxes and the time.
pub struct World {
    _dir: tempfile::TempDir,
    pub provider: Arc<FakeProvider>,
    pub clock: Arc<ManualClock>,
    pub config: Config,
    /// Replaces the file with `COBOX_TEST_STORE=postgres`: every test here must pass on both.
    database: OnceCell<TestDatabase>,
    is_sqlite: bool,
}

pub struct TestBroker {
    runtime: Option<Runtime>,
    pub broker: Option<Arc<Broker>>,
    pub addr: std::net::SocketAddr,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Ticks are triggered by the tests. Deleted sandboxes are erased immediately, except in the tests of restoring
        // them.
        let config =
            Config { data_dir: dir.path().join("data"), reaper_interval_ms: 3_600_000, keep_deleted_seconds: 0, ..Config::default() };
        let clock = Arc::new(ManualClock { seconds: AtomicI64::new(Timestamp::now().unix()), moved: AtomicI64::default() });
        Self { _dir: dir, provider: FakeProvider::new(), clock, config, database: OnceCell::new(), is_sqlite: false }
    }

    /// Several nodes of one deployment: they share a PostgreSQL, a master key and the time.
    pub fn cluster(database: &TestDatabase, size: usize) -> Vec<Self> {
        let mut worlds: Vec<Self> = (0..size).map(|_| Self::new()).collect();
        let clock = worlds[0].clock.clone();
        for world in &mut worlds {
            world.clock = clock.clone();
            world.config.database_url = Some(database.secret_url());
            std::fs::create_dir(&world.config.data_dir).unwrap();
            let key = world.config.data_dir.join("master.key");
            std::fs::write(&key, [42; 32]).unwrap();
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        worlds
    }

    /// Uses SQLite even if PostgreSQL is selected for this run: for tests of the database's disk.
    pub fn with_sqlite() -> Self {
        Self { is_sqlite: true, ..Self::new() }
    }

    /// The configuration with the database selected for this run.
    pub async fn whole_config(&self) -> Config {
        let mut config = self.config.clone();
        if config.database_url.is_none() && !self.is_sqlite && std::env::var("COBOX_TEST_STORE").is_ok_and(|s| s == "postgres") {
            config.database_url = Some(self.database.get_or_init(TestDatabase::new).await.secret_url());
        }
        config
    }

    pub async fn start(&self) -> TestBroker {
        self.start_tracing(None).await
    }

    /// With a sink for the spans of requests.
    pub async fn start_tracing(&self, sink: Option<Arc<dyn TraceSink>>) -> TestBroker {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (config, provider, clock) = (self.whole_config().await, self.provider.clone(), self.clock.clone());
        let (broker, addr) = runtime
            .spawn(async move {
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                let addr = listener.local_addr().unwrap();
                let mut broker = Broker::start_with_clock(config, provider, listener, clock).await.unwrap();
                if let Some(sink) = sink {
                    broker.trace_to(sink);
                }
                (Arc::new(broker), addr)
            })
            .await
            .unwrap();
        let serving = broker.clone();
        runtime.spawn(async move { serving.run(std::future::pending()).await });
        TestBroker { runtime: Some(runtime), broker: Some(broker), addr }
    }
}

impl TestBroker {
    /// Stops everything immediately, as with kill -9; nothing is finished.
    pub async fn kill(mut self) {
        self.broker = None;
        let runtime = self.runtime.take().unwrap();
        tokio::task::spawn_blocking(move || runtime.shutdown_timeout(Duration::from_secs(10))).await.unwrap();
    }

    pub async fn tick(&self) {
        let broker = self.broker.clone().unwrap();
        self.runtime.as_ref().unwrap().spawn(async move { broker.tick().await }).await.unwrap();
    }

    /// Advances the time as on a machine that doesn't sleep: with a reaper round at least every 30 seconds.
    pub async fn run_for(&self, clock: &ManualClock, seconds: i64) {
        const STEP: i64 = 30;
        for passed in (0..seconds).step_by(STEP as usize) {
            clock.advance(STEP.min(seconds - passed));
            self.tick().await;
        }
    }

    pub async fn key(&self, name: &str, kind: PrincipalKind) -> Client {
        let key = self.broker.as_ref().unwrap().bootstrap_key(name, kind).await.unwrap();
        Client { addr: self.addr, key: Some(key) }
    }

    pub async fn human(&self, name: &str) -> Client {
        self.key(name, PrincipalKind::Human).await
    }

    /// A human of another workspace.
    pub async fn stranger(&self) -> Client {
        let operator = self.key("root", PrincipalKind::Operator).await;
        let made = operator.post("/v1/keys", json!({ "name": "eve", "kind": "human", "workspace": "elsewhere" })).await.ok(201);
        Client { addr: self.addr, key: Some(Secret::new(made["api_key"].as_str().unwrap())) }
    }
}

impl Drop for TestBroker {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[derive(Clone)]
pub struct Client {
    pub addr: std::net::SocketAddr,
    pub key: Option<Secret>,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub bytes: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or(Value::Null)
    }
    /// The message of an error.
    pub fn message(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap_or_default().to_owned()
    }
    #[track_caller]
    pub fn ok(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.bytes));
        self.json()
    }
    /// The error's code, after checking that envelope and status match it.
    #[track_caller]
    pub fn error(self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.bytes));
        let error = &self.json()["error"];
        assert_eq!(error["request_id"].as_str().unwrap(), self.headers["x-request-id"].to_str().unwrap());
        error["code"].as_str().unwrap().to_owned()
    }
}

impl Client {
    pub async fn send(&self, mut request: Request<Full<Bytes>>) -> Answer {
        if let (Some(key), false) = (&self.key, request.headers().contains_key("authorization")) {
            request.headers_mut().insert("authorization", format!("Bearer {}", key.expose()).parse().unwrap());
        }
        // The documentation covers the routes under the broker's own host.
        let is_own = !request.headers().contains_key("host");
        if is_own {
            request.headers_mut().insert("host", "broker".parse().unwrap());
        }
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let stream = TcpStream::connect(self.addr).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
        if is_own {
            must_be_documented(&method, &path, parts.status);
        }
        Answer { status: parts.status, headers: parts.headers, bytes: body.collect().await.unwrap().to_bytes() }
    }

    pub async fn call(&self, method: Method, path: &str, body: Option<Value>, headers: &[(&str, &str)]) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = body.map_or_else(Bytes::new, |b| b.to_string().into());
        self.send(request.body(Full::new(body)).unwrap()).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, None, &[]).await
    }
    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.call(Method::POST, path, Some(body), &[]).await
    }
    pub async fn delete(&self, path: &str) -> Answer {
        self.call(Method::DELETE, path, None, &[]).await
    }
    pub async fn ensure(&self, thread: &str) -> Value {
        self.post("/v1/sandbox/sessions", json!({ "thread_id": thread, "mode": "ensure" })).await.ok(200)
    }
    /// Opens a session's event stream, with additional query and headers.
    pub async fn watch(&self, session: &Value, query: &str, headers: &[(&str, &str)]) -> EventReader {
        let answer = self.begin_watch(session, query, headers).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        EventReader { body: answer.into_body(), text: String::new() }
    }
    pub async fn begin_watch(&self, session: &Value, query: &str, headers: &[(&str, &str)]) -> http::Response<hyper::body::Incoming> {
        let mut request = Request::get(format!("{}/events{query}", session_path(session))).header("host", "broker");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request = request.header("authorization", format!("Bearer {}", self.key.as_ref().unwrap().expose()));
        let stream = TcpStream::connect(self.addr).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(request.body(Full::new(Bytes::new())).unwrap()).await.unwrap()
    }
    /// The state of a sandbox as its owner sees it.
    pub async fn state(&self, sandbox: &SandboxId) -> String {
        let answer = self.get(&format!("/v1/sandboxes/{sandbox}")).await;
        if answer.status == 404 { "gone".into() } else { answer.ok(200)["state"].as_str().unwrap().to_owned() }
    }
    /// The same principal at another broker.
    pub fn at(&self, broker: &TestBroker) -> Client {
        Client { addr: broker.addr, key: self.key.clone() }
    }
    /// Uses a token instead of the key.
    pub fn with(&self, token: &Value) -> Client {
        Client { addr: self.addr, key: Some(Secret::new(token.as_str().unwrap())) }
    }
}

/// Reads server-sent events.
pub struct EventReader {
    body: hyper::body::Incoming,
    text: String,
}

impl EventReader {
    /// The next event's name and data; `None` at the end.
    pub async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| block.lines().find_map(|l| l.strip_prefix(name)).map(str::to_owned);
                let (event, data, id) = (field("event: "), field("data: "), field("id: "));
                self.text = rest.to_owned();
                if let (Some(event), Some(data)) = (event, data) {
                    let data: Value = serde_json::from_str(&data).unwrap();
                    assert!(event == "error" || Some(data["id"].as_str().unwrap()) == id.as_deref());
                    return Some((event, data));
                }
                continue;
            }
            let frame = tokio::time::timeout(Duration::from_secs(20), self.body.frame()).await.expect("something happens");
            match frame {
                Some(frame) => self.text += std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap(),
                None => return None,
            }
        }
    }
    /// The next event, which must be a sandbox event.
    pub async fn event(&mut self) -> Value {
        let (name, data) = self.next().await.expect("the stream goes on");
        assert_eq!(name, "sandbox", "{data}");
        data
    }
    /// The types of all events up to and including the first of this type.
    pub async fn until(&mut self, last: &str) -> Vec<String> {
        let mut types = Vec::new();
        loop {
            let event = self.event().await;
            types.push(event["type"].as_str().unwrap().to_owned());
            if event["type"] == last {
                return types;
            }
        }
    }
}

pub fn sandbox_id(session: &Value) -> SandboxId {
    session["sandbox"]["id"].as_str().unwrap().parse().unwrap()
}

pub fn session_path(session: &Value) -> String {
    format!("/v1/sandbox/sessions/{}", session["session_id"].as_str().unwrap())
}

/// Waits until a condition becomes true in the background.
pub async fn eventually<F: Future<Output = bool>>(what: &str, check: impl Fn() -> F) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !check().await {
        assert!(tokio::time::Instant::now() < deadline, "timed out waiting for: {what}");
        tokio::task::yield_now().await;
    }
}

/// The unverified claims of a token.
pub fn claims(token: &str) -> Value {
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap()).unwrap()
}
