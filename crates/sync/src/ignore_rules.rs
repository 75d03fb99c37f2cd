//! Decides which paths are left out of a sync: those matched by ignore files in the tree, and always the program's own
//! directories and temporary files.
//!
//! An ignored path is treated as absent on both sides and in the stored state. A new rule therefore never looks like a
//! deletion, and removing a rule makes files appear but never disappear.

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsStr,
    os::unix::ffi::OsStrExt,
    path::Path,
};

use ignore::{
    Match,
    gitignore::{Gitignore, GitignoreBuilder},
};

use crate::path::RelPath;

/// Names of ignore files, in ascending precedence.
pub const IGNORE_FILES: [&str; 2] = [".gitignore", ".coboxignore"];
/// Maximum size of an ignore file, in bytes; a larger one was not written by hand.
pub const MAX_RULE_FILE_BYTES: usize = 256 * 1024;
/// Maximum number of ignore files in a tree; further ones have no effect.
pub const MAX_RULE_FILES: usize = 2000;
/// Maximum total size of ignore files, in bytes: rules from the other side must not fill this side's memory.
pub const MAX_RULE_BYTES: usize = 4 * 1024 * 1024;
/// Directory for incomplete content, at the top of the folder.
pub const STAGING_DIRECTORY: &str = ".cobox-sync";
/// Trash directory of the local folder, at its top.
pub const TRASH_DIRECTORY: &str = ".cobox-trash";

/// An ignore file: its directory, its index in `IGNORE_FILES` and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleFile {
    pub folder: Option<RelPath>,
    pub which: u8,
    pub text: Vec<u8>,
}

#[derive(Default)]
pub struct IgnoreRules {
    texts: BTreeMap<(Vec<u8>, u8), Vec<u8>>,
    /// Rules by directory, in ascending precedence.
    compiled: HashMap<Vec<u8>, [Option<Gitignore>; IGNORE_FILES.len()]>,
    bytes: usize,
    /// Rules of the parent directories up to the repository's top, in ascending precedence, each with the path from
    /// there to the folder.
    parent_rules: Vec<(Vec<u8>, Gitignore)>,
}

impl PartialEq for IgnoreRules {
    fn eq(&self, other: &Self) -> bool {
        self.texts == other.texts
    }
}

impl IgnoreRules {
    /// Sets or removes one ignore file of a directory.
    pub fn set(&mut self, folder: Option<&RelPath>, which: u8, text: Option<Vec<u8>>) {
        let folder = folder.map_or(Vec::new(), |f| f.bytes().to_vec());
        let key = (folder.clone(), which);
        if self.texts.get(&key) == text.as_ref() {
            return;
        }
        self.bytes -= self.texts.remove(&key).map_or(0, |text| text.len());
        let mut ignore_rules = None;
        if let Some(text) = text
            && self.texts.len() < MAX_RULE_FILES
            && self.bytes + text.len() <= MAX_RULE_BYTES
        {
            ignore_rules = compile(&text);
            self.bytes += text.len();
            self.texts.insert(key, text);
        }
        let compiled = self.compiled.entry(folder).or_default();
        if let Some(slot) = compiled.get_mut(usize::from(which)) {
            *slot = ignore_rules;
        }
        self.compiled.retain(|_, files| files.iter().any(Option::is_some));
    }

    /// Reads the rules of the repository that contains the folder, unless the folder is its top. Ignore files outside a
    /// repository have no effect.
    pub fn read_parent_rules(&mut self, root: &Path) {
        let Some(top) = root.ancestors().skip(1).find(|above| above.join(".git").exists()).filter(|_| !root.join(".git").exists()) else {
            return;
        };
        let parents: Vec<&Path> = root.ancestors().skip(1).take_while(|above| above.starts_with(top)).collect();
        for folder in parents.into_iter().rev() {
            let Ok(prefix) = root.strip_prefix(folder) else { continue };
            let prefix = [prefix.as_os_str().as_bytes(), b"/"].concat();
            for name in IGNORE_FILES {
                let text = std::fs::read(folder.join(name)).ok().filter(|text| text.len() <= MAX_RULE_FILE_BYTES);
                self.parent_rules.extend(text.and_then(|text| compile(&text)).map(|ignore_rules| (prefix.clone(), ignore_rules)));
            }
        }
    }

    pub fn has_parent_rules(&self) -> bool {
        !self.parent_rules.is_empty()
    }

