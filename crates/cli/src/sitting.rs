//! Attaches this terminal to a shell: shows its output, sends the keyboard's input, and reports changes of control.

mod display;
pub(crate) mod gate;
mod picture;
mod signals;

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
    display::Display,
    picture::Picture,
    signals::{Signals, stop_here},
};
use crate::{
    failure::Failure,
    notice::Notices,
    printer::Printer,
    terminal::{EscapeKey, RawMode, break_where_told, shows_alternate, size},
    typist::{Asked, Keyboard, Standing, TAKE_KEY_NAME, type_in},
};

/// Buffered requests of the keyboard to the screen.
const ASKS: usize = 4;
/// Time limit for an orderly detach.
const FAREWELL: Duration = Duration::from_millis(500);
/// Time limit for the terminal to show the last output.
const LAST_LOOK: Duration = Duration::from_secs(1);
/// Size reported to programs when there is no terminal.
const NO_TERMINAL: (u16, u16) = (80, 24);
const BELL: &[u8] = b"\x07";

/// Why the attachment ended.
pub enum End {
    Exited(i32),
    Left,
    /// Not an end: an observer wants to take part, which needs another connection.
    Joins,
    Failed(Failure),
}

/// Identity and options of one shell attachment.
pub struct Place {
    /// The thread or the sandbox, and the shell's name.
    pub name: String,
    pub is_observer: bool,
    /// Whether an observer may become a participant.
    pub may_join: bool,
    /// Principal under which the sandbox knows this client, if known here.
    pub me: Option<String>,
    pub escape: EscapeKey,
    pub has_status: bool,
    /// Whether control was requested when the shell was joined.
    pub takes: bool,
    /// What programs may do to this terminal besides printing.
    pub allows: SequenceKinds,
}

pub struct Sitting {
    place: Place,
    /// Whether stdout is a terminal.
    is_shown: bool,
    raw: Option<RawMode>,
    signals: Signals,
    display: Display,
    picture: Picture,
    notices: Notices,
    keyboard: Keyboard,
    standing: watch::Sender<Standing>,
    /// The participant in control, as text for the status line.
    control: String,
    asked_for_control: bool,
    /// Set when output was dropped: the screen must be redrawn.
    is_torn: bool,
}

impl Sitting {
    /// Takes over the terminal until [`Sitting::stand_up`].
    pub fn new(printer: Printer, place: Place) -> io::Result<Self> {
        // First, so that no signal ends the process while the terminal is raw.
        let signals = Signals::new()?;
        let raw = RawMode::enter()?;
        Ok(Self {
            is_shown: io::stdout().is_terminal(),
            raw,
            signals,
            display: Display::new(printer),
            picture: Picture::new(size().unwrap_or(NO_TERMINAL), place.allows),
            notices: Notices::default(),
            keyboard: Keyboard::new(),
            standing: watch::Sender::new(if place.is_observer { Standing::Looks } else { Standing::Types }),
            control: String::new(),
            asked_for_control: place.takes,
            is_torn: false,
            place,
        })
    }

    /// Turns an observer into a participant.
    pub fn join(&mut self) {
        self.place.is_observer = false;
        self.asked_for_control = true;
        self.standing.send_replace(Standing::Types);
    }

    /// Writes the sequences that prepare the terminal for a prompt.
    fn show_leaving(&mut self, is_exit: bool) {
        if self.is_shown {
            let last = self.picture.leave(is_exit);
            self.display.show_last(last);
            shows_alternate(false);
        }
    }

    /// Restores the terminal for a prompt. Returns `false` if the terminal accepts no output: a write to it would
    /// block.
    pub async fn stand_up(mut self, end: &End) -> bool {
        let is_exit = matches!(end, End::Exited(_));
        self.show_leaving(is_exit);
        let takes_words = self.display.settle(LAST_LOOK).await;
        if let Some(raw) = self.raw.as_ref().filter(|_| !is_exit) {
            raw.forget_input();
        }
        takes_words || !self.is_shown
    }

