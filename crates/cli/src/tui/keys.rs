//! Interprets keys and pastes, depending on the focus.

use cobox_langgraph::Question;
use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::{
    app_state::{AppState, Overlay, PendingConfirmation},
    key_encoding,
    layout::Pane,
    message::Effect,
    picker::PickerKind,
    view,
};
use crate::chat::input_parser;

/// Lines scrolled by Page Up and Page Down.
const PAGE_LINES: isize = 10;

impl AppState {
    pub(super) fn key(&mut self, key: &KeyEvent) -> Vec<Effect> {
        if key.kind == KeyEventKind::Release {
            return Vec::new();
        }
        self.notice = None;
        let confirmation = self.pending_confirmation.take();
        let (alt, ctrl) = (key.modifiers.contains(KeyModifiers::ALT), key.modifiers.contains(KeyModifiers::CONTROL));
        if ctrl && key.code == KeyCode::Char('q') {
            return vec![Effect::Quit];
        }
        if self.overlay.is_some() {
            return self.overlay_key(key);
        }
        match key.code {
            KeyCode::Char(digit @ '1'..='5') if alt => {
                self.focus_pane(Pane::ALL[digit as usize - '1' as usize]);
                return Vec::new();
            }
            KeyCode::Char('h') if alt => {
                self.overlay = Some(Overlay::Help { scroll: 0 });
                return Vec::new();
            }
            KeyCode::F(1) if self.focus != Pane::Terminal => {
                self.overlay = Some(Overlay::Help { scroll: 0 });
                return Vec::new();
            }
            _ => {}
        }
        match self.focus {
            Pane::Terminal => self.terminal_key(key),
            Pane::Chat => self.chat_key(key, confirmation),
            Pane::Events | Pane::Files | Pane::Sync => self.list_key(key),
        }
    }

    /// All keys go to the shell, except a few that shells don't use.
    fn terminal_key(&mut self, key: &KeyEvent) -> Vec<Effect> {
        let (alt, ctrl, shift) = (
            key.modifiers.contains(KeyModifiers::ALT),
            key.modifiers.contains(KeyModifiers::CONTROL),
            key.modifiers.contains(KeyModifiers::SHIFT),
        );
        let effect = match key.code {
            KeyCode::Char(']' | '5') if ctrl => {
                self.focus_pane(Pane::Chat);
                None
            }
            KeyCode::Char('t') if alt => self.shell.take_control(),
            KeyCode::Char('r') if alt => self.shell.is_live().then_some(Effect::ReleaseControl),
            KeyCode::PageUp if shift => {
                self.shell.emulator.scroll(PAGE_LINES);
                None
            }
            KeyCode::PageDown if shift => {
                self.shell.emulator.scroll(-PAGE_LINES);
                None
            }
            _ => {
                let has_application_cursor = self.shell.emulator.screen().is_some_and(|s| s.application_cursor());
                let principal = self.principal().map(str::to_owned);
                self.shell.key(key_encoding::encode_key(key, has_application_cursor), principal.as_deref())
            }
        };
        effect.into_iter().collect()
    }

