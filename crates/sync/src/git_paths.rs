//! Paths in the folder that git runs or obeys because its configuration on this machine says so: the directory of `core.hooksPath`,
//! configuration files that others include, and programs that settings name. Asked of git itself, so that includes, worktrees and the user's
//! own configuration count as they do for git.

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

use crate::{error::SyncError, path::RelPath, tree::Tree};

/// Repositories that are asked, those at the top first: more are beyond any project with submodules.
const MAX_REPOSITORIES: usize = 64;
/// What is read of git's answer, in bytes.
const MAX_ANSWER_BYTES: u64 = 1024 * 1024;
/// How long git may take for one answer. It reads a few small files, which takes milliseconds; on a network file system that has gone away,
/// or where `git` is a wrapper that waits for input, it never ends.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Ends of settings whose value is a program or a command line.
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

/// What is known of the repositories in the folder, and of which configuration that is.
#[derive(Default)]
pub struct GitPaths {
    executed: BTreeSet<RelPath>,
    refreshed_at: Option<std::time::Instant>,
    configuration: Vec<(RelPath, crate::entry::Entry)>,
}

/// The user's own configuration may change without a trace in the folder.
const REFRESH_INTERVAL: std::time::Duration = std::time::Duration::from_secs(10);

impl GitPaths {
    /// Asks again where a configuration in the folder has changed, and now and then. Without an answer it is not known what git would run,
    /// so a git that hangs is an error and not an empty set.
    pub fn refresh(&mut self, root: &Path, local: &Tree) -> Result<&BTreeSet<RelPath>, SyncError> {
        let is_configuration = |path: &RelPath| path.name().starts_with(b"config") && path.parts().any(|part| part == b".git");
        let now: Vec<_> =
            local.iter().filter(|(path, _)| is_configuration(path)).map(|(path, entry)| (path.clone(), entry.clone())).collect();
        if now != self.configuration || self.refreshed_at.is_none_or(|at| at.elapsed() >= REFRESH_INTERVAL) {
            self.executed = executed_paths(&Git::default(), root, local)?;
            (self.configuration, self.refreshed_at) = (now, Some(std::time::Instant::now()));
        }
        Ok(&self.executed)
    }
}

/// Of the repository that the folder is or lies in, and of those within it.
fn executed_paths(git: &Git, root: &Path, local: &Tree) -> Result<BTreeSet<RelPath>, SyncError> {
    let nested = local.iter().filter(|(path, _)| path.name() == b".git").map(|(path, _)| root.join(OsStr::from_bytes(path.parent_bytes())));
    let repositories: BTreeSet<PathBuf> = std::iter::once(root.to_owned()).chain(nested.take(MAX_REPOSITORIES)).collect();
    let mut found = BTreeSet::new();
    for repository in &repositories {
        let paths = paths_of_repository(git, repository)?;
        found.extend(paths.iter().filter_map(|path| RelPath::new(path.strip_prefix(root).ok()?.as_os_str().as_bytes())));
    }
    Ok(found)
}

fn paths_of_repository(git: &Git, at: &Path) -> Result<Vec<PathBuf>, SyncError> {
    let Some(hooks) = git.run(at, &["rev-parse", "--git-path", "hooks"])? else { return Ok(Vec::new()) };
    // Relative paths are relative to the top of the work tree; a bare repository has none.
    let top = git.run(at, &["rev-parse", "--show-toplevel"])?.map_or_else(|| at.to_owned(), |top| path_from_line(&top));
    let mut found = vec![normalize(&at.join(path_from_line(&hooks)))];
    // Three parts each: where it is set, its name, and its value after a line break; parts end with NUL.
    let settings = git.run(at, &["config", "--list", "--show-origin", "-z"])?.unwrap_or_default();
    let mut parts = settings.split(|b| *b == 0);
    while let (Some(origin), Some(setting)) = (parts.next(), parts.next()) {
        if let Some(file) = origin.strip_prefix(b"file:") {
            found.push(normalize(&top.join(OsStr::from_bytes(file))));
        }
        let (name, value) =
            setting.iter().position(|b| *b == b'\n').map_or((setting, &b""[..]), |end| (&setting[..end], &setting[end + 1..]));
        let name = String::from_utf8_lossy(name).to_lowercase();
        if PROGRAM_SETTINGS.iter().any(|end| name.ends_with(end)) {
            let words = value.split(|b| b.is_ascii_whitespace() || matches!(b, b'"' | b'\'' | b'!' | b';' | b'&' | b'|'));
            // A bare name is looked for in PATH.
            found.extend(words.filter(|word| word.contains(&b'/')).map(|word| normalize(&top.join(OsStr::from_bytes(word)))));
        }
    }
    Ok(found)
}

/// The program, and how long it may take for one answer.
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
    /// What git answers; nothing where there is no git or no repository.
    fn run(&self, at: &Path, args: &[&str]) -> Result<Option<Vec<u8>>, SyncError> {
        let mut command = Command::new(&self.program);
        // Set where cobox itself was started by git: another repository would answer.
        command.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE").stdin(Stdio::null()).stderr(Stdio::null());
        // In a group of its own, so that what it started ends with it.
        command.arg("-C").arg(at).args(args).stdout(Stdio::piped()).process_group(0);
        let Ok(child) = command.spawn() else { return Ok(None) };
        let group = rustix::process::Pid::from_child(&child);
        let (answer, answer_receiver) = mpsc::channel();
        // Nobody receives it after the time is over.
        let reading = move || drop(answer.send(output(child)));
        let is_reading = thread::Builder::new().name("sync-git".to_owned()).spawn(reading).is_ok();
        match answer_receiver.recv_timeout(self.timeout) {
            Ok(text) if is_reading => Ok(text),
            _ => {
                // With all that it started. An error means that it has ended by itself.
                let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
                Err(SyncError::GitTimeout { folder: at.to_owned(), seconds: self.timeout.as_secs() })
            }
        }
    }
}

/// What it writes until it ends, where it succeeds.
fn output(mut child: Child) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    // The pipe is closed after this, so one that writes more ends too.
    let is_read = child.stdout.take().is_some_and(|out| out.take(MAX_ANSWER_BYTES).read_to_end(&mut text).is_ok());
    let is_success = child.wait().is_ok_and(|status| status.success());
    (is_read && is_success).then_some(text)
}

fn path_from_line(line: &[u8]) -> PathBuf {
    PathBuf::from(std::ffi::OsString::from_vec(line.strip_suffix(b"\n").unwrap_or(line).to_vec()))
}

/// Without `.` and `..`, by its words alone.
fn normalize(path: &Path) -> PathBuf {
    let mut normalize = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(normalize.pop()),
            part => normalize.push(part),
        }
    }
    normalize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::Entry;

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
        // A part of the repository is synced: its settings are relative to the top all the same.
        std::fs::create_dir_all(root.join("app")).unwrap();
        git(&root, &["config", "core.hooksPath", "app/hooks"]);
        let found = executed_paths(&Git::default(), &root.join("app"), &Tree::default()).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [RelPath::new(b"hooks").unwrap()]);
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
        // The process that it waits for keeps its output open.
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
