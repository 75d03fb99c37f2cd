//! `cobox shell`: attaches this terminal to a shell that human and agent share, until the shell or the attachment
//! ends.

use std::{collections::BTreeMap, io::IsTerminal, time::Duration};

use cobox_client::{Dataplane, Reconnect};
use cobox_protocol::{
    Capability, ShellId,
    frame::{ControlAction, DEFAULT_SHELL_NAME, ShellStart, TerminalPermission},
};
use cobox_stream::SequenceKinds;

use super::{Outcome, TargetArgs, parse_thread};
use crate::{
    context::Context,
    printer::visible,
    shell_attach::{AttachEnd, AttachOptions, ShellAttachment},
    target::Target,
    terminal::{EscapeKey, portable_term, size},
};

/// Exit code after detaching, and after a signal ended this process: ssh uses the same number for a lost connection.
const EXIT_DETACHED: u8 = 255;
/// Environment variables that the remote shell inherits from this terminal.
const FORWARDED_VARIABLES: [&str; 4] = ["COLORTERM", "LANG", "LC_ALL", "LC_CTYPE"];
/// Input of a script stays valid for this long: unlike a keyboard's, it doesn't become outdated during an
/// interruption.
const SCRIPT_INPUT_MAX_AGE: Duration = Duration::from_secs(24 * 3600);
/// Reconnects for this long: a user at a terminal can stop it earlier, and a laptop may stay closed for a night.
const RECONNECT_FOR: Duration = Duration::from_secs(24 * 3600);
/// Time limit for the sandbox to end a private shell.
const END_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cobox shell demo                       attach to the shared shell
  cobox shell demo --name build          another shared shell
  cobox shell demo --observe             read-only; Ctrl-T joins
  cobox shell -t demo -c top             run a program in a private shell
  echo 'make test; exit' | cobox shell -t demo

The shell keeps running when you detach, and all participants see the same screen. Only the controller can type, and the shell has
the size of the controller's terminal; press Ctrl-T to take control.
After Enter:  ~. detach   ~t take control   ~r release it   ~s status line   ~l redraw   ~^Z suspend   ~? help   ~~ a ~
`exit` ends the shell for all participants. With -c, or if input is not a terminal, the shell is private and ends when you detach.
After a lost connection, cobox reconnects; no output is lost.
Exit code: the shell's own; 255 if you detached or the connection could not be restored.")]
pub struct ShellArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// The thread, as with --thread; or a sandbox's name if no thread has that name
    #[arg(value_name = "THREAD|NAME", value_parser = parse_thread, conflicts_with_all = ["thread", "sandbox"])]
    thread_name: Option<String>,
    #[command(flatten)]
    options: ShellOptions,
}

