//! Runs a command in a sandbox as if it ran locally: streams its output, forwards standard input, and passes Ctrl-C on.

use std::{
    io::{self, IsTerminal},
    time::{Duration, Instant},
};

use cobox_client::{ClientError, Dataplane, ExecEvent, ExecInput, ExecOutput, ExecStream};
use cobox_protocol::{
    exec::{ExecResponse, text_and_b64},
    frame::{ExecStart, OutputStream},
};
use cobox_stream::SequenceKinds;
use tokio::{
    io::AsyncReadExt,
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::JoinHandle,
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    failure::{Failure, INTERRUPTED},
    output_filter::OutputFilter,
    printer::Printer,
    terminal::{EscapeKey, EscapeScanner, KeyAction, Modes, RawMode, record_alternate_screen, size},
};

/// Read size for standard input, in bytes.
const STDIN_CHUNK: usize = 64 * 1024;
/// Time for the sandbox to end a cancelled command.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to write the remaining output at an end that doesn't wait for its reader.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// Output chunks queued for writing: enough for the network and the reader to work in parallel.
const QUEUED_EVENTS: usize = 8;
/// Exit codes for an end by a signal: 128 plus the signal's number.
const BROKEN_PIPE: u8 = 141;
const TERMINATED: u8 = 143;
const HUNG_UP: u8 = 129;

/// How a command ended.
pub struct CommandExit {
    pub exit_code: i32,
    pub signal: Option<i32>,
    pub timed_out: bool,
}

/// The run ended locally with this exit code, or failed.
pub enum EarlyExit {
    Code(u8),
    Failed(Failure),
}

impl<E: Into<Failure>> From<E> for EarlyExit {
    fn from(error: E) -> Self {
        EarlyExit::Failed(error.into())
    }
}

/// Runs a command to its end and shows its output as it arrives. With `is_raw` a terminal gets every escape sequence.
pub async fn run(dataplane: &Dataplane, start: ExecStart, printer: Printer, is_raw: bool) -> Result<CommandExit, EarlyExit> {
    let is_pty = start.pty;
    let mut command = RemoteCommand::start(dataplane, start, printer).await?;
    let raw = if is_pty { RawMode::enter()? } else { None };
    let (sink, ended) = command.run_to_end(dataplane, TerminalSink::new(printer, is_pty, is_raw)).await;
    // `None` means that the writer is still blocked on the terminal, and anything written now would block too.
    if let Some(sink) = sink {
        printer.err(sink.stderr.finish());
        let mut remaining = sink.stdout.finish().to_vec();
        if is_pty && std::io::stdout().is_terminal() {
            remaining.extend(sink.modes.reset_sequences());
            remaining.extend_from_slice(if ended.is_err() { b"\r\n" } else { b"" });
        }
        // A terminal that is gone can't be reset and doesn't need it.
        let _ = printer.stream(&remaining);
    }
    drop(raw);
    ended
}

/// Runs a command to its end, and returns up to `max_bytes` of each output stream in one answer.
pub async fn capture(dataplane: &Dataplane, start: ExecStart, printer: Printer, max_bytes: usize) -> Result<ExecResponse, EarlyExit> {
    let mut command = RemoteCommand::start(dataplane, start, printer).await?;
    let began = Instant::now();
    let (captured, ended) = command.run_to_end(dataplane, CaptureSink { max_bytes, ..CaptureSink::default() }).await;
    let CommandExit { exit_code, signal, timed_out } = ended?;
    let CaptureSink { stdout, stderr, truncated, .. } = captured.unwrap_or_default();
    let ((stdout, stdout_b64), (stderr, stderr_b64)) = (text_and_b64(stdout), text_and_b64(stderr));
    let duration_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let command_id = command.command_id;
    Ok(ExecResponse { stdout, stderr, stdout_b64, stderr_b64, exit_code, signal, timed_out, truncated, duration_ms, command_id })
}

