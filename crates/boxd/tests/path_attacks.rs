//! A table of path attacks, each with its required response. Attacks that need a real sandbox's /proc, /sys and /dev
//! are in `tests/e2e/path_attacks.rs`.

mod support;

use std::{
    os::unix::fs::symlink,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use http::Method;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};
use support::{Answer, SOON, TestBoxd};

/// The required response to an attack.
#[derive(Clone, Copy, Debug)]
enum Outcome {
    /// The content of the sandbox's own file of that path.
    Inside(&'static str),
    /// An error about the `..`, whether or not the path exists.
    NoStepUp,
    Status(u16, &'static str),
}
use Outcome::{Inside, NoStepUp, Status};

const NOT_FOUND: Outcome = Status(404, "FILE_NOT_FOUND");
const INVALID: Outcome = Status(400, "INVALID_REQUEST");

/// A sandbox next to a secret, with links and special files as a hostile program would leave them.
fn start_with_attack_files() -> TestBoxd {
    let boxd = TestBoxd::start();
    std::fs::write(boxd.outside().join("secret"), "OUTSIDE").unwrap();
    std::fs::create_dir(boxd.host("/etc")).unwrap();
    std::fs::write(boxd.host("/etc/passwd"), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/file"), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/File"), "other").unwrap();
    std::fs::write(boxd.host(b"/workspace/\xff\xfe"), "inside").unwrap();
    std::fs::write(boxd.host(b"/workspace/\xc0\xae\xc0\xae"), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/%2e%2e"), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/new\nline"), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/\u{1b}[2J"), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/back\\slash"), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/ space "), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/..."), "inside").unwrap();
    std::fs::write(boxd.host("/workspace/q?x#y"), "inside").unwrap();
    std::fs::write(boxd.host(format!("/workspace/{}", "n".repeat(255))), "inside").unwrap();
    for (link, target) in [
        ("abs", boxd.outside().join("secret").to_str().unwrap().to_owned()),
        ("rel", "../../secret".into()),
        ("deep", "../../../../../../../../../../secret".into()),
        ("top", "/".into()),
        ("up", "..".into()),
        ("outdir", boxd.outside().to_str().unwrap().to_owned()),
        ("selfloop", "selfloop".into()),
        ("good", "/etc/passwd".into()),
        ("proc", "/proc/self/root/etc/passwd".into()),
        ("fd", "/proc/self/fd/0".into()),
    ] {
        symlink(target, boxd.host(format!("/workspace/{link}"))).unwrap();
    }
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, boxd.host("/workspace/pipe"), FileType::Fifo, mode, 0).unwrap();
    boxd
}

