//! Checks whether a sandbox runs, waits for its end, and ends it. Also works for sandboxes that an earlier broker process started.

use std::{
    fs::{self, File},
    io,
    path::Path,
    time::Duration,
};

use anyhow::Context;
use rustix::{
    fs::{FlockOperation, Mode, OFlags, flock},
    process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid},
};
use tokio::io::Interest;

use super::launch_spec::RunRecord;

/// Time for the kernel to end all processes of a sandbox after SIGKILL.
const END_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between two checks of a resource that the kernel releases asynchronously.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Whether boxd or its launcher is alive: they hold this lock until they exit.
pub fn is_alive(dir: &Path) -> bool {
    let Ok(file) = File::open(dir.join("alive")) else { return false };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => false,
        Err(_) => true,
    }
}

/// Takes the lock for a sandbox that is about to be started.
pub async fn lock(dir: &Path) -> anyhow::Result<File> {
    // Read-only: boxd inherits it and must not be able to write to the host with it.
    let path = dir.join("alive");
    let file = File::from(rustix::fs::open(&path, OFlags::RDONLY | OFlags::CREATE | OFlags::CLOEXEC, Mode::RUSR)?);
    // A concurrent `is_alive` may hold it for a moment.
    retry_busy(|| match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(io::ErrorKind::ResourceBusy.into()),
        other => Ok(other?),
    })
    .await
    .with_context(|| format!("{} stays locked", path.display()))?;
    Ok(file)
}

fn record(dir: &Path) -> Option<RunRecord> {
    let record: RunRecord = serde_json::from_slice(&fs::read(dir.join("run.json")).ok()?).ok()?;
    record.is_alive().then_some(record)
}

/// Resolves when no process of the sandbox runs.
pub async fn ended(dir: &Path) {
    while is_alive(dir) {
        match record(dir).and_then(|r| Some((r.clone(), pidfd_open(Pid::from_raw(r.pid)?, PidfdFlags::NONBLOCK).ok()?))) {
            Some((r, pidfd)) if r.is_alive() => {
                if let Ok(watched) = cobox_kernel::register_fd(pidfd, Interest::READABLE) {
                    // Readable when the process has ended. It is the first process of its PID namespace, so all others have ended too.
                    let _ = watched.readable().await;
                    reap(watched.get_ref());
                }
            }
            // It is being launched or has just ended; the lock decides.
            _ => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
    reap_recorded(dir).await;
}

/// Reaps the sandbox's first process if it has ended and is a child of this process. The lock is released shortly before the process ends,
/// so this waits for the process even if the lock is free.
async fn reap_recorded(dir: &Path) {
    let recorded = fs::read(dir.join("run.json")).ok().and_then(|text| serde_json::from_slice::<RunRecord>(&text).ok());
    let Some(record) = recorded else { return };
    let is_ours = || record.is_child_of(std::process::id());
    if !is_ours() {
        return;
    }
    if let Some(pid) = Pid::from_raw(record.pid)
        && let Ok(pidfd) = pidfd_open(pid, PidfdFlags::NONBLOCK)
        // Checked again after opening the descriptor, because the PID could have been reused before.
        && is_ours()
        && let Ok(watched) = cobox_kernel::register_fd(pidfd, Interest::READABLE)
    {
        let _ = watched.readable().await;
        reap(watched.get_ref());
    }
}

/// Reaps the process if it is a child of this process; that of an earlier broker is a child of init.
fn reap(pidfd: &std::os::fd::OwnedFd) {
    use std::os::fd::AsFd;
    let _ = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
}

/// Ends all of a sandbox's processes and waits until they are gone.
pub async fn end(dir: &Path) -> anyhow::Result<()> {
    let gone = async {
        while is_alive(dir) {
            if let Some(r) = record(dir)
                && let Some(pid) = Pid::from_raw(r.pid)
                && let Ok(pidfd) = pidfd_open(pid, PidfdFlags::NONBLOCK)
                // Checked again after opening the descriptor, because the PID could have been reused before.
                && r.is_alive()
            {
                // An error means that it has ended already.
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
                if let Ok(watched) = cobox_kernel::register_fd(pidfd, Interest::READABLE) {
                    let _ = watched.readable().await;
                    reap(watched.get_ref());
                }
            }
            if is_alive(dir) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
        reap_recorded(dir).await;
    };
    tokio::time::timeout(END_TIMEOUT, gone).await.with_context(|| format!("the processes of {} did not end", dir.display()))?;
    match fs::remove_file(dir.join("run.json")) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.into()),
        _ => Ok(()),
    }
}

/// Retries while the kernel still counts a process that has already ended.
pub async fn retry_busy(mut attempt: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let deadline = tokio::time::Instant::now() + END_TIMEOUT;
    loop {
        match attempt() {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            other => return other,
        }
    }
}
