//! The keyboard's way into a shell: a task of its own, because a full connection must not hold up the screen.

use std::{io::IsTerminal, time::Duration};

use cobox_client::{ClientError, ShellInput};
use cobox_protocol::frame::ControlAction;
use tokio::{
    io::AsyncReadExt,
    sync::{mpsc, watch},
};

use crate::terminal::{EscapeScan, Typed};

/// Bytes read from the keyboard at once: a large paste in a few frames.
const STDIN_CHUNK: usize = 16 * 1024;
/// What a terminal sends for "no more input".
const END_OF_INPUT: &[u8] = b"\x04";
/// First and longest pause between two of them. One can be swallowed: a shell that is between commands drops it.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What the one at the keyboard may do in the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Types, as far as is known here.
    Types,
    /// Somebody else has control.
    Waits(String),
    /// Only looks, and can't have control.
    Looks,
}

/// What the keyboard asks of the screen.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked {
    Leave,
    Help,
    /// Keys were pressed that go nowhere.
    TypedInVain,
    /// Control was asked for.
    TookControl,
}

/// Ends with an error when the connection is over. After the end of a pipe it goes on telling the shell that nothing more comes.
pub async fn type_in(input: ShellInput, standing: watch::Sender<Standing>, asked: mpsc::Sender<Asked>) -> Result<(), ClientError> {
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
        for typed in escape.scan(&buffer[..n]) {
            let may = standing.borrow().clone();
            let ask = match typed {
                Typed::Send(bytes) if may == Standing::Types => {
                    input.stdin(&bytes).await?;
                    None
                }
                Typed::Send(_) => Some(Asked::TypedInVain),
                Typed::Take | Typed::Release if may == Standing::Looks => Some(Asked::TypedInVain),
                Typed::Take => {
                    input.control(ControlAction::Take).await?;
                    // What is typed next goes the same way behind it; should it be refused, the sandbox says so.
                    standing.send_replace(Standing::Types);
                    Some(Asked::TookControl)
                }
                Typed::Release => {
                    input.control(ControlAction::Release).await?;
                    None
                }
                Typed::Help => Some(Asked::Help),
                Typed::Leave => Some(Asked::Leave),
            };
            if let Some(ask) = ask
                && asked.send(ask).await.is_err()
            {
                return Ok(());
            }
        }
    }
    if is_terminal {
        // The terminal hung up.
        let _ = asked.send(Asked::Leave).await;
        return Ok(());
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
