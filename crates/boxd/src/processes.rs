//! The commands and shells that boxd has started: listing, signalling and cancelling them. Commands and shells register
//! themselves.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use axum::{
    Json,
    body::Body,
    extract::{Path, State},
};
use cobox_protocol::{
    ApiError, ErrorCode, Timestamp,
    json::read_object,
    key::PrincipalKind,
    process::{ProcessInfo, ProcessKind, ProcessList, ProcessState, SignalRequest},
};
use cobox_token::Claims;
use http::StatusCode;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::{
    auth::{Caller, Exec},
    body,
    programs::Program,
    request_layer::ErrorResponse,
    server::Server,
    workload::Exit,
};

/// Maximum number of a command's arguments in the list: enough to identify it.
const MAX_SHOWN_ARGS: usize = 32;
const MAX_SHOWN_ARG_CHARS: usize = 256;
/// A signal's name within a JSON object.
const MAX_SIGNAL_REQUEST_BYTES: usize = 1024;
/// Time for a cancelled program to clean up before it is killed.
const CANCEL_GRACE: Duration = Duration::from_secs(2);
const KILL: i32 = 9;
const TERM: i32 = 15;

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobExit {
    pub exit: Exit,
    pub timed_out: bool,
}

/// A command or shell that a client has started.
pub struct Job {
    pub id: String,
    pub kind: ProcessKind,
    pub program: Arc<dyn Program>,
    argv: Vec<String>,
    started_at: Timestamp,
    started: Instant,
    duration: OnceLock<Duration>,
    principal: String,
    actor: PrincipalKind,
    ended: watch::Sender<Option<JobExit>>,
}

impl Job {
    pub fn new(id: String, kind: ProcessKind, argv: Vec<String>, claims: &Claims, program: Arc<dyn Program>) -> Self {
        Self {
            id,
            kind,
            program,
            argv,
            started_at: Timestamp::now(),
            started: Instant::now(),
            duration: OnceLock::new(),
            principal: claims.sub.clone(),
            actor: claims.act.kind,
            ended: watch::Sender::new(None),
        }
    }

    pub fn end(&self, ended: JobExit) {
        // An error means that it was already set; a job ends only once.
        let _ = self.duration.set(self.started.elapsed());
        self.ended.send_replace(Some(ended));
    }

    /// Run time: until its end, or so far.
    pub fn duration(&self) -> Duration {
        self.duration.get().copied().unwrap_or_else(|| self.started.elapsed())
    }

    pub fn ended(&self) -> Option<JobExit> {
        *self.ended.borrow()
    }

    /// Resolves when the job has ended. May be called repeatedly.
    pub async fn wait(&self) -> JobExit {
        let mut ended = self.ended.subscribe();
        // Never an error, because `self` holds the sender.
        match ended.wait_for(Option::is_some).await.map(|ended| *ended) {
            Ok(Some(ended)) => ended,
            _ => std::future::pending().await,
        }
    }

    /// KILL ends all descendants; any other signal goes to the process group, as from a terminal.
    pub async fn signal(&self, signal: i32) {
        match signal {
            KILL => self.program.kill_tree().await,
            _ => self.program.signal(signal),
        }
    }

    /// Sends TERM to the process tree, and after the grace period kills what remains.
    pub async fn cancel(&self) {
        if self.ended().is_none() {
            self.program.signal_tree(TERM);
            // Descendants are killed in both cases, whether the program has ended or not.
            let _ = tokio::time::timeout(CANCEL_GRACE, self.program.wait()).await;
        }
        self.program.kill_tree().await;
    }

    fn info(&self) -> ProcessInfo {
        let ended = self.ended();
        ProcessInfo {
            id: self.id.clone(),
            kind: self.kind,
            pid: self.program.pid(),
            argv: self.argv.clone(),
            started_at: self.started_at,
            principal: self.principal.clone(),
            actor: self.actor,
            state: if ended.is_some() { ProcessState::Ended } else { ProcessState::Running },
            exit_code: ended.map(|e| e.exit.code),
            signal: ended.and_then(|e| e.exit.signal),
            timed_out: ended.is_some_and(|e| e.timed_out),
        }
    }
}

/// A command line in the form of the list.
pub fn display_argv(argv: &[Vec<u8>]) -> Vec<String> {
    let arg =
        |arg: &Vec<u8>| String::from_utf8_lossy(&arg[..arg.len().min(4 * MAX_SHOWN_ARG_CHARS)]).chars().take(MAX_SHOWN_ARG_CHARS).collect();
    argv.iter().take(MAX_SHOWN_ARGS).map(arg).collect()
}

/// All listed jobs. Bounded because commands and shells are.
#[derive(Clone, Default)]
pub struct JobTable(Arc<Mutex<HashMap<String, Arc<Job>>>>);

impl JobTable {
    /// Lists a job as long as the returned value lives.
    pub fn list(&self, job: Arc<Job>) -> ListedJob {
        self.jobs().insert(job.id.clone(), job.clone());
        ListedJob { table: self.clone(), job }
    }

    pub fn find(&self, id: &str) -> Option<Arc<Job>> {
        self.jobs().get(id).cloned()
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<String, Arc<Job>>> {
        self.0.lock()
    }
}

/// A job in the list.
pub struct ListedJob {
    table: JobTable,
    pub job: Arc<Job>,
}

impl Drop for ListedJob {
    fn drop(&mut self) {
        let mut jobs = self.table.jobs();
        // Keeps a later job of the same id in the list.
        if jobs.get(&self.job.id).is_some_and(|known| Arc::ptr_eq(known, &self.job)) {
            jobs.remove(&self.job.id);
        }
    }
}

/// `GET /v1/processes`: oldest first.
pub async fn list(State(server): State<Arc<Server>>, _caller: Caller<Exec>) -> Json<ProcessList> {
    let jobs: Vec<Arc<Job>> = server.processes.jobs().values().cloned().collect();
    let mut items: Vec<_> = jobs.iter().map(|job| job.info()).collect();
    items.sort_by(|a, b| (a.started_at, &a.id).cmp(&(b.started_at, &b.id)));
    Json(ProcessList { items })
}

/// `POST /v1/processes/{id}/signal`.
pub async fn signal(
    State(server): State<Arc<Server>>,
    _caller: Caller<Exec>,
    Path(id): Path<String>,
    content: Body,
) -> Result<StatusCode, ErrorResponse> {
    let bytes = body::collect(content, MAX_SIGNAL_REQUEST_BYTES).await?;
    let signal = read_object::<SignalRequest>(&bytes)?.signal.number().map_err(ApiError::invalid)?;
    find(&server, &id)?.signal(signal).await;
    Ok(StatusCode::NO_CONTENT)
}

/// `DELETE /v1/processes/{id}`: answers when the process tree has ended.
pub async fn cancel(State(server): State<Arc<Server>>, _caller: Caller<Exec>, Path(id): Path<String>) -> Result<StatusCode, ErrorResponse> {
    let job = find(&server, &id)?;
    // In a task of its own, so that it completes even if the client disconnects.
    let cancelled = server.tasks.spawn(async move { job.cancel().await });
    cancelled.await.map_err(|e| ApiError::new(ErrorCode::Internal, e.to_string()))?;
    Ok(StatusCode::NO_CONTENT)
}

fn find(server: &Server, id: &str) -> Result<Arc<Job>, ApiError> {
    server.processes.find(id).ok_or_else(|| {
        let shown: String = id.chars().take(64).collect();
        ApiError::new(ErrorCode::CommandNotFound, format!("no command or shell `{}`; GET /v1/processes lists them", shown.escape_default()))
    })
}