    pub async fn hold(&mut self, mut shell: Shell) -> End {
        let (asks, mut asked) = mpsc::channel(ASKS);
        let typing = type_in(self.keyboard.clone(), self.place.escape, shell.input.clone(), self.standing.clone(), asks);
        let mut typing = AbortOnDropHandle::new(tokio::spawn(typing));
        let mut has_typed_all = false;
        loop {
            if self.is_torn && self.display.has_room() {
                self.is_torn = false;
                self.draw(Picture::redraw);
            }
            self.refresh_words();
            let has_room = self.display.has_room();
            let changes_at = self.notices.changes_at(Instant::now());
            tokio::select! {
                event = shell.output.next(), if has_room => match event {
                    Some(Ok(event)) => if let Some(end) = self.take(event) {
                        return end;
                    },
                    Some(Err(e)) => return End::Failed(explained(e)),
                    None => return End::Left,
                },
                shown = self.display.pass_on(), if !has_room => match shown {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return self.leave(shell).await,
                    Err(e) => return End::Failed(e.into()),
                },
                Some(ask) = asked.recv() => match ask {
                    Asked::Leave => return self.leave(shell).await,
                    Asked::Join if self.place.may_join => return End::Joins,
                    Asked::Suspend => self.suspend(&shell.input).await,
                    ask => self.answer(&ask),
                },
                typed = &mut typing, if !has_typed_all => match typed {
                    // The connection broke during input: the reading half reports the better error.
                    Ok(_) => has_typed_all = true,
                    Err(e) => return End::Failed(Failure::new(format!("reading the keyboard: {e}"))),
                },
                _ = self.signals.resized.recv() => self.is_resized(&shell.input).await,
                _ = self.signals.stop.recv() => self.suspend(&shell.input).await,
                _ = self.signals.continued.recv() => self.is_continued(&shell.input).await,
                () = self.signals.ending.asked_for() => return self.leave(shell).await,
                () = sleep_until(changes_at.unwrap_or_else(Instant::now)), if changes_at.is_some() => {}
            }
        }
    }

    /// Releases control, so that others need not wait for this client to return.
    async fn leave(&self, mut shell: Shell) -> End {
        let going = async {
            if *self.standing.borrow() == Standing::Types {
                shell.input.control(ControlAction::Release).await?;
            }
            shell.input.close().await?;
            while shell.output.next().await.is_some() {}
            Ok::<(), ClientError>(())
        };
        // If the notification fails, the sandbox detects the closed connection on its own.
        let _ = timeout(FAREWELL, going).await;
        End::Left
    }

    /// Handles keyboard requests that concern only the screen.
    fn answer(&mut self, ask: &Asked) {
        match ask {
            Asked::Help => self.notices.say(&self.place.escape.help()),
            Asked::Status => self.place.has_status = !self.place.has_status,
            Asked::Redraw => self.draw(Picture::redraw),
            Asked::TookControl => self.asked_for_control = true,
            Asked::TypedInVain | Asked::Join => self.typed_in_vain(),
            Asked::Leave | Asked::Suspend => {}
        }
    }

    fn take(&mut self, event: ShellEvent) -> Option<End> {
        match event {
            ShellEvent::Output(bytes) if !self.is_shown => self.show(bytes.to_vec()),
            ShellEvent::Keyframe { bytes, .. } if !self.is_shown => self.show(bytes.to_vec()),
            ShellEvent::Output(bytes) => {
                self.draw(|picture| picture.output(&bytes));
                break_where_told(&bytes);
            }
            ShellEvent::Keyframe { cols, rows, bytes } => self.draw(|picture| picture.keyframe(cols, rows, &bytes)),
            ShellEvent::Ready(ready) => {
                self.draw(|picture| picture.shell_resized(ready.cols, ready.rows));
                if self.asked_for_control && ready.controller.is_some() && ready.yours != Some(true) {
                    // The request for control was sent earlier on the same connection as the keys, so the keys already
                    // count.
                    self.control = "taking control".to_owned();
                } else {
                    self.is_controlled_by(ready.controller, ready.yours, true);
                }
            }
            ShellEvent::Control { controller, yours } => self.is_controlled_by(controller, yours, false),
            ShellEvent::Resized { cols, rows } => {
                self.draw(|picture| picture.shell_resized(cols, rows));
                self.compare_size(cols, rows);
            }
            ShellEvent::Gap { .. } => self.notices.say("some output was lost"),
            ShellEvent::Reconnecting { .. } => {
                let advice = match self.place.escape {
                    EscapeKey::None => String::new(),
                    key => format!(" · {} leaves", key.then(".")),
                };
                self.notices.is_lost(Instant::now(), &advice);
            }
            ShellEvent::Reconnected => self.notices.is_back(Instant::now()),
            ShellEvent::InputDropped { bytes } => {
                self.notices.say(&format!("{bytes} bytes typed without a connection were too old and were not sent"));
            }
            ShellEvent::Refused(failure) if failure.is(ErrorCode::Forbidden) => {
                if std::mem::take(&mut self.asked_for_control) {
                    self.control = "somebody else has control".to_owned();
                }
                // An observer's resize is refused as well, which the user need not know.
                if *self.standing.borrow() == Standing::Types && !self.place.is_observer {
                    self.ring();
                    self.notices.say(&format!("control is elsewhere; {} takes it", self.place.escape.then("t")));
                }
            }
            ShellEvent::Refused(failure) => {
                self.ring();
                self.notices.say(&failure.message);
            }
            ShellEvent::Exit { exit_code, .. } => return Some(End::Exited(exit_code)),
        }
        None
    }

