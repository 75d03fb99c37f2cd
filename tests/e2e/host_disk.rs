//! A host whose disk fills up: writers are stopped before that, and a filesystem that failed nevertheless is repaired
//! by a restart. The disk is a small filesystem created by the test.

use std::{
    fs::File,
    io::{ErrorKind, Write},
    path::Path,
    process::Command,
};

use cobox_client::{Client, Dataplane, Session, Upload};
use cobox_protocol::{
    ErrorCode, SandboxId,
    exec::ExecRequest,
    resources::{CreateVolume, MountParams},
    sandbox::CreateSandbox,
    session::{Mode, State},
};
use cobox_testkit::{BrokerOptions, TestBroker, ensure, eventually, negotiate, sh};

use crate::resources;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Size of the disk: enough for a sandbox, its database, and little else.
const DISK_BYTES: u64 = 128 << 20;
/// Free space that the first test reserves.
const RESERVE_BYTES: u64 = 32 << 20;

/// Settings of tests in which a program fills the disk: the sandbox's own disk is larger, and the reserve takes what is written
/// until a loaded machine has stopped the program.
const FILLED_DISK_BYTES: u64 = 2 << 30;
const FILLED_DISK_CONFIG: &str = "disk_bytes = 8589934592\nreserve_bytes = 1073741824\n";

async fn broker_on_small_disk(reserve_bytes: u64) -> TestBroker {
    broker_on_disk(DISK_BYTES, &format!("disk_bytes = {}\nreserve_bytes = {reserve_bytes}\n", 64 << 20)).await
}

async fn broker_on_disk(disk_bytes: u64, local: &str) -> TestBroker {
    assert!(rustix::process::geteuid().is_root(), "this test mounts a filesystem and needs root");
    let config = format!("reaper_interval_ms = 100\naudit_retry_seconds = 2\n[local]\n{local}");
    TestBroker::start_with(BrokerOptions { config, disk_bytes: Some(disk_bytes), ..BrokerOptions::default() }).await
}

fn free_bytes(dir: &Path) -> u64 {
    let stat = rustix::fs::statvfs(dir).unwrap();
    stat.f_bavail * stat.f_frsize
}

/// Fills the disk until `left` bytes are free.
fn fill(data_dir: &Path, left: u64) {
    let mut filler = File::create(data_dir.join("filler")).unwrap();
    while free_bytes(data_dir) > left {
        let piece = usize::try_from((free_bytes(data_dir) - left).min(1 << 20)).unwrap();
        match filler.write_all(&vec![1; piece]).and_then(|()| filler.sync_all()) {
            Err(e) if e.kind() == ErrorKind::StorageFull => break,
            other => other.unwrap(),
        }
    }
}

fn remove_filler(data_dir: &Path) {
    std::fs::remove_file(data_dir.join("filler")).unwrap();
}

async fn space_is_set_aside(broker: &TestBroker) {
    eventually("the ballast file exists", || async { broker.data_dir().join("ballast").exists().then_some(()) }).await;
}

/// Writers were stopped early enough: the broker never removed its ballast file.
fn assert_disk_never_full(broker: &TestBroker) {
    let log = broker.log();
    assert!(broker.data_dir().join("ballast").exists(), "{log}");
    assert!(!log.contains("the ballast file was removed") && !log.contains("filesystem failed"), "{log}");
}

async fn suspended_for_growth(client: &Client, sandbox: &SandboxId) {
    eventually("the sandbox is suspended", || async {
        let shown = client.get_sandbox(sandbox.as_str()).await.ok()?;
        shown.reason.filter(|reason| reason.contains("while the host's disk was full"))
    })
    .await;
}

/// Runs a Python program that fills the disk, until its sandbox is suspended.
async fn run_until_suspended(client: &Client, session: &Session, program: &str) {
    let writing = ExecRequest { command: Some(format!("python3 -c \"{program}\"")), ..ExecRequest::default() };
    tokio::select! {
        () = suspended_for_growth(client, &session.info().sandbox.id) => {}
        // Its connection ends when the sandbox is suspended.
        () = async { let _ = session.dataplane().exec(&writing).await; std::future::pending().await } => {}
    }
}

async fn upload(dataplane: &Dataplane, path: &[u8]) -> Result<(), cobox_client::ClientError> {
    dataplane.write_file(path, None, Upload::from_bytes(vec![7; 64 << 10])).await.map(drop)
}

async fn get(broker: &TestBroker, path: &str) -> (u16, String) {
    let request = reqwest::Client::new().get(format!("{}{path}", broker.url())).bearer_auth(broker.key().expose());
    let answer = request.send().await.expect("an answer");
    (answer.status().as_u16(), answer.text().await.unwrap_or_default())
}

