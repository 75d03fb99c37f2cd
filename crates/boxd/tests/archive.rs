//! Directories as tars, in and out, and the archives people make to break out.

mod support;

use std::{
    collections::BTreeMap,
    io::Read,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
};

use bytes::Bytes;
use cobox_protocol::{
    control::BoxdStatus,
    files::{ArchiveUnpacked, TAR, TAR_ZSTD},
};
use http_body_util::BodyExt;
use support::{Answer, TestBoxd};
use tar::{EntryType, Header};

#[derive(Debug, PartialEq, Eq)]
enum Found {
    File(Vec<u8>, u32),
    Directory,
    Link(String),
}

fn contents(tar: &[u8]) -> BTreeMap<String, Found> {
    let mut archive = tar::Archive::new(tar);
    let read = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_str().unwrap().trim_end_matches('/').to_owned();
        let found = match entry.header().entry_type() {
            EntryType::Directory => Found::Directory,
            EntryType::Symlink => Found::Link(entry.link_name().unwrap().unwrap().to_str().unwrap().to_owned()),
            EntryType::Regular => {
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).unwrap();
                Found::File(bytes, entry.header().mode().unwrap())
            }
            other => panic!("{other:?}"),
        };
        (name, found)
    });
    read.collect()
}

/// An entry with its name as it is, however bad.
fn entry(tar: &mut tar::Builder<Vec<u8>>, kind: EntryType, name: &[u8], link: &[u8], data: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(data.len() as u64);
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
    header.set_cksum();
    tar.append(&header, data).unwrap();
}

fn tar_of(entries: &[(EntryType, &str, &str, &str)]) -> Bytes {
    let mut tar = tar::Builder::new(Vec::new());
    for (kind, name, link, data) in entries {
        entry(&mut tar, *kind, name.as_bytes(), link.as_bytes(), data.as_bytes());
    }
    tar.into_inner().unwrap().into()
}

async fn unpack(boxd: &TestBoxd, path: &str, tar: impl Into<Bytes>) -> Answer {
    boxd.put(&format!("/v1/archive?path={path}"), tar).header("content-type", TAR).send().await
}

#[tokio::test]
async fn a_directory_comes_out_as_it_is_plain_and_compressed() {
    let boxd = TestBoxd::start();
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(200));
    boxd.put(&format!("/v1/files/workspace/p/{long}"), "long").send().await.ok(201);
    boxd.put("/v1/files/workspace/p/a.sh", "#!/bin/sh").header("x-file-mode", "755").send().await.ok(201);
    let big = vec![7u8; 1_000_000];
    boxd.put("/v1/files/workspace/p/sub/big", big.clone()).send().await.ok(201);
    symlink("../outside/../a.sh", boxd.host("/workspace/p/link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(boxd.host("/workspace/p/socket")).unwrap();
    let expected = BTreeMap::from([
        ("a.sh".to_owned(), Found::File(b"#!/bin/sh".to_vec(), 0o755)),
        ("d".repeat(120), Found::Directory),
        (long, Found::File(b"long".to_vec(), 0o644)),
        ("link".to_owned(), Found::Link("../outside/../a.sh".to_owned())),
        ("sub".to_owned(), Found::Directory),
        ("sub/big".to_owned(), Found::File(big, 0o644)),
    ]);
    let plain = boxd.get("/v1/archive?path=/workspace/p").send().await.ok(200);
    assert_eq!(plain.header("content-type"), TAR);
    assert!(contents(&plain.body) == expected);
    let small = boxd.get("/v1/archive?path=/workspace/p").header("accept", TAR_ZSTD).send().await.ok(200);
    assert_eq!(small.header("content-type"), TAR_ZSTD);
    assert!(small.body.len() < 10_000);
    assert!(contents(&zstd::decode_all(small.body.as_ref()).unwrap()) == expected);
}

#[tokio::test]
async fn a_single_file_is_an_archive_of_one() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a", "x").send().await.ok(201);
    let tar = boxd.get("/v1/archive?path=/workspace/a").send().await.ok(200);
    assert_eq!(contents(&tar.body), BTreeMap::from([("a".to_owned(), Found::File(b"x".to_vec(), 0o644))]));
    boxd.get("/v1/archive?path=/workspace/none").send().await.refused(404, "FILE_NOT_FOUND");
    boxd.get("/v1/archive?path=workspace").send().await.refused(400, "INVALID_REQUEST");
    boxd.get("/v1/archive").send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn a_directory_that_can_not_be_read_is_refused_before_the_first_byte() {
    use std::os::unix::fs::PermissionsExt;
    let boxd = TestBoxd::start_as_a_user();
    let closed = boxd.host("/workspace/closed");
    std::fs::create_dir(&closed).unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o000)).unwrap();
    boxd.get("/v1/archive?path=/workspace/closed").send().await.refused(403, "FORBIDDEN");
    std::fs::write(boxd.host("/workspace/file"), "x").unwrap();
    std::fs::set_permissions(boxd.host("/workspace/file"), std::fs::Permissions::from_mode(0o000)).unwrap();
    boxd.get("/v1/archive?path=/workspace/file").send().await.refused(403, "FORBIDDEN");
}

