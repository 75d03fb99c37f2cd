//! The local end of a sync. It stores the state that both sides agreed on, decides what to change, and runs until it is
//! stopped. Transient failures are retried.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError, SyncSender},
    },
    time::{Duration, Instant, SystemTime},
};

use parking_lot::Mutex;

use crate::{
    base_version::BaseVersion,
    deletion_guard::DeletionGuard,
    error::SyncError,
    folder::{Folder, open_root},
    git_paths::GitPaths,
    hooks::{Hooks, LocalHooks},
    path::RelPath,
    peer::{Connection, EngineInput, Inbox, Peer},
    problem::Problem,
    sandbox_view::SandboxView,
    settings::Settings,
    side::Side,
    state::{Pacing, State, Trigger},
    status::{Event, Phase, Status},
    trash::Trash,
};

/// Interval between full scans, even without reported changes: a watch misses changes made elsewhere on a network file
/// system.
const FULL_SCAN_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between full scans when not all directories are watched.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// A save consists of several steps: after each one the engine waits this long for the next, up to `MAX_DEBOUNCE` in
/// total.
const DEBOUNCE: Duration = Duration::from_millis(4);
const MAX_DEBOUNCE: Duration = Duration::from_millis(40);
/// The digest cache is saved at the end, and also at this interval in case the run is killed.
const CACHE_SAVE_INTERVAL: Duration = Duration::from_secs(600);
/// Delay before a retry; it doubles up to the maximum.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(50);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Maximum wait for the reason that the other side sent before it closed the connection.
const CLOSE_REASON_TIMEOUT: Duration = Duration::from_secs(1);
/// A flush is repeated for at most this many rounds while files keep changing; then the current state is reported.
const MAX_FLUSH_ROUNDS: u32 = 5;
/// A sync with `once` ends after this many rounds even if files keep changing, and reports the unsynced files.
const MAX_ONCE_ROUNDS: u32 = 6;
/// Consecutive connections without a completed round after which a sync with `once` gives up.
const MAX_ONCE_CONNECTIONS: u32 = 6;
/// Inputs that can wait while the engine is busy; further senders block.
const INPUT_QUEUE_CAPACITY: usize = 32;

/// How to resolve a conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    Keep(Side),
    /// Keeps both versions; the local one gets another name.
    Both,
}

/// A request to a running sync. It is answered once it was carried out.
pub enum Command {
    Pause(Responder<()>),
    /// `confirmed`: the user accepts the deletions that the sync halted for.
    Resume {
        confirmed: bool,
        respond: Responder<()>,
    },
    /// Answered once everything that existed at the time of the request is on both sides.
    Flush(Responder<Status>),
    /// Resolves these conflicts, or all if no paths are given. Answered with their number.
    Resolve {
        paths: Vec<RelPath>,
        resolution: Resolution,
        respond: Responder<usize>,
    },
    Stop,
}

pub type Responder<T> = Box<dyn FnOnce(Result<T, String>) + Send>;

/// Sends commands to a running engine and reads its status.
#[derive(Clone)]
pub struct Handle {
    inputs: SyncSender<EngineInput>,
    status: Arc<Mutex<Status>>,
}

impl Handle {
    /// Returns false if the engine has ended.
    pub fn send(&self, command: Command) -> bool {
        self.inputs.send(EngineInput::Command(command)).is_ok()
    }

    pub fn status(&self) -> Status {
        self.status.lock().clone()
    }
}

/// Why a connection could not be made.
pub enum ConnectError {
    /// A retry may succeed.
    Transient(String),
    Permanent(String),
}

pub type Connector<'a> = &'a mut dyn FnMut() -> Result<Connection, ConnectError>;
pub type Listener = Box<dyn FnMut(Event) + Send>;

