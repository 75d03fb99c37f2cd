//! Attaches this terminal to a shell: shows its output, sends the keyboard's input, and reports changes of control.

mod input;
mod screen_writer;
mod signals;
mod virtual_screen;

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use cobox_client::{ClientError, Shell, ShellEvent, ShellInput};
use cobox_protocol::{
    ErrorCode,
    frame::{ControlAction, Controller},
};
use cobox_stream::SequenceKinds;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until, timeout},
};
use tokio_util::task::AbortOnDropHandle;

use self::{
    input::{InputState, Keyboard, KeyboardRequest, TAKE_KEY_NAME, forward_keyboard},
    screen_writer::ScreenWriter,
    signals::{Signals, stop_process},
    virtual_screen::VirtualScreen,
};
use crate::{
    failure::Failure,
    notices::Notices,
    printer::Printer,
    terminal::{EscapeKey, RawMode, panic_on_marker, record_alternate_screen, size},
};

/// Buffered requests of the keyboard to the screen.
const MAX_PENDING_REQUESTS: usize = 4;
/// Time limit for an orderly detach.
const DETACH_TIMEOUT: Duration = Duration::from_millis(500);
/// Time limit for the terminal to show the last output.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
/// Size reported to programs when there is no terminal.
const DEFAULT_SIZE: (u16, u16) = (80, 24);
const BELL: &[u8] = b"\x07";

/// Why the attachment ended.
pub enum AttachEnd {
    Exited(i32),
    Detached,
    /// Not an end: an observer wants to take part, which needs another connection.
    JoinRequested,
    Failed(Failure),
}

/// Identity and options of one shell attachment.
pub struct AttachOptions {
    /// The thread or the sandbox, and the shell's name.
    pub name: String,
    pub is_observer: bool,
    /// Whether an observer may become a participant.
    pub may_join: bool,
    /// Principal under which the sandbox knows this client, if known here.
    pub principal: Option<String>,
    pub escape: EscapeKey,
    pub shows_status: bool,
    /// Whether control was requested when the shell was joined.
    pub requests_control: bool,
    /// What programs may do to this terminal besides printing.
    pub allowed_sequences: SequenceKinds,
}

pub struct ShellAttachment {
    options: AttachOptions,
    /// Whether stdout is a terminal.
    is_stdout_terminal: bool,
    raw: Option<RawMode>,
    signals: Signals,
    writer: ScreenWriter,
    screen: VirtualScreen,
    notices: Notices,
    keyboard: Keyboard,
    input_state: watch::Sender<InputState>,
    /// The participant in control, as text for the status line.
    control_text: String,
    is_control_requested: bool,
    /// Set when output was dropped: the screen must be redrawn.
    needs_redraw: bool,
}

impl ShellAttachment {
    /// Takes over the terminal until [`ShellAttachment::restore_terminal`].
    pub fn new(printer: Printer, options: AttachOptions) -> io::Result<Self> {
        // First, so that no signal ends the process while the terminal is raw.
        let signals = Signals::new()?;
        let raw = RawMode::enter()?;
        Ok(Self {
            is_stdout_terminal: io::stdout().is_terminal(),
            raw,
            signals,
            writer: ScreenWriter::new(printer),
            screen: VirtualScreen::new(size().unwrap_or(DEFAULT_SIZE), options.allowed_sequences),
            notices: Notices::default(),
            keyboard: Keyboard::new(),
            input_state: watch::Sender::new(if options.is_observer { InputState::Observing } else { InputState::Controlling }),
            control_text: String::new(),
            is_control_requested: options.requests_control,
            needs_redraw: false,
            options,
        })
    }

    /// Turns an observer into a participant.
    pub fn join(&mut self) {
        self.options.is_observer = false;
        self.is_control_requested = true;
        self.input_state.send_replace(InputState::Controlling);
    }

    /// Writes the sequences that prepare the terminal for a prompt.
    fn write_restore_sequences(&mut self, is_exit: bool) {
        if self.is_stdout_terminal {
            let last = self.screen.finish(is_exit);
            self.writer.queue_unlimited(last);
            record_alternate_screen(false);
        }
    }