#[tokio::test]
async fn what_comes_out_goes_in_again() {
    let boxd = TestBoxd::start();
    let name = "n".repeat(150);
    boxd.put(&format!("/v1/files/workspace/p/x/{name}"), "deep").header("x-file-mode", "600").send().await.ok(201);
    boxd.put("/v1/files/workspace/p/%ff", "bytes").send().await.ok(201);
    symlink("/etc/passwd", boxd.host("/workspace/p/link")).unwrap();
    for format in [TAR, TAR_ZSTD] {
        let tar = boxd.get("/v1/archive?path=/workspace/p").header("accept", format).send().await.ok(200).body;
        let put = boxd.put("/v1/archive?path=/workspace/copy/of/it", tar).header("content-type", format).send().await.ok(200);
        let unpacked: ArchiveUnpacked = put.json();
        assert_eq!((unpacked.path.as_str(), unpacked.entries, unpacked.bytes), ("/workspace/copy/of/it", 4, 9));
        let copy = std::fs::metadata(boxd.host(format!("/workspace/copy/of/it/x/{name}"))).unwrap();
        let original = std::fs::metadata(boxd.host(format!("/workspace/p/x/{name}"))).unwrap();
        assert_eq!((copy.mode() & 0o777, copy.mtime(), copy.len()), (0o600, original.mtime(), 4));
        assert_eq!(std::fs::read(boxd.host(b"/workspace/copy/of/it/\xff")).unwrap(), b"bytes");
        let link = std::fs::read_link(boxd.host("/workspace/copy/of/it/link")).unwrap();
        assert_eq!(link.to_str(), Some("/etc/passwd"));
    }
}

#[tokio::test]
async fn an_archive_made_by_tar_itself_is_taken() {
    let boxd = TestBoxd::start();
    let source = boxd.outside().join("source");
    std::fs::create_dir_all(source.join("dir")).unwrap();
    std::fs::write(source.join("dir/file"), "from tar").unwrap();
    std::fs::set_permissions(source.join("dir"), std::fs::Permissions::from_mode(0o555)).unwrap();
    for format in ["gnu", "pax", "ustar"] {
        let made =
            std::process::Command::new("tar").args(["-c", &format!("--format={format}"), "-C"]).arg(&source).arg(".").output().unwrap();
        assert!(made.status.success());
        let into = format!("/workspace/{format}");
        unpack(&boxd, &into, made.stdout).await.ok(200);
        assert_eq!(std::fs::read(boxd.host(format!("{into}/dir/file"))).unwrap(), b"from tar");
        assert_eq!(std::fs::metadata(boxd.host(format!("{into}/dir"))).unwrap().mode() & 0o777, 0o555);
    }
}

#[tokio::test]
async fn files_that_are_there_are_replaced_and_the_rest_stays() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a", "old").send().await.ok(201);
    let etag = boxd.put("/v1/files/workspace/keep", "kept").send().await.header("etag").to_owned();
    symlink("keep", boxd.host("/workspace/link")).unwrap();
    let tar = tar_of(&[(EntryType::Regular, "a", "", "new"), (EntryType::Regular, "link", "", "not through the link")]);
    unpack(&boxd, "/workspace", tar).await.ok(200);
    assert_eq!(boxd.get("/v1/files/workspace/a").send().await.body, "new");
    assert_eq!(boxd.get("/v1/files/workspace/keep").send().await.header("etag"), etag);
    assert!(!boxd.host("/workspace/link").is_symlink());
}

