//! Many sandboxes at once: fifty here, five hundred in the soak test; concurrent bursts, and failing starts.

use std::time::Instant;

use cobox_protocol::{ErrorCode, session::Mode};
use cobox_testkit::{BrokerOptions, Leftovers, TestBroker, negotiate, sh};
use futures_util::{StreamExt, stream};

/// Number of concurrent starts: more would only queue for two processors.
const CONCURRENT_STARTS: usize = 8;

async fn start_and_release(count: usize) {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let begun = Instant::now();
    let sessions: Vec<_> = stream::iter(0..count)
        .map(|i| {
            let client = client.clone();
            async move {
                let session = client.open(&negotiate(&format!("thread-{i}"), Mode::Ensure)).await.unwrap();
                assert_eq!(sh(session.dataplane(), &format!("echo {i} | tee me")).await.stdout, format!("{i}\n"));
                session
            }
        })
        .buffer_unordered(CONCURRENT_STARTS)
        .collect()
        .await;
    let started = begun.elapsed();
    let pids = broker.sandbox_pids();
    assert_eq!(pids.len(), count);
    let memory: Vec<u64> = pids.iter().map(|(_, pid)| unique_memory_kib(*pid)).collect();
    let released = Instant::now();
    stream::iter(sessions)
        .for_each_concurrent(CONCURRENT_STARTS, |s| {
            let client = client.clone();
            async move { client.release(&s.info().session_id).await.unwrap() }
        })
        .await;
    let summary = format!(
        "{count} sandboxes: started with one exec each in {:.1} s ({:.1} ms each), {} KiB of memory each when idle (median, boxd and its init), released in {:.1} s",
        started.as_secs_f64(),
        started.as_secs_f64() * 1000.0 / count as f64,
        median(memory),
        released.elapsed().as_secs_f64()
    );
    Leftovers::wait_for_none(&broker).await;
    record(&summary);
}

/// Memory of boxd and its init that is not shared with other processes.
fn unique_memory_kib(pid: i32) -> u64 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let pids = std::iter::once(pid.to_string()).chain(children.split_ascii_whitespace().map(str::to_owned));
    pids.map(|pid| {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        let field =
            |name: &str| rollup.lines().find_map(|l| l.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0);
        field("Private_Dirty:") + field("Private_Clean:")
    })
    .sum()
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

/// Prints a measurement and saves it; `make test` shows it on demand and `make soak` keeps it.
pub fn record(line: &str) {
    #[allow(clippy::print_stdout, reason = "a measurement is for the reader of the run")]
    {
        println!("{line}");
    }
    if let Some(file) = std::env::var_os("COBOX_SOAK_RESULTS") {
        use std::io::Write;
        let mut file = std::fs::File::options().create(true).append(true).open(file).expect("the results file");
        writeln!(file, "- {line}").expect("the results are kept");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_concurrent_sandboxes_start_respond_and_leave_nothing_behind() {
    start_and_release(50).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes; run by make soak"]
async fn soak_five_hundred_concurrent_sandboxes() {
    start_and_release(500).await;
}

/// Requests all sandboxes at the same moment.
async fn burst(count: usize) {
    let broker = TestBroker::start().await;
    let client = broker.client();
    let ensure = |i| {
        let client = client.clone();
        async move { client.negotiate(&negotiate(&format!("thread-{i}"), Mode::Ensure)).await }
    };
    let answers = futures_util::future::join_all((0..count).map(ensure)).await;
    let failures: Vec<String> = answers.iter().filter_map(|a| a.as_ref().err()).map(ToString::to_string).collect();
    assert_eq!(failures, Vec::<String>::new(), "{} of {count} failed", failures.len());
    assert_eq!(broker.sandbox_pids().len(), count);
    stream::iter(answers.into_iter().flatten())
        .for_each_concurrent(CONCURRENT_STARTS, |s| {
            let client = client.clone();
            async move { client.release(&s.session_id).await.unwrap() }
        })
        .await;
    Leftovers::wait_for_none(&broker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_ensures_of_a_burst_succeed() {
    burst(200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a minute; run by make soak"]
async fn soak_all_ensures_of_a_burst_of_four_hundred_succeed() {
    burst(400).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_starts_leave_no_process_and_no_zombie() {
    // With a user, even root, the broker runs helper programs, which the test can break.
    let options = BrokerOptions { uid: Some(rustix::process::geteuid().as_raw()), ..BrokerOptions::default() };
    let broker = TestBroker::start_with(options).await;
    let client = broker.client();
    let boxd = broker.data_dir().with_file_name("bin").join("boxd");
    let kept = boxd.with_extension("kept");
    std::fs::rename(&boxd, &kept).unwrap();
    std::fs::write(&boxd, "no program").unwrap();
    std::fs::set_permissions(&boxd, std::fs::metadata(&kept).unwrap().permissions()).unwrap();
    let starts = (0..5).map(|i| {
        let client = client.clone();
        async move { client.negotiate(&negotiate(&format!("thread-{i}"), Mode::Ensure)).await.unwrap_err() }
    });
    for error in futures_util::future::join_all(starts).await {
        assert!(error.is(ErrorCode::ProviderUnavailable), "{error}");
    }
    Leftovers::wait_for_none(&broker).await;
    std::fs::rename(&kept, &boxd).unwrap();
    let session = client.open(&negotiate("thread-0", Mode::Ensure)).await.unwrap();
    assert_eq!(sh(session.dataplane(), "echo up").await.stdout, "up\n");
}
