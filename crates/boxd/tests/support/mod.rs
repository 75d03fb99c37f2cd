//! A boxd on real UNIX sockets over a temporary root, with a client and with tokens as the broker would issue them.

#![allow(dead_code, reason = "each test file uses its own part of this")]

pub mod exec_client;
mod programs;
pub mod sdk_client;
pub mod viewer;

use std::{
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use boxd::{FileWorkers, clock::Clock};
use bytes::Bytes;
use cobox_protocol::{
    CapabilitySet, SandboxId, Secret, Timestamp, TokenId,
    control::{Alg, BoxdConfig, BoxdStatus, ControlState, DataplaneLimits, Revocation, Workload, WorkloadLimits},
};
use cobox_token::{Actor, Claims, MasterKey, SigningKey};
use http::{HeaderMap, HeaderName, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::{
    net::{UnixListener, UnixStream},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

pub const EVERYTHING: &str = "fs_read fs_write exec shell";
/// Longer than any step here takes, shorter than the test runner's timeout.
pub const SOON: Duration = Duration::from_secs(10);

/// A program that ignores TERM, a child of it that does too, and a daemon that has left its session and its parents.
pub const DAEMONS: &str = r#"trap "" TERM
echo $$ > pid.self
sleep 1000 &
echo $! > pid.child
setsid sh -c 'trap "" TERM; (setsid sh -c "trap \"\" TERM; echo \$\$ > pid.tmp; mv pid.tmp pid.daemon; sleep 1000 & wait" &) ; exit 0' > /dev/null 2>&1 < /dev/null
wait"#;

/// The pids of [`DAEMONS`], once all of them run.
pub async fn daemons(boxd: &TestBoxd) -> Vec<String> {
    wait_for(|| boxd.host("/workspace/pid.daemon").exists()).await;
    let pids = ["self", "child", "daemon"].map(|n| std::fs::read_to_string(boxd.host(format!("/workspace/pid.{n}"))).unwrap());
    assert!(pids.iter().all(|pid| is_running(pid)), "{pids:?}");
    pids.to_vec()
}

pub async fn wait_for(condition: impl Fn() -> bool) {
    let met = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SOON, met).await.expect("the condition becomes true in time");
}

/// Whether a process is running. A zombie has ended.
pub fn is_running(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).is_ok_and(|s| !s.contains(") Z "))
}

pub struct TestBoxd {
    directory: TempDir,
    pub sandbox_id: SandboxId,
    pub key: SigningKey,
    pub state: ControlState,
    pub shutdown: CancellationToken,
    pub served: Option<JoinHandle<anyhow::Result<()>>>,
    pub clock: Arc<ManualClock>,
}

/// The machine's clock, until it is set.
#[derive(Default)]
pub struct ManualClock {
    offset_seconds: AtomicI64,
    reads: AtomicUsize,
}

impl ManualClock {
    pub fn advance(&self, seconds: i64) {
        self.offset_seconds.fetch_add(seconds, Ordering::SeqCst);
    }

    /// How often something that sleeps has looked at it.
    pub fn reads(&self) -> usize {
        self.reads.load(Ordering::SeqCst)
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_unix(Timestamp::now().unix() + self.offset_seconds.load(Ordering::SeqCst))
    }
    fn recheck_interval(&self) -> Duration {
        self.reads.fetch_add(1, Ordering::SeqCst);
        Duration::from_millis(10)
    }
}

impl TestBoxd {
    pub fn start() -> Self {
        Self::start_with(|_| {})
    }

    pub fn start_with(change: impl FnOnce(&mut BoxdConfig)) -> Self {
        let directory = TempDir::new().unwrap();
        let root = directory.path().join("root");
        std::fs::create_dir_all(root.join("workspace")).unwrap();
        Self::serve(directory, &root, change, || Ok(()))
    }

    pub fn start_limited(limit: impl FnOnce(&mut DataplaneLimits)) -> Self {
        Self::start_with(|config| limit(&mut config.dataplane))
    }

    /// Accesses files as an ordinary user, even if the tests run as root.
    pub fn start_as_a_user() -> Self {
        let directory = TempDir::new().unwrap();
        let root = directory.path().join("root");
        std::fs::create_dir_all(root.join("workspace")).unwrap();
        let is_root = rustix::process::geteuid().is_root();
        Self::serve(directory, &root, |_| {}, move || if is_root { cobox_kernel::set_fs_ids(1000, 1000) } else { Ok(()) })
    }

    /// Over the machine's own root, for what a temporary directory can't contain. Tests must not change anything there.
    pub fn start_over_the_host() -> Self {
        Self::serve(TempDir::new().unwrap(), Path::new("/"), |_| {}, || Ok(()))
    }

    fn serve(
        directory: TempDir,
        root: &Path,
        change: impl FnOnce(&mut BoxdConfig),
        prepare: impl Fn() -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let sandbox_id = SandboxId::new();
        let key = MasterKey::from_bytes([7; 32]).derive(&sandbox_id, 1, Alg::EdDsa);
        let state = ControlState {
            version: 1,
            issuer: "cobox".into(),
            keys: vec![key.verify_spec()],
            revoked: vec![],
            lease_expires_at: Timestamp::now().plus(Duration::from_secs(3600)),
            disk_full: false,
            stop_reason: None,
        };
        let mut config = BoxdConfig {
            sandbox_id: sandbox_id.clone(),
            state,
            workload: Workload {
                uid: 1000,
                gid: 1000,
                user: "box".into(),
                home: "/home/box".into(),
                work_dir: "/workspace".into(),
                uid_count: 1,
                env: Default::default(),
            },
            groups: 0,
            limits: WorkloadLimits { processes: 100, memory_bytes: None, open_files: 1024 },
            dataplane: DataplaneLimits::default(),
        };
        change(&mut config);
        let state = config.state.clone();
        let programs = Arc::new(programs::HostPrograms { work_dir: root.join("workspace") });
        let files = FileWorkers::start(std::fs::File::open(root).unwrap().into(), prepare).unwrap();
        let clients = UnixListener::bind(directory.path().join("clients")).unwrap();
        let control = UnixListener::bind(directory.path().join("control")).unwrap();
        let shutdown = CancellationToken::new();
        let clock = Arc::new(ManualClock::default());
        let served = Some(tokio::spawn(boxd::serve(config, programs, files, (clients, control), clock.clone(), shutdown.clone())));
        Self { directory, sandbox_id, key, state, shutdown, served, clock }
    }

    /// The host's path of a path in the sandbox.
    pub fn host(&self, path: impl AsRef<[u8]>) -> PathBuf {
        let relative = std::ffi::OsStr::from_bytes(path.as_ref().strip_prefix(b"/").unwrap());
        self.directory.path().join("root").join(relative)
    }

    /// A directory outside the root, which no client may reach.
    pub fn outside(&self) -> &Path {
        self.directory.path()
    }

    pub fn claims(&self, scope: &str) -> Claims {
        let now = self.clock.now().unix();
        Claims {
            iss: "cobox".into(),
            sub: "ada".into(),
            aud: self.sandbox_id.clone(),
            sid: Some("ssn_1".into()),
            thread_id: None,
            scope: scope.parse::<CapabilitySet>().unwrap(),
            iat: now,
            nbf: now,
            exp: now + 900,
            jti: TokenId::new().to_string(),
            act: Actor { kind: cobox_protocol::key::PrincipalKind::Human, id: "ada".into() },
            generation: 1,
            grant: "grant-1".into(),
            parent: None,
            via: Vec::new(),
            file: None,
        }
    }

    pub fn token(&self, scope: &str) -> Secret {
        self.key.mint(&self.claims(scope))
    }

    pub async fn dial(&self, socket_name: &str) -> UnixStream {
        UnixStream::connect(self.directory.path().join(socket_name)).await.unwrap()
    }

    pub fn get(&self, path: &str) -> Call<'_> {
        self.call(Method::GET, path)
    }
    pub fn put(&self, path: &str, body: impl Into<Bytes>) -> Call<'_> {
        self.call(Method::PUT, path).body(body)
    }
    pub fn delete(&self, path: &str) -> Call<'_> {
        self.call(Method::DELETE, path)
    }
    pub fn post(&self, path: &str, body: impl Into<Bytes>) -> Call<'_> {
        self.call(Method::POST, path).body(body)
    }

    /// A request with a token that has all capabilities in `EVERYTHING`, unless another token is set.
    pub fn call(&self, method: Method, path: &str) -> Call<'_> {
        let token = format!("Bearer {}", self.token(EVERYTHING).expose());
        Call { boxd: self, socket_name: "clients", request: Request::builder().method(method).uri(path), body: Bytes::new() }
            .header("authorization", &token)
            .header("host", "boxd")
    }

    pub fn control(&self, method: Method, path: &str) -> Call<'_> {
        Call { boxd: self, socket_name: "control", request: Request::builder().method(method).uri(path), body: Bytes::new() }
            .header("host", "boxd")
    }

    /// Pushes these revocations with the next state version.
    pub async fn revoke(&mut self, revoked: Vec<Revocation>) -> BoxdStatus {
        self.state.revoked = revoked;
        self.push().await
    }

    /// Resolves when no request and no shell is active.
    pub async fn idle(&self) {
        while self.control(Method::GET, "/control/status").send().await.json::<BoxdStatus>().open_streams > 0 {}
    }

    pub async fn push(&mut self) -> BoxdStatus {
        self.state.version += 1;
        self.control(Method::PUT, "/control/state").body(serde_json::to_vec(&self.state).unwrap()).send().await.json()
    }
}

