//! The sandbox's commands by id: each is started once however many clients ask for it and how often, retained for a
//! while after its end, and its id is remembered for longer so that it is not run again.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use cobox_protocol::{
    ApiError, CommandId, ErrorCode, control::DataplaneLimits, frame::ExecStart, id::is_external_id, process::ProcessKind,
};
use cobox_token::Claims;
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    sync::{Notify, oneshot, watch},
    time::Instant,
};

use super::{
    command::{Attachment, Command, CommandTask},
    internal,
    memory_budget::{MemoryBudget, MemoryReservation},
    pipe_drainer::PipeDrainer,
    run_spec::{LifetimePolicy, StreamSpec},
    spool::DiskBudget,
    termination::{FailedProgram, describe_start_failure},
};
use crate::{
    principal_slots::{PrincipalSlot, PrincipalSlots, SlotKind},
    processes::{Job, display_argv},
    programs::StartedProgram,
    server::Server,
};

/// Number of full spools that all commands together may use on the sandbox's disk.
const SPOOL_COUNT: u64 = 4;
/// Remembered ids of commands that are no longer retained. An id that falls out of this list could be run a second
/// time.
const MAX_REMEMBERED_IDS: usize = 4096;

/// State shared by all commands of the sandbox.
pub struct Commands {
    slots: Arc<PrincipalSlots>,
    unattended: Duration,
    memory_budget: MemoryBudget,
    spools: Arc<DiskBudget>,
    pub(super) pipe_drainer: PipeDrainer,
    retention: Duration,
    /// Maximum number of ended commands that are retained.
    max_retained: usize,
    max_retained_memory: usize,
    table: Mutex<CommandTable>,
    /// Notified when a command expires before the one whose expiry is being awaited.
    earlier_expiry: Notify,
}

#[derive(Default)]
struct CommandTable {
    commands: HashMap<String, Entry>,
    /// Ended commands with their expiry, earliest first. No task holds a reference to them, so forgetting one frees
    /// everything it held.
    ended: VecDeque<(Instant, Arc<Command>)>,
    /// Whether a task is waiting for the first of them to expire.
    is_expiring: bool,
    expired_ids: RecentIds,
    /// Ids of commands whose output went straight into an answer and was never retained. Separate from the others
    /// because they are many, and only the client that got the answer knows the id.
    answered_ids: RecentIds,
}

/// A bounded set of ids that evicts the oldest.
#[derive(Default)]
struct RecentIds {
    members: HashSet<String>,
    in_order: VecDeque<String>,
}

impl RecentIds {
    fn add(&mut self, id: String) {
        if self.in_order.len() == MAX_REMEMBERED_IDS
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.members.remove(&oldest);
        }
        self.members.insert(id.clone());
        self.in_order.push_back(id);
    }

    fn contains(&self, id: &str) -> bool {
        self.members.contains(id)
    }
}

enum Entry {
    Starting(PendingStart),
    Started(Arc<Command>),
}

/// A command that is being started, for all clients that request it in the meantime.
type PendingStart = watch::Receiver<Option<Result<Arc<Command>, ApiError>>>;

impl Commands {
    pub fn new(limits: &DataplaneLimits) -> Self {
        Self {
            slots: PrincipalSlots::new(SlotKind::Commands, limits.execs, limits.execs_per_principal),
            unattended: Duration::from_secs(limits.exec_unattended_seconds),
            memory_budget: MemoryBudget::default(),
            spools: DiskBudget::new(limits.exec_spool_bytes.saturating_mul(SPOOL_COUNT)),
            pipe_drainer: PipeDrainer::default(),
            retention: Duration::from_secs(limits.exec_retention_seconds),
            max_retained: limits.execs_kept as usize,
            max_retained_memory: usize::try_from(limits.exec_kept_memory_bytes).unwrap_or(usize::MAX),
            table: Mutex::default(),
            earlier_expiry: Notify::new(),
        }
    }

    /// Reserves a slot for a running command.
    pub fn slot(&self, claims: &Claims) -> Result<PrincipalSlot, ApiError> {
        self.slots.take(&claims.sub)
    }

    pub(crate) fn reserve_memory(&self, bytes: usize) -> Result<MemoryReservation, ApiError> {
        self.memory_budget.reserve(bytes)
    }

