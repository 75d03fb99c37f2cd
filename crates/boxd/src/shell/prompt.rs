//! Tracks a shell's state from its own marks and from the keys typed: whether it is at its prompt with an empty line.

use cobox_stream::ShellMark;

use crate::exec::Variable;

/// Start options with which a login shell marks its prompts.
pub struct Integration {
    pub nonce: String,
    pub shell_kind: ShellKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShellKind {
    /// Marks the start of commands too.
    Bash,
    /// Marks only its prompts.
    Sh,
}

/// The key sequence sent to bash before a line that is typed for an API request. It disables history expansion (`!`)
/// for this line, which a person may intend and a program never does. No keyboard sends it.
pub const NO_HISTORY_EXPANSION_KEY: &str = "\x1b[7717~";

/// The variable that passes the start-up file to the shell, which unsets it first.
const RC_VARIABLE: &str = "COBOX_SHELL_RC";

impl Integration {
    pub fn new(shell_kind: ShellKind) -> Self {
        let mut random = [0u8; 8];
        // The nonce only prevents accidental matches. Programs can imitate marks, with a nonce too if they read the
        // output.
        let _ = getrandom::fill(&mut random);
        Self { nonce: format!("{:016x}", u64::from_be_bytes(random)), shell_kind }
    }

    /// The command line that starts the shell, and the variables it needs.
    pub fn command(&self, shell: &str) -> (Vec<Vec<u8>>, Vec<Variable>) {
        let n = &self.nonce;
        match self.shell_kind {
            ShellKind::Bash => {
                // The user's own settings are loaded first and stay in force. The marks are put around the current
                // prompt each time it is shown.
                let key = NO_HISTORY_EXPANSION_KEY.replace('\x1b', r"\e");
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
                let argv = [shell, "-c", &start].map(|arg| arg.as_bytes().to_vec()).to_vec();
                (argv, vec![(RC_VARIABLE.into(), rc.into_bytes())])
            }
            ShellKind::Sh => {
                let prompt = format!("\x1b]7717;{n};A;$?\x07$ \x1b]7717;{n};R\x07");
                (vec![shell.as_bytes().to_vec()], vec![(b"PS1".to_vec(), prompt.into_bytes())])
            }
        }
    }
}

/// The current state. Commands are counted, so that a waiter for the next one can't mistake the last one for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub state: PromptState,
    /// Number of commands begun, and the offset at which the output of the last one begins.
    pub commands_started: u64,
    pub output_start: u64,
    /// Number of commands ended, the offset at which the last one ended, and its status.
    pub commands_ended: u64,
    pub ended_at: u64,
    pub status: Option<i32>,
    is_command_running: bool,
    typed: TypedLine,
    /// There is text after the prompt.
    has_unexplained_text: bool,
    /// Keys were typed since the prompt.
    has_typed_keys: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptState {
    /// No prompt seen yet: the shell is starting, or doesn't mark prompts.
    #[default]
    Unknown,
    AtPrompt,
    Running,
}

/// The current line according to the keys: its length, or unknown after a recalled line or a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TypedLine {
    Length(u32),
    Unknown,
}

impl Default for TypedLine {
    fn default() -> Self {
        TypedLine::Length(0)
    }
}

impl Prompt {
    pub fn has_partial_line(&self) -> bool {
        self.typed != TypedLine::Length(0) || (self.has_unexplained_text && !self.has_typed_keys)
    }

    /// Handles one of this shell's marks. Marks with another nonce are ignored.
    pub fn mark(&mut self, mark: &ShellMark, integration: &Integration) {
        let Some(fields) = mark.payload.strip_prefix(integration.nonce.as_bytes()).and_then(|rest| rest.strip_prefix(b";")) else { return };
        let status = || std::str::from_utf8(fields.get(2..)?).ok()?.parse().ok();
        match fields.first() {
            Some(b'X') => {
                // Emitted once per command of a line, or of several pasted together. The output begins with the first.
                if !self.is_command_running {
                    (self.commands_started, self.output_start, self.is_command_running) = (self.commands_started + 1, mark.to, true);
                }
                self.state = PromptState::Running;
            }
            Some(b'D') => self.command_ended(mark.from, status()),
            // Repeated when the prompt is redrawn during editing. It ends a command only if no other mark did.
            Some(b'A') if integration.shell_kind == ShellKind::Sh => self.command_ended(mark.from, status()),
            Some(b'A') if self.is_command_running => self.command_ended(mark.from, None),
            Some(b'R') => {
                if self.state != PromptState::AtPrompt {
                    (self.typed, self.has_typed_keys) = (TypedLine::default(), false);
                }
                self.state = PromptState::AtPrompt;
                self.has_unexplained_text = false;
            }
            _ => {}
        }
    }

    fn command_ended(&mut self, at: u64, status: Option<i32>) {
        (self.commands_ended, self.ended_at, self.status, self.is_command_running) = (self.commands_ended + 1, at, status, false);
        self.state = PromptState::Running;
    }

