//! Ranges and conditions in a request's headers, for a file of any size.

use boxd::fuzzing;
use http::{HeaderMap, HeaderName, HeaderValue, header};

use crate::choose;

const ETAG: &str = "\"1-2-3.4\"";

/// The first eight bytes are the file's size; then follows one line for each header.
pub fn run(data: &[u8]) {
    let (size, rest) = choose::<8>(data);
    let size = u64::from_le_bytes(size) >> (size[0] % 64);
    let names = [header::RANGE, header::IF_RANGE, header::IF_MATCH, header::IF_NONE_MATCH, HeaderName::from_static("x-file-mode")];
    let mut headers = HeaderMap::new();
    for (name, value) in names.into_iter().cycle().zip(rest.split(|b| *b == b'\n').take(16)) {
        if let Ok(value) = HeaderValue::from_bytes(value)
            && !value.is_empty()
        {
            headers.append(name, value);
        }
    }
    if let Some((from, length)) = fuzzing::range(&headers, size, ETAG) {
        let end = from.checked_add(length).expect("the range is within u64");
        assert!(end <= size, "{from}+{length} of {size}");
        assert!(length > 0 || (from, size) == (0, 0), "a part is never empty");
    }
    let has = |name: HeaderName| headers.contains_key(name);
    if let Ok((changes, reads)) = fuzzing::conditions(&headers, Some(ETAG)) {
        assert!(changes || has(header::IF_MATCH) || has(header::IF_NONE_MATCH));
        assert!(reads || has(header::IF_MATCH));
    }
    if let Ok((changes, _)) = fuzzing::conditions(&headers, None) {
        // Without a file, `If-Match` never holds and `If-None-Match` always does.
        assert_eq!(changes, !has(header::IF_MATCH));
    }
}
