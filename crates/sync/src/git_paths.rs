//! Paths in the folder that git runs or obeys because its configuration on this machine says so: the directory of `core.hooksPath`,
//! configuration files that others include, and programs that settings name. Asked of git itself, so that includes, worktrees and the user's
//! own configuration count as they do for git.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Component, Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{path::RelPath, tree::Tree};

/// Repositories that are asked, those at the top first: more are beyond any project with submodules.
const MAX_REPOSITORIES: usize = 64;
/// What is read of git's answer, in bytes.
const MAX_ANSWER_BYTES: usize = 1024 * 1024;
/// Ends of settings whose value is a program or a command line.
const PROGRAMS: &[&str] = &[
    ".fsmonitor",
    ".sshcommand",
    ".editor",
    ".pager",
    ".askpass",
    ".program",
    ".external",
    ".command",
    ".textconv",
    ".driver",
    ".clean",
    ".smudge",
    ".process",
    ".helper",
    ".packobjectshook",
    ".gitproxy",
    ".cmd",
];

/// What is known of the repositories in the folder, and of which configuration that is.
#[derive(Default)]
pub struct GitPaths {
    executed: BTreeSet<RelPath>,
    asked_at: Option<std::time::Instant>,
    configuration: Vec<(RelPath, crate::entry::Entry)>,
}

/// The user's own configuration may change without a trace in the folder.
const ASK_EVERY: std::time::Duration = std::time::Duration::from_secs(10);

impl GitPaths {
    /// Asks again where a configuration in the folder has changed, and now and then.
    pub fn refresh(&mut self, root: &Path, here: &Tree) -> &BTreeSet<RelPath> {
        let is_configuration = |path: &RelPath| path.name().starts_with(b"config") && path.parts().any(|part| part == b".git");
        let now: Vec<_> =
            here.iter().filter(|(path, _)| is_configuration(path)).map(|(path, entry)| (path.clone(), entry.clone())).collect();
        if now != self.configuration || self.asked_at.is_none_or(|at| at.elapsed() >= ASK_EVERY) {
            self.executed = executed(root, here);
            (self.configuration, self.asked_at) = (now, Some(std::time::Instant::now()));
        }
        &self.executed
    }
}

/// Of the repository that the folder is or lies in, and of those within it.
fn executed(root: &Path, here: &Tree) -> BTreeSet<RelPath> {
    let within = here.iter().filter(|(path, _)| path.name() == b".git").map(|(path, _)| root.join(OsStr::from_bytes(path.parent_bytes())));
    let repositories: BTreeSet<PathBuf> = std::iter::once(root.to_owned()).chain(within.take(MAX_REPOSITORIES)).collect();
    let found = repositories.iter().flat_map(|repository| of_repository(repository));
    found.filter_map(|path| RelPath::new(path.strip_prefix(root).ok()?.as_os_str().as_bytes())).collect()
}

fn of_repository(at: &Path) -> Vec<PathBuf> {
    let Some(hooks) = ask(at, &["rev-parse", "--git-path", "hooks"]) else { return Vec::new() };
    // Relative paths are relative to the top of the work tree; a bare repository has none.
    let top = ask(at, &["rev-parse", "--show-toplevel"]).map_or_else(|| at.to_owned(), |top| path_of(&top));
    let mut found = vec![plain(&at.join(path_of(&hooks)))];
    // Three parts each: where it is set, its name, and its value after a line break; parts end with NUL.
    let settings = ask(at, &["config", "--list", "--show-origin", "-z"]).unwrap_or_default();
    let mut parts = settings.split(|b| *b == 0);
    while let (Some(origin), Some(setting)) = (parts.next(), parts.next()) {
        if let Some(file) = origin.strip_prefix(b"file:") {
            found.push(plain(&top.join(OsStr::from_bytes(file))));
        }
        let (name, value) =
            setting.iter().position(|b| *b == b'\n').map_or((setting, &b""[..]), |end| (&setting[..end], &setting[end + 1..]));
        let name = String::from_utf8_lossy(name).to_lowercase();
        if PROGRAMS.iter().any(|end| name.ends_with(end)) {
            let words = value.split(|b| b.is_ascii_whitespace() || matches!(b, b'"' | b'\'' | b'!' | b';' | b'&' | b'|'));
            // A bare name is looked for in PATH.
            found.extend(words.filter(|word| word.contains(&b'/')).map(|word| plain(&top.join(OsStr::from_bytes(word)))));
        }
    }
    found
}

/// What git answers; nothing where there is no git or no repository.
fn ask(at: &Path, args: &[&str]) -> Option<Vec<u8>> {
    let mut command = Command::new("git");
    // Set where cobox itself was started by git: another repository would answer.
    command.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE").stdin(Stdio::null()).stderr(Stdio::null());
    let answer = command.arg("-C").arg(at).args(args).output().ok()?;
    let mut text = answer.status.success().then_some(answer.stdout)?;
    text.truncate(MAX_ANSWER_BYTES);
    Some(text)
}

fn path_of(line: &[u8]) -> PathBuf {
    PathBuf::from(std::ffi::OsString::from_vec(line.strip_suffix(b"\n").unwrap_or(line).to_vec()))
}

/// Without `.` and `..`, by its words alone.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Entry;

    fn git(at: &Path, args: &[&str]) {
        assert!(ask(at, args).is_some(), "git {args:?}");
    }

    #[test]
    fn hooks_included_configuration_and_programs_are_found_where_git_looks_for_them() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("lib")).unwrap();
        git(&root, &["init", "-q"]);
        git(&root.join("lib"), &["init", "-q"]);
        git(&root, &["config", "core.hooksPath", "tools/../scripts/hooks"]);
        git(&root, &["config", "include.path", "../shared.gitconfig"]);
        git(&root, &["config", "filter.x.clean", "sh -c './scripts/clean.sh %f'"]);
        git(&root.join("lib"), &["config", "core.hooksPath", root.join("lib/ci").to_str().unwrap()]);
        std::fs::write(root.join("shared.gitconfig"), "[core]\n\tpager = less\n").unwrap();
        let here: Tree = [".git", "lib", "lib/.git"].map(|p| (RelPath::new(p.as_bytes()).unwrap(), Entry::Dir)).into_iter().collect();
        let mut paths = GitPaths::default();
        let found = paths.refresh(&root, &here);
        for path in ["scripts/hooks", "shared.gitconfig", "scripts/clean.sh", "lib/ci"] {
            assert!(found.contains(&RelPath::new(path.as_bytes()).unwrap()), "{path}: {found:?}");
        }
        // A part of the repository is synced: its settings are relative to the top all the same.
        std::fs::create_dir_all(root.join("app")).unwrap();
        git(&root, &["config", "core.hooksPath", "app/hooks"]);
        let found = executed(&root.join("app"), &Tree::default());
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [RelPath::new(b"hooks").unwrap()]);
    }

    #[test]
    fn a_folder_without_a_repository_has_none() {
        let dir = tempfile::tempdir().unwrap();
        assert!(executed(dir.path(), &Tree::default()).is_empty());
    }
}
