//! The sandbox's commands by id: each is started once however many clients ask for it and how often, retained for a
//! while after its end, and its id is remembered for longer so that it is not run again.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cobox_protocol::{
    ApiError, CommandId, ErrorCode, control::DataplaneLimits, frame::ExecStart, id::is_external_id, process::ProcessKind,
};
use cobox_token::Claims;
use tokio::{
    sync::{Notify, oneshot, watch},
    time::Instant,
};

use super::{
    command::{Attached, Command},
    internal,
    leftovers::Leftovers,
    memory::{Memory, MemoryBudget},
    outcome::{FailedProgram, not_started},
    plan::{StreamPlan, Terms},
    spool::Budget,
};
use crate::{
    principal_slots::{Kind, PrincipalSlot, PrincipalSlots},
    processes::{Job, shown},
    programs::StartedProgram,
    server::Server,
};

/// Number of full spools that all commands together may use on the sandbox's disk.
const SPOOLS: u64 = 4;
/// Remembered ids of commands that are no longer retained. An id that falls out of this list could be run a second
/// time.
const MAX_FORGOTTEN: usize = 4096;

/// State shared by all commands of the sandbox.
pub struct Commands {
    slots: Arc<PrincipalSlots>,
    unattended: Duration,
    memory: MemoryBudget,
    spools: Arc<Budget>,
    pub(super) leftovers: Leftovers,
    retention: Duration,
    /// Maximum number of ended commands that are retained.
    most_kept: usize,
    most_kept_memory: usize,
    known: Mutex<Known>,
    /// Notified when a command expires before the one whose expiry is being awaited.
    sooner: Notify,
}

#[derive(Default)]
struct Known {
    commands: HashMap<String, Entry>,
    /// Ended commands with their expiry, earliest first. No task holds a reference to them, so forgetting one frees
    /// everything it held.
    ended: VecDeque<(Instant, Arc<Command>)>,
    /// Whether a task is waiting for the first of them to expire.
    is_forgetting: bool,
    forgotten: Ids,
    /// Ids of commands whose output went straight into an answer and was never retained. Separate from the others
    /// because they are many, and only the client that got the answer knows the id.
    answered: Ids,
}

/// A bounded set of ids that evicts the oldest.
#[derive(Default)]
struct Ids {
    known: HashSet<String>,
    in_order: VecDeque<String>,
}

impl Ids {
    fn add(&mut self, id: String) {
        if self.in_order.len() == MAX_FORGOTTEN
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.known.remove(&oldest);
        }
        self.known.insert(id.clone());
        self.in_order.push_back(id);
    }

    fn contains(&self, id: &str) -> bool {
        self.known.contains(id)
    }
}

enum Entry {
    Starting(Begun),
    Known(Arc<Command>),
}

/// A command that is being started, for all clients that request it in the meantime.
type Begun = watch::Receiver<Option<Result<Arc<Command>, ApiError>>>;

impl Commands {
    pub fn new(limits: &DataplaneLimits) -> Self {
        Self {
            slots: PrincipalSlots::new(Kind::Commands, limits.execs, limits.execs_per_principal),
            unattended: Duration::from_secs(limits.exec_unattended_seconds),
            memory: MemoryBudget::default(),
            spools: Budget::new(limits.exec_spool_bytes.saturating_mul(SPOOLS)),
            leftovers: Leftovers::default(),
            retention: Duration::from_secs(limits.exec_retention_seconds),
            most_kept: limits.execs_kept as usize,
            most_kept_memory: usize::try_from(limits.exec_kept_memory_bytes).unwrap_or(usize::MAX),
            known: Mutex::default(),
            sooner: Notify::new(),
        }
    }

    /// Reserves a slot for a running command.
    pub fn slot(&self, claims: &Claims) -> Result<PrincipalSlot, ApiError> {
        self.slots.take(&claims.sub)
    }

    pub(crate) fn memory(&self, bytes: usize) -> Result<Memory, ApiError> {
        self.memory.take(bytes)
    }

