//! What is left out of a sync: by the ignore files in the tree, and always what is on its way in or nobody else's business.
//!
//! An ignored path doesn't exist, on either side and in what is remembered. A new rule thus never looks like a deletion, and a rule that
//! goes away makes files appear, never disappear.

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

/// The files that hold rules, the weaker first.
pub const RULE_FILES: [&str; 2] = [".gitignore", ".coboxignore"];
/// Largest file of rules that is read, in bytes; a larger one is no list that somebody wrote.
pub const MAX_RULE_FILE_BYTES: usize = 256 * 1024;
/// Files of rules in one tree; those of further folders don't count.
pub const MAX_RULE_FILES: usize = 2000;
/// Of all of them together, in bytes: what another side says must not fill this side's memory.
pub const MAX_RULE_BYTES: usize = 4 * 1024 * 1024;
/// Where content waits until it is whole, at the top of the folder.
pub const STAGING: &str = ".cobox-sync";
/// The trash of the local folder, at its top.
pub const TRASH: &str = ".cobox-trash";

/// One file of rules: in which folder, which of the two, and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleFile {
    pub folder: Option<RelPath>,
    pub which: u8,
    pub text: Vec<u8>,
}

#[derive(Default)]
pub struct Rules {
    texts: BTreeMap<(Vec<u8>, u8), Vec<u8>>,
    /// By folder, the weaker file first.
    compiled: HashMap<Vec<u8>, [Option<Gitignore>; RULE_FILES.len()]>,
    bytes: usize,
    /// Of the folders above, up to the repository's: what leads from there to this one, the stronger last.
    above: Vec<(Vec<u8>, Gitignore)>,
}

impl PartialEq for Rules {
    fn eq(&self, other: &Self) -> bool {
        self.texts == other.texts
    }
}

impl Rules {
    /// Takes a folder's rules, or that it has none.
    pub fn set(&mut self, folder: Option<&RelPath>, which: u8, text: Option<Vec<u8>>) {
        let folder = folder.map_or(Vec::new(), |f| f.bytes().to_vec());
        let key = (folder.clone(), which);
        if self.texts.get(&key) == text.as_ref() {
            return;
        }
        self.bytes -= self.texts.remove(&key).map_or(0, |text| text.len());
        let mut rules = None;
        if let Some(text) = text
            && self.texts.len() < MAX_RULE_FILES
            && self.bytes + text.len() <= MAX_RULE_BYTES
        {
            rules = compile(&text);
            self.bytes += text.len();
            self.texts.insert(key, text);
        }
        let compiled = self.compiled.entry(folder).or_default();
        if let Some(place) = compiled.get_mut(usize::from(which)) {
            *place = rules;
        }
        self.compiled.retain(|_, both| both.iter().any(Option::is_some));
    }

    /// Takes the rules of the repository that the folder is in, where it is not its top. A stray ignore file above that says nothing.
    pub fn read_above(&mut self, root: &Path) {
        let Some(top) = root.ancestors().skip(1).find(|above| above.join(".git").exists()).filter(|_| !root.join(".git").exists()) else {
            return;
        };
        let above: Vec<&Path> = root.ancestors().skip(1).take_while(|above| above.starts_with(top)).collect();
        for folder in above.into_iter().rev() {
            let Ok(lead) = root.strip_prefix(folder) else { continue };
            let lead = [lead.as_os_str().as_bytes(), b"/"].concat();
            for name in RULE_FILES {
                let text = std::fs::read(folder.join(name)).ok().filter(|text| text.len() <= MAX_RULE_FILE_BYTES);
                self.above.extend(text.and_then(|text| compile(&text)).map(|rules| (lead.clone(), rules)));
            }
        }
    }

    pub fn has_above(&self) -> bool {
        !self.above.is_empty()
    }

