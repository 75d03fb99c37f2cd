//! How a program ends: by exiting, by its timeout, or because it could not be started.

use std::time::Duration;

use cobox_protocol::{ApiError, ErrorCode};
use futures_util::future::BoxFuture;
use rustix::io::Errno;

use crate::{
    processes::JobExit,
    programs::Program,
    workload::{Exit, is_bad_cwd},
};

const KILL: i32 = 9;

/// Waits for the program's exit; after the timeout kills it and everything it started.
pub async fn wait_with_timeout(program: &dyn Program, timeout: Duration) -> JobExit {
    match tokio::time::timeout(timeout, program.wait()).await {
        Ok(exit) => JobExit { exit, timed_out: false },
        Err(_) => {
            program.kill_tree().await;
            JobExit { exit: Exit { code: 128 + KILL, signal: Some(KILL) }, timed_out: true }
        }
    }
}

/// The exit code and message that a shell would give for a program that can't be started. Returns an error where the
/// request or the sandbox is at fault.
pub fn describe_start_failure(name: &str, error: &std::io::Error) -> Result<(Exit, String), ApiError> {
    if is_bad_cwd(error) {
        return Err(ApiError::invalid(format!("cwd: {error}")));
    }
    match Errno::from_io_error(error) {
        Some(Errno::TOOBIG) => Err(ApiError::invalid("argv and env together exceed the kernel's limit")),
        Some(Errno::AGAIN | Errno::NOMEM) => {
            Err(ApiError::new(ErrorCode::RateLimited, "the sandbox has reached its process limit; end some processes and try again"))
        }
        Some(errno) => match shell_message(errno) {
            Some((code, why)) => Ok((Exit { code, signal: None }, format!("{name}: {why}\n"))),
            None => Err(super::internal(format!("starting {name}: {error}"))),
        },
        None => Err(super::internal(format!("starting {name}: {error}"))),
    }
}

/// Placeholder for a program that could not be started.
pub struct FailedProgram(pub Exit);

impl Program for FailedProgram {
    fn wait(&self) -> BoxFuture<'_, Exit> {
        Box::pin(async { self.0 })
    }
    fn pid(&self) -> Option<i32> {
        None
    }
    fn start_failure(&self) -> Option<std::io::Error> {
        None
    }
    fn resume_if_stopped(&self) {}
    fn signal(&self, _: i32) {}
    fn signal_tree(&self, _: i32) {}
    fn kill_tree(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

fn shell_message(errno: Errno) -> Option<(i32, &'static str)> {
    match errno {
        Errno::NOENT => Some((127, "not found")),
        Errno::ACCESS | Errno::PERM => Some((126, "permission denied")),
        Errno::NOEXEC => Some((126, "not executable")),
        Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG | Errno::ISDIR => Some((126, "not a program name")),
        _ => None,
    }
}
