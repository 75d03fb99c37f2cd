//! Paths in the folder that git executes or reads because of its configuration on this machine: the directory of
//! `core.hooksPath`, included configuration files, and programs named by settings. Git itself is queried, so that
//! includes, worktrees and the user's own configuration apply as they do for git. Links are followed: a link to a hook,
//! and every link on the way to one, counts like the hook itself.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io::Read,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        process::CommandExt,
    },
    path::{Component, Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use crate::{entry::Entry, error::SyncError, path::RelPath, tree::Tree};

/// Maximum number of repositories to query, topmost first: more than any project with submodules has.
const MAX_REPOSITORIES: usize = 64;
/// Maximum number of links on the way to one path, as in the kernel.
const MAX_LINKS: usize = 40;
/// Maximum number of names to read in a directory of hooks: git has about thirty hooks.
const MAX_HOOKS: usize = 1000;
/// Maximum size of git's output, in bytes.
const MAX_ANSWER_BYTES: u64 = 1024 * 1024;
/// Timeout of one git command. It reads a few small files, which takes milliseconds; on a disconnected network file
/// system, or if `git` is a wrapper that waits for input, it would never end.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Suffixes of settings whose value is a program or a command line.
const PROGRAM_SETTINGS: &[&str] = &[
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

/// Paths of the repositories in the folder, with the configuration that they were determined from.
#[derive(Default)]
pub struct GitPaths {
    executed: BTreeSet<RelPath>,
    refreshed_at: Option<std::time::Instant>,
    configuration: Vec<(RelPath, Entry)>,
}

/// The user's own configuration may change without a change in the folder.
const REFRESH_INTERVAL: std::time::Duration = std::time::Duration::from_secs(10);

impl GitPaths {
    /// Queries git again after a change of a link or of git's configuration in the folder, and at an interval. Without
    /// an answer it is unknown what git would execute, so a hanging git is an error and not an empty set.
    pub fn refresh(&mut self, root: &Path, local: &Tree) -> Result<&BTreeSet<RelPath>, SyncError> {
        let is_configuration = |(path, entry): &(&RelPath, &Entry)| {
            matches!(entry, Entry::Link { .. }) || path.name().starts_with(b"config") && path.parts().any(|part| part == b".git")
        };
        let now: Vec<_> = local.iter().filter(is_configuration).map(|(path, entry)| (path.clone(), entry.clone())).collect();
        if now != self.configuration || self.refreshed_at.is_none_or(|at| at.elapsed() >= REFRESH_INTERVAL) {
            self.executed = executed_paths(&Git::default(), root, local)?;
            (self.configuration, self.refreshed_at) = (now, Some(std::time::Instant::now()));
        }
        Ok(&self.executed)
    }
}

/// Paths of the repository that contains the folder, and of those within the folder.
fn executed_paths(git: &Git, root: &Path, local: &Tree) -> Result<BTreeSet<RelPath>, SyncError> {
    let nested = local.iter().filter(|(path, _)| path.name() == b".git").map(|(path, _)| root.join(OsStr::from_bytes(path.parent_bytes())));
    let repositories: BTreeSet<PathBuf> = std::iter::once(root.to_owned()).chain(nested.take(MAX_REPOSITORIES)).collect();
    // The folder itself may have been named by a path with links.
    let resolved = root.canonicalize().unwrap_or_else(|_| root.to_owned());
    let in_folder = |path: &PathBuf| path.strip_prefix(root).or_else(|_| path.strip_prefix(&resolved)).ok().map(Path::to_owned);
    let mut found = BTreeSet::new();
    for repository in &repositories {
        let paths = paths_of_repository(git, repository)?;
        let reached = paths.iter().flat_map(|path| with_links(path));
        found.extend(reached.filter_map(|path| RelPath::new(in_folder(&path)?.as_os_str().as_bytes())));
    }
    Ok(found)
}

fn paths_of_repository(git: &Git, at: &Path) -> Result<Vec<PathBuf>, SyncError> {
    let Some(hooks) = git.run(at, &["rev-parse", "--git-path", "hooks"])? else { return Ok(Vec::new()) };
    // Relative paths are relative to the top of the work tree; a bare repository has none.
    let top = git.run(at, &["rev-parse", "--show-toplevel"])?.map_or_else(|| at.to_owned(), |top| path_from_line(&top));
    let hooks = at.join(path_from_line(&hooks));
    let mut found = linked_hooks(&hooks);
    found.push(hooks);
    // NUL-terminated fields: first the origin of a setting, then its name and, after a line break, its value.
    let settings = git.run(at, &["config", "--list", "--show-origin", "-z"])?.unwrap_or_default();
    let mut parts = settings.split(|b| *b == 0);
    while let (Some(origin), Some(setting)) = (parts.next(), parts.next()) {
        if let Some(file) = origin.strip_prefix(b"file:") {
            found.push(top.join(OsStr::from_bytes(file)));
        }
        let (name, value) =
            setting.iter().position(|b| *b == b'\n').map_or((setting, &b""[..]), |end| (&setting[..end], &setting[end + 1..]));
        let name = String::from_utf8_lossy(name).to_lowercase();
        if PROGRAM_SETTINGS.iter().any(|end| name.ends_with(end)) {
            let words = value.split(|b| b.is_ascii_whitespace() || matches!(b, b'"' | b'\'' | b'!' | b';' | b'&' | b'|'));
            // A bare name is looked up in PATH.
            found.extend(words.filter(|word| word.contains(&b'/')).map(|word| top.join(OsStr::from_bytes(word))));
        }
    }
    Ok(found)
}

/// The links in a directory of hooks.
fn linked_hooks(hooks: &Path) -> Vec<PathBuf> {
    // Without the directory there are no hooks.
    let Ok(listing) = std::fs::read_dir(hooks) else { return Vec::new() };
    let is_link = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_symlink());
    listing.take(MAX_HOOKS).flatten().filter(is_link).map(|entry| entry.path()).collect()
}

/// A path as it is written, each link on the way to its file, and the file itself, which need not exist. Replacing
/// any of them changes what git executes.
fn with_links(path: &Path) -> Vec<PathBuf> {
    let mut found = vec![normalize(path)];
    let parts = |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>();
    let (mut left, mut at, mut links) = (parts(path), PathBuf::new(), 0);
    while let Some(part) = left.pop() {
        match Path::new(&part).components().next() {
            Some(Component::Normal(name)) => {
                at.push(name);
                if links < MAX_LINKS
                    && let Ok(target) = std::fs::read_link(&at)
                {
                    found.push(at.clone());
                    at.pop();
                    links += 1;
                    left.extend(parts(&target));
                }
            }
            Some(Component::ParentDir) => drop(at.pop()),
            // An absolute target begins at the top again.
            Some(Component::RootDir) => at = PathBuf::from("/"),
            _ => {}
        }
    }
    found.push(at);
    found
}

/// The git program and its timeout.
struct Git {
    program: PathBuf,
    timeout: Duration,
}

impl Default for Git {
    fn default() -> Self {
        Self { program: PathBuf::from("git"), timeout: ANSWER_TIMEOUT }
    }
}

impl Git {
    /// Runs git and returns its output; `None` without git or without a repository.
    fn run(&self, at: &Path, args: &[&str]) -> Result<Option<Vec<u8>>, SyncError> {
        let mut command = Command::new(&self.program);
        // Set if git itself started cobox; they would redirect the query to another repository.
        command.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE").stdin(Stdio::null()).stderr(Stdio::null());
        // Its own process group, so that its children can be killed with it.
        command.arg("-C").arg(at).args(args).stdout(Stdio::piped()).process_group(0);
        let Ok(child) = command.spawn() else { return Ok(None) };
        let group = rustix::process::Pid::from_child(&child);
        let (answer, answer_receiver) = mpsc::channel();
        // After the timeout the receiver is gone.
        let reading = move || drop(answer.send(output(child)));
        let is_reading = thread::Builder::new().name("sync-git".to_owned()).spawn(reading).is_ok();
        match answer_receiver.recv_timeout(self.timeout) {
            Ok(text) if is_reading => Ok(text),
            _ => {
                // Kills git and its children. An error means that they have ended already.
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                Err(SyncError::GitTimeout { folder: at.to_owned(), seconds: self.timeout.as_secs() })
            }
        }
    }
}

/// Reads the whole output; `None` if the command failed.
fn output(mut child: Child) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    // The pipe is closed after the read, so a process that writes more ends as well.
    let is_read = child.stdout.take().is_some_and(|out| out.take(MAX_ANSWER_BYTES).read_to_end(&mut text).is_ok());
    let is_success = child.wait().is_ok_and(|status| status.success());
    (is_read && is_success).then_some(text)
}

