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
    error::SyncError,
    git_paths::GitPaths,
    guard::Guard,
    halt::Halt,
    hooks::{Hooks, Own},
    mode::Keep,
    path::RelPath,
    peer::{Arrival, Connection, Inbox, Peer},
    problem::Problem,
    rules::Rules,
    settings::Settings,
    side::{Folder, open_root},
    status::{Event, Phase, Status},
    trash::Trash,
    tree::Tree,
};

/// Everything is looked at this often though nothing was told: a watch may miss what a network file system does.
const FULL_LOOK_EVERY: Duration = Duration::from_secs(60);
/// As often where not every change is told.
const POLL_EVERY: Duration = Duration::from_secs(5);
/// A save is several steps: after the first it is waited this long for the next, and no longer than that for all.
const QUIET: Duration = Duration::from_millis(4);
const LONGEST_UNREST: Duration = Duration::from_millis(40);
/// What is known of the files is kept at the end, and this often for a run that is killed.
const REMEMBER_EVERY: Duration = Duration::from_secs(600);
/// Waits before another try, doubled up to the longest.
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LONGEST_RETRY: Duration = Duration::from_secs(5);
/// Longest wait for what the other side said before it closed the connection.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(1);
/// Rounds that a flush goes through while something changes all the time; then it is answered as far as it got.
const MAX_FLUSH_TRIES: u32 = 5;
/// Rounds after which a sync that is to end does so, though something changes all the time; what isn't in sync then is told.
const MAX_ONCE_ROUNDS: u32 = 6;
/// Connections in a row that such a sync tries to make without getting through a round.
const MAX_ONCE_TRIES: u32 = 6;
/// What may wait for the engine while it is busy; senders wait beyond it.
const MAX_ARRIVALS: usize = 32;

/// Who wins, for `resolve`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Keep(Keep),
    /// The local one gets another name.
    Both,
}

/// What somebody asks of a running sync. Answers come when it is done.
pub enum Command {
    Pause(Answer<()>),
    /// `confirmed`: what it halted for is right.
    Resume {
        confirmed: bool,
        answer: Answer<()>,
    },
    /// Answered when everything that was there when it was asked is on both sides.
    Flush(Answer<Status>),
    /// Of all conflicts where no paths are named. Answered with how many.
    Resolve {
        paths: Vec<RelPath>,
        choice: Choice,
        answer: Answer<usize>,
    },
    Stop,
}

pub type Answer<T> = Box<dyn FnOnce(Result<T, String>) + Send>;

/// The way to a running engine.
#[derive(Clone)]
pub struct Handle {
    arrivals: SyncSender<Arrival>,
    status: Arc<Mutex<Status>>,
}

impl Handle {
    /// False where it has ended.
    pub fn ask(&self, command: Command) -> bool {
        self.arrivals.send(Arrival::Command(command)).is_ok()
    }