/// Which shell to attach to, and how. The command that flattens these arguments selects the sandbox.
#[derive(Debug, clap::Args)]
pub struct ShellOptions {
    /// Name of the shell; started if it doesn't exist [default: main]
    #[arg(long, value_name = "SHELL")]
    name: Option<String>,
    /// Attach read-only; Ctrl-T joins with input
    #[arg(long)]
    observe: bool,
    /// Take control immediately, even from another participant
    #[arg(long, conflicts_with = "observe")]
    take: bool,
    /// Command to run instead of the login shell
    #[arg(short, value_name = "SHELL COMMAND", conflicts_with = "observe")]
    c: Option<String>,
    /// Working directory in the sandbox [default: /workspace]
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// Show the status line (controller, connection and size) from the start, like ~s
    #[arg(long)]
    status: bool,
    /// Escape key: a character that is typed after Enter, a control key such as ^], or none [default: ~]
    #[arg(long, value_name = "KEY")]
    escape: Option<EscapeKey>,
    /// Access that programs get to your terminal: set its title, write its clipboard
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    allow: Vec<Allow>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Allow {
    Title,
    Clipboard,
}

pub async fn run(args: ShellArgs, context: &Context) -> Outcome {
    let target = match args.thread_name {
        Some(name) => context.resolve_name(&name).await?,
        None => args.target.resolve(),
    };
    attach(&target, args.options, context).await
}

/// Runs `cobox shell` in the given sandbox.
pub async fn attach(target: &Target, args: ShellOptions, context: &Context) -> Outcome {
    let connection = context.open_sandbox(target).await?;
    let is_terminal = std::io::stdin().is_terminal();
    let mut observe = args.observe;
    let may_type = connection.granted.is_none_or(|g| g.contains(Capability::Shell));
    if let Some(granted) = connection.granted.filter(|g| !observe && !may_type && g.contains(Capability::ShellObserve)) {
        context.printer.note(&format!("attached read-only, as with --observe ({})", granted.names().join(" ")));
        observe = true;
    }
    // Private unless it was named: a script or a program in the shared shell would surprise the other participants.
    let is_private = args.name.is_none() && !observe && (args.c.is_some() || !is_terminal);
    let name = match args.name {
        Some(name) => Some(name),
        None if is_private => Some(format!("own-{}", ShellId::new().as_str().trim_start_matches("sh_"))),
        None => None,
    };
    let (cols, rows) = size().unzip();
    let allow = args.allow.iter().map(|allow| match allow {
        Allow::Title => TerminalPermission::Title,
        Allow::Clipboard => TerminalPermission::Clipboard,
    });
    let allowed_sequences = args.allow.iter().fold(SequenceKinds::NONE, |kinds, allow| match allow {
        Allow::Title => kinds.with(SequenceKinds::TITLE),
        Allow::Clipboard => kinds.with(SequenceKinds::CLIPBOARD),
    });
    let mut start = ShellStart {
        shell: name.clone(),
        command: args.c,
        cwd: args.cwd,
        env: Some(environment(&|name| std::env::var(name).ok())).filter(|env| !env.is_empty()),
        cols,
        rows,
        observe,
        allow: allow.collect(),
        ..ShellStart::default()
    };
    let reconnect = match is_terminal {
        true => Reconnect { give_up_after: RECONNECT_FOR, ..Reconnect::default() },
        false => Reconnect { key_age: SCRIPT_INPUT_MAX_AGE, ..Reconnect::default() },
    };
    let dataplane = connection.dataplane.clone().with_reconnect(reconnect);
    let mut shell = dataplane.shell(start.clone()).await?;
    if args.take {
        shell.input.control(ControlAction::Take).await?;
    }

    let shell_name = name.as_deref().unwrap_or(DEFAULT_SHELL_NAME);
    let options = AttachOptions {
        name: if is_private { connection.name.clone() } else { format!("{} · {shell_name}", connection.name) },
        is_observer: observe,
        may_join: may_type,
        principal: connection.principal.clone(),
        escape: args.escape.unwrap_or_default(),
        shows_status: args.status,
        requests_control: args.take,
        allowed_sequences,
    };
    let mut attachment = ShellAttachment::new(context.printer, options)?;
    let end = loop {
        let end = attachment.run(shell).await;
        if !matches!(end, AttachEnd::JoinRequested) {
            break end;
        }
        start.observe = false;
        attachment.join();
        shell = match dataplane.shell(start.clone()).await {
            Ok(shell) => shell,
            Err(e) => break AttachEnd::Failed(e.into()),
        };
        // If the connection is lost again before this, the next read reports it.
        let _ = shell.input.control(ControlAction::Take).await;
    };
    let accepts_output = attachment.restore_terminal(&end).await;
    if let (true, false, Some(name)) = (is_private, matches!(end, AttachEnd::Exited(_)), &name) {
        end_private_shell(&dataplane, name).await;
    }
    match end {
        AttachEnd::Exited(code) => Ok(u8::try_from(code).unwrap_or(EXIT_DETACHED)),
        _ if !accepts_output => Ok(EXIT_DETACHED),
        AttachEnd::Detached | AttachEnd::JoinRequested if is_private => {
            context.printer.note("detached from the private shell, which ends now");
            Ok(EXIT_DETACHED)
        }
        AttachEnd::Detached | AttachEnd::JoinRequested => {
            let (name, command) = (visible(shell_name), reattach_command(target, name.as_deref(), start.observe));
            context.printer.note(&format!("detached from shell {name}; reattach with: {command}"));
            Ok(EXIT_DETACHED)
        }
        AttachEnd::Failed(failure) => Err(failure.with_exit_code(EXIT_DETACHED)),
    }
}

fn environment(var: &dyn Fn(&str) -> Option<String>) -> BTreeMap<String, String> {
    let mut env: BTreeMap<String, String> = FORWARDED_VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), var(name)?))).collect();
    if let Some(term) = var("TERM") {
        env.insert("TERM".to_owned(), portable_term(&term).to_owned());
    }
    env
}

/// The command line that attaches to the same shell again.
fn reattach_command(target: &Target, name: Option<&str>, observe: bool) -> String {
    let mut command = match target {
        Target::Thread(thread) => format!("cobox shell {}", shell_quote(thread)),
        Target::Sandbox(sandbox) => format!("cobox shell --sandbox {}", shell_quote(sandbox)),
        Target::Session(id) => format!("cobox session connect {id}"),
    };
    if let Some(name) = name {
        command.push_str(&format!(" --name {}", shell_quote(name)));
    }
    if observe {
        command.push_str(" --observe");
    }
    command
}

/// Quotes a word for a shell.
fn shell_quote(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@".contains(c);
    match text.chars().all(is_plain) && !text.starts_with('-') {
        true => text.to_owned(),
        false => format!("'{}'", visible(text).replace('\'', "'\\''")),
    }
}

async fn end_private_shell(dataplane: &Dataplane, name: &str) {
    // If the request fails, the shell ends on its own after a while without participants.
    let _ = tokio::time::timeout(END_TIMEOUT, dataplane.end_shell(name)).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reattach_command_can_be_pasted() {
        let thread = |name: &str| Target::Thread(name.to_owned());
        assert_eq!(reattach_command(&thread("demo"), None, false), "cobox shell demo");
        assert_eq!(
            reattach_command(&thread("it's a thread"), Some("build"), true),
            "cobox shell 'it'\\''s a thread' --name build --observe"
        );
        assert_eq!(reattach_command(&Target::Sandbox("box".into()), None, false), "cobox shell --sandbox box");
    }

    #[test]
    fn an_uncommon_term_is_replaced_by_a_portable_one() {
        let var = |name: &str| match name {
            "TERM" => Some("xterm-kitty".to_owned()),
            "LANG" => Some("de_DE.UTF-8".to_owned()),
            _ => None,
        };
        let variables: Vec<_> = environment(&var).into_iter().collect();
        assert_eq!(variables, [("LANG".to_owned(), "de_DE.UTF-8".to_owned()), ("TERM".to_owned(), "xterm-256color".to_owned())]);
    }
}
