//! Which side may change which, and who wins where both did.

use std::{fmt, str::FromStr};

use crate::{engine::Resolution, side::Side};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Both ways; where both changed the same, nothing is overwritten and it is told.
    #[default]
    TwoWaySafe,
    /// Both ways; this folder wins.
    PreferLocal,
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
    pub const ALL: [Mode; 6] = [Mode::TwoWaySafe, Mode::PreferLocal, Mode::PreferSandbox, Mode::Push, Mode::Pull, Mode::Mirror];

    pub const fn as_str(self) -> &'static str {
        match self {
            Mode::TwoWaySafe => "two-way-safe",
            Mode::PreferLocal => "prefer-here",
            Mode::PreferSandbox => "prefer-sandbox",
            Mode::Push => "push",
            Mode::Pull => "pull",
            Mode::Mirror => "mirror",
        }
    }

    /// Nothing is ever written in the sandbox.
    pub const fn is_sandbox_read_only(self) -> bool {
        matches!(self, Mode::Pull)
    }

    /// Why a conflict can't be settled so: that version would have to go where nothing goes.
    pub(crate) fn refusal(self, resolution: Resolution) -> Option<&'static str> {
        match (self, resolution) {
            (Mode::Push | Mode::Mirror, Resolution::Keep(Side::Sandbox)) => Some(
                "nothing comes from the sandbox in this mode: keep `here` or `both`, or end the sync and start it with --mode two-way-safe",
            ),
            (Mode::Pull, Resolution::Keep(Side::Local)) => Some(
                "nothing goes to the sandbox in mode pull: keep `sandbox` or `both`, or end the sync and start it with --mode two-way-safe",
            ),
            _ => None,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Mode::ALL.map(Mode::as_str).join(", ");
        Mode::ALL.into_iter().find(|m| m.as_str() == text).ok_or_else(|| format!("`{text}` is not a mode; they are {}", names()))
    }
}
