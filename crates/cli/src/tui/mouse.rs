//! Mouse handling: in cobox's own panes it focuses, scrolls and selects; in the shell, events go to a program that
//! enabled the mouse.

use crossterm::event::{MouseButton, MouseEvent, MouseEventKind};
use ratatui::{
    layout::{Position, Rect},
    widgets::Block,
};

use super::{
    app_state::{AppState, Overlay},
    key_encoding,
    layout::Pane,
    message::Effect,
    view,
};

/// Lines per step of the wheel.
const WHEEL_LINES: isize = 3;

impl AppState {
    pub(super) fn mouse(&mut self, mouse: &MouseEvent) -> Vec<Effect> {
        let Some(layout) = self.layout() else { return Vec::new() };
        if self.overlay.is_none()
            && let Some(area) = layout.pane(Pane::Terminal)
            && let Some(bytes) = self.encode_for_program(mouse, area)
        {
            return vec![Effect::Type(bytes)];
        }
        let delta = match mouse.kind {
            MouseEventKind::ScrollUp => -WHEEL_LINES,
            MouseEventKind::ScrollDown => WHEEL_LINES,
            MouseEventKind::Down(MouseButton::Left) => 0,
            _ => return Vec::new(),
        };
        match &mut self.overlay {
            Some(Overlay::Pick(picker)) => {
                let clicked = (delta == 0).then(|| view::item_at(picker, self.size, mouse.column, mouse.row)).flatten();
                picker.select(delta.signum());
                return clicked.map(|at| self.choose_item(at)).unwrap_or_default();
            }
            Some(Overlay::Help { scroll }) => {
                *scroll = scroll.saturating_add_signed(delta as i16).min(view::HELP_LINES);
                return Vec::new();
            }
            None => {}
        }
        if let (0, Some(pane)) = (delta, layout.tab_at(mouse.column, mouse.row)) {
            self.focus_pane(pane);
            return Vec::new();
        }
        let Some((pane, rect)) = layout.pane_at(mouse.column, mouse.row) else { return Vec::new() };
        if delta != 0 {
            self.scroll(pane, delta);
            return Vec::new();
        }
        self.focus_pane(pane);
        match pane {
            Pane::Chat => {
                if let Some(number) = view::chat::entry_at(self, rect, mouse.row) {
                    self.chat.toggle_expanded(number);
                }
                Vec::new()
            }
            Pane::Files if self.files.diff.is_none() => match view::files::node_at(&self.files, rect, mouse.row) {
                Some(at) => {
                    self.files.selected = at;
                    self.open_selected_file()
                }
                None => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// Encodes a mouse event for the program in the shell. `None` if the program did not enable it, or if the event is
    /// not for it: outside the pane, while another user has control, while scrolled back, and for the click that moves
    /// the focus to the pane.
    fn encode_for_program(&mut self, mouse: &MouseEvent, area: Rect) -> Option<Vec<u8>> {
        let inner = Block::bordered().inner(area);
        let point = Position::new(mouse.column, mouse.row);
        let is_button_held = self.shell.has_button_pressed;
        if matches!(mouse.kind, MouseEventKind::Up(_)) {
            self.shell.has_button_pressed = false;
        }
        let is_for_pane = match mouse.kind {
            // A button pressed in the pane belongs to it until it is released.
            MouseEventKind::Up(_) | MouseEventKind::Drag(_) => is_button_held,
            MouseEventKind::Down(_) | MouseEventKind::Moved => self.focus == Pane::Terminal && inner.contains(point),
            _ => inner.contains(point),
        };
        if !is_for_pane || !self.shell.accepts_input(self.principal()) {
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
        let bytes = key_encoding::encode_mouse(mouse, (col, row), screen.mouse_protocol_mode(), screen.mouse_protocol_encoding())?;
        if matches!(mouse.kind, MouseEventKind::Down(_)) {
            self.shell.has_button_pressed = true;
        }
        Some(bytes)
    }
}
