//! Resources of real sandboxes: templates, snapshots of running ones, and volumes in several at once; as root with
//! hard and soft disk limits, and as an ordinary user.

use std::fs;

use cobox_client::{Client, Session};
use cobox_protocol::{
    ErrorCode,
    resources::{Cpus, CreateTemplate, CreateVolume, Env, MountParams, Resources, SnapshotInfo, SnapshotState, TakeSnapshot},
    sandbox::{CreateSandbox, SandboxInfo},
    session::{Mode, NegotiateRequest},
};
use cobox_testkit::{BrokerOptions, TestBroker, eventually, negotiate, sh};
use futures_util::TryStreamExt;

/// Size of a separate disk for the data directory, in bytes: more than snapshots and volumes leave free.
pub const OWN_DISK_BYTES: u64 = 4 << 30;

/// The configurations that determine how a sandbox's files are stored on disk.
pub fn storage_configurations() -> Vec<BrokerOptions> {
    assert!(rustix::process::geteuid().is_root(), "this test changes users and needs root");
    let soft = BrokerOptions { config: "[local]\ndisk = \"soft\"\n".to_owned(), ..BrokerOptions::default() };
    // The kernel shows the images there by paths that no process could open.
    let own_disk = BrokerOptions { disk_bytes: Some(OWN_DISK_BYTES), ..BrokerOptions::default() };
    vec![BrokerOptions::default(), own_disk, soft, BrokerOptions { uid: Some(61_236), ..BrokerOptions::default() }]
}

pub async fn create(client: &Client, request: CreateSandbox) -> (SandboxInfo, Session) {
    let sandbox = client.create_sandbox(&CreateSandbox { keep: Some(true), ..request }).await.expect("a sandbox");
    let thread = format!("of {}", sandbox.id);
    let request = NegotiateRequest { sandbox_hint: Some(sandbox.id.to_string()), ..negotiate(&thread, Mode::Ensure) };
    let session = client.open(&request).await.expect("a session");
    (sandbox, session)
}

pub async fn output_of(session: &Session, command: &str) -> String {
    let answer = sh(session.dataplane(), command).await;
    assert_eq!(answer.exit_code, 0, "{command}: {answer:?}");
    answer.stdout.trim().to_owned()
}

pub async fn create_snapshot(client: &Client, sandbox: &SandboxInfo, name: &str) -> SnapshotInfo {
    let request = TakeSnapshot { name: name.to_owned(), tag: None };
    let taken = client.take_snapshot(sandbox.id.as_str(), &request).await.expect("a snapshot is begun");
    wait_until_ready(client, taken.id.as_str()).await
}

async fn wait_until_ready(client: &Client, id: &str) -> SnapshotInfo {
    eventually("the snapshot is taken", || async {
        let snapshot = client.get_snapshot(id).await.ok()?;
        assert_ne!(snapshot.state, SnapshotState::Failed, "{snapshot:?}");
        (snapshot.state == SnapshotState::Ready).then_some(snapshot)
    })
    .await
}

pub fn from_snapshot(snapshot: &SnapshotInfo) -> CreateSandbox {
    CreateSandbox { snapshot: Some(snapshot.id.to_string()), ..CreateSandbox::default() }
}

