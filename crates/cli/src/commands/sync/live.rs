//! A running sync: the engine on its own thread, its output on the terminal, and a clean stop at Ctrl-C.

use std::time::Duration;

use cobox_client::SyncUnavailable;
use cobox_sync::{Change, Command, ConnectError, Connection, Engine, Entry, Event, Handle, Phase, Settings, Side, Status, SyncError};
use indicatif::ProgressBar;
use serde_json::json;
use tokio::sync::oneshot;

use super::{
    super::Outcome,
    Pair, control,
    report::{as_json, left_over, phase_why, phase_word},
    state::{Config, State, own_places},
};
use crate::{
    context::Context,
    daemon::StopSignals,
    failure::Failure,
    printer::{Printer, visible},
    target::Target,
};

/// Time to finish a batch that is being applied. After that the process exits anyway, which a sync survives at any
/// moment.
const STOP_WITHIN: Duration = Duration::from_secs(5);

pub async fn run(pair: Pair, settings: Settings, context: &Context) -> Outcome {
    let mut signals = StopSignals::new()?;
    let folder = pair.folder.canonicalize().map_err(|e| Failure::new(format!("{}: {e}", pair.folder.display())))?;
    let (state, id) = State::of(&pair, &folder, context.client()?.url())?;
    let _lock = state.lock()?;
    let own = own_places(&folder)?;
    let connection = tokio::select! {
        connection = context.open_sandbox(&pair.target) => connection?,
        code = signals.recv_exit_code() => return Err(Failure::new("interrupted").with_exit_code(code)),
    };
    let path = String::from_utf8_lossy(&pair.path).into_owned();
    let (thread, sandbox) = match &pair.target {
        Target::Thread(name) => (Some(name.clone()), None),
        Target::Sandbox(name) => (None, Some(name.clone())),
        Target::Session(_) => (None, None),
    };
    let config = Config {
        id,
        folder: folder.clone(),
        thread,
        sandbox,
        path,
        mode: settings.mode.to_string(),
        sandbox_id: connection.sandbox_id.clone(),
    };
    begin(&state, &config, context.printer)?;

    let (started, handle) = oneshot::channel();
    let (ending, ended) = oneshot::channel();
    let engine = {
        let settings = settings.clone();
        let (dataplane, runtime, remote) = (connection.dataplane.clone(), tokio::runtime::Handle::current(), pair.path.clone());
        let screen = Screen::new(context.printer, state.clone(), config.clone(), settings.once);
        let base = state.base();
        move || {
            let mut dial = || match runtime.block_on(dataplane.open_sync(&remote, settings.mode.is_sandbox_read_only())) {
                Ok((reader, writer)) => Ok(Connection { reader: Box::new(reader), writer: Box::new(writer) }),
                Err(SyncUnavailable::Transient(cause)) => Err(ConnectError::Transient(cause)),
                Err(SyncUnavailable::Final(error)) => Err(ConnectError::Permanent(error.to_string())),
            };
            let mut screen = screen;
            let listener = Box::new(move |event: Event| screen.show(&event));
            let ran = Engine::open(&folder, &base, settings.clone(), listener).and_then(|mut engine| {
                own.into_iter().for_each(|place| engine.exclude(place));
                // The receiver is dropped only when the whole command ends.
                let _ = started.send(engine.handle());
                engine.run(&mut dial)
            });
            let _ = ending.send(ran);
        }
    };
    std::thread::Builder::new().name("sync".to_owned()).spawn(engine)?;
    let done = match handle.await {
        Ok(handle) => {
            control::listen(&state, config.clone(), handle.clone())?;
            until_the_end(handle, ended, &mut signals).await?
        }
        // The engine could not start; its result gives the reason.
        Err(_) => End::ByItself(ended.await.map_err(|_| Failure::new("the sync ended without a word"))?),
    };
    finish(done, &state, &config, settings.once, context.printer)
}

/// Stores the sync's configuration. A different sandbox in place of the old one invalidates the base version.
fn begin(state: &State, config: &Config, printer: Printer) -> Result<(), Failure> {
    if state.config().is_some_and(|before| before.sandbox_id != config.sandbox_id) {
        printer.note("the sandbox is another one than last time: nothing is taken for deleted, and what differs is a conflict");
        match std::fs::remove_file(state.base()) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Failure::new(format!("{}: {e}", state.base().display()))),
            _ => {}
        }
    }
    state.set_config(config)
}