    pub fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Why there is no connection.
pub enum NoConnection {
    /// Another try may do.
    Passing(String),
    Final(String),
}

pub type Dial<'a> = &'a mut dyn FnMut() -> Result<Connection, NoConnection>;
pub type Listener = Box<dyn FnMut(Event) + Send>;

pub struct Engine {
    pub(crate) settings: Settings,
    pub(crate) folder: Folder,
    pub(crate) base: Ancestor,
    pub(crate) inbox: Inbox,
    pub(crate) there: Tree,
    pub(crate) there_problems: BTreeMap<RelPath, Problem>,
    pub(crate) there_rules: Rules,
    pub(crate) there_is_known: bool,
    pub(crate) there_is_partial: bool,
    pub(crate) decided: BTreeMap<RelPath, Keep>,
    /// What could not be done in the last round, by path; told with the problems.
    pub(crate) undone: [BTreeMap<RelPath, Problem>; 2],
    pub(crate) guard: Guard,
    /// The local folder.
    pub(crate) root: PathBuf,
    pub(crate) git_paths: GitPaths,
    /// Somebody said that what is deleted is right, and no round has seen yet what that is.
    pub(crate) is_confirmed: bool,
    /// Something could not be done because it changed at that moment.
    pub(crate) is_restless: bool,
    /// The other side has to be looked at again for it.
    pub(crate) asks_there_again: bool,
    pub(crate) status: Status,
    pub(crate) listener: Listener,
    arrivals: SyncSender<Arrival>,
    shared: Arc<Mutex<Status>>,
    is_paused: bool,
    halted: Option<Halt>,
    looked_at_all: Option<Instant>,
    remembered_at: Option<Instant>,
    /// After a restless round the next waits: what changes all the time must not keep both sides busy.
    next_try: Option<Instant>,
    unrest: u32,
    rounds_once: u32,
    /// Flushes that go through another round when that is due.
    patient: Vec<Command>,
    /// Told after the next round whether it is still halted.
    looking_again: Vec<Answer<()>>,
}

impl Engine {
    /// Must be made on the thread it runs on. `base` is the file that remembers.
    pub fn open(root: &Path, base: &Path, settings: Settings, listener: Listener) -> Result<Self, SyncError> {
        let (arrivals, waiting) = mpsc::sync_channel(MAX_ARRIVALS);
        let opened = open_root(root).map_err(SyncError::Root)?;
        let hooks: Arc<dyn Hooks> = Arc::new(Own::remembering(root.to_owned(), base.with_extension("files")));
        let waking = arrivals.clone();
        // Full means that it is awake already; what changed is asked of the folder itself.
        let mut folder = Folder::open(opened, settings.limits, hooks, move || drop(waking.try_send(Arrival::Here)))?;
        folder.trash = Some(Trash::new(folder.root.clone(), settings.trash));
        folder.rules.read_above(root);
        folder.recall(folder.hooks.recall());
        let status = Status { mode: settings.mode, ..Status::default() };
        Ok(Self {
            folder,
            base: Ancestor::open(base)?,
            inbox: Inbox { arrivals: waiting, commands: Vec::new(), there_is_dirty: true, here_is_dirty: true, number: 0, stopped: false },
            there: Tree::default(),
            there_problems: BTreeMap::new(),
            there_rules: Rules::default(),
            there_is_known: false,
            there_is_partial: false,
            decided: BTreeMap::new(),
            undone: Default::default(),
            guard: Guard::new(settings.directory_files),
            root: root.to_owned(),
            git_paths: GitPaths::default(),
            is_confirmed: false,
            is_restless: false,
            asks_there_again: false,
            shared: Arc::new(Mutex::new(status.clone())),
            status,
            listener,
            settings,
            arrivals,
            is_paused: false,
            halted: None,
            looked_at_all: None,
            remembered_at: None,
            next_try: None,
            unrest: 0,
            rounds_once: 0,
            patient: Vec::new(),
            looking_again: Vec::new(),
        })
    }

    /// Leaves out what this program itself keeps, where that lies in the folder: it changes with every round, and has keys in it.
    pub fn leave_out(&mut self, path: RelPath) {
        self.folder.own.insert(path);
    }

    pub fn handle(&self) -> Handle {
        Handle { arrivals: self.arrivals.clone(), status: self.shared.clone() }
    }

    /// Until it is told to stop, or something is wrong that can't pass. With `once`, until both sides agree.
    pub fn run(mut self, dial: Dial) -> Result<Status, SyncError> {
        let ended = self.go_on(dial);
        self.remember();
        self.refuse_all("the sync has ended");
        self.set_phase(Phase::Ended);
        match ended {
            Err(SyncError::Stopped) | Ok(()) => Ok(self.status),
            Err(e) => Err(e),
        }
    }

    fn go_on(&mut self, dial: Dial) -> Result<(), SyncError> {
        let (mut retry, mut tries) = (FIRST_RETRY, 0);
        loop {
            let (rounds, steps) = (self.status.rounds, self.base.steps());
            let failure = match self.connect(dial) {
                Ok(mut peer) => match self.stay(&mut peer, &mut retry) {
                    Ok(()) => return Ok(()),
                    Err(failure) => failure,
                },
                Err(failure) => failure,
            };
            tries = if self.status.rounds > rounds { 1 } else { tries + 1 };
            if self.base.steps() > steps {
                // It gets on, if only from cut to cut.
                retry = FIRST_RETRY;
            }
            let may_pass = match self.settings.once {
                true => matches!(failure, SyncError::Lost(_)) && tries < MAX_ONCE_TRIES,
                false => failure.is_passing(),
            };
            if !may_pass {
                return Err(failure);
            }
            // It was about what was there then.
            self.is_confirmed = false;
            self.set_phase(Phase::Waiting(failure.to_string()));
            self.refuse_all(&failure.to_string());
            self.rest(retry)?;
            retry = (retry * 2).min(LONGEST_RETRY);
        }
    }

