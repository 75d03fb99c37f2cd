//! Sends keyboard input to a shell from its own task, because a congested connection must not block the screen.

use std::{
    io::{self, IsTerminal},
    sync::Arc,
    time::Duration,
};

use cobox_client::{ClientError, ShellInput};
use cobox_protocol::frame::ControlAction;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use tokio::sync::{Mutex, mpsc, watch};

use crate::terminal::{EscapeKey, EscapeScan, Typed};

/// Bytes per read from the keyboard: a large paste fits into a few frames.
const STDIN_CHUNK: usize = 16 * 1024;
/// Buffered reads for a slow connection; beyond that the terminal buffers the input.
const CHUNKS: usize = 4;
/// Takes control while another participant has it: input is ignored then, so one key can be used for this.
pub const TAKE_KEY: u8 = 0x14;
pub const TAKE_KEY_NAME: &str = "Ctrl-T";
/// The terminal's end-of-input character (Ctrl-D).
const END_OF_INPUT: &[u8] = b"\x04";
/// First and longest pause between two of them. A shell may drop one while it is between commands.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What input of this client may do in the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Has control, as far as known here.
    Types,
    /// Another participant has control.
    Waits(String),
    /// Only observes.
    Looks,
}

/// Requests of the keyboard to the screen.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked {
    Leave,
    Help,
    Status,
    Redraw,
    Suspend,
    /// Keys were pressed without effect.
    TypedInVain,
    /// Control was requested.
    TookControl,
    /// An observer wants to take part.
    Join,
}

/// Standard input, read by a thread that outlives every connection, so that keys pressed during a reconnect are not
/// lost.
#[derive(Clone)]
pub struct Keyboard {
    keys: Arc<Mutex<mpsc::Receiver<Vec<u8>>>>,
}

impl Keyboard {
    pub fn new() -> Self {
        let (press, keys) = mpsc::channel(CHUNKS);
        std::thread::spawn(move || {
            let mut buffer = vec![0; STDIN_CHUNK];
            while let Some(n @ 1..) = read(&mut buffer) {
                if press.blocking_send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { keys: Arc::new(Mutex::new(keys)) }
    }
}

/// Blocks until input is available; `None` if reading failed for good.
fn read(buffer: &mut [u8]) -> Option<usize> {
    let stdin = io::stdin();
    loop {
        match rustix::io::read(&stdin, &mut *buffer) {
            Ok(n) => return Some(n),
            Err(Errno::INTR) => {}
            // Another program may have left stdin in non-blocking mode.
            Err(Errno::AGAIN) => {
                // If interrupted, the loop retries.
                let _ = poll(&mut [PollFd::new(&stdin, PollFlags::IN)], None);
            }
            Err(_) => return None,
        }
    }
}

/// Ends with an error when the connection is closed. After the end of a pipe it keeps sending end-of-input to the
/// shell.
pub async fn type_in(
    keyboard: Keyboard,
    key: EscapeKey,
    input: ShellInput,
    standing: watch::Sender<Standing>,
    asked: mpsc::Sender<Asked>,
) -> Result<(), ClientError> {
    let is_terminal = io::stdin().is_terminal();
    let mut keys = keyboard.keys.lock().await;
    let mut escape = EscapeScan::new(key);
    let mut last = b'\n';
    while let Some(bytes) = keys.recv().await {
        last = bytes.last().copied().unwrap_or(last);
        if !is_terminal {
            input.stdin(&bytes).await?;
            continue;
        }
        for typed in escape.scan(&bytes) {
            let ask = match typed {
                Typed::Send(bytes) => type_keys(&input, &standing, bytes).await?,
                Typed::Take => take(&input, &standing).await?,
                Typed::Release if *standing.borrow() == Standing::Looks => Some(Asked::TypedInVain),
                Typed::Release => {
                    input.control(ControlAction::Release).await?;
                    None
                }
                Typed::Help => Some(Asked::Help),
                Typed::Status => Some(Asked::Status),
                Typed::Redraw => Some(Asked::Redraw),
                Typed::Suspend => Some(Asked::Suspend),
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
        // Like a shell that reads a script: the last line counts even without a newline.
        input.stdin(b"\n").await?;
    }
    let mut pause = FIRST_PAUSE;
    loop {
        input.stdin(END_OF_INPUT).await?;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Sends keys to the shell; without control, they are dropped, except the key that takes control.
async fn type_keys(input: &ShellInput, standing: &watch::Sender<Standing>, bytes: Vec<u8>) -> Result<Option<Asked>, ClientError> {
    if *standing.borrow() == Standing::Types {
        input.stdin(&bytes).await?;
        return Ok(None);
    }
    let Some(at) = bytes.iter().position(|byte| *byte == TAKE_KEY) else { return Ok(Some(Asked::TypedInVain)) };
    let ask = take(input, standing).await?;
    if *standing.borrow() == Standing::Types && at + 1 < bytes.len() {
        input.stdin(&bytes[at + 1..]).await?;
    }
    Ok(ask)
}

async fn take(input: &ShellInput, standing: &watch::Sender<Standing>) -> Result<Option<Asked>, ClientError> {
    if *standing.borrow() == Standing::Looks {
        return Ok(Some(Asked::Join));
    }
    input.control(ControlAction::Take).await?;
    // Input that follows is sent on the same connection after the request; if control is refused, the sandbox reports
    // it.
    standing.send_replace(Standing::Types);
    Ok(Some(Asked::TookControl))
}
