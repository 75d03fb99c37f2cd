//! `cobox`: the command line program, for brokers and for the sandboxes they manage.

mod broker_settings;
mod byte_size;
mod chat;
mod commands;
#[cfg(test)]
mod compatibility_tests;
mod confirm;
mod context;
mod contexts;
mod cors;
mod credentials;
mod daemon;
mod data_dir;
mod dataplane_address;
mod duration;
mod event_printer;
mod failure;
mod help;
#[cfg(test)]
mod help_tests;
mod key_prompt;
mod keyring;
mod location;
mod notices;
mod output_filter;
mod pack;
mod printer;
mod remote_exec;
mod running_broker;
mod shell_attach;
mod table;
mod target;
mod terminal;
mod thread_cache;
mod tls;
mod transfer;
mod tui;
mod unpack;

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    process::ExitCode,
};

use clap::{FromArgMatches, Parser};

use crate::{
    commands::Command,
    context::{BrokerFlags, Context},
    failure::{Failure, GENERAL_ERROR},
    printer::Printer,
};

#[derive(Debug, Parser)]
#[command(
    name = "cobox",
    version,
    about = "One sandbox, shared by a human and an agent",
    after_help = "\
Start here:
  cobox up                           start a broker on this machine
  cobox exec -t demo -- uname -a     run a command in the thread's sandbox
  cobox shell -t demo                attach to its shared shell
  cobox chat --deployment URL        chat with an agent in it

Client commands select their broker by --url and --api-key-file, then COBOX_URL and COBOX_API_KEY
(or COBOX_API_KEY_FILE), then the context set by COBOX_CONTEXT or `cobox config use`, then the
broker of `cobox up`. `cobox config show` prints the result. COBOX_CA_FILE is equivalent to --ca-file."
)]
struct Cli {
    /// The context to use, as listed by `cobox config contexts`
    #[arg(long, global = true, value_name = "NAME", help_heading = "Global options")]
    context: Option<String>,
    /// The broker's URL
    #[arg(long, global = true, value_name = "URL", help_heading = "Global options")]
    url: Option<String>,
    /// File that contains the API key; the key itself can't be an argument, because other users could read it
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    api_key_file: Option<PathBuf>,
    /// PEM file of certificate authorities to trust in addition to the system's
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    ca_file: Option<PathBuf>,
    /// Print output as JSON
    #[arg(long, global = true, help_heading = "Global options")]
    json: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// First argument of the process that becomes a sandbox's launcher.
const LAUNCH_ARGUMENT: &str = "__launch";
/// Exit code of a command line that names no command or can't be parsed.
const USAGE_ERROR: u8 = 2;

fn main() -> ExitCode {
    // Must come first: namespaces have to be entered by a process with a single thread and no state.
    if std::env::args_os().nth(1).is_some_and(|arg| arg == LAUNCH_ARGUMENT) {
        cobox_provider::local::launch_main()
    }
    let parsed = help::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let mut cli = match parsed {
        Ok(cli) => cli,
        Err(e) => return print_parse_error(&e),
    };
    if let Some(Command::Sandbox(command)) = &mut cli.command {
        cli.json |= command.take_json();
    }
    let printer = Printer::new(cli.json);
    let context =
        Context::new(printer, BrokerFlags { context: cli.context, url: cli.url, api_key_file: cli.api_key_file, ca_file: cli.ca_file });
    let outcome = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let outcome = catch_unwind(AssertUnwindSafe(|| runtime.block_on(run(cli.command, &context))));
            // A thread may still be blocked reading the keyboard; it must not delay the exit, also not after a panic.
            runtime.shutdown_background();
            outcome.unwrap_or_else(|panic| resume_unwind(panic))
        }
        Err(e) => Err(Failure::new(format!("starting the runtime: {e}"))),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            let failure = context.explain(failure);
            printer.failure(&failure);
            ExitCode::from(if failure.exit_code == 0 { GENERAL_ERROR } else { failure.exit_code })
        }
    }
}

/// Prints what clap returned instead of a command: help, or a parse error, which is JSON if the command line has
/// `--json`.
fn print_parse_error(e: &clap::Error) -> ExitCode {
    let wants_json = std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if !e.use_stderr() || !wants_json {
        e.exit()
    }
    Printer::new(true).failure(&usage_failure(e));
    ExitCode::from(USAGE_ERROR)
}

fn usage_failure(e: &clap::Error) -> Failure {
    let text = e.render().to_string();
    let paragraph = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join(" ").trim().to_owned();
    let usage = text.split("\n\n").find(|part| part.starts_with("Usage:")).map(paragraph);
    let message = match e.kind() {
        // This kind of error contains the whole help text.
        clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => "no command given".to_owned(),
        _ => paragraph(text.split("\n\n").next().unwrap_or_default().trim_start_matches("error:")),
    };
    Failure::new(message).with_advice(usage.unwrap_or_else(|| "run with --help for usage".to_owned())).with_exit_code(USAGE_ERROR)
}

