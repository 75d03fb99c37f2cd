//! A running sync: the engine on its own thread, its output on the terminal, and a clean stop at Ctrl-C.

use std::time::Duration;

use cobox_client::SyncUnavailable;
use cobox_sync::{Change, Command, ConnectError, Connection, Engine, Entry, Event, Handle, Phase, Settings, Side, Status, SyncError};
use indicatif::ProgressBar;
use serde_json::json;
use tokio::sync::oneshot;

use super::{
    super::Outcome,
    SyncPair, control_socket,
    report::{as_json, phase_name, phase_reason, unsynced_files},
    state_dir::{SyncConfig, SyncStateDir, own_paths},
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
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

pub async fn run(pair: SyncPair, settings: Settings, context: &Context) -> Outcome {
    let mut signals = StopSignals::new()?;
    let folder = pair.folder.canonicalize().map_err(|e| Failure::new(format!("{}: {e}", pair.folder.display())))?;
    let (state, id) = SyncStateDir::for_pair(&pair, &folder, context.client()?.url())?;
    let _lock = state.lock()?;
    let excluded = own_paths(&folder)?;
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
    let config = SyncConfig {
        id,
        folder: folder.clone(),
        thread,
        sandbox,
        path,
        mode: settings.mode.to_string(),
        sandbox_id: connection.sandbox_id.clone(),
    };
    prepare_state(&state, &config, context.printer)?;

    let (started, handle) = oneshot::channel();
    let (ending, ended) = oneshot::channel();
    let engine = {
        let settings = settings.clone();
        let (dataplane, runtime, remote) = (connection.dataplane.clone(), tokio::runtime::Handle::current(), pair.path.clone());
        let screen = ProgressScreen::new(context.printer, state.clone(), config.clone(), settings.once);
        let base = state.base();
        move || {
            let mut connect = || match runtime.block_on(dataplane.open_sync(&remote, settings.mode.is_sandbox_read_only())) {
                Ok((reader, writer)) => Ok(Connection { reader: Box::new(reader), writer: Box::new(writer) }),
                Err(SyncUnavailable::Transient(cause)) => Err(ConnectError::Transient(cause)),
                Err(SyncUnavailable::Final(error)) => Err(ConnectError::Permanent(error.to_string())),
            };
            let mut screen = screen;
            let listener = Box::new(move |event: Event| screen.show(&event));
            let result = Engine::open(&folder, &base, settings.clone(), listener).and_then(|mut engine| {
                excluded.into_iter().for_each(|path| engine.exclude(path));
                // The receiver is dropped only when the whole command ends.
                let _ = started.send(engine.handle());
                engine.run(&mut connect)
            });
            let _ = ending.send(result);
        }
    };
    std::thread::Builder::new().name("sync".to_owned()).spawn(engine)?;
    let end = match handle.await {
        Ok(handle) => {
            control_socket::listen(&state, config.clone(), handle.clone())?;
            run_until_end(handle, ended, &mut signals).await?
        }
        // The engine could not start; its result gives the reason.
        Err(_) => RunEnd::Completed(ended.await.map_err(|_| Failure::new("the sync ended unexpectedly"))?),
    };
    finish(end, &state, &config, settings.once, context.printer)
}

/// Stores the sync's configuration. A different sandbox in place of the old one invalidates the base version.
fn prepare_state(state: &SyncStateDir, config: &SyncConfig, printer: Printer) -> Result<(), Failure> {
    if state.config().is_some_and(|before| before.sandbox_id != config.sandbox_id) {
        printer.note("the sandbox differs from that of the last run: no file counts as deleted, and differences are conflicts");
        match std::fs::remove_file(state.base()) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Failure::new(format!("{}: {e}", state.base().display()))),
            _ => {}
        }
    }
    state.set_config(config)
}

type EngineResult = Result<Status, SyncError>;

