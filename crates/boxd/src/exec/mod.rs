//! `POST /v1/exec`: one command from its request to its answer.

mod output;
mod plan;

use std::{
    os::fd::OwnedFd,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Json, body::Body, extract::State};
use cobox_protocol::{
    ApiError, CommandId, ErrorCode,
    exec::{ExecRequest, ExecResponse, text_and_b64},
    json::read_object,
};
use http::{HeaderMap, header};
use rustix::io::Errno;
use tokio::{
    io::Interest,
    sync::{OwnedSemaphorePermit, Semaphore},
};

pub(crate) use self::plan::{Variable, directory, environment, text};
use self::{output::Capture, plan::Plan};
use crate::{
    answer::Failure,
    auth::{Caller, Exec},
    body,
    descriptor::Descriptor,
    programs::{self, Program, Started},
    server::Server,
    workload::{Exit, is_bad_cwd},
};

/// Commands at once in one sandbox. Agents run a handful in parallel; each costs three descriptors and its output.
const MAX_EXECS: usize = 64;
/// Request bodies and captured output of all commands together.
const MEMORY_BUDGET_KIB: usize = 256 * 1024;
/// Largest request: `stdin` is in it.
const MAX_REQUEST_BYTES: usize = 16 * 1024 * 1024;
/// How long output is still read after the program has ended while something it started holds the pipes open.
const LINGER: Duration = Duration::from_millis(100);
const KILL: i32 = 9;

/// What all commands of the sandbox share.
pub struct Limits {
    slots: Arc<Semaphore>,
    memory: Arc<Semaphore>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { slots: Arc::new(Semaphore::new(MAX_EXECS)), memory: Arc::new(Semaphore::new(MEMORY_BUDGET_KIB)) }
    }
}

impl Limits {
    fn slot(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.slots.clone().try_acquire_owned().map_err(|_| {
            ApiError::new(ErrorCode::RateLimited, format!("{MAX_EXECS} commands are already running here; try again when one has ended"))
        })
    }

    fn memory(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let kib = u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX);
        self.memory.clone().try_acquire_many_owned(kib).map_err(|_| {
            ApiError::new(
                ErrorCode::RateLimited,
                "the commands running here use all memory for input and output; try again, or with a smaller max_output_bytes",
            )
        })
    }
}

pub async fn run(
    State(server): State<Arc<Server>>,
    caller: Caller<Exec>,
    headers: HeaderMap,
    content: Body,
) -> Result<Json<ExecResponse>, Failure> {
    refuse_event_stream(&headers)?;
    Ok(Json(run_as(&server, &caller, &headers, content, |request: ExecRequest| request).await?))
}

/// A whole answer is no answer to somebody who waits for events.
fn refuse_event_stream(headers: &HeaderMap) -> Result<(), ApiError> {
    let accepts = |kind: &str| headers.get_all(header::ACCEPT).iter().any(|v| v.to_str().is_ok_and(|v| v.contains(kind)));
    if accepts("text/event-stream") && !accepts("application/json") && !accepts("*/*") {
        return Err(ApiError::invalid("Accept: text/event-stream is not offered by this version; ask for application/json"));
    }
    Ok(())
}

/// The same for another dialect, whose request is its own.
pub(crate) async fn run_as<R: serde::de::DeserializeOwned>(
    server: &Server,
    caller: &Caller<Exec>,
    headers: &HeaderMap,
    content: Body,
    adapt: impl FnOnce(R) -> ExecRequest,
) -> Result<ExecResponse, ApiError> {
    let answer = async {
        let _slot = server.execs.slot()?;
        let (request, _memory) = read_request::<R>(server, headers, content).await?;
        execute(server, adapt(request)).await
    };
    caller.stream.until_revoked(answer).await
}

async fn read_request<R: serde::de::DeserializeOwned>(
    server: &Server,
    headers: &HeaderMap,
    content: Body,
) -> Result<(R, OwnedSemaphorePermit), ApiError> {
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    let memory = server.execs.memory(announced.unwrap_or(MAX_REQUEST_BYTES).min(MAX_REQUEST_BYTES))?;
    let bytes = body::collect(content, MAX_REQUEST_BYTES).await?;
    let request = read_object(&bytes)?;
    Ok((request, memory))
}

