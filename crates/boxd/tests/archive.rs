//! Tests of directories as tar archives, in both directions, including archives made to escape the directory.

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
enum ArchivedEntry {
    File(Vec<u8>, u32),
    Directory,
    Link(String),
}

fn contents(tar: &[u8]) -> BTreeMap<String, ArchivedEntry> {
    let mut archive = tar::Archive::new(tar);
    let read = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_str().unwrap().trim_end_matches('/').to_owned();
        let found = match entry.header().entry_type() {
            EntryType::Directory => ArchivedEntry::Directory,
            EntryType::Symlink => ArchivedEntry::Link(entry.link_name().unwrap().unwrap().to_str().unwrap().to_owned()),
            EntryType::Regular => {
                let mut bytes = Vec::new();
                entry.read_to_end(&mut bytes).unwrap();
                ArchivedEntry::File(bytes, entry.header().mode().unwrap())
            }
            other => panic!("{other:?}"),
        };
        (name, found)
    });
    read.collect()
}

/// An entry with an arbitrary raw name, valid or not.
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
async fn a_directory_is_archived_unchanged_plain_and_compressed() {
    let boxd = TestBoxd::start();
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(200));
    boxd.put(&format!("/v1/files/workspace/p/{long}"), "long").send().await.ok(201);
    boxd.put("/v1/files/workspace/p/a.sh", "#!/bin/sh").header("x-file-mode", "755").send().await.ok(201);
    let big = vec![7u8; 1_000_000];
    boxd.put("/v1/files/workspace/p/sub/big", big.clone()).send().await.ok(201);
    symlink("../outside/../a.sh", boxd.host("/workspace/p/link")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(boxd.host("/workspace/p/socket")).unwrap();
    let expected = BTreeMap::from([
        ("a.sh".to_owned(), ArchivedEntry::File(b"#!/bin/sh".to_vec(), 0o755)),
        ("d".repeat(120), ArchivedEntry::Directory),
        (long, ArchivedEntry::File(b"long".to_vec(), 0o644)),
        ("link".to_owned(), ArchivedEntry::Link("../outside/../a.sh".to_owned())),
        ("sub".to_owned(), ArchivedEntry::Directory),
        ("sub/big".to_owned(), ArchivedEntry::File(big, 0o644)),
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
async fn a_single_file_is_archived_as_one_entry() {
    let boxd = TestBoxd::start();
    boxd.put("/v1/files/workspace/a", "x").send().await.ok(201);
    let tar = boxd.get("/v1/archive?path=/workspace/a").send().await.ok(200);
    assert_eq!(contents(&tar.body), BTreeMap::from([("a".to_owned(), ArchivedEntry::File(b"x".to_vec(), 0o644))]));
    boxd.get("/v1/archive?path=/workspace/none").send().await.refused(404, "FILE_NOT_FOUND");
    boxd.get("/v1/archive?path=workspace").send().await.refused(400, "INVALID_REQUEST");
    boxd.get("/v1/archive").send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn an_unreadable_directory_is_refused_before_the_first_byte() {
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
async fn a_downloaded_archive_can_be_unpacked() {
    let boxd = TestBoxd::start();
    let name = "n".repeat(150);
    boxd.put(&format!("/v1/files/workspace/p/x/{name}"), "deep").header("x-file-mode", "600").send().await.ok(201);
    boxd.put("/v1/files/workspace/p/%ff", "bytes").send().await.ok(201);
    symlink("/etc/passwd", boxd.host("/workspace/p/link")).unwrap();
    for format in [TAR, TAR_ZSTD] {
        let tar = boxd.get("/v1/archive?path=/workspace/p").header("accept", format).send().await.ok(200).body;
        let put = boxd.put("/v1/archive?path=/workspace/copy/of/it&links=any", tar).header("content-type", format).send().await.ok(200);
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
async fn an_archive_made_by_tar_is_unpacked() {
    let boxd = TestBoxd::start();
    let source = boxd.outside().join("source");
    std::fs::create_dir_all(source.join("dir")).unwrap();
    std::fs::write(source.join("dir/file"), "from tar").unwrap();
    std::fs::set_permissions(source.join("dir"), std::fs::Permissions::from_mode(0o555)).unwrap();
    for format in ["gnu", "pax", "ustar"] {
        let created =
            std::process::Command::new("tar").args(["-c", &format!("--format={format}"), "-C"]).arg(&source).arg(".").output().unwrap();
        assert!(created.status.success());
        let into = format!("/workspace/{format}");
        unpack(&boxd, &into, created.stdout).await.ok(200);
        assert_eq!(std::fs::read(boxd.host(format!("{into}/dir/file"))).unwrap(), b"from tar");
        assert_eq!(std::fs::metadata(boxd.host(format!("{into}/dir"))).unwrap().mode() & 0o777, 0o555);
    }
}

#[tokio::test]
async fn unpacking_replaces_existing_files_and_keeps_others() {
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
async fn no_entry_is_unpacked_outside_the_directory() {
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
        vec![(Symlink, "slip", "/etc/passwd", "")],
        vec![(Symlink, "d/slip", "../../file", "")],
        vec![(Link, "slip", "../../etc/passwd", "")],
        vec![(Link, "slip", "root", "")],
        vec![(EntryType::Fifo, "slip", "", "")],
        vec![(EntryType::Char, "slip", "", "")],
        vec![(EntryType::Block, "slip", "", "")],
        vec![(Regular, "", "", "x")],
    ] {
        let answer = unpack(&boxd, "/workspace/in", tar_of(&slip)).await;
        answer.refused(400, "INVALID_REQUEST");
        for unpacked in ["/slip", "/workspace/slip", "/workspace/in/slip", "/workspace/in/d/slip"] {
            assert!(std::fs::symlink_metadata(boxd.host(unpacked)).is_err(), "{slip:?}");
        }
        assert!(!boxd.outside().join("slip").exists(), "{slip:?}");
    }
    // Nor through a link that was explicitly allowed.
    for through in
        [vec![(Symlink, "new", "..", ""), (Regular, "new/slip", "", "x")], vec![(Symlink, "new", "/", ""), (Link, "slip", "new/f", "")]]
    {
        unpack(&boxd, "/workspace/in&links=any", tar_of(&through)).await.refused(400, "INVALID_REQUEST");
        assert!(!boxd.host("/slip").exists() && !boxd.host("/workspace/slip").exists(), "{through:?}");
    }
}

#[tokio::test]
async fn a_link_out_of_the_directory_is_refused_unless_requested() {
    let boxd = TestBoxd::start();
    use EntryType::Symlink;
    let inside = tar_of(&[(Symlink, "bin/python", "python3", ""), (Symlink, "lib64", "lib", ""), (Symlink, "a/b/up", "../../bin", "")]);
    unpack(&boxd, "/workspace/in", inside).await.ok(200);
    for (name, target) in [("bin/python3", "/usr/bin/python3"), ("up", ".."), ("a/up", "../../x"), ("l", "bin/../../x")] {
        let tar = tar_of(&[(Symlink, name, target, "")]);
        let message = unpack(&boxd, "/workspace/in", tar.clone()).await.refused(400, "INVALID_REQUEST");
        assert!(message.contains(&format!("{name} is a link to {target}")) && message.contains("?links=any"), "{message}");
        let unpacked = boxd.host(format!("/workspace/in/{name}"));
        assert!(std::fs::symlink_metadata(&unpacked).is_err(), "{name}");
        unpack(&boxd, "/workspace/in&links=any", tar).await.ok(200);
        assert_eq!(std::fs::read_link(&unpacked).unwrap().to_str(), Some(target));
    }
    unpack(&boxd, "/workspace/in&links=some", tar_of(&[])).await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn an_invalid_or_truncated_archive_is_refused_and_leaves_no_partial_file() {
    let boxd = TestBoxd::start();
    unpack(&boxd, "/workspace", vec![b'x'; 4096]).await.refused(400, "INVALID_REQUEST");
    let whole = tar_of(&[(EntryType::Regular, "a", "", &"long ".repeat(1000))]);
    unpack(&boxd, "/workspace", whole.slice(..2000)).await.refused(400, "INVALID_REQUEST");
    let put = |kind: &'static str, body: Bytes| boxd.put("/v1/archive?path=/workspace", body).header("content-type", kind).send();
    put(TAR_ZSTD, whole.clone()).await.refused(400, "INVALID_REQUEST");
    put("application/zip", whole.clone()).await.refused(400, "INVALID_REQUEST");
    assert_eq!(std::fs::read_dir(boxd.host("/workspace")).unwrap().count(), 0);
    // A name that is announced as a gigabyte long is not read into memory.
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
async fn archives_beyond_the_number_of_workers_are_rate_limited() {
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
    // Other workers still serve files.
    boxd.put("/v1/files/workspace/a", "x").send().await.ok(201);
    for answer in held {
        answer.into_body().collect().await.unwrap();
    }
}

#[tokio::test]
async fn hard_links_and_sparse_files_are_unpacked() {
    let boxd = TestBoxd::start();
    let source = boxd.outside().join("source");
    std::fs::create_dir_all(source.join("a")).unwrap();
    std::fs::write(source.join("a/first"), "shared").unwrap();
    std::fs::create_dir(source.join("b")).unwrap();
    std::fs::hard_link(source.join("a/first"), source.join("b/second")).unwrap();
    let holes = std::fs::File::create(source.join("holes")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&holes, b"middle", 5_000_000).unwrap();
    holes.set_len(9_000_001).unwrap();
    let expected = std::fs::read(source.join("holes")).unwrap();
    let archive_by_tar = |format: &str| {
        let created =
            std::process::Command::new("tar").args(["-cS", &format!("--format={format}"), "-C"]).arg(&source).arg(".").output().unwrap();
        assert!(created.status.success());
        created.stdout
    };
    let gnu = archive_by_tar("gnu");
    assert!(gnu.len() < 1_000_000, "the holes are not sent");
    for _ in 0..2 {
        // The second time over the existing files.
        unpack(&boxd, "/workspace/out", gnu.clone()).await.ok(200);
        let stat = |name: &str| std::fs::symlink_metadata(boxd.host(format!("/workspace/out/{name}"))).unwrap();
        assert_eq!((stat("a/first").ino(), stat("b/second").nlink()), (stat("b/second").ino(), 2));
        assert_eq!(std::fs::read(boxd.host("/workspace/out/b/second")).unwrap(), b"shared");
        assert!(std::fs::read(boxd.host("/workspace/out/holes")).unwrap() == expected);
        assert_eq!(std::fs::read_dir(boxd.host("/workspace/out/b")).unwrap().count(), 1, "no temporary file is left");
    }
    // The PAX form puts a map of the holes into the data, under another name. Unpacking it as a plain file would be
    // wrong.
    let message = unpack(&boxd, "/workspace/pax", archive_by_tar("pax")).await.refused(400, "INVALID_REQUEST");
    assert!(message.contains("holes") && message.contains("--format=gnu"), "{message}");
    assert!(!boxd.host("/workspace/pax/holes").exists() && !boxd.host("/workspace/pax/GNUSparseFile.0").exists());
}

#[tokio::test]
async fn a_hard_link_to_a_file_outside_the_directory_is_refused() {
    let boxd = TestBoxd::start();
    std::fs::create_dir_all(boxd.host("/workspace/in/dir")).unwrap();
    std::fs::write(boxd.host("/workspace/beside"), "not yours").unwrap();
    symlink("../beside", boxd.host("/workspace/in/link")).unwrap();
    symlink("..", boxd.host("/workspace/in/up")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, boxd.host("/workspace/in/pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    for target in ["none", "dir", "link", "pipe", "up/beside", "../beside", "/workspace/beside", "dir/../link", "", "."] {
        let message = unpack(&boxd, "/workspace/in", tar_of(&[(EntryType::Link, "slip", target, "")])).await;
        message.refused(400, "INVALID_REQUEST");
        assert!(std::fs::symlink_metadata(boxd.host("/workspace/in/slip")).is_err(), "{target}");
    }
    assert_eq!(std::fs::read_dir(boxd.host("/workspace/in")).unwrap().count(), 4, "no temporary file is left");
}

#[tokio::test]
async fn a_truncated_archive_is_distinguished_from_an_empty_one() {
    let boxd = TestBoxd::start();
    let whole = tar_of(&[(EntryType::Regular, "a", "", "1"), (EntryType::Regular, "b", "", "2")]);
    let put = |kind: &'static str, body: Bytes| boxd.put("/v1/archive?path=/workspace", body).header("content-type", kind).send();
    // Truncated between two complete entries.
    let message = put(TAR, whole.slice(..1024)).await.refused(400, "INVALID_REQUEST");
    assert!(message.contains("after 1 entries") && message.contains("again"), "{message}");
    put(TAR, whole.slice(..2048)).await.refused(400, "INVALID_REQUEST");
    put(TAR_ZSTD, zstd::encode_all(&whole[..2048], 1).unwrap().into()).await.refused(400, "INVALID_REQUEST");
    assert!(put(TAR, Bytes::new()).await.refused(400, "INVALID_REQUEST").contains("no archive"));
    put(TAR_ZSTD, Bytes::new()).await.refused(400, "INVALID_REQUEST");
    put(TAR_ZSTD, zstd::encode_all(&b""[..], 1).unwrap().into()).await.refused(400, "INVALID_REQUEST");
    put(TAR, whole.slice(..2560)).await.ok(200);
    let empty: ArchiveUnpacked = put(TAR, tar_of(&[])).await.ok(200).json();
    assert_eq!(empty.entries, 0);
    put(TAR, whole.clone()).await.ok(200);
    let part = boxd.put("/v1/archive?path=/workspace", whole).header("content-type", TAR).header("content-range", "bytes 0-9/20");
    part.send().await.refused(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn unreadable_entries_are_listed_in_the_archive_and_the_rest_is_packed() {
    let boxd = TestBoxd::start_as_a_user();
    for name in ["a", "closed %\n", "z"] {
        std::fs::write(boxd.host(format!("/workspace/{name}")), "x").unwrap();
    }
    std::fs::create_dir(boxd.host("/workspace/dir")).unwrap();
    std::fs::write(boxd.host("/workspace/dir/in"), "x").unwrap();
    let closed = |name: &str, mode| {
        std::fs::set_permissions(boxd.host(format!("/workspace/{name}")), std::fs::Permissions::from_mode(mode)).unwrap()
    };
    closed("closed %\n", 0o000);
    closed("dir", 0o000);
    let tar = boxd.get("/v1/archive?path=/workspace").send().await.ok(200).body;
    closed("dir", 0o755);
    let (mut names, mut skipped) = (Vec::new(), Vec::new());
    for entry in tar::Archive::new(tar.as_ref()).entries().unwrap() {
        let mut entry = entry.unwrap();
        if entry.header().entry_type() != EntryType::XGlobalHeader {
            names.push(entry.path().unwrap().to_str().unwrap().to_owned());
            continue;
        }
        for record in entry.pax_extensions().unwrap().unwrap() {
            let record = record.unwrap();
            assert_eq!(record.key(), Ok("COBOX.skipped"));
            skipped.push(record.value().unwrap().to_owned());
        }
    }
    names.sort();
    skipped.sort();
    assert_eq!((names, skipped), (vec!["a".to_owned(), "z".into()], vec!["closed%20%25%0A".to_owned(), "dir".into()]));
    // Standard tar still reads the archive, and so does boxd's own unpacker.
    let mut listing = std::process::Command::new("tar")
        .arg("-t")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut listing.stdin.take().unwrap(), &tar).unwrap();
    let listed = listing.wait_with_output().unwrap();
    assert!(listed.status.success() && listed.stdout.len() == 4, "{listed:?}");
    let again: ArchiveUnpacked = unpack(&TestBoxd::start(), "/workspace/copy", tar).await.ok(200).json();
    assert_eq!(again.entries, 2);
}
