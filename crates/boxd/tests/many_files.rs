//! Tests of many files in one request, and of content hashes.

mod support;

use http::Method;
use serde_json::Value;
use support::TestBoxd;

const BOUNDARY: &str = "XyZ";

fn multipart(parts: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (head, content) in parts {
        body.extend_from_slice(format!("--{BOUNDARY}\r\n{head}\r\n\r\n").as_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    body
}

async fn upload(boxd: &TestBoxd, query: &str, parts: &[(&str, &[u8])]) -> support::Answer {
    let content_type = format!("multipart/form-data; boundary={BOUNDARY}");
    boxd.post(&format!("/v1/files/upload{query}"), multipart(parts)).header("content-type", &content_type).send().await
}

/// Head and content of each part of a multipart response.
fn parts(answer: &support::Answer) -> Vec<(String, Vec<u8>)> {
    let boundary = format!("--{}", answer.header("content-type").split_once("boundary=").unwrap().1);
    let mut rest = answer.body.as_ref();
    let mut found = Vec::new();
    loop {
        rest = rest.strip_prefix(boundary.as_bytes()).expect("a part begins with the boundary");
        if rest == b"--\r\n" {
            return found;
        }
        let end = rest.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(rest[2..end].to_vec()).unwrap();
        let length: usize = head.lines().find_map(|l| l.strip_prefix("content-length: ")).unwrap().parse().unwrap();
        found.push((head, rest[end + 4..end + 4 + length].to_vec()));
        rest = rest[end + 4 + length..].strip_prefix(b"\r\n").unwrap();
    }
}

#[tokio::test]
async fn many_files_are_uploaded_each_with_its_own_result() {
    let boxd = TestBoxd::start();
    let large = vec![b'l'; 3 << 20];
    let answer = upload(
        &boxd,
        "?path=/workspace/in",
        &[
            ("content-disposition: form-data; name=\"files\"; filename=\"a/b.txt\"", b"one"),
            ("content-disposition: form-data; name=\"/workspace/absolute\"", &large),
            ("content-disposition: form-data; name=\"x\"\r\nx-file-path: %ff%0a%22\r\nx-file-mode: 600", b"odd"),
        ],
    )
    .await
    .ok(200);
    let response: Value = answer.json();
    let files = response["files"].as_array().unwrap();
    assert_eq!((files[0]["path"].as_str(), files[0]["size"].as_u64()), (Some("/workspace/in/a/b.txt"), Some(3)));
    assert_eq!(files[0]["etag"], boxd.get("/v1/files/workspace/in/a/b.txt").send().await.ok(200).header("etag"));
    assert!(std::fs::read(boxd.host("/workspace/absolute")).unwrap() == large);
    assert_eq!(std::fs::read(boxd.host(b"/workspace/in/\xff\n\"")).unwrap(), b"odd");
    assert!(files[2]["path_b64"].is_string());
}

#[tokio::test]
async fn one_failing_file_does_not_stop_the_others() {
    let boxd = TestBoxd::start();
    std::fs::create_dir(boxd.host("/workspace/dir")).unwrap();
    let answer = upload(
        &boxd,
        "",
        &[
            ("content-disposition: form-data; name=\"dir\"", &vec![b'x'; 2 << 20]),
            ("content-disposition: form-data; name=\"ok\"", b"fine"),
            ("content-disposition: form-data; name=\"n\"\r\nx-file-path: a%00b", b"nul"),
            ("content-disposition: form-data; name=\"../../../../out\"", b"nowhere"),
            ("content-disposition: form-data; name=\"m\"\r\nx-file-mode: rwx", b"mode"),
        ],
    )
    .await
    .ok(207);
    let response: Value = answer.json();
    let codes: Vec<_> = response["files"].as_array().unwrap().iter().map(|f| f["error"]["code"].as_str()).collect();
    assert_eq!(codes, [Some("INVALID_REQUEST"), None, Some("INVALID_REQUEST"), Some("INVALID_REQUEST"), Some("INVALID_REQUEST")]);
    assert!(response["files"][3]["error"]["message"].as_str().unwrap().contains("contains `..`"), "{response}");
    assert_eq!(response["files"][0]["error"]["request_id"], answer.header("x-request-id"));
    assert_eq!(std::fs::read(boxd.host("/workspace/ok")).unwrap(), b"fine");
    assert!(!boxd.host("/out").exists() && !boxd.outside().join("out").exists());
    upload(&boxd, "", &[]).await.refused(400, "INVALID_REQUEST");
    boxd.post("/v1/files/upload", "x").send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn a_partial_upload_is_refused() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a", "the whole file").send().await.ok(201);
    let response = boxd.put("/v1/files/workspace/a", "file").header("content-range", "bytes 10-13/14").send().await;
    assert!(response.refused(400, "INVALID_REQUEST").contains("Content-Range"));
    assert_eq!(boxd.get("/v1/files/workspace/a").send().await.body, "the whole file");
    // Ranges apply only to GET (RFC 9110): HEAD describes the whole file.
    let head = boxd.call(Method::HEAD, "/v1/files/workspace/a").header("range", "bytes=0-2").send().await.ok(200);
    assert_eq!((head.header("content-length"), head.headers.contains_key("content-range")), ("14", false));
    boxd.call(Method::HEAD, "/v1/files/workspace/a").header("range", "bytes=99-").send().await.ok(200);
    // A weak tag doesn't match, so that a change only replaces exactly the content that was read.
    let etag = head.header("etag").to_owned();
    let weak = format!("W/{etag}");
    boxd.put("/v1/files/workspace/a", "x").header("if-match", &weak).send().await.refused(412, "FILE_CHANGED");
    assert_eq!(boxd.get("/v1/files/workspace/a").header("if-none-match", &weak).send().await.status, 304);
    boxd.put("/v1/files/workspace/a", "x").header("if-match", &etag).send().await.ok(200);
}

#[tokio::test]
async fn many_files_are_downloaded_in_one_response_with_errors_in_their_positions() {
    let boxd = TestBoxd::start();
    let large: Vec<u8> = (0..2_000_000u32).map(|i| i as u8).collect();
    boxd.put("/v1/files/workspace/large", large.clone()).send().await.ok(201);
    let etag = boxd.put("/v1/files/workspace/%ff", "odd").send().await.ok(201).header("etag").to_owned();
    let got = boxd.get("/v1/files/download?path=/workspace/large&path=none&path=%2Fworkspace%2F%ff&path=/workspace").send().await.ok(200);
    let parts = parts(&got);
    assert_eq!(parts.len(), 4);
    assert!(parts[0].1 == large);
    assert!(parts[1].0.contains("x-file-error: FILE_NOT_FOUND") && parts[1].0.contains("x-file-path: /workspace/none"), "{}", parts[1].0);
    assert_eq!(serde_json::from_slice::<Value>(&parts[1].1).unwrap()["error"]["request_id"], got.header("x-request-id"));
    assert_eq!(parts[2].1, b"odd");
    assert!(parts[2].0.contains("x-file-path: /workspace/%FF") && parts[2].0.contains(&format!("etag: {etag}")), "{}", parts[2].0);
    assert!(parts[3].0.contains("x-file-error: INVALID_REQUEST"));
}

#[tokio::test]
async fn files_named_like_routes_are_still_files() {
    let boxd = TestBoxd::start();
    for name in ["upload", "download"] {
        let path = format!("/v1/files/{name}");
        boxd.put(&path, name).send().await.ok(201);
        assert_eq!(boxd.get(&path).send().await.ok(200).body, name);
        boxd.call(Method::HEAD, &path).send().await.ok(200);
        boxd.call(Method::DELETE, &path).send().await.ok(204);
    }
}

#[tokio::test]
async fn a_hash_of_the_whole_file_is_returned_on_request() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a", "abc").send().await.ok(201);
    let sha = "sha-256=:ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=:";
    let blake = "blake3=:ZDezrDhGUTP/tjt1JzqNtUjFWEZdedsD/TWcbNW9nYU=:";
    let get = |query: &str| boxd.get(&format!("/v1/files/workspace/a{query}"));
    assert_eq!(get("?hash=sha256").send().await.ok(200).header("repr-digest"), sha);
    assert_eq!(get("?hash=sha256,blake3").send().await.ok(200).header("repr-digest"), format!("{sha}, {blake}"));
    assert_eq!(get("").header("want-repr-digest", "blake3=3, md5=1, sha-256=0").send().await.ok(200).header("repr-digest"), blake);
    assert!(get("").send().await.ok(200).headers.get("repr-digest").is_none());
    let part = get("?hash=sha256").header("range", "bytes=1-1").send().await.ok(206);
    assert_eq!(
        (part.body.as_ref(), part.header("repr-digest")),
        (b"b".as_slice(), sha),
        "the hash is of the whole file, also for a partial response"
    );
    let head = boxd.call(Method::HEAD, "/v1/files/workspace/a?hash=sha256").send().await.ok(200);
    assert_eq!((head.header("repr-digest"), head.header("content-length")), (sha, "3"));
    get("?hash=md5").send().await.refused(400, "INVALID_REQUEST");
    boxd.put("/v1/files/workspace/large", vec![0; 3 << 20]).send().await.ok(201);
    let head = boxd.call(Method::HEAD, "/v1/files/workspace/large?hash=sha256").send().await.ok(200);
    assert_eq!(head.header("repr-digest"), "sha-256=:u9Bc9gl6ybH4nqKdJULBt7Z+5GhIOTiV9ankP6H2IeU=:");
}

#[tokio::test]
async fn a_write_can_skip_waiting_for_the_disk() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a?sync=false", "abc").send().await.ok(201);
    assert_eq!(boxd.get("/v1/files/workspace/a").send().await.body, "abc");
    boxd.put("/v1/files/workspace/a?sync=perhaps", "abc").send().await.refused(400, "INVALID_REQUEST");
}
