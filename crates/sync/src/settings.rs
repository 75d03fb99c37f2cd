//! Settings of a sync.

use crate::{deletion_guard::DEFAULT_DIRECTORY_DELETION_LIMIT, folder::Limits, mode::Mode, trash::TrashLimits};

#[derive(Clone, Debug)]
pub struct Settings {
    pub mode: Mode,
    /// Accept files from the sandbox that tools on this machine would execute automatically.
    pub allow_risky: bool,
    pub limits: Limits,
    /// Stop once both sides agree as far as possible, or when they can't.
    pub once: bool,
    /// Limits of the trash for local versions that are deleted or replaced.
    pub trash: TrashLimits,
    /// The disappearance of a directory with more files than this halts the sync.
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
