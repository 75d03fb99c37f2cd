//! The largest supported folders: a file of 5 GiB, and a hundred thousand files.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    time::Instant,
};

use cobox_testkit::sh;

use super::SyncTest;
use crate::load::record;

const GIB: u64 = 1 << 30;

// Two threads: one waits for minutes, and a connection closed by the other end during that time must be noticed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes and 10 GiB of disk; `make soak` runs it"]
async fn soak_sync_of_a_file_of_5_gibibytes() {
    let test = SyncTest::new().await;
    let file = File::create(test.local("large")).unwrap();
    file.set_len(5 * GIB).unwrap();
    // Mostly holes; the data in between shows whether every part arrived in its place.
    for part in 0..5 * GIB / (16 << 20) {
        file.write_all_at(format!("part {part}").as_bytes(), part * (16 << 20)).unwrap();
    }
    drop(file);
    let began = Instant::now();
    test.stdout(&["sync", "--until-synced", ".", "t:"]);
    let took = began.elapsed();
    let here = std::process::Command::new("sha256sum").arg(test.local("large")).output().unwrap().stdout;
    let there = sh(test.dataplane(), "sha256sum large").await.stdout;
    assert_eq!(there.split(' ').next(), String::from_utf8(here).unwrap().split(' ').next());
    record(&format!("a sync of one file of 5 GiB, mostly holes: the same on both sides after {:.0} s", took.as_secs_f64()));
}

// Two threads: one waits for minutes, and a connection closed by the other end during that time must be noticed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes; `make soak` runs it"]
async fn soak_sync_of_100_000_files() {
    const FOLDERS: usize = 200;
    const FILES: usize = 500;
    /// The number of files and a checksum of their contents.
    const ALL: &str = "find . -type f | wc -l; find d* -type f | LC_ALL=C sort | xargs cat | cksum";
    let test = SyncTest::new().await;
    for folder in 0..FOLDERS {
        fs::create_dir(test.local(&format!("d{folder}"))).unwrap();
        for number in 0..FILES {
            fs::write(test.local(&format!("d{folder}/f{number}")), format!("{folder} {number}\n")).unwrap();
        }
    }
    let began = Instant::now();
    test.stdout(&["sync", "--until-synced", ".", "t:"]);
    let first = began.elapsed();
    let count = sh(test.dataplane(), ALL).await.stdout;
    let here = std::process::Command::new("sh").args(["-c", ALL]).current_dir(test.folder.path()).output();
    assert_eq!(count, String::from_utf8(here.unwrap().stdout).unwrap());
    let mut sync = test.start(&[]);
    sync.until_phase("watching");
    let began = Instant::now();
    fs::write(test.local("d7/f7"), "saved").unwrap();
    test.stdout(&["sync", "flush", "--wait"]);
    let one = began.elapsed();
    assert_eq!(test.read_sandbox("d7/f7").await.as_deref(), Some("saved"));
    // A deletion of most files halts before many of them are deleted.
    fs::remove_dir_all(test.local("d0")).unwrap();
    for folder in 1..FOLDERS {
        fs::remove_dir_all(test.local(&format!("d{folder}"))).unwrap();
    }
    sync.until_phase("halted");
    let left: usize = sh(test.dataplane(), "find . -type f | wc -l").await.stdout.trim().parse().unwrap();
    assert!(left >= FOLDERS * FILES * 8 / 10, "{left} are left");
    record(&format!(
        "a sync of 100,000 files: the same on both sides after {:.0} s, one save brought over by `flush --wait` in {:.1} s, all deleted here halts with {left} left there",
        first.as_secs_f64(),
        one.as_secs_f64()
    ));
}
