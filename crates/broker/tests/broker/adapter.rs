//! Tests of providers without boxd: the gateway authorizes in place of boxd and calls the adapter only for what a token
//! allows. Also a provider whose sandboxes clients can reach directly.

use std::{
    path::{Component, Path, PathBuf},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use axum::body::Bytes;
use cobox_protocol::{
    ApiError, Capability, CommandId, ErrorCode, SandboxId, Timestamp,
    exec::{ExecRequest, ExecResponse, text_and_b64},
    files::FileWritten,
    fs::{FileEntry, FileKind, ListRequest, ListResponse},
    route::ROUTES,
};
use cobox_provider::{Adapter, AdapterError, AdapterResult, FileContent};
use futures_util::StreamExt;
use http::{Method, Request};
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::{net::TcpStream, process::Command};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::harness::{Answer, Client, World, sandbox_id};

/// Stand-in for a hosted sandbox: a host directory with host processes. For tests only, because it isolates nothing.
struct HostDirectory {
    dir: tempfile::TempDir,
    call_count: AtomicUsize,
}

impl HostDirectory {
    fn resolve(&self, path: &str) -> AdapterResult<PathBuf> {
        self.call_count.fetch_add(1, Ordering::SeqCst);
        let path = Path::new(path.trim_start_matches('/'));
        if path.components().all(|c| matches!(c, Component::Normal(_))) {
            return Ok(self.dir.path().join(path));
        }
        Err(ApiError::invalid("the path leads out of the sandbox").into())
    }
}

fn failed(e: std::io::Error) -> AdapterError {
    let code = if e.kind() == std::io::ErrorKind::NotFound { ErrorCode::FileNotFound } else { ErrorCode::Internal };
    ApiError::new(code, e.to_string()).into()
}

fn entry(path: &str, meta: &std::fs::Metadata) -> FileEntry {
    let name = path.rsplit('/').next().unwrap().to_owned();
    let kind = if meta.is_dir() { FileKind::Directory } else { FileKind::File };
    let (size, mode, mtime) = (meta.len(), "644".to_owned(), Timestamp::now());
    FileEntry {
        name,
        name_b64: None,
        path: path.to_owned(),
        path_b64: None,
        kind,
        size,
        mode,
        mtime,
        etag: None,
        target: None,
        target_b64: None,
    }
}

#[async_trait]
impl Adapter for HostDirectory {
    async fn exec(&self, _: &SandboxId, request: ExecRequest) -> AdapterResult<ExecResponse> {
        self.call_count.fetch_add(1, Ordering::SeqCst);
        let argv = request.argv.unwrap_or_else(|| vec!["sh".into(), "-c".into(), request.command.unwrap_or_default()]);
        let output =
            Command::new(&argv[0]).args(&argv[1..]).current_dir(self.dir.path()).stdin(Stdio::null()).output().await.map_err(failed)?;
        let ((stdout, stdout_b64), (stderr, stderr_b64)) = (text_and_b64(output.stdout), text_and_b64(output.stderr));
        let exit_code = output.status.code().unwrap_or(-1);
        let command_id = CommandId::new().to_string();
        Ok(ExecResponse {
            stdout,
            stderr,
            stdout_b64,
            stderr_b64,
            exit_code,
            signal: None,
            timed_out: false,
            truncated: false,
            duration_ms: 0,
            command_id,
        })
    }

    async fn read(&self, _: &SandboxId, path: &str) -> AdapterResult<(Option<u64>, FileContent)> {
        let file = tokio::fs::File::open(self.resolve(path)?).await.map_err(failed)?;
        let size = file.metadata().await.map_err(failed)?.len();
        Ok((Some(size), Box::pin(file)))
    }

    async fn write(&self, _: &SandboxId, path: &str, mut content: FileContent) -> AdapterResult<(FileWritten, bool)> {
        let resolve = self.resolve(path)?;
        tokio::fs::create_dir_all(resolve.parent().unwrap()).await.map_err(failed)?;
        let is_new = !resolve.exists();
        let mut file = tokio::fs::File::create(resolve).await.map_err(failed)?;
        let size = tokio::io::copy(&mut content, &mut file).await.map_err(failed)?;
        Ok((FileWritten { path: path.to_owned(), path_b64: None, size, etag: format!("\"{size}\"") }, is_new))
    }

    async fn delete(&self, _: &SandboxId, path: &str) -> AdapterResult<()> {
        tokio::fs::remove_file(self.resolve(path)?).await.map_err(failed)
    }

    async fn list(&self, _: &SandboxId, request: ListRequest) -> AdapterResult<ListResponse> {
        let path = request.path.unwrap_or_default();
        let mut entries = Vec::new();
        for found in std::fs::read_dir(self.resolve(&path)?).map_err(failed)? {
            let found = found.map_err(failed)?;
            entries.push(entry(&format!("{path}/{}", found.file_name().display()), &found.metadata().map_err(failed)?));
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(ListResponse { path, path_b64: None, entries, next_cursor: None, stopped_by: None })
    }

    async fn stat(&self, _: &SandboxId, path: &str) -> AdapterResult<FileEntry> {
        Ok(entry(path, &std::fs::metadata(self.resolve(path)?).map_err(failed)?))
    }
}

fn without_boxd() -> (World, Arc<HostDirectory>) {
    let adapter = Arc::new(HostDirectory { dir: tempfile::tempdir().unwrap(), call_count: AtomicUsize::new(0) });
    let world = World::new();
    *world.provider.adapter.lock().unwrap() = Some(adapter.clone());
    (world, adapter)
}

async fn call(client: &Client, method: Method, path: &str, body: impl Into<Bytes>, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    client.send(request.body(Full::new(body.into())).unwrap()).await
}

#[tokio::test]
async fn commands_and_files_have_the_dataplanes_shapes() {
    let (world, _adapter) = without_boxd();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let base = format!("/dp/{}/v1", sandbox_id(&made));
    let bearer = ann.with(&made["token"]);
    let file = format!("{base}/files/workspace/a%20b.txt");
    let content = Bytes::from(vec![7u8; 3 << 20]);
    let written = call(&bearer, Method::PUT, &file, content.clone(), &[]).await.ok(201);
    assert_eq!((&written["path"], &written["size"]), (&json!("/workspace/a b.txt"), &json!(content.len())));
    call(&bearer, Method::PUT, &file, content.clone(), &[]).await.ok(200);
    let read = bearer.get(&file).await;
    assert_eq!((read.bytes, read.headers["x-content-type-options"].to_str().unwrap()), (content.clone(), "nosniff"));
    let head = call(&bearer, Method::HEAD, &file, "", &[]).await;
    assert_eq!((head.status.as_u16(), head.headers["content-length"].to_str().unwrap()), (200, content.len().to_string().as_str()));
    let listed = bearer.post(&format!("{base}/fs/list"), json!({ "path": "/workspace" })).await.ok(200);
    assert_eq!((&listed["entries"][0]["name"], &listed["entries"][0]["type"]), (&json!("a b.txt"), &json!("file")));
    assert_eq!(bearer.post(&format!("{base}/fs/stat"), json!({ "path": "/workspace" })).await.ok(200)["type"], "directory");
    // With a key, through the session: the same checks apply.
    let relay = format!("/v1/sandbox/relay/{}/v1/exec", made["session_id"].as_str().unwrap());
    let ran = ann.post(&relay, json!({ "command": "wc -c < 'workspace/a b.txt'; echo no >&2; exit 3" })).await.ok(200);
    assert_eq!(
        (ran["stdout"].as_str().unwrap().trim(), &ran["stderr"], &ran["exit_code"]),
        (&*content.len().to_string(), &json!("no\n"), &json!(3))
    );
    call(&bearer, Method::DELETE, &file, "", &[]).await.ok(204);
    assert_eq!(bearer.get(&file).await.error(404), "FILE_NOT_FOUND");
    assert_eq!(bearer.get(&format!("{base}/files/../../etc/passwd")).await.error(400), "INVALID_REQUEST");
    assert_eq!(bearer.post(&format!("{base}/exec"), json!({})).await.error(400), "INVALID_REQUEST");
    let nobody = Client { key: None, ..ann };
    assert_eq!(nobody.get(&format!("/dp/{}/healthz", sandbox_id(&made))).await.ok(200), json!({ "status": "ok" }));
}

#[tokio::test]
async fn every_route_checks_its_capability_before_the_adapter_is_called() {
    let (world, adapter) = without_boxd();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let nobody = Client { key: None, ..ann.clone() };
    let words = ["fs_read", "fs_write", "exec", "shell", "shell_observe"];
    let mut without: Vec<(Capability, Value)> = Vec::new();
    for missing in Capability::ALL.into_iter().filter(|c| words.contains(&c.as_str())) {
        // `shell` implies `shell_observe`.
        let rest: Vec<_> =
            words.into_iter().filter(|w| *w != missing.as_str() && !(missing == Capability::ShellObserve && *w == "shell")).collect();
        let params = json!({ "scope": { "type": "thread", "id": "t" }, "mode": "ensure", "requested_capabilities": rest });
        without.push((missing, ann.post("/v1/sandbox/sessions", params).await.ok(200)));
    }
    let id = sandbox_id(&without[0].1);
    for route in ROUTES.iter().filter(|r| !r.needs.is_empty()) {
        let path = format!("/dp/{id}{}", route.template.replace("{path}", "a").replace("{id}", "x").replace("{shell}", "main"));
        let method: Method = route.method.parse().unwrap();
        for needed in route.needs {
            let (_, made) = without.iter().find(|(missing, _)| missing == needed).unwrap();
            let answer = call(&ann.with(&made["token"]), method.clone(), &path, "{}", &[]).await;
            assert_eq!(answer.status, 403, "{method} {path} without {needed}");
            if !answer.json()["error"].is_null() {
                assert_eq!(answer.json()["error"]["details"]["capability"], needed.as_str());
                assert_eq!(answer.error(403), "CAPABILITY_DENIED");
            }
        }
        assert_eq!(call(&nobody, method.clone(), &path, "{}", &[]).await.status, 401, "{method} {path}");
    }
    assert_eq!(adapter.call_count.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn operations_that_the_provider_lacks_are_refused_in_its_name() {
    let (world, adapter) = without_boxd();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let (id, bearer) = (sandbox_id(&made), ann.with(&made["token"]));
    let able = ["/healthz", "/v1/healthz", "/v1/exec", "/v1/files/{path}", "/v1/fs/list", "/v1/fs/stat"];
    for route in ROUTES.iter().filter(|r| !able.contains(&r.template)) {
        let path = format!("/dp/{id}{}", route.template.replace("{id}", "x").replace("{shell}", "main"));
        let answer = call(&bearer, route.method.parse().unwrap(), &path, "{}", &[]).await;
        assert_eq!(answer.status, 404, "{} {path}", route.method);
        let message = String::from_utf8_lossy(&answer.bytes).into_owned();
        assert!(route.method == "HEAD" || message.contains("the provider fake can't do this"), "{message}");
    }
    // A header that would change a request's meaning is refused, not silently dropped.
    for (method, headers) in
        [(Method::PUT, ("if-match", "\"1\"")), (Method::PUT, ("x-file-mode", "755")), (Method::GET, ("if-none-match", "\"1\""))]
    {
        let answer = call(&bearer, method, &format!("/dp/{id}/v1/files/a"), "x", &[headers]).await;
        assert_eq!(answer.json()["error"]["details"]["provider"], "fake");
        assert_eq!(answer.error(404), "ROUTE_NOT_FOUND");
    }
    let stream =
        call(&bearer, Method::POST, &format!("/dp/{id}/v1/exec"), "{\"command\":\"true\"}", &[("accept", "text/event-stream")]).await;
    assert_eq!(stream.error(404), "ROUTE_NOT_FOUND");
    let mut request = format!("ws://{}/dp/{id}/v1/ws", broker.addr).into_client_request().unwrap();
    request.headers_mut().insert("authorization", format!("Bearer {}", made["token"].as_str().unwrap()).parse().unwrap());
    let refused = tokio_tungstenite::client_async(request, TcpStream::connect(broker.addr).await.unwrap()).await.map(|(s, _)| s.boxed());
    assert!(refused.err().unwrap().to_string().contains("404"));
    assert_eq!(bearer.get(&format!("/dp/{id}/nowhere")).await.error(404), "ROUTE_NOT_FOUND");
    assert_eq!(adapter.call_count.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_sandbox_without_boxd_lives_and_ends_like_any_other() {
    let (world, _adapter) = without_boxd();
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let (id, bearer) = (sandbox_id(&made), ann.with(&made["token"]));
    let exec = format!("/dp/{id}/v1/exec");
    broker.tick().await;
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(ann.state(&id).await, "suspended");
    ann.post(&exec, json!({ "command": "true" })).await.ok(200);
    assert_eq!(ann.state(&id).await, "active", "a request resumes the sandbox");
    let fresh = ann.ensure("t").await;
    assert_eq!(bearer.post(&exec, json!({ "command": "true" })).await.error(401), "TOKEN_EXPIRED");
    ann.delete(&crate::harness::session_path(&fresh)).await.ok(204);
    assert_eq!(ann.with(&fresh["token"]).post(&exec, json!({ "command": "true" })).await.error(401), "TOKEN_REVOKED");
}

#[tokio::test]
async fn urls_lead_to_the_sandbox_if_its_provider_has_a_direct_url_and_to_the_gateway_otherwise() {
    let world = World::new();
    *world.provider.direct.lock().unwrap() = Some("https://node7.example.com:4000".to_owned());
    let broker = world.start().await;
    let ann = broker.human("ann").await;
    let made = ann.ensure("t").await;
    let id = sandbox_id(&made);
    let direct = format!("https://node7.example.com:4000/{id}/v1");
    assert_eq!((&made["sandbox"]["http_base_url"], &made["dataplane"]["http_base_url"]), (&json!(direct), &json!(direct)));
    assert_eq!(made["dataplane"]["ws_base_url"], direct.replacen("http", "ws", 1));
    assert_eq!(ann.get("/threads/t/sandbox").await.ok(200)["endpoints"]["http"], direct);
    assert_eq!(ann.get("/capabilities?thread_id=t").await.ok(200)["services"]["sandbox"]["url"], direct.trim_end_matches("/v1"));
    // Clients without a token or without direct access use the gateway: a key is never sent to a sandbox.
    let through = format!("http://{}/dp/{id}/v1", broker.addr);
    assert_eq!(ann.get(&format!("/v1/sandboxes/{id}")).await.ok(200)["http_base_url"], through);
    ann.get(&format!("/dp/{id}/v1/x")).await.ok(200);
    // A suspended sandbox has no direct address. The gateway's address is used, and wakes it.
    world.clock.advance(3600);
    broker.tick().await;
    assert_eq!(ann.get(&crate::harness::session_path(&made)).await.ok(200)["sandbox"]["http_base_url"], through);
    assert_eq!(ann.ensure("t").await["sandbox"]["http_base_url"], direct, "ensure has resumed the sandbox");
    *world.provider.direct.lock().unwrap() = None;
    assert_eq!(ann.ensure("t").await["sandbox"]["http_base_url"], through);
}