    /// Restores the terminal for a prompt. Returns `false` if the terminal accepts no output: a write to it would
    /// block.
    pub async fn restore_terminal(mut self, end: &AttachEnd) -> bool {
        let is_exit = matches!(end, AttachEnd::Exited(_));
        self.write_restore_sequences(is_exit);
        let accepts_output = self.writer.flush(FLUSH_TIMEOUT).await;
        if let Some(raw) = self.raw.as_ref().filter(|_| !is_exit) {
            raw.discard_input();
        }
        accepts_output || !self.is_stdout_terminal
    }

    pub async fn run(&mut self, mut shell: Shell) -> AttachEnd {
        let (request_sender, mut requests) = mpsc::channel(MAX_PENDING_REQUESTS);
        let input_task =
            forward_keyboard(self.keyboard.clone(), self.options.escape, shell.input.clone(), self.input_state.clone(), request_sender);
        let mut input_task = AbortOnDropHandle::new(tokio::spawn(input_task));
        let mut is_input_done = false;
        loop {
            if self.needs_redraw && self.writer.has_capacity() {
                self.needs_redraw = false;
                self.draw(VirtualScreen::redraw);
            }
            self.refresh_overlay();
            let has_capacity = self.writer.has_capacity();
            let next_change_at = self.notices.next_change_at(Instant::now());
            tokio::select! {
                event = shell.output.next(), if has_capacity => match event {
                    Some(Ok(event)) => if let Some(end) = self.handle_event(event) {
                        return end;
                    },
                    Some(Err(e)) => return AttachEnd::Failed(explain_error(e)),
                    None => return AttachEnd::Detached,
                },
                result = self.writer.drain(), if !has_capacity => match result {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return self.detach(shell).await,
                    Err(e) => return AttachEnd::Failed(e.into()),
                },
                Some(request) = requests.recv() => match request {
                    KeyboardRequest::Detach => return self.detach(shell).await,
                    KeyboardRequest::Join if self.options.may_join => return AttachEnd::JoinRequested,
                    KeyboardRequest::Suspend => self.suspend(&shell.input).await,
                    request => self.handle_request(&request),
                },
                result = &mut input_task, if !is_input_done => match result {
                    // The connection broke during input: the reading half reports the better error.
                    Ok(_) => is_input_done = true,
                    Err(e) => return AttachEnd::Failed(Failure::new(format!("reading the keyboard: {e}"))),
                },
                _ = self.signals.resized.recv() => self.handle_resize(&shell.input).await,
                _ = self.signals.stop.recv() => self.suspend(&shell.input).await,
                _ = self.signals.continued.recv() => self.handle_continue(&shell.input).await,
                () = self.signals.termination.recv() => return self.detach(shell).await,
                () = sleep_until(next_change_at.unwrap_or_else(Instant::now)), if next_change_at.is_some() => {}
            }
        }
    }

    /// Releases control, so that others need not wait for this client to return.
    async fn detach(&self, mut shell: Shell) -> AttachEnd {
        let closing = async {
            if *self.input_state.borrow() == InputState::Controlling {
                shell.input.control(ControlAction::Release).await?;
            }
            shell.input.close().await?;
            while shell.output.next().await.is_some() {}
            Ok::<(), ClientError>(())
        };
        // If the notification fails, the sandbox detects the closed connection on its own.
        let _ = timeout(DETACH_TIMEOUT, closing).await;
        AttachEnd::Detached
    }

    /// Handles keyboard requests that concern only the screen.
    fn handle_request(&mut self, request: &KeyboardRequest) {
        match request {
            KeyboardRequest::Help => self.notices.notify(&self.options.escape.help()),
            KeyboardRequest::Status => self.options.shows_status = !self.options.shows_status,
            KeyboardRequest::Redraw => self.draw(VirtualScreen::redraw),
            KeyboardRequest::ControlRequested => self.is_control_requested = true,
            KeyboardRequest::InputIgnored | KeyboardRequest::Join => self.report_ignored_input(),
            KeyboardRequest::Detach | KeyboardRequest::Suspend => {}
        }
    }

