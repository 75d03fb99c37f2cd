//! Files that run on this machine by themselves: a hook git calls, a task an editor starts. From a sandbox they come only when asked for.
//!
//! A sandbox is there so that what goes on in it stays in it; a file that a shell or an editor obeys as soon as it lies here would be a way
//! out. Names are compared without regard to case, because some file systems do so too.

use crate::{entry::Entry, path::RelPath, tree::Tree};

/// At any depth, with everything beneath.
const ANYWHERE: &[&str] = &[
    // Shells and tool managers that read a file of the directory one enters.
    ".envrc",
    ".env.fish",
    ".autoenv.zsh",
    // Read by every shell, where the folder is a home directory; and who may log in there.
    ".profile",
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".zlogin",
    ".ssh",
    ".mise.toml",
    "mise.toml",
    ".mise",
    ".tool-versions",
    // Editors: tasks that run when a folder is opened, settings that name programs.
    ".vscode",
    ".idea",
    ".zed",
    ".fleet",
    ".helix",
    ".cursor",
    ".devcontainer",
    ".devcontainer.json",
    ".exrc",
    ".nvimrc",
    ".nvim.lua",
    ".lazy.lua",
    ".vimrc",
    ".lvimrc",
    ".dir-locals.el",
    ".dir-locals-2.el",
    ".project.el",
    // What runs at a commit.
    ".husky",
    ".githooks",
    ".pre-commit-config.yaml",
    ".pre-commit-hooks.yaml",
    "lefthook.yml",
    ".lefthook.yml",
    "lefthook-local.yml",
    ".lefthook-local.yml",
    ".lefthook",
    ".overcommit.yml",
    // Interpreters that read a file of the directory they are started in.
    ".rprofile",
    // Assistants that start the programs a project names.
    ".mcp.json",
    ".claude",
    ".gemini",
];

/// In a repository's own directory: what git obeys.
const IN_GIT: &[&str] = &["hooks", "config", "config.worktree", "commondir", "gitdir"];

/// Whether something that comes from a sandbox at this path is to be held back. `there` tells what is beside it.
pub fn is_risky(path: &RelPath, there: &Tree) -> bool {
    let parts: Vec<String> = path.parts().map(|p| String::from_utf8_lossy(p).to_lowercase()).collect();
    if parts.iter().any(|p| ANYWHERE.contains(&p.as_str()) || p.ends_with(".code-workspace") || p.ends_with(".sublime-project")) {
        return true;
    }
    let git = parts.iter().position(|p| p == ".git");
    match git {
        // A `.git` that is no directory sends git elsewhere.
        Some(at) if at + 1 == parts.len() => !matches!(there.get(path), Some(Entry::Dir)),
        Some(at) => parts[at + 1..].iter().any(|p| IN_GIT.contains(&p.as_str())),
        // A directory that looks like a bare repository is one to git, wherever it lies. It becomes one with its `HEAD`, whatever came
        // before that, and whatever the rules hide of it by then.
        None if path.name() == b"HEAD" => true,
        None => parts.iter().enumerate().any(|(i, part)| IN_GIT.contains(&part.as_str()) && is_repository(path, i, there)),
    }
}

/// Whether the directory that holds the part of this number has a `HEAD`.
fn is_repository(path: &RelPath, part: usize, there: &Tree) -> bool {
    let mut name: Vec<u8> = Vec::new();
    for part in path.parts().take(part) {
        name.extend_from_slice(part);
        name.push(b'/');
    }
    name.extend_from_slice(b"HEAD");
    RelPath::new(&name).is_some_and(|head| there.get(&head).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_by_itself_is_risky_and_what_one_runs_oneself_is_not() {
        let tree: Tree = ["bare", "bare/HEAD", "bare/config", "src", ".git"]
            .map(|p| (RelPath::new(p.as_bytes()).unwrap(), Entry::Dir))
            .into_iter()
            .collect();
        let risky = |text: &str| is_risky(&RelPath::new(text.as_bytes()).unwrap(), &tree);
        for text in [
            ".git/hooks/pre-commit",
            ".git/hooks",
            ".git/config",
            ".GIT/Hooks/x",
            "sub/.git/modules/x/config",
            "sub/.git",
            ".envrc",
            "a/b/.envrc",
            ".vscode/tasks.json",
            ".idea/workspace.xml",
            ".husky/pre-commit",
            "x.code-workspace",
            "bare/config",
            "bare/hooks/update",
            "bare/HEAD",
            "src/HEAD",
            ".bashrc",
            ".ssh/authorized_keys",
            ".githooks/pre-push",
            ".dir-locals-2.el",
            "lefthook-local.yml",
            ".lazy.lua",
            "analysis/.Rprofile",
        ] {
            assert!(risky(text), "{text}");
        }
        for text in
            [".git", ".git/HEAD", ".git/objects/ab/cd", ".git/index", "src/config", "src/hooks/use.ts", "Makefile", "src/head/x", "a.in"]
        {
            assert!(!risky(text), "{text}");
        }
    }
}
