//! Tests of finding files by name and by content.

mod support;

use std::{os::unix::fs::symlink, time::Duration};

use serde_json::{Value, json};
use support::{Answer, SOON, TestBoxd};

async fn fs(boxd: &TestBoxd, verb: &str, body: Value) -> Answer {
    boxd.post(&format!("/v1/fs/{verb}"), body.to_string()).send().await
}

fn paths(found: &Value, field: &str) -> Vec<String> {
    found[field].as_array().unwrap().iter().map(|m| m["path"].as_str().unwrap().strip_prefix("/workspace/").unwrap().to_owned()).collect()
}

async fn start_with_project() -> TestBoxd {
    let boxd = TestBoxd::start();
    for (path, text) in [
        ("src/main.rs", "fn main() {\n    hello();\n}\n"),
        ("src/lib/hello.rs", "// says hello\npub fn hello() {\n    println!(\"hello\");\n}\n"),
        ("README.md", "Hello.\nA project (1+1).\n"),
        ("target/out.rs", "hello\n"),
        ("docs/notes.txt", "nothing\n"),
        (".hidden/x.rs", "hello\n"),
        (".gitignore", "target/\n*.log\n"),
        ("docs/.gitignore", "!kept.log\n"),
        ("docs/kept.log", "hello\n"),
        ("build.log", "hello\n"),
    ] {
        boxd.put(&format!("/v1/files/workspace/{path}"), text).send().await.ok(201);
    }
    std::fs::create_dir(boxd.host("/workspace/.git")).unwrap();
    std::fs::write(boxd.host("/workspace/.git/config"), "hello\n").unwrap();
    boxd
}

#[tokio::test]
async fn globs_find_paths_and_cross_directories_only_with_double_stars() {
    let boxd = start_with_project().await;
    let find = async |body: Value| -> Vec<String> { paths(&fs(&boxd, "glob", body).await.ok(200).json(), "matches") };
    assert_eq!(find(json!({ "pattern": "*.md" })).await, ["README.md"]);
    assert_eq!(find(json!({ "pattern": "**/*.rs" })).await, [".hidden/x.rs", "src/lib/hello.rs", "src/main.rs", "target/out.rs"]);
    assert_eq!(find(json!({ "pattern": "src/*.rs" })).await, ["src/main.rs"]);
    assert_eq!(find(json!({ "pattern": "src/**/*.rs", "path": "/workspace" })).await, ["src/lib/hello.rs", "src/main.rs"]);
    assert_eq!(find(json!({ "pattern": "/workspace/src/*.rs", "path": "/" })).await, ["src/main.rs"]);
    assert_eq!(find(json!({ "pattern": "**/*.rs", "ignore": ["target", ".*"] })).await, ["src/lib/hello.rs", "src/main.rs"]);
    assert_eq!(find(json!({ "pattern": "**/*.rs", "respect_ignore": true })).await, ["src/lib/hello.rs", "src/main.rs"]);
    assert_eq!(find(json!({ "pattern": "*.rs", "path": "/workspace/target", "respect_ignore": true })).await, ["target/out.rs"]);
    assert_eq!(find(json!({ "pattern": "readme*", "case_insensitive": true })).await, ["README.md"]);
    assert_eq!(find(json!({ "pattern": "*/", "hidden": false })).await, ["docs", "src", "target"]);
    assert_eq!(find(json!({ "pattern": "no/such/*" })).await, [""; 0]);
    let cut: Value = fs(&boxd, "glob", json!({ "pattern": "**/*.rs", "limit": 2 })).await.ok(200).json();
    assert_eq!(
        (paths(&cut, "matches").len(), cut["truncated"].as_bool(), cut["stopped_by"].as_str()),
        (2, Some(true), Some("max_matches"))
    );
    fs(&boxd, "glob", json!({ "pattern": "../*" })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "glob", json!({ "pattern": "[" })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "glob", json!({ "pattern": "*", "path": "/none" })).await.refused(404, "FILE_NOT_FOUND");
    let old = std::fs::File::options().append(true).open(boxd.host("/workspace/src/main.rs")).unwrap();
    old.set_modified(std::time::SystemTime::now() - Duration::from_secs(1000)).unwrap();
    assert_eq!(find(json!({ "pattern": "src/**/*.rs", "sort": "mtime" })).await, ["src/lib/hello.rs", "src/main.rs"]);
}