async fn metric(broker: &TestBroker, name: &str) -> Option<u64> {
    get(broker, "/metrics").await.1.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

async fn is_ready(broker: &TestBroker) -> bool {
    get(broker, "/readyz").await.0 == 200
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_are_stopped_before_the_hosts_disk_is_full_and_continue_when_there_is_space() {
    let broker = broker_on_small_disk(RESERVE_BYTES).await;
    let (client, data) = (broker.client(), broker.data_dir());
    let session = ensure(&client, "t").await;
    let dataplane = session.dataplane();
    upload(dataplane, b"/workspace/kept").await.unwrap();

    fill(&data, RESERVE_BYTES / 2);
    eventually("uploads are refused", || async {
        upload(dataplane, b"/workspace/more").await.err()?.is(ErrorCode::DiskFull).then_some(())
    })
    .await;
    let wrote = sh(dataplane, "head -c 100000 /dev/zero > more || echo refused; wc -c < kept").await;
    assert_eq!(wrote.stdout, "refused\n65536\n", "{wrote:?}");
    let error = client.negotiate(&negotiate("new", Mode::Ensure)).await.unwrap_err();
    assert!(error.is(ErrorCode::ProviderUnavailable) && error.to_string().contains("disk is nearly full"), "{error}");
    assert!(broker.log().contains("the host's disk is nearly full"), "{}", broker.log());

    remove_filler(&data);
    eventually("uploads are taken again", || async { upload(dataplane, b"/workspace/more").await.ok() }).await;
    assert_eq!(sh(dataplane, "head -c 100000 /dev/zero > more && wc -c < more").await.stdout, "100000\n");
    ensure(&client, "new").await;
}

/// Whether the kernel limits the unwritten data of a sandbox's image; `None` if the image is not mounted.
fn strict_limit(broker: &TestBroker, sandbox: &SandboxId) -> Option<String> {
    let image = broker.data_dir().join("sandboxes").join(sandbox.as_str()).join("disk.img");
    let found = Command::new("losetup").args(["--noheadings", "--output", "NAME", "--associated"]).arg(image).output().expect("losetup");
    let device = String::from_utf8(found.stdout).expect("a device");
    let settings = Path::new("/sys/block").join(device.trim().strip_prefix("/dev/")?).join("bdi/strict_limit");
    Some(std::fs::read_to_string(settings).expect("Linux 6.2 or newer").trim().to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unwritten_data_is_limited_while_there_is_little_space_also_after_a_crash_of_the_broker() {
    // Less than four times the reserve is free.
    let mut broker = broker_on_disk(8 * GIB, &format!("disk_bytes = 67108864\nreserve_bytes = {}\n", 4 * GIB)).await;
    let session = ensure(&broker.client(), "t").await;
    let id = session.info().sandbox.id.clone();
    eventually("it is limited", || async { (strict_limit(&broker, &id)? == "1").then_some(()) }).await;
    broker.kill();
    assert_eq!(strict_limit(&broker, &id).as_deref(), Some("1"));
    // With a smaller reserve there is room.
    let config = std::fs::read_to_string(broker.data_dir().join("config.toml")).unwrap();
    let more_room = config.replace(&format!("reserve_bytes = {}", 4 * GIB), &format!("reserve_bytes = {GIB}"));
    assert_ne!(config, more_room);
    std::fs::write(broker.data_dir().join("config.toml"), more_room).unwrap();
    broker.launch().await;
    eventually("it is not limited", || async { (strict_limit(&broker, &id)? == "0").then_some(()) }).await;
    // 3 GiB are left.
    let filler = File::create(broker.data_dir().join("filler")).unwrap();
    rustix::fs::fallocate(filler, rustix::fs::FallocateFlags::empty(), 0, 5 * GIB).unwrap();
    eventually("it is limited again", || async { (strict_limit(&broker, &id)? == "1").then_some(()) }).await;
    remove_filler(&broker.data_dir());
    eventually("it is not limited any more", || async { (strict_limit(&broker, &id)? == "0").then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fast_writer_is_stopped_and_deleting_its_files_frees_the_space() {
    stop_fast_writer(FILLED_DISK_CONFIG).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_writes_as_fast_as_it_can_is_stopped_with_the_default_reserve() {
    stop_fast_writer("disk_bytes = 8589934592\n").await;
}

async fn stop_fast_writer(config: &str) {
    let broker = broker_on_disk(FILLED_DISK_BYTES, config).await;
    let client = broker.client();
    let session = ensure(&client, "t").await;
    let dataplane = session.dataplane();
    upload(dataplane, b"/workspace/kept").await.unwrap();
    space_is_set_aside(&broker).await;

    let wrote = sh(dataplane, "dd if=/dev/zero of=big bs=1M 2>&1 || echo stopped; sync; wc -c < kept").await;
    assert!(wrote.stdout.contains("stopped\n65536\n"), "{wrote:?}");
    assert_disk_never_full(&broker);

    let deleted = sh(dataplane, "rm big && sync && echo deleted").await;
    assert_eq!(deleted.stdout, "deleted\n", "{deleted:?}");
    eventually("writers go on", || async { upload(dataplane, b"/workspace/more").await.ok() }).await;
    assert_eq!(sh(dataplane, "head -c 100000 /dev/zero > again && sync && wc -c < again").await.stdout, "100000\n");
    assert_eq!(client.get_sandbox(session.info().sandbox.id.as_str()).await.unwrap().state, State::Active);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_that_fill_the_disk_through_mapped_memory_are_suspended() {
    let broker = broker_on_disk(FILLED_DISK_BYTES, "disk_bytes = 8589934592\n").await;
    let client = broker.client();
    let session = ensure(&client, "t").await;
    sh(session.dataplane(), "echo kept > f; sync").await;
    space_is_set_aside(&broker).await;
    // The files have their size before writers are stopped; their pages get their blocks when they are flushed.
    let program = "import mmap, os
for number in range(4):
    if os.fork() == 0:
        with open(f'mapped{number}', 'w+b') as f:
            f.truncate(1 << 30)
            pages = mmap.mmap(f.fileno(), 0)
        for at in range(0, 1 << 30, 4 << 20):
            pages[at:at + (4 << 20)] = b'x' * (4 << 20)
        pages.flush()
        os._exit(0)
for _ in range(4):
    os.wait()";
    run_until_suspended(&client, &session, program).await;
    assert_disk_never_full(&broker);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_that_is_resumed_on_a_full_disk_and_writes_to_mapped_memory_is_suspended() {
    // The default reserve is a quarter of this disk.
    let mut broker = broker_on_disk(1 << 30, "disk_bytes = 8589934592\n").await;
    let session = ensure(&broker.client(), "t").await;
    let id = session.info().sandbox.id.clone();
    sh(session.dataplane(), "truncate -s 2G sparse; sync").await;
    space_is_set_aside(&broker).await;
    drop(session);
    broker.interrupt();
    fill(&broker.data_dir(), 120 * MIB);
    broker.launch().await;
    let client = broker.client();
    eventually("writers are stopped", || async { broker.log().contains("the host's disk is nearly full").then_some(()) }).await;
    let session = ensure(&client, "t").await;
    assert_eq!(session.info().sandbox.id, id);
    let program = "import mmap
with open('sparse', 'r+b') as f:
    pages = mmap.mmap(f.fileno(), 0)
for at in range(0, 2 << 30, 4 << 20):
    pages[at:at + (4 << 20)] = b'x' * (4 << 20)";
    run_until_suspended(&client, &session, program).await;
    assert_disk_never_full(&broker);

    // Its user can return and delete the file.
    let session = ensure(&client, "t").await;
    let deleted = sh(session.dataplane(), "rm sparse && sync && echo deleted").await;
    assert_eq!(deleted.stdout, "deleted\n", "{deleted:?}");
    assert_eq!(client.get_sandbox(id.as_str()).await.unwrap().state, State::Active);
    assert_disk_never_full(&broker);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_is_not_suspended_for_what_another_had_written_to_their_volume() {
    let broker = broker_on_disk(FILLED_DISK_BYTES, "disk_bytes = 8589934592\n").await;
    let (client, data) = (broker.client(), broker.data_dir());
    client.create_volume(&CreateVolume { name: "data".into(), size_bytes: 256 * MIB, access: None }).await.unwrap();
    let mount = MountParams { volume: "data".into(), path: "/data".into(), read_only: false };
    let spec = CreateSandbox { mounts: vec![mount], ..CreateSandbox::default() };
    let (_, writer) = resources::create(&client, spec.clone()).await;
    let (idle, _session) = resources::create(&client, spec).await;
    space_is_set_aside(&broker).await;
    // Some of it is not on the disk yet when writers are stopped.
    fill(&data, 300 * MIB);
    resources::output_of(&writer, "head -c 40M /dev/zero > /data/f").await;
    std::fs::rename(data.join("filler"), data.join("first_filler")).unwrap();
    fill(&data, 120 * MIB);
    eventually("writers are stopped", || async { broker.log().contains("the host's disk is nearly full").then_some(()) }).await;
    assert_eq!(resources::output_of(&writer, "sync; cat /data/f | wc -c").await, (40 * MIB).to_string());
    remove_filler(&data);
    std::fs::remove_file(data.join("first_filler")).unwrap();
    eventually("writers go on", || async { upload(writer.dataplane(), b"/data/more").await.ok() }).await;
    assert_eq!(client.get_sandbox(idle.id.as_str()).await.unwrap().state, State::Active);
    assert!(!broker.log().contains("a sandbox was suspended"), "{}", broker.log());
    assert_disk_never_full(&broker);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_are_stopped_when_the_disk_of_the_database_is_nearly_full() {
    let sandboxes = tempfile::tempdir().unwrap();
    let mut broker = broker_on_small_disk(RESERVE_BYTES).await;
    broker.interrupt();
    // The broker's disk is unmounted with this mount on it.
    let mounted = Command::new("mount").arg("--bind").arg(sandboxes.path()).arg(broker.data_dir().join("sandboxes")).status().unwrap();
    assert!(mounted.success());
    broker.launch().await;
    let session = ensure(&broker.client(), "t").await;
    upload(session.dataplane(), b"/workspace/kept").await.unwrap();
    fill(&broker.data_dir(), RESERVE_BYTES / 2);
    eventually("uploads are refused", || async {
        upload(session.dataplane(), b"/workspace/more").await.err()?.is(ErrorCode::DiskFull).then_some(())
    })
    .await;
    remove_filler(&broker.data_dir());
    eventually("uploads are taken again", || async { upload(session.dataplane(), b"/workspace/more").await.ok() }).await;
    let id = session.info().sandbox.id.clone();
    broker.client().delete_sandbox(id.as_str()).await.unwrap();
    eventually("its files are removed", || async { (!sandboxes.path().join(id.as_str()).exists()).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_full_disk_sandboxes_can_be_deleted_and_the_broker_starts() {
    let mut broker = broker_on_small_disk(RESERVE_BYTES).await;
    let ids = ["a", "b"].map(async |thread| ensure(&broker.client(), thread).await.info().sandbox.id.clone());
    let ids = futures_util::future::join_all(ids).await;
    space_is_set_aside(&broker).await;
    broker.kill();
    fill(&broker.data_dir(), 0);
    assert_eq!(free_bytes(&broker.data_dir()), 0);
    broker.launch().await;
    eventually("writers are stopped", || async { broker.log().contains("the host's disk is nearly full").then_some(()) }).await;
    let client = broker.client();
    client.delete_sandbox(ids[0].as_str()).await.unwrap();
    eventually("the deleted sandbox is gone", || async {
        (!broker.data_dir().join("sandboxes").join(ids[0].as_str()).exists()).then_some(())
    })
    .await;
    assert_eq!(client.get_sandbox(ids[1].as_str()).await.unwrap().state, State::Active);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_filesystem_is_detected_repaired_and_mounted_again() {
    // No space is reserved, so that the disk really fills up.
    let broker = broker_on_small_disk(0).await;
    let (client, data) = (broker.client(), broker.data_dir());
    let session = ensure(&client, "t").await;
    let id = session.info().sandbox.id.clone();
    sh(session.dataplane(), "echo kept > f; sync").await;

    fill(&data, 0);
    // Each file needs a block that the host does not have.
    let script = "for i in $(seq 400); do head -c 50000 /dev/urandom > g$i || break; sync; done 2>&1 | tail -1; touch h 2>&1";
    eventually("its filesystem fails", || async {
        let request = ExecRequest { command: Some(script.to_owned()), ..ExecRequest::default() };
        // While the disk is full, a request may fail with any error.
        let answer = session.dataplane().exec(&request).await.ok()?;
        answer.stdout.contains("Read-only file system").then_some(())
    })
    .await;
    eventually("the broker says that its database takes no writes", || async {
        (!is_ready(&broker).await && metric(&broker, "cobox_store_up").await == Some(0)).then_some(())
    })
    .await;
    eventually("audit records are lost and counted", || async {
        metric(&broker, "cobox_audit_records_lost_total").await.filter(|n| *n > 0)
    })
    .await;

    remove_filler(&data);
    eventually("the failed filesystem is reported", || async {
        let shown = client.get_sandbox(id.as_str()).await.ok()?;
        shown.reason.filter(|reason| reason.contains("filesystem failed"))
    })
    .await;
    let again = ensure(&client, "t").await;
    assert_eq!(again.info().sandbox.id, id);
    assert_eq!(sh(again.dataplane(), "cat f; echo more > h && sync && cat h").await.stdout, "kept\nmore\n");
    eventually("it is ready again", || async { is_ready(&broker).await.then_some(()) }).await;
    assert!(broker.log().contains("the filesystem of an image was repaired"), "{}", broker.log());

    let verified = broker.cobox().args(["audit", "verify"]).output().unwrap();
    let report = String::from_utf8_lossy(&verified.stdout).into_owned();
    assert!(!verified.status.success() && report.contains("are missing"), "{report}");
    // Written with the dataplane's next audit records, which are batched and, after a failure, retried after a pause.
    eventually("the gap is explained", || async {
        let audit = broker.cobox().args(["audit", "--limit", "1000"]).output().unwrap();
        String::from_utf8_lossy(&audit.stdout).contains("audit.lost").then_some(())
    })
    .await;
}
