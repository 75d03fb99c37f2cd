//! Patterns of glob and grep over a small tree: they compile within their limits, and every match exists.

use std::{fs, os::unix::fs::symlink, path::Path, sync::OnceLock};

use boxd::fuzzing;
use cobox_protocol::fs::{GlobRequest, GrepOutput, GrepRequest, OneOrMany, SortBy};
use tempfile::TempDir;

use crate::{choose, open, temporary};

/// Longer patterns only take longer.
const MAX_PATTERN_BYTES: usize = 200;
const TEXT: &[u8] = b"one two\nthree\r\nfour \xff five\n\nsix\tseven eight\n";

fn tree() -> &'static Path {
    static TREE: OnceLock<TempDir> = OnceLock::new();
    TREE.get_or_init(|| {
        let tree = temporary();
        let root = tree.path();
        for directory in ["src/deep/er", ".hidden", "a b", "[x]"] {
            fs::create_dir_all(root.join(directory)).expect("creating a directory succeeds");
        }
        for file in ["src/main.rs", "src/deep/er/x.rs", ".hidden/y", "a b/c d.txt", "[x]/{z}", "top", ".gitignore"] {
            fs::write(root.join(file), TEXT).expect("writing a file succeeds");
        }
        symlink("/", root.join("up")).expect("creating a link succeeds");
        tree
    })
    .path()
}

/// The first two bytes choose the options. Then follow the pattern and, after a NUL, the patterns to exclude.
pub fn run(data: &[u8]) {
    let ([first, second], rest) = choose::<2>(data);
    let Ok(text) = std::str::from_utf8(&rest[..rest.len().min(MAX_PATTERN_BYTES)]) else { return };
    let (pattern, other) = text.split_once('\0').map_or((text, None), |(pattern, other)| (pattern, Some(other)));
    let other = other.map(|other| match second & 1 {
        0 => OneOrMany::One(other.to_owned()),
        _ => OneOrMany::Many(other.split('\0').map(str::to_owned).collect()),
    });
    let is = |bit: u8| first >> bit & 1 == 1;
    let glob = GlobRequest {
        pattern: pattern.to_owned(),
        ignore: other.clone(),
        respect_ignore: is(0),
        hidden: is(1).then_some(is(2)),
        case_insensitive: is(3),
        sort: [SortBy::Name, SortBy::Mtime, SortBy::Size][usize::from(second >> 1) % 3],
        ..GlobRequest::default()
    };
    for found in fuzzing::find(open(tree()), &glob).unwrap_or_default() {
        assert!(found.starts_with('/') && !found.contains("/../"), "{found}");
        assert!(fs::symlink_metadata(tree().join(&found[1..])).is_ok(), "{found} is not there");
    }
    let grep = GrepRequest {
        pattern: pattern.to_owned(),
        literal: is(4),
        case_insensitive: is(3),
        word: is(5),
        multiline: is(6),
        glob: other,
        context: Some(u32::from(second >> 3 & 3)),
        max_line_bytes: is(7).then_some(u32::from(second >> 5)),
        output: [GrepOutput::Content, GrepOutput::Files, GrepOutput::Count][usize::from(second >> 1) % 3],
        ..GrepRequest::default()
    };
    let Ok(found) = fuzzing::search(open(&tree().join("top")), &grep) else { return };
    for one in found.matches.iter().flatten() {
        assert_eq!(one.path, "/f");
        let lines = TEXT.split(|b| *b == b'\n').count() as u64;
        assert!((1..=lines).contains(&one.line.line_number), "line {}", one.line.line_number);
        for (from, to) in &one.line.spans {
            assert!(from <= to, "{from} to {to}");
        }
    }
}
