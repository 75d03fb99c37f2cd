//! Tests of reading, writing and deleting files, including attempts to reach files outside the root.

mod support;

use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

use bytes::Bytes;
use cobox_protocol::files::FileWritten;
use http::Method;
use support::{SOON, TestBoxd};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn names(boxd: &TestBoxd, directory: &str) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(boxd.host(directory)).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_written_file_is_read_back_with_its_version_and_mode() {
    let boxd = TestBoxd::start();
    let put = boxd.put("/v1/files/workspace/new/dir/a.txt", "hello").header("x-file-mode", "640").send().await.ok(201);
    let written: FileWritten = put.json();
    assert_eq!((written.path.as_str(), written.size, written.path_b64.clone()), ("/workspace/new/dir/a.txt", 5, None));
    assert_eq!(put.header("etag"), written.etag);

    let got = boxd.get("/v1/files/workspace/new/dir/a.txt").send().await.ok(200);
    assert_eq!(got.body, "hello");
    assert_eq!((got.header("etag"), got.header("x-file-mode"), got.header("content-length")), (written.etag.as_str(), "640", "5"));
    assert_eq!((got.header("accept-ranges"), got.header("content-type")), ("bytes", "application/octet-stream"));
    assert!(got.header("last-modified").ends_with(" GMT"));

    let head = boxd.call(Method::HEAD, "/v1/files/workspace/new/dir/a.txt").send().await.ok(200);
    assert_eq!((head.header("content-length"), head.header("etag"), head.body.len()), ("5", written.etag.as_str(), 0));

    let again = boxd.put("/v1/files/workspace/new/dir/a.txt", "world!").send().await.ok(200);
    assert_ne!(again.header("etag"), written.etag);
    let mode = std::fs::metadata(boxd.host("/workspace/new/dir/a.txt")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o640, "a replaced file keeps its mode");
    assert_eq!(names(&boxd, "/workspace/new/dir"), ["a.txt"], "nothing temporary is left");
}

#[tokio::test]
async fn an_empty_and_a_large_file_are_read_back_whole() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/empty", "").send().await.ok(201);
    assert_eq!(boxd.get("/v1/files/workspace/empty").send().await.ok(200).body, "");
    let large = varied_bytes(5_000_003, 0);
    boxd.put("/v1/files/workspace/large", large.clone()).send().await.ok(201);
    assert!(boxd.get("/v1/files/workspace/large").send().await.ok(200).body == large);
    let part = boxd.get("/v1/files/workspace/large").header("range", "bytes=1000000-2999999").send().await.ok(206);
    assert!(part.body == large[1_000_000..3_000_000]);
}

/// Content in which no two parts are alike. Another seed gives other content.
fn varied_bytes(bytes: u32, seed: u32) -> Vec<u8> {
    (0..bytes).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

async fn request_files(boxd: &TestBoxd, paths: &[&str]) -> tokio::net::UnixStream {
    let (mut stream, token) = (boxd.dial("clients").await, boxd.token("fs_read"));
    let request = |path: &&str| format!("GET /v1/files{path} HTTP/1.1\r\nhost: b\r\nauthorization: Bearer {}\r\n\r\n", token.expose());
    stream.write_all(paths.iter().map(request).collect::<String>().as_bytes()).await.unwrap();
    stream
}

/// Reads past the head of a response and returns `expected` bytes of the body, or as many as there are.
async fn body_of_next(stream: &mut tokio::net::UnixStream, expected: usize) -> Vec<u8> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let mut body = Vec::new();
    stream.take(expected as u64).read_to_end(&mut body).await.unwrap();
    body
}

#[tokio::test]
async fn files_requested_on_one_connection_arrive_in_order_and_whole() {
    let boxd = TestBoxd::start();
    let files =
        [("/workspace/a", varied_bytes(3_000_001, 1)), ("/workspace/b", varied_bytes(17, 2)), ("/workspace/c", varied_bytes(2_500_000, 3))];
    for (path, content) in &files {
        std::fs::write(boxd.host(path), content).unwrap();
    }
    let mut stream = request_files(&boxd, &files.each_ref().map(|(path, _)| *path)).await;
    for (path, content) in &files {
        assert!(body_of_next(&mut stream, content.len()).await == *content, "{path}");
    }
}

