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
    done::Done,
    internal,
    memory::Memory,
    outcome::{end_within, not_started},
    output::Capture,
    plan::Plan,
};
use crate::{
    descriptor::Descriptor,
    happenings::in_words,
    processes::{Ended, Job, shown},
    programs::{Program, StartedProgram},
    server::Server,
    workload::Exit,
};

/// Most commands finish within this time. Their output isn't polled until then: the pipes hold it, and the readiness
/// events for both pipe ends cost as much as everything else boxd does for a small command. A command that prints more
/// than the pipes hold waits for this delay once.
const FIRST_LOOK: Duration = Duration::from_millis(2);
/// How long output is still read after the program has exited while one of its children holds the pipes open.
const LINGER: Duration = Duration::from_millis(100);

pub async fn execute(server: &Arc<Server>, request: ExecRequest, claims: &Arc<Claims>) -> Result<Done, ApiError> {
    let started_at = Instant::now();
    let command = in_words(request.command.as_deref(), request.argv.as_deref());
    let plan = Plan::new(request, &server.limits)?;
    let memory = server.commands.memory(2 * plan.max_output)?;
    let argv = shown(&plan.command.argv);
    let name = argv.first().cloned().unwrap_or_default();
    let launched = server.programs.launch(plan.command).await;
    // Generated while the program starts.
    let id = server.commands.answered_id();
    let outcome = match launched {
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
            let outcome = watch(server, started, plan.stdin, plan.timeout, plan.max_output).await?;
            guard.program = None;
            match program.start_failure() {
                Some(error) => Outcome::instead(not_started(&name, &error)?),
                None => outcome,
            }
        }
        Err(error) => Outcome::instead(not_started(&name, &error)?),
    };
    let took = started_at.elapsed();
    server.happenings.ran(claims, command, outcome.ended, took);
    Ok(outcome.done(id, took, memory))
}

pub struct Outcome {
    pub ended: Ended,
    pub stdout: Capture,
    pub stderr: Capture,
}

impl Outcome {
    fn instead((exit, said): (Exit, String)) -> Self {
        Self { ended: Ended { exit, timed_out: false }, stdout: Capture::default(), stderr: Capture::of(said.into_bytes()) }
    }

    /// `memory` is the reservation for the output.
    pub fn done(self, command_id: String, duration: Duration, memory: Memory) -> Done {
        let truncated = self.stdout.truncated || self.stderr.truncated;
        let (stdout, stderr) = (self.stdout.into_bytes(), self.stderr.into_bytes());
        let memory = memory.cut(stdout.len() + stderr.len());
        let told = ExecResponse {
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
        Done { told, stdout, stderr, memory }
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
            let ended = Ended { exit: program.wait().await, timed_out: false };
            if program.start_failure().is_none() {
                server.happenings.ran(&claims, command, ended, started_at.elapsed());
            }
        });
    }
}

async fn watch(
    server: &Server,
    started: StartedProgram,
    stdin: Option<Vec<u8>>,
    timeout: Duration,
    max_output: usize,
) -> Result<Outcome, ApiError> {
    let (mut stdout, mut stderr) = (Capture::new(max_output), Capture::new(max_output));
    let mut timeout = timeout;
    if started.stdin.is_none() {
        match tokio::time::timeout(FIRST_LOOK.min(timeout), started.program.wait()).await {
            Ok(exit) => {
                stdout.drain(started.stdout.as_ref());
                stderr.drain(started.stderr.as_ref());
                if !stdout.is_open() && !stderr.is_open() {
                    server.afterwards(move || drop(started));
                    return Ok(Outcome { ended: Ended { exit, timed_out: false }, stdout, stderr });
                }
            }
            Err(_) => timeout = timeout.saturating_sub(FIRST_LOOK),
        }
    }
    let open = |fd: Option<OwnedFd>, interest| fd.map(|fd| Descriptor::new(fd, interest)).transpose().map_err(internal);
    let input = open(started.stdin, Interest::WRITABLE)?;
    let (out, err) = (open(started.stdout, Interest::READABLE)?, open(started.stderr, Interest::READABLE)?);

    let ended = {
        let streams = async { tokio::join!(feed(input, stdin), stdout.read_to_end(out.as_ref()), stderr.read_to_end(err.as_ref())) };
        let mut streams = pin!(streams);
        let mut ended = pin!(end_within(&*started.program, timeout));
        let resume_if_stopped = async {
            tokio::time::sleep(FIRST_LOOK).await;
            started.program.resume_if_stopped();
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            never = resume_if_stopped => match never {},
            // Closed pipes don't mean that it has ended: a program may close them and go on.
            _ = &mut streams => ended.await,
            end = &mut ended => {
                // Past this time a background child holds the pipes; what they contain is still drained below.
                let _ = tokio::time::timeout(LINGER, streams).await;
                end
            }
        }
    };
    stdout.drain(out.as_ref());
    stderr.drain(err.as_ref());
    for pipe in [out.filter(|_| stdout.is_open()), err.filter(|_| stderr.is_open())].into_iter().flatten() {
        server.commands.leftovers.read_to_nowhere(server, Arc::new(pipe));
    }
    Ok(Outcome { ended, stdout, stderr })
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
