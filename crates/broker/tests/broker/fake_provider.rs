//! A fake provider whose sandboxes are small HTTP servers on UNIX sockets. It lets the broker be tested with failures
//! at chosen moments, without namespaces, and with a manual clock. The real provider and boxd have their own tests.

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Query, RawQuery, Request, State, WebSocketUpgrade, ws::Message},
    middleware::Next,
    response::{IntoResponse, Response},
    routing::{any, get, post, put},
};
use cobox_protocol::{
    SandboxId, SnapshotId, VolumeId,
    control::{BoxdStatus, ControlState},
    report::{ReportCursor, ReportQuery},
};
use cobox_provider::{
    Adapter, BoxdSocket, BoxedStream, DiskUsage, FailedDisk, HostDisk, ImageUsage, Provider, ProviderError, ProviderFeatures,
    ProviderSandbox, SandboxRoot, SandboxSpec, WrittenFiles,
};
use futures_util::StreamExt;
use http::{HeaderMap, Method, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    runtime::Handle,
    sync::watch,
    task::AbortHandle,
};
use tower::ServiceExt;

/// A request as the fake boxd received it.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub method: Method,
    pub uri: String,
    pub headers: HeaderMap,
}

/// A fake boxd.
pub struct FakeBoxd {
    id: SandboxId,
    received_frames: Arc<Mutex<Vec<Message>>>,
    pub state: Mutex<ControlState>,
    pub seen: Mutex<Vec<ReceivedRequest>>,
    pub requests: AtomicU64,
    pub open_streams: AtomicU32,
    /// Bytes produced for long responses.
    pub produced: AtomicU64,
    pub claims: watch::Sender<FakeClaims>,
    /// The activity that it reports, by number.
    pub activity_items: watch::Sender<Vec<Value>>,
    /// Paths and queries by which its reports were fetched.
    pub fetches: Mutex<Vec<String>>,
    /// Number of fetches that never complete.
    pub withheld: watch::Sender<u32>,
    is_older: bool,
    /// While true, pushes get no response.
    pub ignores_pushes: AtomicBool,
    is_running: watch::Sender<bool>,
    servers: Mutex<Vec<AbortHandle>>,
}

/// The claims that a fake boxd reports.
#[derive(Clone)]
pub enum FakeClaims {
    /// Each time, regardless of what was acknowledged.
    Batch(Value),
    /// A full batch after each cursor.
    Endless,
    /// Fetches never complete.
    Withheld,
}

pub struct FakeProvider {
    dir: tempfile::TempDir,
    /// A runtime separate from the broker's, because sandboxes outlive brokers.
    runtime: Handle,
    pub sandboxes: Mutex<HashMap<SandboxId, Arc<FakeBoxd>>>,
    pub starts: AtomicUsize,
    /// Connections made to boxd's client sockets.
    pub dialled: AtomicUsize,
    pub destroyed: Mutex<Vec<SandboxId>>,
    /// Number of upcoming calls that fail.
    pub failing_starts: AtomicU32,
    pub failing_suspends: AtomicU32,
    pub failing_destroys: AtomicU32,
    /// While false, starts wait.
    pub may_start: watch::Sender<bool>,
    pub disk: Mutex<Option<DiskUsage>>,
    pub host_disk: Mutex<Option<HostDisk>>,
    pub image_usage: Mutex<HashMap<SandboxId, ImageUsage>>,
    pub failed_disks: Mutex<Vec<FailedDisk>>,
    pub can_suspend: AtomicBool,
    /// Response of every boxd to any client request from now on.
    pub raw_response: Mutex<Option<RawResponse>>,
    /// Fake boxds whose clients are answered by another router.
    pub liars: Mutex<HashMap<SandboxId, Router>>,
    /// Replaces boxd.
    pub adapter: Mutex<Option<Arc<dyn Adapter>>>,
    /// Base URL under which clients reach boxd directly.
    pub direct: Mutex<Option<String>>,
    /// Messages received over WebSockets.
    pub received_frames: Arc<Mutex<Vec<Message>>>,
    pub is_ready: AtomicBool,
    /// How often it was asked whether it is ready.
    pub ready_checks: AtomicUsize,
    /// New fake boxds have no route for all reports.
    pub starts_older_boxds: AtomicBool,
    /// The specs with which each sandbox was started.
    pub made_of: Mutex<HashMap<SandboxId, Vec<SandboxSpec>>>,
    /// While false, copies wait.
    pub may_copy: watch::Sender<bool>,
    /// While false, creating and removing volumes and removing snapshots wait.
    pub may_make: watch::Sender<bool>,
    /// What the image resolves to.
    pub image_is: Mutex<Option<String>>,
    pub failing_snapshots: AtomicU32,
    pub failing_volumes: AtomicU32,
    pub snapshots: Mutex<BTreeSet<SnapshotId>>,
    pub volumes: Mutex<BTreeSet<VolumeId>>,
}