pub struct Call<'a> {
    boxd: &'a TestBoxd,
    socket_name: &'static str,
    request: http::request::Builder,
    body: Bytes,
}

impl Call<'_> {
    pub fn header(mut self, name: &str, value: &str) -> Self {
        let headers = self.request.headers_mut().unwrap();
        headers.insert(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        self
    }
    pub fn without(mut self, name: &str) -> Self {
        self.request.headers_mut().unwrap().remove(name);
        self
    }
    pub fn token(self, token: &Secret) -> Self {
        let value = format!("Bearer {}", token.expose());
        self.header("authorization", &value)
    }
    pub fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    /// Returns the response before its body is received.
    pub async fn open(self) -> http::Response<hyper::body::Incoming> {
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(self.boxd.dial(self.socket_name).await)).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(self.request.body(Full::new(self.body)).unwrap()).await.unwrap()
    }

    /// Like [`Call::send`], for use in a task of its own.
    pub fn open_owned(self) -> impl Future<Output = Answer> + use<> {
        let Call { boxd, socket_name, request, body: content } = self;
        let path = boxd.directory.path().join(socket_name);
        async move {
            let io = TokioIo::new(UnixStream::connect(path).await.unwrap());
            let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
            tokio::spawn(connection);
            let (parts, body) = sender.send_request(request.body(Full::new(content)).unwrap()).await.unwrap().into_parts();
            Answer { status: parts.status, headers: parts.headers, body: body.collect().await.unwrap().to_bytes() }
        }
    }

    pub async fn send(self) -> Answer {
        let (parts, body) = self.open().await.into_parts();
        Answer { status: parts.status, headers: parts.headers, body: body.collect().await.unwrap().to_bytes() }
    }
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json<T: serde::de::DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {} {:?}", self.status, self.body))
    }
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name} in {self:?}")).to_str().unwrap()
    }
    /// Asserts an error in the envelope and returns its message.
    pub fn refused(&self, status: u16, code: &str) -> String {
        let json: serde_json::Value = self.json();
        assert_eq!((self.status.as_u16(), json["error"]["code"].as_str()), (status, Some(code)), "{json}");
        assert_eq!(json["error"]["request_id"], self.header("x-request-id"));
        json["error"]["message"].as_str().unwrap().to_owned()
    }
    pub fn ok(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        self
    }
}
