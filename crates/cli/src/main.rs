//! `cobox`: the one command people type, for brokers and for the sandboxes behind them.

mod commands;
mod context;
mod daemon;
mod data_dir;
mod failure;
mod pack;
mod pipe;
mod place;
mod printer;
mod running;
mod settings;
mod terminal;
mod transfer;
mod unpack;

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;

use crate::{
    commands::Command,
    context::{Context, Flags},
    failure::{Failure, OWN_ERROR},
    printer::Printer,
};

#[derive(Debug, Parser)]
#[command(
    name = "cobox",
    version,
    about = "One sandbox, shared by a human and an agent",
    after_help = "\
Start here:
  cobox up                           a broker on this machine
  cobox exec -t demo -- uname -a     run a command in the thread's sandbox
  cobox shell -t demo                or sit down in it

Client commands find their broker by --url and --api-key-file, then COBOX_URL and COBOX_API_KEY
(or COBOX_API_KEY_FILE), then the config that `cobox up` wrote."
)]
struct Cli {
    /// The broker's URL
    #[arg(long, global = true, value_name = "URL")]
    url: Option<String>,
    /// A file that holds the API key; a key itself is never an argument, where others could read it
    #[arg(long, global = true, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Print JSON instead of words
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

/// The first argument of the process that becomes a sandbox's.
const LAUNCH: &str = "__launch";

fn main() -> ExitCode {
    // Before anything else: namespaces are entered by a process that has one thread and no state of its own.
    if std::env::args_os().nth(1).is_some_and(|arg| arg == LAUNCH) {
        cobox_provider::local::launch_main()
    }
    let cli = Cli::parse();
    let printer = Printer::new(cli.json);
    let context = Context::new(printer, Flags { url: cli.url, api_key_file: cli.api_key_file });
    let outcome = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let outcome = runtime.block_on(cli.command.run(&context));
            // A thread may still wait for the keyboard; it must not keep the program alive.
            runtime.shutdown_background();
            outcome
        }
        Err(e) => Err(Failure::new(format!("starting the runtime: {e}"))),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            printer.failure(&failure);
            ExitCode::from(if failure.exit_code == 0 { OWN_ERROR } else { failure.exit_code })
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("cobox").chain(line.iter().copied()))
    }

    #[test]
    fn the_arguments_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_remote_command_keeps_its_own_flags() {
        for line in [&["exec", "-t", "demo", "--", "ls", "-la", "--json"][..], &["exec", "-t", "demo", "ls", "-la", "--json"]] {
            let cli = parse(line).unwrap();
            assert!(!cli.json);
            assert!(matches!(cli.command, Command::Exec(_)));
        }
        assert!(parse(&["exec", "--json", "--", "ls"]).unwrap().json);
        assert!(parse(&["--json", "exec", "-c", "ls"]).unwrap().json);
    }

    #[test]
    fn exec_needs_exactly_one_of_a_command_and_a_shell_string() {
        assert!(parse(&["exec", "-t", "demo"]).is_err());
        assert!(parse(&["exec", "-c", "ls", "--", "ls"]).is_err());
        assert!(parse(&["exec", "--env", "NOVALUE", "--", "ls"]).is_err());
        assert!(parse(&["exec", "--timeout", "0", "--", "ls"]).is_err());
    }

    #[test]
    fn an_api_key_is_no_argument() {
        assert!(parse(&["--api-key", "cbx_secret", "sandbox", "list"]).is_err());
    }

    #[test]
    fn sync_asks_for_once() {
        assert!(parse(&["sync", "."]).is_err());
        assert!(parse(&["sync", "--once", ".", "demo:/workspace"]).is_ok());
    }
}