#[tokio::test]
async fn a_template_defines_the_root_limits_and_variables_of_its_sandboxes() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("bin")).unwrap();
    let boxd = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("boxd");
    fs::copy(boxd, root.path().join("bin/tool")).unwrap();
    let config = format!(
        "[local.images]\n\"tool:1\" = {:?}\n[templates.tool]\nimage = \"tool:1\"\n\
         [templates.small]\nresources = {{ processes = 40, cpus = 0.5 }}\nenv = {{ GREETING = \"hello\", LANG = \"C\" }}\n",
        root.path()
    );
    let mut broker = TestBroker::start_with(BrokerOptions { config, ..BrokerOptions::default() }).await;
    let client = broker.client();
    let named = |name: &str| NegotiateRequest { template: Some(name.to_owned()), ..negotiate(name, Mode::Ensure) };
    let small = client.open(&named("small")).await.unwrap();
    assert_eq!(output_of(&small, "echo $GREETING $LANG").await, "hello C");
    let many = "for i in $(seq 60); do sleep 5 & done 2>/dev/null; jobs -p | wc -l; kill $(jobs -p)";
    let started: u32 = sh(small.dataplane(), many).await.stdout.trim().parse().unwrap_or(0);
    assert!(started < 60, "{started} processes where 40 may be");
    let tool = client.open(&named("tool")).await.unwrap();
    let request = cobox_protocol::exec::ExecRequest { argv: Some(vec!["tool".into(), "--version".into()]), ..Default::default() };
    assert!(tool.dataplane().exec(&request).await.unwrap().stdout.starts_with("boxd "));
    assert!(tool.dataplane().read_file(b"/usr/bin/env").await.is_err(), "nothing of the host's is here");
    // The same after a suspension, independent of the settings at that time.
    small.dataplane().write_file(b"/workspace/f", None, cobox_client::Upload::from_bytes("x")).await.unwrap();
    drop((small, tool));
    broker.interrupt();
    fs::write(broker.data_dir().join("config.toml"), "").unwrap();
    broker.launch().await;
    let small = broker.client().open(&negotiate("small", Mode::Get)).await.unwrap();
    assert_eq!(output_of(&small, "cat /workspace/f; echo $GREETING").await, "xhello");

    let client = broker.client();
    let request = CreateTemplate { name: "own".into(), image: Some("python:3".into()), ..CreateTemplate::default() };
    let refused = client.create_template(&request).await.unwrap_err().to_string();
    assert!(refused.contains("no container engine") && refused.contains("python:3"), "{refused}");
    let much = Resources { cpus: Cpus::from_count(1000.0), ..Resources::default() };
    let refused = client.create_sandbox(&CreateSandbox { resources: much, ..CreateSandbox::default() }).await.unwrap_err().to_string();
    assert!(refused.contains("resources.cpus"), "{refused}");
}

/// The content of a file in the sandbox's image.
async fn read_marker(session: &Session) -> Vec<u8> {
    let file = session.dataplane().read_file(b"/marker").await.expect("the image's file");
    file.into_stream().try_collect::<Vec<_>>().await.expect("its content").concat()
}

#[tokio::test]
async fn a_sandbox_and_its_snapshots_keep_their_image_version() {
    let dir = tempfile::tempdir().unwrap();
    let archive = dir.path().join("image.tar");
    let pack = |word: &str| {
        let root = dir.path().join(word);
        fs::create_dir(&root).unwrap();
        fs::write(root.join("marker"), word).unwrap();
        let packed = std::process::Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg(".").status().unwrap();
        assert!(packed.success());
    };
    pack("one");
    let images = format!("[local.images]\n\"marked:1\" = {archive:?}\n\"marked:same\" = {archive:?}\n");
    let config = format!("{images}[templates.marked]\nimage = \"marked:1\"\n[templates.same]\nimage = \"marked:same\"\n");
    let mut broker = TestBroker::start_with(BrokerOptions { config, ..BrokerOptions::default() }).await;
    let client = broker.client();
    let by = |template: &str| CreateSandbox { template: Some(template.to_owned()), ..CreateSandbox::default() };
    // Two templates of the same archive, which is not unpacked yet.
    let ((first, session), (_, same)) = tokio::join!(create(&client, by("marked")), create(&client, by("same")));
    assert_eq!((read_marker(&session).await, read_marker(&same).await), (b"one".to_vec(), b"one".to_vec()));
    session.dataplane().write_file(b"/workspace/f", None, cobox_client::Upload::from_bytes("x")).await.unwrap();
    let taken = create_snapshot(&client, &first, "of-one").await;
    pack("two");
    let (_, second) = create(&client, by("marked")).await;
    let (_, third) = create(&client, from_snapshot(&taken)).await;
    assert_eq!((read_marker(&second).await, read_marker(&third).await), (b"two".to_vec(), b"one".to_vec()));
    drop((session, same, second, third));
    broker.interrupt();
    // The image is no longer configured.
    fs::write(broker.data_dir().join("config.toml"), "").unwrap();
    fs::remove_file(&archive).unwrap();
    broker.launch().await;
    let client = broker.client();
    let again = NegotiateRequest { sandbox_hint: Some(first.id.to_string()), ..negotiate("again", Mode::Ensure) };
    let again = client.open(&again).await.unwrap();
    let (_, from_it) = create(&client, from_snapshot(&taken)).await;
    assert_eq!((read_marker(&again).await, read_marker(&from_it).await), (b"one".to_vec(), b"one".to_vec()));
    let template = CreateTemplate { name: "new".into(), image: Some("marked:1".into()), ..CreateTemplate::default() };
    let refused = client.create_template(&template).await.unwrap_err().to_string();
    assert!(refused.contains("no container engine") && !refused.contains("image.tar"), "{refused}");
}

