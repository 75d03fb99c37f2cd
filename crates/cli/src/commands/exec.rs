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

On a terminal, escape sequences that affect this machine are removed unless --raw is given. Pipes and files receive every byte.
Output is streamed. After a lost connection, cobox reconnects: no output is lost and the command doesn't run again.
Ctrl-C interrupts the command; a second Ctrl-C kills its process tree.
With --json the result is printed when the command has exited, with up to 16 MiB of each stream.
Exit code: the command's own; 124 if it exceeded --timeout; 125 if cobox failed, in which case the command may not have run."
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
    /// Maximum run time: seconds, or a value such as 90s, 5m or 1h; 0 means the sandbox's limit of 24 hours [default:
    /// 0]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    timeout: Option<f64>,
    /// Read standard input even if it is a terminal; by default, it is read only if it is not
    #[arg(long, conflicts_with = "no_stdin")]
    stdin: bool,
    /// Read nothing from standard input, like ssh -n
    #[arg(short = 'n', long)]
    no_stdin: bool,
    /// Allocate a terminal for the command and connect it to this one
    #[arg(long, conflicts_with = "no_stdin")]
    tty: bool,
    /// Write all escape sequences to the terminal; by default, sequences that access the clipboard, title, keyboard,
    /// printers, notifications or files of this machine are removed
    #[arg(long)]
    raw: bool,
    /// Don't wait for a running `cobox sync` of the thread to upload pending changes before it runs
    #[arg(long)]
    no_flush: bool,
    /// Command line to run in the sandbox's shell
    #[arg(short, value_name = "SHELL COMMAND", conflicts_with = "argv")]
    c: Option<String>,
    /// Command and arguments, run without a shell
    #[arg(trailing_var_arg = true, value_name = "COMMAND", required_unless_present = "c")]
    argv: Vec<OsString>,
}

fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".to_owned()),
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
            context.printer.note(&format!("cobox: the command was killed: it exceeded its limit of {limit} s"));
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
                .with_advice("write it to a file in the sandbox and pass the file's path instead")
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
