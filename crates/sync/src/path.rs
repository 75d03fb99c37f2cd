//! A path within a synced folder: bytes, checked once, ordered so that everything beneath a directory follows it at once.

use std::{cmp::Ordering, fmt, sync::Arc};

/// What the kernel takes as one path, in bytes.
const MAX_PATH_BYTES: usize = 4095;
/// What Linux file systems take as one name, in bytes.
const MAX_NAME_BYTES: usize = 255;
/// Directories within directories: beyond what people make, and few enough that walking one can't be made to hold every descriptor.
pub const MAX_DEPTH: usize = 200;

/// Bytes compared at once.
const STRIDE: usize = 16;

/// `a/b/c`: relative, without `.`, `..`, empty parts or NUL.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct RelPath(Arc<[u8]>);

impl RelPath {
    /// Nothing where the bytes are no such path.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let is_valid_name = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && part.len() <= MAX_NAME_BYTES;
        let parts = || bytes.split(|b| *b == b'/');
        let is_valid = bytes.len() <= MAX_PATH_BYTES && !bytes.contains(&0) && parts().all(is_valid_name) && parts().count() <= MAX_DEPTH;
        is_valid.then(|| Self(bytes.into()))
    }

    /// `name` in this directory, or at the top.
    pub fn join(parent: Option<&RelPath>, name: &[u8]) -> Option<Self> {
        match parent {
            None => Self::new(name),
            Some(parent) => Self::new(&[&parent.0, &b"/"[..], name].concat()),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The directory it is in; nothing at the top.
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

    /// How many directories it is in.
    pub fn depth(&self) -> usize {
        self.0.iter().filter(|b| **b == b'/').count()
    }

    /// Every directory it is in, the topmost first.
    pub fn ancestors(&self) -> impl Iterator<Item = RelPath> {
        self.0.iter().enumerate().filter(|(_, b)| **b == b'/').map(|(at, _)| Self(self.0[..at].into()))
    }

    /// Strictly beneath that directory.
    pub fn is_beneath(&self, directory: &RelPath) -> bool {
        let at = directory.0.len();
        self.0.len() > at && self.0[at] == b'/' && self.0[..at] == *directory.0
    }

    pub fn is_within(&self, top: &RelPath) -> bool {
        self == top || self.is_beneath(top)
    }
}

/// Part by part: a slash comes before every other byte, so a directory's contents follow it without a stranger in between.
impl Ord for RelPath {
    fn cmp(&self, other: &Self) -> Ordering {
        let rank = |b: u8| if b == b'/' { 0 } else { b };
        // Those near each other in a tree begin alike, which is found out in strides.
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

/// As people read it. What is not text is shown by its bytes, and control characters can't reach a terminal.
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