/// The only image of this provider.
pub const IMAGE: &str = "python:3";

impl FakeProvider {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            dir: tempfile::tempdir().unwrap(),
            runtime: Handle::current(),
            sandboxes: Mutex::default(),
            starts: AtomicUsize::new(0),
            dialled: AtomicUsize::new(0),
            destroyed: Mutex::default(),
            failing_starts: AtomicU32::new(0),
            failing_suspends: AtomicU32::new(0),
            failing_destroys: AtomicU32::new(0),
            may_start: watch::channel(true).0,
            disk: Mutex::default(),
            host_disk: Mutex::default(),
            image_usage: Mutex::default(),
            failed_disks: Mutex::default(),
            can_suspend: AtomicBool::new(true),
            raw_response: Mutex::default(),
            liars: Mutex::default(),
            adapter: Mutex::default(),
            direct: Mutex::default(),
            received_frames: Arc::default(),
            is_ready: AtomicBool::new(true),
            ready_checks: AtomicUsize::new(0),
            starts_older_boxds: AtomicBool::new(false),
            made_of: Mutex::default(),
            may_copy: watch::channel(true).0,
            may_make: watch::channel(true).0,
            image_is: Mutex::default(),
            failing_snapshots: AtomicU32::new(0),
            failing_volumes: AtomicU32::new(0),
            snapshots: Mutex::default(),
            volumes: Mutex::default(),
        })
    }

    pub fn boxd(&self, id: &SandboxId) -> Arc<FakeBoxd> {
        self.sandboxes.lock().unwrap()[id].clone()
    }

    pub fn running(&self) -> usize {
        self.sandboxes.lock().unwrap().values().filter(|b| *b.is_running.borrow()).count()
    }

    pub fn is_up(&self, id: &SandboxId) -> bool {
        self.sandboxes.lock().unwrap().get(id).is_some_and(|b| *b.is_running.borrow())
    }

    /// Simulates a crash of boxd.
    pub fn kill(&self, id: &SandboxId) {
        self.boxd(id).stop();
    }

    /// Simulates the loss of a disk.
    pub fn lose_disk(&self, id: &SandboxId) {
        self.kill(id);
        self.sandboxes.lock().unwrap().remove(id);
    }

    fn socket(&self, id: &SandboxId, socket: BoxdSocket) -> PathBuf {
        let name = if socket == BoxdSocket::Client { "c" } else { "k" };
        self.dir.path().join(format!("{}.{name}", &id.as_str()[20..]))
    }
}

/// Bytes sent after a request's head by a boxd that violates HTTP.
#[derive(Clone)]
pub struct RawResponse {
    pub first: Vec<u8>,
    /// Sent repeatedly after that, without end.
    pub then: Option<Vec<u8>>,
    pub closes: bool,
}