#[tokio::test]
async fn a_file_truncated_while_it_is_sent_ends_with_an_error() {
    let boxd = TestBoxd::start();
    let (content, left) = (varied_bytes(16_000_000, 4), 8_000_000);
    std::fs::write(boxd.host("/workspace/a"), &content).unwrap();
    let mut stream = request_files(&boxd, &["/workspace/a"]).await;
    let first = body_of_next(&mut stream, 100_000).await;
    // Part of the file was not sent yet: at most a few pieces are buffered for a client that doesn't read.
    std::fs::File::options().write(true).open(boxd.host("/workspace/a")).unwrap().set_len(left).unwrap();
    let mut rest = first;
    stream.read_to_end(&mut rest).await.unwrap();
    // The connection ends before the announced length. The number of received bytes depends on how much had been
    // written to the socket when the truncation was found: the server drops what it still buffers.
    assert!(content[..left as usize].starts_with(&rest), "{} bytes received", rest.len());
}

#[tokio::test]
async fn ranges_and_conditions_follow_the_http_standard() {
    let boxd = TestBoxd::start();
    let etag = boxd.put("/v1/files/workspace/a", "0123456789").send().await.header("etag").to_owned();
    let get = || boxd.get("/v1/files/workspace/a");
    let part = get().header("range", "bytes=2-4").send().await.ok(206);
    assert_eq!((part.body.as_ref(), part.header("content-range"), part.header("content-length")), (b"234".as_slice(), "bytes 2-4/10", "3"));
    assert_eq!(get().header("range", "bytes=-3").send().await.ok(206).body, "789");
    let beyond = get().header("range", "bytes=10-").send().await;
    beyond.refused(416, "RANGE_NOT_SATISFIABLE");
    assert_eq!(beyond.header("content-range"), "bytes */10");
    assert_eq!(get().header("range", "bytes=2-4").header("if-range", "\"other\"").send().await.ok(200).body.len(), 10);

    let same = get().header("if-none-match", &etag).send().await.ok(304);
    assert_eq!((same.body.len(), same.header("etag")), (0, etag.as_str()));
    get().header("if-none-match", "\"other\"").send().await.ok(200);
    get().header("if-match", "\"other\"").send().await.refused(412, "FILE_CHANGED");
    get().header("if-match", &etag).send().await.ok(200);
}

#[tokio::test]
async fn a_write_or_delete_with_an_old_version_changes_nothing() {
    let boxd = TestBoxd::start();
    let path = "/v1/files/workspace/a";
    let first = boxd.put(path, "one").header("if-none-match", "*").send().await.ok(201).header("etag").to_owned();
    boxd.put(path, "two").header("if-none-match", "*").send().await.refused(412, "FILE_CHANGED");
    let second = boxd.put(path, "two").header("if-match", &first).send().await.ok(200).header("etag").to_owned();
    boxd.put(path, "three").header("if-match", &first).send().await.refused(412, "FILE_CHANGED");
    boxd.call(Method::DELETE, path).header("if-match", &first).send().await.refused(412, "FILE_CHANGED");
    boxd.put("/v1/files/workspace/none", "x").header("if-match", "*").send().await.refused(412, "FILE_CHANGED");
    assert_eq!(boxd.get(path).send().await.body, "two");
    // A write by a program of the sandbox changes the version too.
    std::fs::write(boxd.host("/workspace/a"), "by hand").unwrap();
    boxd.put(path, "four").header("if-match", &second).send().await.refused(412, "FILE_CHANGED");
    assert_eq!(names(&boxd, "/workspace"), ["a"]);
}

#[tokio::test]
async fn exactly_one_of_many_writers_with_the_same_version_succeeds() {
    let boxd = TestBoxd::start();
    let etag = boxd.put("/v1/files/workspace/a", "start").send().await.header("etag").to_owned();
    let writers = (0..16).map(|i| boxd.put("/v1/files/workspace/a", format!("writer {i}")).header("if-match", &etag).send());
    let answers = futures_util::future::join_all(writers).await;
    assert_eq!(answers.iter().filter(|a| a.status == 200).count(), 1);
    assert_eq!(answers.iter().filter(|a| a.status == 412).count(), 15);
    let makers = (0..16).map(|i| boxd.put("/v1/files/workspace/b", format!("maker {i}")).header("if-none-match", "*").send());
    let answers = futures_util::future::join_all(makers).await;
    assert_eq!(answers.iter().filter(|a| a.status == 201).count(), 1);
}

