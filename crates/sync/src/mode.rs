//! Which side may change which, and who wins where both did.

use std::{fmt, str::FromStr};

use crate::engine::Choice;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Both ways; where both changed the same, nothing is overwritten and it is told.
    #[default]
    TwoWaySafe,
    /// Both ways; this folder wins.
    PreferHere,
    /// Both ways; the sandbox wins.
    PreferSandbox,
    /// From here to the sandbox; what was changed there only is left alone.
    Push,
    /// From the sandbox to here; what was changed here only is left alone.
    Pull,
    /// The sandbox becomes exactly what this folder is; what only the sandbox has is deleted.
    Mirror,
}

impl Mode {
    pub const ALL: [Mode; 6] = [Mode::TwoWaySafe, Mode::PreferHere, Mode::PreferSandbox, Mode::Push, Mode::Pull, Mode::Mirror];

    pub const fn word(self) -> &'static str {
        match self {
            Mode::TwoWaySafe => "two-way-safe",
            Mode::PreferHere => "prefer-here",
            Mode::PreferSandbox => "prefer-sandbox",
            Mode::Push => "push",
            Mode::Pull => "pull",
            Mode::Mirror => "mirror",
        }
    }

    /// Nothing is ever written in the sandbox.
    pub const fn only_reads_there(self) -> bool {
        matches!(self, Mode::Pull)
    }

    /// Why a conflict can't be settled so: that version would have to go where nothing goes.
    pub(crate) fn refuses(self, choice: Choice) -> Option<&'static str> {
        match (self, choice) {
            (Mode::Push | Mode::Mirror, Choice::Keep(Keep::Sandbox)) => Some(
                "nothing comes from the sandbox in this mode: keep `here` or `both`, or end the sync and start it with --mode two-way-safe",
            ),
            (Mode::Pull, Choice::Keep(Keep::Here)) => Some(
                "nothing goes to the sandbox in mode pull: keep `sandbox` or `both`, or end the sync and start it with --mode two-way-safe",
            ),
            _ => None,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words = || Mode::ALL.map(Mode::word).join(", ");
        Mode::ALL.into_iter().find(|m| m.word() == text).ok_or_else(|| format!("`{text}` is not a mode; they are {}", words()))
    }
}

/// Who wins a conflict, as somebody decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    Here,
    Sandbox,
}
