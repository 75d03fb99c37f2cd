//! `cobox completions` and `cobox man`: shell completions and manual pages, generated from the same definitions as
//! `--help`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap_complete::aot;
use serde_json::json;

use super::{HiddenBrokerFlags, Outcome};
use crate::{context::Context, failure::Failure, help};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cobox completions bash > ~/.local/share/bash-completion/completions/cobox
  cobox completions zsh > ~/.zfunc/_cobox     with ~/.zfunc in your fpath
  cobox completions fish > ~/.config/fish/completions/cobox.fish
  source <(cobox completions bash)            in the current shell only")]
pub struct CompletionsArgs {
    #[command(flatten)]
    _hidden_flags: HiddenBrokerFlags,
    /// Shell to generate completions for
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cobox man | man -l -
  cobox man --dir ~/.local/share/man/man1")]
pub struct ManArgs {
    #[command(flatten)]
    _hidden_flags: HiddenBrokerFlags,
    /// Write a page for cobox and for each of its commands to this directory, instead of printing the first page
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub fn run_completions(args: CompletionsArgs, context: &Context) -> Outcome {
    let (shell, name) = match args.shell {
        Shell::Bash => (aot::Shell::Bash, "bash"),
        Shell::Zsh => (aot::Shell::Zsh, "zsh"),
        Shell::Fish => (aot::Shell::Fish, "fish"),
    };
    let mut script = Vec::new();
    aot::generate(shell, &mut help::command(), "cobox", &mut script);
    let script = String::from_utf8(script).map_err(|_| Failure::new("the completions are not UTF-8"))?;
    context.printer.result(&json!({"shell": name, "script": script}), || script.trim_end().to_owned())?;
    Ok(0)
}

pub fn run_man(args: ManArgs, context: &Context) -> Outcome {
    let mut cli = help::command().disable_help_subcommand(true);
    let Some(dir) = args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(cli).render(&mut page)?;
        let page = String::from_utf8(page).map_err(|_| Failure::new("the page is not UTF-8"))?;
        context.printer.result(&json!({"name": "cobox.1", "page": page}), || page.trim_end().to_owned())?;
        return Ok(0);
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    cli.build();
    let mut written = Vec::new();
    let mut remaining = vec![cli];
    while let Some(command) = remaining.pop() {
        let page = clap_mangen::Man::new(command.clone());
        let name = page.get_filename();
        let path = dir.join(&name);
        let mut text = Vec::new();
        page.render(&mut text)?;
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        written.push(name);
        remaining.extend(command.get_subcommands().filter(|sub| !sub.is_hide_set()).cloned());
    }
    written.sort();
    context.printer.result(&json!({"dir": dir, "pages": written}), || format!("wrote {} pages to {}", written.len(), dir.display()))?;
    Ok(0)
}