    fn chat_key(&mut self, key: &KeyEvent, confirmation: Option<PendingConfirmation>) -> Vec<Effect> {
        let (alt, ctrl, shift) = (
            key.modifiers.contains(KeyModifiers::ALT),
            key.modifiers.contains(KeyModifiers::CONTROL),
            key.modifiers.contains(KeyModifiers::SHIFT),
        );
        let is_one_line = !self.chat.editor.text().contains('\n');
        let draft = self.edit_draft();
        let editor = &mut self.chat.editor;
        match key.code {
            KeyCode::Enter if alt || shift => editor.insert("\n"),
            KeyCode::Enter => return self.submit(),
            KeyCode::Tab => match draft.or_else(|| input_parser::complete_command(editor.text())) {
                Some(done) => editor.set(&done),
                None if editor.text().starts_with('/') => {}
                None => self.focus_pane(self.focus.next(1)),
            },
            KeyCode::BackTab => self.focus_pane(self.focus.next(-1)),
            KeyCode::Esc => return self.escape(confirmation),
            KeyCode::Char('c') if ctrl => return self.interrupt(confirmation),
            KeyCode::Char('d') if ctrl && editor.is_empty() => return vec![Effect::Quit],
            KeyCode::Char('j') if ctrl => editor.insert("\n"),
            KeyCode::Char('o') if ctrl => {
                self.chat.expands_by_default = !self.chat.expands_by_default;
                self.chat.toggled.clear();
            }
            KeyCode::Char('w') if ctrl => editor.delete_word(),
            KeyCode::Char('u') if ctrl => editor.delete_to_start(),
            KeyCode::Char('a') if ctrl => editor.home(),
            KeyCode::Char('e') if ctrl => editor.end(),
            KeyCode::Left if ctrl || alt => editor.word_left(),
            KeyCode::Backspace if alt => editor.delete_word(),
            KeyCode::Backspace => editor.backspace(),
            KeyCode::Delete => editor.delete(),
            KeyCode::Left => editor.left(),
            KeyCode::Right => editor.right(),
            KeyCode::Home => editor.home(),
            KeyCode::End => editor.end(),
            KeyCode::Up if is_one_line => editor.older(),
            KeyCode::Down if is_one_line => editor.newer(),
            KeyCode::PageUp => self.scroll_chat(PAGE_LINES),
            KeyCode::PageDown => self.scroll_chat(-PAGE_LINES),
            KeyCode::Char(c) if !ctrl && !alt => editor.insert(c.encode_utf8(&mut [0; 4])),
            _ => {}
        }
        Vec::new()
    }

    /// The proposed action as an editable draft, if a question is open and the user has typed the beginning of `edit`.
    fn edit_draft(&self) -> Option<String> {
        let text = self.chat.editor.text();
        let Some(Question::Action(action)) = self.chat.review.as_ref().and_then(|r| r.next()) else { return None };
        (!text.is_empty() && "edit ".starts_with(text)).then(|| format!("edit {}", action.args))
    }

    fn escape(&mut self, confirmation: Option<PendingConfirmation>) -> Vec<Effect> {
        if !self.chat.is_running() {
            return Vec::new();
        }
        if confirmation == Some(PendingConfirmation::Cancel) {
            return self.cancel().into_iter().collect();
        }
        self.pending_confirmation = Some(PendingConfirmation::Cancel);
        self.show_notice("press Esc again to cancel the run");
        Vec::new()
    }

    fn interrupt(&mut self, confirmation: Option<PendingConfirmation>) -> Vec<Effect> {
        if self.chat.is_running() {
            return self.cancel().into_iter().collect();
        }
        if !self.chat.editor.is_empty() {
            self.chat.editor.take();
        } else if confirmation == Some(PendingConfirmation::Quit) {
            return vec![Effect::Quit];
        } else {
            self.pending_confirmation = Some(PendingConfirmation::Quit);
            self.show_notice("press Ctrl-C again to quit; the thread and sandbox keep running");
        }
        Vec::new()
    }

