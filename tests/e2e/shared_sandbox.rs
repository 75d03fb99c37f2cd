//! A human and an agent in one sandbox: each sees the other's actions.

use cobox_client::{ArchiveFormat, ArchiveLinks, ShellEvent, Upload};
use cobox_protocol::{ErrorCode, exec::ExecRequest, frame::ShellStart, key::PrincipalKind, session::Mode};
use cobox_testkit::{TestBroker, ensure, negotiate, sh};
use futures_util::StreamExt;

async fn read(dataplane: &cobox_client::Dataplane, path: &str) -> Vec<u8> {
    let mut stream = std::pin::pin!(dataplane.read_file(path.as_bytes()).await.expect("the file is there").into_stream());
    let mut all = Vec::new();
    while let Some(chunk) = stream.next().await {
        all.extend_from_slice(&chunk.expect("it is read to its end"));
    }
    all
}

#[tokio::test]
async fn human_and_agent_share_one_directory() {
    let broker = TestBroker::start().await;
    let human = broker.client_of("ada", PrincipalKind::Human, None).await;
    let agent = broker.client_of("bot", PrincipalKind::Agent, None).await;
    let (h, a) = (ensure(&human, "thread-1").await, ensure(&agent, "thread-1").await);
    assert_eq!(h.info().session_id, a.info().session_id);
    assert_eq!(h.info().sandbox.id, a.info().sandbox.id);
    assert_ne!(h.token(), a.token(), "each has a token of their own");

    h.dataplane().write_file(b"/workspace/from-human.txt", None, Upload::from_bytes("hello, agent\n")).await.unwrap();
    assert_eq!(sh(a.dataplane(), "cat from-human.txt").await.stdout, "hello, agent\n");

    sh(a.dataplane(), "echo 'hello, human' > from-agent.txt").await;
    assert_eq!(read(h.dataplane(), "/workspace/from-agent.txt").await, b"hello, human\n");

    for side in [&h, &a] {
        assert_eq!(sh(side.dataplane(), "pwd").await.stdout, "/workspace\n");
        assert_eq!(sh(side.dataplane(), "ls").await.stdout, "from-agent.txt\nfrom-human.txt\n");
        assert_eq!(sh(side.dataplane(), "stat -c %U from-human.txt from-agent.txt | sort -u").await.stdout, "user\n");
    }
}

#[tokio::test]
async fn a_command_returns_its_exact_output_and_exit_code_within_its_limits() {
    let broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "t").await;
    let d = session.dataplane();

    let r = sh(d, "echo out; echo err >&2; exit 7").await;
    assert_eq!((r.stdout.as_str(), r.stderr.as_str(), r.exit_code), ("out\n", "err\n", 7));

    let r = sh(d, "printf '\\377\\000'").await;
    assert_eq!(r.stdout_b64.as_deref(), Some("/wA="));

    let r = d.exec(&ExecRequest { argv: Some(vec!["cat".into()]), stdin: Some("from stdin".into()), ..Default::default() }).await.unwrap();
    assert_eq!(r.stdout, "from stdin");

    let r = d.exec(&ExecRequest { argv: Some(vec!["no-such-program".into()]), ..Default::default() }).await.unwrap();
    assert_eq!(r.exit_code, 127);

    let env = [("GREETING".to_owned(), "a b".to_owned())].into();
    let r = d
        .exec(&ExecRequest { command: Some("echo $GREETING $PWD".into()), cwd: Some("/tmp".into()), env: Some(env), ..Default::default() })
        .await
        .unwrap();
    assert_eq!(r.stdout, "a b /tmp\n");

    let r = d
        .exec(&ExecRequest { command: Some("sleep 1000 & sleep 1000".into()), timeout_seconds: Some(0.3), ..Default::default() })
        .await
        .unwrap();
    assert!(r.timed_out);
    assert_eq!(sh(d, "pgrep -c sleep").await.stdout, "0\n", "nothing of it lives on");

    let r = d
        .exec(&ExecRequest { command: Some("head -c 100000 /dev/zero".into()), max_output_bytes: Some(10), ..Default::default() })
        .await
        .unwrap();
    assert!(r.truncated && r.stdout.len() == 10 && r.exit_code == 0);

    let e = d.exec(&ExecRequest { command: Some("true".into()), cwd: Some("/nowhere".into()), ..Default::default() }).await.unwrap_err();
    assert!(e.is(ErrorCode::InvalidRequest) && e.to_string().contains("cwd"), "{e}");
    let e = d.exec(&ExecRequest::default()).await.unwrap_err();
    assert!(e.is(ErrorCode::InvalidRequest), "{e}");
}

