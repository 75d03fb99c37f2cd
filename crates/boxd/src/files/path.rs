//! Paths in requests: bytes, absolute in the sandbox. Only the kernel resolves them; the checks here merely refuse what
//! no correct client sends.

use std::fmt;

use base64::{Engine, engine::general_purpose::STANDARD};
use cobox_protocol::ApiError;
use http::Uri;
use percent_encoding::percent_decode;

/// The kernel's limit on a path, without its NUL.
const MAX_PATH_BYTES: usize = 4095;
/// Maximum length of a path in an error message.
const MAX_SHOWN_CHARS: usize = 256;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SandboxPath(Vec<u8>);

impl SandboxPath {
    pub fn new(path: Vec<u8>) -> Result<Self, ApiError> {
        if path.first() != Some(&b'/') {
            return Err(ApiError::invalid("path must be an absolute path in the sandbox, such as /workspace/notes.txt"));
        }
        if path.contains(&0) {
            return Err(ApiError::invalid("path contains a NUL byte"));
        }
        if path.len() > MAX_PATH_BYTES {
            return Err(ApiError::invalid(format!("path is longer than {MAX_PATH_BYTES} bytes")));
        }
        // The kernel would keep it inside the root too. The error points out a likely mistake to the client.
        if path.split(|b| *b == b'/').any(|part| part == b"..") {
            return Err(ApiError::invalid(format!("path {} contains `..`; send the resolved path", display_name(&path))));
        }
        Ok(Self(path))
    }

    /// The rest of a request's path after a route's prefix, percent-decoded to bytes.
    pub fn from_uri(uri: &Uri, prefix: &str) -> Result<Self, ApiError> {
        let rest = uri.path().strip_prefix(prefix).unwrap_or_default();
        let mut path: Vec<u8> = percent_decode(rest.as_bytes()).collect();
        if path.is_empty() {
            path.push(b'/');
        }
        Self::new(path)
    }

    /// The `path` of a query string. A relative one starts at `base`, if the route has one.
    pub fn from_query(uri: &Uri, base: Option<&str>) -> Result<Self, ApiError> {
        let value = query_values(uri, "path").next();
        let path = value.ok_or_else(|| ApiError::invalid("the query parameter path is missing, such as ?path=/workspace"))?;
        Self::beneath(base.map(str::as_bytes), path)
    }

    /// A path that may be relative if there is a base.
    pub fn beneath(base: Option<&[u8]>, mut path: Vec<u8>) -> Result<Self, ApiError> {
        if let Some(base) = base
            && !path.is_empty()
            && path[0] != b'/'
        {
            path.splice(..0, [base, b"/"].concat());
        }
        Self::new(path)
    }

    /// A request field, as text or as base64 of its exact bytes.
    pub fn from_json(field: &str, text: Option<&str>, b64: Option<&str>) -> Result<Option<Self>, ApiError> {
        let bytes = match (text, b64) {
            (None, None) => return Ok(None),
            // boxd's responses contain both. The base64 bytes are exact.
            (_, Some(b64)) => STANDARD.decode(b64).map_err(|_| ApiError::invalid(format!("{field}_b64: invalid base64")))?,
            (Some(text), None) => text.as_bytes().to_vec(),
        };
        Self::new(bytes).map(Some).map_err(|e| ApiError::invalid(format!("{field}: {}", e.message)))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The form in JSON: text, and the exact bytes beside it if the text is lossy.
    pub fn to_json(&self) -> (String, Option<String>) {
        let exact = std::str::from_utf8(&self.0).is_err().then(|| STANDARD.encode(&self.0));
        (String::from_utf8_lossy(&self.0).into_owned(), exact)
    }
}

impl fmt::Display for SandboxPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display_name(&self.0).fmt(f)
    }
}

