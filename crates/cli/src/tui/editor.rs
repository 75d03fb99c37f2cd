//! The input line of the chat: text, a cursor, a history, and pastes up to the size of a message.

/// Longest text, in bytes: more than any model accepts at once, and the same limit as in plain mode.
const MAX_BYTES: usize = 1024 * 1024;
/// Lines kept in the history.
const MAX_HISTORY: usize = 200;

#[derive(Debug, Default)]
pub struct Editor {
    text: String,
    /// Byte offset, always on a character boundary.
    cursor: usize,
    history: Vec<String>,
    /// The history entry shown, and the draft that was typed before the user went back in the history.
    history_position: Option<(usize, String)>,
}

impl Editor {
    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn cursor(&self) -> usize {
        self.cursor
    }

    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    pub fn insert(&mut self, text: &str) {
        let clean: String =
            text.replace("\r\n", "\n").replace('\r', "\n").chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect();
        if self.text.len() + clean.len() <= MAX_BYTES {
            self.text.insert_str(self.cursor, &clean);
            self.cursor += clean.len();
        }
    }

    pub fn set(&mut self, text: &str) {
        self.text = text.to_owned();
        self.cursor = self.text.len();
    }

    /// Returns the text, clears the line and adds the text to the history.
    pub fn take(&mut self) -> String {
        let text = std::mem::take(&mut self.text);
        self.cursor = 0;
        self.history_position = None;
        if !text.trim().is_empty() && self.history.last() != Some(&text) {
            if self.history.len() == MAX_HISTORY {
                self.history.remove(0);
            }
            self.history.push(text.clone());
        }
        text
    }

    pub fn backspace(&mut self) {
        if let Some(before) = self.before() {
            self.text.remove(before);
            self.cursor = before;
        }
    }

    pub fn delete(&mut self) {
        if self.cursor < self.text.len() {
            self.text.remove(self.cursor);
        }
    }

    pub fn left(&mut self) {
        self.cursor = self.before().unwrap_or(0);
    }

    pub fn right(&mut self) {
        self.cursor += self.text[self.cursor..].chars().next().map_or(0, char::len_utf8);
    }

    pub fn home(&mut self) {
        self.cursor = self.text[..self.cursor].rfind('\n').map_or(0, |at| at + 1);
    }

    pub fn end(&mut self) {
        self.cursor += self.text[self.cursor..].find('\n').unwrap_or(self.text.len() - self.cursor);
    }

    /// Moves to the beginning of the word.
    pub fn word_left(&mut self) {
        let before = self.text[..self.cursor].trim_end();
        self.cursor = before.rfind(char::is_whitespace).map_or(0, |at| at + before[at..].chars().next().map_or(1, char::len_utf8));
    }

    pub fn delete_word(&mut self) {
        let end = self.cursor;
        self.word_left();
        self.text.replace_range(self.cursor..end, "");
    }

    pub fn delete_to_start(&mut self) {
        let end = self.cursor;
        self.home();
        self.text.replace_range(self.cursor..end, "");
    }

    /// Shows the previous history entry; `history_position` has the current position.
    pub fn older(&mut self) {
        let at = match &self.history_position {
            Some((0, _)) => return,
            Some((at, _)) => at - 1,
            None if self.history.is_empty() => return,
            None => self.history.len() - 1,
        };
        let draft = self.history_position.take().map_or_else(|| self.text.clone(), |(_, draft)| draft);
        let text = self.history[at].clone();
        self.set(&text);
        self.history_position = Some((at, draft));
    }

    pub fn newer(&mut self) {
        let Some((at, draft)) = self.history_position.take() else { return };
        match self.history.get(at + 1).cloned() {
            Some(text) => {
                self.set(&text);
                self.history_position = Some((at + 1, draft));
            }
            None => self.set(&draft),
        }
    }

    fn before(&self) -> Option<usize> {
        self.text[..self.cursor].char_indices().next_back().map(|(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn typing_moving_and_deleting_are_by_character_and_word() {
        let mut editor = Editor::default();
        editor.insert("héllo wörld");
        editor.delete_word();
        assert_eq!(editor.text(), "héllo ");
        editor.left();
        editor.left();
        editor.backspace();
        assert_eq!(editor.text(), "hélo ");
        editor.home();
        editor.delete();
        editor.end();
        editor.insert("!\r\nnext\u{1b}");
        assert_eq!(editor.text(), "élo !\nnext");
        editor.delete_to_start();
        assert_eq!(editor.text(), "élo !\n");
    }

    #[test]
    fn the_history_restores_earlier_input_and_the_draft() {
        let mut editor = Editor::default();
        for text in ["one", "two", "two"] {
            editor.set(text);
            editor.take();
        }
        editor.insert("draft");
        editor.older();
        assert_eq!(editor.text(), "two");
        editor.older();
        editor.older();
        assert_eq!(editor.text(), "one");
        editor.newer();
        editor.newer();
        assert_eq!(editor.text(), "draft");
    }

    proptest! {
        #[test]
        fn any_key_sequence_keeps_the_cursor_on_a_character_boundary(keys in proptest::collection::vec((0u8..11, ".{0,3}"), 0..64)) {
            let mut editor = Editor::default();
            for (key, text) in keys {
                match key {
                    0 => editor.insert(&text),
                    1 => editor.backspace(),
                    2 => editor.delete(),
                    3 => editor.left(),
                    4 => editor.right(),
                    5 => editor.home(),
                    6 => editor.end(),
                    7 => editor.delete_word(),
                    8 => editor.older(),
                    9 => { editor.take(); }
                    _ => editor.newer(),
                }
                prop_assert!(editor.text().is_char_boundary(editor.cursor()));
            }
        }
    }
}