    /// Output arrived that is neither a mark nor a cursor movement.
    pub fn note_output(&mut self) {
        self.has_unexplained_text = true;
    }

    /// Handles keys sent to the terminal.
    pub fn note_keys(&mut self, bytes: &[u8]) {
        if self.has_unexplained_text && !self.has_typed_keys {
            // The new keys follow text that was not typed through this shell's clients.
            self.typed = TypedLine::Unknown;
        }
        self.has_typed_keys = true;
        for byte in bytes {
            self.typed = match (byte, self.typed) {
                (b'\r' | b'\n' | 3, _) => {
                    if self.state == PromptState::AtPrompt {
                        self.state = PromptState::Running;
                    }
                    TypedLine::Length(0)
                }
                // Ctrl-U deletes the text before the cursor, which is the whole line only if the cursor was not moved.
                (21, TypedLine::Length(_)) => TypedLine::Length(0),
                (8 | 0x7f, TypedLine::Length(n)) => TypedLine::Length(n.saturating_sub(1)),
                // A continuation byte of a character.
                (0x80..=0xbf, typed) => typed,
                (0x20..=0xff, TypedLine::Length(n)) => TypedLine::Length(n.saturating_add(1)),
                _ => TypedLine::Unknown,
            };
        }
    }
}

/// Distinguishes text from escape sequences roughly: enough to detect text after a prompt.
#[derive(Default)]
pub struct TextDetector(ParserState);

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum ParserState {
    #[default]
    Text,
    Escape,
    Csi,
    String,
}

impl TextDetector {
    pub fn has_text(&mut self, bytes: &[u8]) -> bool {
        let mut has_found_text = false;
        for byte in bytes {
            self.0 = match (self.0, byte) {
                (_, 0x1b) => ParserState::Escape,
                (ParserState::Text, 0x20..) => {
                    has_found_text = true;
                    ParserState::Text
                }
                (ParserState::Escape, b'[') => ParserState::Csi,
                (ParserState::Escape, b']' | b'P' | b'_' | b'^' | b'X') => ParserState::String,
                (ParserState::Escape, 0x20..=0x2f) => ParserState::Escape,
                (ParserState::Csi, 0x20..=0x3f) => ParserState::Csi,
                (ParserState::String, 0x07) => ParserState::Text,
                (ParserState::String, _) => ParserState::String,
                _ => ParserState::Text,
            };
        }
        has_found_text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply_mark(prompt: &mut Prompt, mark: &str) {
        let integration = Integration { nonce: "n".into(), shell_kind: ShellKind::Bash };
        prompt.mark(&ShellMark { from: 0, to: 1, payload: format!("n;{mark}").into_bytes() }, &integration);
    }

    #[test]
    fn a_partly_typed_line_is_detected_until_it_is_removed() {
        let mut prompt = Prompt::default();
        ["D;0", "A", "R"].iter().for_each(|mark| apply_mark(&mut prompt, mark));
        assert!(prompt.state == PromptState::AtPrompt && !prompt.has_partial_line());
        prompt.note_keys("hé".as_bytes());
        assert!(prompt.has_partial_line());
        prompt.note_keys(b"\x7f\x7f");
        assert!(!prompt.has_partial_line());
        prompt.note_keys(b"\x1b[A");
        assert!(prompt.has_partial_line(), "an older line was recalled from the history");
        prompt.note_keys(b"\x03");
        assert_eq!(prompt.state, PromptState::Running, "until the next prompt");
        ["D;130", "A", "R"].iter().for_each(|mark| apply_mark(&mut prompt, mark));
        assert!(prompt.state == PromptState::AtPrompt && !prompt.has_partial_line());
        prompt.note_output();
        assert!(prompt.has_partial_line(), "typed ahead while something ran");
        prompt.note_keys(b"\x7f");
        assert!(prompt.has_partial_line(), "and only a part of it deleted");
        prompt.note_keys(b"\x15");
        assert!(prompt.has_partial_line(), "Ctrl-U keeps the text after the cursor");
    }

    #[test]
    fn marks_with_another_nonce_are_ignored() {
        let mut prompt = Prompt::default();
        let integration = Integration { nonce: "n".into(), shell_kind: ShellKind::Bash };
        prompt.mark(&ShellMark { from: 0, to: 1, payload: b"m;R".to_vec() }, &integration);
        prompt.mark(&ShellMark { from: 0, to: 1, payload: b"n".to_vec() }, &integration);
        assert_eq!(prompt, Prompt::default());
    }

    #[test]
    fn escape_sequences_are_not_text() {
        let mut detector = TextDetector::default();
        assert!(!detector.has_text(b"\x1b[?2004h\x1b[K\x1b]0;title\x07\r"));
        assert!(detector.has_text(b"\x1b[1ml"));
    }
}
