//! Mouse handling: in cobox's own panes it focuses, scrolls and selects; in the shell, events go to a program that
//! enabled the mouse.

use crossterm::event::{MouseButton, MouseEvent, MouseEventKind};
use ratatui::{
    layout::{Position, Rect},
    widgets::Block,
};

use super::{
    app::{Overlay, State},
    encode,
    layout::Pane,
    message::Effect,
    view,
};

/// Lines per step of the wheel.
const WHEEL_LINES: isize = 3;

impl State {
    pub(super) fn mouse(&mut self, mouse: &MouseEvent) -> Vec<Effect> {
        let Some(places) = self.places() else { return Vec::new() };
        if self.overlay.is_none()
            && let Some(area) = places.pane(Pane::Terminal)
            && let Some(bytes) = self.for_program(mouse, area)
        {
            return vec![Effect::Type(bytes)];
        }
        let by = match mouse.kind {
            MouseEventKind::ScrollUp => -WHEEL_LINES,
            MouseEventKind::ScrollDown => WHEEL_LINES,
            MouseEventKind::Down(MouseButton::Left) => 0,
            _ => return Vec::new(),
        };
        match &mut self.overlay {
            Some(Overlay::Pick(picker)) => {
                let clicked = (by == 0).then(|| view::picked_at(picker, self.size, mouse.column, mouse.row)).flatten();
                picker.select(by.signum());
                return clicked.map(|at| self.pick(at)).unwrap_or_default();
            }
            Some(Overlay::Help { scroll }) => {
                *scroll = scroll.saturating_add_signed(by as i16).min(view::HELP_LINES);
                return Vec::new();
            }
            None => {}
        }
        if let (0, Some(tab)) = (by, places.tab_at(mouse.column, mouse.row)) {
            self.look_at(tab);
            return Vec::new();
        }
        let Some((pane, rect)) = places.at(mouse.column, mouse.row) else { return Vec::new() };
        if by != 0 {
            self.scroll(pane, by);
            return Vec::new();
        }
        self.look_at(pane);
        match pane {
            Pane::Chat => {
                if let Some(number) = view::chat::entry_at(self, rect, mouse.row) {
                    self.chat.turn(number);
                }
                Vec::new()
            }
            Pane::Files if self.files.diff.is_none() => match view::files::node_at(&self.files, rect, mouse.row) {
                Some(at) => {
                    self.files.selected = at;
                    self.open_file()
                }
                None => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// Encodes a mouse event for the program in the shell. `None` if the program did not enable it, or if the event is
    /// not for it: outside the pane, while another user has control, while scrolled back, and for the click that moves
    /// the focus to the pane.
    fn for_program(&mut self, mouse: &MouseEvent, area: Rect) -> Option<Vec<u8>> {
        let inner = Block::bordered().inner(area);
        let point = Position::new(mouse.column, mouse.row);
        let is_held = self.shell.holds_button;
        if matches!(mouse.kind, MouseEventKind::Up(_)) {
            self.shell.holds_button = false;
        }
        let is_meant = match mouse.kind {
            // A button pressed in the pane belongs to it until it is released.
            MouseEventKind::Up(_) | MouseEventKind::Drag(_) => is_held,
            MouseEventKind::Down(_) | MouseEventKind::Moved => self.focus == Pane::Terminal && inner.contains(point),
            _ => inner.contains(point),
        };
        if !is_meant || !self.shell.types(self.me()) {
            return None;
        }
        let window = self.shell.emulator.window(inner.height)?;
        let screen = self.shell.emulator.screen().filter(|screen| screen.scrollback() == 0)?;
        let (rows, cols) = screen.size();
        let col = mouse.column.clamp(inner.x, inner.right().saturating_sub(1)) - inner.x;
        let row = mouse.row.clamp(inner.y, inner.bottom().saturating_sub(1)) - inner.y + window.top();
        if col >= cols || row >= rows {
            return None;
        }
        let bytes = encode::mouse(mouse, (col, row), screen.mouse_protocol_mode(), screen.mouse_protocol_encoding())?;
        if matches!(mouse.kind, MouseEventKind::Down(_)) {
            self.shell.holds_button = true;
        }
        Some(bytes)
    }
}