async fn send_raw_response(raw_response: RawResponse, mut stream: tokio::io::DuplexStream) {
    let mut head = Vec::new();
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        if stream.read_buf(&mut head).await.unwrap_or(0) == 0 {
            return;
        }
    }
    if stream.write_all(&raw_response.first).await.is_err() {
        return;
    }
    while let Some(then) = &raw_response.then {
        if stream.write_all(then).await.is_err() {
            return;
        }
    }
    if !raw_response.closes {
        // Until the gateway closes the connection.
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    }
}

fn fail_if_requested(counter: &AtomicU32) -> Result<(), ProviderError> {
    match counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)) {
        Ok(_) => Err(ProviderError::Unavailable("set to fail".into())),
        Err(_) => Ok(()),
    }
}

#[async_trait]
impl Provider for FakeProvider {
    fn name(&self) -> &'static str {
        "fake"
    }

    async fn ready(&self) -> Result<(), ProviderError> {
        self.ready_checks.fetch_add(1, Ordering::SeqCst);
        let unready = || ProviderError::Unavailable("secret host details".to_owned());
        self.is_ready.load(Ordering::SeqCst).then_some(()).ok_or_else(unready)
    }

    fn features(&self) -> ProviderFeatures {
        ProviderFeatures { snapshots: true, volumes: true }
    }

    fn check_spec(&self, spec: &SandboxSpec) -> Result<(), ProviderError> {
        match &spec.root {
            Some(SandboxRoot::Image(image)) if image != IMAGE => Err(ProviderError::Refused(format!("image: there is no `{image}` here"))),
            _ => Ok(()),
        }
    }

    fn pin_root(&self, spec: SandboxSpec) -> Result<SandboxSpec, ProviderError> {
        let base = spec.base.clone().or_else(|| spec.root.as_ref().and_then(|_| self.image_is.lock().unwrap().clone()));
        Ok(SandboxSpec { base, ..spec })
    }

    fn check_mount_paths(&self, _: &SandboxSpec, paths: &[&str]) -> Result<(), ProviderError> {
        match paths.iter().position(|path| path.starts_with("/taken")) {
            Some(index) => Err(ProviderError::Refused(format!("mounts[{index}].path: is taken"))),
            None => Ok(()),
        }
    }

    async fn start(&self, id: &SandboxId, spec: &SandboxSpec, state: &ControlState) -> Result<(), ProviderError> {
        self.made_of.lock().unwrap().entry(id.clone()).or_default().push(spec.clone());
        self.starts.fetch_add(1, Ordering::SeqCst);
        self.may_start.subscribe().wait_for(|may| *may).await.map_err(|e| ProviderError::Unavailable(e.to_string()))?;
        fail_if_requested(&self.failing_starts)?;
        let boxd = {
            let mut sandboxes = self.sandboxes.lock().unwrap();
            let is_older = self.starts_older_boxds.load(Ordering::SeqCst);
            sandboxes.entry(id.clone()).or_insert_with(|| FakeBoxd::new(id, state, self.received_frames.clone(), is_older)).clone()
        };
        *boxd.state.lock().unwrap() = state.clone();
        if *boxd.is_running.borrow() {
            return Ok(());
        }
        // A new process starts counting at zero.
        boxd.requests.store(0, Ordering::SeqCst);
        let _context = self.runtime.enter();
        for (socket, router) in [(BoxdSocket::Client, boxd.client_router()), (BoxdSocket::Control, boxd.control_router())] {
            let path = self.socket(id, socket);
            let _ = std::fs::remove_file(&path);
            let listener = UnixListener::bind(&path).unwrap();
            let server = self.runtime.spawn(async move { axum::serve(listener, router).await.unwrap() });
            boxd.servers.lock().unwrap().push(server.abort_handle());
        }
        boxd.is_running.send_replace(true);
        Ok(())
    }

    fn can_suspend(&self) -> bool {
        self.can_suspend.load(Ordering::SeqCst)
    }

    async fn suspend(&self, id: &SandboxId) -> Result<(), ProviderError> {
        assert!(self.can_suspend(), "the provider can't suspend, so the broker must not request it");
        fail_if_requested(&self.failing_suspends)?;
        if let Some(boxd) = self.sandboxes.lock().unwrap().get(id) {
            boxd.stop();
        }
        Ok(())
    }

    async fn destroy(&self, id: &SandboxId) -> Result<(), ProviderError> {
        fail_if_requested(&self.failing_destroys)?;
        if let Some(boxd) = self.sandboxes.lock().unwrap().remove(id) {
            boxd.stop();
        }
        self.destroyed.lock().unwrap().push(id.clone());
        Ok(())
    }

    async fn list(&self) -> Result<Vec<ProviderSandbox>, ProviderError> {
        let sandboxes = self.sandboxes.lock().unwrap();
        Ok(sandboxes.iter().map(|(id, b)| ProviderSandbox { id: id.clone(), is_running: *b.is_running.borrow() }).collect())
    }

    async fn is_running(&self, id: &SandboxId) -> bool {
        self.sandboxes.lock().unwrap().get(id).is_some_and(|b| *b.is_running.borrow())
    }

    async fn ended(&self, id: &SandboxId) {
        let Some(boxd) = self.sandboxes.lock().unwrap().get(id).cloned() else { return };
        let _ = boxd.is_running.subscribe().wait_for(|is| !is).await;
    }

    async fn dial(&self, id: &SandboxId, socket: BoxdSocket) -> Result<BoxedStream, ProviderError> {
        if !self.is_running(id).await {
            return Err(ProviderError::NotRunning(id.clone()));
        }
        if matches!(socket, BoxdSocket::Client) {
            self.dialled.fetch_add(1, Ordering::SeqCst);
        }
        if let (BoxdSocket::Client, Some(raw_response)) = (socket, self.raw_response.lock().unwrap().clone()) {
            let (ours, theirs) = tokio::io::duplex(64 * 1024);
            self.runtime.spawn(send_raw_response(raw_response, theirs));
            return Ok(Box::new(ours));
        }
        if let (BoxdSocket::Client, Some(router)) = (socket, self.liars.lock().unwrap().get(id).cloned()) {
            let (ours, theirs) = tokio::io::duplex(64 * 1024);
            let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
                router.clone().oneshot(request.map(Body::new))
            });
            self.runtime.spawn(async move {
                let serving = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(theirs), service);
                // It may close its connections at any time.
                let _ = serving.with_upgrades().await;
            });
            return Ok(Box::new(ours));
        }
        let stream = UnixStream::connect(self.socket(id, socket)).await.map_err(|e| ProviderError::Unavailable(e.to_string()))?;
        Ok(Box::new(stream))
    }

    fn adapter(&self) -> Option<Arc<dyn Adapter>> {
        self.adapter.lock().unwrap().clone()
    }

    fn direct_url(&self, id: &SandboxId) -> Option<String> {
        self.direct.lock().unwrap().as_ref().map(|base| format!("{base}/{id}"))
    }

    async fn take_snapshot(&self, _: &SandboxId, id: &SnapshotId, _: &SandboxSpec) -> Result<u64, ProviderError> {
        self.may_copy.subscribe().wait_for(|may| *may).await.map_err(|e| ProviderError::Unavailable(e.to_string()))?;
        fail_if_requested(&self.failing_snapshots)?;
        self.snapshots.lock().unwrap().insert(id.clone());
        Ok(4096)
    }
    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), ProviderError> {
        self.may_make.subscribe().wait_for(|may| *may).await.map_err(|e| ProviderError::Unavailable(e.to_string()))?;
        self.snapshots.lock().unwrap().remove(id);
        Ok(())
    }
    async fn snapshots(&self) -> Result<Vec<SnapshotId>, ProviderError> {
        Ok(self.snapshots.lock().unwrap().iter().cloned().collect())
    }

    fn check_volume(&self, size_bytes: u64) -> Result<(), ProviderError> {
        if size_bytes <= 1 << 30 { Ok(()) } else { Err(ProviderError::Refused("size: at most a GiB".into())) }
    }
    async fn make_volume(&self, id: &VolumeId, _: u64) -> Result<(), ProviderError> {
        self.may_make.subscribe().wait_for(|may| *may).await.map_err(|e| ProviderError::Unavailable(e.to_string()))?;
        fail_if_requested(&self.failing_volumes)?;
        self.volumes.lock().unwrap().insert(id.clone());
        Ok(())
    }
    async fn remove_volume(&self, id: &VolumeId) -> Result<(), ProviderError> {
        self.may_make.subscribe().wait_for(|may| *may).await.map_err(|e| ProviderError::Unavailable(e.to_string()))?;
        self.volumes.lock().unwrap().remove(id);
        Ok(())
    }
    async fn volumes(&self) -> Result<Vec<VolumeId>, ProviderError> {
        Ok(self.volumes.lock().unwrap().iter().cloned().collect())
    }

    async fn host_disk(&self) -> Option<HostDisk> {
        *self.host_disk.lock().unwrap()
    }
    async fn image_usage(&self, id: &SandboxId, _: &SandboxSpec) -> Option<ImageUsage> {
        self.image_usage.lock().unwrap().get(id).copied()
    }
    async fn failed_disks(&self) -> Vec<FailedDisk> {
        self.failed_disks.lock().unwrap().clone()
    }
    async fn written_files(&self, _: &SandboxId) -> Option<WrittenFiles> {
        Some(WrittenFiles { files: 3, bytes: 300, is_complete: true })
    }

    async fn disk_usage(&self, _: &SandboxId, _: &SandboxSpec) -> Option<DiskUsage> {
        *self.disk.lock().unwrap()
    }
}