/// The values of a query field, decoded to bytes.
pub fn query_values<'a>(uri: &'a Uri, field: &'a str) -> impl Iterator<Item = Vec<u8>> + 'a {
    let pairs = uri.query().unwrap_or_default().split('&');
    pairs.filter_map(move |pair| pair.strip_prefix(field)?.strip_prefix('=')).map(|value| {
        let spaced: Vec<u8> = value.bytes().map(|b| if b == b'+' { b' ' } else { b }).collect();
        percent_decode(&spaced).collect()
    })
}

/// Formats a name for a message: bounded, and without control characters that a terminal would interpret.
pub fn display_name(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    let mut shown: String = text.chars().take(MAX_SHOWN_CHARS).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(MAX_SHOWN_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

/// The directory part and the last name; `None` if the path ends in `/`, `.` or `..`.
pub fn split_parent(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = path.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
    let (directory, name) = path.split_at(at);
    (!matches!(name, b"" | b"." | b"..")).then_some((directory, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(s: &str) -> Result<Vec<u8>, ApiError> {
        SandboxPath::from_uri(&s.parse().unwrap(), "/v1/files").map(|p| p.0)
    }

    #[test]
    fn a_uri_path_is_only_percent_decoded() {
        assert_eq!(uri("/v1/files/a/b.txt").unwrap(), b"/a/b.txt");
        assert_eq!(uri("/v1/files").unwrap(), b"/");
        assert_eq!(uri("/v1/files/").unwrap(), b"/");
        assert_eq!(uri("/v1/files/%FF%2F+x").unwrap(), b"/\xff/+x");
        assert_eq!(uri("/v1/files/..a/b../...").unwrap(), b"/..a/b../...");
        assert!(uri("/v1/files/a%00b").unwrap_err().message.contains("NUL"));
    }

    #[test]
    fn parent_components_are_refused_in_every_encoding() {
        for path in ["/..", "/../etc", "/a/..", "/a/../b", "/a//..//b", "/%2e%2e/etc", "/a%2f..%2Fb", "/.%2e/x"] {
            let message = uri(&format!("/v1/files{path}")).unwrap_err().message;
            assert!(message.contains("..") && message.contains("resolved path"), "{path}: {message}");
        }
        assert!(SandboxPath::beneath(Some(b"/workspace"), b"a/../b".to_vec()).is_err());
        assert!(SandboxPath::from_query(&"/x?path=..".parse().unwrap(), Some("/workspace")).is_err());
        assert!(SandboxPath::from_json("path", Some("/a/../b"), None).is_err());
        assert!(SandboxPath::from_json("path", None, Some("Ly4u")).is_err());
    }

    #[test]
    fn a_relative_query_path_requires_a_base() {
        let at = |s: &str, base| SandboxPath::from_query(&s.parse().unwrap(), base).map(|p| p.0);
        assert_eq!(at("/download?x=1&path=%2Fa+b", None).unwrap(), b"/a b");
        assert_eq!(at("/download?path=a", Some("/workspace")).unwrap(), b"/workspace/a");
        assert!(at("/v1/archive?path=a", None).is_err());
        assert!(at("/v1/archive", None).is_err());
        assert!(at("/v1/archive?path=", Some("/workspace")).is_err());
    }

    #[test]
    fn a_path_without_a_last_name_is_not_split() {
        assert_eq!(split_parent(b"/a/b"), Some((b"/a/".as_slice(), b"b".as_slice())));
        assert_eq!(split_parent(b"b"), Some((b"".as_slice(), b"b".as_slice())));
        for path in [b"/".as_slice(), b"/a/", b"/a/.", b"/a/.."] {
            assert_eq!(split_parent(path), None);
        }
    }

    #[test]
    fn a_displayed_name_is_bounded_and_has_no_control_characters() {
        assert_eq!(display_name(b"a\x1b[31m\xff"), "a\u{fffd}[31m\u{fffd}");
        assert_eq!(display_name(&[b'x'; 1000]).chars().count(), MAX_SHOWN_CHARS + 1);
    }
}
