//! Paths in URLs, queries and JSON: the bytes passed to the kernel, and how messages and responses display them.

use base64::{Engine, engine::general_purpose::STANDARD};
use boxd::fuzzing::{self, ReadPath};
use http::Uri;

/// 256 characters of up to four bytes, and the ellipsis.
const MAX_SHOWN_BYTES: usize = 256 * 4 + 3;

pub fn run(data: &[u8]) {
    for prefix in ["/v1/files/", "/v1/files", "/download?path=", "/download?sync=true&path="] {
        let Ok(uri) = Uri::try_from([prefix.as_bytes(), data].concat()) else { continue };
        if let Ok(path) = fuzzing::path_in_uri(&uri) {
            check(&path);
        }
        if let Ok(path) = fuzzing::path_in_query(&uri) {
            check(&path);
        }
    }
    let text = std::str::from_utf8(data).ok();
    for (text, b64) in [(text, None), (None, text), (text, text)] {
        if let Ok(Some(path)) = fuzzing::path_in_json(text, b64) {
            check(&path);
        }
    }
}

fn check(path: &ReadPath) {
    assert_eq!(path.bytes.first(), Some(&b'/'), "absolute");
    assert!(!path.bytes.contains(&0) && path.bytes.len() <= 4095, "accepted by the kernel");
    assert!(!path.bytes.split(|b| *b == b'/').any(|part| part == b".."), "no parent directory");
    assert!(path.shown.len() <= MAX_SHOWN_BYTES && !path.shown.chars().any(char::is_control), "limited in size, without controls");
    let (text, b64) = &path.json;
    match b64 {
        Some(b64) => assert_eq!(STANDARD.decode(b64).expect("it is base64"), path.bytes),
        None => assert_eq!(text.as_bytes(), path.bytes),
    }
    let again = fuzzing::path_in_json(Some(text), b64.as_deref()).expect("a reported path can be requested").expect("there is a path");
    assert_eq!(again.bytes, path.bytes);
}