const READS: &[(&str, Outcome)] = &[
    ("/v1/files/../secret", NoStepUp),
    ("/v1/files/../../secret", NoStepUp),
    ("/v1/files/workspace/../../secret", NoStepUp),
    ("/v1/files/workspace/../../../../../../secret", NoStepUp),
    ("/v1/files/%2e%2e/secret", NoStepUp),
    ("/v1/files/%2E%2E%2Fsecret", NoStepUp),
    ("/v1/files/..%2fsecret", NoStepUp),
    ("/v1/files/..%5csecret", NOT_FOUND),
    ("/v1/files/workspace%2f..%2f..%2fsecret", NoStepUp),
    ("/v1/files/%252e%252e/secret", NOT_FOUND),
    ("/v1/files/%252e%252e%252fsecret", NOT_FOUND),
    ("/v1/files/%c0%ae%c0%ae/secret", NOT_FOUND),
    ("/v1/files/%e0%80%ae%e0%80%ae/secret", NOT_FOUND),
    ("/v1/files/%uff0e%uff0e/secret", NOT_FOUND),
    ("/v1/files/....//secret", NOT_FOUND),
    ("/v1/files/..;/secret", NOT_FOUND),
    ("/v1/files/./../secret", NoStepUp),
    ("/v1/files/workspace/up/up/up/secret", NOT_FOUND),
    ("/v1/files/workspace/up/secret", NOT_FOUND),
    ("/v1/files/workspace/abs", NOT_FOUND),
    ("/v1/files/workspace/rel", NOT_FOUND),
    ("/v1/files/workspace/deep", NOT_FOUND),
    ("/v1/files/workspace/outdir/secret", NOT_FOUND),
    ("/v1/files/workspace/top/../secret", NoStepUp),
    ("/v1/files/workspace/selfloop", INVALID),
    ("/v1/files/workspace/selfloop/x", INVALID),
    ("/v1/files/workspace/proc", NOT_FOUND),
    ("/v1/files/workspace/fd", NOT_FOUND),
    ("/v1/files/workspace/pipe", INVALID),
    ("/v1/files/workspace/a%00b", INVALID),
    ("/v1/files/%00", INVALID),
    ("/v1/files/workspace/file%00.txt", INVALID),
    ("/v1/files/workspace/file/", INVALID),
    ("/v1/files/workspace/file/.", INVALID),
    ("/v1/files/workspace/file/..", NoStepUp),
    ("/v1/files/workspace/file/../file", NoStepUp),
    ("/v1/files/workspace/", INVALID),
    ("/v1/files/.", INVALID),
    ("/v1/files/..", NoStepUp),
    ("/v1/files//", INVALID),
    ("/v1/files/workspace/FILE", NOT_FOUND),
    ("/v1/files/workspace/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd", NoStepUp),
    ("/v1/files/../../../etc/passwd", NoStepUp),
    ("/v1/files//etc/passwd", Inside("inside")),
    ("/v1/files///etc////passwd", Inside("inside")),
    ("/v1/files/%2fetc%2fpasswd", Inside("inside")),
    ("/v1/files/./etc/./passwd", Inside("inside")),
    ("/v1/files/workspace/good", Inside("inside")),
    ("/v1/files/workspace/top/etc/passwd", Inside("inside")),
    ("/v1/files/workspace/up/etc/passwd", Inside("inside")),
    ("/v1/files/workspace/file", Inside("inside")),
    ("/v1/files/workspace/File", Inside("other")),
    ("/v1/files/workspace/%ff%fe", Inside("inside")),
    ("/v1/files/workspace/%FF%FE", Inside("inside")),
    ("/v1/files/workspace/%c0%ae%c0%ae", Inside("inside")),
    ("/v1/files/workspace/%252e%252e", Inside("inside")),
    ("/v1/files/workspace/new%0aline", Inside("inside")),
    ("/v1/files/workspace/%1b%5b2J", Inside("inside")),
    ("/v1/files/workspace/back%5cslash", Inside("inside")),
    ("/v1/files/workspace/%20space%20", Inside("inside")),
    ("/v1/files/workspace/...", Inside("inside")),
    ("/v1/files/workspace/q%3fx%23y", Inside("inside")),
];

fn check(what: &str, answer: &Answer, gets: Outcome) {
    assert!(!String::from_utf8_lossy(&answer.body).contains("OUTSIDE"), "{what}: {answer:?}");
    match gets {
        Inside(text) => assert_eq!((answer.status.as_u16(), answer.body.as_ref()), (200, text.as_bytes()), "{what}"),
        NoStepUp => {
            let message = answer.refused(400, "INVALID_REQUEST");
            assert!(message.contains("contains `..`; send the resolved path"), "{what}: {message}");
        }
        Status(status, code) => {
            assert_eq!(answer.status.as_u16(), status, "{what}: {answer:?}");
            answer.refused(status, code);
        }
    }
}

#[tokio::test]
async fn every_path_to_read_resolves_inside_the_root_or_fails() {
    let boxd = start_with_attack_files();
    for (path, gets) in READS {
        let answer = tokio::time::timeout(SOON, boxd.get(path).send()).await.unwrap_or_else(|_| panic!("{path} blocks"));
        check(path, &answer, *gets);
    }
    let long = |n: usize| format!("/v1/files/workspace/{}", "n".repeat(n));
    check("255", &boxd.get(&long(255)).send().await, Inside("inside"));
    check("256", &boxd.get(&long(256)).send().await, INVALID);
    let deep = |bytes: usize| format!("/v1/files/{}etc/passwd", "./".repeat((bytes - 11) / 2));
    check("4095", &boxd.get(&deep(4095)).send().await, Inside("inside"));
    check("4096", &boxd.get(&deep(4097)).send().await, INVALID);
    check("16000", &boxd.get(&deep(16_001)).send().await, INVALID);
}