    pub(super) fn budget(&self) -> &MemoryBudget {
        &self.memory
    }

    /// Starts a command, or joins the one with this id.
    pub async fn start(server: &Arc<Server>, start: ExecStart, terms: Terms, claims: &Arc<Claims>) -> Result<Attached, ApiError> {
        let id = match &start.command_id {
            Some(id) if !is_external_id(id) => {
                return Err(ApiError::invalid("command_id must be 1 to 256 characters, none of them a control character"));
            }
            Some(id) => id.clone(),
            None => CommandId::new().to_string(),
        };
        let mut plan = StreamPlan::new(start, terms, server.commands.unattended)?;
        if let Some(stdin) = plan.as_mut().and_then(|plan| plan.stdin.as_mut()) {
            // A reservation of its own, apart from its request's: the input may wait for the program for as long as
            // that runs.
            *stdin = server.commands.memory(stdin.len())?.owned_by(std::mem::take(stdin));
        }
        // Dropped when this function returns: by then the client is attached, or has disconnected.
        let (_here, left) = oneshot::channel();
        let mut begun = match server.commands.find_or_begin(server, id, plan, claims, left)? {
            Entry::Known(command) => return Ok(command.attach()),
            Entry::Starting(begun) => begun,
        };
        match begun.wait_for(Option::is_some).await.map(|outcome| outcome.clone()) {
            Ok(Some(Ok(command))) => Ok(command.attach()),
            Ok(Some(Err(error))) => Err(error),
            _ => Err(internal("the command was given up while it started")),
        }
    }

    fn find_or_begin(
        &self,
        server: &Arc<Server>,
        id: String,
        plan: Option<StreamPlan>,
        claims: &Arc<Claims>,
        left: oneshot::Receiver<()>,
    ) -> Result<Entry, ApiError> {
        let mut known = self.known();
        match known.commands.get(&id) {
            Some(Entry::Known(command)) => return Ok(Entry::Known(command.clone())),
            Some(Entry::Starting(begun)) => return Ok(Entry::Starting(begun.clone())),
            None => {}
        }
        if known.forgotten.contains(&id) {
            let message = "this command has run, and what it printed is no longer kept; use another command_id to run it again";
            return Err(ApiError::new(ErrorCode::CommandExpired, message));
        }
        if server.processes.find(&id).is_some() {
            return Err(ApiError::new(ErrorCode::CommandNotFound, "this command's output goes only to whoever started it"));
        }
        if known.answered.contains(&id) {
            let message = "this command has run, and its output went to whoever started it; use another command_id to run it again";
            return Err(ApiError::new(ErrorCode::CommandExpired, message));
        }
        let Some(plan) = plan else {
            return Err(ApiError::new(
                ErrorCode::CommandNotFound,
                "there is no command of that id here; give a command or argv to start it",
            ));
        };
        let slot = self.slot(claims)?;
        let (tell, begun) = watch::channel(None);
        known.commands.insert(id.clone(), Entry::Starting(begun.clone()));
        // Runs in its own task, because the request's task may be dropped while other clients wait for the same
        // command.
        let (server, claims) = (server.clone(), claims.clone());
        let tasks = server.tasks.clone();
        tasks.spawn(async move { run(&server, id, plan, &claims, (slot, left), tell).await });
        Ok(Entry::Starting(begun))
    }

    /// A new id for a command whose output is not retained.
    pub fn answered_id(&self) -> String {
        let id = CommandId::new().to_string();
        self.known().answered.add(id.clone());
        id
    }