impl FakeBoxd {
    fn new(id: &SandboxId, state: &ControlState, received_frames: Arc<Mutex<Vec<Message>>>, is_older: bool) -> Arc<Self> {
        Arc::new(Self {
            id: id.clone(),
            received_frames,
            state: Mutex::new(state.clone()),
            seen: Mutex::default(),
            requests: AtomicU64::new(0),
            open_streams: AtomicU32::new(0),
            produced: AtomicU64::new(0),
            claims: watch::channel(FakeClaims::Batch(json!({ "life": "1", "items": [], "lost": 0, "more": false }))).0,
            activity_items: watch::channel(Vec::new()).0,
            fetches: Mutex::default(),
            withheld: watch::channel(0).0,
            is_older,
            ignores_pushes: AtomicBool::new(false),
            is_running: watch::channel(false).0,
            servers: Mutex::default(),
        })
    }

    pub fn stop(&self) {
        for server in self.servers.lock().unwrap().drain(..) {
            server.abort();
        }
        self.is_running.send_replace(false);
    }

    fn status(&self) -> BoxdStatus {
        BoxdStatus {
            sandbox_id: self.id.clone(),
            state_version: self.state.lock().unwrap().version,
            requests: self.requests.load(Ordering::SeqCst),
            open_streams: self.open_streams.load(Ordering::SeqCst),
            version: "fake".into(),
        }
    }

