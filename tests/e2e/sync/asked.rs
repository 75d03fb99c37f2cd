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

use super::{Desk, THREAD};

/// Large enough that its transfer takes a while, in bytes.
const LARGE: u32 = 96 * 1024 * 1024;

#[tokio::test]
async fn a_sync_that_is_to_end_and_is_interrupted_does_not_say_that_all_is_in_sync() {
    let desk = Desk::new().await;
    let noise: Vec<u8> = (0..LARGE / 4).flat_map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()).collect();
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        fs::write(desk.here(&format!("large{code}")), &noise).unwrap();
        let mut command = desk.cobox(&["--json", "sync", "--until-synced", ".", "t:"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains(r#""phase":"syncing""#) {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "it ended");
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let rest: Vec<String> = said.lines().map(Result::unwrap).collect();
        let ended = child.wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(code), "{rest:?} {ended:?}");
        assert!(!rest.iter().any(|line| line.contains(r#""event":"end""#)), "{rest:?}");
        assert!(String::from_utf8_lossy(&ended.stderr).contains("before both sides were in sync"), "{ended:?}");
    }
}

#[tokio::test]
async fn a_flush_fails_where_something_could_not_be_brought_over() {
    let desk = Desk::new().await;
    assert_eq!(sh(desk.sandbox(), "mkdir closed; chmod 555 closed").await.exit_code, 0);
    let mut live = desk.live(&[]);
    live.until_phase("watching");
    assert_eq!(desk.said(&["sync", "flush", "--wait"]), "in sync\n");
    fs::write(desk.here("closed/y"), "mine").unwrap();
    let flushed = desk.run(&["sync", "flush", "--wait"]);
    if sh(desk.sandbox(), "test -w closed").await.exit_code != 0 {
        assert_eq!(flushed.status.code(), Some(1), "{flushed:?}");
        let words = String::from_utf8(flushed.stdout).unwrap();
        assert!(words.contains("but for 1 problem") && words.contains("closed/y in the sandbox"), "{words}");
    }
}

#[tokio::test]
async fn a_home_directory_is_synced_only_when_told_so_and_never_what_cobox_keeps_in_it() {
    let desk = Desk::new().await;
    fs::write(desk.here("notes"), "mine").unwrap();
    for place in [".config/cobox", ".local/share/cobox", ".cache/other"] {
        fs::create_dir_all(desk.here(place)).unwrap();
        fs::write(desk.here(place).join("key"), "secret").unwrap();
    }
    let at_home = |args: &[&str]| desk.cobox(args).env("HOME", desk.folder.path()).output().unwrap();
    for (folder, why) in [(".", "home directory"), ("/", "root directory of this machine")] {
        let refused = at_home(&["sync", "--until-synced", folder, "t:"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(why) && said.contains("--any-folder"), "{said}");
    }
    let within = at_home(&["sync", "--until-synced", ".config/cobox", "t:"]);
    assert!(String::from_utf8_lossy(&within.stderr).contains("own keys and state"), "{within:?}");
    let done = at_home(&["sync", "--until-synced", "--any-folder", ".", "t:"]);
    assert!(done.status.success(), "{done:?}");
    let there = sh(desk.sandbox(), "find . -type f | sort").await.stdout;
    assert_eq!(there, "./.cache/other/key\n./notes\n");
    let status = at_home(&["sync", "status"]);
    let said = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(said.contains(".local/state/cobox here") && said.contains(".config/cobox here"), "{said}");
}

#[tokio::test]
async fn a_command_sees_what_was_saved_whatever_its_sandbox_is_called() {
    let desk = Desk::new().await;
    let mut live = desk.live(&[]);
    live.until_phase("watching");
    let sandbox = desk.session.info().sandbox.id.to_string();
    let session = desk.session.info().session_id.to_string();
    for number in 0..5 {
        fs::write(desk.here("n"), format!("{number} by sandbox")).unwrap();
        assert_eq!(desk.said(&["sandbox", "exec", &sandbox, "--", "cat", "n"]), format!("{number} by sandbox"));
        fs::write(desk.here("n"), format!("{number} by session")).unwrap();
        assert_eq!(desk.said(&["session", "exec", &session, "--", "cat", "n"]), format!("{number} by session"));
    }
}

#[tokio::test]
async fn a_conflict_whose_name_is_no_text_is_settled_by_the_name_that_is_shown() {
    let desk = Desk::new().await;
    let name = desk.folder.path().join(OsStr::from_bytes(b"caf\xe9"));
    fs::write(&name, "mine").unwrap();
    assert_eq!(sh(desk.sandbox(), r#"printf theirs > "$(printf 'caf\351')""#).await.exit_code, 0);
    let mut live = desk.live(&[]);
    live.until_phase("watching");
    assert!(desk.said(&["sync", "status"]).contains(r"caf\xe9  (here: 4 bytes"));
    assert_eq!(desk.said(&["sync", "resolve", "--keep", "sandbox", r"caf\xe9"]), "resolved 1\n");
    desk.said(&["sync", "flush", "--wait"]);
    assert_eq!(fs::read_to_string(name).unwrap(), "theirs");
}

#[tokio::test]
async fn whoever_may_only_read_can_pull_and_nothing_else() {
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