/// Why a run ended.
enum RunEnd {
    Completed(EngineResult),
    /// Ended by a signal: its exit code, and the final status if the engine reported it in time.
    Signalled(u8, Option<EngineResult>),
}

async fn run_until_end(handle: Handle, mut ended: oneshot::Receiver<EngineResult>, signals: &mut StopSignals) -> Result<RunEnd, Failure> {
    let lost = || Failure::new("the sync ended unexpectedly");
    let code = tokio::select! {
        end = &mut ended => return end.map(RunEnd::Completed).map_err(|_| lost()),
        code = signals.recv_exit_code() => code,
    };
    // Sent from a blocking thread: the engine may be busy and its queue full.
    tokio::task::spawn_blocking(move || handle.send(Command::Stop));
    // After this time the engine ends with the process, at an arbitrary moment.
    Ok(RunEnd::Signalled(code, tokio::time::timeout(STOP_TIMEOUT, ended).await.ok().and_then(Result::ok)))
}

fn finish(end: RunEnd, state: &SyncStateDir, config: &SyncConfig, until_synced: bool, printer: Printer) -> Outcome {
    let (signalled, end) = match end {
        RunEnd::Completed(ended) => (None, Some(ended)),
        // With `--until-synced` the exit code reports that the two sides may still differ.
        RunEnd::Signalled(code, ended) => (until_synced.then_some(code), ended),
    };
    let status = match end {
        Some(Ok(status)) => status,
        Some(Err(error)) => {
            let failure = Failure::new(error.to_string());
            return Err(match error {
                SyncError::Sandbox { .. } | SyncError::NotAllowed => failure.with_advice("`cobox session get` shows the capabilities of your token"),
                SyncError::Halted(halt) if !halt.is_confirmable() => failure.with_advice(halt.advice()),
                SyncError::Halted(_) => failure.with_advice(
                    "if the deletions are intended, run without --until-synced and confirm with `cobox sync resume --confirm`; otherwise restore the files",
                ),
                _ => failure,
            });
        }
        None => return signalled.map_or(Ok(0), |code| Err(interrupted(code))),
    };
    let report = as_json(config, &status);
    // Ignored: the stored status only serves later queries.
    let _ = state.set_status(&report);
    if let Some(code) = signalled {
        return Err(interrupted(code));
    }
    if until_synced {
        let is_complete = status.conflicts.is_empty() && failures(&status) == 0;
        if printer.is_json() {
            printer.out(format!("{}\n", json!({"event": "end", "status": report})).as_bytes())?;
            return Ok(u8::from(!is_complete));
        }
        printer.result(&report, || {
            let first = format!("{} files are in sync with {}{}", status.synced_files, config.location(), unsettled_summary(&status));
            // The user has to deal with the rest.
            if is_complete { visible(&first) } else { format!("{}\n{}", visible(&first), unsynced_files(&report).join("\n")) }
        })?;
        return Ok(u8::from(!is_complete));
    }
    Ok(0)
}

fn interrupted(code: u8) -> Failure {
    Failure::new("interrupted before both sides were in sync").with_advice("the next run continues from there").with_exit_code(code)
}

/// Number of problems that must be fixed before both sides can be the same.
fn failures(status: &Status) -> usize {
    status.local_problems.values().chain(status.sandbox_problems.values()).filter(|problem| problem.is_failure()).count()
}

fn unsettled_summary(status: &Status) -> String {
    let count_suffix = |count: usize, noun: &str| match count {
        0 => String::new(),
        1 => format!(", 1 {noun}"),
        n => format!(", {n} {noun}s"),
    };
    count_suffix(status.conflicts.len(), "conflict") + &count_suffix(failures(status), "problem")
}

/// Output of a running sync: a status line and a progress bar on a terminal, a few lines elsewhere, one object per line
/// as JSON.
struct ProgressScreen {
    printer: Printer,
    state: SyncStateDir,
    config: SyncConfig,
    line: ProgressBar,
    bar: Option<ProgressBar>,
    last_message: String,
    has_synced: bool,
    /// Whether the sync is to end by itself: the final summary then reports the result.
    is_to_end: bool,
}