    fn control_router(self: &Arc<Self>) -> Router {
        let newer = if self.is_older { Router::new() } else { Router::new().route("/control/reports", get(reports)) };
        newer
            .route("/control/claims", get(single_kind))
            .route("/control/happenings", get(single_kind))
            .route("/control/state", put(push))
            .route("/control/status", get(|State(boxd): State<Arc<Self>>| async move { Json(boxd.status()) }))
            .layer(axum::middleware::from_fn_with_state(self.clone(), record_fetch))
            .with_state(self.clone())
    }

    fn client_router(self: &Arc<Self>) -> Router {
        Router::new()
            .route("/v1/whole", post(|whole: Bytes| async move { whole.len().to_string() }))
            .route("/v1/echo", post(|request: Request| async move { Body::new(request.into_body()) }))
            .route("/v1/ws", any(websocket))
            .route("/v1/html", get(endless_page))
            .route("/v1/hang", get(hang))
            .route("/v1/long", get(long))
            .route("/v1/refused", get(|| async { StatusCode::UNAUTHORIZED }).put(|| async { StatusCode::FORBIDDEN }))
            .with_state(self.clone())
            .fallback(|| async { "seen" })
            .layer(axum::middleware::from_fn_with_state(self.clone(), record_request))
    }
}

async fn record_fetch(State(boxd): State<Arc<FakeBoxd>>, request: Request, next: Next) -> Response {
    if request.method() == Method::GET && request.uri().path() != "/control/status" {
        boxd.fetches.lock().unwrap().push(request.uri().to_string());
    }
    next.run(request).await
}