    /// Retains a command that has ended, evicting those that expire first where a limit is exceeded.
    fn keep(server: &Arc<Server>, command: Arc<Command>) {
        let commands = &server.commands;
        let mut known = commands.known();
        let until = Instant::now() + command.kept_for.map_or(commands.retention, |asked| asked.min(commands.retention));
        let place = known.ended.partition_point(|(at, _)| *at <= until);
        known.ended.insert(place, (until, command));
        if place == 0 {
            commands.sooner.notify_one();
        }
        let mut memory: usize = known.ended.iter().map(|(_, c)| c.memory()).sum();
        while known.ended.len() > commands.most_kept || memory > commands.most_kept_memory && known.ended.len() > 1 {
            let Some((_, oldest)) = known.ended.pop_front() else { break };
            memory -= oldest.memory();
            known.forget(&oldest);
        }
        if !std::mem::replace(&mut known.is_forgetting, true) {
            server.tasks.spawn(forget_in_time(server.clone()));
        }
    }

    /// Removes the expired commands and returns the expiry of the next one.
    fn forget_expired(&self) -> Option<Instant> {
        let mut known = self.known();
        let now = Instant::now();
        while let Some((at, _)) = known.ended.front() {
            if *at > now {
                return Some(*at);
            }
            if let Some((_, expired)) = known.ended.pop_front() {
                known.forget(&expired);
            }
        }
        known.is_forgetting = false;
        None
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // A panic half-way can at worst leave a command that is retained too long.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn forget(&mut self, command: &Arc<Command>) {
        let id = &command.job().id;
        if !matches!(self.commands.get(id), Some(Entry::Known(known)) if Arc::ptr_eq(known, command)) {
            return;
        }
        self.commands.remove(id);
        self.forgotten.add(id.clone());
    }
}

/// The whole life of a command, from start to retention.
async fn run(
    server: &Arc<Server>,
    id: String,
    mut plan: StreamPlan,
    claims: &Claims,
    (slot, left): (PrincipalSlot, oneshot::Receiver<()>),
    tell: watch::Sender<Option<Result<Arc<Command>, ApiError>>>,
) {
    let commands = &server.commands;
    let told = std::mem::take(&mut plan.told);
    let (command, running) = match begin(server, id.clone(), plan, claims).await {
        Ok(begun) => begun,
        Err(error) => {
            // Nothing ran, so the id may be used again.
            commands.known().commands.remove(&id);
            tell.send_replace(Some(Err(error)));
            return;
        }
    };
    let first = command.attach();
    commands.known().commands.insert(id, Entry::Known(command.clone()));
    tell.send_replace(Some(Ok(command.clone())));
    drop(tell);
    let to_the_end = async {
        let hold_first = async {
            // Until the requesting client is attached, or has disconnected before that.
            let _ = left.await;
            drop(first);
        };
        tokio::join!(running.run(server), hold_first);
    };
    tokio::select! {
        () = to_the_end => {
            drop(slot);
            if let Some(ended) = command.job().ended() {
                server.happenings.ran(claims, told, ended, command.job().took());
            }
            Commands::keep(server, command);
        }
        () = server.shutdown.cancelled() => {}
    }
}

async fn forget_in_time(server: Arc<Server>) {
    while let Some(next) = server.commands.forget_expired() {
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = server.commands.sooner.notified() => {}
            () = server.shutdown.cancelled() => return,
        }
    }
}

async fn begin(
    server: &Arc<Server>,
    id: String,
    plan: StreamPlan,
    claims: &Claims,
) -> Result<(Arc<Command>, super::command::Running), ApiError> {
    let argv = shown(&plan.command.argv);
    let (started, said) = match server.programs.spawn(plan.command.clone()).await {
        Ok(started) => (started, None),
        Err(error) => {
            let (exit, said) = not_started(argv.first().map_or("", String::as_str), &error)?;
            (StartedProgram { program: Arc::new(FailedProgram(exit)), stdin: None, stdout: None, stderr: None, pty: None }, Some(said))
        }
    };
    let program = started.program.clone();
    let job = Job::new(id, ProcessKind::Command, argv, claims, program.clone());
    let listed = server.processes.list(Arc::new(job));
    let made = Command::new(listed, started, plan, said, server, &server.commands.spools);
    if made.is_err() {
        program.kill_tree().await;
    }
    made
}
