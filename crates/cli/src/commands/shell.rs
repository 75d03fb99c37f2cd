//! `cobox shell`: a terminal in the sandbox, this terminal lent to it until it ends.

use std::{collections::BTreeMap, io::IsTerminal, time::Duration};

use cobox_client::{ClientError, ShellEvent, ShellInput};
use cobox_protocol::frame::ShellStart;
use tokio::{
    io::AsyncReadExt,
    signal::unix::{SignalKind, signal},
};
use tokio_util::task::AbortOnDropHandle;

use super::{Outcome, Where, thread};
use crate::{
    context::Context,
    failure::Failure,
    terminal::{EscapeScan, RawMode, Screen, Typed, size},
    way_in::Target,
};

/// Bytes read from the keyboard at once: a large paste in a few frames.
const STDIN_CHUNK: usize = 16 * 1024;
/// What a terminal sends for "no more input".
const END_OF_INPUT: &[u8] = b"\x04";
/// First and longest pause between two of them. One can be swallowed: a shell that is between commands drops it.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Exit code after Enter `~.`, and after a signal ended us: the number ssh uses when its connection ended.
const LEFT: u8 = 255;
/// What the remote shell should know of this terminal.
const PASSED_ON: [&str; 3] = ["TERM", "COLORTERM", "LANG"];

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  cobox shell demo
  cobox shell -t demo -c top
  echo 'make test; exit' | cobox shell -t demo

Type Enter ~ . to leave a shell that no longer answers.
With --sandbox there is no session to renew its token: the shell ends when that does, 15 minutes unless the broker is set otherwise.
Exit code: the shell's own; 255 when the connection ended first.")]
pub struct Args {
    #[command(flatten)]
    place: Where,
    /// The thread whose sandbox to use, as with --thread
    #[arg(value_name = "THREAD", value_parser = thread, conflicts_with_all = ["thread", "sandbox"])]
    name: Option<String>,
    /// Run this instead of the login shell
    #[arg(short, value_name = "SHELL COMMAND")]
    c: Option<String>,
    /// Working directory in the sandbox [default: /workspace]
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
}

/// Why the shell is over.
enum End {
    Exited(i32),
    Left,
    Failed(Failure),
}

pub async fn run(args: Args, context: &Context) -> Outcome {
    let way_in = context.enter(&args.name.map_or_else(|| args.place.target(), Target::Thread)).await?;
    let (cols, rows) = size().unzip();
    let env: BTreeMap<String, String> = PASSED_ON.iter().filter_map(|n| Some(((*n).to_owned(), std::env::var(n).ok()?))).collect();
    let start = ShellStart { command: args.c, cwd: args.cwd, env: (!env.is_empty()).then_some(env), cols, rows, ..Default::default() };
    let shell = way_in.dataplane.shell(start).await?;

    let raw = RawMode::enter()?;
    let mut screen = Screen::default();
    let end = converse(shell.input, shell.output, context, &mut screen).await;
    if !matches!(end, End::Exited(_)) && std::io::stdout().is_terminal() {
        // A terminal that is gone can't be reset, and nobody looks at it.
        let _ = context.printer.stream(&screen.reset());
    }
    drop(raw);
    match end {
        End::Exited(code) => Ok(u8::try_from(code).unwrap_or(LEFT)),
        End::Left => {
            context.printer.note("left the shell");
            Ok(LEFT)
        }
        End::Failed(failure) => Err(failure.exit_with(LEFT)),
    }
}

async fn converse(input: ShellInput, mut output: cobox_client::ShellOutput, context: &Context, screen: &mut Screen) -> End {
    let signals = (|| {
        Ok::<_, std::io::Error>((
            signal(SignalKind::window_change())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::quit())?,
        ))
    })();
    let (mut resized, mut terminated, mut hung_up, mut interrupted, mut quit) = match signals {
        Ok(signals) => signals,
        Err(e) => return End::Failed(e.into()),
    };
    // Typing has its own task: were it to wait for a full connection here, output would wait with it, for ever.
    let mut typing = AbortOnDropHandle::new(tokio::spawn(type_in(input.clone())));
    let mut has_typed_all = false;
    loop {
        tokio::select! {
            event = output.next() => match event {
                Some(Ok(ShellEvent::Output(bytes))) => {
                    screen.see(&bytes);
                    if let Err(e) = context.printer.stream(&bytes) {
                        return if e.kind() == std::io::ErrorKind::BrokenPipe { End::Left } else { End::Failed(e.into()) };
                    }
                }
                Some(Ok(ShellEvent::Ready)) => {}
                Some(Ok(ShellEvent::Exit { exit_code, .. })) => return End::Exited(exit_code),
                Some(Err(e)) => return End::Failed(e.into()),
                None => return End::Left,
            },
            _ = resized.recv() => if let Some((cols, rows)) = size() {
                // On a broken connection this fails, as typing does, and the reading half says why.
                let _ = input.resize(cols, rows).await;
            },
            typed = &mut typing, if !has_typed_all => match typed {
                Ok(Ok(())) => return End::Left,
                // The connection broke while typing: what the reading half says of it is the better message.
                Ok(Err(_)) => has_typed_all = true,
                Err(e) => return End::Failed(Failure::new(format!("reading the keyboard: {e}"))),
            },
            _ = terminated.recv() => return End::Left,
            _ = hung_up.recv() => return End::Left,
            _ = interrupted.recv() => return End::Left,
            _ = quit.recv() => return End::Left,
        }
    }
}

/// Ends without an error only when asked to leave; after the end of a pipe it goes on telling the shell that nothing more comes.
async fn type_in(input: ShellInput) -> Result<(), ClientError> {
    let is_terminal = std::io::stdin().is_terminal();
    let mut stdin = tokio::io::stdin();
    let mut buffer = vec![0; STDIN_CHUNK];
    let mut escape = EscapeScan::new();
    let mut last = b'\n';
    loop {
        let n = match stdin.read(&mut buffer).await {
            Ok(0) | Err(_) => break,
            Ok(n) => n,
        };
        last = buffer[n - 1];
        if !is_terminal {
            input.stdin(&buffer[..n]).await?;
            continue;
        }
        match escape.scan(&buffer[..n]) {
            Typed::Send(bytes) => input.stdin(&bytes).await?,
            Typed::Leave(bytes) => {
                input.stdin(&bytes).await?;
                return Ok(());
            }
        }
    }
    if last != b'\n' && last != b'\r' {
        // As a shell reads a script: the last line counts though nothing ends it.
        input.stdin(b"\n").await?;
    }
    let mut pause = FIRST_PAUSE;
    loop {
        input.stdin(END_OF_INPUT).await?;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
