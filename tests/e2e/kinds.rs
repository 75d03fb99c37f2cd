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

/// The ways in which a sandbox's files can be stored on disk.
pub fn ways() -> Vec<BrokerOptions> {
    assert!(rustix::process::geteuid().is_root(), "this test changes users and needs root");
    let soft = BrokerOptions { config: "[local]\ndisk = \"soft\"\n".to_owned(), ..BrokerOptions::default() };
    // The kernel shows the images there by paths that no process could open.
    let own_disk = BrokerOptions { disk_bytes: Some(OWN_DISK_BYTES), ..BrokerOptions::default() };
    vec![BrokerOptions::default(), own_disk, soft, BrokerOptions { uid: Some(61_236), ..BrokerOptions::default() }]
}

pub async fn made(client: &Client, wish: CreateSandbox) -> (SandboxInfo, Session) {
    let sandbox = client.create_sandbox(&CreateSandbox { keep: Some(true), ..wish }).await.expect("a sandbox");
    let thread = format!("of {}", sandbox.id);
    let request = NegotiateRequest { sandbox_hint: Some(sandbox.id.to_string()), ..negotiate(&thread, Mode::Ensure) };
    let session = client.open(&request).await.expect("a session");
    (sandbox, session)
}

pub async fn said(session: &Session, command: &str) -> String {
    let answer = sh(session.dataplane(), command).await;
    assert_eq!(answer.exit_code, 0, "{command}: {answer:?}");
    answer.stdout.trim().to_owned()
}

pub async fn snapshot(client: &Client, sandbox: &SandboxInfo, name: &str) -> SnapshotInfo {
    let wish = TakeSnapshot { name: name.to_owned(), tag: None };
    let taken = client.take_snapshot(sandbox.id.as_str(), &wish).await.expect("a snapshot is begun");
    settled(client, taken.id.as_str()).await
}

async fn settled(client: &Client, id: &str) -> SnapshotInfo {
    eventually("the snapshot is taken", || async {
        let snapshot = client.get_snapshot(id).await.ok()?;
        assert_ne!(snapshot.state, SnapshotState::Failed, "{snapshot:?}");
        (snapshot.state == SnapshotState::Ready).then_some(snapshot)
    })
    .await
}

pub fn from(snapshot: &SnapshotInfo) -> CreateSandbox {
    CreateSandbox { snapshot: Some(snapshot.id.to_string()), ..CreateSandbox::default() }
}

#[tokio::test]
async fn a_template_gives_its_sandboxes_their_root_limits_and_variables() {
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
    assert_eq!(said(&small, "echo $GREETING $LANG").await, "hello C");
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
    assert_eq!(said(&small, "cat /workspace/f; echo $GREETING").await, "xhello");

    let client = broker.client();
    let wish = CreateTemplate { name: "own".into(), image: Some("python:3".into()), ..CreateTemplate::default() };
    let refused = client.create_template(&wish).await.unwrap_err().to_string();
    assert!(refused.contains("no container engine") && refused.contains("python:3"), "{refused}");
    let much = Resources { cpus: Cpus::from_count(1000.0), ..Resources::default() };
    let refused = client.create_sandbox(&CreateSandbox { resources: much, ..CreateSandbox::default() }).await.unwrap_err().to_string();
    assert!(refused.contains("resources.cpus"), "{refused}");
}

/// The content of a file in the sandbox's image.
async fn marker(session: &Session) -> Vec<u8> {
    let file = session.dataplane().read_file(b"/marker").await.expect("the image's file");
    file.into_stream().try_collect::<Vec<_>>().await.expect("its content").concat()
}

