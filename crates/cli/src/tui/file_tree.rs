//! The sandbox's files as a tree, with those that changed since they were first seen and their differences.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use cobox_client::FileWatchEvent;
use cobox_langgraph::clean;
use cobox_protocol::{
    fs::{FileEntry, FileKind},
    watch::{ChangedBy, WatchEvent},
};
use similar::{ChangeTag, TextDiff};

use crate::printer::visible;

/// Maximum number of files and directories in the tree.
const MAX_PATHS: usize = 5000;
/// Total bytes of first-seen contents that are kept.
const MAX_CONTENTS_BYTES: usize = 8 * 1024 * 1024;
/// Largest file that is compared, in bytes.
pub const MAX_FILE_BYTES: u64 = 256 * 1024;
/// Maximum number of lines of a difference.
const MAX_DIFF_LINES: usize = 2000;
/// Time limit for one comparison; past it the difference is correct but longer than necessary.
const DIFF_TIMEOUT: Duration = Duration::from_millis(200);
/// Context lines around a change.
const CONTEXT_LINES: usize = 3;
/// Directories whose contents users don't edit by hand.
const GENERATED_DIRECTORIES: [&str; 6] = [".git", "node_modules", "__pycache__", ".venv", ".mypy_cache", "target"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    Missing,
    Text(String),
    /// Not text, too large, or past the total limit.
    Unavailable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeMark {
    New,
    Changed,
    Removed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileNode {
    pub path: String,
    pub name: String,
    pub depth: usize,
    pub is_directory: bool,
    pub is_folded: bool,
    pub mark: Option<(ChangeMark, bool)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffLine {
    pub tag: char,
    pub text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diff {
    pub path: String,
    pub lines: Vec<DiffLine>,
    pub scroll: usize,
}

#[derive(Debug, Default)]
pub struct FileTree {
    root: String,
    /// Keyed by path components, so that a directory's contents follow it in order. The value: whether it is a
    /// directory.
    paths: BTreeMap<Vec<String>, bool>,
    first_contents: HashMap<String, Contents>,
    contents_bytes: usize,
    /// The change, and whether an agent made the last one.
    changed: BTreeMap<String, (ChangeMark, bool)>,
    folded: HashSet<String>,
    pub selected: usize,
    pub diff: Option<Diff>,
    pub is_listed: bool,
    pub is_truncated: bool,
}

impl FileTree {
    pub fn new(root: &str) -> Self {
        Self { root: root.to_owned(), ..Self::default() }
    }

    /// Replaces the tree by a new listing; files not seen before count as unchanged.
    pub fn set_listing(&mut self, entries: &[FileEntry]) {
        self.paths.clear();
        for entry in entries {
            self.add(&entry.path, entry.kind == FileKind::Directory);
        }
        self.is_listed = true;
    }

    /// Keeps a file's contents if they are seen for the first time.
    pub fn record_contents(&mut self, path: &str, contents: Contents) {
        if self.first_contents.contains_key(path) || self.first_contents.len() >= MAX_PATHS {
            return;
        }
        let length = if let Contents::Text(text) = &contents { text.len() } else { 0 };
        let fits = self.contents_bytes + length <= MAX_CONTENTS_BYTES;
        self.contents_bytes += if fits { length } else { 0 };
        self.first_contents.insert(path.to_owned(), if fits { contents } else { Contents::Unavailable });
    }

    /// Applies a watch event. Returns whether the tree must be listed again.
    pub fn apply_watch_event(&mut self, event: &FileWatchEvent) -> bool {
        match event {
            FileWatchEvent::Watching => {}
            FileWatchEvent::Overflow(_) => return true,
            FileWatchEvent::Created(event) => self.add_created(&event.path, event),
            FileWatchEvent::Modified(event) if event.kind == FileKind::File => self.mark(&event.path, ChangeMark::Changed, event),
            FileWatchEvent::Modified(_) => {}
            FileWatchEvent::Removed(event) => self.remove_path(&event.path, event),
            FileWatchEvent::Renamed(event) => {
                if let Some(from) = &event.from {
                    self.remove_path(from, event);
                }
                self.add_created(&event.path, event);
                // The contents of a renamed directory have new paths.
                return event.kind == FileKind::Directory;
            }
        }
        false
    }

    fn add_created(&mut self, path: &str, event: &WatchEvent) {
        let is_directory = event.kind == FileKind::Directory;
        self.add(path, is_directory);
        if !is_directory {
            let mark =
                if self.first_contents.get(path).is_some_and(|c| *c != Contents::Missing) { ChangeMark::Changed } else { ChangeMark::New };
            self.record_contents(path, Contents::Missing);
            self.mark(path, mark, event);
        }
    }

    fn remove_path(&mut self, path: &str, event: &WatchEvent) {
        let components = self.components(path);
        if components.is_empty() {
            return;
        }
        self.paths.retain(|known, _| !known.starts_with(&components));
        if self.first_contents.get(path) == Some(&Contents::Missing) {
            // The file was created and removed again since the first listing.
            self.changed.remove(path);
        } else if event.kind == FileKind::File {
            self.mark(path, ChangeMark::Removed, event);
        }
    }

    fn mark(&mut self, path: &str, mark: ChangeMark, event: &WatchEvent) {
        if is_in_generated_directory(path) || self.changed.len() >= MAX_PATHS {
            return;
        }
        let is_by_agent = matches!(&event.by, ChangedBy::Client { actor, .. } if actor == "agent");
        let mark = match (self.changed.get(path), mark) {
            (Some((ChangeMark::New, _)), ChangeMark::Changed) => ChangeMark::New,
            _ if mark == ChangeMark::Changed && self.first_contents.get(path) == Some(&Contents::Missing) => ChangeMark::New,
            _ => mark,
        };
        self.changed.insert(path.to_owned(), (mark, is_by_agent));
    }

    /// The changed files, sorted by path.
    pub fn changed(&self) -> impl Iterator<Item = (&str, ChangeMark, bool)> {
        self.changed.iter().map(|(path, (mark, is_by_agent))| (path.as_str(), *mark, *is_by_agent))
    }

    /// The visible nodes of the tree.
    pub fn nodes(&self) -> Vec<FileNode> {
        let mut nodes = Vec::with_capacity(self.paths.len());
        let mut folded_parent: Option<Vec<String>> = None;
        for (components, is_directory) in &self.paths {
            if folded_parent.as_ref().is_some_and(|folded| components.starts_with(folded)) {
                continue;
            }
            let path = format!("{}/{}", self.root, components.join("/"));
            let is_folded = *is_directory && self.folded.contains(&path);
            folded_parent = is_folded.then(|| components.clone());
            let name = components.last().map(|name| clean(&visible(name), 256)).unwrap_or_default();
            let mark = self.changed.get(&path).copied();
            nodes.push(FileNode { name, depth: components.len() - 1, is_directory: *is_directory, is_folded, mark, path });
        }
        nodes
    }

    pub fn select(&mut self, by: isize) {
        let last = self.nodes().len().saturating_sub(1);
        self.selected = self.selected.saturating_add_signed(by).min(last);
    }

    /// Folds or unfolds the selected directory, or returns the path of the selected file.
    pub fn open_selected(&mut self) -> Option<String> {
        let node = self.nodes().into_iter().nth(self.selected)?;
        if !node.is_directory {
            return Some(node.path);
        }
        if !self.folded.remove(&node.path) {
            self.folded.insert(node.path);
        }
        None
    }

    /// Shows how a file differs from its first-seen contents.
    pub fn compare(&mut self, path: &str, now: &Contents) {
        let before = self.first_contents.get(path).unwrap_or(&Contents::Unavailable);
        let lines = match (before, now) {
            (Contents::Missing, Contents::Missing) => vec![note("the file was created and removed")],
            (Contents::Text(_) | Contents::Missing, Contents::Text(_) | Contents::Missing) => line_diff(text_of(before), text_of(now)),
            (_, Contents::Unavailable) => vec![note("the file is not text, or too large to show")],
            (Contents::Unavailable, Contents::Missing) => vec![note("the file was removed; its old contents are unknown")],
            (Contents::Unavailable, Contents::Text(text)) => {
                let whole = std::iter::once(note("the old contents are unknown; these are the current contents"));
                whole.chain(text.lines().take(MAX_DIFF_LINES).map(|line| diff_line(' ', line))).collect()
            }
        };
        self.diff = Some(Diff { path: path.to_owned(), lines, scroll: 0 });
    }

    fn add(&mut self, path: &str, is_directory: bool) {
        let components = self.components(path);
        if components.is_empty() || is_inside_generated_directory(&components) {
            return;
        }
        if self.paths.len() >= MAX_PATHS {
            self.is_truncated = true;
            return;
        }
        self.paths.insert(components, is_directory);
    }

    /// The path's components below the root; empty for a path outside it.
    fn components(&self, path: &str) -> Vec<String> {
        let below = path.strip_prefix(&self.root).and_then(|rest| rest.strip_prefix('/')).unwrap_or_default();
        below.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
    }
}

pub fn is_in_generated_directory(path: &str) -> bool {
    path.split('/').any(|part| GENERATED_DIRECTORIES.contains(&part))
}

fn is_inside_generated_directory(components: &[String]) -> bool {
    components[..components.len() - 1].iter().any(|part| GENERATED_DIRECTORIES.contains(&part.as_str()))
}

fn line_diff(before: &str, now: &str) -> Vec<DiffLine> {
    let diff = TextDiff::configure().timeout(DIFF_TIMEOUT).diff_lines(before, now);
    let mut lines = Vec::new();
    for (n, group) in diff.grouped_ops(CONTEXT_LINES).iter().enumerate() {
        if n > 0 {
            lines.push(note("…"));
        }
        for change in group.iter().flat_map(|op| diff.iter_changes(op)) {
            if lines.len() == MAX_DIFF_LINES {
                lines.push(note("(truncated)"));
                return lines;
            }
            let tag = match change.tag() {
                ChangeTag::Delete => '-',
                ChangeTag::Insert => '+',
                ChangeTag::Equal => ' ',
            };
            lines.push(diff_line(tag, change.value()));
        }
    }
    if lines.is_empty() {
        lines.push(note("no changes"));
    }
    lines
}

fn text_of(contents: &Contents) -> &str {
    if let Contents::Text(text) = contents { text } else { "" }
}

fn diff_line(tag: char, text: &str) -> DiffLine {
    DiffLine { tag, text: clean(text.trim_end_matches('\n'), 1024).replace('\t', "    ") }
}

fn note(text: &str) -> DiffLine {
    DiffLine { tag: '@', text: text.to_owned() }
}

#[cfg(test)]
#[path = "file_tree_tests.rs"]
mod tests;
