//! What a sync is started with.

use crate::{deletion_guard::DEFAULT_DIRECTORY_DELETION_LIMIT, folder::Limits, mode::Mode, trash::TrashLimits};

#[derive(Clone, Debug)]
pub struct Settings {
    pub mode: Mode,
    /// Take also what would run here by itself.
    pub allow_risky: bool,
    pub limits: Limits,
    /// Stop when both sides agree, as far as they can, or when it is seen that they won't.
    pub once: bool,
    /// Of what is deleted or replaced here.
    pub trash: TrashLimits,
    /// A directory with more files than this halts the sync when it disappears.
    pub directory_deletion_limit: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            allow_risky: false,
            limits: Limits::default(),
            once: false,
            trash: TrashLimits::default(),
            directory_deletion_limit: DEFAULT_DIRECTORY_DELETION_LIMIT,
        }
    }
}
