//! `cobox shell`: a seat at a shell that human and agent share, this terminal lent to it until one of them ends.

use std::{collections::BTreeMap, io::IsTerminal, time::Duration};

use cobox_client::{Dataplane, Reconnect};
use cobox_protocol::{
    Capability, ShellId,
    frame::{ControlAction, ShellStart},
};

use super::{Outcome, Where, thread};
use crate::{
    context::Context,
    printer::visible,
    sitting::{End, Sitting},
    terminal::{RawMode, size},
    way_in::Target,
};

/// Exit code after Enter `~.`, and after a signal ended us: the number ssh uses when its connection ended.
const LEFT: u8 = 255;
/// What the remote shell should know of this terminal.
const PASSED_ON: [&str; 3] = ["TERM", "COLORTERM", "LANG"];
/// A script is no keyboard: what it says doesn't get too old to be sent.
const SCRIPT_AGE: Duration = Duration::from_secs(24 * 3600);
/// For the sandbox to end a shell that was ours alone.
const END_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cobox shell demo                       join the shell that everybody meets in
  cobox shell demo --name build          another one beside it
  cobox shell demo --observe             only look
  cobox shell -t demo -c top             a program in a shell of its own
  echo 'make test; exit' | cobox shell -t demo

The shell lives on when you leave it, and everybody at it sees the same. One at a time types, and the terminal has their size.
After Enter:  ~. leave   ~t take control   ~r release it   ~? help   ~~ a ~
`exit` ends it for everybody. With -c, or where input is no terminal, the shell is yours alone and ends with you.
A lost connection is made again by itself; nothing is lost on the way.
Exit code: the shell's own; 255 when you left it or the connection ended for good.")]
pub struct Args {
    #[command(flatten)]
    place: Where,
    /// The thread whose sandbox to use, as with --thread
    #[arg(value_name = "THREAD", value_parser = thread, conflicts_with_all = ["thread", "sandbox"])]
    thread_name: Option<String>,
    #[command(flatten)]
    seat: Seat,
}

/// Which shell to sit at, and how; the sandbox is named by whoever has this among its arguments.
#[derive(Debug, clap::Args)]
pub struct Seat {
    /// The shell to join; it is started if there is none [default: main]
    #[arg(long, value_name = "SHELL")]
    name: Option<String>,
    /// Only look: nothing you type goes in
    #[arg(long)]
    observe: bool,
    /// Take control at once, whoever has it
    #[arg(long, conflicts_with = "observe")]
    take: bool,
    /// Run this instead of the login shell
    #[arg(short, value_name = "SHELL COMMAND", conflicts_with = "observe")]
    c: Option<String>,
    /// Working directory in the sandbox [default: /workspace]
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
}

pub async fn run(args: Args, context: &Context) -> Outcome {
    let target = args.thread_name.map_or_else(|| args.place.target(), Target::Thread);
    sit(&target, args.seat, context).await
}

/// `cobox shell` in the sandbox that this names.
pub async fn sit(target: &Target, args: Seat, context: &Context) -> Outcome {
    let way_in = context.enter(target).await?;
    let is_terminal = std::io::stdin().is_terminal();
    let mut observe = args.observe;
    if let Some(granted) = way_in.granted.filter(|g| !observe && !g.contains(Capability::Shell) && g.contains(Capability::ShellObserve)) {
        context.printer.note(&format!("you may only look here ({}), as with --observe", granted.words().join(" ")));
        observe = true;
    }
    // Ours alone, unless it was named: a script or a program in the shell that people share would surprise them.
    let is_private = args.name.is_none() && !observe && (args.c.is_some() || !is_terminal);
    let name = match args.name {
        Some(name) => Some(name),
        None if is_private => Some(format!("own-{}", ShellId::new().as_str().trim_start_matches("sh_"))),
        None => None,
    };
    let (cols, rows) = size().unzip();
    let env: BTreeMap<String, String> = PASSED_ON.iter().filter_map(|n| Some(((*n).to_owned(), std::env::var(n).ok()?))).collect();
    let env = (!env.is_empty()).then_some(env);
    let start = ShellStart { shell: name.clone(), command: args.c, cwd: args.cwd, env, cols, rows, observe, ..ShellStart::default() };
    let dataplane = match is_terminal {
        true => way_in.dataplane.clone(),
        false => way_in.dataplane.clone().with_reconnect(Reconnect { key_age: SCRIPT_AGE, ..Reconnect::default() }),
    };
    let shell = dataplane.shell(start).await?;
    if args.take {
        shell.input.control(ControlAction::Take).await?;
    }

    let raw = RawMode::enter()?;
    let mut sitting = Sitting::new(context.printer, observe, way_in.principal.clone());
    let end = sitting.hold(shell).await;
    if !matches!(end, End::Exited(_)) && std::io::stdout().is_terminal() {
        // A terminal that is gone can't be reset, and nobody looks at it.
        let _ = context.printer.stream(&sitting.reset());
    }
    drop(sitting);
    drop(raw);
    if let (true, false, Some(name)) = (is_private, matches!(end, End::Exited(_)), &name) {
        end_private(&dataplane, name).await;
    }
    match end {
        End::Exited(code) => Ok(u8::try_from(code).unwrap_or(LEFT)),
        End::Left if is_private => {
            context.printer.note("left the shell");
            Ok(LEFT)
        }
        End::Left => {
            let shown = visible(name.as_deref().unwrap_or(cobox_protocol::frame::DEFAULT_SHELL_NAME));
            context.printer.note(&format!("left the shell {shown}, which lives on"));
            Ok(LEFT)
        }
        End::Failed(failure) => Err(failure.exit_with(LEFT)),
    }
}

async fn end_private(dataplane: &Dataplane, name: &str) {
    // If nobody can be told, it ends by itself after a while with nobody at it.
    let _ = tokio::time::timeout(END_WITHIN, dataplane.end_shell(name)).await;
}
