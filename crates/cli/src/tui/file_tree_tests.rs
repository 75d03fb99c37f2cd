//! Tests of the file tree and its differences after each kind of change.

use cobox_protocol::Timestamp;

use super::*;

fn event(path: &str, by: &str) -> WatchEvent {
    let by = match by {
        "process" => ChangedBy::Process("process".into()),
        actor => ChangedBy::Client { principal: "x".into(), actor: actor.into() },
    };
    WatchEvent {
        path: path.into(),
        path_b64: None,
        kind: FileKind::File,
        by,
        at: Timestamp::from_unix(0),
        from: None,
        from_b64: None,
        to: None,
        to_b64: None,
    }
}

fn tree_lines(files: &FileTree) -> Vec<String> {
    let mark = |node: &FileNode| match node.mark {
        Some((mark, is_by_agent)) => format!(" {mark:?}{}", if is_by_agent { " by agent" } else { "" }),
        None => String::new(),
    };
    files.nodes().iter().map(|n| format!("{}{}{}", "  ".repeat(n.depth), n.name, mark(n))).collect()
}

fn text(text: &str) -> Contents {
    Contents::Text(text.into())
}

#[test]
fn directories_precede_their_contents_and_changes_show_their_author() {
    let mut files = FileTree::new("/workspace");
    for (path, is_directory) in [("/workspace/a", true), ("/workspace/a.txt", false), ("/workspace/a/b.py", false), ("/elsewhere", false)] {
        files.add(path, is_directory);
    }
    files.record_contents("/workspace/a.txt", text("one\n"));
    assert_eq!(tree_lines(&files), ["a", "  b.py", "a.txt"]);
    files.apply_watch_event(&FileWatchEvent::Modified(event("/workspace/a.txt", "human")));
    files.apply_watch_event(&FileWatchEvent::Created(event("/workspace/a/new.py", "agent")));
    files.apply_watch_event(&FileWatchEvent::Modified(event("/workspace/a/new.py", "agent")));
    assert_eq!(tree_lines(&files), ["a", "  b.py", "  new.py New by agent", "a.txt Changed"]);
    files.apply_watch_event(&FileWatchEvent::Removed(event("/workspace/a/b.py", "process")));
    files.apply_watch_event(&FileWatchEvent::Removed(event("/workspace/a/new.py", "process")));
    assert_eq!(tree_lines(&files), ["a", "a.txt Changed"]);
    assert_eq!(files.changed().map(|(path, ..)| path).collect::<Vec<_>>(), ["/workspace/a.txt", "/workspace/a/b.py"]);
    files.selected = 0;
    assert_eq!(files.open_selected(), None);
    assert!(files.nodes()[0].is_folded);
}

#[test]
fn differences_are_against_first_seen_contents() {
    let mut files = FileTree::new("/w");
    let lines = |files: &FileTree| files.diff.as_ref().unwrap().lines.iter().map(|l| format!("{}{}", l.tag, l.text)).collect::<Vec<_>>();
    files.record_contents("/w/a", text("one\ntwo\nthree\n"));
    files.record_contents("/w/a", text("ignored"));
    files.compare("/w/a", &text("one\n2\x1b[31m\nthree\n"));
    assert_eq!(lines(&files), [" one", "-two", "+2", " three"]);
    files.compare("/w/a", &text("one\ntwo\nthree\n"));
    assert_eq!(lines(&files), ["@no changes"]);
    files.record_contents("/w/new", Contents::Missing);
    files.compare("/w/new", &text("x\n"));
    assert_eq!(lines(&files), ["+x"]);
    files.compare("/w/unknown", &text("y"));
    assert_eq!(lines(&files).last().unwrap(), " y");
    files.compare("/w/a", &Contents::Missing);
    assert_eq!(lines(&files), ["-one", "-two", "-three"]);
}

#[test]
fn generated_directories_are_skipped_and_memory_is_bounded() {
    let mut files = FileTree::new("/w");
    files.add("/w/.git", true);
    files.add("/w/.git/config", false);
    assert_eq!(tree_lines(&files), [".git"]);
    let large = "x".repeat(MAX_CONTENTS_BYTES);
    files.record_contents("/w/large", text(&large));
    files.record_contents("/w/next", text("y"));
    assert_eq!(files.first_contents["/w/next"], Contents::Unavailable);
    for n in 0..MAX_PATHS + 10 {
        files.add(&format!("/w/{n}"), false);
    }
    assert!(files.is_truncated && files.paths.len() == MAX_PATHS);
}

#[test]
fn a_directory_that_is_renamed_is_listed_again() {
    let mut files = FileTree::new("/w");
    files.add("/w/a", true);
    files.add("/w/a/x", false);
    let renamed = WatchEvent { kind: FileKind::Directory, from: Some("/w/a".into()), ..event("/w/b", "process") };
    assert!(files.apply_watch_event(&FileWatchEvent::Renamed(renamed)));
    assert_eq!(tree_lines(&files), ["b"]);
}
