//! The local end: remembers what both sides agreed on, decides, and goes on until it is told to stop. Every failure that may pass is tried again.

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

/// Everything is looked at this often though nothing was told: a watch may miss what a network file system does.
const FULL_SCAN_INTERVAL: Duration = Duration::from_secs(60);
/// As often where not every change is told.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// A save is several steps: after the first it is waited this long for the next, and no longer than that for all.
const DEBOUNCE: Duration = Duration::from_millis(4);
const MAX_DEBOUNCE: Duration = Duration::from_millis(40);
/// What is known of the files is kept at the end, and this often for a run that is killed.
const CACHE_SAVE_INTERVAL: Duration = Duration::from_secs(600);
/// Waits before another try, doubled up to the longest.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(50);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
/// Longest wait for what the other side said before it closed the connection.
const CLOSE_REASON_TIMEOUT: Duration = Duration::from_secs(1);
/// Rounds that a flush goes through while something changes all the time; then it is answered as far as it got.
const MAX_FLUSH_ROUNDS: u32 = 5;
/// Rounds after which a sync that is to end does so, though something changes all the time; what isn't in sync then is told.
const MAX_ONCE_ROUNDS: u32 = 6;
/// Connections in a row that such a sync tries to make without getting through a round.
const MAX_ONCE_CONNECTIONS: u32 = 6;
/// What may wait for the engine while it is busy; senders wait beyond it.
const INPUT_QUEUE_CAPACITY: usize = 32;

/// Who wins, for `resolve`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    Keep(Side),
    /// The local one gets another name.
    Both,
}

/// What somebody asks of a running sync. Answers come when it is done.
pub enum Command {
    Pause(Responder<()>),
    /// `confirmed`: what it halted for is right.
    Resume {
        confirmed: bool,
        respond: Responder<()>,
    },
    /// Answered when everything that was there when it was asked is on both sides.
    Flush(Responder<Status>),
    /// Of all conflicts where no paths are named. Answered with how many.
    Resolve {
        paths: Vec<RelPath>,
        resolution: Resolution,
        respond: Responder<usize>,
    },
    Stop,
}

pub type Responder<T> = Box<dyn FnOnce(Result<T, String>) + Send>;

/// The way to a running engine.
#[derive(Clone)]
pub struct Handle {
    inputs: SyncSender<EngineInput>,
    status: Arc<Mutex<Status>>,
}

impl Handle {
    /// False where it has ended.
    pub fn send(&self, command: Command) -> bool {
        self.inputs.send(EngineInput::Command(command)).is_ok()
    }

    pub fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Why there is no connection.
pub enum ConnectError {
    /// Another try may do.
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
    /// What could not be done in the last round, by path; told with the problems.
    pub(crate) failed_changes: [BTreeMap<RelPath, Problem>; 2],
    pub(crate) deletion_guard: DeletionGuard,
    /// The local folder.
    pub(crate) root: PathBuf,
    pub(crate) git_paths: GitPaths,
    /// Somebody said that what is deleted is right, and no round has seen yet what that is.
    pub(crate) deletions_confirmed: bool,
    /// Something could not be done because it changed at that moment.
    pub(crate) is_unstable: bool,
    /// The other side has to be looked at again for it.
    pub(crate) must_rescan_sandbox: bool,
    pub(crate) status: Status,
    pub(crate) listener: Listener,
    inputs: SyncSender<EngineInput>,
    published_status: Arc<Mutex<Status>>,
    is_paused: bool,
    halted: Option<Halt>,
    full_scan_at: Option<Instant>,
    cache_saved_at: Option<Instant>,
    /// After a restless round the next waits: what changes all the time must not keep both sides busy.
    retry_at: Option<Instant>,
    unstable_rounds: u32,
    once_rounds: u32,
    /// Flushes that go through another round when that is due.
    deferred_flushes: Vec<Command>,
    /// Told after the next round whether it is still halted.
    pending_resumes: Vec<Responder<()>>,
}

impl Engine {
    /// Must be made on the thread it runs on. `base` is the file that remembers.
    pub fn open(root: &Path, base: &Path, settings: Settings, listener: Listener) -> Result<Self, SyncError> {
        let (inputs, receiver) = mpsc::sync_channel(INPUT_QUEUE_CAPACITY);
        let opened = open_root(root).map_err(SyncError::Root)?;
        let hooks: Arc<dyn Hooks> = Arc::new(LocalHooks::with_digest_cache(root.to_owned(), base.with_extension("files")));
        let waker = inputs.clone();
        // Full means that it is awake already; what changed is asked of the folder itself.
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

    /// Leaves out what this program itself keeps, where that lies in the folder: it changes with every round, and has keys in it.
    pub fn exclude(&mut self, path: RelPath) {
        self.folder.excluded.insert(path);
    }

    pub fn handle(&self) -> Handle {
        Handle { inputs: self.inputs.clone(), status: self.published_status.clone() }
    }

    /// Until it is told to stop, or something is wrong that can't pass. With `once`, until both sides agree.
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
                // It gets on, if only from cut to cut.
                retry_delay = MIN_RETRY_DELAY;
            }
            let may_retry = match self.settings.once {
                true => matches!(failure, SyncError::Lost(_)) && attempts < MAX_ONCE_CONNECTIONS,
                false => failure.is_transient(),
            };
            if !may_retry {
                return Err(failure);
            }
            // It was about what was there then.
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
        // All that was known of the other side is of another connection.
        (self.sandbox, self.sandbox_problems, self.sandbox_rules) = (Tree::default(), BTreeMap::new(), IgnoreRules::default());
        self.sandbox_is_known = false;
        Peer::handshake(connection, self.settings.mode.is_sandbox_read_only(), &mut self.inbox, &self.inputs)
    }

