//! `cobox exec`: runs one command in a sandbox, with unmodified output bytes and its exit code, as if it had run
//! locally.

use std::{collections::BTreeMap, ffi::OsString, io::IsTerminal};

use cobox_protocol::frame::{ExecStart, StdinStart};

use super::{Outcome, TargetArgs, sync};
use crate::{
    context::Context,
    duration::parse_seconds,
    failure::{EXEC_ERROR, Failure},
    remote_exec::{self, EarlyExit},
    target::Target,
    terminal::size,
};

/// Bytes kept of each output with `--json`: a reasonable maximum for a response that is read as a whole.
const MAX_OUTPUT_BYTES: usize = 16 * 1024 * 1024;

/// Longest run that a sandbox allows, in seconds. It applies when there is no limit, and caps longer limits.
const MAX_RUN_SECONDS: f64 = 24.0 * 3600.0;

/// Exit code of a command that timed out, as with timeout(1).
const TIMED_OUT: u8 = 124;

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "cobox exec [OPTIONS] -- COMMAND [ARG]...\n       cobox exec [OPTIONS] -c 'SHELL COMMAND'",
    after_help = "\
Examples:
  cobox exec -t demo -- uname -a
  cobox exec -t demo -c 'ls | wc -l'
  cobox exec --cwd /workspace/app --env CI=1 -- make test
  tar c src | cobox exec -t demo -- tar x
  cobox exec --tty -- vim notes.txt

On a terminal, escape sequences that would act on this machine are left out; --raw lets them through. Pipes and files get every byte.
Output comes as it is made, and a lost connection is made again by itself with nothing lost or run twice.
Ctrl-C interrupts the command; a second one ends it and everything it started.
With --json the answer comes whole when the command has ended, up to 16 MiB of each stream.
Exit code: the command's own; 124 when it took longer than --timeout; 125 when cobox failed: the command may not have run."
)]
pub struct ExecArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    options: ExecOptions,
}

/// What to run, and how. The command that flattens these arguments selects the sandbox.
#[derive(Debug, clap::Args)]
pub struct ExecOptions {
    /// Working directory in the sandbox [default: /workspace]
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// Set an environment variable; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = parse_variable)]
    env: Vec<(String, String)>,
    /// End the command after this time: seconds, or such as 90s, 5m or 1h; 0 for no limit, which comes to 24 hours [default: 0]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    timeout: Option<f64>,
    /// Read standard input although it may be a terminal's; without this it is read where it is none
    #[arg(long, conflicts_with = "no_stdin")]
    stdin: bool,
    /// Read nothing from standard input, as ssh -n does
    #[arg(short = 'n', long)]
    no_stdin: bool,
    /// Give the command a terminal, this one
    #[arg(long, conflicts_with = "no_stdin")]
    tty: bool,
    /// Write all escape sequences to the terminal; without this, those that reach the clipboard, the title, the keyboard, printers,
    /// notifications or files of this machine are left out
    #[arg(long)]
    raw: bool,
    /// Don't wait for a running `cobox sync` of the thread to bring over what was just saved
    #[arg(long)]
    no_flush: bool,
    /// A command for the sandbox's shell to run
    #[arg(short, value_name = "SHELL COMMAND", conflicts_with = "argv")]
    c: Option<String>,
    /// The command and its arguments, run as they are
    #[arg(trailing_var_arg = true, value_name = "COMMAND", required_unless_present = "c")]
    argv: Vec<OsString>,
}

fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("it must look like NAME=VALUE".to_owned()),
    }
}

pub async fn run(args: ExecArgs, context: &Context) -> Outcome {
    run_in(&args.target.resolve(), args.options, context).await
}

/// Runs `cobox exec` in the given sandbox.
pub async fn run_in(target: &Target, args: ExecOptions, context: &Context) -> Outcome {
    run_remote(target, args, context).await.map_err(|f| f.with_exit_code(EXEC_ERROR))
}

async fn run_remote(target: &Target, args: ExecOptions, context: &Context) -> Outcome {
    if context.printer.is_json() {
        return run_json(target, args, context).await;
    }
    let start = exec_start(&args)?;
    let connection = context.open_sandbox(target).await?;
    if !args.no_flush {
        sync::flush_before_exec(context, &connection.sandbox_id).await;
    }
    match remote_exec::run(&connection.dataplane, start, context.printer, args.raw).await {
        Ok(ended) if ended.timed_out => {
            let limit = args.timeout.filter(|s| *s > 0.0).unwrap_or(MAX_RUN_SECONDS).min(MAX_RUN_SECONDS);
            context.printer.note(&format!("cobox: the command was ended: it took longer than its limit of {limit} s"));
            Ok(TIMED_OUT)
        }
        Ok(ended) => Ok(exit_code(ended.exit_code)),
        Err(EarlyExit::Code(code)) => Ok(code),
        Err(EarlyExit::Failed(failure)) => Err(failure),
    }
}

/// Returns the whole result as one JSON object.
async fn run_json(target: &Target, args: ExecOptions, context: &Context) -> Outcome {
    let flushes = !args.no_flush;
    // With `--json` no user is at the terminal, so the command gets none.
    let start = exec_start(&ExecOptions { tty: false, ..args })?;
    let connection = context.open_sandbox(target).await?;
    if flushes {
        sync::flush_before_exec(context, &connection.sandbox_id).await;
    }
    let response = match remote_exec::capture(&connection.dataplane, start, context.printer, MAX_OUTPUT_BYTES).await {
        Ok(response) => response,
        Err(EarlyExit::Code(code)) => return Ok(code),
        Err(EarlyExit::Failed(failure)) => return Err(failure),
    };
    context.printer.result(&response, String::new)?;
    Ok(if response.timed_out { TIMED_OUT } else { exit_code(response.exit_code) })
}

fn exec_start(args: &ExecOptions) -> Result<ExecStart, Failure> {
    let has_stdin = args.tty || args.stdin || (!args.no_stdin && !std::io::stdin().is_terminal());
    let (cols, rows) = if args.tty { size().unzip() } else { (None, None) };
    let mut env: BTreeMap<String, String> = args.env.iter().cloned().collect();
    if let (true, Ok(term)) = (args.tty, std::env::var("TERM")) {
        env.entry("TERM".to_owned()).or_insert(term);
    }
    Ok(ExecStart {
        command: args.c.clone(),
        argv: argv(args)?,
        cwd: args.cwd.clone(),
        env: (!env.is_empty()).then_some(env),
        pty: args.tty,
        cols,
        rows,
        stdin: has_stdin.then_some(StdinStart::Open(true)),
        // 0 requests no client-side limit: a build may run for as long as it needs.
        timeout_seconds: Some(args.timeout.unwrap_or(0.0)),
        ..ExecStart::default()
    })
}

fn argv(args: &ExecOptions) -> Result<Option<Vec<String>>, Failure> {
    let text = |arg: &OsString| {
        arg.to_str().map(str::to_owned).ok_or_else(|| {
            Failure::new(format!("the argument {arg:?} is not UTF-8"))
                .with_advice("put it in a file in the sandbox and name the file instead")
        })
    };
    let argv = args.argv.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    Ok((!argv.is_empty()).then_some(argv))
}

fn exit_code(code: i32) -> u8 {
    // A process's exit code has eight bits. A larger value comes from an untrusted sandbox and must not count as
    // success.
    u8::try_from(code).unwrap_or(u8::MAX)
}