type Ended = Result<Status, SyncError>;

/// Why a run ended.
enum End {
    ByItself(Ended),
    /// Ended by a signal: its exit code, and the final status if the engine reported it in time.
    Told(u8, Option<Ended>),
}

async fn until_the_end(handle: Handle, mut ended: oneshot::Receiver<Ended>, signals: &mut StopSignals) -> Result<End, Failure> {
    let lost = || Failure::new("the sync ended without a word");
    let code = tokio::select! {
        done = &mut ended => return done.map(End::ByItself).map_err(|_| lost()),
        code = signals.recv_exit_code() => code,
    };
    // Sent from a blocking thread: the engine may be busy and its queue full.
    tokio::task::spawn_blocking(move || handle.send(Command::Stop));
    // After this time the engine ends with the process, at an arbitrary moment.
    Ok(End::Told(code, tokio::time::timeout(STOP_WITHIN, ended).await.ok().and_then(Result::ok)))
}

fn finish(done: End, state: &State, config: &Config, until_synced: bool, printer: Printer) -> Outcome {
    let (signalled, done) = match done {
        End::ByItself(ended) => (None, Some(ended)),
        // With `--until-synced` the exit code reports that the two sides may still differ.
        End::Told(code, ended) => (until_synced.then_some(code), ended),
    };
    let status = match done {
        Some(Ok(status)) => status,
        Some(Err(error)) => {
            let failure = Failure::new(error.to_string());
            return Err(match error {
                SyncError::Sandbox { .. } | SyncError::NotAllowed => failure.with_advice("`cobox session get` shows what your token allows"),
                SyncError::Halted(halt) if !halt.is_confirmable() => failure.with_advice(halt.advice()),
                SyncError::Halted(_) => failure.with_advice(
                    "if that is right, run it without --until-synced and say so with `cobox sync resume --confirm`; if not, put back what is missing",
                ),
                _ => failure,
            });
        }
        None => return signalled.map_or(Ok(0), |code| Err(cut_short(code))),
    };
    let told = as_json(config, &status);
    // Ignored: the stored status only serves later queries.
    let _ = state.set_status(&told);
    if let Some(code) = signalled {
        return Err(cut_short(code));
    }
    if until_synced {
        let is_whole = status.conflicts.is_empty() && failures(&status) == 0;
        if printer.is_json() {
            printer.out(format!("{}\n", json!({"event": "end", "status": told})).as_bytes())?;
            return Ok(u8::from(!is_whole));
        }
        printer.result(&told, || {
            let first = format!("{} files are in sync with {}{}", status.synced_files, config.place(), unsettled(&status));
            // The user has to deal with the rest.
            if is_whole { visible(&first) } else { format!("{}\n{}", visible(&first), left_over(&told).join("\n")) }
        })?;
        return Ok(u8::from(!is_whole));
    }
    Ok(0)
}

fn cut_short(code: u8) -> Failure {
    Failure::new("interrupted before both sides were the same").with_advice("the next run goes on from there").with_exit_code(code)
}

/// Number of problems that must be fixed before both sides can be the same.
fn failures(status: &Status) -> usize {
    status.local_problems.values().chain(status.sandbox_problems.values()).filter(|problem| problem.is_failure()).count()
}

fn unsettled(status: &Status) -> String {
    let some = |count: usize, what: &str| match count {
        0 => String::new(),
        1 => format!(", 1 {what}"),
        n => format!(", {n} {what}s"),
    };
    some(status.conflicts.len(), "conflict") + &some(failures(status), "problem")
}

/// Output of a running sync: a status line and a progress bar on a terminal, a few lines elsewhere, one object per line
/// as JSON.
struct Screen {
    printer: Printer,
    state: State,
    config: Config,
    line: ProgressBar,
    bar: Option<ProgressBar>,
    said: String,
    has_synced: bool,
    /// Whether the sync is to end by itself: the final summary then reports the result.
    is_to_end: bool,
}