    fn handle_event(&mut self, event: ShellEvent) -> Option<AttachEnd> {
        match event {
            ShellEvent::Output(bytes) if !self.is_stdout_terminal => self.write(bytes.to_vec()),
            ShellEvent::Keyframe { bytes, .. } if !self.is_stdout_terminal => self.write(bytes.to_vec()),
            ShellEvent::Output(bytes) => {
                self.draw(|screen| screen.output(&bytes));
                panic_on_marker(&bytes);
            }
            ShellEvent::Keyframe { cols, rows, bytes } => self.draw(|screen| screen.keyframe(cols, rows, &bytes)),
            ShellEvent::Ready(ready) => {
                self.draw(|screen| screen.resize_shell(ready.cols, ready.rows));
                if self.is_control_requested && ready.controller.is_some() && ready.yours != Some(true) {
                    // The request for control was sent earlier on the same connection as the keys, so the keys already
                    // count.
                    self.control_text = "taking control".to_owned();
                } else {
                    self.update_controller(ready.controller, ready.yours, true);
                }
            }
            ShellEvent::Control { controller, yours } => self.update_controller(controller, yours, false),
            ShellEvent::Resized { cols, rows } => {
                self.draw(|screen| screen.resize_shell(cols, rows));
                self.warn_if_clipped(cols, rows);
            }
            ShellEvent::Gap { .. } => self.notices.notify("some output was lost"),
            ShellEvent::Reconnecting { .. } => {
                let advice = match self.options.escape {
                    EscapeKey::None => String::new(),
                    key => format!(" · {} detaches", key.then(".")),
                };
                self.notices.set_disconnected(Instant::now(), &advice);
            }
            ShellEvent::Reconnected => self.notices.set_connected(Instant::now()),
            ShellEvent::InputDropped { bytes } => {
                self.notices.notify(&format!("{bytes} bytes typed while disconnected were too old and were not sent"));
            }
            ShellEvent::Refused(failure) if failure.is(ErrorCode::Forbidden) => {
                if std::mem::take(&mut self.is_control_requested) {
                    self.control_text = "another participant has control".to_owned();
                }
                // An observer's resize is refused as well, which the user need not know.
                if *self.input_state.borrow() == InputState::Controlling && !self.options.is_observer {
                    self.ring_bell();
                    self.notices.notify(&format!("another participant has control; {} takes it", self.options.escape.then("t")));
                }
            }
            ShellEvent::Refused(failure) => {
                self.ring_bell();
                self.notices.notify(&failure.message);
            }
            ShellEvent::Exit { exit_code, .. } => return Some(AttachEnd::Exited(exit_code)),
        }
        None
    }

    fn draw(&mut self, change: impl FnOnce(&mut VirtualScreen) -> Vec<u8>) {
        let bytes = change(&mut self.screen);
        if self.is_stdout_terminal {
            record_alternate_screen(self.screen.is_alternate());
            self.write(bytes);
        }
    }

    fn write(&mut self, bytes: Vec<u8>) {
        self.needs_redraw |= !self.writer.queue(bytes);
    }

    /// Updates the overlaid status message.
    fn refresh_overlay(&mut self) {
        let status = self.options.shows_status.then(|| {
            let (cols, rows) = self.screen.shell_size();
            let connection = if self.notices.is_connected() { "connected" } else { "no connection" };
            format!("{} · {} · {connection} · {cols}×{rows}", self.options.name, self.control_text)
        });
        self.notices.set_status(status);
        let message = self.notices.message(Instant::now());
        self.draw(|screen| screen.set_overlay(message));
    }

