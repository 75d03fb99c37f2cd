//! Restoring an older database: sandboxes, snapshots and volumes that are newer than it keep their files, and are
//! available again once a database that contains them is back.

use std::{fs, path::Path};

use cobox_protocol::{
    resources::{CreateVolume, MountParams},
    sandbox::CreateSandbox,
};
use cobox_testkit::{TestBroker, ensure, eventually, sh};
use serde_json::Value;

use crate::resources;

/// Replaces the database files in one directory by those of another.
fn copy_database(from: &Path, to: &Path) {
    let files = |dir: &Path| {
        let all = fs::read_dir(dir).unwrap().map(|e| e.unwrap());
        all.filter(|e| e.file_name().to_string_lossy().starts_with("broker.db")).map(|e| e.path()).collect::<Vec<_>>()
    };
    for old in files(to) {
        fs::remove_file(old).unwrap();
    }
    for file in files(from) {
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

fn doctor(broker: &TestBroker, arguments: &[&str]) -> Value {
    let output = broker.cobox().args(["doctor", "--json", "--data-dir"]).arg(broker.data_dir()).args(arguments).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
}

/// The audit record number in the mark file; zero if there is no mark.
fn marked_number(data: &Path) -> u64 {
    let mark = fs::read(data.join("audit-mark.json")).unwrap_or_default();
    serde_json::from_slice::<Value>(&mark).ok().and_then(|mark| mark["number"].as_u64()).unwrap_or(0)
}

fn verify(broker: &TestBroker, arguments: &[&str]) -> String {
    let output = broker.cobox().args(["audit", "verify"]).args(arguments).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn a_restored_database_keeps_newer_sandboxes_and_names_lost_keys() {
    restore_older_database(false).await;
}

#[tokio::test]
async fn a_restored_database_is_detected_after_a_crash_before_the_mark_was_written() {
    restore_older_database(true).await;
}

#[tokio::test]
async fn a_backup_from_before_the_first_sandbox_keeps_that_sandbox_after_a_stop() {
    restore_empty_database(true).await;
}

#[tokio::test]
async fn a_backup_from_before_the_first_sandbox_keeps_that_sandbox_after_a_crash() {
    restore_empty_database(false).await;
}

#[tokio::test]
async fn a_backup_that_is_seconds_old_is_detected_after_a_stop() {
    let mut broker = TestBroker::start().await;
    let (data, older) = (broker.data_dir(), tempfile::tempdir().unwrap());
    ensure(&broker.client(), "old").await;
    broker.interrupt();
    copy_database(&data, older.path());
    broker.launch().await;
    ensure(&broker.client(), "old").await;
    broker.interrupt();
    copy_database(older.path(), &data);
    broker.launch().await;
    let report = doctor(&broker, &[]);
    assert!(report["quarantine"].as_array().unwrap().is_empty(), "{report}");
    assert!(report["restored"]["database_at"].is_string(), "{report}");
    // Merely stopping the broker is not reported as a restore.
    broker.interrupt();
    fs::remove_file(data.join("restored.json")).unwrap();
    broker.launch().await;
    assert!(doctor(&broker, &[])["restored"].is_null());
}

/// Restores an empty database from a backup that is seconds old, as in a quick trial of restoring.
async fn restore_empty_database(is_stopped: bool) {
    let mut broker = TestBroker::start().await;
    let data = broker.data_dir();
    let (older, newer) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    broker.interrupt();
    copy_database(&data, older.path());
    let old_number = marked_number(&data);

    broker.launch().await;
    let session = ensure(&broker.client(), "new").await;
    sh(session.dataplane(), "echo kept > f").await;
    let id = session.info().sandbox.id.clone();
    eventually("the sandbox is marked", || {
        let is_marked = marked_number(&data) > old_number;
        async move { is_marked.then_some(()) }
    })
    .await;
    if is_stopped {
        broker.interrupt();
    } else {
        broker.kill();
    }
    copy_database(&data, newer.path());

    copy_database(older.path(), &data);
    broker.launch().await;
    let report = doctor(&broker, &[]);
    assert_eq!(report["quarantine"][0]["sandbox_id"], id.as_str(), "{report}");
    assert!(report["restored"]["database_at"].is_string(), "{report}");
    assert!(broker.log().contains("a backup was restored"), "{}", broker.log());
    assert!(broker.log().contains("quarantined a sandbox without a record in the database"), "{}", broker.log());
    let other = ensure(&broker.client(), "other").await.info().sandbox.id.clone();
    assert_ne!(other, id);
    broker.interrupt();

    copy_database(newer.path(), &data);
    broker.launch().await;
    let report = doctor(&broker, &[]);
    assert_eq!(report["quarantine"].as_array().unwrap().len(), 1, "{report}");
    assert_eq!(report["quarantine"][0]["sandbox_id"], other.as_str(), "what was made with the older database is kept too");
    let session = ensure(&broker.client(), "new").await;
    assert_eq!((&session.info().sandbox.id, sh(session.dataplane(), "cat f").await.stdout.as_str()), (&id, "kept\n"));
}

/// With a crash between the last marked record and the mark, the mark is still the one before it.
async fn restore_older_database(is_mark_old: bool) {
    let mut broker = TestBroker::start().await;
    let data = broker.data_dir();
    let (older, newer) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    ensure(&broker.client(), "old").await;
    broker.interrupt();
    copy_database(&data, older.path());
    let mark = data.join("audit-mark.json");
    let old_mark = fs::read(&mark).unwrap();

    broker.launch().await;
    let session = ensure(&broker.client(), "new").await;
    sh(session.dataplane(), "echo kept > f").await;
    let id = session.info().sandbox.id.clone();
    let client = broker.client();
    let volume = client.create_volume(&CreateVolume { name: "data".into(), size_bytes: 64 << 20, access: None }).await.unwrap();
    let mounts = vec![MountParams { volume: "data".into(), path: "/data".into(), read_only: false }];
    let (user, on_volume) = resources::create(&client, CreateSandbox { mounts, ..CreateSandbox::default() }).await;
    resources::output_of(&on_volume, "echo in volume > /data/f; echo in snapshot > g").await;
    let snapshot = resources::create_snapshot(&client, &user, "base").await;
    let created = broker.cobox().args(["keys", "create", "bot", "--kind", "agent", "--json"]).output().unwrap();
    let key: Value = serde_json::from_slice(&created.stdout).unwrap();
    let heads = broker.cobox().args(["audit", "head"]).output().unwrap();
    let head = String::from_utf8(heads.stdout).unwrap();
    assert!(verify(&broker, &[]).contains("no saved head was given"));
    assert!(!verify(&broker, &["--head", &head]).contains("no saved head was given"));
    let marked = data.join("audit-mark.jsonl");
    eventually("the key is marked", || {
        let is_marked = fs::read_to_string(&marked).is_ok_and(|text| text.contains(key["id"].as_str().unwrap()));
        let is_mark_new = fs::read(&mark).is_ok_and(|mark| mark != old_mark);
        async move { (is_marked && is_mark_new).then_some(()) }
    })
    .await;
    // Killed, so that the sandbox keeps running until the next broker starts.
    broker.kill();
    if is_mark_old {
        fs::write(&mark, &old_mark).unwrap();
    }
    copy_database(&data, newer.path());

    copy_database(older.path(), &data);
    broker.launch().await;
    let report = doctor(&broker, &[]);
    let quarantined = |kind: &str| {
        let items = report["quarantine"].as_array().unwrap().iter();
        items.filter_map(|item| item[kind].as_str()).collect::<Vec<_>>()
    };
    assert_eq!(quarantined("sandbox_id"), [id.as_str(), user.id.as_str()], "{report}");
    assert_eq!(quarantined("snapshot_id"), [snapshot.id.as_str()], "{report}");
    assert_eq!(quarantined("volume_id"), [volume.id.as_str()], "{report}");
    let lost = &report["restored"]["lost"][0];
    assert_eq!(lost["action"], "key.created", "{report}");
    assert!(lost["detail"].as_str().unwrap().contains(key["id"].as_str().unwrap()), "{report}");
    assert!(broker.log().contains("a backup was restored"), "{}", broker.log());
    assert!(!broker.sandbox_pids().iter().any(|(running, _)| *running == id.as_str()), "its processes are ended");
    assert!(verify(&broker, &["--head", &head]).contains("broken: "));
    let advice = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "database").unwrap()["mend"].to_string();
    assert!(advice.contains("--acknowledge-restore"), "{advice}");
    assert!(doctor(&broker, &["--acknowledge-restore"])["restored"].is_null());
    assert!(doctor(&broker, &[])["restored"].is_null());
    let again = broker.cobox().args(["doctor", "--acknowledge-restore", "--data-dir"]).arg(&data).output().unwrap();
    assert_eq!(again.status.code(), Some(1), "{again:?}");
    broker.interrupt();

    copy_database(newer.path(), &data);
    broker.launch().await;
    let report = doctor(&broker, &[]);
    assert!(report["quarantine"].as_array().unwrap().is_empty() && report["restored"].is_null(), "{report}");
    let session = ensure(&broker.client(), "new").await;
    assert_eq!(sh(session.dataplane(), "cat f").await.stdout, "kept\n");
    let client = broker.client();
    let on_volume = ensure(&client, &format!("of {}", user.id)).await;
    assert_eq!(resources::output_of(&on_volume, "cat /data/f").await, "in volume");
    let (_, of_snapshot) = resources::create(&client, resources::from_snapshot(&snapshot)).await;
    assert_eq!(resources::output_of(&of_snapshot, "cat g").await, "in snapshot");
}
