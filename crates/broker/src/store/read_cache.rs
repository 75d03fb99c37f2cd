//! Read cache for what the gateway needs with every request, valid until the next write: this process is the only writer
//! of the file.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::store::Stored;

/// Maximum number of entries; a node has fewer sandboxes in use at once.
const MAX_ENTRIES: usize = 1024;
/// Maximum age of an entry: if a caller gives up waiting for a commit, it is unknown when the commit happens.
const MAX_AGE: Duration = Duration::from_secs(1);

/// Counts the changes to the file.
#[derive(Default)]
pub struct ChangeCounter(AtomicU64);

impl ChangeCounter {
    /// Held during a commit. On drop it counts the change, also when the waiting caller was cancelled.
    pub fn begin_change(&self) -> ChangeGuard<'_> {
        ChangeGuard(self)
    }

    pub fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

pub struct ChangeGuard<'a>(&'a ChangeCounter);

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Cached answers by key. Each is valid until the next change, and for the moment it was read for. One entry per key: the
/// next moment's answer replaces it.
pub struct ReadCache<K, V>(Mutex<HashMap<K, CachedRead<V>>>);

struct CachedRead<V> {
    change: u64,
    moment: i64,
    at: Instant,
    answer: V,
}

impl<K, V> Default for ReadCache<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> ReadCache<K, V> {
    pub async fn get(&self, changes: &ChangeCounter, key: K, moment: i64, ask: impl Future<Output = Stored<V>>) -> Stored<V> {
        // Read before the query: a change during the query makes its answer outdated.
        let (change, at) = (changes.count(), Instant::now());
        if let Some(known) = self.0.lock().get(&key)
            && known.change == change
            && known.moment == moment
            && known.at.elapsed() < MAX_AGE
        {
            return Ok(known.answer.clone());
        }
        let answer = ask.await?;
        let mut entries = self.0.lock();
        if entries.len() >= MAX_ENTRIES {
            entries.clear();
        }
        entries.insert(key, CachedRead { change, moment, at, answer: answer.clone() });
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_is_cached_until_the_next_change() {
        let (changes, cache) = (ChangeCounter::default(), ReadCache::default());
        let ask = async |answer: u32| cache.get(&changes, "key", 0, async { Ok(answer) }).await.unwrap();
        assert_eq!((ask(1).await, ask(2).await), (1, 1));
        drop(changes.begin_change());
        assert_eq!((ask(3).await, ask(4).await), (3, 3));
        // A change during the query must invalidate its answer.
        cache
            .get(&changes, "other", 0, async {
                drop(changes.begin_change());
                Ok(5)
            })
            .await
            .unwrap();
        assert_eq!(cache.get(&changes, "other", 0, async { Ok(6) }).await.unwrap(), 6);
    }

    #[tokio::test]
    async fn only_the_latest_answer_to_a_query_is_cached() {
        let (changes, cache) = (ChangeCounter::default(), ReadCache::default());
        for moment in 0..100 {
            for _ in 0..2 {
                assert_eq!(cache.get(&changes, "key", moment, async { Ok(moment) }).await.unwrap(), moment);
            }
        }
        assert_eq!(cache.0.lock().len(), 1);
    }
}
