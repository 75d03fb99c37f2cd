//! A string that is never printed, for tokens and keys, and the redaction of credentials in other texts.

use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};

use crate::key::{API_KEY_PREFIX, OPAQUE_TOKEN_PREFIX};

/// Prefix of a JSON object in base64, and therefore of every JWT.
const TOKEN_PREFIX: &str = "eyJ";
/// Minimum length of a credential; shorter texts with one of the prefixes are not credentials.
const MIN_CREDENTIAL_CHARS: usize = 24;
/// Length of the public part of an API key, a ULID.
const KEY_ID_CHARS: usize = 26;
const REDACTED: &str = "[redacted]";
/// Maximum number of nested percent-encodings that are decoded: more than a chain of clients adds by mistake.
const MAX_ENCODINGS: usize = 4;

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }
    /// The plain text. The caller is responsible for where it goes.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

/// Replaces keys and tokens in a text where they do not belong, such as a path, or a field name that an error repeats.
pub fn redact(text: &str) -> Cow<'_, str> {
    for decoding in decodings(text).skip(1) {
        if let Cow::Owned(redacted) = redact_plain(&decoding)
            && redacted != *decoding
        {
            return Cow::Owned(redacted);
        }
    }
    redact_plain(text)
}

fn redact_plain(text: &str) -> Cow<'_, str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '~' | '+' | '=');
    let mut rest = text;
    let mut redacted = String::new();
    while let Some(at) = [API_KEY_PREFIX, OPAQUE_TOKEN_PREFIX, TOKEN_PREFIX].iter().filter_map(|prefix| rest.find(prefix)).min() {
        let length = rest[at..].find(|c| !is_part(c)).unwrap_or(rest.len() - at);
        redacted.push_str(&rest[..at]);
        redacted.push_str(if length >= MIN_CREDENTIAL_CHARS { REDACTED } else { &rest[at..at + length] });
        rest = &rest[at + length..];
    }
    if redacted.is_empty() && rest.len() == text.len() {
        return Cow::Borrowed(text);
    }
    redacted.push_str(rest);
    Cow::Owned(redacted)
}

/// The text itself, then the text after each further percent-decoding, until nothing is left to decode.
pub fn decodings(text: &str) -> impl Iterator<Item = Cow<'_, str>> {
    std::iter::successors(Some(Cow::Borrowed(text)), |last| decoded(last).map(Cow::Owned)).take(1 + MAX_ENCODINGS)
}

fn decoded(text: &str) -> Option<String> {
    if !text.contains('%') {
        return None;
    }
    let bytes = text.as_bytes();
    let digit = |at: usize| bytes.get(at).and_then(|b| char::from(*b).to_digit(16)).and_then(|d| u8::try_from(d).ok());
    let (mut plain, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        match (bytes[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                plain.push(high << 4 | low);
                at += 3;
            }
            (byte, ..) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    (plain != bytes).then(|| String::from_utf8_lossy(&plain).into_owned())
}

/// Whether a text contains an API key, percent-encoded or not. Stricter about the format than [`redact`], because a text with a key is
/// refused.
pub fn has_api_key(text: &str) -> bool {
    decodings(text).any(|text| has_plain_api_key(&text))
}

fn has_plain_api_key(text: &str) -> bool {
    text.match_indices(API_KEY_PREFIX).any(|(at, prefix)| {
        let Some((id, rest)) = text[at + prefix.len()..].split_at_checked(KEY_ID_CHARS) else { return false };
        let is_secret = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let secret = rest.strip_prefix('_').map_or(0, |secret| secret.find(|c| !is_secret(c)).unwrap_or(secret.len()));
        id.bytes().all(|b| b.is_ascii_alphanumeric()) && secret >= MIN_CREDENTIAL_CHARS
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_keys_are_detected_anywhere_in_a_url_without_false_positives() {
        let key = format!("{API_KEY_PREFIX}01j8xq6x0ye8rf2zt9n5b3c7dm_{}", "A-_9".repeat(10));
        let encoded: String = key.bytes().map(|b| format!("%{b:02x}")).collect();
        for text in [
            format!("/v1/files/a?key={encoded}"),
            format!("/v1/files/{}", key.replace('_', "%5F")),
            format!("/v1/files/100%/%zz%{}", key.replace("cbx", "%2563bx")),
        ] {
            assert!(has_api_key(&text), "{text}");
        }
        for text in [key.clone(), format!("/v1/files/a?key={key}&x"), format!("/v1/files/%2F{key}/b"), format!("/{API_KEY_PREFIX}/ü{key}")]
        {
            assert!(has_api_key(&text), "{text}");
        }
        for text in [
            "/v1/files/workspace/cbx_notes_of_a_meeting_that_took_very_long_indeed.txt",
            &key[..30],
            &key[..40],
            "/cbx_",
            "cbx_0123456789012345678901234ü_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "eyJhbGciOiJFZERTQSJ9.eyJpc3MiOiJjb2JveCJ9.c2lnbmF0dXJlcbx_a",
        ] {
            assert!(!has_api_key(text), "{text}");
        }
    }

    #[test]
    fn redaction_replaces_keys_and_tokens_and_nothing_else() {
        let key = format!("{API_KEY_PREFIX}01j8xq6x0ye8rf2zt9n5b3c7dm_{}", "A-_9".repeat(10));
        let token = "eyJhbGciOiJFZERTQSJ9.eyJpc3MiOiJjb2JveCJ9.c2lnbmF0dXJl";
        assert_eq!(redact(&format!("/dp/{token}/v1/{key}?x")), "/dp/[redacted]/v1/[redacted]?x");
        assert_eq!(redact(&format!("/{OPAQUE_TOKEN_PREFIX}{}/", "a".repeat(43))), "/[redacted]/");
        assert_eq!(redact(&format!("`{key}` is not an id")), "`[redacted]` is not an id");
        assert_eq!(redact(&format!("/a%20b/{}", key.replace('_', "%5f"))), "/a b/[redacted]");
        assert_eq!(redact(&format!("/x?t={}", token.replace("eyJ", "%65yJ"))), "/x?t=[redacted]");
        assert!(matches!(redact("/v1/files/workspace/a%20b%.txt"), Cow::Borrowed(_)));
        assert!(matches!(redact("/v1/files/workspace/a b.txt"), Cow::Borrowed(_)));
        assert_eq!(redact("cbx_ and eyJ are short, ü"), "cbx_ and eyJ are short, ü");
    }
}