#[tokio::test]
async fn a_sandbox_and_its_snapshots_keep_the_root_their_image_stood_for() {
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
    let ((first, session), (_, same)) = tokio::join!(made(&client, by("marked")), made(&client, by("same")));
    assert_eq!((marker(&session).await, marker(&same).await), (b"one".to_vec(), b"one".to_vec()));
    session.dataplane().write_file(b"/workspace/f", None, cobox_client::Upload::from_bytes("x")).await.unwrap();
    let taken = snapshot(&client, &first, "of-one").await;
    pack("two");
    let (_, second) = made(&client, by("marked")).await;
    let (_, third) = made(&client, from(&taken)).await;
    assert_eq!((marker(&second).await, marker(&third).await), (b"two".to_vec(), b"one".to_vec()));
    drop((session, same, second, third));
    broker.interrupt();
    // The image is no longer configured.
    fs::write(broker.data_dir().join("config.toml"), "").unwrap();
    fs::remove_file(&archive).unwrap();
    broker.launch().await;
    let client = broker.client();
    let again = NegotiateRequest { sandbox_hint: Some(first.id.to_string()), ..negotiate("again", Mode::Ensure) };
    let again = client.open(&again).await.unwrap();
    let (_, from_it) = made(&client, from(&taken)).await;
    assert_eq!((marker(&again).await, marker(&from_it).await), (b"one".to_vec(), b"one".to_vec()));
    let template = CreateTemplate { name: "new".into(), image: Some("marked:1".into()), ..CreateTemplate::default() };
    let refused = client.create_template(&template).await.unwrap_err().to_string();
    assert!(refused.contains("no container engine") && !refused.contains("image.tar"), "{refused}");
}

#[tokio::test]
async fn a_volume_is_refused_where_it_can_not_be_mounted() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    client.create_volume(&CreateVolume { name: "data".into(), size_bytes: 64 << 20, access: None }).await.unwrap();
    let at = |path: &str| vec![MountParams { volume: "data".into(), path: path.into(), read_only: false }];
    let (first, session) = made(&client, CreateSandbox::default()).await;
    said(&session, "ln -s /etc link; mkdir real; echo x > file").await;
    let taken = snapshot(&client, &first, "links").await;
    let shown = ["/etc/alternatives/x", "/etc/ssl/certs"].into_iter().filter(|p| fs::metadata(p.trim_end_matches("/x")).is_ok());
    let mut wishes: Vec<CreateSandbox> =
        shown.chain(["/etc/passwd", "/etc/passwd/x"]).map(|path| CreateSandbox { mounts: at(path), ..CreateSandbox::default() }).collect();
    for path in ["/workspace/link", "/workspace/link/x", "/workspace/file/x"] {
        wishes.push(CreateSandbox { mounts: at(path), ..from(&taken) });
    }
    for wish in wishes {
        let refused = client.create_sandbox(&wish).await.unwrap_err();
        assert!(refused.is(ErrorCode::InvalidRequest), "{refused}");
        assert!(refused.to_string().contains("mounts[0].path"), "{refused}");
    }
    let template = CreateTemplate { name: "bad".into(), mounts: at("/etc/passwd"), ..CreateTemplate::default() };
    assert!(client.create_template(&template).await.unwrap_err().to_string().contains("mounts[0].path"));
    let (_, session) = made(&client, CreateSandbox { mounts: at("/workspace/real/data"), ..from(&taken) }).await;
    assert_eq!(said(&session, "echo kept > real/data/f; cat real/data/f").await, "kept");
}

#[tokio::test]
async fn a_running_sandboxs_files_are_what_others_start_from() {
    for options in ways() {
        let mut broker = TestBroker::start_with(options.clone()).await;
        let client = broker.client();
        let (first, session) = made(&client, CreateSandbox::default()).await;
        said(&session, "mkdir -p deep/er; echo one > deep/er/f; echo gone > gone; ln -s deep link; echo hidden > deep/hidden; mkfifo pipe")
            .await;
        said(&session, "echo '#!/bin/sh\necho run' > prog; chmod 755 prog; (while :; do date > busy; done) >/dev/null 2>&1 & until [ -e busy ]; do :; done").await;
        let below = snapshot(&client, &first, "below").await;
        assert!(below.size_bytes.unwrap() > 0);
        // Later writes are not in the snapshot, and writes of a sandbox created from it are not visible to others.
        said(&session, "echo later > later").await;
        let (second, session) = made(&client, from(&below)).await;
        assert_eq!(said(&session, "cat deep/er/f link/hidden; ./prog; ls later 2>&1 | wc -l; stat -c %U prog deep").await, {
            let user = said(&session, "id -un").await;
            format!("one\nhidden\nrun\n1\n{user}\n{user}")
        });
        // Deleted names and a recreated directory stay so in a further snapshot.
        said(&session, "rm gone; rm -r deep; mkdir deep; echo two > deep/two; echo more >> prog").await;
        let above = snapshot(&client, &second, "above").await;
        let (third, session) = made(&client, from(&above)).await;
        assert_eq!(said(&session, "ls; ls deep; tail -1 prog").await, "busy\ndeep\nlink\npipe\nprog\ntwo\nmore", "{options:?}");
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
        assert_eq!(said(&session, "cat deep/two; tail -1 prog").await, "two\nmore");
        drop(session);
        client.delete_sandbox(third.id.as_str()).await.unwrap();
        client.delete_snapshot("above").await.unwrap();
        let layers = broker.data_dir().join("snapshots");
        eventually("no layer is left", || async { fs::read_dir(&layers).unwrap().next().is_none().then_some(()) }).await;
    }
}

