//! Path attacks that need a real sandbox: what the kernel exposes in /proc, /sys and /dev, through every route that
//! takes a path.

use std::time::Duration;

use cobox_testkit::{TestBroker, ensure, sh};
use serde_json::{Value, json};

/// Longer than any answer takes here; a request that waits for a fifo or a device would never be answered.
const SOON: Duration = Duration::from_secs(20);

/// Paths that must never return data of the kernel or of boxd.
const OUT_OF_BOUNDS: &[&str] = &[
    "/proc/self/mem",
    "/proc/self/environ",
    "/proc/self/maps",
    "/proc/self/root/etc/passwd",
    "/proc/self/cwd",
    "/proc/self/exe",
    "/proc/self/fd/3",
    "/proc/self/ns/mnt",
    "/proc/1/environ",
    "/proc/1/root/etc/passwd",
    "/proc/thread-self/root/etc/shadow",
    "/proc/version",
    "/proc/sys/kernel/hostname",
    "/proc/kcore",
    "/proc/../proc/1/mem",
    "/sys/kernel/notes",
    "/sys/class/net",
    "/sys/fs/cgroup/cgroup.procs",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/tty",
    "/dev/ptmx",
    "/dev/pts/0",
    "/dev/fd/3",
    "/dev/stdin",
    "/dev/mem",
    "/workspace/links/mem",
    "/workspace/links/root/etc/passwd",
    "/workspace/links/environ",
    "/workspace/links/init",
    "/workspace/links/zero",
    "/workspace/links/dev/zero",
    "/workspace/links/fd0",
    "/workspace/links/fifo",
    "/workspace/links/socket",
];

const SETUP: &str = "mkdir links && cd links && ln -s /proc/self/mem mem && ln -s /proc/self/root root && ln -s /proc/self/environ environ \
    && ln -s /proc/1/root init && ln -s /dev/zero zero && ln -s /dev dev && ln -s /proc/self/fd/0 fd0 && mkfifo fifo \
    && python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'; echo plain > plain; ln plain hard; ls";

#[tokio::test]
async fn no_route_reads_writes_or_waits_for_kernel_files() {
    let broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "paths").await;
    let planted = sh(session.dataplane(), SETUP).await;
    assert!(planted.stdout.contains("socket") && planted.stdout.contains("hard"), "{planted:?}");
    let base = &session.info().sandbox.http_base_url;
    let http = reqwest::Client::new();
    let token = session.token();
    let send = async |request: reqwest::RequestBuilder, what: String| {
        let answer = tokio::time::timeout(SOON, request.bearer_auth(token.expose()).send())
            .await
            .unwrap_or_else(|_| panic!("{what} waits for ever"));
        let answer = answer.unwrap_or_else(|e| panic!("{what}: {e}"));
        let status = answer.status().as_u16();
        (status, tokio::time::timeout(SOON, answer.bytes()).await.unwrap_or_else(|_| panic!("{what} never ends")).unwrap_or_default())
    };
    for path in OUT_OF_BOUNDS {
        let is_refused = |what: &str, status: u16| {
            assert!(matches!(status, 400 | 403 | 404), "{what} {path}: {status}");
        };
        // The path is sent unchanged: the URL type would normalize `..` and the like.
        let (status, _) = send(http.get(format!("{base}/files{path}")), format!("GET {path}")).await;
        is_refused("GET", status);
        let (status, _) = send(http.put(format!("{base}/files{path}")).body("x"), format!("PUT {path}")).await;
        is_refused("PUT", status);
        let edit = json!({ "path": path, "old": "a", "new": "b" });
        let (status, _) = send(http.post(format!("{base}/fs/edit")).json(&edit), format!("edit {path}")).await;
        is_refused("edit", status);
        let copy = json!({ "from": path, "to": "/workspace/stolen", "overwrite": true });
        let (status, _) = send(http.post(format!("{base}/fs/copy")).json(&copy), format!("copy {path}")).await;
        is_refused("copy", status);
        for verb in ["grep", "glob", "list"] {
            let body = if verb == "list" { json!({ "path": path }) } else { json!({ "path": path, "pattern": "*e" }) };
            let body = if verb == "grep" { json!({ "path": path, "pattern": "e" }) } else { body };
            let (status, text) = send(http.post(format!("{base}/fs/{verb}")).json(&body), format!("{verb} {path}")).await;
            let response: Value = serde_json::from_slice(&text).unwrap_or_default();
            let is_empty = ["matches", "entries"].iter().all(|f| response[f].as_array().is_none_or(Vec::is_empty));
            assert!(status != 200 || is_empty, "{verb} {path}: {response}");
        }
        let (_, tar) = send(http.get(format!("{base}/archive?path={path}")), format!("archive {path}")).await;
        assert!(tar.len() < 4096, "archive {path} gave {} bytes", tar.len());
        let (status, _) = send(http.get(format!("{base}/watch?path={path}")), format!("watch {path}")).await;
        is_refused("watch", status);
    }
    // A search and an archive of everything neither block nor leave the sandbox.
    let everything = json!({ "path": "/", "pattern": "no such text anywhere", "timeout_seconds": 15 });
    let (status, text) = send(http.post(format!("{base}/fs/grep")).json(&everything), "grep /".into()).await;
    assert_eq!(status, 200, "{text:?}");
    let (status, text) = send(http.post(format!("{base}/fs/stat")).json(&json!({ "path": "/workspace/links/hard" })), "stat".into()).await;
    assert_eq!((status, serde_json::from_slice::<Value>(&text).unwrap()["size"].as_u64()), (200, Some(6)));
}
