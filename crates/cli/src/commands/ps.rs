//! `cobox ps` and `cobox kill`: lists what runs in a sandbox and who started it, and ends it.

use cobox_protocol::{
    CommandId,
    process::{ProcessInfo, ProcessKind, ProcessState, SignalName},
    shell::ShellInfo,
};
use serde_json::json;

use super::{Outcome, TargetArgs, parse_thread};
use crate::{context::Context, failure::Failure, printer::Printer};

/// Characters of a command that a row shows.
const MAX_COMMAND_CHARS: usize = 60;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cobox ps demo
  cobox ps -t demo --all         include recently exited ones
  cobox --json ps -t demo")]
pub struct PsArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// The thread, as with --thread; or a sandbox's name if no thread has that name
    #[arg(value_name = "THREAD|NAME", value_parser = parse_thread, conflicts_with_all = ["thread", "sandbox"])]
    thread_name: Option<String>,
    /// Include commands and shells that have exited and are still listed
    #[arg(short, long)]
    all: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cobox kill -t demo cmd_01jq…            kill a command's process tree
  cobox kill -t demo --signal HUP cmd_01jq…
  cobox kill -t demo main                 end a shell for all participants")]
pub struct KillArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Signal to send instead of SIGKILL: a name or a number
    #[arg(short, long, value_name = "SIGNAL")]
    signal: Option<String>,
    /// ID of a command, or ID or name of a shell, as listed by `cobox ps`
    #[arg(value_name = "ID", required = true)]
    ids: Vec<String>,
}

pub async fn run(args: PsArgs, context: &Context) -> Outcome {
    let target = match args.thread_name {
        Some(name) => context.resolve_name(&name).await?,
        None => args.target.resolve(),
    };
    let connection = context.open_existing_sandbox(&target).await?;
    let (mut processes, shells) = tokio::try_join!(connection.dataplane.list_processes(), connection.dataplane.list_shells())?;
    processes.retain(|p| args.all || p.state == ProcessState::Running);
    // A shell's process is shown only in the shell's row, which has its name and its participants.
    processes.retain(|p| !shells.iter().any(|s| s.id.as_str() == p.id));
    let rows: Vec<_> =
        shells.iter().map(|s| shell_row(context.printer, s)).chain(processes.iter().map(|p| row(context.printer, p))).collect();
    let header = ["ID", "PID", "WHO", "STATE", "STARTED", "COMMAND"];
    let value = json!({ "shells": shells, "processes": processes });
    context.printer.list(&value, &header, &rows, "nothing is running; start a command with `cobox exec` or a shell with `cobox shell`")?;
    Ok(0)
}

fn row(printer: Printer, p: &ProcessInfo) -> Vec<String> {
    let state = match (p.state, p.exit_code) {
        (ProcessState::Running, _) => "running".to_owned(),
        (ProcessState::Ended, _) if p.timed_out => "timed out".to_owned(),
        (ProcessState::Ended, Some(code)) => format!("exit {code}"),
        (ProcessState::Ended, None) => "ended".to_owned(),
    };
    let kind = if p.kind == ProcessKind::Shell { "(shell) " } else { "" };
    let command: String = format!("{kind}{}", p.argv.join(" ")).chars().take(MAX_COMMAND_CHARS).collect();
    let pid = p.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
    vec![p.id.clone(), pid, p.principal.clone(), state, printer.moment(p.started_at), command]
}

fn shell_row(printer: Printer, s: &ShellInfo) -> Vec<String> {
    let controller = s.controller.as_ref().map_or_else(|| "-".to_owned(), |c| c.principal.clone());
    let viewers = match s.viewers {
        0 => "no participants".to_owned(),
        1 => "1 participant".to_owned(),
        n => format!("{n} participants"),
    };
    let command = s.command.as_deref().map_or_else(|| "(shell)".to_owned(), |c| format!("(shell) {c}"));
    let command = command.chars().take(MAX_COMMAND_CHARS).collect();
    vec![s.name.clone(), "-".to_owned(), controller, viewers, printer.moment(s.created_at), command]
}

pub async fn kill(args: KillArgs, context: &Context) -> Outcome {
    let connection = context.open_existing_sandbox(&args.target.resolve()).await?;
    let signal = args.signal.map(SignalName::Name);
    if let Some(signal) = &signal {
        signal.number().map_err(Failure::new)?;
    }
    for id in &args.ids {
        // Commands are addressed by id only; any other argument is a shell's name or id.
        let is_shell = id.parse::<CommandId>().is_err();
        match &signal {
            Some(_) if is_shell => {
                return Err(Failure::new(format!("`{id}` is a shell, and --signal works only with commands"))
                    .with_advice("omit --signal to end the shell, or pass a command ID (cmd_…)"));
            }
            Some(signal) => connection.dataplane.signal(id, signal.clone()).await?,
            None if is_shell => connection.dataplane.end_shell(id).await?,
            None => connection.dataplane.cancel(id).await?,
        }
    }
    let done = if signal.is_some() { "signalled" } else { "ended" };
    context.printer.result(&json!({ done: args.ids }), || format!("{done} {}", args.ids.join(" ")))?;
    Ok(0)
}