    fn list_key(&mut self, key: &KeyEvent) -> Vec<Effect> {
        let delta = match key.code {
            KeyCode::Up | KeyCode::Char('k') => -1,
            KeyCode::Down | KeyCode::Char('j') => 1,
            KeyCode::PageUp => -PAGE_LINES,
            KeyCode::PageDown => PAGE_LINES,
            KeyCode::Tab => {
                self.focus_pane(self.focus.next(1));
                return Vec::new();
            }
            KeyCode::BackTab => {
                self.focus_pane(self.focus.next(-1));
                return Vec::new();
            }
            KeyCode::Esc | KeyCode::Char('q') => {
                if self.focus != Pane::Files || self.files.diff.take().is_none() {
                    self.focus_pane(Pane::Chat);
                }
                return Vec::new();
            }
            KeyCode::Enter | KeyCode::Char('d') if self.focus == Pane::Files && self.files.diff.is_none() => {
                return self.open_selected_file();
            }
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                self.focus_pane(Pane::Chat);
                return Vec::new();
            }
            KeyCode::Char('?') => {
                self.overlay = Some(Overlay::Help { scroll: 0 });
                return Vec::new();
            }
            _ => return Vec::new(),
        };
        self.scroll(self.focus, delta);
        Vec::new()
    }

    pub(super) fn open_selected_file(&mut self) -> Vec<Effect> {
        let visit = self.visit;
        self.files.open_selected().map(|path| Effect::ReadFile { visit, path }).into_iter().collect()
    }

    fn overlay_key(&mut self, key: &KeyEvent) -> Vec<Effect> {
        match (&mut self.overlay, key.code) {
            (Some(Overlay::Help { scroll }), KeyCode::Down | KeyCode::PageDown) => *scroll = (*scroll + 1).min(view::HELP_LINES),
            (Some(Overlay::Help { scroll }), KeyCode::Up | KeyCode::PageUp) => *scroll = scroll.saturating_sub(1),
            (Some(Overlay::Pick(picker)), KeyCode::Down) => picker.select(1),
            (Some(Overlay::Pick(picker)), KeyCode::Up) => picker.select(-1),
            (Some(Overlay::Pick(picker)), KeyCode::PageDown) => picker.select(PAGE_LINES),
            (Some(Overlay::Pick(picker)), KeyCode::PageUp) => picker.select(-PAGE_LINES),
            (Some(Overlay::Pick(picker)), KeyCode::Enter) => {
                let at = picker.selected;
                return self.choose_item(at);
            }
            _ => self.overlay = None,
        }
        Vec::new()
    }

    /// Chooses an item of the open list.
    pub(super) fn choose_item(&mut self, at: usize) -> Vec<Effect> {
        let Some(Overlay::Pick(picker)) = self.overlay.take() else { return Vec::new() };
        picker.items.get(at).map(|item| self.apply_choice(picker.kind, &item.key)).unwrap_or_default()
    }

    fn apply_choice(&mut self, kind: PickerKind, key: &str) -> Vec<Effect> {
        match kind {
            PickerKind::Thread => self.enter_thread(Some(key.to_owned())),
            PickerKind::Assistant => {
                self.assistant = self.assistants.iter().find(|a| a.id == key).cloned();
                Vec::new()
            }
            PickerKind::Sandbox => self.use_sandbox(key),
        }
    }

    pub(super) fn pasted(&mut self, text: &str) -> Vec<Effect> {
        if self.overlay.is_some() {
            return Vec::new();
        }
        match self.focus {
            Pane::Terminal => {
                let is_bracketed = self.shell.emulator.screen().is_some_and(|s| s.bracketed_paste());
                let principal = self.principal().map(str::to_owned);
                self.shell.key(key_encoding::encode_paste(text, is_bracketed), principal.as_deref()).into_iter().collect()
            }
            // If no other pane takes text, a paste goes to the chat.
            _ => {
                self.chat.editor.insert(text);
                self.focus_pane(Pane::Chat);
                Vec::new()
            }
        }
    }

    /// Scrolls down by a positive number, up by a negative one.
    pub(super) fn scroll(&mut self, pane: Pane, delta: isize) {
        match pane {
            Pane::Chat => self.scroll_chat(-delta),
            Pane::Terminal => self.shell.emulator.scroll(-delta),
            Pane::Events => self.feed.scroll(-delta),
            Pane::Files => match &mut self.files.diff {
                Some(diff) => diff.scroll = diff.scroll.saturating_add_signed(delta).min(diff.lines.len().saturating_sub(1)),
                None => self.files.select(delta),
            },
            Pane::Sync => {
                let visible_rows =
                    self.layout().and_then(|p| p.pane(Pane::Sync)).map_or(0, |rect| usize::from(rect.height.saturating_sub(2)));
                // One more for the summary line.
                let limit = (self.sync.details().len() + 1).saturating_sub(visible_rows);
                self.sync_scroll = self.sync_scroll.saturating_add_signed(delta).min(limit);
            }
        }
    }

    /// Scrolls back by a positive number.
    fn scroll_chat(&mut self, delta: isize) {
        let limit = self.layout().and_then(|p| p.pane(Pane::Chat)).map_or(0, |rect| view::chat::max_scroll(self, rect));
        self.chat.scroll = self.chat.scroll.saturating_add_signed(delta).min(limit);
    }
}
