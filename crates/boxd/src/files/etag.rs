//! Versions of files: their ETags, and the conditions of a request on them.

use std::collections::{HashMap, VecDeque};

use cobox_protocol::{ApiError, ErrorCode};
use http::{HeaderMap, HeaderName, header};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::Stat;

/// Maximum number of remembered writes. A forgotten file gets another ETag, which costs a conditional writer one more
/// read.
const REMEMBERED_WRITES: usize = 16 * 1024;

/// Counts boxd's own writes. The kernel's clock advances every few milliseconds and inode numbers are reused, so two
/// writes within one tick could get the same ETag. The count makes them distinct.
#[derive(Default)]
pub struct WriteLog(Mutex<Writes>);

#[derive(Default)]
pub struct Writes {
    count: u64,
    by_file: HashMap<FileKey, u64>,
    oldest_first: VecDeque<(FileKey, u64)>,
}

type FileKey = (u64, u64);

#[allow(clippy::unnecessary_cast, reason = "these fields are narrower on some machines")]
fn key(stat: &Stat) -> FileKey {
    (stat.st_dev as u64, stat.st_ino as u64)
}

impl WriteLog {
    /// Held from the check of a file's version to the change that depends on it, so that only one of two concurrent
    /// boxd writers succeeds.
    pub fn lock(&self) -> MutexGuard<'_, Writes> {
        // A partly recorded write only changes an ETag.
        self.0.lock()
    }

    pub fn etag(&self, stat: &Stat) -> String {
        self.lock().etag(stat)
    }
}

impl Writes {
    pub fn etag(&self, stat: &Stat) -> String {
        let (_, inode) = key(stat);
        let base = format!("\"{inode:x}-{:x}-{:x}.{:x}", stat.st_size, stat.st_ctime, stat.st_ctime_nsec);
        match self.by_file.get(&key(stat)) {
            Some(count) => format!("{base}-{count:x}\""),
            None => format!("{base}\""),
        }
    }

    pub fn record(&mut self, stat: &Stat) {
        self.count += 1;
        self.by_file.insert(key(stat), self.count);
        self.oldest_first.push_back((key(stat), self.count));
        if self.oldest_first.len() > REMEMBERED_WRITES
            && let Some((oldest, count)) = self.oldest_first.pop_front()
            && self.by_file.get(&oldest) == Some(&count)
        {
            self.by_file.remove(&oldest);
        }
    }
}

/// `If-Match` and `If-None-Match` of a request.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    if_match: Option<Vec<String>>,
    if_none_match: Option<Vec<String>>,
}

impl Conditions {
    pub fn from_headers(headers: &HeaderMap) -> Result<Self, ApiError> {
        Ok(Self { if_match: tags(headers, header::IF_MATCH)?, if_none_match: tags(headers, header::IF_NONE_MATCH)? })
    }

    /// Equivalent to `If-Match` with this tag, if there is one.
    pub fn matching(tag: Option<&str>) -> Self {
        Self { if_match: tag.map(|t| vec![t.trim().to_owned()]), if_none_match: None }
    }

    /// Checks a change: both conditions must hold. `current` is the file's ETag, `None` if there is no file.
    pub fn check_change(&self, current: Option<&str>, shown: impl std::fmt::Display) -> Result<(), ApiError> {
        self.check_match(current, &shown)?;
        match &self.if_none_match {
            Some(tags) if current.is_some_and(|c| matches_weakly(tags, c)) => Err(file_changed(current, format!("{shown} already exists"))),
            _ => Ok(()),
        }
    }

    /// Checks a read: whether to answer "not modified".
    pub fn check_read(&self, current: &str, shown: impl std::fmt::Display) -> Result<bool, ApiError> {
        self.check_match(Some(current), shown)?;
        Ok(self.if_none_match.as_ref().is_some_and(|tags| matches_weakly(tags, current)))
    }

    /// Whether the file must not exist. The kernel can then enforce it, even against the sandbox's own programs.
    pub fn only_if_absent(&self) -> bool {
        self.if_none_match.as_ref().is_some_and(|tags| tags.iter().any(|t| t == "*"))
    }