    /// Round after round on one connection.
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
                // For a flush the other side is asked whether it has said so or not.
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

    /// How long until there is something to do though nothing happens.
    fn time_to_next_round(&self) -> Duration {
        let next_full_scan = self.full_scan_at.map(|at| at + self.full_scan_interval());
        let next = self.retry_at.or_else(|| [next_full_scan, self.deletion_guard.holds_until()].into_iter().flatten().min());
        next.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now())).max(DEBOUNCE)
    }

    /// What it waits for is also so on another connection.
    fn publish_idle_phase(&mut self) {
        if self.is_paused {
            self.set_phase(Phase::Paused);
        } else if let Some(halt) = self.halted.clone() {
            self.set_phase(Phase::Halted(halt));
        }
    }

    fn run_round(&mut self, peer: &mut Peer, is_full: bool) -> Result<(), SyncError> {
        self.is_unstable = false;
        // After a round that broke off nothing is known for sure.
        self.full_scan_at = self.full_scan_at.take().filter(|_| !is_full);
        let full_scan_at = if is_full { Some(Instant::now()) } else { self.full_scan_at };
        self.halted = self.synchronize(peer, is_full).map_err(|failure| match failure {
            // It takes no more for a reason that it has said.
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
        // After the phase: the status must not contradict an answer that was given before.
        self.answer_pending_resumes(match &self.halted {
            Some(halt) => Err(format!("it is halted: {halt}; {}", halt.advice())),
            None => Ok(()),
        });
        Ok(())
    }

    /// So that the next run need not read everything.
    fn save_digest_cache(&self) {
        self.folder.hooks.save_digests(self.folder.digest_cache());
    }

    fn answer_flush(&mut self, flush: Command) {
        match flush {
            flush if self.halted.is_some() => reject(flush, "the sync is halted; see `cobox sync status`"),
            flush if self.deletion_guard.holds_until().is_some() => self.deferred_flushes.push(flush),
            // Once more: something changed while it was at it.
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

    /// Waits for something to do, and then for it to be over.
    fn wait(&mut self, timeout: Duration) -> Result<(), SyncError> {
        if !self.receive_input(timeout)? {
            return Ok(());
        }
        let began = Instant::now();
        while began.elapsed() < MAX_DEBOUNCE && self.inbox.commands.is_empty() && self.receive_input(DEBOUNCE)? {}
        Ok(())
    }

    /// Takes one arrival; false where none came in time.
    fn receive_input(&mut self, within: Duration) -> Result<bool, SyncError> {
        match self.inbox.inputs.recv_timeout(within) {
            Ok(arrival) => match self.inbox.dispatch(arrival) {
                Some(Err(e)) => Err(e),
                Some(Ok(_)) => Err(SyncError::Protocol("it answered what nobody asked")),
                None if self.inbox.stopped => Err(SyncError::Stopped),
                None => Ok(true),
            },
            Err(RecvTimeoutError::Timeout) => Ok(false),
            Err(RecvTimeoutError::Disconnected) => Err(SyncError::Stopped),
        }
    }

    /// A pause before another try, in which what is asked is answered.
    fn wait_before_retry(&mut self, pause: Duration) -> Result<(), SyncError> {
        let until = Instant::now() + pause;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            match self.receive_input(left) {
                // Of the connection that is gone already.
                Err(SyncError::Stopped) => return Err(SyncError::Stopped),
                _ => {
                    self.handle_commands()?;
                    self.reject_commands("the sandbox can't be reached now");
                }
            }
        }
        Ok(())
    }

    /// Does what was asked, but for flushes, which a round answers.
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
                    // Room in the trash is looked at, whatever is confirmed.
                    let confirmed = confirmed && halted.is_none_or(|halt| halt.is_confirmable());
                    // Looks anew before it goes on.
                    self.full_scan_at = None;
                    if was_halted && !confirmed {
                        // What was missing may be back.
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
