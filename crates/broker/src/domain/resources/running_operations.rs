//! Operations on snapshots, volumes and pools that are in progress in this process.

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;

/// Ids of the items that a task is working on.
#[derive(Default)]
pub struct InProgress(Arc<Mutex<HashSet<String>>>);

/// Held while a task works on one item.
pub struct OperationGuard {
    all: Arc<Mutex<HashSet<String>>>,
    id: String,
}

impl Drop for OperationGuard {
    fn drop(&mut self) {
        self.all.lock().remove(&self.id);
    }
}

impl InProgress {
    /// `None` if another task is working on it.
    pub fn begin(&self, id: &str) -> Option<OperationGuard> {
        let is_new = self.0.lock().insert(id.to_owned());
        is_new.then(|| OperationGuard { all: self.0.clone(), id: id.to_owned() })
    }
}