fn path_from_line(line: &[u8]) -> PathBuf {
    PathBuf::from(std::ffi::OsString::from_vec(line.strip_suffix(b"\n").unwrap_or(line).to_vec()))
}

/// Removes `.` and `..` without accessing the file system.
fn normalize(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(normalized.pop()),
            part => normalized.push(part),
        }
    }
    normalized
}

#[cfg(test)]
mod tests {
    use super::*;

    fn git(at: &Path, args: &[&str]) {
        assert!(Git::default().run(at, args).unwrap().is_some(), "git {args:?}");
    }

    #[test]
    fn hooks_includes_and_programs_of_git_are_found() {
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
        let local: Tree = [".git", "lib", "lib/.git"].map(|p| (RelPath::new(p.as_bytes()).unwrap(), Entry::Dir)).into_iter().collect();
        let mut paths = GitPaths::default();
        let found = paths.refresh(&root, &local).unwrap();
        for path in ["scripts/hooks", "shared.gitconfig", "scripts/clean.sh", "lib/ci"] {
            assert!(found.contains(&RelPath::new(path.as_bytes()).unwrap()), "{path}: {found:?}");
        }
        // If only a part of the repository is synced, settings are still relative to the top of the repository.
        std::fs::create_dir_all(root.join("app")).unwrap();
        git(&root, &["config", "core.hooksPath", "app/hooks"]);
        let found = executed_paths(&Git::default(), &root.join("app"), &Tree::default()).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [RelPath::new(b"hooks").unwrap()]);
    }

    /// The paths found in a folder that was opened as `root`.
    fn found_in(root: &Path, git_directory: bool) -> Vec<String> {
        let local: Tree = git_directory.then(|| (RelPath::new(b".git").unwrap(), Entry::Dir)).into_iter().collect();
        executed_paths(&Git::default(), root, &local).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn targets_of_links_to_hooks_are_found() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap().join("real");
        std::fs::create_dir_all(root.join("ci/real")).unwrap();
        git(&root, &["init", "-q"]);
        let has = |found: &[String], path: &str| assert!(found.iter().any(|one| one == path), "{path}: {found:?}");
        // The directory of hooks is a link, over another one.
        symlink("step", root.join("hooks")).unwrap();
        symlink("ci/real", root.join("step")).unwrap();
        git(&root, &["config", "core.hooksPath", "hooks"]);
        let found = found_in(&root, true);
        ["hooks", "step", "ci/real"].iter().for_each(|path| has(&found, path));
        // A hook in it is a link.
        std::fs::create_dir(root.join("tools")).unwrap();
        symlink("../../tools/push.sh", root.join("ci/real/pre-push")).unwrap();
        has(&found_in(&root, true), "tools/push.sh");
        // So is one in git's own directory, whether its target exists or not.
        git(&root, &["config", "--unset", "core.hooksPath"]);
        std::fs::create_dir_all(root.join(".git/hooks")).unwrap();
        symlink("../../scripts/pre.sh", root.join(".git/hooks/pre-commit")).unwrap();
        has(&found_in(&root, true), "scripts/pre.sh");
        // The configured path and the folder's own path lead over a link.
        symlink("real", dir.path().join("link")).unwrap();
        git(&root, &["config", "core.hooksPath", dir.path().join("link/scripts").to_str().unwrap()]);
        has(&found_in(&root, true), "scripts");
        has(&found_in(&dir.path().join("link"), true), "scripts");
    }

    #[test]
    fn a_folder_without_a_repository_has_no_git_paths() {
        let dir = tempfile::tempdir().unwrap();
        assert!(executed_paths(&Git::default(), dir.path(), &Tree::default()).unwrap().is_empty());
    }

    #[test]
    fn a_hanging_git_is_killed_with_its_children_and_reported() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("git");
        let started = dir.path().join("started");
        // The child process keeps the output open.
        std::fs::write(&program, format!("#!/bin/sh\nsleep 600 &\necho $! > {0}.new\nmv {0}.new {0}\nwait\n", started.display())).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let git = Git { program, timeout: Duration::from_secs(2) };
        let ended = executed_paths(&git, dir.path(), &Tree::default());
        assert!(matches!(&ended, Err(SyncError::GitTimeout { seconds: 2, .. })), "{ended:?}");
        let message = ended.unwrap_err().to_string();
        assert!(message.contains(dir.path().to_str().unwrap()) && message.contains("2 s"), "{message}");
        let pid = std::fs::read_to_string(&started).unwrap();
        let is_running = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
        };
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while is_running() {
            assert!(std::time::Instant::now() < deadline, "{pid} still runs");
            thread::yield_now();
        }
    }
}
