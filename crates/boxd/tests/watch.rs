//! Tests of watching files, with the kernel's real events.

mod support;

use std::{collections::HashSet, os::unix::fs::symlink, time::Duration};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};
use support::{SOON, TestBoxd};

struct Watch {
    body: Incoming,
    /// The received part of an incomplete frame.
    text: String,
    frames: std::collections::VecDeque<String>,
    last_id: String,
    ready: Value,
}

#[derive(Debug, Clone)]
struct Event {
    name: String,
    data: Value,
}

impl Event {
    fn path(&self) -> &str {
        self.data["path"].as_str().unwrap_or_default()
    }
    fn summary(&self) -> (&str, &str) {
        (&self.name, self.path())
    }
}

impl Watch {
    async fn open(boxd: &TestBoxd, query: &str, last_id: Option<&str>) -> Self {
        let mut call = boxd.get(&format!("/v1/watch{query}"));
        if let Some(id) = last_id {
            call = call.header("last-event-id", id);
        }
        let answer = call.open().await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        let mut watch =
            Self { body: answer.into_body(), text: String::new(), frames: Default::default(), last_id: String::new(), ready: Value::Null };
        let ready = watch.next().await;
        assert_eq!(ready.name, "ready");
        watch.ready = ready.data;
        watch
    }

    async fn frame(&mut self) -> Option<Event> {
        loop {
            while let Some(frame) = self.frames.pop_front() {
                if frame.starts_with(':') {
                    continue;
                }
                let field = |name: &str| frame.lines().find_map(|l| l.strip_prefix(name)).map(str::to_owned);
                if let Some(id) = field("id: ") {
                    self.last_id = id;
                }
                return Some(Event { name: field("event: ").unwrap(), data: serde_json::from_str(&field("data: ").unwrap()).unwrap() });
            }
            match tokio::time::timeout(SOON, self.body.frame()).await.expect("an event arrives in time") {
                Some(Ok(frame)) => self.text.push_str(std::str::from_utf8(&frame.into_data().unwrap()).unwrap()),
                _ => return None,
            }
            let text = std::mem::take(&mut self.text);
            let (whole, rest) = text.rsplit_once("\n\n").unwrap_or(("", &text));
            self.frames.extend(whole.split("\n\n").filter(|f| !f.is_empty()).map(str::to_owned));
            self.text = rest.to_owned();
        }
    }

    async fn next(&mut self) -> Event {
        self.frame().await.expect("the stream continues")
    }

    /// All events up to one of this path, which must arrive.
    async fn until(&mut self, path: &str) -> Vec<Event> {
        let mut all = Vec::new();
        loop {
            let event = self.next().await;
            let is_last = event.path() == path;
            all.push(event);
            if is_last {
                return all;
            }
        }
    }
}

/// Creates a file as a program would, and returns all events up to its own.
async fn mark(boxd: &TestBoxd, watch: &mut Watch, name: &str) -> Vec<Event> {
    let path = format!("/workspace/{name}");
    std::fs::write(boxd.host(&path), "").unwrap();
    let mut all = watch.until(&path).await;
    all.pop();
    all
}

