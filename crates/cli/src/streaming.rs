//! A command in a sandbox as if it ran here: its output as it comes, this input in it, and Ctrl-C for it.

use std::{io::IsTerminal, time::Duration};

use cobox_client::{ClientError, Dataplane, ExecEvent, ExecInput, ExecStream};
use cobox_protocol::frame::{ExecStart, OutputStream};
use tokio::{
    io::AsyncReadExt,
    signal::unix::{Signal, SignalKind, signal},
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    failure::{Failure, INTERRUPTED},
    printer::Printer,
    terminal::{EscapeKey, EscapeScan, Modes, RawMode, Typed, size},
};

/// Bytes read from standard input at once.
const STDIN_CHUNK: usize = 64 * 1024;
/// For the sandbox to end a command that is not wanted any more.
const CANCEL_WITHIN: Duration = Duration::from_secs(5);
/// Exit codes of what a signal ended: 128 and the signal's number.
const BROKEN_PIPE: u8 = 141;
const TERMINATED: u8 = 143;
const HUNG_UP: u8 = 129;

/// How a command came to its end.
pub struct Ended {
    pub exit_code: i32,
    pub timed_out: bool,
}

/// Ended by what happened here, with this exit code, or why it failed.
pub enum Stop {
    Here(u8),
    Failed(Failure),
}

impl<E: Into<Failure>> From<E> for Stop {
    fn from(error: E) -> Self {
        Stop::Failed(error.into())
    }
}

/// Runs a command to its end.
pub async fn run(dataplane: &Dataplane, start: ExecStart, printer: Printer) -> Result<Ended, Stop> {
    let (is_pty, has_stdin) = (start.pty, start.stdin.is_some());
    let ExecStream { command_id, input, output } = dataplane.exec_stream(start).await?;
    let raw = if is_pty { RawMode::enter()? } else { None };
    let mut running = Running { printer, command_id, input, is_pty, modes: Modes::default(), interrupts: 0 };
    let ended = running.hold(dataplane, output, has_stdin).await;
    if is_pty && std::io::stdout().is_terminal() {
        let new_line: &[u8] = if ended.is_err() { b"\r\n" } else { b"" };
        // A terminal that is gone can't be reset, and nobody looks at it.
        let _ = printer.stream(&[&running.modes.off(), new_line].concat());
    }
    drop(raw);
    ended
}

struct Running {
    printer: Printer,
    command_id: String,
    input: ExecInput,
    is_pty: bool,
    modes: Modes,
    interrupts: u32,
}

impl Running {
    async fn hold(&mut self, dataplane: &Dataplane, mut output: cobox_client::ExecOutput, has_stdin: bool) -> Result<Ended, Stop> {
        let mut signals = Signals::new()?;
        // A task of its own: a command that doesn't read must not hold up what it prints.
        let mut typing = AbortOnDropHandle::new(tokio::spawn(pass_on(self.input.clone(), self.is_pty)));
        let mut is_typing = has_stdin;
        loop {
            tokio::select! {
                event = output.next() => match event {
                    Some(Ok(event)) => match self.show(event) {
                        Ok(Some(ended)) => return Ok(ended),
                        Ok(None) => {}
                        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {
                            self.cancel(dataplane).await;
                            return Err(Stop::Here(BROKEN_PIPE));
                        }
                        Err(e) => return Err(e.into()),
                    },
                    Some(Err(e)) => return Err(e.into()),
                    None => return Err(Failure::new("the command's output ended without an exit code").into()),
                },
                typed = &mut typing, if is_typing => match typed {
                    Ok(Ok(true)) => {
                        self.cancel(dataplane).await;
                        return Err(Stop::Here(INTERRUPTED));
                    }
                    // Where it failed, what the reading half says of it is the better message.
                    Ok(_) => is_typing = false,
                    Err(e) => return Err(Failure::new(format!("reading standard input: {e}")).into()),
                },
                _ = signals.resized.recv(), if self.is_pty => if let Some((cols, rows)) = size() {
                    let _ = self.input.resize(cols, rows).await;
                },
                _ = signals.interrupted.recv() => {
                    self.interrupts += 1;
                    if self.interrupts > 1 {
                        self.cancel(dataplane).await;
                        return Err(Stop::Here(INTERRUPTED));
                    }
                    // Kept for the next connection if there is none now.
                    let _ = self.input.signal("INT").await;
                }
                _ = signals.terminated.recv() => {
                    self.cancel(dataplane).await;
                    return Err(Stop::Here(TERMINATED));
                }
                _ = signals.hung_up.recv() => {
                    self.cancel(dataplane).await;
                    return Err(Stop::Here(HUNG_UP));
                }
            }
        }
    }

    fn show(&mut self, event: ExecEvent) -> std::io::Result<Option<Ended>> {
        match event {
            ExecEvent::Stdout(bytes) => {
                if self.is_pty {
                    self.modes.see(&bytes);
                }
                self.printer.stream(&bytes)?;
            }
            ExecEvent::Stderr(bytes) => self.printer.err(&bytes),
            ExecEvent::Gap { stream, from, to } => {
                let name = if stream == OutputStream::Stdout { "stdout" } else { "stderr" };
                self.printer.note(&format!("cobox: bytes {from} to {to} of {name} are missing: the sandbox no longer had them"));
            }
            ExecEvent::Reconnecting { .. } => self.say("cobox: the connection is lost; trying again"),
            ExecEvent::Reconnected => self.say("cobox: connected again"),
            ExecEvent::Refused(failure) => self.printer.note(&format!("cobox: {}", crate::printer::visible(&failure.message))),
            ExecEvent::Started { .. } => {}
            ExecEvent::Exit { exit_code, timed_out, .. } => return Ok(Some(Ended { exit_code, timed_out })),
        }
        Ok(None)
    }

    /// For somebody who reads along, and not in the middle of their screen.
    fn say(&self, words: &str) {
        if self.printer.is_interactive() && !self.is_pty {
            self.printer.note(words);
        }
    }

    /// Whoever can't be told: the command runs on, and `cobox ps` shows it.
    async fn cancel(&self, dataplane: &Dataplane) {
        let told = tokio::time::timeout(CANCEL_WITHIN, dataplane.cancel(&self.command_id)).await;
        if !matches!(told, Ok(Ok(()))) {
            self.printer.note(&format!("cobox: the command could not be ended; try `cobox kill {}`", self.command_id));
        }
    }
}

/// `true` where the one at the keyboard wants to leave.
async fn pass_on(input: ExecInput, is_pty: bool) -> Result<bool, ClientError> {
    let has_escapes = is_pty && std::io::stdin().is_terminal();
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; STDIN_CHUNK];
    let mut escape = EscapeScan::new(EscapeKey::default());
    loop {
        let n = match stdin.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        if !has_escapes {
            input.stdin(&buffer[..n]).await?;
            continue;
        }
        for typed in escape.scan(&buffer[..n]) {
            match typed {
                Typed::Send(bytes) => input.stdin(&bytes).await?,
                Typed::Leave => return Ok(true),
                // Nobody shares a command.
                Typed::Take | Typed::Release | Typed::Help | Typed::Status | Typed::Redraw | Typed::Suspend => {}
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
