//! Files that tools on this machine execute or read automatically: a git hook, an editor's task, an assistant's hook.
//! They are only accepted from a sandbox with `--allow-risky`.
//!
//! A sandbox confines what runs in it. A file that a shell, an editor or a version control system acts on as soon as it
//! arrives would break out of it. Names are compared without case, because some file systems do so too. Files that the
//! user starts explicitly, such as a Makefile or a package's scripts, are not in the list.

use std::collections::{BTreeSet, HashSet};

use crate::{entry::Entry, path::RelPath, tree::Tree};

/// Names at any depth, with everything beneath them, in lower case.
const ANYWHERE: &[&str] = &[
    // Shells and tool managers that read a file when entering a directory.
    ".env", // autoenv, Oh My Zsh's dotenv plugin
    ".env.leave",
    ".env.fish",
    ".envrc",
    ".direnv", // direnv sources profiles cached there as part of a permitted .envrc
    ".autoenv",
    ".autoenv.zsh",
    ".autoenv.leave",
    ".autoenv_leave.zsh",
    ".shadowenv.d",
    ".mise",
    ".mise.toml",
    "mise.toml",
    ".miserc.toml",
    ".mise-tasks",
    "mise-tasks",
    ".rtx.toml",
    ".tool-versions",
    ".asdfrc",
    "devenv.nix",
    "devenv.yaml",
    "devenv.local.nix",
    // A prompt that shows a toolchain's version runs the toolchain that the directory selects; shims and hooks of version
    // managers switch to it or install it, and uv accepts the path of a program.
    "rust-toolchain",
    "rust-toolchain.toml",
    ".nvmrc",
    ".node-version",
    ".python-version",
    ".python-versions",
    ".ruby-version",
    // Package managers run or load other programs when they are started in any way, by an editor too.
    ".npmrc",
    ".yarnrc",
    ".yarnrc.yml",
    ".pnpmfile.cjs",
    ".pnpmfile.mjs",
    // Build servers, which editors start when a folder is opened.
    ".bsp",
    // Read by shells and at login if the folder is a home directory.
    ".profile",
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".bash_aliases",
    ".inputrc",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".zlogin",
    ".zlogout",
    ".cshrc",
    ".tcshrc",
    ".kshrc",
    ".xonshrc",
    ".xprofile",
    ".xinitrc",
    ".xsession",
    ".pam_environment",
    ".tmux.conf",
    ".ssh",
    ".gnupg",
    // Configuration of version control systems.
    ".gitconfig",
    ".hgrc",
    ".jjconfig.toml",
    // Editors: tasks that run when a folder is opened, and settings that name programs.
    ".vscode",
    ".vs",
    ".idea",
    ".zed",
    ".fleet",
    ".helix",
    ".nova",
    ".theia",
    ".devcontainer",
    ".devcontainer.json",
    ".exrc",
    ".nvimrc",
    ".nvim.lua",
    ".lazy.lua",
    ".vimrc",
    ".gvimrc",
    "_vimrc",
    ".lvimrc",
    ".local.vimrc",
    ".neoconf.json",
    ".nlsp-settings",
    ".luarc.json",
    ".dir-locals.el",
    ".dir-locals-2.el",
    ".project.el",
    ".emacs",
    ".emacs.d",
    ".obsidian",
    // Cargo, which rust-analyzer starts when a folder is opened.
    ".cargo",
    // Programs that run at a commit.
    ".husky",
    ".huskyrc",
    ".githooks",
    ".git-hooks",
    ".cargo-husky",
    ".pre-commit-config.yaml",
    ".pre-commit-hooks.yaml",
    "prek.toml",
    ".lefthook",
    ".overcommit.yml",
    ".rusty-hook.toml",
    "captainhook.json",
    "grumphp.yml",
    "hk.pkl",
    "hk.local.pkl",
    ".simple-git-hooks.json",
    ".simple-git-hooks.js",
    ".simple-git-hooks.cjs",
    ".lintstagedrc",
    // Interpreters and debuggers that read a file in their working directory.
    ".rprofile",
    ".renviron",
    ".ghci",
    ".iex.exs",
    ".irbrc",
    ".pryrc",
    ".ocamlinit",
    ".pdbrc",
    ".gdbinit",
    ".gdbearlyinit",
    ".lldbinit",
    ".ipython",
    ".jupyter",
    "jupyter_notebook_config.py",
    "jupyter_server_config.py",
    // Assistants: hooks, plugins and servers that a project defines.
    ".mcp.json",
    ".aider.conf.yml",
    ".amazonq",
    ".agent",
    ".agents",
    ".amp",
    ".augment",
    ".claude",
    ".cline",
    ".clinerules",
    ".codeium",
    ".codex",
    ".continue",
    ".continuerc.json",
    ".copilot",
    ".crush",
    ".crush.json",
    "crush.json",
    ".cursor",
    ".factory",
    ".gemini",
    ".goose",
    ".junie",
    ".kilocode",
    ".kilocodemodes",
    ".kiro",
    ".opencode",
    ".opencode.json",
    "opencode.json",
    "opencode.jsonc",
    ".openhands",
    ".pi",
    ".qoder",
    ".qwen",
    ".roo",
    ".roomodes",
    ".tabnine",
    ".trae",
    ".vibe",
    ".warp",
    ".windsurf",
];