async fn reports(State(boxd): State<Arc<FakeBoxd>>, Query(query): Query<ReportQuery>) -> Json<Value> {
    let (mut claims, mut activities) = (boxd.claims.subscribe(), boxd.activity_items.subscribe());
    let changed = async {
        tokio::select! {
            _ = claims.changed(), if query.claims.is_some() => {}
            _ = activities.changed(), if query.activities.is_some() => {}
        }
    };
    if !boxd.has_new(&query) {
        let _ = tokio::time::timeout(Duration::from_millis(query.wait_ms), changed).await;
    }
    boxd.withhold_claims(&query).await;
    let activities = query.activities.as_ref().map(|cursor| json!({ "life": "1", "items": boxd.activities_after(cursor) }));
    Json(json!({ "claims": query.claims.as_ref().map(|cursor| boxd.claims_after(cursor)), "activities": activities }))
}

/// The routes for one kind, all that an older boxd has.
async fn single_kind(State(boxd): State<Arc<FakeBoxd>>, uri: Uri, Query(query): Query<HashMap<String, String>>) -> Json<Value> {
    let number = |name: &str| query.get(name).and_then(|v| v.parse::<u64>().ok()).unwrap_or(0);
    let cursor = ReportCursor { run_id: query.get("life").cloned().unwrap_or_default(), seq: number("after") };
    if uri.path() == "/control/claims" {
        boxd.withhold_claims(&ReportQuery { claims: Some(cursor.clone()), ..ReportQuery::default() }).await;
        return Json(boxd.claims_after(&cursor));
    }
    let mut reported = boxd.activity_items.subscribe();
    let waiting = reported.wait_for(|_| !boxd.activities_after(&cursor).is_empty());
    // The response contains the available items, even after a timeout.
    let _ = tokio::time::timeout(Duration::from_secs(number("wait")), waiting).await;
    Json(json!({ "life": "1", "items": boxd.activities_after(&cursor) }))
}

impl FakeBoxd {
    fn activities_after(&self, cursor: &ReportCursor) -> Vec<Value> {
        let after = if cursor.run_id == "1" { cursor.seq } else { 0 };
        self.activity_items.borrow().iter().filter(|item| item["seq"].as_u64() > Some(after)).cloned().collect()
    }

    fn claims_after(&self, cursor: &ReportCursor) -> Value {
        match &*self.claims.borrow() {
            FakeClaims::Batch(batch) => batch.clone(),
            FakeClaims::Endless => {
                let claim = |seq: u64| json!({ "seq": seq, "at": "2020-01-01T00:00:00Z", "request_id": "", "method": "GET", "route": "/", "status": 200, "duration_ms": 0 });
                let items: Vec<Value> = (cursor.seq + 1..=cursor.seq + 256).map(claim).collect();
                json!({ "life": "1", "items": items, "lost": 0, "more": true })
            }
            FakeClaims::Withheld => json!({ "life": "1", "items": [], "lost": 0, "more": false }),
        }
    }