#[tokio::test]
async fn grep_finds_lines_with_their_context() {
    let boxd = start_with_project().await;
    let grep = async |body: Value| -> Value { fs(&boxd, "grep", body).await.ok(200).json() };
    let found = grep(json!({ "pattern": "hello\\(", "path": "/workspace/src", "context": 1 })).await;
    let matches = found["matches"].as_array().unwrap();
    assert_eq!(paths(&found, "matches"), ["src/lib/hello.rs", "src/main.rs"]);
    assert_eq!((matches[0]["line_number"].as_u64(), matches[0]["text"].as_str()), (Some(2), Some("pub fn hello() {")));
    assert_eq!(matches[0]["spans"], json!([[7, 13]]));
    assert_eq!(matches[0]["before"][0]["text"], "// says hello");
    assert_eq!(matches[0]["after"][0]["line_number"], 3);
    assert_eq!((found["truncated"].as_bool(), found["files_searched"].as_u64()), (Some(false), Some(2)));

    assert_eq!(paths(&grep(json!({ "pattern": "(1+1)", "literal": true })).await, "matches"), ["README.md"]);
    assert_eq!(paths(&grep(json!({ "pattern": "HELLO\\.", "case_insensitive": true })).await, "matches"), ["README.md"]);
    assert_eq!(paths(&grep(json!({ "pattern": "main\\(\\) \\{\\n", "multiline": true })).await, "matches"), ["src/main.rs"]);
    let everywhere = grep(json!({ "pattern": "hello", "output": "files" })).await;
    assert_eq!(
        paths(&everywhere, "files"),
        [".git/config", ".hidden/x.rs", "build.log", "docs/kept.log", "src/lib/hello.rs", "src/main.rs", "target/out.rs"]
    );
    let tidy = grep(json!({ "pattern": "hello", "output": "count", "respect_ignore": true })).await;
    assert_eq!(paths(&tidy, "counts"), ["docs/kept.log", "src/lib/hello.rs", "src/main.rs"]);
    assert_eq!(tidy["counts"][1]["count"], 3);
    let below = grep(json!({ "pattern": "hello", "output": "files", "respect_ignore": true, "path": "/workspace/docs" })).await;
    assert_eq!(paths(&below, "files"), ["docs/kept.log"], "ignore rules above the search root apply, too");
    let only = grep(json!({ "pattern": "hello", "output": "files", "glob": ["*.rs", "!target/**"] })).await;
    assert_eq!(paths(&only, "files"), [".hidden/x.rs", "src/lib/hello.rs", "src/main.rs"]);
    let one = grep(json!({ "pattern": "hello", "path": "/workspace/src/main.rs" })).await;
    assert_eq!(paths(&one, "matches"), ["src/main.rs"]);
    for bad in [
        json!({ "pattern": "(" }),
        json!({ "pattern": "" }),
        json!({ "pattern": "a\\nb" }),
        json!({ "pattern": "a", "timeout_seconds": -1 }),
    ] {
        fs(&boxd, "grep", bad).await.refused(400, "INVALID_REQUEST");
    }
    fs(&boxd, "grep", json!({ "pattern": "a", "path": "/none" })).await.refused(404, "FILE_NOT_FOUND");
}

#[tokio::test]
async fn grep_reports_why_it_stopped_early() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/many", "match\n".repeat(500)).send().await.ok(201);
    boxd.put("/v1/files/workspace/more", "match\n".repeat(500)).send().await.ok(201);
    let cut: Value = fs(&boxd, "grep", json!({ "pattern": "match", "max_matches": 10 })).await.ok(200).json();
    assert_eq!((cut["matches"].as_array().unwrap().len(), cut["stopped_by"].as_str()), (10, Some("max_matches")));
    let per_file: Value = fs(&boxd, "grep", json!({ "pattern": "match", "max_per_file": 3 })).await.ok(200).json();
    assert_eq!((per_file["matches"].as_array().unwrap().len(), per_file["truncated"].as_bool()), (6, Some(false)));
    boxd.put("/v1/files/workspace/long", format!("needle{}\n", "é".repeat(5000))).send().await.ok(201);
    let long: Value = fs(&boxd, "grep", json!({ "pattern": "needle", "max_line_bytes": 9 })).await.ok(200).json();
    assert_eq!((long["matches"][0]["text"].as_str(), long["matches"][0]["is_cut"].as_bool()), (Some("needleé"), Some(true)));
    std::fs::File::create(boxd.host("/workspace/huge")).unwrap().set_len(1 << 40).unwrap();
    // The file consists of NULs, so it is detected as binary at its first byte.
    let huge: Value = fs(&boxd, "grep", json!({ "pattern": "match", "output": "files" })).await.ok(200).json();
    assert_eq!((huge["files_binary"].as_u64(), paths(&huge, "files")), (Some(1), vec!["many".to_owned(), "more".to_owned()]));
}