impl Screen {
    fn new(printer: Printer, state: State, config: Config, is_to_end: bool) -> Self {
        Self { line: printer.status_line(), printer, state, config, bar: None, said: String::new(), has_synced: false, is_to_end }
    }

    fn show(&mut self, event: &Event) {
        match event {
            Event::Phase(phase) => self.phase(phase),
            Event::Progress { to, done, total } => self.progress(*to, *done, *total),
            Event::Changed { side, change, batch } => {
                let what = match (&change.old, &change.new) {
                    (_, None) => "removed",
                    (None, Some(Entry::Dir)) => "made",
                    _ => "written",
                };
                let side = if *side == Side::Local { "here" } else { "sandbox" };
                self.object(&json!({"event": "changed", "side": side, "path": change.path.to_string(), "change": what, "trash": batch}));
                self.deletion(side, change);
            }
            Event::Round(status) => self.round(status),
            Event::Notice(words) => self.say(words),
        }
    }

    /// Prints every deletion, so that none goes unnoticed.
    fn deletion(&self, side: &str, change: &Change) {
        if change.new.is_some() {
            return;
        }
        let slash = if matches!(change.old, Some(Entry::Dir)) { "/" } else { "" };
        let words = match side {
            "here" => format!("deleted here, in the trash: {}{slash}", visible(&change.path.to_string())),
            _ => format!("deleted in the sandbox: {}{slash}", visible(&change.path.to_string())),
        };
        self.line.suspend(|| self.printer.note(&words));
    }

    fn phase(&mut self, phase: &Phase) {
        self.object(&json!({"event": "phase", "phase": phase_word(phase), "why": phase_why(phase)}));
        if !matches!(phase, Phase::Syncing) {
            self.clear_bar();
        }
        match phase {
            Phase::Halted(_) | Phase::Watching if self.is_to_end => {}
            Phase::Halted(halt) => self.say(&format!("halted: {halt}\n  {}", halt.advice())),
            Phase::Retrying(why) => self.say(&format!("{why}; trying again")),
            Phase::Watching if !self.has_synced => {
                self.has_synced = true;
                self.say(&format!("in sync with {}; watching for changes, Ctrl-C to end", self.config.place()));
            }
            Phase::Watching => self.said.clear(),
            _ => {}
        }
        self.line.set_message(format!("{}  {}", phase_word(phase), visible(&self.config.place())));
    }

    fn round(&mut self, status: &Status) {
        let told = as_json(&self.config, status);
        // Ignored: the stored status only serves queries while no sync is running.
        let _ = self.state.set_status(&told);
        self.object(&json!({"event": "round", "status": told}));
        match status.conflicts.as_slice() {
            _ if self.is_to_end => {}
            [] => {}
            [conflict] => self.say(&format!("conflict: {} was changed on both sides; see `cobox sync status`", conflict.path)),
            all => self.say(&format!("conflicts: {} files were changed on both sides; see `cobox sync status`", all.len())),
        }
        self.line.set_message(format!("watching  {}, {} files{}", visible(&self.config.place()), status.synced_files, unsettled(status)));
    }

    /// Shows a progress bar in place of the status line.
    fn progress(&mut self, to: Side, done: u64, total: u64) {
        let label = if to == Side::Local { "from the sandbox" } else { "to the sandbox" };
        let (printer, line) = (self.printer, &self.line);
        let bar = self.bar.get_or_insert_with(|| {
            line.finish_and_clear();
            printer.progress(Some(total), label)
        });
        // The other direction follows in the same round.
        bar.set_message(label);
        bar.set_length(total);
        bar.set_position(done);
    }

    fn clear_bar(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            self.line = self.printer.status_line();
        }
    }

    fn object(&self, value: &serde_json::Value) {
        if self.printer.is_json() {
            // A closed standard output is no reason to stop syncing.
            let _ = self.printer.out(format!("{value}\n").as_bytes());
        }
    }

    /// Prints a message, unless it is the same as the last one.
    fn say(&mut self, words: &str) {
        if self.said != words {
            self.said = words.to_owned();
            let shown: Vec<String> = words.lines().map(visible).collect();
            self.line.suspend(|| self.printer.note(&shown.join("\n")));
        }
    }
}
