//! The local end of a sync. It stores the state that both sides agreed on, decides what to change, and runs until it is
//! stopped. Transient failures are retried.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError, SyncSender},
    },
    time::{Duration, Instant, SystemTime},
};

use crate::{
    ancestor::Ancestor,
    deletion_guard::DeletionGuard,
    error::SyncError,
    folder::{Folder, open_root},
    git_paths::GitPaths,
    halt::Halt,
    hooks::{Hooks, LocalHooks},
    ignore_rules::IgnoreRules,
    path::RelPath,
    peer::{Connection, EngineInput, Inbox, Peer},
    problem::Problem,
    settings::Settings,
    side::Side,
    status::{Event, Phase, Status},
    trash::Trash,
    tree::Tree,
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
/// A sync with `once` ends after this many rounds even if files keep changing, and reports what is not in sync.
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
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
    pub(crate) base: Ancestor,
    pub(crate) inbox: Inbox,
    pub(crate) sandbox: Tree,
    pub(crate) sandbox_problems: BTreeMap<RelPath, Problem>,
    pub(crate) sandbox_rules: IgnoreRules,
    pub(crate) sandbox_is_known: bool,
    pub(crate) sandbox_is_partial: bool,
    pub(crate) resolutions: BTreeMap<RelPath, Side>,
    /// Changes that failed in the last round, by path and side; reported with the problems.
    pub(crate) failed_changes: [BTreeMap<RelPath, Problem>; 2],
    pub(crate) deletion_guard: DeletionGuard,
    /// Path of the local folder.
    pub(crate) root: PathBuf,
    pub(crate) git_paths: GitPaths,
    /// The user confirmed the deletions, and no round has processed that yet.
    pub(crate) deletions_confirmed: bool,
    /// A file changed while it was processed, so another round is needed.
    pub(crate) is_unstable: bool,
    /// The sandbox has to be scanned again even if it reports no change.
    pub(crate) must_rescan_sandbox: bool,
    pub(crate) status: Status,
    pub(crate) listener: Listener,
    inputs: SyncSender<EngineInput>,
    published_status: Arc<Mutex<Status>>,
    is_paused: bool,
    halted: Option<Halt>,
    full_scan_at: Option<Instant>,
    cache_saved_at: Option<Instant>,
    /// Earliest time of the next round after an unstable one: constantly changing files must not keep both sides busy.
    retry_at: Option<Instant>,
    unstable_rounds: u32,
    once_rounds: u32,
    /// Flushes that wait for another round.
    deferred_flushes: Vec<Command>,
    /// Answered after the next round, with an error if the sync is still halted.
    pending_resumes: Vec<Responder<()>>,
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
        folder.trash = Some(Trash::new(folder.root.clone(), settings.trash));
        folder.ignore_rules.read_parent_rules(root);
        folder.set_digest_cache(folder.hooks.load_digests());
        let status = Status { mode: settings.mode, ..Status::default() };
        Ok(Self {
            folder,
            base: Ancestor::open(base)?,
            inbox: Inbox {
                inputs: receiver,
                commands: Vec::new(),
                sandbox_is_dirty: true,
                local_is_dirty: true,
                connection_id: 0,
                stopped: false,
            },
            sandbox: Tree::default(),
            sandbox_problems: BTreeMap::new(),
            sandbox_rules: IgnoreRules::default(),
            sandbox_is_known: false,
            sandbox_is_partial: false,
            resolutions: BTreeMap::new(),
            failed_changes: Default::default(),
            deletion_guard: DeletionGuard::new(settings.directory_deletion_limit),
            root: root.to_owned(),
            git_paths: GitPaths::default(),
            deletions_confirmed: false,
            is_unstable: false,
            must_rescan_sandbox: false,
            published_status: Arc::new(Mutex::new(status.clone())),
            status,
            listener,
            settings,
            inputs,
            is_paused: false,
            halted: None,
            full_scan_at: None,
            cache_saved_at: None,
            retry_at: None,
            unstable_rounds: 0,
            once_rounds: 0,
            deferred_flushes: Vec::new(),
            pending_resumes: Vec::new(),
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
            // The confirmation covered only the deletions known at that time.
            self.deletions_confirmed = false;
            self.set_phase(Phase::Retrying(failure.to_string()));
            self.reject_commands(&failure.to_string());
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
        // Everything known about the sandbox belonged to the previous connection.
        (self.sandbox, self.sandbox_problems, self.sandbox_rules) = (Tree::default(), BTreeMap::new(), IgnoreRules::default());
        self.sandbox_is_known = false;
        Peer::handshake(connection, self.settings.mode.is_sandbox_read_only(), &mut self.inbox, &self.inputs)
    }

    /// Runs rounds on one connection.
    fn run_connection(&mut self, peer: &mut Peer, retry_delay: &mut Duration) -> Result<(), SyncError> {
        self.publish_idle_phase();
        loop {
            self.handle_commands()?;
            let mut flushes: Vec<Command> = self.inbox.commands.extract_if(.., |c| matches!(c, Command::Flush(_))).collect();
            let is_full_scan_due = self.full_scan_at.is_none_or(|at| at.elapsed() >= self.full_scan_interval());
            let has_passed = |at: Option<Instant>| at.is_none_or(|at| at <= Instant::now());
            let (is_retry_due, is_holding) = (has_passed(self.retry_at), !has_passed(self.deletion_guard.holds_until()));
            if is_retry_due && !is_holding {
                flushes.append(&mut self.deferred_flushes);
            }
            let has_work = !is_holding && (!self.resolutions.is_empty() || self.deletion_guard.holds_until().is_some());
            let has_changes = self.inbox.sandbox_is_dirty || self.folder.has_changes() || !self.sandbox_is_known || has_work;
            let may_run = !self.is_paused && self.halted.is_none();
            if may_run && (!flushes.is_empty() || is_retry_due && (has_changes || is_full_scan_due || self.retry_at.is_some())) {
                let is_full = is_full_scan_due || !flushes.is_empty() && (self.folder.is_partly_watched() || self.sandbox_is_partial);
                // A flush rescans the sandbox even if it has not reported a change.
                self.must_rescan_sandbox |= !flushes.is_empty();
                match self.run_round(peer, is_full) {
                    Ok(()) => *retry_delay = MIN_RETRY_DELAY,
                    Err(failure) => {
                        self.answer_pending_resumes(Err(failure.to_string()));
                        flushes.into_iter().for_each(|f| reject(f, &failure.to_string()));
                        return Err(failure);
                    }
                }
                flushes.into_iter().for_each(|flush| self.answer_flush(flush));
                if self.settings.once && self.is_once_complete()? {
                    return Ok(());
                }
                continue;
            }
            self.wait(if may_run { self.time_to_next_round() } else { FULL_SCAN_INTERVAL })?;
        }
    }

    /// Time until the next round is due if nothing happens.
    fn time_to_next_round(&self) -> Duration {
        let next_full_scan = self.full_scan_at.map(|at| at + self.full_scan_interval());
        let next = self.retry_at.or_else(|| [next_full_scan, self.deletion_guard.holds_until()].into_iter().flatten().min());
        next.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now())).max(DEBOUNCE)
    }

    /// A pause or a halt outlasts the connection.
    fn publish_idle_phase(&mut self) {
        if self.is_paused {
            self.set_phase(Phase::Paused);
        } else if let Some(halt) = self.halted.clone() {
            self.set_phase(Phase::Halted(halt));
        }
    }

    fn run_round(&mut self, peer: &mut Peer, is_full: bool) -> Result<(), SyncError> {
        self.is_unstable = false;
        // After a failed round the time of the last full scan is unknown.
        self.full_scan_at = self.full_scan_at.take().filter(|_| !is_full);
        let full_scan_at = if is_full { Some(Instant::now()) } else { self.full_scan_at };
        self.halted = self.synchronize(peer, is_full).map_err(|failure| match failure {
            // The other side may have sent the reason before it stopped reading.
            SyncError::Lost(_) if peer.write_failed => self.inbox.interruption(CLOSE_REASON_TIMEOUT).unwrap_or(failure),
            failure => failure,
        })?;
        if is_full && self.cache_saved_at.is_none_or(|at| at.elapsed() >= CACHE_SAVE_INTERVAL) {
            self.save_digest_cache();
            self.cache_saved_at = Some(Instant::now());
        }
        self.full_scan_at = full_scan_at;
        if self.is_unstable {
            self.retry_at = Some(Instant::now() + MIN_RETRY_DELAY.saturating_mul(1 << self.unstable_rounds.min(8)).min(MAX_RETRY_DELAY));
            self.unstable_rounds += 1;
        } else {
            (self.retry_at, self.unstable_rounds) = (None, 0);
        }
        match self.halted.clone() {
            Some(halt) => self.set_phase(Phase::Halted(halt)),
            None => {
                self.status.synced_at = Some(SystemTime::now());
                self.set_phase(Phase::Watching);
            }
        }
        // Answered after the phase is set, so that the status does not contradict an answer.
        self.answer_pending_resumes(match &self.halted {
            Some(halt) => Err(format!("the sync is halted: {halt}; {}", halt.advice())),
            None => Ok(()),
        });
        Ok(())
    }

    /// Saves the digests so that the next run need not read every file.
    fn save_digest_cache(&self) {
        self.folder.hooks.save_digests(self.folder.digest_cache());
    }

    fn answer_flush(&mut self, flush: Command) {
        match flush {
            flush if self.halted.is_some() => reject(flush, "the sync is halted; see `cobox sync status`"),
            flush if self.deletion_guard.holds_until().is_some() => self.deferred_flushes.push(flush),
            // A file changed during the round, so another one is needed.
            flush if self.is_unstable && self.unstable_rounds < MAX_FLUSH_ROUNDS => self.deferred_flushes.push(flush),
            Command::Flush(respond) => respond(Ok(self.status.clone())),
            _ => {}
        }
    }

    fn is_once_complete(&mut self) -> Result<bool, SyncError> {
        if let Some(halt) = self.halted.take() {
            return Err(SyncError::Halted(halt));
        }
        self.once_rounds += 1;
        let is_still = !self.is_unstable && !self.inbox.sandbox_is_dirty && !self.folder.has_changes();
        Ok(is_still || self.once_rounds >= MAX_ONCE_ROUNDS)
    }

    fn full_scan_interval(&self) -> Duration {
        if self.folder.is_partly_watched() || self.sandbox_is_partial { POLL_INTERVAL } else { FULL_SCAN_INTERVAL }
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
                Some(Ok(_)) => Err(SyncError::Protocol("it sent an answer without a request")),
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
                    self.reject_commands("the sandbox is not reachable at the moment");
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
                    self.is_paused = true;
                    self.set_phase(Phase::Paused);
                    respond(Ok(()));
                }
                Command::Resume { confirmed, respond } => {
                    self.is_paused = false;
                    let halted = self.halted.take();
                    let was_halted = halted.is_some();
                    // A confirmation does not free space in the trash, so the trash is checked again.
                    let confirmed = confirmed && halted.is_none_or(|halt| halt.is_confirmable());
                    // Forces a full scan before the sync continues.
                    self.full_scan_at = None;
                    if was_halted && !confirmed {
                        // The missing files may be back.
                        self.pending_resumes.push(respond);
                        continue;
                    }
                    self.deletions_confirmed |= was_halted;
                    respond(Ok(()));
                }
                Command::Resolve { paths, resolution, respond } => respond(self.resolve(&paths, resolution)),
                Command::Flush(_) | Command::Stop => {}
            }
        }
        if self.is_paused {
            self.reject_commands("the sync is paused");
        } else if self.halted.is_some() {
            self.reject_commands("the sync is halted; see `cobox sync status`");
        }
        Ok(())
    }

    fn answer_pending_resumes(&mut self, found: Result<(), String>) {
        self.pending_resumes.drain(..).for_each(|respond| respond(found.clone()));
    }

    fn reject_commands(&mut self, why: &str) {
        self.answer_pending_resumes(Err(why.to_owned()));
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
        self.published_status.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&self.status);
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
