//! What of a folder can't be synced, and why. It is told and left alone on both sides; the rest goes on.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    Unreadable,
    /// Absolute, or it leads out of the folder.
    LinkOutside,
    SpecialFile,
    /// It changed while it was read; it is tried again.
    Changing,
    OtherFileSystem,
    /// A name or path longer or deeper than can be synced.
    PathTooLong,
    TooLarge,
    /// Beside it is a name that some file systems don't tell from this one. Told only; both are synced.
    NameClash,
    /// A folder that was deleted on the other side and stays because of what isn't synced in it.
    NotEmpty,
    /// It could not be written.
    Unwritable,
    /// What cobox itself keeps on this machine.
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

    /// Whether the path is as if it had not changed, for as long as this is so.
    pub fn freezes_path(self) -> bool {
        !matches!(self, Problem::NameClash | Problem::NotEmpty)
    }

    /// Whether it is for somebody to mend; the others are of a kind that is never synced, or are told only.
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
            Problem::Unreadable => "it may not be read",
            Problem::LinkOutside => "the link leads out of the folder",
            Problem::SpecialFile => "it is neither file, folder nor link",
            Problem::Changing => "it changes while it is read",
            Problem::OtherFileSystem => "another file system is mounted there",
            Problem::PathTooLong => "its name is too long or it lies too deep",
            Problem::TooLarge => "the file is too large",
            Problem::NameClash => "another name beside it differs only in case or in how its letters are written",
            Problem::NotEmpty => "deleted on the other side, and kept because of what is not synced in it",
            Problem::Unwritable => "it could not be written",
            Problem::OwnState => "cobox keeps its own keys and notes there, which never leave this machine",
        })
    }
}