    async fn withhold_claims(&self, query: &ReportQuery) {
        if query.claims.is_some() && matches!(*self.claims.borrow(), FakeClaims::Withheld) {
            let _withheld = WaitingGuard::new(&self.withheld);
            std::future::pending::<()>().await;
        }
    }

    /// Whether there are records that a fetch with these cursors doesn't wait for.
    fn has_new(&self, query: &ReportQuery) -> bool {
        let has_activities = query.activities.as_ref().is_some_and(|cursor| !self.activities_after(cursor).is_empty());
        has_activities
            || query.claims.as_ref().is_some_and(|cursor| match &*self.claims.borrow() {
                FakeClaims::Batch(batch) => {
                    let items = batch["items"].as_array().unwrap();
                    let is_other_run = batch["life"] != cursor.run_id && !items.is_empty();
                    is_other_run || items.iter().any(|claim| claim["seq"].as_u64() > Some(cursor.seq))
                }
                FakeClaims::Endless | FakeClaims::Withheld => true,
            })
    }
}

/// Counts pending queries.
struct WaitingGuard<'a>(&'a watch::Sender<u32>);

impl<'a> WaitingGuard<'a> {
    fn new(count: &'a watch::Sender<u32>) -> Self {
        count.send_modify(|n| *n += 1);
        Self(count)
    }
}

impl Drop for WaitingGuard<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

async fn push(State(boxd): State<Arc<FakeBoxd>>, Json(state): Json<ControlState>) -> Json<BoxdStatus> {
    if boxd.ignores_pushes.load(Ordering::SeqCst) {
        std::future::pending::<()>().await;
    }
    {
        let mut known = boxd.state.lock().unwrap();
        assert!(state.version > known.version, "an old state arrived after a newer one");
        *known = state;
    }
    Json(boxd.status())
}

async fn record_request(State(boxd): State<Arc<FakeBoxd>>, request: Request, next: Next) -> Response {
    let seen = ReceivedRequest { method: request.method().clone(), uri: request.uri().to_string(), headers: request.headers().clone() };
    boxd.seen.lock().unwrap().push(seen);
    boxd.requests.fetch_add(1, Ordering::SeqCst);
    next.run(request).await
}

async fn websocket(State(boxd): State<Arc<FakeBoxd>>, upgrade: WebSocketUpgrade) -> Response {
    upgrade.on_upgrade(move |mut socket| async move {
        while let Some(Ok(message)) = socket.recv().await {
            if matches!(message, Message::Ping(_) | Message::Pong(_)) {
                continue;
            }
            boxd.received_frames.lock().unwrap().push(message.clone());
            if socket.send(message).await.is_err() {
                break;
            }
        }
    })
}

/// Never responds; its connection breaks when boxd ends.
async fn hang(State(boxd): State<Arc<FakeBoxd>>) {
    let _ = boxd.is_running.subscribe().wait_for(|is| !is).await;
    std::panic::resume_unwind(Box::new("boxd ended"));
}

/// Produces as many bytes as the query requests, at the rate at which they are read.
async fn long(State(boxd): State<Arc<FakeBoxd>>, RawQuery(query): RawQuery) -> Body {
    const PIECE: u64 = 64 * 1024;
    let pieces = query.unwrap_or_default().parse::<u64>().unwrap() / PIECE;
    Body::from_stream(futures_util::stream::iter(0..pieces).map(move |_| {
        boxd.produced.fetch_add(PIECE, Ordering::SeqCst);
        Ok::<_, std::io::Error>(Bytes::from(vec![0; PIECE as usize]))
    }))
}

async fn endless_page() -> impl IntoResponse {
    ([("content-type", "text/html"), ("set-cookie", "a=b"), ("server", "boxd"), ("x-request-id", "forged")], "<script>")
}