    fn connect(&mut self, dial: Dial) -> Result<Peer, SyncError> {
        self.set_phase(Phase::Connecting);
        let connection = dial().map_err(|e| match e {
            NoConnection::Passing(why) => SyncError::Lost(std::io::Error::other(why)),
            NoConnection::Final(why) => SyncError::State(why),
        })?;
        // All that was known of the other side is of another connection.
        (self.there, self.there_problems, self.there_rules) = (Tree::default(), BTreeMap::new(), Rules::default());
        self.there_is_known = false;
        Peer::greet(connection, self.settings.mode.only_reads_there(), &mut self.inbox, &self.arrivals)
    }

    /// Round after round on one connection.
    fn stay(&mut self, peer: &mut Peer, retry: &mut Duration) -> Result<(), SyncError> {
        self.show_rest();
        loop {
            self.obey()?;
            let mut flushes: Vec<Command> = self.inbox.commands.extract_if(.., |c| matches!(c, Command::Flush(_))).collect();
            let is_due = self.looked_at_all.is_none_or(|at| at.elapsed() >= self.look_every());
            let is_past = |at: Option<Instant>| at.is_none_or(|at| at <= Instant::now());
            let (is_rested, is_held) = (is_past(self.next_try), !is_past(self.guard.holds_until()));
            if is_rested && !is_held {
                flushes.append(&mut self.patient);
            }
            let is_asked = !is_held && (!self.decided.is_empty() || self.guard.holds_until().is_some());
            let has_news = self.inbox.there_is_dirty || self.folder.has_news() || !self.there_is_known || is_asked;
            let may_go = !self.is_paused && self.halted.is_none();
            if may_go && (!flushes.is_empty() || is_rested && (has_news || is_due || self.next_try.is_some())) {
                let is_all = is_due || !flushes.is_empty() && (self.folder.is_partly_watched() || self.there_is_partial);
                // For a flush the other side is asked whether it has said so or not.
                self.asks_there_again |= !flushes.is_empty();
                match self.one_round(peer, is_all) {
                    Ok(()) => *retry = FIRST_RETRY,
                    Err(failure) => {
                        self.answer_looking(Err(failure.to_string()));
                        flushes.into_iter().for_each(|f| refuse(f, &failure.to_string()));
                        return Err(failure);
                    }
                }
                flushes.into_iter().for_each(|flush| self.answer_flush(flush));
                if self.settings.once && self.is_done_once()? {
                    return Ok(());
                }
                continue;
            }
            self.wait(if may_go { self.next_round() } else { FULL_LOOK_EVERY })?;
        }
    }

    /// How long until there is something to do though nothing happens.
    fn next_round(&self) -> Duration {
        let next_look = self.looked_at_all.map(|at| at + self.look_every());
        let next = self.next_try.or_else(|| [next_look, self.guard.holds_until()].into_iter().flatten().min());
        next.map_or(Duration::ZERO, |at| at.saturating_duration_since(Instant::now())).max(QUIET)
    }

    /// What it waits for is also so on another connection.
    fn show_rest(&mut self) {
        if self.is_paused {
            self.set_phase(Phase::Paused);
        } else if let Some(halt) = self.halted.clone() {
            self.set_phase(Phase::Halted(halt));
        }
    }

    fn one_round(&mut self, peer: &mut Peer, is_all: bool) -> Result<(), SyncError> {
        self.is_restless = false;
        // After a round that broke off nothing is known for sure.
        self.looked_at_all = self.looked_at_all.take().filter(|_| !is_all);
        let looked_at_all = if is_all { Some(Instant::now()) } else { self.looked_at_all };
        self.halted = self.round(peer, is_all).map_err(|failure| match failure {
            // It takes no more for a reason that it has said.
            SyncError::Lost(_) if peer.is_broken => self.inbox.interruption(LAST_WORDS_WITHIN).unwrap_or(failure),
            failure => failure,
        })?;
        if is_all && self.remembered_at.is_none_or(|at| at.elapsed() >= REMEMBER_EVERY) {
            self.remember();
            self.remembered_at = Some(Instant::now());
        }
        self.looked_at_all = looked_at_all;
        if self.is_restless {
            self.next_try = Some(Instant::now() + FIRST_RETRY.saturating_mul(1 << self.unrest.min(8)).min(LONGEST_RETRY));
            self.unrest += 1;
        } else {
            (self.next_try, self.unrest) = (None, 0);
        }
        match self.halted.clone() {
            Some(halt) => self.set_phase(Phase::Halted(halt)),
            None => {
                self.status.settled_at = Some(SystemTime::now());
                self.set_phase(Phase::Watching);
            }
        }
        // After the phase: the status must not contradict an answer that was given before.
        self.answer_looking(match &self.halted {
            Some(halt) => Err(format!("it is halted: {halt}; {}", halt.advice())),
            None => Ok(()),
        });
        Ok(())
    }

