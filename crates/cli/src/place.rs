//! Where a copy starts or ends: a path here, or `THREAD:/path` in a sandbox.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

/// The folder human and agent share; relative remote paths start there.
pub const WORK_DIR: &str = "/workspace";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    Local(PathBuf),
    Remote(Remote),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// `None` for the default thread.
    pub thread: Option<String>,
    /// Absolute, without a trailing slash (but `/` itself).
    pub path: Vec<u8>,
    /// Written with a trailing slash: the destination is a directory, whether it is there or not.
    pub is_directory: bool,
}

/// As scp reads it: a colon before any slash means remote, so `./a:b` is a local file.
pub fn parse(text: &OsStr) -> Result<Place, String> {
    let bytes = text.as_bytes();
    let colon = bytes.iter().position(|b| *b == b':');
    let slash = bytes.iter().position(|b| *b == b'/');
    match colon {
        Some(at) if slash.is_none_or(|s| at < s) => remote(&bytes[..at], &bytes[at + 1..]).map(Place::Remote),
        _ if bytes.is_empty() => Err("an empty path names nothing; `.` is the current directory".to_owned()),
        _ => Ok(Place::Local(PathBuf::from(OsString::from(text)))),
    }
}

fn remote(thread: &[u8], path: &[u8]) -> Result<Remote, String> {
    let thread = match thread {
        b"" => None,
        bytes => Some(std::str::from_utf8(bytes).map_err(|_| "a thread's name must be UTF-8".to_owned())?.to_owned()),
    };
    let mut absolute = if path.starts_with(b"/") { Vec::new() } else { [WORK_DIR.as_bytes(), b"/"].concat() };
    absolute.extend_from_slice(path);
    if absolute.split(|b| *b == b'/').any(|part| part == b"..") {
        return Err("a path in a sandbox can't have `..` in it; write the path it leads to".to_owned());
    }
    let is_directory = absolute.ends_with(b"/") || absolute.ends_with(b"/.");
    let mut clean = Vec::with_capacity(absolute.len());
    for part in absolute.split(|b| *b == b'/').filter(|p| !p.is_empty() && *p != b".") {
        clean.push(b'/');
        clean.extend_from_slice(part);
    }
    if clean.is_empty() {
        clean.push(b'/');
    }
    Ok(Remote { thread, path: clean, is_directory })
}

impl Remote {
    /// The last part of the path, which a copy into a directory is called.
    pub fn name(&self) -> Option<&OsStr> {
        self.path.rsplit(|b| *b == b'/').next().filter(|n| !n.is_empty()).map(OsStr::from_bytes)
    }

    /// The path of `name` in this directory.
    pub fn join(&self, name: &OsStr) -> Vec<u8> {
        let mut path = self.path.clone();
        if !path.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend_from_slice(name.as_bytes());
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Remote {
        match parse(OsStr::new(text)).unwrap() {
            Place::Remote(remote) => remote,
            Place::Local(path) => panic!("{text} was read as the local {path:?}"),
        }
    }

    #[test]
    fn a_colon_before_any_slash_means_a_sandbox() {
        assert_eq!(at("demo:/a/b"), Remote { thread: Some("demo".into()), path: b"/a/b".to_vec(), is_directory: false });
        assert_eq!(at(":/a").thread, None);
        for local in ["./a:b", "/x:y", "plain", "."] {
            assert!(matches!(parse(OsStr::new(local)).unwrap(), Place::Local(_)), "{local}");
        }
        assert!(parse(OsStr::new("")).is_err());
    }

    #[test]
    fn a_relative_remote_path_starts_in_the_shared_folder() {
        assert_eq!(at("demo:a.txt").path, b"/workspace/a.txt");
        assert_eq!(at("demo:"), Remote { thread: Some("demo".into()), path: b"/workspace".to_vec(), is_directory: true });
        assert_eq!(at(":/").path, b"/");
    }

    #[test]
    fn a_trailing_slash_says_directory_and_dots_are_cleaned_or_refused() {
        assert!(at(":/a/b/").is_directory && at(":/a/b/").path == b"/a/b");
        assert_eq!(at(":/a/./b//c").path, b"/a/b/c");
        assert!(parse(OsStr::new(":/a/../b")).is_err());
        assert!(parse(OsStr::new("t:../b")).is_err());
    }

    #[test]
    fn names_join_and_split() {
        assert_eq!(at(":/a").join(OsStr::new("b")), b"/a/b");
        assert_eq!(at(":/").join(OsStr::new("b")), b"/b");
        assert_eq!(at(":/a/b/").name(), Some(OsStr::new("b")));
        assert_eq!(at(":/").name(), None);
    }
}
