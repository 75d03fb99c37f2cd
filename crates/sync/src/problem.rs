//! Problems that keep a path from being synced. They are reported, and the path is left unchanged on both sides while
//! everything else is synced.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    Unreadable,
    /// The target is absolute or leaves the folder.
    LinkOutside,
    SpecialFile,
    /// The file changed while it was read; it is retried.
    Changing,
    OtherFileSystem,
    /// A name or path that is too long or too deep.
    PathTooLong,
    TooLarge,
    /// Another name next to it is the same name on some file systems. Only a warning; both are synced.
    NameClash,
    /// A directory that was deleted on the other side and stays because it contains files that are not synced.
    NotEmpty,
    /// The path could not be written.
    Unwritable,
    /// State of cobox itself on this machine.
    OwnState,
}

impl Problem {
    pub const ALL: [Problem; 11] = [
        Problem::Unreadable,
        Problem::LinkOutside,
        Problem::SpecialFile,
        Problem::Changing,
        Problem::OtherFileSystem,
        Problem::PathTooLong,
        Problem::TooLarge,
        Problem::NameClash,
        Problem::NotEmpty,
        Problem::Unwritable,
        Problem::OwnState,
    ];

    /// Whether the path is treated as unchanged while the problem lasts.
    pub fn freezes_path(self) -> bool {
        !matches!(self, Problem::NameClash | Problem::NotEmpty)
    }

    /// Whether the user has to fix it. The others are kinds of files that are never synced, or warnings.
    pub fn is_failure(self) -> bool {
        matches!(self, Problem::Unreadable | Problem::Changing | Problem::PathTooLong | Problem::TooLarge | Problem::Unwritable)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Problem::Unreadable => "unreadable",
            Problem::LinkOutside => "link_outside",
            Problem::SpecialFile => "special_file",
            Problem::Changing => "changing",
            Problem::OtherFileSystem => "other_file_system",
            Problem::PathTooLong => "unnameable",
            Problem::TooLarge => "too_large",
            Problem::NameClash => "name_clash",
            Problem::NotEmpty => "not_empty",
            Problem::Unwritable => "unwritable",
            Problem::OwnState => "own_state",
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Problem::Unreadable => "permission to read it is missing",
            Problem::LinkOutside => "the link points outside the folder",
            Problem::SpecialFile => "it is not a file, directory or link",
            Problem::Changing => "it keeps changing while it is read",
            Problem::OtherFileSystem => "another file system is mounted there",
            Problem::PathTooLong => "its path is too long or too deep",
            Problem::TooLarge => "the file is too large",
            Problem::NameClash => "another name in the same directory differs only in case or Unicode form",
            Problem::NotEmpty => "deleted on the other side, but kept because it contains files that are not synced",
            Problem::Unwritable => "it could not be written",
            Problem::OwnState => "it holds cobox's own keys and state, which never leave this machine",
        })
    }
}
