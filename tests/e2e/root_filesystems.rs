//! Sandboxes on a root file system instead of the host's programs: a directory, and a tar of it.

use std::{fs, path::Path, process::Command};

use cobox_client::{Session, Upload};
use cobox_protocol::exec::ExecRequest;
use cobox_testkit::{BrokerOptions, TestBroker, ensure};

/// A root with one static program and nothing else, not even the directories that boxd needs.
fn bare_root(dir: &Path) {
    fs::create_dir(dir.join("bin")).unwrap();
    let boxd = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("boxd");
    fs::copy(boxd, dir.join("bin/tool")).unwrap();
}

async fn start(root: &Path, uid: Option<u32>) -> (TestBroker, Session) {
    let config = format!("[local]\nroot = {{ rootfs = {root:?} }}\n");
    let broker = TestBroker::start_with(BrokerOptions { config, uid, ..BrokerOptions::default() }).await;
    let session = ensure(&broker.client(), "t").await;
    (broker, session)
}

async fn check_root(session: &Session) {
    let request = ExecRequest { argv: Some(vec!["tool".into(), "--version".into()]), ..Default::default() };
    let answer = session.dataplane().exec(&request).await.unwrap();
    assert!(answer.stdout.starts_with("boxd "), "{answer:?}");
    session.dataplane().write_file(b"/workspace/deep/f", None, Upload::from_bytes("x")).await.unwrap();
    assert!(session.dataplane().read_file(b"/usr/bin/env").await.is_err(), "nothing of the host's is here");
    assert!(session.dataplane().read_file(b"/etc/passwd").await.is_err());
}

#[tokio::test]
async fn a_root_directory_with_one_program_is_enough() {
    let root = tempfile::tempdir().unwrap();
    bare_root(root.path());
    let (_broker, session) = start(root.path(), None).await;
    check_root(&session).await;
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "the root itself stays as it was");
}

#[tokio::test]
async fn a_root_archive_is_unpacked_once_and_shared() {
    let (root, here) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    bare_root(root.path());
    let tar = here.path().join("root.tar");
    assert!(Command::new("tar").arg("-C").arg(root.path()).arg("-cf").arg(&tar).arg(".").status().unwrap().success());
    let (broker, session) = start(&tar, None).await;
    check_root(&session).await;
    check_root(&ensure(&broker.client(), "second").await).await;
}

#[tokio::test]
async fn a_broker_run_by_an_ordinary_user_can_use_its_own_root() {
    assert!(rustix::process::geteuid().is_root(), "this test changes users and needs root");
    let root = tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755)).tempdir().unwrap();
    bare_root(root.path());
    let (_broker, session) = start(root.path(), Some(61_235)).await;
    check_root(&session).await;
}

#[tokio::test]
async fn a_missing_root_is_reported_at_start() {
    let broker = TestBroker::start().await;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.toml"), "[local]\nroot = { rootfs = \"/no/such/root\" }\n").unwrap();
    let output = broker.cobox().args(["up", "--listen", "127.0.0.1:0", "--data-dir"]).arg(dir.path()).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/root"), "{output:?}");
}