/// Destination of a command's output; it may block.
trait OutputSink: Send + 'static {
    fn write_event(&mut self, event: ExecEvent) -> io::Result<()>;
}

struct TerminalSink {
    printer: Printer,
    is_pty: bool,
    modes: Modes,
    stdout: OutputFilter,
    stderr: OutputFilter,
}

impl OutputSink for TerminalSink {
    fn write_event(&mut self, event: ExecEvent) -> io::Result<()> {
        match event {
            ExecEvent::Stdout(bytes) => {
                let bytes = self.stdout.apply(bytes);
                if self.is_pty {
                    self.modes.track(&bytes);
                    record_alternate_screen(self.modes.is_alternate());
                }
                self.printer.stream(&bytes)?;
            }
            ExecEvent::Stderr(bytes) => self.printer.err(&self.stderr.apply(bytes)),
            ExecEvent::Gap { stream, from, to } => {
                let name = if stream == OutputStream::Stdout { "stdout" } else { "stderr" };
                self.printer.note(&format!("cobox: bytes {from} to {to} of {name} are missing: the sandbox no longer has them"));
            }
            ExecEvent::Reconnecting { .. } => self.note_if_interactive("cobox: connection lost; reconnecting"),
            ExecEvent::Reconnected => self.note_if_interactive("cobox: reconnected"),
            ExecEvent::Refused(failure) => self.printer.note(&format!("cobox: {}", crate::printer::visible(&failure.message))),
            ExecEvent::Started { .. } | ExecEvent::Exit { .. } => {}
        }
        Ok(())
    }
}

impl TerminalSink {
    fn new(printer: Printer, is_pty: bool, is_raw: bool) -> Self {
        // A program on a pty receives the answers to its terminal queries. Without a pty they would be typed into the
        // local shell.
        let hidden = if is_pty { SequenceKinds::ALL.without(SequenceKinds::QUERY) } else { SequenceKinds::ALL };
        let stdout = OutputFilter::new(io::stdout().is_terminal() && !is_raw, hidden);
        let stderr = OutputFilter::new(io::stderr().is_terminal() && !is_raw, hidden);
        Self { printer, is_pty, modes: Modes::default(), stdout, stderr }
    }

    /// Prints a note for an interactive user, except over the screen of a pty program.
    fn note_if_interactive(&self, text: &str) {
        if self.printer.is_interactive() && !self.is_pty {
            self.printer.note(text);
        }
    }
}

/// Captures the first bytes of each output stream.
#[derive(Default)]
struct CaptureSink {
    max_bytes: usize,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: bool,
}

impl OutputSink for CaptureSink {
    fn write_event(&mut self, event: ExecEvent) -> io::Result<()> {
        let (captured, bytes) = match event {
            ExecEvent::Stdout(bytes) => (&mut self.stdout, bytes),
            ExecEvent::Stderr(bytes) => (&mut self.stderr, bytes),
            ExecEvent::Gap { .. } => {
                self.truncated = true;
                return Ok(());
            }
            _ => return Ok(()),
        };
        let remaining = self.max_bytes.saturating_sub(captured.len());
        self.truncated |= bytes.len() > remaining;
        captured.extend_from_slice(&bytes[..bytes.len().min(remaining)]);
        Ok(())
    }
}

struct RemoteCommand {
    printer: Printer,
    command_id: String,
    input: ExecInput,
    output: ExecOutput,
    is_pty: bool,
    has_stdin: bool,
    interrupts: u32,
}

impl RemoteCommand {
    async fn start(dataplane: &Dataplane, start: ExecStart, printer: Printer) -> Result<Self, EarlyExit> {
        let (is_pty, has_stdin) = (start.pty, start.stdin.is_some());
        let ExecStream { command_id, input, output } = dataplane.exec_stream(start).await?;
        Ok(Self { printer, command_id, input, output, is_pty, has_stdin, interrupts: 0 })
    }