/// `cobox` without a command opens the sandbox view, or prints help if there is no sandbox to view.
async fn run(command: Option<Command>, context: &Context) -> commands::Outcome {
    match command {
        Some(command) => command.run(context).await,
        None => match commands::chat::run_bare(context).await {
            Some(outcome) => outcome,
            None => {
                context.printer.err(help::command().render_help().to_string().as_bytes());
                Ok(USAGE_ERROR)
            }
        },
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
    fn the_argument_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_remote_command_keeps_its_own_flags() {
        for line in [&["exec", "-t", "demo", "--", "ls", "-la", "--json"][..], &["exec", "-t", "demo", "ls", "-la", "--json"]] {
            let cli = parse(line).unwrap();
            assert!(!cli.json);
            assert!(matches!(cli.command, Some(Command::Exec(_))));
        }
        assert!(parse(&["exec", "--json", "--", "ls"]).unwrap().json);
        assert!(parse(&["--json", "exec", "-c", "ls"]).unwrap().json);
    }

    #[test]
    fn exec_needs_exactly_one_of_a_command_and_a_shell_string() {
        assert!(parse(&["exec", "-t", "demo"]).is_err());
        assert!(parse(&["exec", "-c", "ls", "--", "ls"]).is_err());
        assert!(parse(&["exec", "--env", "NOVALUE", "--", "ls"]).is_err());
        assert!(parse(&["exec", "--timeout", "-1", "--", "ls"]).is_err());
        for time in ["0", "1.5", "5m"] {
            assert!(parse(&["exec", "--timeout", time, "--", "ls"]).is_ok(), "{time}");
        }
        let error = parse(&["exec"]).unwrap_err().to_string();
        assert!(error.contains("cobox exec [OPTIONS] -- COMMAND"), "{error}");
    }

    #[test]
    fn a_mistyped_option_is_never_run_as_a_program() {
        for line in [&["exec", "--tread", "demo", "--", "ls"][..], &["exec", "-x", "ls"], &["exec", "--tread=demo", "ls"]] {
            assert_eq!(parse(line).unwrap_err().kind(), clap::error::ErrorKind::UnknownArgument, "{line:?}");
        }
    }

    #[test]
    fn a_thread_and_a_sandbox_cannot_be_given_together() {
        for verb in [&["exec", "-c", "ls"][..], &["shell"], &["cp", "a", ":b"]] {
            let with = |more: &[&str]| parse(&[verb, more].concat());
            assert!(with(&["-t", "demo"]).is_ok() && with(&["--sandbox", "build"]).is_ok(), "{verb:?}");
            assert!(with(&["-t", "demo", "--sandbox", "build"]).is_err(), "{verb:?}");
            let error = with(&["-t", "sb_00000000000000000000000000"]).unwrap_err().to_string();
            assert!(error.contains("--sandbox"), "{error}");
        }
        assert!(parse(&["cp", "a", "b", "-t", "demo", ":c"]).is_ok(), "options are accepted in any position");
        assert!(parse(&["shell", "demo"]).is_ok());
        assert!(parse(&["shell", "demo", "-t", "other"]).is_err());
    }

    #[test]
    fn broker_options_are_hidden_on_commands_without_a_broker() {
        let mut cli = Cli::command();
        cli.build();
        let help = |verb: &str| cli.find_subcommand(verb).unwrap().clone().render_long_help().to_string();
        for verb in ["up", "serve", "doctor"] {
            assert!(!help(verb).contains("--api-key-file"), "{verb}");
            assert!(help(verb).contains("--json"), "{verb}");
        }
        assert!(help("exec").contains("--api-key-file"));
        assert!(parse(&["--url", "http://x", "doctor"]).is_ok() && parse(&["doctor", "--url", "http://x"]).is_ok());
    }

    #[test]
    fn a_parse_error_is_one_sentence_with_the_usage() {
        let parse_failure = |line: &[&str]| usage_failure(&parse(line).unwrap_err());
        let failure = parse_failure(&["exec", "--tread", "demo", "--", "ls"]);
        assert_eq!((failure.message.as_str(), failure.exit_code), ("unexpected argument '--tread' found", USAGE_ERROR));
        assert!(failure.advice.unwrap().starts_with("Usage: cobox exec "));
        assert_eq!(parse_failure(&["sandbox"]).message, "no command given");
    }

    #[test]
    fn sandbox_sync_accepts_json_anywhere_in_its_arguments() {
        for (line, is_json) in [
            (&["sandbox", "sync", "build"][..], false),
            (&["sandbox", "sync", "build", "--once", ".", "--json"], true),
            (&["--json", "sandbox", "sync", "build", "."], true),
        ] {
            let mut cli = parse(line).unwrap();
            let Some(Command::Sandbox(command)) = &mut cli.command else { panic!("{line:?}") };
            assert_eq!(command.take_json() || cli.json, is_json, "{line:?}");
            assert!(!command.take_json(), "taken once");
        }
    }

    #[test]
    fn an_api_key_is_not_an_argument() {
        assert!(parse(&["--api-key", "cbx_secret", "sandbox", "list"]).is_err());
    }

    #[test]
    fn sync_runs_live_without_once_or_a_subcommand() {
        for line in [
            &["sync"][..],
            &["sync", "."],
            &["sync", "--mode", "pull", ".", "demo:/workspace"],
            &["sync", "--once", ".", "demo:/workspace"],
        ] {
            assert!(parse(line).is_ok(), "{line:?}");
        }
        for line in [&["sync", "list"][..], &["sync", "status"], &["sync", "resume", "--confirm"], &["sync", "flush", "--wait"]] {
            assert!(parse(line).is_ok(), "{line:?}");
        }
        assert!(parse(&["sync", "resolve", "--keep", "here", "a", "b"]).is_ok());
        assert!(parse(&["sync", "resolve", "--keep", "here"]).is_err(), "paths and --all are mutually exclusive");
        assert!(parse(&["sync", "resolve", "a"]).is_err(), "--keep is required");
        assert!(parse(&["sync", "--once", "--mode", "push", "."]).is_err());
        assert!(parse(&["sync", "--mode", "sideways"]).unwrap_err().to_string().contains("two-way-safe"));
    }
}
