//! Source or destination of a copy: a local path, or `THREAD:/path` in a sandbox.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::PathBuf,
};

use cobox_protocol::SandboxId;

use crate::{
    commands::{self, TargetArgs},
    context::Context,
    failure::Failure,
    target::Target,
};

/// The folder that human and agent share; relative remote paths start there.
pub const WORK_DIR: &str = "/workspace";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    Local(PathBuf),
    Remote(RemotePath),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemotePath {
    /// `None` for `:/path`: the options select the target.
    pub target: Option<Target>,
    /// Absolute, without a trailing slash except for `/` itself.
    pub path: Vec<u8>,
    /// Written with a trailing slash: the destination is a directory, even if it does not exist yet.
    pub is_directory: bool,
}

/// Follows scp's rule: a colon before any slash means remote, so `./a:b` is a local file.
pub fn parse(text: &OsStr) -> Result<Location, String> {
    let bytes = text.as_bytes();
    let colon = bytes.iter().position(|b| *b == b':');
    let slash = bytes.iter().position(|b| *b == b'/');
    match colon {
        Some(colon_at) if slash.is_none_or(|slash| colon_at < slash) => {
            parse_remote(&bytes[..colon_at], &bytes[colon_at + 1..]).map(Location::Remote)
        }
        _ if bytes.is_empty() => Err("the path is empty; use `.` for the current directory".to_owned()),
        _ => Ok(Location::Local(PathBuf::from(OsString::from(text)))),
    }
}

fn parse_remote(target_name: &[u8], path: &[u8]) -> Result<RemotePath, String> {
    let target = match std::str::from_utf8(target_name).map_err(|_| "a thread's name must be UTF-8".to_owned())? {
        "" => None,
        id if id.parse::<SandboxId>().is_ok() => Some(Target::Sandbox(id.to_owned())),
        name => Some(Target::Thread(commands::parse_thread(name)?)),
    };
    let mut absolute = if path.starts_with(b"/") { Vec::new() } else { [WORK_DIR.as_bytes(), b"/"].concat() };
    absolute.extend_from_slice(path);
    if absolute.split(|b| *b == b'/').any(|part| part == b"..") {
        return Err("a sandbox path can't contain `..`; write the resulting path".to_owned());
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
    Ok(RemotePath { target, path: clean, is_directory })
}

impl RemotePath {
    /// The target before the colon, or the one from the options; giving both is an error.
    pub fn target(&self, options: &TargetArgs) -> Result<Target, Failure> {
        match &self.target {
            Some(_) if options.sandbox.is_some() => {
                Err(Failure::new("the sandbox is given twice").with_advice("with --sandbox, write the path as :/path"))
            }
            Some(target) => Ok(target.clone()),
            None => Ok(options.resolve()),
        }
    }

    /// Resolves the target: the word before the colon is a thread or, if no such thread exists, a sandbox's name.
    pub async fn resolve_target(&self, options: &TargetArgs, context: &Context) -> Result<Target, Failure> {
        match self.target(options)? {
            Target::Thread(name) if self.target.is_some() => context.resolve_name(&name).await,
            target => Ok(target),
        }
    }

    /// The last component of the path: its name when it is copied into a directory.
    pub fn file_name(&self) -> Option<&OsStr> {
        self.path.rsplit(|b| *b == b'/').next().filter(|n| !n.is_empty()).map(OsStr::from_bytes)
    }

    /// The path of `file_name` in this directory.
    pub fn join(&self, file_name: &OsStr) -> Vec<u8> {
        let mut path = self.path.clone();
        if !path.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend_from_slice(file_name.as_bytes());
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote_path(text: &str) -> RemotePath {
        match parse(OsStr::new(text)).unwrap() {
            Location::Remote(remote) => remote,
            Location::Local(path) => panic!("{text} was parsed as the local {path:?}"),
        }
    }

    #[test]
    fn a_colon_before_any_slash_means_a_sandbox() {
        assert_eq!(remote_path("demo:/a/b"), RemotePath { target: thread("demo"), path: b"/a/b".to_vec(), is_directory: false });
        assert_eq!(remote_path(":/a").target, None);
        for local in ["./a:b", "/x:y", "plain", "."] {
            assert!(matches!(parse(OsStr::new(local)).unwrap(), Location::Local(_)), "{local}");
        }
        assert!(parse(OsStr::new("")).is_err());
    }

    fn thread(name: &str) -> Option<Target> {
        Some(Target::Thread(name.to_owned()))
    }

    #[test]
    fn a_sandbox_id_is_accepted_and_a_session_id_refused() {
        let sandbox = "sb_00000000000000000000000000";
        assert_eq!(remote_path(&format!("{sandbox}:/a")).target, Some(Target::Sandbox(sandbox.to_owned())));
        assert!(parse(OsStr::new("ssn_00000000000000000000000000:/a")).unwrap_err().contains("session"));
        assert_eq!(remote_path("sb_mine:/a").target, thread("sb_mine"));
        let options = TargetArgs { sandbox: Some("build".into()), ..TargetArgs::default() };
        assert_eq!(remote_path(":/a").target(&options).unwrap(), Target::Sandbox("build".to_owned()));
        assert!(remote_path("demo:/a").target(&options).is_err());
    }

    #[test]
    fn a_relative_remote_path_starts_in_the_shared_folder() {
        assert_eq!(remote_path("demo:a.txt").path, b"/workspace/a.txt");
        assert_eq!(remote_path("demo:"), RemotePath { target: thread("demo"), path: b"/workspace".to_vec(), is_directory: true });
        assert_eq!(remote_path(":/").path, b"/");
    }

    #[test]
    fn a_trailing_slash_means_a_directory_and_dots_are_normalized_or_refused() {
        assert!(remote_path(":/a/b/").is_directory && remote_path(":/a/b/").path == b"/a/b");
        assert_eq!(remote_path(":/a/./b//c").path, b"/a/b/c");
        assert!(parse(OsStr::new(":/a/../b")).is_err());
        assert!(parse(OsStr::new("t:../b")).is_err());
    }

    #[test]
    fn names_are_joined_and_split() {
        assert_eq!(remote_path(":/a").join(OsStr::new("b")), b"/a/b");
        assert_eq!(remote_path(":/").join(OsStr::new("b")), b"/b");
        assert_eq!(remote_path(":/a/b/").file_name(), Some(OsStr::new("b")));
        assert_eq!(remote_path(":/").file_name(), None);
    }
}