pub struct Engine {
    pub(crate) settings: Settings,
    pub(crate) folder: Folder,
    pub(crate) base: BaseVersion,
    pub(crate) inbox: Inbox,
    pub(crate) sandbox: SandboxView,
    pub(crate) resolutions: BTreeMap<RelPath, Side>,
    /// Changes that failed in the last round, by path and side; reported with the problems.
    pub(crate) failed_changes: [BTreeMap<RelPath, Problem>; 2],
    pub(crate) deletion_guard: DeletionGuard,
    /// Path of the local folder.
    pub(crate) root: PathBuf,
    pub(crate) git_paths: GitPaths,
    /// A file changed during the last round, so another one is needed.
    pub(crate) is_unstable: bool,
    pub(crate) status: Status,
    pub(crate) listener: Listener,
    inputs: SyncSender<EngineInput>,
    published_status: Arc<Mutex<Status>>,
    state: State,
    pacing: Pacing,
    full_scan_at: Option<Instant>,
    cache_saved_at: Option<Instant>,
    once_rounds: u32,
    /// Flushes that wait for another round.
    deferred_flushes: Vec<Command>,
}

/// The next thing to do on a connection.
enum Step {
    /// Run a round, and then answer these flushes.
    Round { is_full: bool, flushes: Vec<Command> },
    /// Wait for an input, but no longer than this.
    Wait(Duration),
}

impl Engine {
    /// Has to be called on the thread that will run the engine. `base` is the file with the state that both sides
    /// agreed on.
    pub fn open(root: &Path, base: &Path, settings: Settings, listener: Listener) -> Result<Self, SyncError> {
        let (inputs, receiver) = mpsc::sync_channel(INPUT_QUEUE_CAPACITY);
        let opened = open_root(root).map_err(SyncError::Root)?;
        let hooks: Arc<dyn Hooks> = Arc::new(LocalHooks::with_digest_cache(root.to_owned(), base.with_extension("files")));
        let waker = inputs.clone();
        // If the queue is full, the engine is awake already; the folder itself knows what changed.
        let mut folder = Folder::open(opened, settings.limits, hooks, move || drop(waker.try_send(EngineInput::LocalChange)))?;
        folder.trash = Some(Trash::new(folder.root.clone(), root, settings.trash));
        folder.ignore_rules.read_parent_rules(root);
        folder.set_digest_cache(folder.hooks.load_digests());
        let status = Status { mode: settings.mode, ..Status::default() };
        Ok(Self {
            folder,
            base: BaseVersion::open(base)?,
            inbox: Inbox {
                inputs: receiver,
                commands: Vec::new(),
                sandbox_is_dirty: true,
                local_is_dirty: true,
                connection_id: 0,
                stopped: false,
            },
            sandbox: SandboxView::default(),
            resolutions: BTreeMap::new(),
            failed_changes: Default::default(),
            deletion_guard: DeletionGuard::new(settings.directory_deletion_limit),
            root: root.to_owned(),
            git_paths: GitPaths::default(),
            is_unstable: false,
            published_status: Arc::new(Mutex::new(status.clone())),
            status,
            listener,
            settings,
            inputs,
            state: State::default(),
            pacing: Pacing::default(),
            full_scan_at: None,
            cache_saved_at: None,
            once_rounds: 0,
            deferred_flushes: Vec::new(),
        })
    }

    /// Excludes the program's own state if it is inside the folder: it changes with every round and contains keys.
    pub fn exclude(&mut self, path: RelPath) {
        self.folder.excluded.insert(path);
    }

    pub fn handle(&self) -> Handle {
        Handle { inputs: self.inputs.clone(), status: self.published_status.clone() }
    }

    /// Runs until the sync is stopped or fails permanently. With `once`, until both sides agree.
    pub fn run(mut self, connector: Connector) -> Result<Status, SyncError> {
        let ended = self.reconnect_loop(connector);
        self.save_digest_cache();
        self.reject_commands("the sync has ended");
        self.set_phase(Phase::Ended);
        match ended {
            Err(SyncError::Stopped) | Ok(()) => Ok(self.status),
            Err(e) => Err(e),
        }
    }

