//! The data directory is closed to other local users, even if it was open to all before or was created by an older
//! version.

use std::{
    fs,
    io::Write,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use cobox_testkit::{BrokerOptions, TestBroker, ensure, sh};

/// Another local user: a uid without an account.
const OTHER_UID: u32 = 61_236;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// The directory and every path below it, including the sandboxes' files.
fn everything_in(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![dir.to_owned()];
    let mut at = 0;
    while at < found.len() {
        let entries = fs::read_dir(&found[at]).into_iter().flatten().flatten();
        found.extend(entries.map(|e| e.path()).collect::<Vec<_>>());
        at += 1;
    }
    found
}

/// The paths that another user can read, list, write or execute.
fn reachable_by_another_user(paths: &[PathBuf]) -> String {
    let script = r#"while IFS= read -r path; do
        if [ -r "$path" ] || [ -w "$path" ] || [ -x "$path" ]; then echo "$path"; fi
    done; echo DONE"#;
    let mut shell =
        Command::new("sh").args(["-c", script]).uid(OTHER_UID).gid(OTHER_UID).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = shell.stdin.take().unwrap();
    let text = paths.iter().map(|p| format!("{}\n", p.display())).collect::<String>();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = shell.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

async fn assert_closed_and_working(uid: Option<u32>) {
    assert!(rustix::process::geteuid().is_root(), "this test changes users and needs root");
    // The test kit creates the directory with mode 0755.
    let mut broker = TestBroker::start_with(BrokerOptions { uid, ..BrokerOptions::default() }).await;
    let data = broker.data_dir();
    set_mode(data.parent().unwrap(), 0o755);
    let session = ensure(&broker.client(), "t").await;
    assert_eq!(sh(session.dataplane(), "echo kept | tee f").await.stdout, "kept\n");
    assert_eq!(reachable_by_another_user(&everything_in(&data)), "DONE\n", "of a new data directory");

    broker.interrupt();
    // With open modes, as from an older version or from a careless operator.
    for dir in ["", "base", "sandboxes", "snapshots", "volumes", "trash"] {
        set_mode(&data.join(dir), 0o777);
    }
    assert!(reachable_by_another_user(&everything_in(&data)).contains("base"), "the test itself works");
    broker.launch().await;
    assert_eq!(reachable_by_another_user(&everything_in(&data)), "DONE\n", "of an existing data directory");
    let session = ensure(&broker.client(), "t").await;
    assert_eq!(sh(session.dataplane(), "cat f; ls -A /home/user").await.stdout, "kept\n");
    let new = ensure(&broker.client(), "u").await;
    assert_eq!(sh(new.dataplane(), "cd && touch g && ls").await.stdout, "g\n");
}

#[tokio::test]
async fn other_users_cannot_access_the_data_of_a_broker_run_by_root() {
    assert_closed_and_working(None).await;
}

#[tokio::test]
async fn other_users_cannot_access_the_data_of_a_broker_run_by_an_ordinary_user() {
    assert_closed_and_working(Some(61_237)).await;
}

#[tokio::test]
async fn a_shared_directory_is_refused_as_data_directory_and_left_unchanged() {
    let broker = TestBroker::start().await;
    let dir = tempfile::tempdir().unwrap();
    set_mode(dir.path(), 0o1777);
    let output = broker.cobox().args(["up", "--listen", "127.0.0.1:0", "--data-dir"]).arg(dir.path()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("choose a directory that only the broker uses"), "{output:?}");
    assert_eq!(fs::metadata(dir.path()).unwrap().permissions().mode() & 0o7777, 0o1777);
}