#[tokio::test]
async fn files_and_folders_are_transferred_unchanged() {
    let broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "t").await;
    let d = session.dataplane();

    let mut big = vec![0u8; 3 << 20];
    getrandom::fill(&mut big).unwrap();
    d.write_file(b"/workspace/deep/er/big.bin", Some(0o640), Upload::from_bytes(big.clone())).await.unwrap();
    assert_eq!(read(d, "/workspace/deep/er/big.bin").await, big);
    assert_eq!(sh(d, "stat -c %a deep/er/big.bin").await.stdout, "640\n");

    sh(d, "mkdir -p tree/empty; ln -s ../a tree/link; echo x > tree/f; chmod 755 tree/f").await;
    let mut archive = Vec::new();
    let mut stream = std::pin::pin!(d.get_archive(b"/workspace/tree", ArchiveFormat::TarZstd).await.unwrap().into_stream());
    while let Some(chunk) = stream.next().await {
        archive.extend_from_slice(&chunk.unwrap());
    }
    let refused =
        d.put_archive(b"/workspace/copy", ArchiveFormat::TarZstd, ArchiveLinks::Inside, Upload::from_bytes(archive.clone())).await;
    assert!(refused.is_err_and(|e| e.is(ErrorCode::InvalidRequest)), "the link leads out of the tree");
    d.put_archive(b"/workspace/copy", ArchiveFormat::TarZstd, ArchiveLinks::Any, Upload::from_bytes(archive)).await.unwrap();
    assert_eq!(sh(d, "diff -r --no-dereference tree copy && readlink copy/link && stat -c %a copy/f").await.stdout, "../a\n755\n");

    d.delete_file(b"/workspace/deep/er/big.bin").await.unwrap();
    assert!(d.read_file(b"/workspace/deep/er/big.bin").await.is_err_and(|e| e.is(ErrorCode::FileNotFound)));
    // The host's programs can't be changed: the files API has only the workload's permissions.
    let e = d.write_file(b"/usr/bin/env", None, Upload::from_bytes("")).await.unwrap_err();
    assert!(e.is(ErrorCode::Forbidden), "{e}");
}

#[tokio::test]
async fn a_shell_is_a_real_terminal() {
    let broker = TestBroker::start().await;
    let session = ensure(&broker.client(), "t").await;
    let mut shell = session.dataplane().shell(ShellStart { cols: Some(101), rows: Some(33), ..Default::default() }).await.unwrap();
    shell.input.stdin(b"test -t 0 && stty size; cd /tmp; exit 5\n").await.unwrap();
    let (mut screen, mut code) = (Vec::new(), None);
    while let Some(event) = shell.output.next().await {
        match event.unwrap() {
            ShellEvent::Output(bytes) => screen.extend_from_slice(&bytes),
            ShellEvent::Exit { exit_code, .. } => {
                code = Some(exit_code);
                break;
            }
            _ => {}
        }
    }
    assert_eq!(code, Some(5));
    let screen = String::from_utf8_lossy(&screen);
    assert!(screen.contains("33 101"), "{screen}");
}

#[tokio::test]
async fn get_finds_only_existing_sessions_and_racing_ensures_share_one() {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let e = client.negotiate(&negotiate("nobody-made-this", Mode::Get)).await.unwrap_err();
    assert!(e.is(ErrorCode::SessionNotFound), "{e}");
    let racing: Vec<_> = (0..16)
        .map(|_| {
            tokio::spawn({
                let c = client.clone();
                async move { c.negotiate(&negotiate("raced", Mode::Ensure)).await.unwrap() }
            })
        })
        .collect();
    let mut ids = std::collections::BTreeSet::new();
    for r in racing {
        let r = r.await.unwrap();
        ids.insert((r.session_id.to_string(), r.sandbox.id.to_string()));
    }
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_eq!(client.list_sandboxes(None, None).await.unwrap().items.len(), 1);
    assert!(client.negotiate(&negotiate("raced", Mode::Get)).await.is_ok());
}