impl ProgressScreen {
    fn new(printer: Printer, state: SyncStateDir, config: SyncConfig, is_to_end: bool) -> Self {
        Self { line: printer.status_line(), printer, state, config, bar: None, last_message: String::new(), has_synced: false, is_to_end }
    }

    fn show(&mut self, event: &Event) {
        match event {
            Event::Phase(phase) => self.phase(phase),
            Event::Progress { to, done, total } => self.progress(*to, *done, *total),
            Event::Changed { side, change, batch } => {
                let change_name = match (&change.old, &change.new) {
                    (_, None) => "removed",
                    (None, Some(Entry::Dir)) => "made",
                    _ => "written",
                };
                let side = if *side == Side::Local { "here" } else { "sandbox" };
                self.print_json(
                    &json!({"event": "changed", "side": side, "path": change.path.to_string(), "change": change_name, "trash": batch}),
                );
                self.deletion(side, change);
            }
            Event::Round(status) => self.round(status),
            Event::Notice(message) => self.print_once(message),
        }
    }

    /// Prints every deletion, so that none goes unnoticed.
    fn deletion(&self, side: &str, change: &Change) {
        if change.new.is_some() {
            return;
        }
        let slash = if matches!(change.old, Some(Entry::Dir)) { "/" } else { "" };
        let message = match side {
            "here" => format!("deleted here, in the trash: {}{slash}", visible(&change.path.to_string())),
            _ => format!("deleted in the sandbox: {}{slash}", visible(&change.path.to_string())),
        };
        self.line.suspend(|| self.printer.note(&message));
    }

    fn phase(&mut self, phase: &Phase) {
        self.print_json(&json!({"event": "phase", "phase": phase_name(phase), "why": phase_reason(phase)}));
        if !matches!(phase, Phase::Syncing) {
            self.clear_bar();
        }
        match phase {
            Phase::Halted(_) | Phase::Watching if self.is_to_end => {}
            Phase::Halted(halt) => self.print_once(&format!("halted: {halt}\n  {}", halt.advice())),
            Phase::Retrying(reason) => self.print_once(&format!("{reason}; retrying")),
            Phase::Watching if !self.has_synced => {
                self.has_synced = true;
                self.print_once(&format!("in sync with {}; watching for changes, press Ctrl-C to stop", self.config.location()));
            }
            Phase::Watching => self.last_message.clear(),
            _ => {}
        }
        self.line.set_message(format!("{}  {}", phase_name(phase), visible(&self.config.location())));
    }

    fn round(&mut self, status: &Status) {
        let report = as_json(&self.config, status);
        // Ignored: the stored status only serves queries while no sync is running.
        let _ = self.state.set_status(&report);
        self.print_json(&json!({"event": "round", "status": report}));
        match status.conflicts.as_slice() {
            _ if self.is_to_end => {}
            [] => {}
            [conflict] => self.print_once(&format!("conflict: {} was changed on both sides; see `cobox sync status`", conflict.path)),
            all => self.print_once(&format!("conflicts: {} files were changed on both sides; see `cobox sync status`", all.len())),
        }
        self.line.set_message(format!(
            "watching  {}, {} files{}",
            visible(&self.config.location()),
            status.synced_files,
            unsettled_summary(status)
        ));
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

    fn print_json(&self, value: &serde_json::Value) {
        if self.printer.is_json() {
            // A closed standard output is no reason to stop syncing.
            let _ = self.printer.out(format!("{value}\n").as_bytes());
        }
    }

    /// Prints a message, unless it is the same as the last one.
    fn print_once(&mut self, message: &str) {
        if self.last_message != message {
            self.last_message = message.to_owned();
            let shown: Vec<String> = message.lines().map(visible).collect();
            self.line.suspend(|| self.printer.note(&shown.join("\n")));
        }
    }
}
