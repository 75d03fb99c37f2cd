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
    path::{query_values, show, split},
    root::{kind, open_beneath, refuse_kernel_files},
    write::{current, temp_name},
};

/// Which symbolic links are accepted. In all cases none is followed during unpacking.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Links {
    /// Links that stay in the directory that is unpacked into.
    Inside,
    /// All links: trees such as Python's virtual environments link to files elsewhere in the sandbox.
    Any,
}

impl Links {
    /// Parses `?links=`.
    pub fn of(uri: &Uri) -> Result<Self, ApiError> {
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
            show(raw),
            show(target)
        )))
    }
}

/// Whether a link stays inside the directory, as far as its text shows. The components above the link are directories,
/// not links. A name in the target may itself be a link, so `..` after a name could lead anywhere and is refused.
fn stays_inside(directory: &[u8], target: &[u8]) -> bool {
    if target.first() == Some(&b'/') {
        return false;
    }
    let mut above = directory.split(|b| *b == b'/').filter(|part| !part.is_empty()).count();
    let mut has_name = false;
    for part in target.split(|b| *b == b'/').filter(|part| !matches!(*part, b"" | b".")) {
        if part != b".." {
            has_name = true;
        } else if has_name || above == 0 {
            return false;
        } else {
            above -= 1;
        }
    }
    true
}

pub fn place_symlink(parent: &OwnedFd, last: &[u8], target: &[u8]) -> Result<(), Errno> {
    let temp = temp_name()?;
    rustix::fs::symlinkat(target, parent, temp.as_str())?;
    rustix::fs::renameat(parent, temp.as_str(), parent, last).inspect_err(|_| {
        // The first error is reported.
        let _ = rustix::fs::unlinkat(parent, temp.as_str(), AtFlags::empty());
    })
}

/// Gives a file beneath `base` another name. EINVAL if the target is not a regular file.
pub fn place_hard_link(base: &OwnedFd, target: &[u8], parent: &OwnedFd, last: &[u8]) -> Result<Stat, Errno> {
    let (above, name) = split(target).ok_or(Errno::INVAL)?;
    let above = open_beneath(base, above, OFlags::PATH | OFlags::DIRECTORY)?;
    refuse_kernel_files(&above)?;
    let temp = temp_name()?;
    // Without following links: if a program replaces the target by a link in the meantime, the new name refers to that
    // link, which the check after `linkat` detects.
    if kind(&current(&above, name)?.ok_or(Errno::NOENT)?) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    rustix::fs::linkat(&above, name, parent, temp.as_str(), AtFlags::empty())?;
    let placed = current(parent, temp.as_bytes()).and_then(|stat| match stat {
        Some(stat) if kind(&stat) == FileType::RegularFile => {
            rustix::fs::renameat(parent, temp.as_str(), parent, last)?;
            Ok(stat)
        }
        _ => Err(Errno::INVAL),
    });
    // The temporary name remains after an error, and if both names already referred to the same file: then a rename
    // does nothing.
    let _ = rustix::fs::unlinkat(parent, temp.as_str(), AtFlags::empty());
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_is_absolute_or_may_climb_out_does_not_stay_inside() {
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
        assert!(Links::Any.check(b"l", b"", b"/etc").is_ok());
        let told = Links::Inside.check(b"d/l", b"d", b"/etc").unwrap_err().message;
        assert!(told.contains("d/l") && told.contains("/etc") && told.contains("?links=any"), "{told}");
    }
}