/// Paths at any depth, with everything beneath them, in lower case.
const ANYWHERE_PATHS: &[&[&str]] = &[
    &[".config", "mise"],
    &[".config", "fish"],
    &[".config", "git"],
    &[".config", "jj"],
    &[".config", "autostart"],
    &[".config", "systemd"],
    &[".config", "environment.d"],
    &[".github", "hooks"],
    &[".github", "copilot"],
    &[".yarn", "releases"],
    &[".yarn", "plugins"],
    &[".pijul", "config"],
    &["_darcs", "prefs"],
];

/// Prefixes and suffixes of names in lower case, for tools that read several variants of a file.
const PATTERNS: &[(&str, &str)] = &[
    ("mise.", ".toml"),  // mise.local.toml, mise.test.toml, mise.test.local.toml
    (".mise.", ".toml"), // the same, hidden
    ("lefthook.", ""),
    (".lefthook.", ""),
    ("lefthook-local.", ""),
    (".lefthook-local.", ""),
    (".lintstagedrc.", ""),
    ("lint-staged.config.", ""),
    ("", ".code-workspace"),
    ("", ".sublime-project"),
    ("", ".sublime-workspace"),
];

/// Files that git acts on, in a repository's own directory.
const IN_GIT: &[&str] = &["hooks", "config", "config.worktree", "commondir", "gitdir"];
/// The same for Mercurial and Sapling.
const IN_HG: &[&str] = &["hgrc", "hgrc-not-shared", "config", "sharedpath"];
/// The same for Jujutsu, which also has a git repository inside.
const IN_JJ: &[&str] = &["config.toml", "workspace-config.toml", "config-id", "workspace-config-id", "git_target"];

/// Decides which files from a sandbox are risky.
pub struct RiskFilter<'a> {
    sandbox: &'a Tree,
    /// Paths that git executes or reads because of its configuration on this machine, in lower case.
    executed: Vec<String>,
    /// Directories that git treats as a repository because they contain a `HEAD`, in lower case.
    repositories: HashSet<String>,
}

impl<'a> RiskFilter<'a> {
    /// `sandbox` is the sandbox's tree; `executed` comes from this machine's git configuration.
    pub fn new(sandbox: &'a Tree, executed: &BTreeSet<RelPath>) -> Self {
        let heads = sandbox.iter().filter(|(path, entry)| path.name().eq_ignore_ascii_case(b"HEAD") && !entry.is_dir());
        let repositories = heads.map(|(path, _)| lower(path.parent_bytes())).collect();
        Self { sandbox, executed: executed.iter().map(|path| lower(path.bytes())).collect(), repositories }
    }

    /// Whether the path has to be held back.
    pub fn is_risky(&self, path: &RelPath) -> bool {
        let text = lower(path.bytes());
        let parts: Vec<&str> = text.split('/').collect();
        let is_executed = self.executed.iter().any(|top| is_within(&text, top));
        has_risky_name(&parts) || self.is_version_control(path, &parts) || is_executed || self.redirects(path, &text)
    }

