//! Rules from `.gitignore` and `.ignore` files, read by descriptor during a walk, together with those of the parent
//! directories.

use std::{
    ffi::OsStr,
    fs::File,
    io::Read,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    sync::Arc,
};

use cobox_protocol::ApiError;
use ignore::{
    Match,
    gitignore::{Gitignore, GitignoreBuilder},
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use crate::files::{Root, SandboxPath, kind};

/// The first file takes precedence.
const RULE_FILES: [&str; 2] = [".ignore", ".gitignore"];
/// A larger file is a mistake or an attack. The rest is not read.
const MAX_RULE_FILE_BYTES: u64 = 256 * 1024;
/// Maximum number of directories above the searched one.
const MAX_PARENTS: usize = 64;

/// The rules of a directory and its parents.
pub struct IgnoreRules {
    parent: Option<Arc<IgnoreRules>>,
    /// Length of the path's part that leads to this directory.
    prefix: usize,
    /// For a directory above the walk's start: the path from it to the start.
    path_to_start: Vec<u8>,
    matchers: Vec<Gitignore>,
}

impl IgnoreRules {
    /// The rules that apply where a walk starts: those of the repository that contains it, if any.
    pub fn at_walk_start(root: &Root, path: &SandboxPath) -> Arc<Self> {
        let mut parent_rules = Vec::new();
        let mut path_above = path.bytes();
        let trimmed_length = path_above.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
        path_above = &path_above[..trimmed_length];
        let start_path = path_above;
        let mut is_in_repository = root.open_directory(start_path).is_ok_and(|d| has_git(&d));
        for _ in 0..MAX_PARENTS {
            if is_in_repository || path_above.is_empty() {
                break;
            }
            path_above = &path_above[..path_above.iter().rposition(|b| *b == b'/').unwrap_or(0)];
            let Ok(directory) = root.open_directory(path_above) else { break };
            is_in_repository = has_git(&directory);
            let path_to_start = [&start_path[path_above.len() + 1..], b"/"].concat();
            parent_rules.push((path_to_start, read_rules(&directory)));
        }
        let mut rules = Arc::new(Self { parent: None, prefix: 0, path_to_start: Vec::new(), matchers: Vec::new() });
        if is_in_repository {
            for (path_to_start, matchers) in parent_rules.into_iter().rev() {
                rules = Arc::new(Self { parent: Some(rules), prefix: 0, path_to_start, matchers });
            }
        }
        rules
    }

    /// Adds the rules of a directory below.
    pub fn with_directory(parent: Arc<Self>, directory: &OwnedFd, prefix: usize) -> Arc<Self> {
        let matchers = read_rules(directory);
        if matchers.is_empty() { parent } else { Arc::new(Self { parent: Some(parent), prefix, path_to_start: Vec::new(), matchers }) }
    }

    /// Patterns in the same syntax, from a request.
    pub fn from_patterns(patterns: &[String]) -> Result<Gitignore, ApiError> {
        let mut builder = GitignoreBuilder::new("");
        for pattern in patterns {
            builder.add_line(None, pattern).map_err(|e| ApiError::invalid(format!("ignore: {e}")))?;
        }
        builder.build().map_err(|e| ApiError::invalid(format!("ignore: {e}")))
    }

    pub fn ignores(&self, path: &[u8], is_directory: bool) -> bool {
        if is_directory && (path == b".git" || path.ends_with(b"/.git")) {
            return true;
        }
        let mut current = Some(self);
        while let Some(rules) = current {
            for matcher in &rules.matchers {
                let matched = if rules.path_to_start.is_empty() {
                    matcher.matched(as_path(&path[rules.prefix..]), is_directory)
                } else {
                    matcher.matched(as_path(&[rules.path_to_start.as_slice(), path].concat()), is_directory)
                };
                match matched {
                    Match::Ignore(_) => return true,
                    Match::Whitelist(_) => return false,
                    Match::None => {}
                }
            }
            current = rules.parent.as_deref();
        }
        false
    }
}

pub fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

fn has_git(directory: impl AsFd) -> bool {
    rustix::fs::statat(directory, ".git", AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// Empty if there are no rule files or they are unreadable: then nothing is ignored.
fn read_rules(directory: &OwnedFd) -> Vec<Gitignore> {
    RULE_FILES.iter().filter_map(|name| read_rule_file(directory, name)).collect()
}

fn read_rule_file(directory: &OwnedFd, name: &str) -> Option<Gitignore> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, name, flags, Mode::empty()).ok()?;
    if kind(&rustix::fs::fstat(&file).ok()?) != FileType::RegularFile {
        return None;
    }
    let mut text = Vec::new();
    File::from(file).take(MAX_RULE_FILE_BYTES).read_to_end(&mut text).ok()?;
    let mut builder = GitignoreBuilder::new("");
    for line in String::from_utf8_lossy(&text).lines() {
        // An invalid line is ignored, as in git.
        let _ = builder.add_line(None, line);
    }
    builder.build().ok().filter(|rules| !rules.is_empty())
}