#[tokio::test]
async fn changes_by_programs_are_reported_once_and_in_order() {
    let boxd = TestBoxd::start();
    std::fs::write(boxd.host("/workspace/old"), "x").unwrap();
    std::fs::write(boxd.host("/workspace/moved"), "x").unwrap();
    let mut watch = Watch::open(&boxd, "?path=/workspace", None).await;
    for _ in 0..100 {
        std::fs::write(boxd.host("/workspace/old"), "y").unwrap();
    }
    std::fs::write(boxd.host("/workspace/new"), "x").unwrap();
    std::fs::rename(boxd.host("/workspace/moved"), boxd.host("/workspace/here")).unwrap();
    symlink("new", boxd.host("/workspace/link")).unwrap();
    std::fs::write(boxd.host("/workspace/short"), "x").unwrap();
    std::fs::remove_file(boxd.host("/workspace/short")).unwrap();
    let all = mark(&boxd, &mut watch, "mark").await;
    let reported: Vec<_> = all.iter().map(Event::summary).collect();
    let writes = reported.iter().filter(|t| t.0 == "modified").count();
    assert!((1..50).contains(&writes), "a hundred writes are reported as {writes}");
    // The write to the new file is reported separately if it falls into the next window.
    let is_expected = |t: &&(&str, &str)| t.1 != "/workspace/short" && **t != ("modified", "/workspace/new");
    let mut in_order: Vec<_> = reported.iter().filter(is_expected).collect();
    in_order.dedup();
    assert_eq!(
        in_order,
        [&("modified", "/workspace/old"), &("created", "/workspace/new"), &("renamed", "/workspace/here"), &("created", "/workspace/link"),]
    );
    assert!(all.iter().all(|e| e.data["by"] == "process"));
    let of = |path: &str| &all.iter().find(|e| e.path() == path).unwrap().data;
    let here = of("/workspace/here");
    assert_eq!((here["from"].as_str(), here["to"].as_str()), (Some("/workspace/moved"), Some("/workspace/here")));
    assert_eq!((of("/workspace/old")["kind"].as_str(), of("/workspace/link")["kind"].as_str()), (Some("file"), Some("symlink")));
    std::fs::remove_file(boxd.host("/workspace/old")).unwrap();
    assert_eq!(watch.next().await.summary(), ("removed", "/workspace/old"));
}

#[tokio::test]
async fn changes_through_boxd_are_reported_with_their_author() {
    let boxd = TestBoxd::start();
    let mut watch = Watch::open(&boxd, "?path=/workspace", None).await;
    let ada = json!({ "principal": "ada", "actor": "human" });
    let fs = async |verb: &str, body: Value| drop(boxd.post(&format!("/v1/fs/{verb}"), body.to_string()).send().await.ok(200));
    boxd.put("/v1/files/workspace/a", "one").send().await.ok(201);
    let first = watch.next().await;
    assert_eq!((first.summary(), &first.data["by"], &first.data["kind"]), (("created", "/workspace/a"), &ada, &json!("file")));
    boxd.put("/v1/files/workspace/a", "two").send().await.ok(200);
    let second = watch.next().await;
    assert_eq!((second.summary(), &second.data["by"]), (("modified", "/workspace/a"), &ada));
    std::fs::write(boxd.host("/workspace/a"), "by hand").unwrap();
    assert_eq!(watch.next().await.data["by"], "process");
    fs("edit", json!({ "path": "/workspace/a", "old": "hand", "new": "ada" })).await;
    assert_eq!(watch.next().await.data["by"], ada);
    fs("move", json!({ "from": "/workspace/a", "to": "/workspace/b" })).await;
    let moved = watch.next().await;
    assert_eq!((moved.summary(), &moved.data["from"], &moved.data["by"]), (("renamed", "/workspace/b"), &json!("/workspace/a"), &ada));
    fs("mkdir", json!({ "path": "/workspace/d/e", "parents": true })).await;
    for event in watch.until("/workspace/d/e").await {
        assert_eq!((event.name.as_str(), &event.data["by"]), ("created", &ada), "{event:?}");
    }
    boxd.put("/v1/files/workspace/d/e/f", "x").send().await.ok(201);
    assert_eq!(watch.until("/workspace/d/e/f").await.pop().unwrap().data["by"], ada);
    fs("copy", json!({ "from": "/workspace/d", "to": "/workspace/copy", "recursive": true })).await;
    for event in watch.until("/workspace/copy/e/f").await {
        assert_eq!((event.name.as_str(), &event.data["by"]), ("created", &ada), "{event:?}");
    }
    fs("remove", json!({ "path": "/workspace/d", "recursive": true })).await;
    for event in watch.until("/workspace/d").await {
        assert_eq!((event.name.as_str(), &event.data["by"]), ("removed", &ada), "{event:?}");
    }
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(1);
    header.set_mode(0o644);
    tar.append_data(&mut header, "sub/file", b"x".as_slice()).unwrap();
    let tar = tar.into_inner().unwrap();
    boxd.put("/v1/archive?path=/workspace/un", tar).header("content-type", "application/x-tar").send().await.ok(200);
    for event in watch.until("/workspace/un/sub/file").await {
        assert_eq!(event.data["by"], ada, "{event:?}");
    }
    boxd.call(http::Method::DELETE, "/v1/files/workspace/b").send().await.ok(204);
    let gone = watch.until("/workspace/b").await.pop().unwrap();
    assert_eq!((gone.name.as_str(), &gone.data["by"]), ("removed", &ada));
}

