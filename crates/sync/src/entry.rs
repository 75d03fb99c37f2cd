//! What a path can hold: a directory, a file identified by the digest of its content, or a symbolic link.

use std::fmt;

/// BLAKE3 digest of a file's content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(blake3::hash(bytes).into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The first four bytes suffice to distinguish digests.
        self.0[..4].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// Owners, times and the other permission bits are not synced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Dir,
    File { digest: Digest, size: u64, exec: bool },
    Link { target: Box<[u8]> },
}

impl Entry {
    pub fn is_dir(&self) -> bool {
        matches!(self, Entry::Dir)
    }

    pub fn is_file(&self) -> bool {
        matches!(self, Entry::File { .. })
    }

    pub fn content(&self) -> Option<(Digest, u64)> {
        match self {
            Entry::File { digest, size, .. } => Some((*digest, *size)),
            _ => None,
        }
    }
}
