//! The stored state on a disk that is full for a while: a small tmpfs, mounted by a child process in its own namespace.

use std::{fs, path::PathBuf, process::Command};

use cobox_sync::{BaseVersion, Digest, Entry, RelPath, Side, SyncError, Update};

fn files(range: std::ops::Range<u32>) -> Vec<Update> {
    let file = |n: u32| Entry::File { digest: Digest::of(&n.to_be_bytes()), size: 1, exec: false };
    range.map(|n| (RelPath::new(format!("a-file-with-some-name-{n}").as_bytes()).unwrap(), Some(file(n)))).collect()
}

#[test]
fn commits_succeed_again_after_the_disk_was_full() {
    let dir = tempfile::tempdir().unwrap();
    let script = "mount -t tmpfs -o size=256k none \"$AT\" && exec \"$0\" --exact child_on_a_small_disk --ignored --nocapture";
    let ran = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .env("AT", dir.path())
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
}

#[test]
#[ignore = "child process of the test above"]
fn child_on_a_small_disk() {
    let Some(at) = std::env::var_os("AT").map(PathBuf::from) else { return };
    let base = at.join("base");
    let mut base_version = BaseVersion::open(&base).unwrap();
    base_version.commit(files(0..100)).unwrap();
    // Fills the disk as far as possible.
    let _ = fs::write(at.join("filler"), vec![1; 1024 * 1024]);
    let full = base_version.begin_changes(Side::Local, files(100..2000)).unwrap_err();
    assert!(matches!(full, SyncError::Full) && full.is_transient(), "{full}");
    assert!(matches!(base_version.commit(files(100..200)), Err(SyncError::Full)));
    // A run that is killed now still has the last commit.
    assert_eq!(BaseVersion::open(&base).unwrap().tree().len(), 100);
    fs::remove_file(at.join("filler")).unwrap();
    base_version.begin_changes(Side::Local, files(200..201)).unwrap();
    base_version.commit(files(200..201)).unwrap();
    assert_eq!(BaseVersion::open(&base).unwrap().tree(), base_version.tree());
    assert_eq!(base_version.tree().len(), 201);
}