    pub(super) fn memory_budget(&self) -> &MemoryBudget {
        &self.memory_budget
    }

    /// Starts a command, or joins the one with this id.
    pub async fn start(
        server: &Arc<Server>,
        start: ExecStart,
        policy: LifetimePolicy,
        claims: &Arc<Claims>,
    ) -> Result<Attachment, ApiError> {
        let id = match &start.command_id {
            Some(id) if !is_external_id(id) => {
                return Err(ApiError::invalid("command_id must have 1 to 256 characters and no control characters"));
            }
            Some(id) => id.clone(),
            None => CommandId::new().to_string(),
        };
        let mut spec = StreamSpec::new(start, policy, server.commands.unattended)?;
        if let Some(stdin) = spec.as_mut().and_then(|spec| spec.stdin.as_mut()) {
            // A reservation of its own, apart from its request's: the input may wait for the program for as long as
            // that runs.
            *stdin = server.commands.reserve_memory(stdin.len())?.attach_to(std::mem::take(stdin));
        }
        // Dropped when this function returns: by then the client is attached, or has disconnected.
        let (_requester, requester_gone) = oneshot::channel();
        let mut pending = match server.commands.find_or_start(server, id, spec, claims, requester_gone)? {
            Entry::Started(command) => return Ok(command.attach()),
            Entry::Starting(pending) => pending,
        };
        match pending.wait_for(Option::is_some).await.map(|outcome| outcome.clone()) {
            Ok(Some(Ok(command))) => Ok(command.attach()),
            Ok(Some(Err(error))) => Err(error),
            _ => Err(internal("the command's start was cancelled")),
        }
    }

    fn find_or_start(
        &self,
        server: &Arc<Server>,
        id: String,
        spec: Option<StreamSpec>,
        claims: &Arc<Claims>,
        requester_gone: oneshot::Receiver<()>,
    ) -> Result<Entry, ApiError> {
        let mut table = self.table();
        match table.commands.get(&id) {
            Some(Entry::Started(command)) => return Ok(Entry::Started(command.clone())),
            Some(Entry::Starting(pending)) => return Ok(Entry::Starting(pending.clone())),
            None => {}
        }
        if table.expired_ids.contains(&id) {
            let message = "this command has run, and its output is no longer available; use another command_id to run it again";
            return Err(ApiError::new(ErrorCode::CommandExpired, message));
        }
        if server.processes.find(&id).is_some() {
            return Err(ApiError::new(ErrorCode::CommandNotFound, "only the request that started this command receives its output"));
        }
        if table.answered_ids.contains(&id) {
            let message =
                "this command has run, and its output was sent to the request that started it; use another command_id to run it again";
            return Err(ApiError::new(ErrorCode::CommandExpired, message));
        }
        let Some(spec) = spec else {
            return Err(ApiError::new(ErrorCode::CommandNotFound, "no command has this ID; set command or argv to start one"));
        };
        let slot = self.slot(claims)?;
        let (started_sender, pending) = watch::channel(None);
        table.commands.insert(id.clone(), Entry::Starting(pending.clone()));
        // Runs in its own task, because the request's task may be dropped while other clients wait for the same
        // command.
        let (server, claims) = (server.clone(), claims.clone());
        let tasks = server.tasks.clone();
        tasks.spawn(async move { run_command(&server, id, spec, &claims, (slot, requester_gone), started_sender).await });
        Ok(Entry::Starting(pending))
    }

    /// A new id for a command whose output is not retained.
    pub fn new_answered_id(&self) -> String {
        let id = CommandId::new().to_string();
        self.table().answered_ids.add(id.clone());
        id
    }

