//! Tracks a shell's state from its own marks and from the keys typed: whether it is at its prompt with an empty line.

use cobox_stream::ShellMark;

use crate::exec::Variable;

/// Start options with which a login shell marks its prompts.
pub struct Integration {
    pub nonce: String,
    pub dialect: Dialect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Marks the start of commands too.
    Bash,
    /// Marks only its prompts.
    Sh,
}

/// The key sequence sent to bash before a line that is typed for an API request. It disables history expansion (`!`)
/// for this line, which a person may intend and a program never does. No keyboard sends it.
pub const AS_IT_IS_KEY: &str = "\x1b[7717~";

/// The variable that passes the start-up file to the shell, which unsets it first.
const RC_VARIABLE: &str = "COBOX_SHELL_RC";

impl Integration {
    pub fn new(dialect: Dialect) -> Self {
        let mut random = [0u8; 8];
        // The nonce only prevents accidental matches. Programs can imitate marks, with a nonce too if they read the
        // output.
        let _ = getrandom::fill(&mut random);
        Self { nonce: format!("{:016x}", u64::from_be_bytes(random)), dialect }
    }

    /// The command line that starts the shell, and the variables it needs.
    pub fn command(&self, shell: &str) -> (Vec<Vec<u8>>, Vec<Variable>) {
        let n = &self.nonce;
        match self.dialect {
            Dialect::Bash => {
                // The user's own settings are loaded first and stay in force. The marks are put around the current
                // prompt each time it is shown.
                let key = AS_IT_IS_KEY.replace('\x1b', r"\e");
                let rc = format!(
                    r#"unset {RC_VARIABLE}
[ -r ~/.bashrc ] && . ~/.bashrc
__cobox_first() {{ local status=$?; printf '\033]7717;{n};D;%s\007' "$status"; return "$status"; }}
__cobox_last() {{
  if [[ ${{__cobox_histexpand-}} ]]; then set -H; unset __cobox_histexpand; fi
  [[ $PS1 == *'7717;{n};A'* ]] || PS1='\[\e]7717;{n};A\a\]'"$PS1"'\[\e]7717;{n};R\a\]'
  [[ $PS0 == *'7717;{n};X'* ]] || PS0="$PS0"'\e]7717;{n};X\a'
}}
__cobox_as_it_is() {{ local status=$?; [[ $- != *H* ]] || {{ set +H; __cobox_histexpand=yes; }}; return "$status"; }}
for __cobox_keymap in emacs vi-insert; do bind -m "$__cobox_keymap" -x '"{key}": __cobox_as_it_is'; done
unset __cobox_keymap
if [[ $(declare -p PROMPT_COMMAND 2>/dev/null) == 'declare -a'* ]]; then
  PROMPT_COMMAND=(__cobox_first "${{PROMPT_COMMAND[@]}}" __cobox_last)
else
  PROMPT_COMMAND=__cobox_first$'\n'"$PROMPT_COMMAND"$'\n'__cobox_last
fi
"#
                );
                let start = format!(r#"exec {shell} --rcfile <(printf %s "${RC_VARIABLE}")"#);
                let argv = [shell, "-c", &start].map(|word| word.as_bytes().to_vec()).to_vec();
                (argv, vec![(RC_VARIABLE.into(), rc.into_bytes())])
            }
            Dialect::Sh => {
                let prompt = format!("\x1b]7717;{n};A;$?\x07$ \x1b]7717;{n};R\x07");
                (vec![shell.as_bytes().to_vec()], vec![(b"PS1".to_vec(), prompt.into_bytes())])
            }
        }
    }
}

/// The current state. Commands are counted, so that a waiter for the next one can't mistake the last one for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub state: State,
    /// Number of commands begun, and the offset at which the output of the last one begins.
    pub begun: u64,
    pub begun_at: u64,
    /// Number of commands ended, the offset at which the last one ended, and its status.
    pub ended: u64,
    pub ended_at: u64,
    pub status: Option<i32>,
    is_begun: bool,
    typed: Typed,
    /// There is text after the prompt.
    is_written: bool,
    /// Keys were typed since the prompt.
    is_touched: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// No prompt seen yet: the shell is starting, or doesn't mark prompts.
    #[default]
    Unknown,
    AtPrompt,
    Running,
}

/// The current line according to the keys: its length, or unknown after a recalled line or a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Typed {
    Chars(u32),
    Unknowable,
}

impl Default for Typed {
    fn default() -> Self {
        Typed::Chars(0)
    }
}

impl Prompt {
    pub fn has_half_a_line(&self) -> bool {
        self.typed != Typed::Chars(0) || (self.is_written && !self.is_touched)
    }

    /// Handles one of this shell's marks. Marks with another nonce are ignored.
    pub fn mark(&mut self, mark: &ShellMark, integration: &Integration) {
        let Some(words) = mark.payload.strip_prefix(integration.nonce.as_bytes()).and_then(|rest| rest.strip_prefix(b";")) else { return };
        let status = || std::str::from_utf8(words.get(2..)?).ok()?.parse().ok();
        match words.first() {
            Some(b'X') => {
                // Emitted once per command of a line, or of several pasted together. The output begins with the first.
                if !self.is_begun {
                    (self.begun, self.begun_at, self.is_begun) = (self.begun + 1, mark.to, true);
                }
                self.state = State::Running;
            }
            Some(b'D') => self.ends(mark.from, status()),
            // Repeated when the prompt is redrawn during editing. It ends a command only if no other mark did.
            Some(b'A') if integration.dialect == Dialect::Sh => self.ends(mark.from, status()),
            Some(b'A') if self.is_begun => self.ends(mark.from, None),
            Some(b'R') => {
                if self.state != State::AtPrompt {
                    (self.typed, self.is_touched) = (Typed::default(), false);
                }
                self.state = State::AtPrompt;
                self.is_written = false;
            }
            _ => {}
        }
    }

