//! The last sandbox of each thread, kept between runs: a thread gets its previous sandbox back as long as that exists,
//! instead of a new one. Contains ids and addresses only, never a token or a key.

use std::{
    io::{self, Read, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use cobox_protocol::{SandboxId, Secret, SessionId, Timestamp, session::NegotiateResponse};
use serde::{Deserialize, Serialize};

use crate::context::{Environment, user_dir};

/// Maximum number of threads, over all brokers and keys: more than a user works in, and about 100 KiB.
const MAX_ENTRIES: usize = 256;
/// Bytes read from the file at most: four times the largest size that is written.
const MAX_BYTES: u64 = 1024 * 1024;
/// An entry in use is rewritten at most this often, in seconds, so that most commands write nothing.
const TOUCH_SECONDS: u64 = 3600;
/// Longest text of an entry, in bytes; a thread's id has at most 1 KiB.
const MAX_TEXT_BYTES: usize = 2048;

/// The entries of one broker and one key; entries of others are neither read nor removed.
pub struct ThreadCache {
    path: PathBuf,
    /// A hash of the broker's URL and the key, from which neither can be guessed.
    owner: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadCacheEntry {
    owner: String,
    thread: String,
    pub sandbox_id: SandboxId,
    pub session_id: SessionId,
    http_base_url: String,
    ws_base_url: String,
    used_at: Timestamp,
}

#[derive(Default, Serialize, Deserialize)]
struct CacheFile {
    threads: Vec<ThreadCacheEntry>,
}

impl ThreadCache {
    /// `None` without a home directory.
    pub fn for_broker(url: &str, api_key: &Secret, env: Environment) -> Option<Self> {
        let path = user_dir(env, "XDG_CACHE_HOME", ".cache")?.join("cobox/threads.json");
        let mut hasher = blake3::Hasher::new_derive_key("cobox 2026 owner of a thread cache entry");
        hasher.update(url.trim_end_matches('/').as_bytes()).update(b"\0").update(api_key.expose().as_bytes());
        let owner = hasher.finalize().to_hex()[..32].to_owned();
        Some(Self { path, owner })
    }

    pub fn get(&self, thread: &str) -> Option<ThreadCacheEntry> {
        self.read().threads.into_iter().find(|e| self.belongs_to(e, thread))
    }

    pub fn remember(&self, session: &NegotiateResponse) {
        let entry = ThreadCacheEntry {
            owner: self.owner.clone(),
            thread: session.thread_id.clone(),
            sandbox_id: session.sandbox.id.clone(),
            session_id: session.session_id.clone(),
            http_base_url: session.sandbox.http_base_url.clone(),
            ws_base_url: session.sandbox.ws_base_url.clone(),
            used_at: Timestamp::now(),
        };
        if [&entry.thread, &entry.http_base_url, &entry.ws_base_url].iter().any(|text| text.len() > MAX_TEXT_BYTES) {
            return;
        }
        let mut file = self.read();
        let is_fresh = |e: &ThreadCacheEntry| entry.used_at.saturating_since(e.used_at).as_secs() < TOUCH_SECONDS;
        if file.threads.iter().any(|e| ThreadCacheEntry { used_at: entry.used_at, ..e.clone() } == entry && is_fresh(e)) {
            return;
        }
        file.threads.retain(|e| !self.belongs_to(e, &entry.thread));
        file.threads.insert(0, entry);
        file.threads.sort_by_key(|e| std::cmp::Reverse(e.used_at));
        file.threads.truncate(MAX_ENTRIES);
        self.write(&file);
    }

    pub fn forget(&self, thread: &str) {
        self.forget_where(|e| e.thread == thread);
    }

    /// Removes entries by the id of a session or a sandbox that was released or deleted.
    pub fn forget_id(&self, id: &str) {
        self.forget_where(|e| e.session_id.as_str() == id || e.sandbox_id.as_str() == id);
    }

    fn forget_where(&self, matches: impl Fn(&ThreadCacheEntry) -> bool) {
        let mut file = self.read();
        let before = file.threads.len();
        file.threads.retain(|e| e.owner != self.owner || !matches(e));
        if file.threads.len() != before {
            self.write(&file);
        }
    }

    fn belongs_to(&self, entry: &ThreadCacheEntry, thread: &str) -> bool {
        entry.owner == self.owner && entry.thread == thread
    }

    /// An unreadable file counts as empty: the broker has the authoritative state.
    fn read(&self) -> CacheFile {
        let mut text = Vec::new();
        let read = std::fs::File::open(&self.path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut text));
        read.ok().and_then(|_| serde_json::from_slice(&text).ok()).unwrap_or_default()
    }

    fn write(&self, file: &CacheFile) {
        if let Err(error) = serde_json::to_vec(file).map_err(io::Error::other).and_then(|text| replace_file(&self.path, &text)) {
            tracing::debug!(path = %self.path.display(), %error, "writing the thread cache failed");
        }
    }
}

/// Replaces the file atomically, readable by its owner only. Not synced to disk: an empty cache after a power failure
/// is harmless.
fn replace_file(path: &Path, text: &[u8]) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    // A temporary file is created with mode 0600.
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(text)?;
    file.persist(path).map_err(|e| e.error).map(drop)
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsString, os::unix::fs::PermissionsExt};

    use super::*;

    fn cache(home: &Path, key: &str) -> ThreadCache {
        ThreadCache::for_broker("http://x/", &Secret::new(key), &|name| (name == "HOME").then(|| OsString::from(home))).unwrap()
    }

    fn session(thread: &str) -> NegotiateResponse {
        let (id, sandbox, at) = (SessionId::new(), SandboxId::new(), "2999-01-01T00:00:00Z");
        serde_json::from_value(serde_json::json!({
            "session_id": id, "thread_id": thread, "token": "secret-token", "expires_at": at, "refresh_before": at, "scopes": [],
            "sandbox": {"id": sandbox, "provider": "local", "http_base_url": "http://x/dp", "ws_base_url": "ws://x/dp"},
            "binding": {"id": id, "scope": {"type": "thread", "id": thread}, "sandbox_id": sandbox, "provider": "local",
                "state": "active", "lease_expires_at": at},
            "dataplane": {"http_base_url": "http://x/dp", "ws_base_url": "ws://x/dp"},
            "credentials": {"token_type": "Bearer", "access_token": "secret-token", "expires_at": at, "granted_capabilities": ["exec"]},
            "policy": {"idle_timeout_seconds": 900, "hard_ttl_seconds": 28800},
        }))
        .unwrap()
    }

    #[test]
    fn a_thread_is_found_only_with_the_same_key_and_no_secret_is_written() {
        let home = tempfile::tempdir().unwrap();
        let response = session("demo");
        cache(home.path(), "cbx_mine").remember(&response);
        let found = cache(home.path(), "cbx_mine").get("demo").unwrap();
        assert_eq!((found.sandbox_id, found.session_id), (response.sandbox.id, response.session_id));
        assert_eq!(cache(home.path(), "cbx_other").get("demo"), None);
        let file = home.path().join(".cache/cobox/threads.json");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(!text.contains("secret-token") && !text.contains("cbx_mine"), "{text}");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
    }

    #[test]
    fn forgetting_removes_only_entries_of_the_same_key() {
        let home = tempfile::tempdir().unwrap();
        let (first_key, other_key) = (cache(home.path(), "a"), cache(home.path(), "b"));
        let response = session("demo");
        first_key.remember(&response);
        first_key.remember(&session("two"));
        other_key.remember(&session("demo"));
        first_key.forget_id(response.session_id.as_str());
        assert!(first_key.get("demo").is_none() && first_key.get("two").is_some() && other_key.get("demo").is_some());
        first_key.forget("two");
        assert!(first_key.get("two").is_none() && other_key.get("demo").is_some());
    }

    #[test]
    fn the_cache_is_bounded_and_keeps_the_newest_entries() {
        let home = tempfile::tempdir().unwrap();
        let cache = cache(home.path(), "a");
        (0..MAX_ENTRIES + 10).for_each(|i| cache.remember(&session(&format!("t{i}"))));
        assert_eq!(cache.read().threads.len(), MAX_ENTRIES);
        assert!(cache.get(&format!("t{}", MAX_ENTRIES + 9)).is_some());
    }

    #[test]
    fn an_unreadable_file_counts_as_empty_and_is_rewritten() {
        let home = tempfile::tempdir().unwrap();
        let cache = cache(home.path(), "a");
        cache.remember(&session("demo"));
        for broken in ["", "{\"threads\": [{", "[]", "{\"threads\": [{\"owner\": 1}]}"] {
            std::fs::write(&cache.path, broken).unwrap();
            assert!(cache.get("demo").is_none());
        }
        cache.remember(&session("demo"));
        assert!(cache.get("demo").is_some());
    }

    #[test]
    fn a_recently_used_thread_is_not_rewritten() {
        let home = tempfile::tempdir().unwrap();
        let cache = cache(home.path(), "a");
        let response = session("demo");
        cache.remember(&response);
        let inode = || std::os::unix::fs::MetadataExt::ino(&cache.path.metadata().unwrap());
        let before = inode();
        cache.remember(&response);
        assert_eq!(inode(), before);
        cache.remember(&session("demo"));
        assert_ne!(inode(), before);
    }
}
