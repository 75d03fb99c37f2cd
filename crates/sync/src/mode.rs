//! Sync modes: which side may change which, and which one wins a conflict.

use std::{fmt, str::FromStr};

use crate::{engine::Resolution, side::Side};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Both ways; a path changed on both sides is a conflict, and neither version is overwritten.
    #[default]
    TwoWaySafe,
    /// Both ways; the local folder wins.
    PreferLocal,
    /// Both ways; the sandbox wins.
    PreferSandbox,
    /// From the local folder to the sandbox; changes made only in the sandbox are kept there.
    Push,
    /// From the sandbox to the local folder; changes made only locally are kept there.
    Pull,
    /// The sandbox becomes an exact copy of the local folder; anything else in the sandbox is deleted.
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

    /// Whether the sync never writes in the sandbox.
    pub const fn is_sandbox_read_only(self) -> bool {
        matches!(self, Mode::Pull)
    }

    /// Why this mode forbids a resolution: the winning version would have to be written to the read-only side.
    pub(crate) fn refusal(self, resolution: Resolution) -> Option<&'static str> {
        match (self, resolution) {
            (Mode::Push | Mode::Mirror, Resolution::Keep(Side::Sandbox)) => Some(
                "this mode takes no changes from the sandbox: keep `here` or `both`, or stop the sync and start it with --mode two-way-safe",
            ),
            (Mode::Pull, Resolution::Keep(Side::Local)) => Some(
                "mode pull sends no changes to the sandbox: keep `sandbox` or `both`, or stop the sync and start it with --mode two-way-safe",
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
        Mode::ALL.into_iter().find(|m| m.as_str() == text).ok_or_else(|| format!("`{text}` is not a mode; expected one of {}", names()))
    }
}