    fn check_match(&self, current: Option<&str>, shown: impl std::fmt::Display) -> Result<(), ApiError> {
        match (&self.if_match, current) {
            (None, _) => Ok(()),
            (Some(tags), Some(c)) if matches_strongly(tags, c) => Ok(()),
            (Some(_), Some(_)) => Err(file_changed(current, format!("{shown} has changed and no longer matches If-Match; read it again"))),
            (Some(_), None) => Err(file_changed(None, format!("{shown} does not exist, so it can't match If-Match"))),
        }
    }
}

fn file_changed(current: Option<&str>, message: String) -> ApiError {
    ApiError::new(ErrorCode::FileChanged, message).with_details(serde_json::json!({ "etag": current }))
}

/// RFC 9110's strong comparison, for changes that must not overwrite another version: a weak tag matches nothing.
fn matches_strongly(tags: &[String], current: &str) -> bool {
    tags.iter().any(|t| t == "*" || t == current)
}

/// RFC 9110's weak comparison, for skipping a write or a response body: a tag that a proxy made weak still matches.
fn matches_weakly(tags: &[String], current: &str) -> bool {
    tags.iter().any(|t| t == "*" || t.trim_start_matches("W/") == current)
}

/// The entity tags in a header.
fn tags(headers: &HeaderMap, name: HeaderName) -> Result<Option<Vec<String>>, ApiError> {
    let mut all_tags = None;
    for value in headers.get_all(&name) {
        let text = value.to_str().map_err(|_| ApiError::invalid(format!("{name} is not a list of entity tags")))?;
        let list: &mut Vec<String> = all_tags.get_or_insert_default();
        list.extend(text.split(',').map(|tag| tag.trim().to_owned()));
    }
    Ok(all_tags)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(name: HeaderName, value: &'static str) -> Conditions {
        Conditions::from_headers(&HeaderMap::from_iter([(name, value.parse().unwrap())])).unwrap()
    }

    #[test]
    fn if_match_requires_a_file_with_one_of_its_tags() {
        let c = conditions(header::IF_MATCH, "\"a\", \"b\", W/\"d\"");
        assert!(c.check_change(Some("\"b\""), "f").is_ok());
        assert_eq!(c.check_change(Some("\"d\""), "f").unwrap_err().code, ErrorCode::FileChanged, "weak entity tags are not supported");
        assert!(Conditions::matching(Some("\"a\"")).check_change(Some("\"a\""), "f").is_ok());
        assert!(Conditions::matching(Some("W/\"a\"")).check_change(Some("\"a\""), "f").is_err());
        assert_eq!(c.check_change(Some("\"c\""), "f").unwrap_err().code, ErrorCode::FileChanged);
        assert_eq!(c.check_change(None, "f").unwrap_err().code, ErrorCode::FileChanged);
        assert!(conditions(header::IF_MATCH, "*").check_change(None, "f").is_err());
        assert!(conditions(header::IF_MATCH, "*").check_change(Some("\"x\""), "f").is_ok());
    }

    #[test]
    fn if_none_match_requires_that_no_tag_matches() {
        let absent = conditions(header::IF_NONE_MATCH, "*");
        assert!(absent.only_if_absent());
        assert!(absent.check_change(None, "f").is_ok());
        assert_eq!(absent.check_change(Some("\"a\""), "f").unwrap_err().code, ErrorCode::FileChanged);
        assert!(conditions(header::IF_NONE_MATCH, "\"a\"").check_read("\"a\"", "f").unwrap());
        assert!(conditions(header::IF_NONE_MATCH, "W/\"a\"").check_read("\"a\"", "f").unwrap());
        assert!(conditions(header::IF_NONE_MATCH, "W/\"a\"").check_change(Some("\"a\""), "f").is_err());
        assert!(!conditions(header::IF_NONE_MATCH, "\"a\"").check_read("\"b\"", "f").unwrap());
    }

    #[test]
    fn writes_within_one_clock_tick_get_different_tags_and_the_log_is_bounded() {
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        let log = WriteLog::default();
        let before = log.etag(&stat);
        log.lock().record(&stat);
        let first = log.etag(&stat);
        log.lock().record(&stat);
        assert!(before != first && first != log.etag(&stat));
        for _ in 0..REMEMBERED_WRITES * 2 {
            log.lock().record(&stat);
        }
        assert_eq!(log.lock().oldest_first.len(), REMEMBERED_WRITES);
        assert!(log.lock().by_file.contains_key(&key(&stat)));
    }
}