async fn execute(server: &Server, request: ExecRequest) -> Result<ExecResponse, ApiError> {
    let started_at = Instant::now();
    let plan = Plan::new(request)?;
    let _memory = server.execs.memory(2 * plan.max_output)?;
    let name = String::from_utf8_lossy(&plan.command.argv[0]).into_owned();
    let outcome = match programs::start(&server.programs, &server.tasks, plan.command).await {
        Ok(started) => watch(started, plan.stdin, plan.timeout, plan.max_output).await?,
        Err(error) => not_started(&name, &error)?,
    };
    let truncated = outcome.stdout.truncated || outcome.stderr.truncated;
    let (stdout, stdout_b64) = text_and_b64(outcome.stdout.into_bytes());
    let (stderr, stderr_b64) = text_and_b64(outcome.stderr.into_bytes());
    Ok(ExecResponse {
        stdout,
        stderr,
        stdout_b64,
        stderr_b64,
        exit_code: outcome.exit.code,
        signal: outcome.exit.signal,
        timed_out: outcome.timed_out,
        truncated,
        duration_ms: u64::try_from(started_at.elapsed().as_millis()).unwrap_or(u64::MAX),
        command_id: CommandId::new(),
    })
}

struct Outcome {
    exit: Exit,
    timed_out: bool,
    stdout: Capture,
    stderr: Capture,
}

/// Kills the program's whole tree unless told that it has ended: also when the client has gone and this is dropped half-way.
struct KillOnDrop(Option<Arc<dyn Program>>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Some(program) = self.0.take() {
            tokio::spawn(async move { program.kill_tree().await });
        }
    }
}

async fn watch(started: Started, stdin: Option<Vec<u8>>, timeout: Duration, max_output: usize) -> Result<Outcome, ApiError> {
    let mut guard = KillOnDrop(Some(started.program.clone()));
    let program = started.program;
    let open = |fd: Option<OwnedFd>, interest| fd.map(|fd| Descriptor::new(fd, interest)).transpose().map_err(internal);
    let input = open(started.stdin, Interest::WRITABLE)?;
    let (out, err) = (open(started.stdout, Interest::READABLE)?, open(started.stderr, Interest::READABLE)?);
    let (mut stdout, mut stderr) = (Capture::new(max_output), Capture::new(max_output));

    let (exit, timed_out) = {
        let streams = async { tokio::join!(feed(input, stdin), stdout.read_to_end(out.as_ref()), stderr.read_to_end(err.as_ref())) };
        let mut streams = pin!(streams);
        let mut ended = pin!(end_within(&*program, timeout));
        tokio::select! {
            // Closed pipes are no end: a program may close them and go on.
            _ = &mut streams => ended.await,
            end = &mut ended => {
                // Past this time a background child holds the pipes; what is in them is still taken below.
                let _ = tokio::time::timeout(LINGER, streams).await;
                end
            }
        }
    };
    guard.0 = None;
    stdout.drain(out.as_ref());
    stderr.drain(err.as_ref());
    Ok(Outcome { exit, timed_out, stdout, stderr })
}

/// The program's exit, and whether it had to be killed for taking too long.
async fn end_within(program: &dyn Program, timeout: Duration) -> (Exit, bool) {
    match tokio::time::timeout(timeout, program.wait()).await {
        Ok(exit) => (exit, false),
        Err(_) => {
            program.kill_tree().await;
            (Exit { code: 128 + KILL, signal: Some(KILL) }, true)
        }
    }
}

async fn feed(input: Option<Descriptor>, bytes: Option<Vec<u8>>) {
    let (Some(input), Some(bytes)) = (input, bytes) else { return };
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        match input.write(rest).await {
            Ok(n) => rest = &rest[n..],
            // The program doesn't want the rest, which is its right.
            Err(_) => return,
        }
    }
}

/// What a shell would answer for a program that can't be run.
fn not_started(name: &str, error: &std::io::Error) -> Result<Outcome, ApiError> {
    if is_bad_cwd(error) {
        return Err(ApiError::invalid(format!("cwd: {error}")));
    }
    let (code, why) = match Errno::from_io_error(error) {
        Some(Errno::NOENT) => (127, "not found"),
        Some(Errno::ACCESS | Errno::PERM) => (126, "permission denied"),
        Some(Errno::NOEXEC) => (126, "not something that can be run"),
        Some(Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG | Errno::ISDIR) => (126, "not the name of a program"),
        Some(Errno::TOOBIG) => return Err(ApiError::invalid("argv and env together are larger than the kernel takes")),
        Some(Errno::AGAIN | Errno::NOMEM) => {
            return Err(ApiError::new(ErrorCode::RateLimited, "the sandbox has no room for another process; end some and try again"));
        }
        _ => return Err(internal(format!("starting {name}: {error}"))),
    };
    let said = format!("{name}: {why}\n").into_bytes();
    Ok(Outcome { exit: Exit { code, signal: None }, timed_out: false, stdout: Capture::default(), stderr: Capture::of(said) })
}

fn internal(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, error.to_string())
}
