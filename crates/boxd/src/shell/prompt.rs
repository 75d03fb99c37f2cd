//! What a shell's own marks and the keys typed say about it: is it at its prompt, with an empty line?

use cobox_stream::ShellMark;

use crate::exec::Variable;

/// What a login shell is started with so that it marks its prompts.
pub struct Integration {
    pub nonce: String,
    pub dialect: Dialect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Marks before a command too.
    Bash,
    /// Marks its prompts only.
    Sh,
}

/// The key that bash gets before a line typed for somebody: that line is not searched for `!`, which a person means to be one of their
/// earlier lines and a program never does. No keyboard has it.
pub const AS_IT_IS_KEY: &str = "\x1b[7717~";

/// Where a variable carries the start-up file into the shell, which takes it away first.
const RC_VARIABLE: &str = "COBOX_SHELL_RC";

impl Integration {
    pub fn new(dialect: Dialect) -> Self {
        let mut random = [0u8; 8];
        // Marks without a secret can be imitated by what is printed, as they can be with one by whoever looks: it only avoids accidents.
        let _ = getrandom::fill(&mut random);
        Self { nonce: format!("{:016x}", u64::from_be_bytes(random)), dialect }
    }

    /// The words to start the shell by, and the variables it needs for that.
    pub fn command(&self, shell: &str) -> (Vec<Vec<u8>>, Vec<Variable>) {
        let n = &self.nonce;
        match self.dialect {
            Dialect::Bash => {
                // The user's own settings come first and stay; the marks are put around whatever prompt they make, each time anew.
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

/// What is known now. Counters, so that whoever waits for the next of something can't take the last one for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub state: State,
    /// Commands that began, and where the last one's output did.
    pub begun: u64,
    pub begun_at: u64,
    /// Commands that ended: how many, where, and how.
    pub ended: u64,
    pub ended_at: u64,
    pub status: Option<i32>,
    is_begun: bool,
    typed: Typed,
    /// Something stands after the prompt.
    is_written: bool,
    /// Keys came since the prompt.
    is_touched: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Never saw a prompt: it is starting, or doesn't tell.
    #[default]
    Unknown,
    AtPrompt,
    Running,
}

/// The line so far, by the keys: its length, or that it can't be known (a recalled line, a completion).
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

    /// Takes one of the shell's own marks; others' are ignored.
    pub fn mark(&mut self, mark: &ShellMark, integration: &Integration) {
        let Some(words) = mark.payload.strip_prefix(integration.nonce.as_bytes()).and_then(|rest| rest.strip_prefix(b";")) else { return };
        let status = || std::str::from_utf8(words.get(2..)?).ok()?.parse().ok();
        match words.first() {
            Some(b'X') => {
                // Once for each command of a line, or of several pasted together: what they print begins with the first.
                if !self.is_begun {
                    (self.begun, self.begun_at, self.is_begun) = (self.begun + 1, mark.to, true);
                }
                self.state = State::Running;
            }
            Some(b'D') => self.ends(mark.from, status()),
            // Drawn again while a line is edited; the end of a command only where nothing else told it.
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

    /// Something was printed that is neither a mark nor a movement.
    pub fn printed(&mut self) {
        self.is_written = true;
    }

    /// Keys on their way to the terminal.
    pub fn typed(&mut self, bytes: &[u8]) {
        if self.is_written && !self.is_touched {
            // It stands after text that nobody here has seen typed.
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
                // Ctrl-U takes away what is before the cursor, which is all of a line only where nothing has moved it.
                (21, Typed::Chars(_)) => Typed::Chars(0),
                (8 | 0x7f, Typed::Chars(n)) => Typed::Chars(n.saturating_sub(1)),
                // The rest of a character.
                (0x80..=0xbf, typed) => typed,
                (0x20..=0xff, Typed::Chars(n)) => Typed::Chars(n.saturating_add(1)),
                _ => Typed::Unknowable,
            };
        }
    }
}

/// Tells text from sequences, roughly: enough to see whether something stands after a prompt.
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