#[tokio::test]
async fn a_removal_through_boxd_is_reported_once_to_each_watcher() {
    let boxd = TestBoxd::start();
    let ada = json!({ "principal": "ada", "actor": "human" });
    std::fs::write(boxd.host("/workspace/a"), "").unwrap();
    let mut watches =
        [Watch::open(&boxd, "?path=/workspace", None).await, Watch::open(&boxd, "?path=/workspace&recursive=false", None).await];
    boxd.call(http::Method::DELETE, "/v1/files/workspace/a").send().await.ok(204);
    for watch in &mut watches {
        let gone = watch.next().await;
        assert_eq!((gone.summary(), &gone.data["by"]), (("removed", "/workspace/a"), &ada));
    }
    // The same name again, created and removed by a program.
    std::fs::write(boxd.host("/workspace/a"), "").unwrap();
    for watch in &mut watches {
        assert_eq!(watch.next().await.summary(), ("created", "/workspace/a"));
    }
    let mut late = Watch::open(&boxd, "?path=/", None).await;
    std::fs::remove_file(boxd.host("/workspace/a")).unwrap();
    for watch in watches.iter_mut().chain([&mut late]) {
        let gone = watch.next().await;
        assert_eq!((gone.summary(), &gone.data["by"]), (("removed", "/workspace/a"), &json!("process")));
    }
    // A removal and a creation within one window are reported as one change. What follows is the program's.
    let [watch, _] = &mut watches;
    std::fs::write(boxd.host("/workspace/b"), "").unwrap();
    watch.until("/workspace/b").await;
    boxd.call(http::Method::DELETE, "/v1/files/workspace/b").send().await.ok(204);
    std::fs::write(boxd.host("/workspace/b"), "").unwrap();
    mark(&boxd, watch, "mark").await;
    std::fs::remove_file(boxd.host("/workspace/b")).unwrap();
    let gone = watch.until("/workspace/b").await.pop().unwrap();
    assert_eq!((gone.name.as_str(), &gone.data["by"]), ("removed", &json!("process")));
}

#[tokio::test]
async fn a_failed_removal_is_not_attributed() {
    let boxd = TestBoxd::start();
    let fs = async |verb: &str, body: Value| boxd.post(&format!("/v1/fs/{verb}"), body.to_string()).send().await;
    let mut watch = Watch::open(&boxd, "?path=/workspace", None).await;
    fs("mkdir", json!({ "path": "/workspace/full" })).await.ok(200);
    boxd.put("/v1/files/workspace/file", "x").send().await.ok(201);
    boxd.put("/v1/files/workspace/full/x", "x").send().await.ok(201);
    mark(&boxd, &mut watch, "mark").await;
    boxd.call(http::Method::DELETE, "/v1/files/workspace/full").send().await.refused(400, "INVALID_REQUEST");
    fs("remove", json!({ "path": "/workspace/full" })).await.refused(400, "INVALID_REQUEST");
    fs("move", json!({ "from": "/workspace/file", "to": "/workspace/full" })).await.refused(409, "FILE_EXISTS");
    std::fs::remove_file(boxd.host("/workspace/file")).unwrap();
    std::fs::remove_dir_all(boxd.host("/workspace/full")).unwrap();
    for event in watch.until("/workspace/full").await {
        assert_eq!((event.name.as_str(), &event.data["by"]), ("removed", &json!("process")), "{event:?}");
    }
}