#[tokio::test]
async fn concurrent_creations_of_a_file_all_succeed_and_one_remains_whole() {
    let boxd = TestBoxd::start();
    let content = |i: usize| format!("maker {i} ").repeat(500);
    let makers = (0..16).map(|i| boxd.put("/v1/files/workspace/a?sync=false", content(i)).send());
    let answers = futures_util::future::join_all(makers).await;
    assert!(answers.iter().all(|a| a.status.is_success()), "{:?}", answers.iter().map(|a| a.status).collect::<Vec<_>>());
    let stayed = boxd.get("/v1/files/workspace/a").send().await.ok(200).body;
    assert!((0..16).any(|i| stayed == content(i)));
    assert_eq!(names(&boxd, "/workspace"), ["a"]);
}

#[tokio::test]
async fn programs_that_watch_a_directory_are_notified_when_a_new_file_is_complete() {
    use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
    let boxd = TestBoxd::start();
    let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, boxd.host("/workspace").as_path(), WatchFlags::CLOSE_WRITE).unwrap();
    boxd.put("/v1/files/workspace/new.txt?sync=false", "whole").send().await.ok(201);
    // All events have happened by the time of the response.
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut events = Reader::new(&watch, &mut buffer);
    let mut closed = Vec::new();
    while let Ok(event) = events.next() {
        assert!(event.events().contains(ReadFlags::CLOSE_WRITE));
        closed.extend(event.file_name().map(|name| name.to_string_lossy().into_owned()));
    }
    assert!(closed.iter().any(|name| name == "new.txt"), "{closed:?}");
}

#[tokio::test]
async fn a_truncated_body_leaves_the_old_file_and_nothing_else() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a", "old").send().await.ok(201);
    let mut stream = boxd.dial("clients").await;
    let token = boxd.token("fs_write");
    let head = format!(
        "PUT /v1/files/workspace/a HTTP/1.1\r\nhost: b\r\nauthorization: Bearer {}\r\ncontent-length: 1000000\r\n\r\n",
        token.expose()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&[b'n'; 300_000]).await.unwrap();
    stream.shutdown().await.unwrap();
    // The end of the connection ends the request.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut Vec::new())).await.unwrap();
    tokio::time::timeout(SOON, boxd.idle()).await.unwrap();
    assert_eq!(boxd.get("/v1/files/workspace/a").send().await.body, "old");
    let gone = async {
        while names(&boxd, "/workspace") != ["a"] {
            tokio::task::yield_now().await
        }
    };
    tokio::time::timeout(SOON, gone).await.expect("the temporary file is deleted");
}

#[tokio::test]
async fn files_and_empty_directories_can_be_deleted() {
    let boxd = TestBoxd::start();
    let delete = |path: &'static str| boxd.call(Method::DELETE, path).send();
    boxd.put("/v1/files/workspace/d/a", "x").send().await.ok(201);
    assert!(delete("/v1/files/workspace/d").await.refused(400, "INVALID_REQUEST").contains("not empty"));
    delete("/v1/files/workspace/d/a").await.ok(204);
    assert!(delete("/v1/files/workspace/d/a").await.refused(404, "FILE_NOT_FOUND").contains("/workspace/d/a"));
    delete("/v1/files/workspace/d/").await.ok(204);
    assert!(names(&boxd, "/workspace").is_empty());
    for root in ["/v1/files", "/v1/files/", "/v1/files/workspace/.."] {
        let answer = boxd.call(Method::DELETE, root).send().await;
        assert!(answer.status.is_client_error(), "{answer:?}");
    }
    assert!(boxd.host("/workspace").is_dir());
}

