//! Tags: short key-value pairs that callers attach to sessions and sandboxes, to find them later.

use std::{collections::BTreeMap, str::FromStr};

use crate::{ApiError, text::printable};

pub type Tags = BTreeMap<String, String>;

/// Maximum number of tags in one request; larger metadata belongs in a file of the sandbox.
pub const MAX_TAGS: usize = 32;
/// Maximum length of a key, in characters.
pub const MAX_TAG_KEY: usize = 64;
/// Maximum length of a value, in characters: any accepted id fits.
pub const MAX_TAG_VALUE: usize = 256;
/// Maximum number of tags in the filter of a list: each is a condition of the database query.
pub const MAX_TAG_FILTERS: usize = 8;

/// Key for the program that created the object; clients may set it.
pub const CREATED_BY: &str = "created_by";
/// Key for the scope of the object, as `type:id`. Only the broker sets it.
pub const SCOPE: &str = "scope";
/// Key for the principal that requested the object. Only the broker sets it.
pub const PRINCIPAL: &str = "principal";

/// Checks that a caller may set these tags; the error names the invalid tag.
pub fn check(tags: &Tags) -> Result<(), ApiError> {
    if tags.len() > MAX_TAGS {
        return Err(ApiError::invalid(format!("tags: {} are too many; the maximum is {MAX_TAGS}", tags.len())));
    }
    for (key, value) in tags {
        check_key(key)?;
        check_value(key, value)?;
    }
    Ok(())
}

pub fn check_key(key: &str) -> Result<(), ApiError> {
    if [SCOPE, PRINCIPAL].contains(&key) {
        return Err(ApiError::invalid(format!("tags.{key}: is set by the broker; choose another key")));
    }
    if is_key(key) {
        return Ok(());
    }
    let shown = printable(key, MAX_TAG_KEY);
    Err(ApiError::invalid(format!("tags.{shown}: a key must be 1 to {MAX_TAG_KEY} letters, digits, `_`, `-`, `.` or `/`")))
}

pub fn check_value(key: &str, value: &str) -> Result<(), ApiError> {
    if value.chars().count() <= MAX_TAG_VALUE && !value.chars().any(char::is_control) {
        return Ok(());
    }
    Err(ApiError::invalid(format!("tags.{key}: must have at most {MAX_TAG_VALUE} characters and no control characters")))
}

/// Excludes `:` and `=`, so that a filter is unambiguous.
fn is_key(key: &str) -> bool {
    (1..=MAX_TAG_KEY).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-./".contains(&b))
}

/// A tag to filter by: `key:value` or `key=value`, or `key` for any value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagFilter {
    pub key: String,
    pub value: Option<String>,
}

impl FromStr for TagFilter {
    type Err = ApiError;

    fn from_str(text: &str) -> Result<Self, ApiError> {
        let (key, value) = match text.split_once([':', '=']) {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (text, None),
        };
        if !is_key(key) {
            return Err(ApiError::invalid("tag: must be `key:value`, or `key` for any value"));
        }
        Ok(Self { key: key.to_owned(), value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(key: &str, value: &str) -> Tags {
        Tags::from([(key.to_owned(), value.to_owned())])
    }

    #[test]
    fn an_invalid_tag_is_named_in_the_error() {
        check(&tags("thread_id", "thr/1: ü")).unwrap();
        check(&tags(CREATED_BY, "ailsd")).unwrap();
        for (key, value) in [("", "x"), ("a b", "x"), ("a:b", "x"), ("scope", "thread:t"), ("k", "a\nb"), ("principal", "me")] {
            let refused = check(&tags(key, value)).unwrap_err().message;
            assert!(refused.starts_with(&format!("tags.{key}: ")), "{refused}");
        }
        check(&tags("k", &"ü".repeat(MAX_TAG_VALUE))).unwrap();
        assert!(check(&tags("k", &"ü".repeat(MAX_TAG_VALUE + 1))).is_err());
        let many: Tags = (0..=MAX_TAGS).map(|n| (format!("k{n}"), String::new())).collect();
        assert!(check(&many).unwrap_err().message.starts_with("tags: 33"));
    }

    #[test]
    fn a_filter_is_a_key_with_or_without_a_value() {
        let read = |text: &str| text.parse::<TagFilter>().map(|f| (f.key, f.value)).ok();
        assert_eq!(read("scope:thread:t"), Some(("scope".into(), Some("thread:t".into()))));
        assert_eq!(read("a=b=c"), Some(("a".into(), Some("b=c".into()))));
        assert_eq!(read("a"), Some(("a".into(), None)));
        assert_eq!(read(":x"), None);
    }
}