#[tokio::test]
async fn bytes_that_are_not_utf8_are_found_and_returned() {
    let boxd = TestBoxd::start();
    std::fs::write(boxd.host(b"/workspace/\xff name"), b"caf\xe9 ol\xc3\xa9\n").unwrap();
    let found: Value = fs(&boxd, "grep", json!({ "pattern": "caf" })).await.ok(200).json();
    assert_eq!(found["matches"][0]["text_b64"], "Y2Fm6SBvbMOp");
    assert_eq!(found["matches"][0]["path_b64"], "L3dvcmtzcGFjZS//IG5hbWU=");
    let found: Value = fs(&boxd, "glob", json!({ "pattern": "* name" })).await.ok(200).json();
    assert_eq!(found["matches"][0]["path_b64"], "L3dvcmtzcGFjZS//IG5hbWU=");
}

#[tokio::test]
async fn a_hostile_tree_neither_blocks_nor_misleads_a_search() {
    let boxd = TestBoxd::start();
    std::fs::write(boxd.outside().join("secret"), "needle outside").unwrap();
    symlink(boxd.outside(), boxd.host("/workspace/out")).unwrap();
    symlink(boxd.outside().join("secret"), boxd.host("/workspace/file")).unwrap();
    symlink("/", boxd.host("/workspace/root")).unwrap();
    symlink("loop", boxd.host("/workspace/loop")).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, boxd.host("/workspace/pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(boxd.host("/workspace/socket")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, boxd.host("/workspace/.gitignore"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    boxd.put("/v1/files/workspace/real", "needle").send().await.ok(201);
    let mut at: std::os::fd::OwnedFd = std::fs::File::open(boxd.host("/workspace")).unwrap().into();
    for _ in 0..300 {
        rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::RWXU).unwrap();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        at = rustix::fs::openat(&at, "d", flags, rustix::fs::Mode::empty()).unwrap();
    }
    for respect in [false, true] {
        let search = fs(&boxd, "grep", json!({ "pattern": "needle", "respect_ignore": respect }));
        let found: Value = tokio::time::timeout(SOON, search).await.expect("a fifo does not block").ok(200).json();
        assert_eq!(paths(&found, "matches"), ["real"]);
        assert_eq!(found["stopped_by"], "depth", "a limited depth is reported");
        let found: Value = fs(&boxd, "glob", json!({ "pattern": "**/secret", "respect_ignore": respect })).await.ok(200).json();
        assert_eq!(found["matches"].as_array().unwrap().len(), 0);
    }
    fs(&boxd, "grep", json!({ "pattern": "x", "path": "/workspace/pipe" })).await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn a_pattern_of_one_level_searches_one_level() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a.toml", "").send().await.ok(201);
    boxd.put("/v1/files/workspace/x/b.toml", "").send().await.ok(201);
    // Deeper than a walk descends; entering it would be reported.
    let mut at: std::os::fd::OwnedFd = std::fs::File::open(boxd.host("/workspace/x")).unwrap().into();
    for _ in 0..300 {
        rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::RWXU).unwrap();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        at = rustix::fs::openat(&at, "d", flags, rustix::fs::Mode::empty()).unwrap();
    }
    for (pattern, found, is_cut) in [
        ("*.toml", vec!["a.toml"], false),
        ("*/*.toml", vec!["x/b.toml"], false),
        ("x/*.toml", vec!["x/b.toml"], false),
        ("{a,x/b}.toml", vec!["a.toml", "x/b.toml"], false),
        ("x[!a]b.toml", vec!["x/b.toml"], false),
        ("**/*.toml", vec!["a.toml", "x/b.toml"], true),
    ] {
        let response: Value = fs(&boxd, "glob", json!({ "pattern": pattern })).await.ok(200).json();
        assert_eq!(
            (paths(&response, "matches"), response["truncated"].as_bool()),
            (found.iter().map(|s| s.to_string()).collect(), Some(is_cut)),
            "{pattern}"
        );
    }
    let listed: Value = fs(&boxd, "list", json!({ "path": "/workspace", "recursive": true })).await.ok(200).json();
    assert_eq!(listed["stopped_by"], "depth");
    let limited: Value = fs(&boxd, "list", json!({ "path": "/workspace", "recursive": true, "max_depth": 2 })).await.ok(200).json();
    assert_eq!(limited["stopped_by"], Value::Null);
}

