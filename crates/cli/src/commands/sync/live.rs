//! A sync that runs: the engine on its own thread, what it says on the terminal, and an end at Ctrl-C.

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
    daemon::EndSignals,
    failure::Failure,
    printer::{Printer, visible},
    way_in::Target,
};

/// For a batch that is just being placed; then the process ends all the same, which a sync survives at any moment.
const STOP_WITHIN: Duration = Duration::from_secs(5);

pub async fn run(pair: Pair, settings: Settings, context: &Context) -> Outcome {
    let mut signals = EndSignals::new()?;
    let folder = pair.folder.canonicalize().map_err(|e| Failure::new(format!("{}: {e}", pair.folder.display())))?;
    let (state, id) = State::of(&pair, &folder, context.client()?.url())?;
    let _lock = state.lock()?;
    let own = own_places(&folder)?;
    let way_in = tokio::select! {
        way_in = context.enter(&pair.target) => way_in?,
        code = signals.next_exit_code() => return Err(Failure::new("interrupted").exit_with(code)),
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
        sandbox_id: way_in.sandbox_id.clone(),
    };
    begin(&state, &config, context.printer)?;

    let (started, handle) = oneshot::channel();
    let (ending, ended) = oneshot::channel();
    let engine = {
        let settings = settings.clone();
        let (dataplane, runtime, remote) = (way_in.dataplane.clone(), tokio::runtime::Handle::current(), pair.path.clone());
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
                // The other end of this is gone only with the whole command.
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
        // It could not begin; the end says why.
        Err(_) => End::ByItself(ended.await.map_err(|_| Failure::new("the sync ended without a word"))?),
    };
    finish(done, &state, &config, settings.once, context.printer)
}

/// Remembers which folders these are. Another sandbox in the place of the old one has nothing to do with what was agreed there.
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

/// How a run came to its end.
enum End {
    ByItself(Ended),
    /// By a signal, with the exit code of that, and how it stood where it still said so.
    Told(u8, Option<Ended>),
}

async fn until_the_end(handle: Handle, mut ended: oneshot::Receiver<Ended>, signals: &mut EndSignals) -> Result<End, Failure> {
    let lost = || Failure::new("the sync ended without a word");
    let code = tokio::select! {
        done = &mut ended => return done.map(End::ByItself).map_err(|_| lost()),
        code = signals.next_exit_code() => code,
    };
    // Asked on a thread of its own: the engine may be busy, and its queue full.
    tokio::task::spawn_blocking(move || handle.send(Command::Stop));
    // Later it ends with the process, at whatever moment that is.
    Ok(End::Told(code, tokio::time::timeout(STOP_WITHIN, ended).await.ok().and_then(Result::ok)))
}

fn finish(done: End, state: &State, config: &Config, until_synced: bool, printer: Printer) -> Outcome {
    let (signalled, done) = match done {
        End::ByItself(ended) => (None, Some(ended)),
        // Who asked for an end before both sides are the same is told that they may not be.
        End::Told(code, ended) => (until_synced.then_some(code), ended),
    };
    let status = match done {
        Some(Ok(status)) => status,
        Some(Err(error)) => {
            let failure = Failure::new(error.to_string());
            return Err(match error {
                SyncError::Sandbox { .. } | SyncError::NotAllowed => failure.advise("`cobox session get` shows what your token allows"),
                SyncError::Halted(halt) if !halt.is_confirmable() => failure.advise(halt.advice()),
                SyncError::Halted(_) => failure.advise(
                    "if that is right, run it without --until-synced and say so with `cobox sync resume --confirm`; if not, put back what is missing",
                ),
                _ => failure,
            });
        }
        None => return signalled.map_or(Ok(0), |code| Err(cut_short(code))),
    };
    let told = as_json(config, &status);
    // Only for those who ask later.
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
            // What isn't is for somebody to look at.
            if is_whole { visible(&first) } else { format!("{}\n{}", visible(&first), left_over(&told).join("\n")) }
        })?;
        return Ok(u8::from(!is_whole));
    }
    Ok(0)
}

fn cut_short(code: u8) -> Failure {
    Failure::new("interrupted before both sides were the same").advise("the next run goes on from there").exit_with(code)
}

/// What is to be mended before both sides can be the same.
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

/// What a running sync shows: a line that stays and a bar on a terminal, a few lines elsewhere, an object a line as JSON.
struct Screen {
    printer: Printer,
    state: State,
    config: Config,
    line: ProgressBar,
    bar: Option<ProgressBar>,
    said: String,
    has_synced: bool,
    /// Its end says how it came out.
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

    /// Every one is printed, so that none goes unnoticed.
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
        // Only for those who ask when it doesn't run.
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

    /// The bar takes the line's place.
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
            // Nobody reading any more is no reason to stop syncing.
            let _ = self.printer.out(format!("{value}\n").as_bytes());
        }
    }

    /// Once, until something else was said.
    fn say(&mut self, words: &str) {
        if self.said != words {
            self.said = words.to_owned();
            let shown: Vec<String> = words.lines().map(visible).collect();
            self.line.suspend(|| self.printer.note(&shown.join("\n")));
        }
    }
}