    /// Retains a command that has ended, evicting those that expire first where a limit is exceeded.
    fn retain(server: &Arc<Server>, command: Arc<Command>) {
        let commands = &server.commands;
        let mut table = commands.table();
        let expires_at = Instant::now() + command.retention.map_or(commands.retention, |requested| requested.min(commands.retention));
        let index = table.ended.partition_point(|(at, _)| *at <= expires_at);
        table.ended.insert(index, (expires_at, command));
        if index == 0 {
            commands.earlier_expiry.notify_one();
        }
        let mut memory: usize = table.ended.iter().map(|(_, c)| c.buffered_bytes()).sum();
        while table.ended.len() > commands.max_retained || memory > commands.max_retained_memory && table.ended.len() > 1 {
            let Some((_, oldest)) = table.ended.pop_front() else { break };
            memory -= oldest.buffered_bytes();
            table.remove(&oldest);
        }
        if !std::mem::replace(&mut table.is_expiring, true) {
            server.tasks.spawn(expire_commands(server.clone()));
        }
    }

    /// Removes the expired commands and returns the expiry of the next one.
    fn remove_expired(&self) -> Option<Instant> {
        let mut table = self.table();
        let now = Instant::now();
        while let Some((at, _)) = table.ended.front() {
            if *at > now {
                return Some(*at);
            }
            if let Some((_, expired)) = table.ended.pop_front() {
                table.remove(&expired);
            }
        }
        table.is_expiring = false;
        None
    }

    fn table(&self) -> MutexGuard<'_, CommandTable> {
        // A panic half-way can at worst leave a command that is retained too long.
        self.table.lock()
    }
}

impl CommandTable {
    fn remove(&mut self, command: &Arc<Command>) {
        let id = &command.job().id;
        if !matches!(self.commands.get(id), Some(Entry::Started(started)) if Arc::ptr_eq(started, command)) {
            return;
        }
        self.commands.remove(id);
        self.expired_ids.add(id.clone());
    }
}

/// The whole life of a command, from start to retention.
async fn run_command(
    server: &Arc<Server>,
    id: String,
    mut spec: StreamSpec,
    claims: &Claims,
    (slot, requester_gone): (PrincipalSlot, oneshot::Receiver<()>),
    started_sender: watch::Sender<Option<Result<Arc<Command>, ApiError>>>,
) {
    let commands = &server.commands;
    let activity_text = std::mem::take(&mut spec.activity_text);
    let (command, task) = match spawn_command(server, id.clone(), spec, claims).await {
        Ok(spawned) => spawned,
        Err(error) => {
            // Nothing ran, so the id may be used again.
            commands.table().commands.remove(&id);
            started_sender.send_replace(Some(Err(error)));
            return;
        }
    };
    let attachment = command.attach();
    commands.table().commands.insert(id, Entry::Started(command.clone()));
    started_sender.send_replace(Some(Ok(command.clone())));
    drop(started_sender);
    let run_to_end = async {
        let hold_attachment = async {
            // Until the requesting client is attached, or has disconnected before that.
            let _ = requester_gone.await;
            drop(attachment);
        };
        tokio::join!(task.run(server), hold_attachment);
    };
    tokio::select! {
        () = run_to_end => {
            drop(slot);
            if let Some(ended) = command.job().ended() {
                server.activity_log.record_command(claims, activity_text, ended, command.job().duration());
            }
            Commands::retain(server, command);
        }
        () = server.shutdown.cancelled() => {}
    }
}

async fn expire_commands(server: Arc<Server>) {
    while let Some(next) = server.commands.remove_expired() {
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = server.commands.earlier_expiry.notified() => {}
            () = server.shutdown.cancelled() => return,
        }
    }
}

async fn spawn_command(
    server: &Arc<Server>,
    id: String,
    spec: StreamSpec,
    claims: &Claims,
) -> Result<(Arc<Command>, CommandTask), ApiError> {
    let argv = display_argv(&spec.program.argv);
    let (started, error_output) = match server.programs.spawn(spec.program.clone()).await {
        Ok(started) => (started, None),
        Err(error) => {
            let (exit, error_output) = describe_start_failure(argv.first().map_or("", String::as_str), &error)?;
            (
                StartedProgram { program: Arc::new(FailedProgram(exit)), stdin: None, stdout: None, stderr: None, pty: None },
                Some(error_output),
            )
        }
    };
    let program = started.program.clone();
    let job = Job::new(id, ProcessKind::Command, argv, claims, program.clone());
    let listed = server.processes.list(Arc::new(job));
    let created = Command::new(listed, started, spec, error_output, server, &server.commands.spools);
    if created.is_err() {
        program.kill_tree().await;
    }
    created
}
