//! Cursors of event streams and lists that clients send back: genuine, of another stream, or made up.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use boxd::fuzzing;
use cobox_protocol::fs::{ListRequest, SortBy};
use http::{HeaderMap, HeaderValue};
use std::{fs, path::Path, sync::OnceLock};
use tempfile::TempDir;

use crate::{choose, open, temporary};

const LIFE: &str = "life";

fn tree() -> &'static Path {
    static TREE: OnceLock<TempDir> = OnceLock::new();
    TREE.get_or_init(|| {
        let tree = temporary();
        for directory in ["a", "a/b", "c"] {
            fs::create_dir(tree.path().join(directory)).expect("creating a directory succeeds");
        }
        for file in ["a/1", "a/b/2", "c/3", "d", "e"] {
            fs::write(tree.path().join(file), file).expect("writing a file succeeds");
        }
        tree
    })
    .path()
}

/// The first byte chooses a list's sort order; the rest is the cursor, both as it is and as the content of an encoded
/// one.
pub fn run(data: &[u8]) {
    let ([choice], cursor) = choose::<1>(data);
    if let Ok(value) = HeaderValue::from_bytes(cursor) {
        let headers = HeaderMap::from_iter([(http::HeaderName::from_static("last-event-id"), value)]);
        if let Ok(Some((stdout, stderr))) = fuzzing::exec_cursor(&headers) {
            let again = format!("{stdout}-{stderr}");
            let headers = HeaderMap::from_iter([(http::HeaderName::from_static("last-event-id"), again.parse().expect("digits"))]);
            assert_eq!(fuzzing::exec_cursor(&headers).ok(), Some(Some((stdout, stderr))));
        }
    }
    let text = String::from_utf8_lossy(cursor);
    if let Some(number) = fuzzing::watch_cursor(&text, LIFE) {
        assert_eq!(fuzzing::watch_cursor(&format!("{LIFE}-{number}"), LIFE), Some(number));
    }
    for given in [text.into_owned(), URL_SAFE_NO_PAD.encode(cursor)] {
        list(choice, given);
    }
}

/// From any accepted cursor, the pages end and no entry is listed twice.
fn list(choice: u8, cursor: String) {
    let recursive = choice & 4 != 0;
    let mut request = ListRequest {
        cursor: Some(cursor),
        limit: Some(u32::from(choice >> 4) % 3 + 1),
        sort: if recursive { SortBy::Name } else { [SortBy::Name, SortBy::Mtime, SortBy::Size][usize::from(choice & 3) % 3] },
        descending: !recursive && choice & 8 != 0,
        recursive,
        ..ListRequest::default()
    };
    let mut listed = Vec::new();
    for _ in 0..20 {
        let Ok(page) = fuzzing::list_page(open(tree()), &request) else { return };
        for entry in page.entries {
            assert!(!listed.contains(&entry.path), "{} is listed twice", entry.path);
            listed.push(entry.path);
        }
        match page.next_cursor {
            Some(next) => request.cursor = Some(next),
            None => return,
        }
    }
    panic!("the pages must end");
}