#[tokio::test]
async fn unreadable_files_are_counted_and_binary_files_do_not_use_up_the_limit() {
    use std::os::unix::fs::PermissionsExt;
    let boxd = TestBoxd::start_as_a_user();
    // Text longer than the searcher's buffer, followed by a NUL.
    let late = [b"match\n".repeat(100_000).as_slice(), b"\0"].concat();
    std::fs::write(boxd.host("/workspace/binary"), late).unwrap();
    std::fs::write(boxd.host("/workspace/text"), "match\n").unwrap();
    std::fs::create_dir(boxd.host("/workspace/closed")).unwrap();
    std::fs::set_permissions(boxd.host("/workspace/closed"), std::fs::Permissions::from_mode(0o000)).unwrap();
    let found: Value = fs(&boxd, "grep", json!({ "pattern": "match", "max_matches": 100_000 })).await.ok(200).json();
    assert_eq!((paths(&found, "matches"), found["truncated"].as_bool()), (vec!["text".to_owned()], Some(false)), "{found}");
    assert_eq!((found["files_binary"].as_u64(), found["directories_unreadable"].as_u64()), (Some(1), Some(1)));
    let found: Value = fs(&boxd, "glob", json!({ "pattern": "**/t*" })).await.ok(200).json();
    assert_eq!((paths(&found, "matches"), found["directories_unreadable"].as_u64()), (vec!["text".to_owned()], Some(1)));
    std::fs::set_permissions(boxd.host("/workspace/closed"), std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[tokio::test]
async fn many_concurrent_searches_are_all_answered() {
    let boxd = start_with_project().await;
    for i in 0..200 {
        std::fs::create_dir(boxd.host(format!("/workspace/d{i}"))).unwrap();
        std::fs::write(boxd.host(format!("/workspace/d{i}/f")), "needle\n").unwrap();
    }
    let searches = (0..16).map(|_| fs(&boxd, "grep", json!({ "pattern": "needle" })));
    for answer in futures_util::future::join_all(searches).await {
        let found: Value = answer.ok(200).json();
        assert_eq!(found["matches"].as_array().unwrap().len(), 200);
    }
}

#[tokio::test]
async fn the_langsmith_routes_search_in_the_sdks_format() {
    let boxd = start_with_project().await;
    let found: Value = boxd.post("/glob", json!({ "pattern": "*.md", "path": "/workspace" }).to_string()).send().await.ok(200).json();
    assert_eq!(
        (found["matches"][0]["path"].as_str(), found["matches"][0]["is_dir"].as_bool()),
        (Some("/workspace/README.md"), Some(false))
    );
    assert_eq!(found["matches"][0]["size_bytes"], 24);
    let found: Value = boxd.post("/grep", json!({ "pattern": "(1+1)", "path": "." }).to_string()).send().await.ok(200).json();
    assert_eq!((found["matches"][0]["line"].as_u64(), found["truncated"].as_bool()), (Some(2), Some(false)));
    std::fs::write(boxd.host(b"/workspace/odd\xff"), "(2+2)").unwrap();
    let found: Value = boxd.post("/glob", json!({ "pattern": "odd*" }).to_string()).send().await.ok(200).json();
    assert_eq!(found["matches"][0]["path_b64"], "L3dvcmtzcGFjZS9vZGT/");
    let found: Value = boxd.post("/grep", json!({ "pattern": "(2+2)" }).to_string()).send().await.ok(200).json();
    assert_eq!(found["matches"][0]["path_b64"], "L3dvcmtzcGFjZS9vZGT/");
    let none = boxd.post("/grep", json!({ "pattern": "x", "path": "/none" }).to_string()).send().await.ok(404);
    assert_eq!(none.json::<Value>()["detail"]["error"], "FileNotFound");
}
