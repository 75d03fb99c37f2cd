//! Whether a sandbox runs, waiting for its end, and bringing that about. Works for a sandbox an earlier broker started.

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

use super::spec::RunRecord;

/// How long the kernel may take to end everything of a sandbox after SIGKILL.
const END_WITHIN: Duration = Duration::from_secs(20);
/// Between two looks at something the kernel gives back in its own time.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Whether boxd (or its launcher) lives: it holds this lock for as long as it does.
pub fn is_alive(dir: &Path) -> bool {
    let Ok(file) = File::open(dir.join("alive")) else { return false };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => false,
        Err(_) => true,
    }
}

/// Takes the lock for a sandbox about to be started.
pub async fn lock(dir: &Path) -> anyhow::Result<File> {
    // Read-only: boxd inherits it, and should not be able to write to the host through it.
    let path = dir.join("alive");
    let file = File::from(rustix::fs::open(&path, OFlags::RDONLY | OFlags::CREATE | OFlags::CLOEXEC, Mode::RUSR)?);
    // Somebody's look at it (see `is_alive`) may hold it for a moment.
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

/// Resolves when nothing of the sandbox runs.
pub async fn ended(dir: &Path) {
    while is_alive(dir) {
        match record(dir).and_then(|r| Some((r.clone(), pidfd_open(Pid::from_raw(r.pid)?, PidfdFlags::NONBLOCK).ok()?))) {
            Some((r, pidfd)) if r.is_alive() => {
                if let Ok(watched) = cobox_kernel::register_fd(pidfd, Interest::READABLE) {
                    // Readable when the process has ended, and with it, its pid namespace's first, all others in there.
                    let _ = watched.readable().await;
                    reap(watched.get_ref());
                }
            }
            // Being launched, or just gone: the lock tells.
            _ => tokio::time::sleep(LOOK_AGAIN).await,
        }
    }
    reap_recorded(dir).await;
}

/// Reaps the sandbox's first process if it ended and is our child. Its lock is free a moment before the process has quite ended, so who
/// saw the lock free has not seen the process yet.
async fn reap_recorded(dir: &Path) {
    let recorded = fs::read(dir.join("run.json")).ok().and_then(|text| serde_json::from_slice::<RunRecord>(&text).ok());
    let Some(record) = recorded else { return };
    let is_ours = || record.is_child_of(std::process::id());
    if !is_ours() {
        return;
    }
    if let Some(pid) = Pid::from_raw(record.pid)
        && let Ok(pidfd) = pidfd_open(pid, PidfdFlags::NONBLOCK)
        // Asked again with the descriptor in hand: now the number can't change its meaning.
        && is_ours()
        && let Ok(watched) = cobox_kernel::register_fd(pidfd, Interest::READABLE)
    {
        let _ = watched.readable().await;
        reap(watched.get_ref());
    }
}

/// Collects it if it is our child; an earlier broker's is init's.
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
                // Asked again with the descriptor in hand: now the number can't change its meaning.
                && r.is_alive()
            {
                // Gone in the meantime is what was wanted.
                let _ = pidfd_send_signal(&pidfd, Signal::KILL);
                if let Ok(watched) = cobox_kernel::register_fd(pidfd, Interest::READABLE) {
                    let _ = watched.readable().await;
                    reap(watched.get_ref());
                }
            }
            if is_alive(dir) {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
        reap_recorded(dir).await;
    };
    tokio::time::timeout(END_WITHIN, gone).await.with_context(|| format!("the processes of {} would not end", dir.display()))?;
    match fs::remove_file(dir.join("run.json")) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.into()),
        _ => Ok(()),
    }
}

/// Tries again while the kernel still counts a process that has already ended.
pub async fn retry_busy(mut attempt: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let deadline = tokio::time::Instant::now() + END_WITHIN;
    loop {
        match attempt() {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            other => return other,
        }
    }
}
