//! Encoding of sandbox paths, which are bytes, for URLs.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};

use crate::ClientError;

/// Everything but RFC 3986's unreserved characters and the separator.
const IN_PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
/// One path segment or query value: the separator is encoded too.
const IN_SEGMENT: &AsciiSet = &IN_PATH.add(b'/');

/// An absolute path without empty and `.` parts, percent-encoded, with its leading slash.
///
/// `..` is refused, because URL libraries remove it before the kernel can resolve it against symbolic links.
pub(crate) fn encode_path(path: &[u8]) -> Result<String, ClientError> {
    let refuse = |cause| ClientError::InvalidPath { path: String::from_utf8_lossy(path).into_owned(), cause };
    if !path.starts_with(b"/") {
        return Err(refuse("it must be absolute, such as /workspace/a.txt"));
    }
    if path.contains(&0) {
        return Err(refuse("it contains a NUL byte"));
    }
    let mut out = String::with_capacity(path.len());
    for part in path.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".") {
        if part == b".." {
            return Err(refuse("it must not contain `..`; use the resolved path"));
        }
        out.push('/');
        out.extend(percent_encode(part, IN_PATH));
    }
    if out.is_empty() {
        out.push('/');
    }
    Ok(out)
}

/// One segment of a URL's path, or one value of its query.
pub(crate) fn encode_segment(text: &[u8]) -> String {
    percent_encode(text, IN_SEGMENT).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_any_bytes_are_encoded_without_redundant_parts() {
        assert_eq!(encode_path(b"/workspace//./a b?#%.txt").unwrap(), "/workspace/a%20b%3F%23%25.txt");
        assert_eq!(encode_path(b"/w/\xff\xc3\xa9").unwrap(), "/w/%FF%C3%A9");
        assert_eq!(encode_path(b"/").unwrap(), "/");
        assert_eq!(encode_segment(b"a/b"), "a%2Fb");
    }

    #[test]
    fn paths_that_a_url_library_would_change_are_refused() {
        for bad in [&b"/workspace/../etc"[..], b"a.txt", b"", b"/a\0b"] {
            assert!(encode_path(bad).is_err(), "{bad:?}");
        }
        assert_eq!(encode_path(b"/a/..b/...").unwrap(), "/a/..b/...");
    }
}
