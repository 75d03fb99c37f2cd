//! Deletions and replacements that a sandbox causes on the laptop, with the real programs: the sync halts and reports
//! them, keeps the files, and can restore them.

use std::{fs, process::Command};

use cobox_testkit::{eventually, sh};
use serde_json::Value;

use super::{SyncTest, THREAD};

fn git(test: &SyncTest, args: &[&str]) {
    let identity = ["-c", "user.name=ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"];
    let output = Command::new("git").arg("-C").arg(test.folder.path()).args(identity).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn files_in_src(test: &SyncTest) -> usize {
    fs::read_dir(test.local("src")).map_or(0, Iterator::count)
}

#[tokio::test]
async fn uncommitted_files_removed_by_an_agent_halt_the_sync_and_undo_restores_them() {
    let test = SyncTest::new().await;
    git(&test, &["init", "-q"]);
    // A .git directory with more files than the source tree.
    for number in 0..20 {
        fs::write(test.local("notes.md"), format!("note {number}")).unwrap();
        git(&test, &["add", "notes.md"]);
        git(&test, &["commit", "-q", "-m", "note"]);
    }
    fs::create_dir(test.local("src")).unwrap();
    for number in 0..30 {
        fs::write(test.local(&format!("src/f{number}.rs")), format!("uncommitted {number}")).unwrap();
    }
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    assert_eq!(sh(test.dataplane(), "rm -rf src").await.exit_code, 0);
    let halted = sync.until_phase("halted");
    assert!(halted["why"].as_str().unwrap().contains("src"), "{halted}");
    assert!(files_in_src(&test) >= 26, "{} are left", files_in_src(&test));

    test.stdout(&["sync", "resume", "--confirm"]);
    let last = sync.until(|e| e["event"] == "changed" && e["path"] == "src");
    assert_eq!((last["change"].as_str(), last["trash"].is_string()), (Some("removed"), true), "{last}");
    let listed: Value = serde_json::from_str(&test.stdout(&["--json", "sync", "trash", "list"])).unwrap();
    let count = |path: &str| listed["items"].as_array().unwrap().iter().filter(|i| i["path"].as_str().unwrap().starts_with(path)).count();
    assert_eq!(count("src/"), 30, "{listed}");
    let status = Command::new("git").arg("-C").arg(test.folder.path()).args(["status", "--porcelain"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&status.stdout), "", "git doesn't see the trash");

    let undone: Value = serde_json::from_str(&test.stdout(&["--json", "sync", "undo", "--since", "1h"])).unwrap();
    assert_eq!(undone["failed"].as_array().unwrap().len(), 0, "{undone}");
    assert_eq!(files_in_src(&test), 30);
    assert_eq!(fs::read_to_string(test.local("src/f7.rs")).unwrap(), "uncommitted 7");
    let back = || async { (test.read_sandbox("src/f29.rs").await.as_deref() == Some("uncommitted 29")).then_some(()) };
    eventually("what was restored to be in the sandbox again", back).await;
    assert_eq!(test.stdout(&["exec", "-t", THREAD, "-c", "ls src | wc -l"]).trim(), "30");
}

#[tokio::test]
async fn every_deletion_is_also_printed_as_a_line() {
    let test = SyncTest::new().await;
    for number in 0..20 {
        fs::write(test.local(&format!("kept{number}")), "x").unwrap();
    }
    for name in ["a", "b", "c"] {
        fs::write(test.local(name), "x").unwrap();
    }
    fs::create_dir(test.local("empty")).unwrap();
    let mut sync = test.start_as_text();
    sync.line("watching for changes");
    assert_eq!(sh(test.dataplane(), "rm -r a b empty").await.exit_code, 0);
    let mut deleted: Vec<String> = (0..3).map(|_| sync.line("deleted")).collect();
    deleted.sort();
    assert_eq!(deleted, ["a", "b", "empty/"].map(|path| format!("deleted here, in the trash: {path}")));
    fs::remove_file(test.local("c")).unwrap();
    assert_eq!(sync.line("deleted"), "deleted in the sandbox: c");
}

#[tokio::test]
async fn a_full_trash_halts_the_sync_and_says_what_to_do() {
    let test = SyncTest::new().await;
    fs::write(test.local("large"), vec![b'x'; 300_000]).unwrap();
    let mut sync = test.start(&["--trash-size", "100KiB"]);
    sync.until_phase("watching");
    test.write_sandbox("large", "small now").await;
    let halted = sync.until_phase("halted");
    assert!(halted["why"].as_str().unwrap().contains("the trash is full"), "{halted}");
    assert_eq!(fs::metadata(test.local("large")).unwrap().len(), 300_000);
    let refused = test.run(&["sync", "resume", "--confirm"]);
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("--trash-size"), "{refused:?}");
    assert!(test.stdout(&["sync", "status"]).contains("cobox sync trash empty"));
}