#[tokio::test]
async fn reading_a_directory_as_a_file_points_to_the_archive_route() {
    let boxd = TestBoxd::start();
    for path in ["/v1/files", "/v1/files/", "/v1/files/workspace", "/v1/files/workspace/"] {
        let message = boxd.get(path).send().await.refused(400, "INVALID_REQUEST");
        assert!(message.contains("is a directory") && message.contains("/v1/archive"), "{message}");
        let got: serde_json::Value = boxd.get(path).send().await.json();
        assert_eq!(got["error"]["details"]["kind"], "directory");
        assert_eq!(boxd.call(Method::HEAD, path).send().await.ok(400).header("x-file-kind"), "directory");
        boxd.put(path, "x").send().await.refused(400, "INVALID_REQUEST");
    }
    boxd.put("/v1/files/workspace/a", "x").send().await.ok(201);
    boxd.get("/v1/files/workspace/a/b").send().await.refused(400, "INVALID_REQUEST");
    boxd.put("/v1/files/workspace/a/b", "x").send().await.refused(400, "INVALID_REQUEST");
    let long = format!("/v1/files/workspace/{}", "x".repeat(256));
    boxd.put(&long, "x").send().await.refused(400, "INVALID_REQUEST");
    boxd.put("/v1/files/workspace/a", "x").header("x-file-mode", "rwx").send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn names_that_are_not_utf8_are_accepted_and_nul_is_refused() {
    let boxd = TestBoxd::start();
    let written: FileWritten = boxd.put("/v1/files/workspace/%ff%fe%20name", "bytes").send().await.ok(201).json();
    assert_eq!(written.path_b64.as_deref(), Some("L3dvcmtzcGFjZS///iBuYW1l"));
    assert_eq!(std::fs::read(boxd.host(b"/workspace/\xff\xfe name")).unwrap(), b"bytes");
    assert_eq!(boxd.get("/v1/files/workspace/%FF%FE%20name").send().await.ok(200).body, "bytes");
    for method in [Method::GET, Method::PUT, Method::DELETE] {
        let message = boxd.call(method, "/v1/files/workspace/a%00b").send().await.refused(400, "INVALID_REQUEST");
        assert!(message.contains("NUL"));
    }
}

#[tokio::test]
async fn no_path_leads_out_of_the_root() {
    let boxd = TestBoxd::start();
    std::fs::write(boxd.outside().join("secret"), "outside").unwrap();
    let outside = boxd.outside().join("secret");
    symlink(&outside, boxd.host("/workspace/absolute")).unwrap();
    symlink("../../../../../../../../etc/passwd", boxd.host("/workspace/relative")).unwrap();
    symlink("/", boxd.host("/workspace/root")).unwrap();
    symlink("../secret", boxd.host("/up")).unwrap();
    std::fs::create_dir(boxd.host("/etc")).unwrap();
    std::fs::write(boxd.host("/etc/passwd"), "the sandbox's own").unwrap();

    // The kernel resolves `..` in a link's target. A `..` sent by a client is refused.
    for inside in ["/v1/files//etc//passwd", "/v1/files/workspace/relative", "/v1/files/workspace/root/etc/passwd"] {
        assert_eq!(boxd.get(inside).send().await.ok(200).body, "the sandbox's own", "{inside}");
    }
    for path in [
        "/v1/files/../../../../etc/passwd",
        "/v1/files/workspace/../../../etc/passwd",
        "/v1/files/%2e%2e/%2e%2e/etc/passwd",
        "/v1/files/..%2f..%2fetc/passwd",
        "/v1/files/workspace/root/../etc/passwd",
        "/v1/files/../secret",
    ] {
        for method in [Method::GET, Method::PUT, Method::DELETE] {
            let message = boxd.call(method, path).send().await.refused(400, "INVALID_REQUEST");
            assert!(message.contains("contains `..`"), "{path}: {message}");
        }
    }
    for nowhere in ["/v1/files/workspace/absolute", "/v1/files/up"] {
        boxd.get(nowhere).send().await.refused(404, "FILE_NOT_FOUND");
    }
    // Writing through such links also stays inside, at the target as resolved from the sandbox's root.
    boxd.put("/v1/files/workspace/relative", "written").send().await.ok(200);
    assert_eq!(std::fs::read(boxd.host("/etc/passwd")).unwrap(), b"written");
    boxd.put("/v1/files/up", "written").send().await.ok(201);
    assert_eq!(std::fs::read(boxd.host("/secret")).unwrap(), b"written");
    boxd.put("/v1/files/workspace/absolute", "written").send().await.ok(201);
    assert_eq!(std::fs::read(&outside).unwrap(), b"outside");
    assert_eq!(std::fs::read(boxd.host(outside.to_str().unwrap())).unwrap(), b"written");
}

#[tokio::test]
async fn links_are_followed_when_writing_and_removed_themselves_when_deleting() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/real/a", "old").send().await.ok(201);
    symlink("real/a", boxd.host("/workspace/link")).unwrap();
    symlink("loop", boxd.host("/workspace/loop")).unwrap();
    boxd.put("/v1/files/workspace/link", "new").send().await.ok(200);
    assert_eq!(std::fs::read(boxd.host("/workspace/real/a")).unwrap(), b"new");
    assert!(boxd.host("/workspace/link").is_symlink());
    boxd.get("/v1/files/workspace/loop").send().await.refused(400, "INVALID_REQUEST");
    boxd.put("/v1/files/workspace/loop", "x").send().await.refused(400, "INVALID_REQUEST");
    boxd.call(Method::DELETE, "/v1/files/workspace/loop").send().await.ok(204);
    boxd.call(Method::DELETE, "/v1/files/workspace/link").send().await.ok(204);
    assert_eq!(names(&boxd, "/workspace"), ["real"]);
    assert_eq!(names(&boxd, "/workspace/real"), ["a"]);
}

