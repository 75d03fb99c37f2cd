//! `.gitignore` and `.ignore` files, read by descriptor as a walk comes by, with the rules of those above.

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

/// The stronger first.
const RULE_FILES: [&str; 2] = [".ignore", ".gitignore"];
/// More rules than this are a mistake or an attack; the rest is not read.
const MAX_RULE_FILE_BYTES: u64 = 256 * 1024;
/// Directories above the one that is searched.
const MAX_ABOVE: usize = 64;

/// The rules of one directory and those above it.
pub struct Rules {
    above: Option<Arc<Rules>>,
    /// How much of a path leads to this directory.
    prefix: usize,
    /// Of a directory above where the walk began: what leads from it to there.
    lead: Vec<u8>,
    matchers: Vec<Gitignore>,
}

impl Rules {
    /// Those that hold where a walk begins: of the repository it is in, if it is in one.
    pub fn above(root: &Root, path: &SandboxPath) -> Arc<Self> {
        let mut found = Vec::new();
        let mut at = path.bytes();
        let trimmed = at.iter().rposition(|b| *b != b'/').map_or(0, |i| i + 1);
        at = &at[..trimmed];
        let whole = at;
        let mut is_in_a_repository = root.directory(whole).is_ok_and(|d| has_git(&d));
        for _ in 0..MAX_ABOVE {
            if is_in_a_repository || at.is_empty() {
                break;
            }
            at = &at[..at.iter().rposition(|b| *b == b'/').unwrap_or(0)];
            let Ok(directory) = root.directory(at) else { break };
            is_in_a_repository = has_git(&directory);
            let lead = [&whole[at.len() + 1..], b"/"].concat();
            found.push((lead, read_rules(&directory)));
        }
        let mut rules = Arc::new(Self { above: None, prefix: 0, lead: Vec::new(), matchers: Vec::new() });
        if is_in_a_repository {
            for (lead, matchers) in found.into_iter().rev() {
                rules = Arc::new(Self { above: Some(rules), prefix: 0, lead, matchers });
            }
        }
        rules
    }

    /// With those of a directory below.
    pub fn below(above: Arc<Self>, directory: &OwnedFd, prefix: usize) -> Arc<Self> {
        let matchers = read_rules(directory);
        if matchers.is_empty() { above } else { Arc::new(Self { above: Some(above), prefix, lead: Vec::new(), matchers }) }
    }

    /// Patterns in the same language, from a request.
    pub fn from_patterns(patterns: &[String]) -> Result<Gitignore, ApiError> {
        let mut builder = GitignoreBuilder::new("");
        for pattern in patterns {
            builder.add_line(None, pattern).map_err(|e| ApiError::invalid(format!("ignore: {e}")))?;
        }
        builder.build().map_err(|e| ApiError::invalid(format!("ignore: {e}")))
    }

    pub fn leave_out(&self, path: &[u8], is_directory: bool) -> bool {
        if is_directory && (path == b".git" || path.ends_with(b"/.git")) {
            return true;
        }
        let mut at = Some(self);
        while let Some(rules) = at {
            for matcher in &rules.matchers {
                let matched = if rules.lead.is_empty() {
                    matcher.matched(as_path(&path[rules.prefix..]), is_directory)
                } else {
                    matcher.matched(as_path(&[rules.lead.as_slice(), path].concat()), is_directory)
                };
                match matched {
                    Match::Ignore(_) => return true,
                    Match::Whitelist(_) => return false,
                    Match::None => {}
                }
            }
            at = rules.above.as_deref();
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

/// None where there are none, or where they can't be read: then nothing is left out.
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
        // A line that is no pattern is left out, as by git.
        let _ = builder.add_line(None, line);
    }
    builder.build().ok().filter(|rules| !rules.is_empty())
}