    /// So that the next run need not read everything.
    fn remember(&self) {
        self.folder.hooks.remember(self.folder.memory());
    }

    fn answer_flush(&mut self, flush: Command) {
        match flush {
            flush if self.halted.is_some() => refuse(flush, "the sync is halted; see `cobox sync status`"),
            flush if self.guard.holds_until().is_some() => self.patient.push(flush),
            // Once more: something changed while it was at it.
            flush if self.is_restless && self.unrest < MAX_FLUSH_TRIES => self.patient.push(flush),
            Command::Flush(answer) => answer(Ok(self.status.clone())),
            _ => {}
        }
    }

    fn is_done_once(&mut self) -> Result<bool, SyncError> {
        if let Some(halt) = self.halted.take() {
            return Err(SyncError::Halted(halt));
        }
        self.rounds_once += 1;
        let is_still = !self.is_restless && !self.inbox.there_is_dirty && !self.folder.has_news();
        Ok(is_still || self.rounds_once >= MAX_ONCE_ROUNDS)
    }

    fn look_every(&self) -> Duration {
        if self.folder.is_partly_watched() || self.there_is_partial { POLL_EVERY } else { FULL_LOOK_EVERY }
    }

    /// Waits for something to do, and then for it to be over.
    fn wait(&mut self, most: Duration) -> Result<(), SyncError> {
        if !self.take(most)? {
            return Ok(());
        }
        let began = Instant::now();
        while began.elapsed() < LONGEST_UNREST && self.inbox.commands.is_empty() && self.take(QUIET)? {}
        Ok(())
    }

    /// Takes one arrival; false where none came in time.
    fn take(&mut self, within: Duration) -> Result<bool, SyncError> {
        match self.inbox.arrivals.recv_timeout(within) {
            Ok(arrival) => match self.inbox.sort(arrival) {
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
    fn rest(&mut self, pause: Duration) -> Result<(), SyncError> {
        let until = Instant::now() + pause;
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            match self.take(left) {
                // Of the connection that is gone already.
                Err(SyncError::Stopped) => return Err(SyncError::Stopped),
                _ => {
                    self.obey()?;
                    self.refuse_all("the sandbox can't be reached now");
                }
            }
        }
        Ok(())
    }

    /// Does what was asked, but for flushes, which a round answers.
    fn obey(&mut self) -> Result<(), SyncError> {
        if self.inbox.stopped {
            return Err(SyncError::Stopped);
        }
        let others: Vec<Command> = self.inbox.commands.extract_if(.., |c| !matches!(c, Command::Flush(_))).collect();
        for command in others {
            match command {
                Command::Pause(answer) => {
                    self.is_paused = true;
                    self.set_phase(Phase::Paused);
                    answer(Ok(()));
                }
                Command::Resume { confirmed, answer } => {
                    self.is_paused = false;
                    let halted = self.halted.take();
                    let was_halted = halted.is_some();
                    // Room in the trash is looked at, whatever is confirmed.
                    let confirmed = confirmed && halted.is_none_or(|halt| halt.is_confirmable());
                    // Looks anew before it goes on.
                    self.looked_at_all = None;
                    if was_halted && !confirmed {
                        // What was missing may be back.
                        self.looking_again.push(answer);
                        continue;
                    }
                    self.is_confirmed |= was_halted;
                    answer(Ok(()));
                }
                Command::Resolve { paths, choice, answer } => answer(self.resolve(&paths, choice)),
                Command::Flush(_) | Command::Stop => {}
            }
        }
        if self.is_paused {
            self.refuse_all("the sync is paused");
        } else if self.halted.is_some() {
            self.refuse_all("the sync is halted; see `cobox sync status`");
        }
        Ok(())
    }

    fn answer_looking(&mut self, found: Result<(), String>) {
        self.looking_again.drain(..).for_each(|answer| answer(found.clone()));
    }

    fn refuse_all(&mut self, why: &str) {
        self.answer_looking(Err(why.to_owned()));
        self.inbox.commands.drain(..).chain(self.patient.drain(..)).for_each(|command| refuse(command, why));
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
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&self.status);
    }
}

fn refuse(command: Command, why: &str) {
    match command {
        Command::Pause(answer) | Command::Resume { answer, .. } => answer(Err(why.to_owned())),
        Command::Flush(answer) => answer(Err(why.to_owned())),
        Command::Resolve { answer, .. } => answer(Err(why.to_owned())),
        Command::Stop => {}
    }
}