#[tokio::test]
async fn a_volume_at_an_unusable_mount_path_is_refused() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    client.create_volume(&CreateVolume { name: "data".into(), size_bytes: 64 << 20, access: None }).await.unwrap();
    let at = |path: &str| vec![MountParams { volume: "data".into(), path: path.into(), read_only: false }];
    let (first, session) = create(&client, CreateSandbox::default()).await;
    output_of(&session, "ln -s /etc link; mkdir real; echo x > file").await;
    let taken = create_snapshot(&client, &first, "links").await;
    let shown = ["/etc/alternatives/x", "/etc/ssl/certs"].into_iter().filter(|p| fs::metadata(p.trim_end_matches("/x")).is_ok());
    let mut requests: Vec<CreateSandbox> =
        shown.chain(["/etc/passwd", "/etc/passwd/x"]).map(|path| CreateSandbox { mounts: at(path), ..CreateSandbox::default() }).collect();
    for path in ["/workspace/link", "/workspace/link/x", "/workspace/file/x"] {
        requests.push(CreateSandbox { mounts: at(path), ..from_snapshot(&taken) });
    }
    for request in requests {
        let refused = client.create_sandbox(&request).await.unwrap_err();
        assert!(refused.is(ErrorCode::InvalidRequest), "{refused}");
        assert!(refused.to_string().contains("mounts[0].path"), "{refused}");
    }
    let template = CreateTemplate { name: "bad".into(), mounts: at("/etc/passwd"), ..CreateTemplate::default() };
    assert!(client.create_template(&template).await.unwrap_err().to_string().contains("mounts[0].path"));
    let (_, session) = create(&client, CreateSandbox { mounts: at("/workspace/real/data"), ..from_snapshot(&taken) }).await;
    assert_eq!(output_of(&session, "echo kept > real/data/f; cat real/data/f").await, "kept");
}

#[tokio::test]
async fn sandboxes_start_with_the_files_of_a_snapshot_of_a_running_one() {
    for options in storage_configurations() {
        let mut broker = TestBroker::start_with(options.clone()).await;
        let client = broker.client();
        let (first, session) = create(&client, CreateSandbox::default()).await;
        output_of(
            &session,
            "mkdir -p deep/er; echo one > deep/er/f; echo gone > gone; ln -s deep link; echo hidden > deep/hidden; mkfifo pipe",
        )
        .await;
        output_of(&session, "echo '#!/bin/sh\necho run' > prog; chmod 755 prog; (while :; do date > busy; done) >/dev/null 2>&1 & until [ -e busy ]; do :; done").await;
        let below = create_snapshot(&client, &first, "below").await;
        assert!(below.size_bytes.unwrap() > 0);
        // Later writes are not in the snapshot, and writes of a sandbox created from it are not visible to others.
        output_of(&session, "echo later > later").await;
        let (second, session) = create(&client, from_snapshot(&below)).await;
        assert_eq!(output_of(&session, "cat deep/er/f link/hidden; ./prog; ls later 2>&1 | wc -l; stat -c %U prog deep").await, {
            let user = output_of(&session, "id -un").await;
            format!("one\nhidden\nrun\n1\n{user}\n{user}")
        });
        // Deleted names and a recreated directory stay so in a further snapshot.
        output_of(&session, "rm gone; rm -r deep; mkdir deep; echo two > deep/two; echo more >> prog").await;
        let above = create_snapshot(&client, &second, "above").await;
        let (third, session) = create(&client, from_snapshot(&above)).await;
        assert_eq!(output_of(&session, "ls; ls deep; tail -1 prog").await, "busy\ndeep\nlink\npipe\nprog\ntwo\nmore", "{options:?}");
        // The files survive a crash of everything, and the deletion of the sandboxes they came from.
        client.delete_sandbox(first.id.as_str()).await.unwrap();
        client.delete_sandbox(second.id.as_str()).await.unwrap();
        client.delete_snapshot("below").await.unwrap();
        drop(session);
        broker.kill();
        broker.launch().await;
        let client = broker.client();
        let request = NegotiateRequest { sandbox_hint: Some(third.id.to_string()), ..negotiate("again", Mode::Ensure) };
        let session = client.open(&request).await.unwrap();
        assert_eq!(output_of(&session, "cat deep/two; tail -1 prog").await, "two\nmore");
        drop(session);
        client.delete_sandbox(third.id.as_str()).await.unwrap();
        client.delete_snapshot("above").await.unwrap();
        let layers = broker.data_dir().join("snapshots");
        eventually("no layer is left", || async { fs::read_dir(&layers).unwrap().next().is_none().then_some(()) }).await;
    }
}

