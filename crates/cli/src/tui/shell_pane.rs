//! The pane of the shared shell: its screen, the participant in control, and whether that is this client.

use cobox_protocol::frame::Controller;

use super::{
    emulator::Emulator,
    message::{Effect, ShellNews},
};

pub struct ShellPane {
    /// Name of the shell; `None` for the default shell that all users share.
    pub name: Option<String>,
    pub emulator: Emulator,
    pub status: Status,
    pub controller: Option<Controller>,
    /// Whether this terminal has control, if the sandbox reports it: the same user may be attached from another
    /// terminal.
    yours: Option<bool>,
    pub is_observer: bool,
    /// A message for the user, until the next key.
    pub said: Option<String>,
    asked_for_control: bool,
    /// A mouse button was pressed in the pane and is not released yet.
    pub holds_button: bool,
    /// Columns and rows of the pane.
    room: (u16, u16),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    Off,
    Joining,
    Live,
    Ended(String),
}

impl ShellPane {
    pub fn new() -> Self {
        Self {
            name: None,
            emulator: Emulator::new(80, 24),
            status: Status::Off,
            controller: None,
            yours: None,
            is_observer: false,
            said: None,
            asked_for_control: false,
            holds_button: false,
            room: (80, 24),
        }
    }

    pub fn join(&mut self, visit: u64, name: Option<String>, may_type: bool) -> Effect {
        *self = Self { name: name.clone(), status: Status::Joining, is_observer: !may_type, room: self.room, ..Self::new() };
        let (cols, rows) = self.room;
        Effect::JoinShell { visit, name, cols, rows, observe: self.is_observer }
    }

    pub fn is_live(&self) -> bool {
        self.status == Status::Live
    }

    /// Whether input is accepted: no other participant has control.
    pub fn types(&self, me: Option<&str>) -> bool {
        let is_mine = |c: &Controller| self.yours.unwrap_or_else(|| is_of(c, me).unwrap_or(true));
        self.is_live() && !self.is_observer && self.controller.as_ref().is_none_or(is_mine)
    }

    /// The other participant that has control, as text.
    pub fn other(&self, me: Option<&str>) -> Option<String> {
        let controller = self.controller.as_ref().filter(|_| !self.types(me))?;
        Some(match is_of(controller, me) {
            Some(true) => "another terminal of yours".to_owned(),
            _ => format!("{} ({})", cobox_langgraph::clean(&controller.principal, 32), controller.actor.as_str()),
        })
    }

    /// Handles a new size of the pane. The shell is resized if this client has control.
    pub fn fit(&mut self, cols: u16, rows: u16, me: Option<&str>) -> Option<Effect> {
        if self.room == (cols, rows) {
            return None;
        }
        self.room = (cols, rows);
        (self.types(me) && self.controller.is_some()).then_some(Effect::ResizeShell(cols, rows))
    }

    pub fn take_control(&mut self) -> Option<Effect> {
        if self.is_observer {
            self.said = Some("you may only look here".to_owned());
            return None;
        }
        self.asked_for_control = true;
        self.is_live().then_some(Effect::TakeControl)
    }

    /// Input for the shell. If it isn't accepted, `said` has the reason.
    pub fn key(&mut self, bytes: Vec<u8>, me: Option<&str>) -> Option<Effect> {
        self.said = None;
        if bytes.is_empty() {
            return None;
        }
        if self.types(me) {
            self.emulator.scroll_to_end();
            return Some(Effect::Type(bytes));
        }
        self.said = Some(match (&self.status, &self.controller) {
            (Status::Live, _) if self.is_observer => "you may only look here".to_owned(),
            (Status::Live, Some(_)) => format!("{} has control; Alt-t takes it", self.other(me).unwrap_or_default()),
            (Status::Joining, _) => "the shell is being joined".to_owned(),
            _ => "no shell: /terminal joins one".to_owned(),
        });
        None
    }

    pub fn news(&mut self, news: ShellNews, me: Option<&str>) -> Option<Effect> {
        match news {
            ShellNews::Ready { cols, rows, controller, yours } => {
                self.status = Status::Live;
                (self.controller, self.yours) = (controller, yours);
                self.emulator.redraw(cols, rows, b"");
                return self.take_size(me, (cols, rows));
            }
            ShellNews::Output(bytes) => {
                self.emulator.process(&bytes);
                crate::terminal::panic_on_marker(&bytes);
            }
            ShellNews::Keyframe { cols, rows, bytes } => self.emulator.redraw(cols, rows, &bytes),
            ShellNews::Resized { cols, rows } => self.emulator.resize(cols, rows),
            ShellNews::Control { controller, yours } => {
                (self.controller, self.yours) = (controller, yours);
                if std::mem::take(&mut self.asked_for_control) && self.types(me) {
                    let (cols, rows) = self.room;
                    return Some(Effect::ResizeShell(cols, rows));
                }
            }
            ShellNews::Said(words) => self.said = Some(words),
            ShellNews::Exited(code) => self.status = Status::Ended(format!("the shell ended with {code}")),
            ShellNews::Failed(why) => self.status = Status::Ended(why),
        }
        None
    }

    /// Resizes the shell to the pane if this client has control and the sizes differ.
    fn take_size(&self, me: Option<&str>, size: (u16, u16)) -> Option<Effect> {
        let (cols, rows) = self.room;
        (self.types(me) && self.controller.is_some() && size != self.room).then_some(Effect::ResizeShell(cols, rows))
    }
}

fn is_of(controller: &Controller, me: Option<&str>) -> Option<bool> {
    me.map(|me| controller.principal == me)
}