    fn reconnect_loop(&mut self, connector: Connector) -> Result<(), SyncError> {
        let (mut retry_delay, mut attempts) = (MIN_RETRY_DELAY, 0);
        loop {
            let (rounds, commits) = (self.status.rounds, self.base.commits());
            let failure = match self.connect(connector) {
                Ok(mut peer) => match self.run_connection(&mut peer, &mut retry_delay) {
                    Ok(()) => return Ok(()),
                    Err(failure) => failure,
                },
                Err(failure) => failure,
            };
            attempts = if self.status.rounds > rounds { 1 } else { attempts + 1 };
            if self.base.commits() > commits {
                // The sync makes progress, even if only between disconnects.
                retry_delay = MIN_RETRY_DELAY;
            }
            let may_retry = match self.settings.once {
                true => matches!(failure, SyncError::Lost(_)) && attempts < MAX_ONCE_CONNECTIONS,
                false => failure.is_transient(),
            };
            if !may_retry {
                return Err(failure);
            }
            let reason = failure.to_string();
            let replies = self.state.transition(Trigger::Failed(&reason));
            self.set_phase(Phase::Retrying(reason.clone()));
            replies.send();
            self.reject_commands(&reason);
            self.wait_before_retry(retry_delay)?;
            retry_delay = (retry_delay * 2).min(MAX_RETRY_DELAY);
        }
    }

    fn connect(&mut self, connector: Connector) -> Result<Peer, SyncError> {
        self.set_phase(Phase::Connecting);
        let connection = connector().map_err(|e| match e {
            ConnectError::Transient(reason) => SyncError::Lost(std::io::Error::other(reason)),
            ConnectError::Permanent(reason) => SyncError::State(reason),
        })?;
        self.sandbox.reset();
        Peer::handshake(connection, self.settings.mode.is_sandbox_read_only(), &mut self.inbox, &self.inputs)
    }

    /// Runs rounds on one connection.
    fn run_connection(&mut self, peer: &mut Peer, retry_delay: &mut Duration) -> Result<(), SyncError> {
        self.publish_idle_phase();
        loop {
            self.handle_commands()?;
            let (is_full, flushes) = match self.next_step() {
                Step::Round { is_full, flushes } => (is_full, flushes),
                Step::Wait(timeout) => {
                    self.wait(timeout)?;
                    continue;
                }
            };
            match self.run_round(peer, is_full) {
                Ok(()) => *retry_delay = MIN_RETRY_DELAY,
                Err(failure) => {
                    self.state.transition(Trigger::Failed(&failure.to_string())).send();
                    flushes.into_iter().for_each(|f| reject(f, &failure.to_string()));
                    return Err(failure);
                }
            }
            flushes.into_iter().for_each(|flush| self.answer_flush(flush));
            if self.settings.once && self.is_once_complete()? {
                return Ok(());
            }
        }
    }

    fn next_step(&mut self) -> Step {
        if !self.state.is_running() {
            return Step::Wait(FULL_SCAN_INTERVAL);
        }
        let mut flushes: Vec<Command> = self.inbox.commands.extract_if(.., |c| matches!(c, Command::Flush(_))).collect();
        let has_passed = |at: Option<Instant>| at.is_none_or(|at| at <= Instant::now());
        let is_full_scan_due = self.full_scan_at.is_none_or(|at| at.elapsed() >= self.full_scan_interval());
        let (is_retry_due, is_holding) = (has_passed(self.pacing.retry_at()), !has_passed(self.deletion_guard.holds_until()));
        if is_retry_due && !is_holding {
            flushes.append(&mut self.deferred_flushes);
        }
        let has_work = !is_holding && (!self.resolutions.is_empty() || self.deletion_guard.holds_until().is_some());
        let has_changes = self.inbox.sandbox_is_dirty || self.folder.has_changes() || !self.sandbox.is_known || has_work;
        let is_due = is_retry_due && (has_changes || is_full_scan_due || self.pacing != Pacing::Stable);
        if flushes.is_empty() && !is_due {
            return Step::Wait(self.time_to_next_round());
        }
        // A flush rescans the sandbox even if it has not reported a change.
        self.sandbox.must_rescan |= !flushes.is_empty();
        let is_full = is_full_scan_due || !flushes.is_empty() && (self.folder.is_partly_watched() || self.sandbox.is_partial);
        Step::Round { is_full, flushes }
    }