#[tokio::test]
async fn a_volume_is_shared_by_several_sandboxes_and_outlives_them() {
    for options in storage_configurations() {
        let broker = TestBroker::start_with(options.clone()).await;
        let client = broker.client();
        client.create_volume(&CreateVolume { name: "data".into(), size_bytes: 64 << 20, access: None }).await.unwrap();
        let mount = |path: &str, read_only| MountParams { volume: "data".into(), path: path.into(), read_only };
        let with = |mounts| CreateSandbox { mounts, ..CreateSandbox::default() };
        let (one, first) = create(&client, with(vec![mount("/data", false)])).await;
        let (two, second) = create(&client, with(vec![mount("/workspace/shared/data", false)])).await;
        let (three, third) = create(&client, with(vec![mount("/data", true)])).await;
        output_of(&first, "echo hello > /data/f; mkdir /data/d").await;
        assert_eq!(output_of(&second, "cat shared/data/f; echo there >> shared/data/f; stat -c %U shared/data/f").await, {
            let user = output_of(&second, "id -un").await;
            format!("hello\n{user}")
        });
        assert_eq!(output_of(&first, "cat /data/f; ls /data").await, "hello\nthere\nd\nf");
        assert_eq!(output_of(&third, "cat /data/f; touch /data/x 2>&1 | grep -c -i read-only").await, "hello\nthere\n1");
        if options.config.is_empty() && options.uid.is_none() {
            let full = sh(first.dataplane(), "dd if=/dev/zero of=/data/big bs=1M count=100 2>&1; rm /data/big").await;
            assert!(full.stdout.contains("No space left"), "{full:?}");
        }
        let refused = client.delete_volume("data").await.unwrap_err().to_string();
        assert!(refused.contains("is used by"), "{refused}");
        drop((first, second, third));
        for sandbox in [one, two, three] {
            client.delete_sandbox(sandbox.id.as_str()).await.unwrap();
        }
        let request = CreateTemplate { name: "with".into(), mounts: vec![mount("/data", false)], ..CreateTemplate::default() };
        client.create_template(&request).await.unwrap();
        let (four, again) = create(&client, CreateSandbox { template: Some("with".into()), ..CreateSandbox::default() }).await;
        assert_eq!(output_of(&again, "cat /data/f").await, "hello\nthere");
        drop(again);
        client.delete_sandbox(four.id.as_str()).await.unwrap();
        eventually("it can be deleted", || async { client.delete_volume("data").await.ok() }).await;
        assert!(fs::read_dir(broker.data_dir().join("volumes")).unwrap().next().is_none());
    }
}

#[tokio::test]
async fn a_snapshot_interrupted_by_a_crash_is_finished_or_removed() {
    let mut broker = TestBroker::start().await;
    let client = broker.client();
    let (sandbox, session) =
        create(&client, CreateSandbox { env: Env([("A".into(), "1".into())].into()), ..CreateSandbox::default() }).await;
    output_of(&session, "for i in $(seq 2000); do echo $i > f$i; done").await;
    drop(session);
    let request = TakeSnapshot { name: "s".to_owned(), tag: None };
    let begun = client.take_snapshot(sandbox.id.as_str(), &request).await.unwrap();
    broker.kill();
    broker.launch().await;
    let client = broker.client();
    wait_until_ready(&client, begun.id.as_str()).await;
    let (_, session) = create(&client, from_snapshot(&begun)).await;
    assert_eq!(
        output_of(&session, "ls | wc -l; cat f2000; echo $A").await,
        "2000\n2000",
        "its files, and not what else it was created with"
    );
    let left: Vec<_> = fs::read_dir(broker.data_dir().join("snapshots")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, [begun.id.as_str()]);
}
