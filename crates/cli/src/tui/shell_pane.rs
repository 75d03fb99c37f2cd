//! The pane of the shared shell: its screen, the participant in control, and whether that is this client.

use cobox_protocol::frame::Controller;

use super::{
    emulator::Emulator,
    message::{Effect, ShellUpdate},
};

pub struct ShellPane {
    /// Name of the shell; `None` for the default shell that all users share.
    pub name: Option<String>,
    pub emulator: Emulator,
    pub status: ShellStatus,
    pub controller: Option<Controller>,
    /// Whether this terminal has control, if the sandbox reports it: the same user may be attached from another
    /// terminal.
    yours: Option<bool>,
    pub is_observer: bool,
    /// A message for the user, until the next key.
    pub message: Option<String>,
    is_control_requested: bool,
    /// A mouse button was pressed in the pane and is not released yet.
    pub has_button_pressed: bool,
    /// Columns and rows of the pane.
    pane_size: (u16, u16),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShellStatus {
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
            status: ShellStatus::Off,
            controller: None,
            yours: None,
            is_observer: false,
            message: None,
            is_control_requested: false,
            has_button_pressed: false,
            pane_size: (80, 24),
        }
    }

    pub fn join(&mut self, visit: u64, name: Option<String>, may_type: bool) -> Effect {
        *self = Self { name: name.clone(), status: ShellStatus::Joining, is_observer: !may_type, pane_size: self.pane_size, ..Self::new() };
        let (cols, rows) = self.pane_size;
        Effect::JoinShell { visit, name, cols, rows, observe: self.is_observer }
    }

    pub fn is_live(&self) -> bool {
        self.status == ShellStatus::Live
    }

    /// Whether input is accepted: no other participant has control.
    pub fn accepts_input(&self, principal: Option<&str>) -> bool {
        let is_mine = |c: &Controller| self.yours.unwrap_or_else(|| is_principal(c, principal).unwrap_or(true));
        self.is_live() && !self.is_observer && self.controller.as_ref().is_none_or(is_mine)
    }

    /// The other participant that has control, as text.
    pub fn other_controller(&self, principal: Option<&str>) -> Option<String> {
        let controller = self.controller.as_ref().filter(|_| !self.accepts_input(principal))?;
        Some(match is_principal(controller, principal) {
            Some(true) => "another terminal of yours".to_owned(),
            _ => format!("{} ({})", cobox_langgraph::clean(&controller.principal, 32), controller.actor.as_str()),
        })
    }

    /// Handles a new size of the pane. The shell is resized if this client has control.
    pub fn resize(&mut self, cols: u16, rows: u16, principal: Option<&str>) -> Option<Effect> {
        if self.pane_size == (cols, rows) {
            return None;
        }
        self.pane_size = (cols, rows);
        (self.accepts_input(principal) && self.controller.is_some()).then_some(Effect::ResizeShell(cols, rows))
    }

    pub fn take_control(&mut self) -> Option<Effect> {
        if self.is_observer {
            self.message = Some("read-only; you have no permission to type here".to_owned());
            return None;
        }
        self.is_control_requested = true;
        self.is_live().then_some(Effect::TakeControl)
    }

    /// Input for the shell. If it isn't accepted, `message` has the reason.
    pub fn key(&mut self, bytes: Vec<u8>, principal: Option<&str>) -> Option<Effect> {
        self.message = None;
        if bytes.is_empty() {
            return None;
        }
        if self.accepts_input(principal) {
            self.emulator.scroll_to_end();
            return Some(Effect::Type(bytes));
        }
        self.message = Some(match (&self.status, &self.controller) {
            (ShellStatus::Live, _) if self.is_observer => "read-only; you have no permission to type here".to_owned(),
            (ShellStatus::Live, Some(_)) => format!("{} has control; Alt-t takes it", self.other_controller(principal).unwrap_or_default()),
            (ShellStatus::Joining, _) => "attaching to the shell".to_owned(),
            _ => "no shell: attach to one with /terminal".to_owned(),
        });
        None
    }

    pub fn update(&mut self, update: ShellUpdate, principal: Option<&str>) -> Option<Effect> {
        match update {
            ShellUpdate::Ready { cols, rows, controller, yours } => {
                self.status = ShellStatus::Live;
                (self.controller, self.yours) = (controller, yours);
                self.emulator.redraw(cols, rows, b"");
                return self.resize_to_pane(principal, (cols, rows));
            }
            ShellUpdate::Output(bytes) => {
                self.emulator.process(&bytes);
                crate::terminal::panic_on_marker(&bytes);
            }
            ShellUpdate::Keyframe { cols, rows, bytes } => self.emulator.redraw(cols, rows, &bytes),
            ShellUpdate::Resized { cols, rows } => self.emulator.resize(cols, rows),
            ShellUpdate::Control { controller, yours } => {
                (self.controller, self.yours) = (controller, yours);
                if std::mem::take(&mut self.is_control_requested) && self.accepts_input(principal) {
                    let (cols, rows) = self.pane_size;
                    return Some(Effect::ResizeShell(cols, rows));
                }
            }
            ShellUpdate::Message(text) => self.message = Some(text),
            ShellUpdate::Exited(code) => self.status = ShellStatus::Ended(format!("the shell ended with {code}")),
            ShellUpdate::Failed(reason) => self.status = ShellStatus::Ended(reason),
        }
        None
    }

    /// Resizes the shell to the pane if this client has control and the sizes differ.
    fn resize_to_pane(&self, principal: Option<&str>, size: (u16, u16)) -> Option<Effect> {
        let (cols, rows) = self.pane_size;
        (self.accepts_input(principal) && self.controller.is_some() && size != self.pane_size).then_some(Effect::ResizeShell(cols, rows))
    }
}

fn is_principal(controller: &Controller, principal: Option<&str>) -> Option<bool> {
    principal.map(|principal| controller.principal == principal)
}