    /// Whether something other than a directory, such as a link to another one, would take the place of a directory that
    /// contains risky paths.
    fn redirects(&self, path: &RelPath, text: &str) -> bool {
        let is_above = |top: &str| top != text && is_within(top, text);
        let begins = |path: &&[&str]| path.first() == text.rsplit('/').next().as_ref();
        let has_risky_contents = self.executed.iter().any(|top| is_above(top)) || ANYWHERE_PATHS.iter().any(begins);
        has_risky_contents && !matches!(self.sandbox.get(path), Some(Entry::Dir))
    }

    fn is_version_control(&self, path: &RelPath, parts: &[&str]) -> bool {
        let at = |name: &str| parts.iter().position(|part| *part == name);
        let has_any = |from: usize, names: &[&str]| parts[from..].iter().any(|part| names.contains(part));
        let is_file = || !matches!(self.sandbox.get(path), Some(Entry::Dir));
        if let Some(at) = at(".git") {
            // A `.git` that is not a directory redirects git to another place.
            return if at + 1 == parts.len() { is_file() } else { has_any(at + 1, IN_GIT) };
        }
        if let Some(at) = at(".hg").or_else(|| at(".sl")) {
            return has_any(at + 1, IN_HG);
        }
        if let Some(at) = at(".jj") {
            // A `.jj/repo` that is not a directory redirects jj to another place.
            let is_pointer = parts.len() == at + 2 && parts[at + 1] == "repo" && is_file();
            return is_pointer || has_any(at + 1, IN_JJ) || has_any(at + 1, IN_GIT);
        }
        // Git treats any directory that looks like a bare repository as one, wherever it is. The directory becomes one
        // as soon as it has a `HEAD`, regardless of which files arrived before it and which parts the ignore rules hide
        // by then.
        let is_obeyed = |(number, part): (usize, &&str)| IN_GIT.contains(part) && self.repositories.contains(&parts[..number].join("/"));
        parts.last() == Some(&"head") && is_file() || parts.iter().enumerate().any(is_obeyed)
    }
}

fn lower(path: &[u8]) -> String {
    String::from_utf8_lossy(path).to_lowercase()
}

