//! Tests of listing, describing, creating, moving, copying, removing and editing files.

mod support;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use serde_json::{Value, json};
use support::{Answer, TestBoxd};

async fn fs(boxd: &TestBoxd, verb: &str, body: Value) -> Answer {
    boxd.post(&format!("/v1/fs/{verb}"), body.to_string()).send().await
}

fn names(list: &Value) -> Vec<String> {
    list["entries"].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_directory_is_listed_in_order_with_metadata() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/b.txt", "hello").header("x-file-mode", "640").send().await.ok(201);
    std::fs::create_dir(boxd.host("/workspace/a")).unwrap();
    symlink("/nowhere/at all", boxd.host("/workspace/c")).unwrap();
    std::fs::write(boxd.host(b"/workspace/\xff"), "x").unwrap();
    std::fs::write(boxd.host("/workspace/.cobox-0123456789abcdef.tmp"), "on its way").unwrap();
    let listed: Value = fs(&boxd, "list", json!({})).await.ok(200).json();
    assert_eq!(names(&listed), ["a", "b.txt", "c", "\u{fffd}"]);
    let [a, b, c, odd] = listed["entries"].as_array().unwrap().as_slice() else { panic!("{listed}") };
    assert_eq!((a["type"].as_str(), a["path"].as_str()), (Some("directory"), Some("/workspace/a")));
    assert_eq!((b["type"].as_str(), b["size"].as_u64(), b["mode"].as_str()), (Some("file"), Some(5), Some("640")));
    assert_eq!(b["etag"], boxd.get("/v1/files/workspace/b.txt").send().await.header("etag"));
    assert_eq!((c["type"].as_str(), c["target"].as_str()), (Some("symlink"), Some("/nowhere/at all")));
    assert_eq!((odd["name_b64"].as_str(), odd["path_b64"].as_str()), (Some("/w=="), Some("L3dvcmtzcGFjZS//")));
    let stat: Value = fs(&boxd, "stat", json!({ "path_b64": odd["path_b64"] })).await.ok(200).json();
    assert_eq!((stat["size"].as_u64(), stat["name_b64"].as_str()), (Some(1), Some("/w==")));
    let link: Value = fs(&boxd, "stat", json!({ "path": "/workspace/c" })).await.ok(200).json();
    assert_eq!(link["type"], "symlink");
    fs(&boxd, "stat", json!({ "path": "/workspace/c", "follow": true })).await.refused(404, "FILE_NOT_FOUND");
    fs(&boxd, "list", json!({ "path": "/workspace/b.txt" })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "list", json!({ "path": "/none" })).await.refused(404, "FILE_NOT_FOUND");
    fs(&boxd, "list", json!({ "limit": 0 })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "list", json!({ "pth": "/" })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "stat", json!({})).await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn pages_add_up_to_the_whole_in_every_order_while_entries_change() {
    let boxd = TestBoxd::start();
    for i in 0..250u64 {
        std::fs::write(boxd.host(format!("/workspace/f{i:03}")), "x".repeat((i * 7 % 50) as usize)).unwrap();
    }
    for (sort, descending) in [("name", false), ("name", true), ("size", false), ("size", true), ("mtime", true)] {
        let whole: Value = fs(&boxd, "list", json!({ "sort": sort, "descending": descending })).await.ok(200).json();
        assert!(whole["next_cursor"].is_null());
        let (mut all, mut cursor) = (Vec::new(), Value::Null);
        loop {
            let page: Value =
                fs(&boxd, "list", json!({ "sort": sort, "descending": descending, "limit": 37, "cursor": cursor })).await.ok(200).json();
            all.extend(names(&page));
            cursor = page["next_cursor"].clone();
            if cursor.is_null() {
                break;
            }
        }
        assert_eq!(all, names(&whole), "{sort} {descending}");
    }
    let first: Value = fs(&boxd, "list", json!({ "limit": 100 })).await.ok(200).json();
    std::fs::write(boxd.host("/workspace/a-new-first-one"), "").unwrap();
    std::fs::remove_file(boxd.host("/workspace/f099")).unwrap();
    let second: Value = fs(&boxd, "list", json!({ "limit": 1, "cursor": first["next_cursor"] })).await.ok(200).json();
    assert_eq!(names(&second), ["f100"]);
    fs(&boxd, "list", json!({ "cursor": first["next_cursor"], "sort": "size" })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "list", json!({ "cursor": "nonsense" })).await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn a_recursive_list_has_pages_and_does_not_enter_links() {
    let boxd = TestBoxd::start();
    for path in ["a/1", "a/b/2", "a/b/c/3", "a.txt", "z"] {
        boxd.put(&format!("/v1/files/workspace/{path}"), "x").send().await.ok(201);
    }
    symlink("/workspace", boxd.host("/workspace/a/loop")).unwrap();
    let whole: Value = fs(&boxd, "list", json!({ "recursive": true })).await.ok(200).json();
    let paths = |l: &Value| -> Vec<String> {
        l["entries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|e| e["path"].as_str().unwrap().strip_prefix("/workspace/").unwrap().to_owned())
            .collect()
    };
    assert_eq!(paths(&whole), ["a", "a/1", "a/b", "a/b/2", "a/b/c", "a/b/c/3", "a/loop", "a.txt", "z"]);
    for limit in 1..5 {
        let (mut all, mut cursor) = (Vec::new(), Value::Null);
        loop {
            let page: Value = fs(&boxd, "list", json!({ "recursive": true, "limit": limit, "cursor": cursor })).await.ok(200).json();
            all.extend(paths(&page));
            cursor = page["next_cursor"].clone();
            if cursor.is_null() {
                break;
            }
        }
        assert_eq!(all, paths(&whole));
    }
    let two: Value = fs(&boxd, "list", json!({ "recursive": true, "max_depth": 2 })).await.ok(200).json();
    assert_eq!(paths(&two), ["a", "a/1", "a/b", "a/loop", "a.txt", "z"]);
}

#[tokio::test]
async fn a_forged_cursor_that_opens_one_directory_many_times_is_refused() {
    use base64::Engine;
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a/b", "x").send().await.ok(201);
    let deep = "a/".repeat(200);
    for name in ["./././a", "a//b", "", "a/../a/b", deep.trim_end_matches('/')] {
        // The format of a recursive list's own cursors.
        let bytes = [[8u8].as_slice(), &[0; 16], name.as_bytes()].concat();
        let cursor = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes);
        fs(&boxd, "list", json!({ "recursive": true, "cursor": cursor })).await.refused(400, "INVALID_REQUEST");
    }
}

#[tokio::test]
async fn directories_are_created_once_and_existing_names_are_reported() {
    let boxd = TestBoxd::start();
    let made: Value = fs(&boxd, "mkdir", json!({ "path": "/workspace/d", "mode": "750" })).await.ok(200).json();
    assert_eq!(made["changed"], true);
    assert_eq!(std::fs::metadata(boxd.host("/workspace/d")).unwrap().mode() & 0o777, 0o750);
    fs(&boxd, "mkdir", json!({ "path": "/workspace/d" })).await.refused(409, "FILE_EXISTS");
    let again: Value = fs(&boxd, "mkdir", json!({ "path": "/workspace/d/", "exist_ok": true })).await.ok(200).json();
    assert_eq!(again["changed"], false);
    fs(&boxd, "mkdir", json!({ "path": "/workspace/x/y" })).await.refused(404, "FILE_NOT_FOUND");
    fs(&boxd, "mkdir", json!({ "path": "/workspace/x/y", "parents": true })).await.ok(200);
    boxd.put("/v1/files/workspace/f", "x").send().await.ok(201);
    fs(&boxd, "mkdir", json!({ "path": "/workspace/f", "exist_ok": true })).await.refused(409, "FILE_EXISTS");
    fs(&boxd, "mkdir", json!({ "path": "/", "exist_ok": true })).await.ok(200);
    fs(&boxd, "mkdir", json!({ "path": "/workspace/m", "mode": "999" })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "mkdir", json!({ "path_b64": "L3dvcmtzcGFjZS//" })).await.ok(200);
    assert!(boxd.host(b"/workspace/\xff").is_dir());
}

#[tokio::test]
async fn files_and_directories_are_moved_and_replace_nothing_unless_requested() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a", "one").send().await.ok(201);
    boxd.put("/v1/files/workspace/b", "two").send().await.ok(201);
    fs(&boxd, "move", json!({ "from": "/workspace/a", "to": "/workspace/b" })).await.refused(409, "FILE_EXISTS");
    fs(&boxd, "move", json!({ "from": "/workspace/a", "to": "/workspace/new/place" })).await.ok(200);
    fs(&boxd, "move", json!({ "from": "/workspace/new/place", "to": "/workspace/b", "overwrite": true })).await.ok(200);
    assert_eq!(boxd.get("/v1/files/workspace/b").send().await.body, "one");
    fs(&boxd, "move", json!({ "from": "/workspace/none", "to": "/workspace/x" })).await.refused(404, "FILE_NOT_FOUND");
    fs(&boxd, "move", json!({ "from": "/workspace/new", "to": "/workspace/new/in" })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "move", json!({ "from": "/workspace/b", "to": "/workspace/new", "overwrite": true })).await.refused(409, "FILE_EXISTS");
    fs(&boxd, "move", json!({ "from": "/workspace/new", "to": "/workspace/other/" })).await.ok(200);
    assert!(boxd.host("/workspace/other").is_dir());
    symlink("/etc/passwd", boxd.host("/workspace/link")).unwrap();
    fs(&boxd, "move", json!({ "from": "/workspace/link", "to": "/workspace/moved" })).await.ok(200);
    assert!(boxd.host("/workspace/moved").is_symlink());
}

#[tokio::test]
async fn a_tree_is_copied_with_links_as_links_and_without_fifos() {
    let boxd = TestBoxd::start();
    for path in ["t/a", "t/d/b"] {
        boxd.put(&format!("/v1/files/workspace/{path}"), "x".repeat(100_000)).header("x-file-mode", "600").send().await.ok(201);
    }
    symlink("../../..", boxd.host("/workspace/t/up")).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, boxd.host("/workspace/t/pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
    std::fs::set_permissions(boxd.host("/workspace/t/d"), std::fs::Permissions::from_mode(0o500)).unwrap();
    fs(&boxd, "copy", json!({ "from": "/workspace/t", "to": "/workspace/u" })).await.refused(400, "INVALID_REQUEST");
    let done: Value = fs(&boxd, "copy", json!({ "from": "/workspace/t", "to": "/workspace/u", "recursive": true })).await.ok(200).json();
    assert_eq!((done["entries"].as_u64(), done["bytes"].as_u64(), done["skipped"].as_u64()), (Some(5), Some(200_000), Some(1)), "{done}");
    assert_eq!(std::fs::read_link(boxd.host("/workspace/u/up")).unwrap().to_str(), Some("../../.."));
    let copy = std::fs::metadata(boxd.host("/workspace/u/d/b")).unwrap();
    assert_eq!((copy.len(), copy.mode() & 0o777), (100_000, 0o600));
    assert_eq!(std::fs::metadata(boxd.host("/workspace/u/d")).unwrap().mode() & 0o777, 0o500);
    fs(&boxd, "copy", json!({ "from": "/workspace/t", "to": "/workspace/u", "recursive": true })).await.refused(409, "FILE_EXISTS");
    fs(&boxd, "copy", json!({ "from": "/workspace/t", "to": "/workspace/t/in", "recursive": true })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "copy", json!({ "from": "/workspace/t/pipe", "to": "/workspace/p" })).await.refused(400, "INVALID_REQUEST");
    fs(&boxd, "copy", json!({ "from": "/workspace/t/a", "to": "/workspace/one" })).await.ok(200);
    fs(&boxd, "copy", json!({ "from": "/workspace/t/a", "to": "/workspace/one" })).await.refused(409, "FILE_EXISTS");
    fs(&boxd, "copy", json!({ "from": "/workspace/t/d/b", "to": "/workspace/one", "overwrite": true })).await.ok(200);
    let listed: Value = fs(&boxd, "list", json!({})).await.json();
    assert_eq!(names(&listed), ["one", "t", "u"], "nothing temporary is left");
}

#[tokio::test]
async fn a_tree_of_any_depth_is_removed_without_following_its_links() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/keep/a", "kept").send().await.ok(201);
    boxd.put("/v1/files/workspace/t/a", "x").send().await.ok(201);
    symlink(boxd.host("/workspace/keep"), boxd.host("/workspace/t/link")).unwrap();
    symlink("../keep", boxd.host("/workspace/t/link2")).unwrap();
    let mut at: std::os::fd::OwnedFd = std::fs::File::open(boxd.host("/workspace/t")).unwrap().into();
    for _ in 0..3000 {
        rustix::fs::mkdirat(&at, "deep", rustix::fs::Mode::RWXU).unwrap();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        at = rustix::fs::openat(&at, "deep", flags, rustix::fs::Mode::empty()).unwrap();
    }
    drop(at);
    fs(&boxd, "remove", json!({ "path": "/workspace/t" })).await.refused(400, "INVALID_REQUEST");
    let done: Value = fs(&boxd, "remove", json!({ "path": "/workspace/t", "recursive": true })).await.ok(200).json();
    assert_eq!(done["entries"], 3004);
    assert!(!boxd.host("/workspace/t").exists());
    assert_eq!(std::fs::read(boxd.host("/workspace/keep/a")).unwrap(), b"kept");
    fs(&boxd, "remove", json!({ "path": "/workspace/t" })).await.refused(404, "FILE_NOT_FOUND");
    let none: Value = fs(&boxd, "remove", json!({ "path": "/workspace/t/x", "missing_ok": true })).await.ok(200).json();
    assert_eq!(none["changed"], false);
    for root in ["/", "/workspace/..", "/workspace/."] {
        let answer = fs(&boxd, "remove", json!({ "path": root, "recursive": true })).await;
        assert!(answer.status.is_client_error(), "{root}: {answer:?}");
    }
    assert!(boxd.host("/workspace/keep").is_dir());
}

#[tokio::test]
async fn an_edit_must_match_exactly_once_and_honours_a_version() {
    let boxd = TestBoxd::start();
    let put = boxd.put("/v1/files/workspace/a", "fn one() {}\nfn two() {}\n").header("x-file-mode", "755").send().await.ok(201);
    let old_tag = put.header("etag").to_owned();
    let edit = |body: Value| fs(&boxd, "edit", body);
    let done: Value = edit(json!({ "path": "/workspace/a", "old": "one", "new": "1", "if_match": old_tag })).await.ok(200).json();
    assert_eq!((done["replacements"].as_u64(), done["size"].as_u64()), (Some(1), Some(22)));
    assert_eq!(done["etag"], boxd.get("/v1/files/workspace/a").send().await.header("etag"));
    edit(json!({ "path": "/workspace/a", "old": "two", "new": "2", "if_match": old_tag })).await.refused(412, "FILE_CHANGED");
    let twice = edit(json!({ "path": "/workspace/a", "old": "fn", "new": "pub fn" })).await;
    assert!(twice.refused(400, "INVALID_REQUEST").contains("2 times"));
    assert_eq!(twice.json::<Value>()["error"]["details"]["count"], 2);
    edit(json!({ "path": "/workspace/a", "old": "nothing like it", "new": "" })).await.refused(400, "INVALID_REQUEST");
    let edits = json!([{ "old": "fn", "new": "pub fn", "replace_all": true }, { "old": "absent", "new": "" }]);
    assert!(edit(json!({ "path": "/workspace/a", "edits": edits })).await.refused(400, "INVALID_REQUEST").contains("edits[1]"));
    assert_eq!(boxd.get("/v1/files/workspace/a").send().await.body, "fn 1() {}\nfn two() {}\n", "all or nothing");
    let edits = json!([{ "old": "fn", "new": "pub fn", "replace_all": true }, { "old": "pub fn two", "new": "fn 2" }]);
    edit(json!({ "path": "/workspace/a", "edits": edits })).await.ok(200);
    assert_eq!(boxd.get("/v1/files/workspace/a").send().await.body, "pub fn 1() {}\nfn 2() {}\n");
    assert_eq!(std::fs::metadata(boxd.host("/workspace/a")).unwrap().mode() & 0o777, 0o755);
    boxd.put("/v1/files/workspace/crlf", "a\r\nb\r\n").send().await.ok(201);
    edit(json!({ "path": "/workspace/crlf", "old": "a\nb", "new": "x\ny\nz" })).await.ok(200);
    assert_eq!(boxd.get("/v1/files/workspace/crlf").send().await.body, "x\r\ny\r\nz\r\n");
    edit(json!({ "path": "/workspace/none", "old": "a", "new": "b" })).await.refused(404, "FILE_NOT_FOUND");
    edit(json!({ "path": "/workspace", "old": "a", "new": "b" })).await.refused(400, "INVALID_REQUEST");
    edit(json!({ "path": "/workspace/a", "old": "", "new": "b" })).await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn concurrent_edits_of_one_file_are_all_applied() {
    let boxd = TestBoxd::start();
    let text: String = (0..8).map(|i| format!("line {i};\n")).collect();
    boxd.put("/v1/files/workspace/a", text).send().await.ok(201);
    let edits =
        (0..8).map(|i| fs(&boxd, "edit", json!({ "path": "/workspace/a", "old": format!("line {i};"), "new": format!("done {i};") })));
    let answers = futures_util::future::join_all(edits).await;
    let done = answers.iter().filter(|a| a.status == 200).count();
    let body = boxd.get("/v1/files/workspace/a").send().await.body;
    assert_eq!(String::from_utf8_lossy(&body).matches("done").count(), done, "every confirmed edit is present");
    assert!(answers.iter().all(|a| a.status == 200 || a.status == 412));
}

#[tokio::test]
async fn changes_require_the_write_capability() {
    let boxd = TestBoxd::start();
    let reader = boxd.token("fs_read");
    let writer = boxd.token("fs_write");
    for verb in ["mkdir", "move", "copy", "remove", "edit"] {
        boxd.post(&format!("/v1/fs/{verb}"), "{}").token(&reader).send().await.refused(403, "CAPABILITY_DENIED");
    }
    // An edit reveals whether a text is in the file, and a copy the amount of data.
    for verb in ["list", "stat", "glob", "grep", "edit", "copy"] {
        boxd.post(&format!("/v1/fs/{verb}"), "{}").token(&writer).send().await.refused(403, "CAPABILITY_DENIED");
    }
}