    fn ends(&mut self, at: u64, status: Option<i32>) {
        (self.ended, self.ended_at, self.status, self.is_begun) = (self.ended + 1, at, status, false);
        self.state = State::Running;
    }

    /// Output arrived that is neither a mark nor a cursor movement.
    pub fn printed(&mut self) {
        self.is_written = true;
    }

    /// Handles keys sent to the terminal.
    pub fn typed(&mut self, bytes: &[u8]) {
        if self.is_written && !self.is_touched {
            // The new keys follow text that was not typed through this shell's clients.
            self.typed = Typed::Unknowable;
        }
        self.is_touched = true;
        for byte in bytes {
            self.typed = match (byte, self.typed) {
                (b'\r' | b'\n' | 3, _) => {
                    if self.state == State::AtPrompt {
                        self.state = State::Running;
                    }
                    Typed::Chars(0)
                }
                // Ctrl-U deletes the text before the cursor, which is the whole line only if the cursor was not moved.
                (21, Typed::Chars(_)) => Typed::Chars(0),
                (8 | 0x7f, Typed::Chars(n)) => Typed::Chars(n.saturating_sub(1)),
                // A continuation byte of a character.
                (0x80..=0xbf, typed) => typed,
                (0x20..=0xff, Typed::Chars(n)) => Typed::Chars(n.saturating_add(1)),
                _ => Typed::Unknowable,
            };
        }
    }
}

/// Distinguishes text from escape sequences roughly: enough to detect text after a prompt.
#[derive(Default)]
pub struct TextFinder(Inside);

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Inside {
    #[default]
    Text,
    Escape,
    Csi,
    String,
}

impl TextFinder {
    pub fn has_text(&mut self, bytes: &[u8]) -> bool {
        let mut found = false;
        for byte in bytes {
            self.0 = match (self.0, byte) {
                (_, 0x1b) => Inside::Escape,
                (Inside::Text, 0x20..) => {
                    found = true;
                    Inside::Text
                }
                (Inside::Escape, b'[') => Inside::Csi,
                (Inside::Escape, b']' | b'P' | b'_' | b'^' | b'X') => Inside::String,
                (Inside::Escape, 0x20..=0x2f) => Inside::Escape,
                (Inside::Csi, 0x20..=0x3f) => Inside::Csi,
                (Inside::String, 0x07) => Inside::Text,
                (Inside::String, _) => Inside::String,
                _ => Inside::Text,
            };
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(prompt: &mut Prompt, word: &str) {
        let integration = Integration { nonce: "n".into(), dialect: Dialect::Bash };
        prompt.mark(&ShellMark { from: 0, to: 1, payload: format!("n;{word}").into_bytes() }, &integration);
    }

    #[test]
    fn a_half_typed_line_is_seen_until_it_is_gone() {
        let mut prompt = Prompt::default();
        ["D;0", "A", "R"].iter().for_each(|word| marked(&mut prompt, word));
        assert!(prompt.state == State::AtPrompt && !prompt.has_half_a_line());
        prompt.typed("hé".as_bytes());
        assert!(prompt.has_half_a_line());
        prompt.typed(b"\x7f\x7f");
        assert!(!prompt.has_half_a_line());
        prompt.typed(b"\x1b[A");
        assert!(prompt.has_half_a_line(), "an older line was recalled");
        prompt.typed(b"\x03");
        assert_eq!(prompt.state, State::Running, "until the next prompt");
        ["D;130", "A", "R"].iter().for_each(|word| marked(&mut prompt, word));
        assert!(prompt.state == State::AtPrompt && !prompt.has_half_a_line());
        prompt.printed();
        assert!(prompt.has_half_a_line(), "typed ahead while something ran");
        prompt.typed(b"\x7f");
        assert!(prompt.has_half_a_line(), "and only a part of it taken away");
        prompt.typed(b"\x15");
        assert!(prompt.has_half_a_line(), "Ctrl-U leaves what is behind the cursor");
    }

    #[test]
    fn others_marks_count_for_nothing() {
        let mut prompt = Prompt::default();
        let integration = Integration { nonce: "n".into(), dialect: Dialect::Bash };
        prompt.mark(&ShellMark { from: 0, to: 1, payload: b"m;R".to_vec() }, &integration);
        prompt.mark(&ShellMark { from: 0, to: 1, payload: b"n".to_vec() }, &integration);
        assert_eq!(prompt, Prompt::default());
    }

    #[test]
    fn sequences_are_no_text() {
        let mut finder = TextFinder::default();
        assert!(!finder.has_text(b"\x1b[?2004h\x1b[K\x1b]0;title\x07\r"));
        assert!(finder.has_text(b"\x1b[1ml"));
    }
}