#[tokio::test]
async fn paths_in_json_and_queries_get_the_same_answers() {
    let boxd = start_with_attack_files();
    for (path, gets) in READS {
        let name: Vec<u8> = percent_encoding::percent_decode_str(path.strip_prefix("/v1/files").unwrap()).collect();
        use base64::Engine;
        let b64 = base64::engine::general_purpose::STANDARD.encode(&name);
        // Where the files route refuses something that is not a regular file, reading its metadata is allowed; a
        // missing file is an error in both cases.
        let stat = boxd.post("/v1/fs/stat", json!({ "path_b64": b64, "follow": true }).to_string()).send().await;
        match gets {
            Inside(text) => assert_eq!(stat.json::<Value>()["size"], text.len(), "{path}"),
            NoStepUp => check(path, &stat, NoStepUp),
            Status(404, code) => drop(stat.refused(404, code)),
            Status(..) => assert!(matches!(stat.status.as_u16(), 200 | 400), "{path}: {stat:?}"),
        }
        for verb in ["list", "glob", "grep"] {
            let body = json!({ "path_b64": b64, "pattern": "OUTSIDE" });
            let body = if verb == "list" { json!({ "path_b64": b64 }) } else { body };
            let answer = tokio::time::timeout(SOON, boxd.post(&format!("/v1/fs/{verb}"), body.to_string()).send()).await.unwrap();
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            assert!(!text.contains("\"OUTSIDE\"") && !text.contains("\"name\":\"secret\""), "{verb} {path}: {text}");
            if matches!(gets, NoStepUp) {
                check(path, &answer, NoStepUp);
            }
        }
        let query: String = name.iter().map(|b| format!("%{b:02x}")).collect();
        let download = boxd.get(&format!("/download?path={query}")).send().await;
        assert!(!String::from_utf8_lossy(&download.body).contains("OUTSIDE"));
        match gets {
            Inside(text) => assert_eq!(download.body, *text, "{path}"),
            NoStepUp => {
                assert_eq!(download.status, 400, "{path}");
                for route in ["/v1/archive", "/v1/watch", "/v1/files/download"] {
                    check(route, &boxd.get(&format!("{route}?path={query}")).send().await, NoStepUp);
                }
                for verb in ["glob", "grep"] {
                    let body = json!({ "path": String::from_utf8_lossy(&name), "pattern": "x" });
                    assert_eq!(boxd.post(&format!("/{verb}"), body.to_string()).send().await.status, 400, "{verb} {path}");
                }
            }
            Status(status, _) => assert_eq!(download.status.as_u16(), *status, "{path}"),
        }
    }
}

#[tokio::test]
async fn no_write_move_or_removal_changes_files_outside_the_root() {
    let boxd = start_with_attack_files();
    let fs = async |verb: &str, body: Value| boxd.post(&format!("/v1/fs/{verb}"), body.to_string()).send().await;
    for path in [
        "../secret",
        "workspace/abs",
        "workspace/rel",
        "workspace/deep",
        "workspace/outdir/secret",
        "workspace/up/up/secret",
        "..%2fsecret",
    ] {
        boxd.put(&format!("/v1/files/{path}"), "written").send().await;
        boxd.call(Method::DELETE, &format!("/v1/files/{path}")).send().await;
        let path = format!("/{}", path.replace("%2f", "/"));
        fs("edit", json!({ "path": path, "old": "OUTSIDE", "new": "edited" })).await;
        fs("move", json!({ "from": path, "to": "/workspace/taken", "overwrite": true })).await;
        fs("copy", json!({ "from": path, "to": "/workspace/taken", "overwrite": true })).await;
        fs("remove", json!({ "path": path, "recursive": true })).await;
        assert_eq!(std::fs::read(boxd.outside().join("secret")).unwrap(), b"OUTSIDE", "{path}");
        assert!(!std::fs::read(boxd.host("/workspace/taken")).is_ok_and(|t| t == b"OUTSIDE"), "{path}");
    }
    for (verb, body) in [
        ("mkdir", json!({ "path": "/../made", "parents": true })),
        ("mkdir", json!({ "path": "/workspace/../../made2", "parents": true })),
        ("copy", json!({ "from": "/etc/passwd", "to": "/../../copied" })),
        ("move", json!({ "from": "/workspace/file", "to": "/../../moved" })),
        ("move", json!({ "from": "/workspace/../workspace/file", "to": "/moved" })),
    ] {
        check(verb, &fs(verb, body).await, NoStepUp);
    }
    for name in ["made", "made2", "copied", "moved"] {
        assert!(!boxd.outside().join(name).exists() && !boxd.host(format!("/{name}")).exists(), "{name}");
    }
    let before = std::fs::read_dir(boxd.outside()).unwrap().count();
    fs("remove", json!({ "path": "/workspace", "recursive": true })).await.ok(200);
    assert_eq!(std::fs::read_dir(boxd.outside()).unwrap().count(), before, "links are removed, not their targets");
}