#[tokio::test]
async fn no_entry_lands_outside_the_directory() {
    let boxd = TestBoxd::start();
    std::fs::create_dir(boxd.host("/workspace/in")).unwrap();
    symlink("/", boxd.host("/workspace/in/root")).unwrap();
    symlink("..", boxd.host("/workspace/in/up")).unwrap();
    symlink(boxd.outside(), boxd.host("/workspace/in/outside")).unwrap();
    use EntryType::{Directory, Link, Regular, Symlink};
    for slip in [
        vec![(Regular, "../slip", "", "x")],
        vec![(Regular, "a/../../slip", "", "x")],
        vec![(Regular, "/slip", "", "x")],
        vec![(Directory, "../slip", "", "")],
        vec![(Regular, "root/slip", "", "x")],
        vec![(Regular, "up/slip", "", "x")],
        vec![(Regular, "outside/slip", "", "x")],
        vec![(Directory, "up/slip", "", "")],
        vec![(Symlink, "new", "..", ""), (Regular, "new/slip", "", "x")],
        vec![(Symlink, "new", "/", ""), (Symlink, "new/slip", "/etc", "")],
        vec![(Link, "slip", "../../etc/passwd", "")],
        vec![(Link, "slip", "root", "")],
        vec![(EntryType::Fifo, "slip", "", "")],
        vec![(EntryType::Char, "slip", "", "")],
        vec![(EntryType::Block, "slip", "", "")],
        vec![(Regular, "", "", "x")],
    ] {
        let answer = unpack(&boxd, "/workspace/in", tar_of(&slip)).await;
        answer.refused(400, "INVALID_REQUEST");
        for place in ["/slip", "/workspace/slip", "/workspace/in/slip"] {
            assert!(!boxd.host(place).exists(), "{slip:?}");
        }
        assert!(!boxd.outside().join("slip").exists(), "{slip:?}");
    }
}

#[tokio::test]
async fn what_is_no_archive_or_half_of_one_is_refused_and_leaves_no_half_file() {
    let boxd = TestBoxd::start();
    unpack(&boxd, "/workspace", vec![b'x'; 4096]).await.refused(400, "INVALID_REQUEST");
    let whole = tar_of(&[(EntryType::Regular, "a", "", &"long ".repeat(1000))]);
    unpack(&boxd, "/workspace", whole.slice(..2000)).await.refused(400, "INVALID_REQUEST");
    let put = |kind: &'static str, body: Bytes| boxd.put("/v1/archive?path=/workspace", body).header("content-type", kind).send();
    put(TAR_ZSTD, whole.clone()).await.refused(400, "INVALID_REQUEST");
    put("application/zip", whole.clone()).await.refused(400, "INVALID_REQUEST");
    assert_eq!(std::fs::read_dir(boxd.host("/workspace")).unwrap().count(), 0);
    // A name said to be a gigabyte long is not read into memory.
    let mut bomb = Header::new_gnu();
    bomb.set_entry_type(EntryType::GNULongName);
    bomb.set_size(1 << 30);
    bomb.set_cksum();
    let mut body = bomb.as_bytes().to_vec();
    body.resize(2 << 20, b'n');
    assert!(unpack(&boxd, "/workspace", body).await.refused(400, "INVALID_REQUEST").contains("larger than any real"));
    put(TAR, whole).await.ok(200);
}

#[tokio::test]
async fn archives_beyond_the_workers_are_told_to_come_again() {
    let boxd = TestBoxd::start();
    std::fs::File::create(boxd.host("/workspace/big")).unwrap().set_len(64 << 20).unwrap();
    let mut held = Vec::new();
    for _ in 0..4 {
        let answer = boxd.get("/v1/archive?path=/workspace").open().await;
        assert_eq!(answer.status(), 200);
        held.push(answer);
    }
    let answer = boxd.get("/v1/archive?path=/workspace").send().await;
    answer.refused(429, "RATE_LIMITED");
    assert_eq!(answer.header("retry-after"), "1");
    let status: BoxdStatus = boxd.control(http::Method::GET, "/control/status").send().await.json();
    assert_eq!(status.open_streams, 4);
    // Files are served by others meanwhile.
    boxd.put("/v1/files/workspace/a", "x").send().await.ok(201);
    for answer in held {
        answer.into_body().collect().await.unwrap();
    }
}