fn is_within(path: &str, top: &str) -> bool {
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn has_risky_name(parts: &[&str]) -> bool {
    let is_name = |part: &&str| {
        let is_pattern = |(prefix, suffix): &(&str, &str)| {
            part.len() > prefix.len() + suffix.len() && part.starts_with(prefix) && part.ends_with(suffix)
        };
        ANYWHERE.contains(part) || PATTERNS.iter().any(is_pattern)
    };
    let is_path = |path: &&[&str]| parts.windows(path.len()).any(|window| *window == **path);
    // `mise/config.toml` and its variants; other files in a directory named mise are harmless.
    let is_mise = |pair: &[&str]| pair[0] == "mise" && (pair[1].starts_with("config.") || pair[1] == "conf.d");
    parts.iter().any(is_name) || ANYWHERE_PATHS.iter().any(is_path) || parts.windows(2).any(is_mise)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tools with the files that they execute or read automatically.
    const TOOLS: &[(&str, &[&str])] = &[
        ("git", &[".git/hooks/pre-commit", ".git/hooks", ".git/config", "sub/.git/modules/x/config", "sub/.git", ".gitconfig"]),
        ("git, a bare repository", &["bare/config", "bare/hooks/update", "bare/HEAD", "src/HEAD"]),
        ("git, core.hooksPath", &["tools/hooks/pre-push", "tools/hooks"]),
        ("Mercurial", &[".hg/hgrc", ".hg/hgrc-not-shared", ".hg/sharedpath", "sub/.hg/hgrc", ".hgrc"]),
        ("Sapling", &[".sl/config"]),
        ("Jujutsu", &[".jj/repo/config.toml", ".jj/repo/config-id", ".jj/workspace-config.toml", ".jj/repo/store/git/hooks/x", ".jj/repo"]),
        ("Jujutsu, the store", &[".jj/repo/store/git_target", ".jj/repo/store/git/config", ".config/jj/config.toml", ".jjconfig.toml"]),
        ("Pijul", &[".pijul/config", "sub/.pijul/config"]),
        ("Darcs", &["_darcs/prefs/defaults", "_darcs/prefs"]),
        ("direnv", &[".envrc", "a/b/.envrc", ".direnv/flake-profile.rc", "a/.direnv/bin/python"]),
        ("autoenv", &[".env", ".autoenv", ".autoenv.leave"]),
        ("zsh-autoenv", &[".autoenv.zsh", ".autoenv_leave.zsh"]),
        ("shadowenv", &[".shadowenv.d/500.lisp"]),
        ("mise", &["mise.toml", ".mise.toml", "mise.local.toml", ".mise.local.toml", "mise.test.toml", "mise.test.local.toml"]),
        ("mise, folders", &["mise/config.toml", "mise/config.local.toml", ".mise/config.toml", ".config/mise/conf.d/x.toml"]),
        ("mise, tasks", &["mise-tasks/build", ".mise-tasks/build", ".config/mise/config.toml", ".miserc.toml", ".rtx.toml"]),
        ("asdf", &[".tool-versions", ".asdfrc"]),
        ("devenv", &["devenv.nix", "devenv.yaml"]),
        ("rustup, from a prompt", &["rust-toolchain.toml", "rust-toolchain"]),
        ("nvm, fnm, when a shell enters the directory", &[".nvmrc", ".node-version"]),
        ("pyenv, uv", &[".python-version", ".python-versions"]),
        ("rbenv, chruby", &[".ruby-version"]),
        ("npm", &[".npmrc"]),
        ("Yarn", &[".yarnrc.yml", ".yarnrc", ".yarn/releases/yarn-4.cjs", ".yarn/plugins/x.cjs"]),
        ("pnpm", &[".pnpmfile.cjs", ".pnpmfile.mjs"]),
        ("Metals and other clients of build servers", &[".bsp/sbt.json"]),
        ("bash, zsh, fish", &[".bashrc", ".zshenv", ".profile", ".config/fish/config.fish"]),
        ("OpenSSH", &[".ssh/authorized_keys"]),
        ("a desktop", &[".config/autostart/x.desktop", ".config/systemd/user/x.service"]),
        ("VS Code", &[".vscode/tasks.json", "x.code-workspace", ".devcontainer/devcontainer.json", ".devcontainer.json"]),
        ("JetBrains", &[".idea/workspace.xml", ".fleet/run.json"]),
        ("Zed", &[".zed/settings.json"]),
        ("Helix", &[".helix/config.toml"]),
        ("Sublime Text", &["x.sublime-project", "x.sublime-workspace"]),
        ("Vim", &[".exrc", ".vimrc", ".lvimrc", ".local.vimrc"]),
        ("Neovim", &[".nvim.lua", ".nvimrc", ".lazy.lua", ".neoconf.json"]),
        ("Emacs", &[".dir-locals.el", ".dir-locals-2.el", ".project.el"]),
        ("Obsidian", &[".obsidian/plugins/x/main.js"]),
        ("Cargo, from rust-analyzer", &[".cargo/config.toml"]),
        ("husky", &[".husky/pre-commit", ".husky/_/husky.sh"]),
        ("pre-commit", &[".pre-commit-config.yaml", ".pre-commit-hooks.yaml"]),
        ("prek", &["prek.toml"]),
        ("hk", &["hk.pkl"]),
        ("Lefthook", &["lefthook.yml", ".lefthook.toml", "lefthook-local.yml", ".lefthook/pre-commit/x.sh", ".config/lefthook.json"]),
        ("Overcommit", &[".overcommit.yml", ".git-hooks/pre_commit/x.rb"]),
        ("simple-git-hooks", &[".simple-git-hooks.cjs"]),
        ("lint-staged", &[".lintstagedrc", ".lintstagedrc.json", "lint-staged.config.js"]),
        ("a repository's own hooks", &[".githooks/pre-push"]),
        ("R", &["analysis/.Rprofile", ".Renviron"]),
        ("GHCi, IEx, irb, pry, OCaml", &[".ghci", ".iex.exs", ".irbrc", ".pryrc", ".ocamlinit"]),
        ("gdb, lldb, pdb", &[".gdbinit", ".lldbinit", ".pdbrc"]),
        ("Jupyter", &["jupyter_server_config.py", ".jupyter/x.py", ".ipython/profile_default/startup/x.py"]),
        ("Claude Code", &[".claude/settings.json", ".mcp.json"]),
        ("Codex", &[".codex/config.toml"]),
        ("Gemini CLI", &[".gemini/settings.json"]),
        ("OpenCode", &["opencode.json", "opencode.jsonc", ".opencode/plugins/x.ts", ".opencode.json"]),
        ("Kiro", &[".kiro/hooks/x.kiro.hook", ".kiro/settings/mcp.json", ".kiro/agents/x.json"]),
        ("Roo Code", &[".roo/mcp.json", ".roomodes"]),
        ("Cline", &[".clinerules/hooks/PreToolUse", ".cline/hooks/x"]),
        ("assistants that share a directory", &[".agents/skills/x/SKILL.md", ".agent/workflows/x.md"]),
        ("Mistral Vibe", &[".vibe/config.toml"]),
        ("Qoder", &[".qoder/mcp.json"]),
        ("Kilo Code", &[".kilocode/mcp.json"]),
        ("Cursor", &[".cursor/mcp.json", ".cursor/hooks.json"]),
        ("Windsurf", &[".windsurf/hooks.json"]),
        ("GitHub Copilot", &[".github/hooks/x.json", ".copilot/mcp-config.json", ".github/copilot/settings.json"]),
        ("Amazon Q", &[".amazonq/mcp.json"]),
        ("Amp", &[".amp/settings.json"]),
        ("Aider", &[".aider.conf.yml"]),
        ("Continue", &[".continue/config.yaml", ".continuerc.json"]),
        ("Crush", &["crush.json", ".crush.json"]),
        ("Factory", &[".factory/mcp.json"]),
        ("Goose", &[".goose/config.yaml"]),
        ("Junie", &[".junie/mcp/mcp.json"]),
        ("OpenHands", &[".openhands/setup.sh"]),
        ("Qwen Code", &[".qwen/settings.json"]),
        ("Trae", &[".trae/mcp.json"]),
    ];

    fn tree() -> Tree {
        let head = (RelPath::new(b"bare/HEAD").unwrap(), Entry::Link { target: b"x".as_slice().into() });
        let folders = ["bare", "src", "src/head", ".git"].map(|p| (RelPath::new(p.as_bytes()).unwrap(), Entry::Dir));
        folders.into_iter().chain([head]).collect()
    }

    fn risky(text: &str) -> bool {
        let executed = [RelPath::new(b"tools/hooks").unwrap()].into_iter().collect();
        RiskFilter::new(&tree(), &executed).is_risky(&RelPath::new(text.as_bytes()).unwrap())
    }

    #[test]
    fn files_that_tools_execute_by_themselves_are_risky_in_upper_and_lower_case() {
        for (tool, files) in TOOLS {
            for file in *files {
                assert!(risky(file), "{tool}: {file}");
                assert!(risky(&file.to_uppercase()), "{tool}: {file} in upper case");
            }
        }
        assert!(risky(".GIT/Hooks/x") && risky("lib/head") && risky("Tools/HOOKS/pre-push"));
    }

    #[test]
    fn files_that_the_user_runs_by_hand_are_not_risky() {
        for text in [
            ".git",
            ".git/HEAD",
            ".git/objects/ab/cd",
            ".git/index",
            ".hg/store/data/x.i",
            ".jj/working_copy/tree_state",
            "src/config",
            "src/hooks/use.ts",
            "Makefile",
            "package.json",
            "src/head/x",
            "src/head",
            "a.in",
            "mise/readme.md",
            "docs/mise.md",
            ".github/workflows/ci.yml",
            ".config/app/settings.json",
            "tools/hooks-docs/x",
            ".env.example",
            ".yarn/cache/x.zip",
            ".pijul/pristine/db",
            "_darcs/patches/x",
            "lefthook",
        ] {
            assert!(!risky(text), "{text}");
        }
    }

    #[test]
    fn a_link_in_place_of_a_directory_with_risky_files_is_risky() {
        assert!(risky("tools") && risky(".github") && risky("home/.config"), "they are not directories in the tree");
        let tree: Tree = [(RelPath::new(b"tools").unwrap(), Entry::Dir)].into_iter().collect();
        let executed = [RelPath::new(b"tools/hooks").unwrap()].into_iter().collect();
        let filter = RiskFilter::new(&tree, &executed);
        assert!(!filter.is_risky(&RelPath::new(b"tools").unwrap()) && !filter.is_risky(&RelPath::new(b"tool").unwrap()));
    }
}
