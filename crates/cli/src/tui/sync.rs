//! The state of a folder kept the same here and in the sandbox, as far as this screen shows it.

/// What is shown; whoever syncs tells it with `Message::Sync`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SyncState {
    #[default]
    None,
    /// A few words, and lines below them.
    #[cfg_attr(not(test), expect(dead_code, reason = "told by whoever syncs, once there is one"))]
    Running { summary: String, details: Vec<String>, conflicts: usize },
}

impl SyncState {
    pub fn summary(&self) -> String {
        match self {
            SyncState::None => "no sync".to_owned(),
            SyncState::Running { summary, conflicts: 0, .. } => summary.clone(),
            SyncState::Running { summary, conflicts, .. } => format!("{summary}, {conflicts} conflicts"),
        }
    }
}
