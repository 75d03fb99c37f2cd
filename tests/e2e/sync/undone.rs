//! Deletions and replacements that a sandbox causes on the laptop, with the real programs: the sync halts and reports
//! them, keeps the files, and can restore them.

use std::{fs, process::Command};

use cobox_testkit::{eventually, sh};
use serde_json::Value;

use super::{Desk, THREAD};

fn git(desk: &Desk, args: &[&str]) {
    let identity = ["-c", "user.name=ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"];
    let output = Command::new("git").arg("-C").arg(desk.folder.path()).args(identity).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn files_in_src(desk: &Desk) -> usize {
    fs::read_dir(desk.here("src")).map_or(0, Iterator::count)
}

#[tokio::test]
async fn uncommitted_files_that_an_agent_removes_halt_the_sync_and_undo_brings_them_back() {
    let desk = Desk::new().await;
    git(&desk, &["init", "-q"]);
    // A .git directory with more files than the source tree.
    for number in 0..20 {
        fs::write(desk.here("notes.md"), format!("note {number}")).unwrap();
        git(&desk, &["add", "notes.md"]);
        git(&desk, &["commit", "-q", "-m", "note"]);
    }
    fs::create_dir(desk.here("src")).unwrap();
    for number in 0..30 {
        fs::write(desk.here(&format!("src/f{number}.rs")), format!("uncommitted {number}")).unwrap();
    }
    let mut live = desk.live(&[]);
    live.until_phase("watching");
    assert_eq!(sh(desk.sandbox(), "rm -rf src").await.exit_code, 0);
    let halted = live.until_phase("halted");
    assert!(halted["why"].as_str().unwrap().contains("src"), "{halted}");
    assert!(files_in_src(&desk) >= 26, "{} are left", files_in_src(&desk));

    desk.said(&["sync", "resume", "--confirm"]);
    let last = live.until(|e| e["event"] == "changed" && e["path"] == "src");
    assert_eq!((last["change"].as_str(), last["trash"].is_string()), (Some("removed"), true), "{last}");
    let listed: Value = serde_json::from_str(&desk.said(&["--json", "sync", "trash", "list"])).unwrap();
    let count = |path: &str| listed["items"].as_array().unwrap().iter().filter(|i| i["path"].as_str().unwrap().starts_with(path)).count();
    assert_eq!(count("src/"), 30, "{listed}");
    let status = Command::new("git").arg("-C").arg(desk.folder.path()).args(["status", "--porcelain"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&status.stdout), "", "git doesn't see the trash");

    let undone: Value = serde_json::from_str(&desk.said(&["--json", "sync", "undo", "--since", "1h"])).unwrap();
    assert_eq!(undone["failed"].as_array().unwrap().len(), 0, "{undone}");
    assert_eq!(files_in_src(&desk), 30);
    assert_eq!(fs::read_to_string(desk.here("src/f7.rs")).unwrap(), "uncommitted 7");
    let back = || async { (desk.there("src/f29.rs").await.as_deref() == Some("uncommitted 29")).then_some(()) };
    eventually("what was restored to be in the sandbox again", back).await;
    assert_eq!(desk.said(&["exec", "-t", THREAD, "-c", "ls src | wc -l"]).trim(), "30");
}

#[tokio::test]
async fn every_deletion_is_a_line_of_text_too() {
    let desk = Desk::new().await;
    for number in 0..20 {
        fs::write(desk.here(&format!("kept{number}")), "x").unwrap();
    }
    for name in ["a", "b", "c"] {
        fs::write(desk.here(name), "x").unwrap();
    }
    fs::create_dir(desk.here("empty")).unwrap();
    let mut live = desk.live_as_text();
    live.line("watching for changes");
    assert_eq!(sh(desk.sandbox(), "rm -r a b empty").await.exit_code, 0);
    let mut deleted: Vec<String> = (0..3).map(|_| live.line("deleted")).collect();
    deleted.sort();
    assert_eq!(deleted, ["a", "b", "empty/"].map(|path| format!("deleted here, in the trash: {path}")));
    fs::remove_file(desk.here("c")).unwrap();
    assert_eq!(live.line("deleted"), "deleted in the sandbox: c");
}

#[tokio::test]
async fn a_full_trash_halts_the_sync_and_says_what_to_do() {
    let desk = Desk::new().await;
    fs::write(desk.here("large"), vec![b'x'; 300_000]).unwrap();
    let mut live = desk.live(&["--trash-size", "100KiB"]);
    live.until_phase("watching");
    desk.write_there("large", "small now").await;
    let halted = live.until_phase("halted");
    assert!(halted["why"].as_str().unwrap().contains("the trash is full"), "{halted}");
    assert_eq!(fs::metadata(desk.here("large")).unwrap().len(), 300_000);
    let refused = desk.run(&["sync", "resume", "--confirm"]);
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("--trash-size"), "{refused:?}");
    assert!(desk.said(&["sync", "status"]).contains("cobox sync trash empty"));
}
