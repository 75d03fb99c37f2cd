//! A sync's exit codes and refusals, and which sync is flushed before a command.

use std::{
    ffi::OsStr,
    fs,
    io::{BufRead, BufReader},
    os::unix::ffi::OsStrExt,
    process::Stdio,
};

use cobox_protocol::{
    key::PrincipalKind,
    session::{Access, Mode},
};
use cobox_testkit::{TestBroker, negotiate, sh};
use rustix::process::{Pid, Signal, kill_process};

use super::{SyncTest, THREAD};

/// Large enough that its transfer takes a while, in bytes.
const LARGE: u32 = 96 * 1024 * 1024;

#[tokio::test]
async fn an_interrupted_sync_until_synced_does_not_report_success() {
    let test = SyncTest::new().await;
    let noise: Vec<u8> = (0..LARGE / 4).flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        fs::write(test.local(&format!("large{code}")), &noise).unwrap();
        let mut command = test.cobox(&["--json", "sync", "--until-synced", ".", "t:"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains(r#""phase":"syncing""#) {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "it ended");
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let rest: Vec<String> = output.lines().map(Result::unwrap).collect();
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(code), "{rest:?} {ended:?}");
        assert!(!rest.iter().any(|line| line.contains(r#""event":"end""#)), "{rest:?}");
        assert!(String::from_utf8_lossy(&ended.stderr).contains("before both sides were in sync"), "{ended:?}");
    }
}

#[tokio::test]
async fn a_flush_fails_if_a_file_could_not_be_synced() {
    let test = SyncTest::new().await;
    assert_eq!(sh(test.dataplane(), "mkdir closed; chmod 555 closed").await.exit_code, 0);
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    assert_eq!(test.stdout(&["sync", "flush", "--wait"]), "in sync\n");
    fs::write(test.local("closed/y"), "mine").unwrap();
    let flushed = test.run(&["sync", "flush", "--wait"]);
    if sh(test.dataplane(), "test -w closed").await.exit_code != 0 {
        assert_eq!(flushed.status.code(), Some(1), "{flushed:?}");
        let output = String::from_utf8(flushed.stdout).unwrap();
        assert!(output.contains("except for 1 problem") && output.contains("closed/y in the sandbox"), "{output}");
    }
}

#[tokio::test]
async fn a_home_directory_is_synced_only_on_request_and_without_coboxs_own_files() {
    let test = SyncTest::new().await;
    fs::write(test.local("notes"), "mine").unwrap();
    for place in [".config/cobox", ".local/share/cobox", ".cache/other"] {
        fs::create_dir_all(test.local(place)).unwrap();
        fs::write(test.local(place).join("key"), "secret").unwrap();
    }
    let at_home = |args: &[&str]| test.cobox(args).env("HOME", test.folder.path()).output().unwrap();
    for (folder, why) in [(".", "home directory"), ("/", "root directory of this machine")] {
        let refused = at_home(&["sync", "--until-synced", folder, "t:"]);
        let output = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && output.contains(why) && output.contains("--any-folder"), "{output}");
    }
    let within = at_home(&["sync", "--until-synced", ".config/cobox", "t:"]);
    assert!(String::from_utf8_lossy(&within.stderr).contains("own keys and state"), "{within:?}");
    let done = at_home(&["sync", "--until-synced", "--any-folder", ".", "t:"]);
    assert!(done.status.success(), "{done:?}");
    let there = sh(test.dataplane(), "find . -type f | sort").await.stdout;
    assert_eq!(there, "./.cache/other/key\n./notes\n");
    let status = at_home(&["sync", "status"]);
    let output = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(output.contains(".local/state/cobox here") && output.contains(".config/cobox here"), "{output}");
}

#[tokio::test]
async fn exec_by_sandbox_or_session_id_sees_saved_files() {
    let test = SyncTest::new().await;
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    let sandbox = test.session.info().sandbox.id.to_string();
    let session = test.session.info().session_id.to_string();
    for number in 0..5 {
        fs::write(test.local("n"), format!("{number} by sandbox")).unwrap();
        assert_eq!(test.stdout(&["sandbox", "exec", &sandbox, "--", "cat", "n"]), format!("{number} by sandbox"));
        fs::write(test.local("n"), format!("{number} by session")).unwrap();
        assert_eq!(test.stdout(&["session", "exec", &session, "--", "cat", "n"]), format!("{number} by session"));
    }
}

#[tokio::test]
async fn a_conflict_with_a_name_that_is_not_utf8_is_resolved_by_its_escaped_name() {
    let test = SyncTest::new().await;
    let name = test.folder.path().join(OsStr::from_bytes(b"caf\xe9"));
    fs::write(&name, "mine").unwrap();
    assert_eq!(sh(test.dataplane(), r#"printf theirs > "$(printf 'caf\351')""#).await.exit_code, 0);
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    assert!(test.stdout(&["sync", "status"]).contains(r"caf\xe9  (here: 4 bytes"));
    assert_eq!(test.stdout(&["sync", "resolve", "--keep", "sandbox", r"caf\xe9"]), "resolved 1\n");
    test.stdout(&["sync", "flush", "--wait"]);
    assert_eq!(fs::read_to_string(name).unwrap(), "theirs");
}

#[tokio::test]
async fn a_user_with_read_access_can_only_pull() {
    let broker = TestBroker::start().await;
    let mut private = negotiate(THREAD, Mode::Ensure);
    private.access = Some(Access::Owner);
    broker.client().negotiate(&private).await.unwrap();
    let bob = broker.key_of("bob", PrincipalKind::Human, None).await;
    let owned = |args: &[&str]| assert!(broker.cobox().args(args).status().unwrap().success());
    owned(&["share", "grant", THREAD, "bob", "--capability", "fs_read"]);
    owned(&["exec", "-t", THREAD, "-c", "echo theirs > x"]);
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("y"), "mine").unwrap();
    let sync = |more: &[&str]| {
        let mut command = broker.cobox();
        command.env("COBOX_API_KEY", bob.expose()).current_dir(folder.path());
        command.args(["sync", "--until-synced"]).args(more).args([".", "t:"]).output().unwrap()
    };
    let refused = sync(&[]);
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("fs_write"), "{refused:?}");
    let pulled = sync(&["--mode", "pull"]);
    assert!(pulled.status.success(), "{pulled:?}");
    assert_eq!(fs::read_to_string(folder.path().join("x")).unwrap(), "theirs\n");
    owned(&["exec", "-t", THREAD, "-c", "test ! -e y"]);
}