#[tokio::test]
async fn a_volume_is_in_several_sandboxes_at_once_and_outlives_them() {
    for options in ways() {
        let broker = TestBroker::start_with(options.clone()).await;
        let client = broker.client();
        client.create_volume(&CreateVolume { name: "data".into(), size_bytes: 64 << 20, access: None }).await.unwrap();
        let mount = |path: &str, read_only| MountParams { volume: "data".into(), path: path.into(), read_only };
        let with = |mounts| CreateSandbox { mounts, ..CreateSandbox::default() };
        let (one, first) = made(&client, with(vec![mount("/data", false)])).await;
        let (two, second) = made(&client, with(vec![mount("/workspace/shared/data", false)])).await;
        let (three, third) = made(&client, with(vec![mount("/data", true)])).await;
        said(&first, "echo hello > /data/f; mkdir /data/d").await;
        assert_eq!(said(&second, "cat shared/data/f; echo there >> shared/data/f; stat -c %U shared/data/f").await, {
            let user = said(&second, "id -un").await;
            format!("hello\n{user}")
        });
        assert_eq!(said(&first, "cat /data/f; ls /data").await, "hello\nthere\nd\nf");
        assert_eq!(said(&third, "cat /data/f; touch /data/x 2>&1 | grep -c -i read-only").await, "hello\nthere\n1");
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
        let wish = CreateTemplate { name: "with".into(), mounts: vec![mount("/data", false)], ..CreateTemplate::default() };
        client.create_template(&wish).await.unwrap();
        let (four, again) = made(&client, CreateSandbox { template: Some("with".into()), ..CreateSandbox::default() }).await;
        assert_eq!(said(&again, "cat /data/f").await, "hello\nthere");
        drop(again);
        client.delete_sandbox(four.id.as_str()).await.unwrap();
        eventually("it can be deleted", || async { client.delete_volume("data").await.ok() }).await;
        assert!(fs::read_dir(broker.data_dir().join("volumes")).unwrap().next().is_none());
    }
}

#[tokio::test]
async fn a_snapshot_interrupted_by_a_crash_is_finished_or_gone() {
    let mut broker = TestBroker::start().await;
    let client = broker.client();
    let (sandbox, session) = made(&client, CreateSandbox { env: Env([("A".into(), "1".into())].into()), ..CreateSandbox::default() }).await;
    said(&session, "for i in $(seq 2000); do echo $i > f$i; done").await;
    drop(session);
    let wish = TakeSnapshot { name: "s".to_owned(), tag: None };
    let begun = client.take_snapshot(sandbox.id.as_str(), &wish).await.unwrap();
    broker.kill();
    broker.launch().await;
    let client = broker.client();
    settled(&client, begun.id.as_str()).await;
    let (_, session) = made(&client, from(&begun)).await;
    assert_eq!(said(&session, "ls | wc -l; cat f2000; echo $A").await, "2000\n2000", "its files, and not what else it was made with");
    let left: Vec<_> = fs::read_dir(broker.data_dir().join("snapshots")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, [begun.id.as_str()]);
}