#[tokio::test]
async fn new_directories_are_watched_and_their_existing_content_is_reported() {
    let boxd = TestBoxd::start();
    let mut watch = Watch::open(&boxd, "?path=/workspace", None).await;
    // Created elsewhere and moved in complete: there are no events for its content.
    std::fs::create_dir_all(boxd.host("/elsewhere/x/y")).unwrap();
    std::fs::write(boxd.host("/elsewhere/x/y/z"), "").unwrap();
    std::fs::rename(boxd.host("/elsewhere"), boxd.host("/workspace/in")).unwrap();
    let reported: HashSet<String> = watch.until("/workspace/in/x/y/z").await.iter().map(|e| e.path().to_owned()).collect();
    assert!(["/workspace/in", "/workspace/in/x", "/workspace/in/x/y"].iter().all(|p| reported.contains(*p)), "{reported:?}");
    // Later changes are reported too.
    std::fs::write(boxd.host("/workspace/in/x/y/later"), "").unwrap();
    assert_eq!(watch.next().await.summary(), ("created", "/workspace/in/x/y/later"));
    std::fs::rename(boxd.host("/workspace/in/x"), boxd.host("/workspace/up")).unwrap();
    assert_eq!(watch.next().await.summary(), ("renamed", "/workspace/up"));
    std::fs::write(boxd.host("/workspace/up/y/again"), "").unwrap();
    assert_eq!(watch.next().await.summary(), ("created", "/workspace/up/y/again"), "it is reported under its new name");
    std::fs::rename(boxd.host("/workspace/up"), boxd.host("/out")).unwrap();
    let out = watch.next().await;
    assert_eq!((out.summary(), out.data["kind"].as_str()), (("removed", "/workspace/up"), Some("directory")));
    std::fs::write(boxd.host("/out/y/unseen"), "").unwrap();
    assert!(mark(&boxd, &mut watch, "mark").await.is_empty());
    for depth in 1..20 {
        let path = format!("/workspace/{}", "d/".repeat(depth));
        std::fs::create_dir(boxd.host(&path)).unwrap();
        std::fs::write(boxd.host(format!("{path}f")), "").unwrap();
    }
    let deepest = format!("/workspace/{}f", "d/".repeat(19));
    let files: HashSet<String> =
        watch.until(&deepest).await.iter().filter(|e| e.path().ends_with("/f")).map(|e| e.path().to_owned()).collect();
    assert_eq!(files.len(), 19, "none is missed, however fast they are created");
}

#[tokio::test]
async fn a_single_directory_can_be_watched_and_names_may_have_any_bytes() {
    let boxd = TestBoxd::start();
    std::fs::create_dir(boxd.host("/workspace/d")).unwrap();
    let mut watch = Watch::open(&boxd, "?path=/workspace&recursive=false", None).await;
    std::fs::write(boxd.host("/workspace/d/unseen"), "").unwrap();
    std::fs::write(boxd.host(b"/workspace/\xff\nevent: forged"), "").unwrap();
    let odd = watch.next().await;
    assert_eq!((odd.name.as_str(), odd.data["path_b64"].is_string()), ("created", true));
    assert_eq!(watch.ready["path_b64"], Value::Null);
    std::fs::create_dir(boxd.host(b"/workspace/d\xff")).unwrap();
    let within = Watch::open(&boxd, "?path=/workspace/d%ff", None).await;
    assert_eq!(within.ready["path_b64"], "L3dvcmtzcGFjZS9k/w==");
    for bad in ["?path=relative", "?recursive=perhaps"] {
        boxd.get(&format!("/v1/watch{bad}")).send().await.refused(400, "INVALID_REQUEST");
    }
    boxd.get("/v1/watch?path=/none").send().await.refused(404, "FILE_NOT_FOUND");
    std::fs::write(boxd.host("/workspace/f"), "").unwrap();
    boxd.get("/v1/watch?path=/workspace/f").send().await.refused(400, "INVALID_REQUEST");
    let writer = boxd.token("fs_write");
    boxd.get("/v1/watch").token(&writer).send().await.refused(403, "CAPABILITY_DENIED");
}