#[tokio::test]
async fn fifos_and_sockets_block_no_request_and_stay_unchanged() {
    let boxd = start_with_attack_files();
    let _socket = std::os::unix::net::UnixListener::bind(boxd.host("/workspace/socket")).unwrap();
    for name in ["pipe", "socket"] {
        let path = format!("/workspace/{name}");
        let attempts: [(&str, Value); 3] = [
            ("edit", json!({ "path": path, "old": "a", "new": "b" })),
            ("copy", json!({ "from": path, "to": "/workspace/copy" })),
            ("grep", json!({ "path": path, "pattern": "x" })),
        ];
        for (verb, body) in attempts {
            let answer = tokio::time::timeout(SOON, boxd.post(&format!("/v1/fs/{verb}"), body.to_string()).send()).await;
            answer.unwrap_or_else(|_| panic!("{verb} {name} blocks")).refused(400, "INVALID_REQUEST");
        }
        for method in [Method::GET, Method::PUT] {
            let answer = tokio::time::timeout(SOON, boxd.call(method, &format!("/v1/files{path}")).send()).await.unwrap();
            answer.refused(400, "INVALID_REQUEST");
        }
        let stat: Value = boxd.post("/v1/fs/stat", json!({ "path": path }).to_string()).send().await.ok(200).json();
        assert_eq!(stat["type"], if name == "pipe" { "fifo" } else { "socket" });
    }
    let archive = tokio::time::timeout(SOON, boxd.get("/v1/archive?path=/workspace").send()).await.unwrap().ok(200);
    assert!(!archive.body.windows(7).any(|w| w == b"OUTSIDE"));
    let grep = boxd.post("/v1/fs/grep", json!({ "path": "/", "pattern": "OUTSIDE" }).to_string()).send();
    let found: Value = tokio::time::timeout(SOON, grep).await.unwrap().ok(200).json();
    assert_eq!(found["matches"].as_array().unwrap().len(), 0, "{found}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_replaced_by_a_link_during_requests_never_leads_outside() {
    let boxd = start_with_attack_files();
    let inside = boxd.host("/workspace/swap");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(inside.join("secret"), "inside").unwrap();
    let hold = boxd.host("/workspace/hold");
    symlink(boxd.outside(), &hold).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let swapper = std::thread::spawn({
        let is_over = is_over.clone();
        move || {
            let mut swaps = 0u64;
            while !is_over.load(Ordering::Relaxed) {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                rustix::fs::renameat_with(CWD, &inside, CWD, &hold, flags).unwrap();
                swaps += 1;
            }
            swaps
        }
    });
    for i in 0..300 {
        let path = "/v1/files/workspace/swap/secret";
        let got = boxd.get(path).send().await;
        assert!(got.status != 200 || got.body == "inside" || got.body == "written", "{got:?}");
        let fs = async |verb: &str, body: Value| boxd.post(&format!("/v1/fs/{verb}"), body.to_string()).send().await;
        match i % 6 {
            0 => drop(boxd.put(path, "written").send().await),
            1 => drop(fs("edit", json!({ "path": "/workspace/swap/secret", "old": "OUTSIDE", "new": "x" })).await),
            2 => drop(fs("copy", json!({ "from": "/workspace/swap", "to": format!("/workspace/c{i}"), "recursive": true })).await),
            3 => {
                let found = fs("grep", json!({ "path": "/workspace", "pattern": "OUTSIDE" })).await.ok(200).json::<Value>();
                assert_eq!(found["matches"].as_array().unwrap().len(), 0, "{found}");
            }
            4 => drop(fs("mkdir", json!({ "path": format!("/workspace/swap/d{i}") })).await),
            _ => {
                let tar = boxd.get("/v1/archive?path=/workspace/swap").send().await;
                assert!(!tar.body.windows(7).any(|w| w == b"OUTSIDE"));
            }
        }
    }
    is_over.store(true, Ordering::Relaxed);
    assert!(swapper.join().unwrap() > 100, "no race occurred");
    assert_eq!(std::fs::read(boxd.outside().join("secret")).unwrap(), b"OUTSIDE");
    let mut names: Vec<_> = std::fs::read_dir(boxd.outside()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["clients", "control", "root", "secret"]);
}

#[tokio::test]
async fn misleading_names_are_returned_unchanged() {
    let boxd = start_with_attack_files();
    let listed: Value = boxd.post("/v1/fs/list", "{}").send().await.ok(200).json();
    let names: Vec<&str> = listed["entries"].as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    for name in ["new\nline", "\u{1b}[2J", "back\\slash", " space ", "...", "%2e%2e"] {
        assert!(names.contains(&name), "{name:?}");
    }
    // A name with a line end must not inject a multipart header.
    let got = boxd.get("/v1/files/download?path=/workspace/new%0aline&path=/workspace/none%0d%0ax-evil:%20yes").send().await.ok(200);
    let text = String::from_utf8_lossy(&got.body).into_owned();
    assert!(text.contains("x-file-path: /workspace/new%0Aline") && !text.contains("\nx-evil"), "{text}");
}

/// A request through a file link as boxd receives it: the gateway requires that no symbolic link is followed.
#[tokio::test]
async fn a_file_replaced_by_a_symbolic_link_is_neither_read_nor_written_through_a_file_link() {
    let boxd = TestBoxd::start();
    let report = "/v1/files/workspace/report";
    std::fs::create_dir(boxd.host("/workspace/private")).unwrap();
    std::fs::write(boxd.host("/workspace/private/key"), "SECRET").unwrap();
    let get = |path: &str| boxd.get(path).header("x-file-follow", "false").send();
    let put = |path: &str| boxd.put(path, "changed").header("x-file-follow", "false").send();
    put(report).await.ok(201);
    assert_eq!(get(report).await.ok(200).body, "changed");
    std::fs::remove_file(boxd.host("/workspace/report")).unwrap();
    symlink("private/key", boxd.host("/workspace/report")).unwrap();
    symlink("private", boxd.host("/workspace/folder")).unwrap();
    for path in [report, "/v1/files/workspace/folder/key", "/v1/files/workspace/folder/new"] {
        get(path).await.refused(403, "FORBIDDEN");
        let head = boxd.call(Method::HEAD, path).header("x-file-follow", "false").send().await;
        assert_eq!(head.status, 403, "{path}");
        put(path).await.refused(403, "FORBIDDEN");
    }
    assert_eq!(std::fs::read(boxd.host("/workspace/private/key")).unwrap(), b"SECRET");
    assert!(!boxd.host("/workspace/private/new").exists());
    // A client that may read all files still follows it.
    assert_eq!(boxd.get(report).send().await.ok(200).body, "SECRET");
    boxd.get(report).header("x-file-follow", "maybe").send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_keeps_replacing_a_file_by_a_link_gains_no_access_through_a_file_link() {
    let boxd = TestBoxd::start();
    std::fs::write(boxd.host("/workspace/secret"), "SECRET").unwrap();
    std::fs::write(boxd.host("/workspace/plain"), "plain").unwrap();
    symlink("secret", boxd.host("/workspace/link")).unwrap();
    let (file, plain, link) = (boxd.host("/workspace/report"), boxd.host("/workspace/plain"), boxd.host("/workspace/link"));
    let is_over = Arc::new(AtomicBool::new(false));
    let swapping = std::thread::spawn({
        let is_over = is_over.clone();
        move || {
            let next = file.with_file_name("next");
            while !is_over.load(Ordering::Relaxed) {
                std::fs::hard_link(&plain, &next).unwrap();
                std::fs::rename(&next, &file).unwrap();
                // A hard link to the symbolic link itself.
                rustix::fs::linkat(CWD, &link, CWD, &next, rustix::fs::AtFlags::empty()).unwrap();
                std::fs::rename(&next, &file).unwrap();
            }
        }
    });
    for _ in 0..500 {
        let answer = boxd.get("/v1/files/workspace/report").header("x-file-follow", "false").send().await;
        assert!(matches!(answer.status.as_u16(), 200 | 403 | 404), "{answer:?}");
        assert_ne!(answer.body, "SECRET");
    }
    is_over.store(true, Ordering::Relaxed);
    swapping.join().unwrap();
}