    /// Runs until the end. Returns the result, and the sink unless it is still blocked.
    async fn run_to_end<S: OutputSink>(&mut self, dataplane: &Dataplane, sink: S) -> (Option<S>, Result<CommandExit, EarlyExit>) {
        let (events, mut writer) = spawn_writer(sink);
        let mut events = Some(events);
        let ended = match self.handle_events(dataplane, &mut events, &mut writer).await {
            Ok((sink, ended)) => return (Some(sink), ended),
            Err(stop) => stop,
        };
        drop(events);
        let written = tokio::time::timeout(WRITE_TIMEOUT, &mut writer).await;
        (written.ok().and_then(Result::ok).map(|(sink, _)| sink), Err(ended))
    }

    /// Runs until all output of the command is written, or until an end that doesn't wait for it.
    async fn handle_events<S: OutputSink>(
        &mut self,
        dataplane: &Dataplane,
        events: &mut Option<mpsc::Sender<ExecEvent>>,
        writer: &mut JoinHandle<(S, io::Result<()>)>,
    ) -> Result<(S, Result<CommandExit, EarlyExit>), EarlyExit> {
        let mut signals = Signals::new()?;
        // A separate task: a command that doesn't read its input must not block its output. Input that isn't ours to
        // read is left alone: it belongs to the next reader, and reading a terminal in the background would stop this
        // process.
        let mut stdin_task = match self.has_stdin {
            true => Some(AbortOnDropHandle::new(tokio::spawn(forward_stdin(self.input.clone(), self.is_pty)))),
            false => None,
        };
        let mut outcome: Option<Result<CommandExit, EarlyExit>> = None;
        loop {
            tokio::select! {
                forwarded = forward_event(events.as_ref(), &mut self.output) => match forwarded {
                    Forwarded::Event => {}
                    Forwarded::CommandEnded(ended) => (outcome, *events) = (Some(ended), None),
                    // The writer's task reports its own failure.
                    Forwarded::WriterStopped => *events = None,
                },
                written = &mut *writer => match written {
                    Ok((sink, Ok(()))) => {
                        let not_written = || Err(Failure::new("the output writer stopped").into());
                        return Ok((sink, outcome.unwrap_or_else(not_written)));
                    }
                    Ok((sink, Err(e))) => {
                        if outcome.is_none() {
                            self.cancel(dataplane).await;
                        }
                        let is_unread = e.kind() == io::ErrorKind::BrokenPipe;
                        return Ok((sink, Err(if is_unread { EarlyExit::Code(BROKEN_PIPE) } else { e.into() })));
                    }
                    Err(e) => return Err(Failure::new(format!("writing the output: {e}")).into()),
                },
                stdin_result = async { stdin_task.as_mut().expect("checked by the branch condition").await }, if stdin_task.is_some() => match stdin_result {
                    Ok(Ok(true)) => return Err(self.stop(dataplane, &outcome, INTERRUPTED).await),
                    // A failure here is also reported by the reading side, with a better message.
                    Ok(_) => stdin_task = None,
                    Err(e) => return Err(Failure::new(format!("reading standard input: {e}")).into()),
                },
                _ = signals.resized.recv(), if self.is_pty => if let Some((cols, rows)) = size() {
                    let _ = self.input.resize(cols, rows).await;
                },
                _ = signals.interrupted.recv() => {
                    self.interrupts += 1;
                    if self.interrupts > 1 || outcome.is_some() {
                        return Err(self.stop(dataplane, &outcome, INTERRUPTED).await);
                    }
                    // Queued for the next connection if there is none now.
                    let _ = self.input.signal("INT").await;
                }
                _ = signals.terminated.recv() => return Err(self.stop(dataplane, &outcome, TERMINATED).await),
                _ = signals.hung_up.recv() => return Err(self.stop(dataplane, &outcome, HUNG_UP).await),
            }
        }
    }