#[tokio::test]
async fn a_reader_that_resumes_with_a_cursor_misses_nothing() {
    let boxd = TestBoxd::start();
    let mut watch = Watch::open(&boxd, "?path=/workspace", None).await;
    std::fs::write(boxd.host("/workspace/seen"), "").unwrap();
    watch.until("/workspace/seen").await;
    let cursor = watch.last_id.clone();
    drop(watch);
    tokio::time::timeout(SOON, boxd.idle()).await.unwrap();
    std::fs::write(boxd.host("/workspace/missed"), "").unwrap();
    let mut again = Watch::open(&boxd, "?path=/workspace", Some(&cursor)).await;
    assert_eq!(again.last_id, cursor, "`ready` repeats the resume position");
    assert_eq!(again.next().await.summary(), ("created", "/workspace/missed"));
    let mut by_query = Watch::open(&boxd, &format!("?path=/workspace&cursor={cursor}"), None).await;
    assert_eq!(by_query.next().await.summary(), ("created", "/workspace/missed"));
    for old in ["another-life-1", "nonsense", &format!("{}0", cursor.rsplit_once('-').unwrap().0)] {
        let mut lost = Watch::open(&boxd, "?path=/workspace", Some(old)).await;
        let reported = lost.next().await;
        assert_eq!((reported.name.as_str(), reported.data["reason"].as_str()), ("overflow", Some("cursor_expired")), "{old}");
        std::fs::write(boxd.host("/workspace/after"), old).unwrap();
        lost.until("/workspace/after").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_changes_is_reported_completely_or_its_loss_is() {
    const FILES: usize = 20_000;
    let boxd = TestBoxd::start();
    let mut watch = Watch::open(&boxd, "?path=/workspace", None).await;
    let mut slow = Watch::open(&boxd, "?path=/workspace", None).await;
    let directory = boxd.host("/workspace");
    let maker = std::thread::spawn(move || {
        for i in 0..FILES {
            std::fs::write(directory.join(format!("f{i}")), "x").unwrap();
        }
        std::fs::write(directory.join("last"), "").unwrap();
    });
    let mut seen = HashSet::new();
    let mut is_lost = false;
    for event in watch.until("/workspace/last").await {
        is_lost |= event.name == "overflow";
        seen.insert(event.path().to_owned());
    }
    maker.join().unwrap();
    assert!(is_lost || seen.len() == FILES + 1, "{} of {FILES} without an event", seen.len());
    // A slow reader gets all events that are kept, or an overflow event.
    let late = slow.until("/workspace/last").await;
    assert!(late.iter().any(|e| e.name == "overflow") || late.len() > FILES);
}

#[tokio::test]
async fn reaching_the_watch_limit_is_reported_and_the_rest_still_works() {
    let boxd = TestBoxd::start_limited(|limits| limits.watches = 4);
    for i in 0..10 {
        std::fs::create_dir(boxd.host(format!("/workspace/d{i}"))).unwrap();
    }
    let mut watch = Watch::open(&boxd, "?path=/workspace&cursor=none", None).await;
    assert_eq!(watch.next().await.data["reason"], "cursor_expired");
    std::fs::write(boxd.host("/workspace/top"), "").unwrap();
    assert_eq!(watch.until("/workspace/top").await.pop().unwrap().name, "created");
    std::fs::create_dir(boxd.host("/workspace/d10")).unwrap();
    watch.until("/workspace/d10").await;
    let fresh = TestBoxd::start_limited(|limits| limits.watches = 2);
    let mut watch = Watch::open(&fresh, "?path=/workspace", None).await;
    std::fs::create_dir(fresh.host("/workspace/a")).unwrap();
    watch.until("/workspace/a").await;
    std::fs::create_dir(fresh.host("/workspace/b")).unwrap();
    let reported = watch.next().await;
    assert_eq!((reported.name.as_str(), reported.data["reason"].as_str()), ("overflow", Some("watch_limit")));
    fresh.get("/v1/watch?path=/").send().await.refused(429, "RATE_LIMITED");
}

#[tokio::test]
async fn a_stream_ends_with_its_token_or_its_directory() {
    let mut boxd = TestBoxd::start();
    std::fs::create_dir(boxd.host("/workspace/d")).unwrap();
    let mut watch = Watch::open(&boxd, "?path=/workspace/d", None).await;
    std::fs::remove_dir(boxd.host("/workspace/d")).unwrap();
    assert_eq!(watch.next().await.data["reason"], "gone");
    assert!(watch.frame().await.is_none());
    let mut watch = Watch::open(&boxd, "?path=/workspace", None).await;
    boxd.revoke(vec![cobox_protocol::control::Revocation::Session("ssn_1".into())]).await;
    let ended = async { while watch.frame().await.is_some() {} };
    tokio::time::timeout(Duration::from_secs(2), ended).await.expect("a revoked stream ends within moments");
}
