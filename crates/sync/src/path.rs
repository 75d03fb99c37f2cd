//! A validated path within a synced folder. Paths are ordered so that the contents of a directory follow it directly.

use std::{cmp::Ordering, fmt, sync::Arc};

/// Maximum length of a path, in bytes, as in the kernel.
const MAX_PATH_BYTES: usize = 4095;
/// Maximum length of a name, in bytes, as in Linux file systems.
const MAX_NAME_BYTES: usize = 255;
/// Maximum nesting of directories: deeper than any project, and small enough that a walk can't exhaust the file
/// descriptors.
pub const MAX_DEPTH: usize = 200;

/// Bytes compared per step.
const STRIDE: usize = 16;

/// A relative path such as `a/b/c`, without `.`, `..`, empty parts or NUL.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RelPath(Arc<[u8]>);

impl RelPath {
    /// Validates the bytes; `None` if they are not such a path.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let is_valid_name = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && part.len() <= MAX_NAME_BYTES;
        let parts = || bytes.split(|b| *b == b'/');
        let is_valid = bytes.len() <= MAX_PATH_BYTES && !bytes.contains(&0) && parts().all(is_valid_name) && parts().count() <= MAX_DEPTH;
        is_valid.then(|| Self(bytes.into()))
    }

    /// The path of `name` in this directory, or at the top.
    pub fn join(parent: Option<&RelPath>, name: &[u8]) -> Option<Self> {
        match parent {
            None => Self::new(name),
            Some(parent) => Self::new(&[&parent.0, &b"/"[..], name].concat()),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The containing directory; `None` at the top.
    pub fn parent(&self) -> Option<RelPath> {
        self.0.iter().rposition(|b| *b == b'/').map(|at| Self(self.0[..at].into()))
    }

    /// Bytes of the parent, empty at the top.
    pub fn parent_bytes(&self) -> &[u8] {
        self.0.iter().rposition(|b| *b == b'/').map_or(&[], |at| &self.0[..at])
    }

    pub fn name(&self) -> &[u8] {
        self.0.rsplit(|b| *b == b'/').next().unwrap_or(&self.0)
    }

    pub fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|b| *b == b'/')
    }

    /// Number of directories that contain the path.
    pub fn depth(&self) -> usize {
        self.0.iter().filter(|b| **b == b'/').count()
    }

    /// Every directory that contains the path, topmost first.
    pub fn ancestors(&self) -> impl Iterator<Item = RelPath> {
        self.0.iter().enumerate().filter(|(_, b)| **b == b'/').map(|(at, _)| Self(self.0[..at].into()))
    }

    /// Whether the path is strictly beneath the directory.
    pub fn is_beneath(&self, directory: &RelPath) -> bool {
        let at = directory.0.len();
        self.0.len() > at && self.0[at] == b'/' && self.0[..at] == *directory.0
    }

    pub fn is_within(&self, top: &RelPath) -> bool {
        self == top || self.is_beneath(top)
    }
}

/// A slash sorts before every other byte, so that the contents of a directory follow it directly.
impl Ord for RelPath {
    fn cmp(&self, other: &Self) -> Ordering {
        let rank = |b: u8| if b == b'/' { 0 } else { b };
        // Neighbors in a tree share long prefixes, which are skipped in steps.
        let strides = self.0.chunks_exact(STRIDE).zip(other.0.chunks_exact(STRIDE));
        let common = strides.take_while(|(a, b)| a == b).count() * STRIDE;
        match self.0[common..].iter().zip(&other.0[common..]).find(|(a, b)| a != b) {
            Some((a, b)) => rank(*a).cmp(&rank(*b)),
            None => self.0.len().cmp(&other.0.len()),
        }
    }
}

impl PartialOrd for RelPath {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Bytes that are not UTF-8 are shown in hexadecimal, and control characters are escaped so that they can't affect a
/// terminal.
impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for c in chunk.valid().chars() {
                if c.is_control() { write!(f, "{}", c.escape_default())? } else { write!(f, "{c}")? }
            }
            for b in chunk.invalid() {
                write!(f, "\\x{b:02x}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{self}`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn only_normalized_relative_paths_are_accepted() {
        for bad in ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\0b", &"x".repeat(256), &"d/".repeat(MAX_DEPTH + 1)] {
            assert!(RelPath::new(bad.as_bytes()).is_none(), "{bad}");
        }
        assert_eq!(path("a/b/c").parent(), Some(path("a/b")));
        assert_eq!((path("a").parent(), path("a/b").name()), (None, &b"b"[..]));
        assert_eq!(path("a/b/c").ancestors().collect::<Vec<_>>(), [path("a"), path("a/b")]);
    }

    #[test]
    fn the_contents_of_a_directory_sort_right_after_it() {
        let mut paths: Vec<_> = ["a-b", "a", "a/z", "a.txt", "a/b/c", "a/b"].map(path).to_vec();
        paths.sort();
        assert_eq!(paths, ["a", "a/b", "a/b/c", "a/z", "a-b", "a.txt"].map(path));
        assert!(path("a/b").is_beneath(&path("a")) && !path("a-b").is_beneath(&path("a")) && !path("a").is_beneath(&path("a")));
    }

    #[test]
    fn long_paths_are_ordered_like_short_ones() {
        let folder = "a-folder-with-a-long-name";
        let mut paths: Vec<_> = ["-b", "/z", "", ".txt", "/b"].map(|end| path(&format!("{folder}{end}"))).to_vec();
        paths.sort();
        assert_eq!(paths, ["", "/b", "/z", "-b", ".txt"].map(|end| path(&format!("{folder}{end}"))));
    }

    #[test]
    fn control_characters_in_a_name_are_escaped() {
        assert_eq!(RelPath::new(b"a\x1b[2J\xff").unwrap().to_string(), "a\\u{1b}[2J\\xff");
    }
}