    /// Time until the next round is due if nothing happens.
    fn time_to_next_round(&self) -> Duration {
        let next_full_scan = self.full_scan_at.map(|at| at + self.full_scan_interval());
        let next = self.pacing.retry_at().or_else(|| [next_full_scan, self.deletion_guard.holds_until()].into_iter().flatten().min());
        next.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now())).max(DEBOUNCE)
    }

    /// A pause or a halt outlasts the connection.
    fn publish_idle_phase(&mut self) {
        if self.state.is_paused() {
            self.set_phase(Phase::Paused);
        } else if let Some(halt) = self.state.halt().cloned() {
            self.set_phase(Phase::Halted(halt));
        }
    }

    fn run_round(&mut self, peer: &mut Peer, is_full: bool) -> Result<(), SyncError> {
        let (deletions_confirmed, is_resumed) = (self.state.deletions_confirmed(), self.state.is_resumed());
        self.state.transition(Trigger::RoundStarted).send();
        self.is_unstable = false;
        // After a failed round the time of the last full scan is unknown.
        self.full_scan_at = self.full_scan_at.take().filter(|_| !is_full);
        let full_scan_at = if is_full { Some(Instant::now()) } else { self.full_scan_at };
        let halt = self.synchronize(peer, is_full, deletions_confirmed, is_resumed).map_err(|failure| match failure {
            // The other side may have sent the reason before it stopped reading.
            SyncError::Lost(_) if peer.write_failed => self.inbox.interruption(CLOSE_REASON_TIMEOUT).unwrap_or(failure),
            failure => failure,
        })?;
        if is_full && self.cache_saved_at.is_none_or(|at| at.elapsed() >= CACHE_SAVE_INTERVAL) {
            self.save_digest_cache();
            self.cache_saved_at = Some(Instant::now());
        }
        self.full_scan_at = full_scan_at;
        self.pacing = self.pacing.after_round(self.is_unstable, MIN_RETRY_DELAY, MAX_RETRY_DELAY, Instant::now());
        let replies = self.state.transition(Trigger::RoundEnded(halt.as_ref()));
        match halt {
            Some(halt) => self.set_phase(Phase::Halted(halt)),
            None => {
                self.status.synced_at = Some(SystemTime::now());
                self.set_phase(Phase::Watching);
            }
        }
        replies.send();
        Ok(())
    }

    /// Saves the digests so that the next run need not read every file.
    fn save_digest_cache(&self) {
        self.folder.hooks.save_digests(self.folder.digest_cache());
    }

    fn answer_flush(&mut self, flush: Command) {
        match flush {
            flush if self.state.halt().is_some() => reject(flush, "the sync is halted; see `cobox sync status`"),
            flush if self.deletion_guard.holds_until().is_some() => self.deferred_flushes.push(flush),
            // A file changed during the round, so another one is needed.
            flush if self.is_unstable && self.pacing.rounds() < MAX_FLUSH_ROUNDS => self.deferred_flushes.push(flush),
            Command::Flush(respond) => respond(Ok(self.status.clone())),
            _ => {}
        }
    }

    fn is_once_complete(&mut self) -> Result<bool, SyncError> {
        if let Some(halt) = self.state.halt() {
            return Err(SyncError::Halted(halt.clone()));
        }
        self.once_rounds += 1;
        let is_still = !self.is_unstable && !self.inbox.sandbox_is_dirty && !self.folder.has_changes();
        Ok(is_still || self.once_rounds >= MAX_ONCE_ROUNDS)
    }

    fn full_scan_interval(&self) -> Duration {
        if self.folder.is_partly_watched() || self.sandbox.is_partial { POLL_INTERVAL } else { FULL_SCAN_INTERVAL }
    }

    /// Waits for an input, then until inputs pause.
    fn wait(&mut self, timeout: Duration) -> Result<(), SyncError> {
        if !self.receive_input(timeout)? {
            return Ok(());
        }
        let began = Instant::now();
        while began.elapsed() < MAX_DEBOUNCE && self.inbox.commands.is_empty() && self.receive_input(DEBOUNCE)? {}
        Ok(())
    }

    /// Receives one input; returns false if none came in time.
    fn receive_input(&mut self, within: Duration) -> Result<bool, SyncError> {
        match self.inbox.inputs.recv_timeout(within) {
            Ok(arrival) => match self.inbox.dispatch(arrival) {
                Some(Err(e)) => Err(e),
                Some(Ok(_)) => Err(SyncError::Protocol("it sent a response without a request")),
                None if self.inbox.stopped => Err(SyncError::Stopped),
                None => Ok(true),
            },
            Err(RecvTimeoutError::Timeout) => Ok(false),
            Err(RecvTimeoutError::Disconnected) => Err(SyncError::Stopped),
        }
    }

    /// Waits before a retry and answers commands in the meantime.
    fn wait_before_retry(&mut self, pause: Duration) -> Result<(), SyncError> {
        let until = Instant::now() + pause;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            match self.receive_input(left) {
                // Other errors belong to the connection that is lost already.
                Err(SyncError::Stopped) => return Err(SyncError::Stopped),
                _ => {
                    self.handle_commands()?;
                    self.reject_commands("the sandbox is not reachable");
                }
            }
        }
        Ok(())
    }

    /// Carries out all commands except flushes, which are answered by a round.
    fn handle_commands(&mut self) -> Result<(), SyncError> {
        if self.inbox.stopped {
            return Err(SyncError::Stopped);
        }
        let commands: Vec<Command> = self.inbox.commands.extract_if(.., |c| !matches!(c, Command::Flush(_))).collect();
        for command in commands {
            match command {
                Command::Pause(respond) => {
                    let replies = self.state.transition(Trigger::Pause(respond));
                    self.set_phase(Phase::Paused);
                    replies.send();
                }
                Command::Resume { confirmed, respond } => {
                    // Forces a full scan before the sync continues.
                    self.full_scan_at = None;
                    self.state.transition(Trigger::Resume { confirmed, respond }).send();
                }
                Command::Resolve { paths, resolution, respond } => respond(self.resolve(&paths, resolution)),
                Command::Flush(_) | Command::Stop => {}
            }
        }
        if self.state.is_paused() {
            self.reject_commands("the sync is paused");
        } else if self.state.halt().is_some() {
            self.reject_commands("the sync is halted; see `cobox sync status`");
        }
        Ok(())
    }

    fn reject_commands(&mut self, why: &str) {
        self.state.transition(Trigger::CommandsRejected(why)).send();
        self.inbox.commands.drain(..).chain(self.deferred_flushes.drain(..)).for_each(|command| reject(command, why));
    }

    pub(crate) fn set_phase(&mut self, phase: Phase) {
        let is_new = self.status.phase != phase;
        self.status.phase = phase;
        self.publish();
        if is_new {
            (self.listener)(Event::Phase(&self.status.phase));
        }
    }

    pub(crate) fn publish(&self) {
        self.published_status.lock().clone_from(&self.status);
    }
}

fn reject(command: Command, why: &str) {
    match command {
        Command::Pause(respond) | Command::Resume { respond, .. } => respond(Err(why.to_owned())),
        Command::Flush(respond) => respond(Err(why.to_owned())),
        Command::Resolve { respond, .. } => respond(Err(why.to_owned())),
        Command::Stop => {}
    }
}