    /// Forgets the rules of a folder and of all in it.
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
        let mut rules = Self::default();
        for file in files {
            rules.set(file.folder.as_ref(), file.which, Some(file.text));
        }
        rules
    }

    /// Whether a path is left out, given that the folders it is in are not.
    pub fn leaves_out(&self, path: &RelPath, is_dir: bool) -> bool {
        if is_never_synced(path) {
            return true;
        }
        let bytes = path.bytes();
        let mut folder_end = path.parent_bytes().len();
        loop {
            let folder = &bytes[..folder_end];
            let within = if folder_end == 0 { bytes } else { &bytes[folder_end + 1..] };
            for which in (0..RULE_FILES.len() as u8).rev() {
                let Some(rules) = self.compiled.get(folder).and_then(|both| both[usize::from(which)].as_ref()) else { continue };
                match rules.matched(Path::new(OsStr::from_bytes(within)), is_dir) {
                    Match::Ignore(_) => return true,
                    Match::Whitelist(_) => return false,
                    Match::None => {}
                }
            }
            if folder_end == 0 {
                return self.is_left_out_above(bytes, is_dir);
            }
            folder_end = folder.iter().rposition(|b| *b == b'/').unwrap_or(0);
        }
    }

    fn is_left_out_above(&self, path: &[u8], is_dir: bool) -> bool {
        for (lead, rules) in self.above.iter().rev() {
            match rules.matched(Path::new(OsStr::from_bytes(&[lead, path].concat())), is_dir) {
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
        // A line that means nothing to git means nothing here.
        let _ = builder.add_line(None, line);
    }
    builder.build().ok()
}

/// Which file of rules a name is.
pub fn rule_file(name: &[u8]) -> Option<u8> {
    RULE_FILES.iter().position(|n| n.as_bytes() == name).map(|i| i as u8)
}

/// Whether it, or a folder it is in, is never synced, whatever the rules say.
pub fn is_out_of_bounds(path: &RelPath) -> bool {
    is_never_synced(path) || path.ancestors().any(|folder| is_never_synced(&folder))
}

/// Content on its way in, here or through the files API, and the locks that git takes for a moment.
fn is_never_synced(path: &RelPath) -> bool {
    let name = path.name();
    let is_temporary = name.len() == 27 && name.starts_with(b".cobox-") && name.ends_with(b".tmp");
    let is_git_lock = name.ends_with(b".lock") && path.parts().any(|p| p == b".git");
    // In any case: some file systems don't tell `.COBOX-TRASH` from it.
    let is_own = [STAGING, TRASH].iter().any(|own| name.eq_ignore_ascii_case(own.as_bytes()));
    is_own || is_temporary || is_git_lock
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn the_nearest_rule_decides_and_the_own_file_over_gits() {
        let mut rules = Rules::default();
        rules.set(None, 0, Some(b"target/\n*.log\n/only-top\n".to_vec()));
        rules.set(Some(&path("sub")), 0, Some(b"!keep.log\n".to_vec()));
        rules.set(None, 1, Some(b"secret\n!wanted.log\n".to_vec()));
        let out = |text: &str, is_dir| rules.leaves_out(&path(text), is_dir);
        assert!(out("target", true) && !out("target", false));
        assert!(out("a.log", false) && out("sub/b.log", false) && !out("sub/keep.log", false) && !out("wanted.log", false));
        assert!(out("only-top", false) && !out("sub/only-top", false));
        assert!(out("deep/er/secret", true));
        rules.forget(Some(&path("sub")));
        assert!(rules.leaves_out(&path("sub/keep.log"), false));
    }

    #[test]
    fn in_a_part_of_a_repository_the_rules_above_hold_and_elsewhere_they_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("repo/app");
        std::fs::create_dir_all(&root).unwrap();
        std::fs::write(dir.path().join(".gitignore"), "stray\n").unwrap();
        std::fs::write(dir.path().join("repo/.gitignore"), "node_modules/\n/app/out\n").unwrap();
        let read = || {
            let mut rules = Rules::default();
            rules.read_above(&root);
            ["node_modules", "x/node_modules", "out", "x/out", "stray"].map(|p| rules.leaves_out(&path(p), true))
        };
        assert_eq!(read(), [false; 5]);
        std::fs::create_dir(dir.path().join("repo/.git")).unwrap();
        assert_eq!(read(), [true, true, true, false, false]);
    }

    #[test]
    fn what_is_on_its_way_in_and_gits_locks_are_never_synced() {
        let rules = Rules::default();
        for text in [
            STAGING,
            TRASH,
            "a/.Cobox-Trash",
            ".cobox-0123456789abcdef.tmp",
            "a/.cobox-0123456789abcdef.tmp",
            ".git/index.lock",
            ".git/refs/heads/x.lock",
        ] {
            assert!(rules.leaves_out(&path(text), false), "{text}");
        }
        for text in ["Cargo.lock", ".cobox-notes.tmp", ".git/index"] {
            assert!(!rules.leaves_out(&path(text), false), "{text}");
        }
    }
}
