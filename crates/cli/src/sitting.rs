//! Sitting at a shell: its output on this terminal, this keyboard in it, and who has control said as it changes.

use std::{io::IsTerminal, time::Duration};

use cobox_client::{ClientError, Shell, ShellEvent};
use cobox_protocol::{ErrorCode, frame::Controller};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    failure::Failure,
    notice::Notices,
    printer::Printer,
    terminal::{EMPTY, Screen, size},
    typist::{Asked, Standing, type_in},
};

/// Asks of the keyboard on their way to the screen.
const ASKS: usize = 4;
/// A refusal this long after the last key was of something else, such as a resize.
const TYPED_JUST_NOW: Duration = Duration::from_secs(2);
/// For the other side to hear that we leave.
const FAREWELL: Duration = Duration::from_millis(500);
const HELP: &str = "after Enter: ~. leaves, ~t takes control, ~r releases it, ~~ types a ~";

/// Why it is over.
pub enum End {
    Exited(i32),
    Left,
    Failed(Failure),
}

pub struct Sitting {
    printer: Printer,
    screen: Screen,
    notices: Notices,
    standing: watch::Sender<Standing>,
    is_observer: bool,
    /// Whom the sandbox knows us as, where that is known here.
    me: Option<String>,
    asked_for_control: bool,
    typed_at: Option<Instant>,
}

impl Sitting {
    pub fn new(printer: Printer, is_observer: bool, me: Option<String>) -> Self {
        let standing = watch::Sender::new(if is_observer { Standing::Looks } else { Standing::Types });
        let notices = Notices::new(printer, std::io::stdout().is_terminal());
        Self { printer, screen: Screen::default(), notices, standing, is_observer, me, asked_for_control: false, typed_at: None }
    }

    /// What puts the terminal into a state fit for a prompt.
    pub fn reset(&self) -> Vec<u8> {
        self.screen.reset()
    }

    pub async fn hold(&mut self, mut shell: Shell) -> End {
        let mut signals = match Signals::new() {
            Ok(signals) => signals,
            Err(e) => return End::Failed(e.into()),
        };
        let (asks, mut asked) = mpsc::channel(ASKS);
        let mut typing = AbortOnDropHandle::new(tokio::spawn(type_in(shell.input.clone(), self.standing.clone(), asks)));
        let mut has_typed_all = false;
        loop {
            tokio::select! {
                event = shell.output.next() => match event {
                    Some(Ok(event)) => match self.show(event) {
                        Ok(None) => {}
                        Ok(Some(end)) => return end,
                        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return self.leave(shell).await,
                        Err(e) => return End::Failed(e.into()),
                    },
                    Some(Err(e)) => return End::Failed(explained(e)),
                    None => return End::Left,
                },
                Some(ask) = asked.recv() => match ask {
                    Asked::Leave => return self.leave(shell).await,
                    Asked::Help => {
                        self.notices.forget();
                        self.notices.say(&self.screen, HELP);
                    }
                    Asked::TookControl => self.asked_for_control = true,
                    Asked::TypedInVain => self.typed_in_vain(),
                },
                typed = &mut typing, if !has_typed_all => match typed {
                    // The connection broke while typing: what the reading half says of it is the better message.
                    Ok(_) => has_typed_all = true,
                    Err(e) => return End::Failed(Failure::new(format!("reading the keyboard: {e}"))),
                },
                _ = signals.resized.recv() => if let (Some((cols, rows)), false) = (size(), self.is_observer) {
                    // On a lost connection it is kept for the next one.
                    let _ = shell.input.resize(cols, rows).await;
                },
                () = signals.ending.asked_for() => return self.leave(shell).await,
            }
        }
    }

    /// Lets go of control, so that others need not wait whether we come back.
    async fn leave(&self, mut shell: Shell) -> End {
        let going = async {
            if *self.standing.borrow() == Standing::Types {
                shell.input.control(cobox_protocol::frame::ControlAction::Release).await?;
            }
            shell.input.close().await?;
            while shell.output.next().await.is_some() {}
            Ok::<(), ClientError>(())
        };
        // Whoever doesn't hear it finds out by itself.
        let _ = tokio::time::timeout(FAREWELL, going).await;
        End::Left
    }

