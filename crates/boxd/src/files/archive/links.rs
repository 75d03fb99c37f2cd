//! Links in an archive: checks the targets of symbolic links, and creates hard links to files that are already
//! unpacked.

use std::os::fd::OwnedFd;

use cobox_protocol::ApiError;
use http::Uri;
use rustix::{
    fs::{AtFlags, FileType, OFlags, Stat},
    io::Errno,
};

use crate::files::{
    path::{display_name, query_values, split_parent},
    root::{kind, open_beneath, refuse_kernel_files},
    write::{stat_entry, temp_file_name},
};

/// Which symbolic links are accepted. In all cases none is followed during unpacking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkPolicy {
    /// Links that stay in the directory that is unpacked into.
    Inside,
    /// All links: trees such as Python's virtual environments link to files elsewhere in the sandbox.
    Any,
}

impl LinkPolicy {
    /// Parses `?links=`.
    pub fn from_query(uri: &Uri) -> Result<Self, ApiError> {
        match query_values(uri, "links").next().as_deref() {
            None | Some(b"inside") => Ok(Self::Inside),
            Some(b"any") => Ok(Self::Any),
            Some(_) => Err(ApiError::invalid("links: must be inside or any")),
        }
    }

    /// `raw` is the entry's name as sent, `directory` the cleaned name of the directory that contains it.
    pub fn check(self, raw: &[u8], directory: &[u8], target: &[u8]) -> Result<(), ApiError> {
        if self == Self::Any || stays_inside(directory, target) {
            return Ok(());
        }
        Err(ApiError::invalid(format!(
            "the archive's entry {} is a link to {}, which may lead out of the directory; send it with ?links=any to keep such links",
            display_name(raw),
            display_name(target)
        )))
    }
}

/// Whether a link stays inside the directory, as far as its text shows. The components above the link are directories,
/// not links. A name in the target may itself be a link, so `..` after a name could lead anywhere and is refused.
fn stays_inside(directory: &[u8], target: &[u8]) -> bool {
    if target.first() == Some(&b'/') {
        return false;
    }
    let mut depth = directory.split(|b| *b == b'/').filter(|part| !part.is_empty()).count();
    let mut has_name = false;
    for part in target.split(|b| *b == b'/').filter(|part| !matches!(*part, b"" | b".")) {
        if part != b".." {
            has_name = true;
        } else if has_name || depth == 0 {
            return false;
        } else {
            depth -= 1;
        }
    }
    true
}

pub fn create_symlink(parent: &OwnedFd, last: &[u8], target: &[u8]) -> Result<(), Errno> {
    let temp = temp_file_name()?;
    rustix::fs::symlinkat(target, parent, temp.as_str())?;
    rustix::fs::renameat(parent, temp.as_str(), parent, last).inspect_err(|_| {
        // The first error is reported.
        let _ = rustix::fs::unlinkat(parent, temp.as_str(), AtFlags::empty());
    })
}

/// Gives a file beneath `base` another name. EINVAL if the target is not a regular file.
pub fn create_hard_link(base: &OwnedFd, target: &[u8], parent: &OwnedFd, last: &[u8]) -> Result<Stat, Errno> {
    let (parent_path, name) = split_parent(target).ok_or(Errno::INVAL)?;
    let source_parent = open_beneath(base, parent_path, OFlags::PATH | OFlags::DIRECTORY)?;
    refuse_kernel_files(&source_parent)?;
    let temp = temp_file_name()?;
    // Without following links: if a program replaces the target by a link in the meantime, the new name refers to that
    // link, which the check after `linkat` detects.
    if kind(&stat_entry(&source_parent, name)?.ok_or(Errno::NOENT)?) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    rustix::fs::linkat(&source_parent, name, parent, temp.as_str(), AtFlags::empty())?;
    let created = stat_entry(parent, temp.as_bytes()).and_then(|stat| match stat {
        Some(stat) if kind(&stat) == FileType::RegularFile => {
            rustix::fs::renameat(parent, temp.as_str(), parent, last)?;
            Ok(stat)
        }
        _ => Err(Errno::INVAL),
    });
    // The temporary name remains after an error, and if both names already referred to the same file: then a rename
    // does nothing.
    let _ = rustix::fs::unlinkat(parent, temp.as_str(), AtFlags::empty());
    created
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absolute_or_climbing_link_target_does_not_stay_inside() {
        for (directory, target) in
            [("", "a"), ("", "./a/b"), ("d", "../a"), ("d/e", "../../a"), ("d/e", ".././../a/."), ("", "..a/b.."), ("", "")]
        {
            assert!(stays_inside(directory.as_bytes(), target.as_bytes()), "{directory} {target}");
        }
        for (directory, target) in
            [("", "/"), ("d", "/etc/passwd"), ("", ".."), ("", "../a"), ("d", "../../a"), ("d", "..//./.."), ("d", "e/.."), ("d", "e/../f")]
        {
            assert!(!stays_inside(directory.as_bytes(), target.as_bytes()), "{directory} {target}");
        }
        assert!(LinkPolicy::Any.check(b"l", b"", b"/etc").is_ok());
        let message = LinkPolicy::Inside.check(b"d/l", b"d", b"/etc").unwrap_err().message;
        assert!(message.contains("d/l") && message.contains("/etc") && message.contains("?links=any"), "{message}");
    }
}