    fn draw(&mut self, change: impl FnOnce(&mut Picture) -> Vec<u8>) {
        let bytes = change(&mut self.picture);
        if self.is_shown {
            shows_alternate(self.picture.is_alternate());
            self.show(bytes);
        }
    }

    fn show(&mut self, bytes: Vec<u8>) {
        self.is_torn |= !self.display.show(bytes);
    }

    /// Updates the overlaid status message.
    fn refresh_words(&mut self) {
        let status = self.place.has_status.then(|| {
            let (cols, rows) = self.picture.shell_size();
            let connection = if self.notices.has_connection() { "connected" } else { "no connection" };
            format!("{} · {} · {connection} · {cols}×{rows}", self.place.name, self.control)
        });
        self.notices.set_status(status);
        let words = self.notices.words(Instant::now());
        self.draw(|picture| picture.say(words));
    }

    /// Updates the participant in control and informs the keyboard whether its input is accepted.
    fn is_controlled_by(&mut self, controller: Option<Controller>, yours: Option<bool>, is_first: bool) {
        let asked = std::mem::take(&mut self.asked_for_control);
        let is_mine = |c: &Controller| yours.unwrap_or_else(|| self.place.me.as_ref().map_or(asked || is_first, |me| *me == c.principal));
        let is_free = controller.is_none();
        let other = controller.filter(|c| self.place.is_observer || !is_mine(c));
        self.control = match &other {
            Some(c) if self.place.me.as_ref() == Some(&c.principal) => "another terminal of yours has control".to_owned(),
            Some(c) => format!("{} ({}) has control", c.principal, c.actor.as_str()),
            None if self.place.is_observer => "nobody has control".to_owned(),
            None if is_free => "nobody has control; typing takes it".to_owned(),
            None => "you have control".to_owned(),
        };
        self.draw(|picture| picture.set_watched(other.is_some() || is_free));
        if !self.place.is_observer {
            self.standing.send_replace(other.as_ref().map_or(Standing::Types, |_| Standing::Waits(self.control.clone())));
        }
        match other {
            None if is_first => {}
            Some(_) if !self.place.is_observer || self.place.may_join => {
                self.notices.say(&format!("{} · {TAKE_KEY_NAME} takes it", self.control));
            }
            _ => self.notices.say(&self.control),
        }
    }

    fn compare_size(&mut self, cols: u16, rows: u16) {
        let is_watching = self.place.is_observer || *self.standing.borrow() != Standing::Types;
        if is_watching && size().is_some_and(|(c, r)| c < cols || r < rows) {
            self.notices.say(&format!("this shell is {cols}×{rows}, larger than your terminal: you see a part of it"));
        }
    }

    fn typed_in_vain(&mut self) {
        self.ring();
        let words = match &*self.standing.borrow() {
            Standing::Waits(words) => format!("{words} · {TAKE_KEY_NAME} takes it"),
            Standing::Looks if self.place.may_join => format!("you only look · {TAKE_KEY_NAME} takes part"),
            Standing::Looks => "you only look, and may not do more here".to_owned(),
            Standing::Types => return,
        };
        self.notices.say(&words);
    }

    fn ring(&mut self) {
        if self.is_shown && self.notices.rings(Instant::now()) {
            self.show(BELL.to_vec());
        }
    }

    async fn is_resized(&mut self, input: &ShellInput) {
        let Some((cols, rows)) = size() else { return };
        self.draw(|picture| picture.resized_here((cols, rows)));
        if !self.place.is_observer {
            // On a lost connection the size is kept for the next one.
            let _ = input.resize(cols, rows).await;
        }
    }

    /// Returns the terminal to the parent process and stops until SIGCONT.
    async fn suspend(&mut self, input: &ShellInput) {
        self.show_leaving(false);
        self.display.settle(LAST_LOOK).await;
        if let Some(raw) = &self.raw {
            raw.pause();
        }
        stop_here();
        // The SIGCONT that resumed this process is also delivered as a signal.
        let _ = timeout(FAREWELL, self.signals.continued.recv()).await;
        self.is_continued(input).await;
    }

    /// Restores raw mode and the screen: other programs may have used the terminal.
    async fn is_continued(&mut self, input: &ShellInput) {
        if let Some(raw) = &self.raw
            && let Err(error) = raw.again()
        {
            tracing::debug!(%error, "the terminal can't be made raw again");
        }
        self.draw(Picture::redraw);
        self.is_resized(input).await;
    }
}

/// A shell that is not found after a reconnect has ended in the meantime.
fn explained(error: ClientError) -> Failure {
    if error.is(ErrorCode::ShellNotFound) {
        return Failure::new("the shell ended while the connection was lost, or there is none of that name")
            .advise("`cobox ps` shows the shells there are; `cobox shell` without --observe starts one");
    }
    error.into()
}
