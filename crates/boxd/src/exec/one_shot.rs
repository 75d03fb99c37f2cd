//! The short path for one command from request to answer: output goes straight into the answer, and the command is
//! killed if its client disconnects.

use std::{
    convert::Infallible,
    os::fd::OwnedFd,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use cobox_protocol::{
    ApiError,
    exec::{ExecRequest, ExecResponse},
    process::ProcessKind,
};
use cobox_token::Claims;
use tokio::io::Interest;

use super::{
    capture::OutputCapture,
    internal,
    memory_budget::MemoryReservation,
    response::CompletedCommand,
    run_spec::OneShotSpec,
    termination::{describe_start_failure, wait_with_timeout},
};
use crate::{
    activity_log::command_text,
    descriptor::Descriptor,
    processes::{Job, JobExit, display_argv},
    programs::{Program, StartedProgram},
    server::Server,
    workload::Exit,
};

/// Most commands finish within this time. Their output isn't polled until then: the pipes hold it, and the readiness
/// events for both pipe ends cost as much as everything else boxd does for a small command. A command that prints more
/// than the pipes hold waits for this delay once.
const FIRST_POLL_DELAY: Duration = Duration::from_millis(2);
/// How long output is still read after the program has exited while one of its children holds the pipes open.
const LINGER: Duration = Duration::from_millis(100);

pub async fn execute(server: &Arc<Server>, request: ExecRequest, claims: &Arc<Claims>) -> Result<CompletedCommand, ApiError> {
    let started_at = Instant::now();
    let command = command_text(request.command.as_deref(), request.argv.as_deref());
    let spec = OneShotSpec::new(request, &server.limits)?;
    let memory = server.commands.reserve_memory(2 * spec.max_output)?;
    let argv = display_argv(&spec.program.argv);
    let name = argv.first().cloned().unwrap_or_default();
    let launched = server.programs.launch(spec.program).await;
    // Generated while the program starts.
    let id = server.commands.new_answered_id();
    let result = match launched {
        Ok(started) => {
            // From here on the client may disconnect at any time, and this guard then kills the program.
            let program = started.program.clone();
            let mut guard = KillOnDrop {
                program: Some(program.clone()),
                server: server.clone(),
                claims: claims.clone(),
                command: command.clone(),
                started_at,
            };
            let job = Job::new(id.clone(), ProcessKind::Command, argv, claims, program.clone());
            let _listed = server.processes.list(Arc::new(job));
            let result = run_to_end(server, started, spec.stdin, spec.timeout, spec.max_output).await?;
            guard.program = None;
            match program.start_failure() {
                Some(error) => CommandResult::start_failed(describe_start_failure(&name, &error)?),
                None => result,
            }
        }
        Err(error) => CommandResult::start_failed(describe_start_failure(&name, &error)?),
    };
    let duration = started_at.elapsed();
    server.activity_log.record_command(claims, command, result.ended, duration);
    Ok(result.complete(id, duration, memory))
}

pub struct CommandResult {
    pub ended: JobExit,
    pub stdout: OutputCapture,
    pub stderr: OutputCapture,
}

impl CommandResult {
    fn start_failed((exit, message): (Exit, String)) -> Self {
        Self {
            ended: JobExit { exit, timed_out: false },
            stdout: OutputCapture::default(),
            stderr: OutputCapture::complete(message.into_bytes()),
        }
    }

    /// `memory` is the reservation for the output.
    pub fn complete(self, command_id: String, duration: Duration, memory: MemoryReservation) -> CompletedCommand {
        let truncated = self.stdout.truncated || self.stderr.truncated;
        let (stdout, stderr) = (self.stdout.into_bytes(), self.stderr.into_bytes());
        let memory = memory.shrink_to(stdout.len() + stderr.len());
        let response = ExecResponse {
            stdout: String::new(),
            stderr: String::new(),
            stdout_b64: None,
            stderr_b64: None,
            exit_code: self.ended.exit.code,
            signal: self.ended.exit.signal,
            timed_out: self.ended.timed_out,
            truncated,
            duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
            command_id,
        };
        CompletedCommand { response, stdout, stderr, memory }
    }
}

/// Kills the program's whole process tree unless the program has ended; this includes the client disconnecting, which
/// drops the request half-way. Its end is then still reported as an activity, because its side effects did happen.
struct KillOnDrop {
    program: Option<Arc<dyn Program>>,
    server: Arc<Server>,
    claims: Arc<Claims>,
    command: String,
    started_at: Instant,
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let Some(program) = self.program.take() else { return };
        let (server, claims, command, started_at) =
            (self.server.clone(), self.claims.clone(), std::mem::take(&mut self.command), self.started_at);
        self.server.tasks.spawn(async move {
            program.kill_tree().await;
            let ended = JobExit { exit: program.wait().await, timed_out: false };
            if program.start_failure().is_none() {
                server.activity_log.record_command(&claims, command, ended, started_at.elapsed());
            }
        });
    }
}

async fn run_to_end(
    server: &Server,
    started: StartedProgram,
    stdin: Option<Vec<u8>>,
    timeout: Duration,
    max_output: usize,
) -> Result<CommandResult, ApiError> {
    let (mut stdout, mut stderr) = (OutputCapture::new(max_output), OutputCapture::new(max_output));
    let mut timeout = timeout;
    if started.stdin.is_none() {
        match tokio::time::timeout(FIRST_POLL_DELAY.min(timeout), started.program.wait()).await {
            Ok(exit) => {
                stdout.drain(started.stdout.as_ref());
                stderr.drain(started.stderr.as_ref());
                if !stdout.is_open() && !stderr.is_open() {
                    server.run_after_response(move || drop(started));
                    return Ok(CommandResult { ended: JobExit { exit, timed_out: false }, stdout, stderr });
                }
            }
            Err(_) => timeout = timeout.saturating_sub(FIRST_POLL_DELAY),
        }
    }
    let open = |fd: Option<OwnedFd>, interest| fd.map(|fd| Descriptor::new(fd, interest)).transpose().map_err(internal);
    let input = open(started.stdin, Interest::WRITABLE)?;
    let (out, err) = (open(started.stdout, Interest::READABLE)?, open(started.stderr, Interest::READABLE)?);

    let ended = {
        let streams = async { tokio::join!(feed(input, stdin), stdout.read_to_end(out.as_ref()), stderr.read_to_end(err.as_ref())) };
        let mut streams = pin!(streams);
        let mut ended = pin!(wait_with_timeout(&*started.program, timeout));
        let resume_program = async {
            tokio::time::sleep(FIRST_POLL_DELAY).await;
            started.program.resume_if_stopped();
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            never = resume_program => match never {},
            // Closed pipes don't mean that it has ended: a program may close them and go on.
            _ = &mut streams => ended.await,
            exit = &mut ended => {
                // Past this time a background child holds the pipes; what they contain is still drained below.
                let _ = tokio::time::timeout(LINGER, streams).await;
                exit
            }
        }
    };
    stdout.drain(out.as_ref());
    stderr.drain(err.as_ref());
    for pipe in [out.filter(|_| stdout.is_open()), err.filter(|_| stderr.is_open())].into_iter().flatten() {
        server.commands.pipe_drainer.drain(server, Arc::new(pipe));
    }
    Ok(CommandResult { ended, stdout, stderr })
}

async fn feed(input: Option<Descriptor>, bytes: Option<Vec<u8>>) {
    let (Some(input), Some(bytes)) = (input, bytes) else { return };
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        match input.write(rest).await {
            Ok(n) => rest = &rest[n..],
            // The program has closed its input, which is legitimate.
            Err(_) => return,
        }
    }
}