    /// Removes the rules of a directory and of everything in it.
    pub fn forget(&mut self, top: Option<&RelPath>) {
        let is_kept = |folder: &Vec<u8>| match (top, RelPath::new(folder)) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(top), Some(folder)) => !folder.is_within(top),
        };
        self.texts.retain(|(folder, _), _| is_kept(folder));
        self.compiled.retain(|folder, _| is_kept(folder));
        self.bytes = self.texts.values().map(Vec::len).sum();
    }

    pub fn files(&self) -> impl Iterator<Item = RuleFile> {
        self.texts.iter().map(|((folder, which), text)| RuleFile { folder: RelPath::new(folder), which: *which, text: text.clone() })
    }

    pub fn from_files(files: Vec<RuleFile>) -> Self {
        let mut ignore_rules = Self::default();
        for file in files {
            ignore_rules.set(file.folder.as_ref(), file.which, Some(file.text));
        }
        ignore_rules
    }

    /// Whether a path is ignored, given that the directories that contain it are not.
    pub fn is_ignored(&self, path: &RelPath, is_dir: bool) -> bool {
        if is_reserved_name(path) {
            return true;
        }
        let bytes = path.bytes();
        let mut folder_end = path.parent_bytes().len();
        loop {
            let folder = &bytes[..folder_end];
            let within = if folder_end == 0 { bytes } else { &bytes[folder_end + 1..] };
            for which in (0..IGNORE_FILES.len() as u8).rev() {
                let Some(ignore_rules) = self.compiled.get(folder).and_then(|files| files[usize::from(which)].as_ref()) else { continue };
                match ignore_rules.matched(Path::new(OsStr::from_bytes(within)), is_dir) {
                    Match::Ignore(_) => return true,
                    Match::Whitelist(_) => return false,
                    Match::None => {}
                }
            }
            if folder_end == 0 {
                return self.is_ignored_by_parents(bytes, is_dir);
            }
            folder_end = folder.iter().rposition(|b| *b == b'/').unwrap_or(0);
        }
    }

    fn is_ignored_by_parents(&self, path: &[u8], is_dir: bool) -> bool {
        for (prefix, ignore_rules) in self.parent_rules.iter().rev() {
            match ignore_rules.matched(Path::new(OsStr::from_bytes(&[prefix, path].concat())), is_dir) {
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
                Match::None => {}
            }
        }
        false
    }
}

fn compile(text: &[u8]) -> Option<Gitignore> {
    let mut builder = GitignoreBuilder::new("");
    for line in String::from_utf8_lossy(text).lines() {
        // A line that git does not understand has no effect here either.
        let _ = builder.add_line(None, line);
    }
    builder.build().ok()
}

/// Index of an ignore file's name in `IGNORE_FILES`.
pub fn ignore_file_index(name: &[u8]) -> Option<u8> {
    IGNORE_FILES.iter().position(|n| n.as_bytes() == name).map(|i| i as u8)
}

/// Whether the path or a directory that contains it is never synced, regardless of the rules.
pub fn is_reserved(path: &RelPath) -> bool {
    is_reserved_name(path) || path.ancestors().any(|folder| is_reserved_name(&folder))
}

/// Incomplete content of this or of the files API, and git's short-lived locks.
fn is_reserved_name(path: &RelPath) -> bool {
    let name = path.name();
    let is_temporary = name.len() == 27 && name.starts_with(b".cobox-") && name.ends_with(b".tmp");
    let is_git_lock = name.ends_with(b".lock") && path.parts().any(|p| p == b".git");
    // Compared without case, because some file systems treat `.COBOX-TRASH` as the same name.
    let is_own_directory = [STAGING_DIRECTORY, TRASH_DIRECTORY].iter().any(|own| name.eq_ignore_ascii_case(own.as_bytes()));
    is_own_directory || is_temporary || is_git_lock
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn the_nearest_rule_wins_and_coboxignore_overrides_gitignore() {
        let mut ignore_rules = IgnoreRules::default();
        ignore_rules.set(None, 0, Some(b"target/\n*.log\n/only-top\n".to_vec()));
        ignore_rules.set(Some(&path("sub")), 0, Some(b"!keep.log\n".to_vec()));
        ignore_rules.set(None, 1, Some(b"secret\n!wanted.log\n".to_vec()));
        let ignored = |text: &str, is_dir| ignore_rules.is_ignored(&path(text), is_dir);
        assert!(ignored("target", true) && !ignored("target", false));
        assert!(ignored("a.log", false) && ignored("sub/b.log", false) && !ignored("sub/keep.log", false) && !ignored("wanted.log", false));
        assert!(ignored("only-top", false) && !ignored("sub/only-top", false));
        assert!(ignored("deep/er/secret", true));
        ignore_rules.forget(Some(&path("sub")));
        assert!(ignore_rules.is_ignored(&path("sub/keep.log"), false));
    }

    #[test]
    fn rules_of_parent_directories_apply_only_inside_a_repository() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("repo/app");
        std::fs::create_dir_all(&root).unwrap();
        std::fs::write(dir.path().join(".gitignore"), "stray\n").unwrap();
        std::fs::write(dir.path().join("repo/.gitignore"), "node_modules/\n/app/out\n").unwrap();
        let read = || {
            let mut ignore_rules = IgnoreRules::default();
            ignore_rules.read_parent_rules(&root);
            ["node_modules", "x/node_modules", "out", "x/out", "stray"].map(|p| ignore_rules.is_ignored(&path(p), true))
        };
        assert_eq!(read(), [false; 5]);
        std::fs::create_dir(dir.path().join("repo/.git")).unwrap();
        assert_eq!(read(), [true, true, true, false, false]);
    }

    #[test]
    fn staging_trash_and_git_locks_are_never_synced() {
        let ignore_rules = IgnoreRules::default();
        for text in [
            STAGING_DIRECTORY,
            TRASH_DIRECTORY,
            "a/.Cobox-Trash",
            ".cobox-0123456789abcdef.tmp",
            "a/.cobox-0123456789abcdef.tmp",
            ".git/index.lock",
            ".git/refs/heads/x.lock",
        ] {
            assert!(ignore_rules.is_ignored(&path(text), false), "{text}");
        }
        for text in ["Cargo.lock", ".cobox-notes.tmp", ".git/index"] {
            assert!(!ignore_rules.is_ignored(&path(text), false), "{text}");
        }
    }
}