#[tokio::test]
async fn fifos_and_sockets_are_refused_at_once_and_stay_unchanged() {
    let boxd = TestBoxd::start();
    let fifo = boxd.host("/workspace/fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR, 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(boxd.host("/workspace/socket")).unwrap();
    for (path, word) in [("/v1/files/workspace/fifo", "fifo"), ("/v1/files/workspace/socket", "socket")] {
        let got = tokio::time::timeout(SOON, boxd.get(path).send()).await.expect("a fifo does not block");
        assert!(got.refused(400, "INVALID_REQUEST").contains(word));
        assert_eq!((got.json::<serde_json::Value>()["error"]["details"]["kind"].as_str(), got.header("x-file-kind")), (Some(word), word));
        let put = tokio::time::timeout(SOON, boxd.put(path, "x").send()).await.unwrap();
        assert!(put.refused(400, "INVALID_REQUEST").contains(word));
    }
    assert!(std::fs::metadata(&fifo).unwrap().file_type().is_fifo());
}

#[tokio::test]
async fn kernel_file_systems_are_refused() {
    let boxd = TestBoxd::start_over_the_host();
    for path in ["proc/self/mem", "proc/self/environ", "proc/1/cmdline", "proc/version", "proc/sys/kernel/hostname", "sys/kernel/notes"] {
        for method in [Method::GET, Method::HEAD, Method::PUT, Method::DELETE] {
            let answer = boxd.call(method.clone(), &format!("/v1/files/{path}")).send().await;
            assert!(matches!(answer.status.as_u16(), 403 | 404), "{method} {path}: {answer:?}");
        }
    }
    boxd.get("/v1/files/proc/self/environ").send().await.refused(403, "FORBIDDEN");
    // The kernel's magic links may lead anywhere, so none is followed.
    for path in ["proc/self/root/etc/passwd", "proc/self/cwd/Cargo.toml", "proc/self/exe", "dev/stdin"] {
        let answer = boxd.get(&format!("/v1/files/{path}")).send().await;
        assert!(answer.status.is_client_error(), "{path}: {}", answer.status);
    }
    boxd.get("/v1/archive?path=/proc/self").send().await.refused(403, "FORBIDDEN");
    let tar = boxd.put("/v1/archive?path=/proc/self", "").header("content-type", "application/x-tar").send().await;
    tar.refused(403, "FORBIDDEN");
    boxd.get("/v1/files/dev/null").send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn the_langsmith_routes_write_and_read_in_the_sdks_format() {
    let boxd = TestBoxd::start();
    let body = "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"file\"\r\nContent-Type: application/octet-stream\r\n\r\nup\r\nload\r\n--B--\r\n";
    let upload = |path: &str, body: &'static str| {
        boxd.post(&format!("/upload?path={path}"), Bytes::from_static(body.as_bytes()))
            .header("content-type", "multipart/form-data; boundary=B")
    };
    assert!(upload("%2Fworkspace%2Fdeep%2Fa+b.txt", body).send().await.status.is_success());
    let got = boxd.get("/download?path=/workspace/deep/a%20b.txt").send().await.ok(200);
    assert_eq!(got.body, "up\r\nload");
    assert_eq!(boxd.call(Method::HEAD, "/download?path=/workspace/deep/a%20b.txt").send().await.ok(200).header("content-length"), "8");
    assert_eq!(boxd.get("/download?path=deep/a%20b.txt").header("range", "bytes=0-1").send().await.ok(206).body, "up");

    let cut = upload("/workspace/cut", &body[..body.len() - 12]).send().await;
    assert_eq!((cut.status.as_u16(), cut.json::<serde_json::Value>()["detail"]["error"].clone()), (400, "WriteError".into()));
    assert!(!boxd.host("/workspace/cut").exists());

    let missing: serde_json::Value = boxd.get("/download?path=/workspace/none").send().await.ok(404).json();
    assert_eq!(missing["detail"]["error"], "FileNotFound");
    assert!(missing["detail"]["message"].as_str().unwrap().contains("/workspace/none"));
    let directory: serde_json::Value = boxd.get("/download?path=/workspace").send().await.ok(400).json();
    assert!(directory["detail"]["message"].as_str().unwrap().contains("is a directory"));
    let unauthorized: serde_json::Value = boxd.get("/download?path=/workspace").without("authorization").send().await.ok(401).json();
    assert_eq!(unauthorized["detail"]["error"], "Unauthorized");
}
