//! One lock per sandbox, so that provider operations on the same sandbox run one after the other.

use std::{collections::HashMap, sync::Arc};

use cobox_protocol::SandboxId;
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

type Map = HashMap<SandboxId, Arc<AsyncMutex<()>>>;

/// Has an entry only while a task holds or waits for the lock.
#[derive(Clone, Default)]
pub struct SandboxLocks(Arc<Mutex<Map>>);

impl SandboxLocks {
    pub async fn lock(&self, id: &SandboxId) -> SandboxLock {
        let waiting = Waiting { locks: self.clone(), id: id.clone() };
        let mutex = self.entry(id);
        SandboxLock { guard: Some(mutex.lock_owned().await), _waiting: waiting }
    }

    /// `None` if another task holds it.
    pub fn try_lock(&self, id: &SandboxId) -> Option<SandboxLock> {
        let waiting = Waiting { locks: self.clone(), id: id.clone() };
        let guard = self.entry(id).try_lock_owned().ok()?;
        Some(SandboxLock { guard: Some(guard), _waiting: waiting })
    }

    /// Doesn't take the lock: two tasks that only check must not mistake each other for a task at work.
    pub fn is_held(&self, id: &SandboxId) -> bool {
        self.0.lock().contains_key(id)
    }

    fn entry(&self, id: &SandboxId) -> Arc<AsyncMutex<()>> {
        self.0.lock().entry(id.clone()).or_default().clone()
    }
}

pub struct SandboxLock {
    guard: Option<OwnedMutexGuard<()>>,
    _waiting: Waiting,
}

impl Drop for SandboxLock {
    fn drop(&mut self) {
        // Must be released before the entry is checked, or the entry would always seem to be in use.
        self.guard = None;
    }
}

/// Removes the entry when the last task is done with it, also when it gives up waiting.
struct Waiting {
    locks: SandboxLocks,
    id: SandboxId,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut map = self.locks.0.lock();
        if map.get(&self.id).is_some_and(|m| Arc::strong_count(m) == 1) {
            map.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_is_exclusive_and_leaves_no_entry_behind() {
        let (locks, id) = (SandboxLocks::default(), SandboxId::new());
        let held = locks.lock(&id).await;
        assert!(locks.try_lock(&id).is_none());
        assert!(locks.is_held(&id));
        let given_up = tokio::time::timeout(std::time::Duration::from_millis(1), locks.lock(&id)).await;
        assert!(given_up.is_err());
        drop(held);
        assert!(!locks.is_held(&id));
        assert!(locks.try_lock(&id).is_some());
        assert!(locks.0.lock().is_empty());
    }
}