    fn show(&mut self, event: ShellEvent) -> std::io::Result<Option<End>> {
        match event {
            ShellEvent::Output(bytes) => self.draw(&bytes)?,
            ShellEvent::Keyframe { bytes, .. } => {
                self.draw(EMPTY)?;
                self.draw(&bytes)?;
                self.notices.forget();
            }
            ShellEvent::Ready(ready) => self.is_controlled_by(ready.controller, true),
            ShellEvent::Control { controller } => self.is_controlled_by(controller, false),
            ShellEvent::Resized { cols, rows } => {
                if self.is_observer || *self.standing.borrow() != Standing::Types {
                    self.compare_size(cols, rows);
                }
            }
            ShellEvent::Gap { .. } => self.notices.say(&self.screen, "some output was lost"),
            ShellEvent::Reconnecting { .. } => {
                self.notices.forget();
                self.notices.say(&self.screen, "the connection is lost; trying again (Enter ~. leaves)");
            }
            ShellEvent::Reconnected => self.notices.say(&self.screen, "connected again"),
            ShellEvent::InputDropped { bytes } => {
                self.notices.say(&self.screen, &format!("{bytes} bytes typed while away were too old and were not sent"));
            }
            ShellEvent::Refused(failure) if failure.is(ErrorCode::Forbidden) || failure.is(ErrorCode::ShellBusy) => {
                self.notices.ring();
                if failure.is(ErrorCode::ShellBusy) {
                    self.notices.say(&self.screen, &failure.message);
                } else if *self.standing.borrow() == Standing::Types && !self.is_observer {
                    // The same principal at another terminal: only the sandbox can tell the two apart.
                    self.notices.say(&self.screen, "control is elsewhere; Enter ~t takes it");
                }
            }
            ShellEvent::Refused(failure) => self.notices.say(&self.screen, &failure.message),
            ShellEvent::Exit { exit_code, .. } => return Ok(Some(End::Exited(exit_code))),
        }
        Ok(None)
    }

    fn draw(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.screen.see(bytes);
        self.printer.stream(bytes)
    }

    /// Says who types now, and lets the keyboard know whether it does.
    fn is_controlled_by(&mut self, controller: Option<Controller>, is_first: bool) {
        let asked = std::mem::take(&mut self.asked_for_control);
        let is_me = |c: &Controller| self.me.as_ref().map_or(asked || is_first, |me| *me == c.principal);
        let is_free = controller.is_none();
        let other = controller.filter(|c| self.is_observer || !is_me(c));
        let words = match &other {
            Some(c) => format!("{} ({}) has control", c.principal, c.actor.word()),
            None if self.is_observer => "nobody has control".to_owned(),
            None if is_free => "nobody has control; typing takes it".to_owned(),
            None => "you have control".to_owned(),
        };
        if !self.is_observer {
            self.standing.send_replace(other.as_ref().map_or(Standing::Types, |_| Standing::Waits(words.clone())));
        }
        match other {
            None if is_first => {}
            Some(_) if !self.is_observer => self.notices.say(&self.screen, &format!("{words}; Enter ~t takes it")),
            _ => self.notices.say(&self.screen, &words),
        }
    }

    fn compare_size(&mut self, cols: u16, rows: u16) {
        if size().is_some_and(|(c, r)| c < cols || r < rows) {
            self.notices.say(&self.screen, &format!("this shell is {cols}×{rows}, larger than your terminal"));
        }
    }

    fn typed_in_vain(&mut self) {
        self.notices.ring();
        let now = Instant::now();
        if self.typed_at.replace(now).is_none_or(|at| now.duration_since(at) > TYPED_JUST_NOW) {
            self.notices.forget();
        }
        let words = match &*self.standing.borrow() {
            Standing::Waits(words) => format!("{words}; Enter ~t takes it"),
            Standing::Looks => "you only look; Enter ~. leaves".to_owned(),
            Standing::Types => return,
        };
        self.notices.say(&self.screen, &words);
    }
}

/// A shell that is not found again has ended meanwhile.
fn explained(error: ClientError) -> Failure {
    if error.is(ErrorCode::ShellNotFound) {
        return Failure::new("the shell ended while the connection was lost, or there is none of that name")
            .advise("`cobox ps` shows the shells there are; `cobox shell` without --observe starts one");
    }
    error.into()
}

struct Signals {
    resized: Signal,
    ending: Ending,
}

struct Ending([Signal; 4]);

impl Signals {
    fn new() -> std::io::Result<Self> {
        let ending = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit()];
        let [terminated, hung_up, interrupted, quit] = ending.map(signal);
        Ok(Self { resized: signal(SignalKind::window_change())?, ending: Ending([terminated?, hung_up?, interrupted?, quit?]) })
    }
}

impl Ending {
    /// Somebody wants this program to end.
    async fn asked_for(&mut self) {
        let [terminated, hung_up, interrupted, quit] = &mut self.0;
        tokio::select! {
            _ = terminated.recv() => {}
            _ = hung_up.recv() => {}
            _ = interrupted.recv() => {}
            _ = quit.recv() => {}
        }
    }
}