    /// Updates the participant in control and informs the keyboard whether its input is accepted.
    fn update_controller(&mut self, controller: Option<Controller>, yours: Option<bool>, is_first: bool) {
        let was_requested = std::mem::take(&mut self.is_control_requested);
        let is_mine = |c: &Controller| {
            yours
                .unwrap_or_else(|| self.options.principal.as_ref().map_or(was_requested || is_first, |principal| *principal == c.principal))
        };
        let is_free = controller.is_none();
        let other = controller.filter(|c| self.options.is_observer || !is_mine(c));
        self.control_text = match &other {
            Some(c) if self.options.principal.as_ref() == Some(&c.principal) => "another terminal of yours has control".to_owned(),
            Some(c) => format!("{} ({}) has control", c.principal, c.actor.as_str()),
            None if self.options.is_observer => "no controller".to_owned(),
            None if is_free => "no controller; type to take control".to_owned(),
            None => "you have control".to_owned(),
        };
        self.draw(|screen| screen.set_passive(other.is_some() || is_free));
        if !self.options.is_observer {
            self.input_state
                .send_replace(other.as_ref().map_or(InputState::Controlling, |_| InputState::Waiting(self.control_text.clone())));
        }
        match other {
            None if is_first => {}
            Some(_) if !self.options.is_observer || self.options.may_join => {
                self.notices.notify(&format!("{} · {TAKE_KEY_NAME} takes it", self.control_text));
            }
            _ => self.notices.notify(&self.control_text),
        }
    }

    fn warn_if_clipped(&mut self, cols: u16, rows: u16) {
        let is_passive = self.options.is_observer || *self.input_state.borrow() != InputState::Controlling;
        if is_passive && size().is_some_and(|(c, r)| c < cols || r < rows) {
            self.notices.notify(&format!("this shell is {cols}×{rows}, larger than your terminal; only a part is visible"));
        }
    }

    fn report_ignored_input(&mut self) {
        self.ring_bell();
        let message = match &*self.input_state.borrow() {
            InputState::Waiting(message) => format!("{message} · {TAKE_KEY_NAME} takes it"),
            InputState::Observing if self.options.may_join => format!("read-only · {TAKE_KEY_NAME} joins"),
            InputState::Observing => "read-only; you have no permission to type here".to_owned(),
            InputState::Controlling => return,
        };
        self.notices.notify(&message);
    }

    fn ring_bell(&mut self) {
        if self.is_stdout_terminal && self.notices.try_ring(Instant::now()) {
            self.write(BELL.to_vec());
        }
    }

    async fn handle_resize(&mut self, input: &ShellInput) {
        let Some((cols, rows)) = size() else { return };
        self.draw(|screen| screen.resize_terminal((cols, rows)));
        if !self.options.is_observer {
            // On a lost connection the size is kept for the next one.
            let _ = input.resize(cols, rows).await;
        }
    }

    /// Returns the terminal to the parent process and stops until SIGCONT.
    async fn suspend(&mut self, input: &ShellInput) {
        self.write_restore_sequences(false);
        self.writer.flush(FLUSH_TIMEOUT).await;
        if let Some(raw) = &self.raw {
            raw.pause();
        }
        stop_process();
        // The SIGCONT that resumed this process is also delivered as a signal.
        let _ = timeout(DETACH_TIMEOUT, self.signals.continued.recv()).await;
        self.handle_continue(input).await;
    }

    /// Restores raw mode and the screen: other programs may have used the terminal.
    async fn handle_continue(&mut self, input: &ShellInput) {
        if let Some(raw) = &self.raw
            && let Err(error) = raw.resume()
        {
            tracing::debug!(%error, "restoring the terminal's raw mode failed");
        }
        self.draw(VirtualScreen::redraw);
        self.handle_resize(input).await;
    }
}

/// A shell that is not found after a reconnect has ended in the meantime.
fn explain_error(error: ClientError) -> Failure {
    if error.is(ErrorCode::ShellNotFound) {
        return Failure::new("the shell ended while disconnected, or no shell has that name")
            .with_advice("list shells with `cobox ps`; start one with `cobox shell` without --observe");
    }
    error.into()
}