    /// Cancels the command, unless it has ended.
    async fn stop(&self, dataplane: &Dataplane, outcome: &Option<Result<CommandExit, EarlyExit>>, code: u8) -> EarlyExit {
        if outcome.is_none() {
            self.cancel(dataplane).await;
        }
        EarlyExit::Code(code)
    }

    /// Cancels the command. If the sandbox can't be reached, the command keeps running, and a note refers to `cobox
    /// ps`.
    async fn cancel(&self, dataplane: &Dataplane) {
        let cancelled = tokio::time::timeout(CANCEL_TIMEOUT, dataplane.cancel(&self.command_id)).await;
        if !matches!(cancelled, Ok(Ok(()))) {
            let text = format!("cobox: could not kill the command; try `cobox kill {}`", self.command_id);
            let printer = self.printer;
            // Ignored if stderr is closed or blocked.
            let _ = tokio::time::timeout(WRITE_TIMEOUT, tokio::task::spawn_blocking(move || printer.note(&text))).await;
        }
    }
}

/// Starts a writer on its own thread: a blocked reader must not delay signal handling.
fn spawn_writer<S: OutputSink>(mut sink: S) -> (mpsc::Sender<ExecEvent>, JoinHandle<(S, io::Result<()>)>) {
    let (events, mut receiver) = mpsc::channel(QUEUED_EVENTS);
    let writer = tokio::task::spawn_blocking(move || {
        while let Some(event) = receiver.blocking_recv() {
            if let Err(e) = sink.write_event(event) {
                return (sink, Err(e));
            }
        }
        (sink, Ok(()))
    });
    (events, writer)
}

enum Forwarded {
    Event,
    CommandEnded(Result<CommandExit, EarlyExit>),
    /// The writer has ended.
    WriterStopped,
}

/// Forwards the next event when the queue has capacity, so a slow reader slows the command down. Never resolves
/// without a queue, which is dropped once the command is over.
async fn forward_event(events: Option<&mpsc::Sender<ExecEvent>>, output: &mut ExecOutput) -> Forwarded {
    let Some(events) = events else { return std::future::pending().await };
    let Ok(permit) = events.reserve().await else { return Forwarded::WriterStopped };
    match output.next().await {
        Some(Ok(ExecEvent::Exit { exit_code, signal, timed_out })) => {
            Forwarded::CommandEnded(Ok(CommandExit { exit_code, signal, timed_out }))
        }
        Some(Ok(event)) => {
            permit.send(event);
            Forwarded::Event
        }
        Some(Err(e)) => Forwarded::CommandEnded(Err(e.into())),
        None => Forwarded::CommandEnded(Err(Failure::new("the command's output ended without an exit code").into())),
    }
}

/// Forwards standard input. Returns `true` if the user typed the escape for leaving.
async fn forward_stdin(input: ExecInput, is_pty: bool) -> Result<bool, ClientError> {
    let has_escapes = is_pty && std::io::stdin().is_terminal();
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; STDIN_CHUNK];
    let mut escape = EscapeScanner::new(EscapeKey::default());
    loop {
        let n = match stdin.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        if !has_escapes {
            input.stdin(&buffer[..n]).await?;
            continue;
        }
        for action in escape.scan(&buffer[..n]) {
            match action {
                KeyAction::Send(bytes) => input.stdin(&bytes).await?,
                KeyAction::Leave => return Ok(true),
                // A command has no other participants, so these keys have no effect.
                KeyAction::Take | KeyAction::Release | KeyAction::Help | KeyAction::Status | KeyAction::Redraw | KeyAction::Suspend => {}
            }
        }
    }
    input.close_stdin().await?;
    Ok(false)
}

struct Signals {
    resized: Signal,
    interrupted: Signal,
    terminated: Signal,
    hung_up: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            resized: signal(SignalKind::window_change())?,
            interrupted: signal(SignalKind::interrupt())?,
            terminated: signal(SignalKind::terminate())?,
            hung_up: signal(SignalKind::hangup())?,
        })
    }
}
