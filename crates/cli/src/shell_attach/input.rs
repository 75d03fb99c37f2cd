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

use crate::terminal::{EscapeKey, EscapeScanner, KeyAction};

/// Bytes per read from the keyboard: a large paste fits into a few frames.
const STDIN_CHUNK: usize = 16 * 1024;
/// Buffered reads for a slow connection; beyond that the terminal buffers the input.
const MAX_QUEUED_CHUNKS: usize = 4;
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
pub enum InputState {
    /// Has control, as far as known here.
    Controlling,
    /// Another participant has control.
    Waiting(String),
    /// Only observes.
    Observing,
}

/// Requests of the keyboard to the screen.
#[derive(Debug, PartialEq, Eq)]
pub enum KeyboardRequest {
    Detach,
    Help,
    Status,
    Redraw,
    Suspend,
    /// Keys were pressed without effect.
    InputIgnored,
    /// Control was requested.
    ControlRequested,
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
        let (key_sender, keys) = mpsc::channel(MAX_QUEUED_CHUNKS);
        std::thread::spawn(move || {
            let mut buffer = vec![0; STDIN_CHUNK];
            while let Some(n @ 1..) = read_stdin(&mut buffer) {
                if key_sender.blocking_send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { keys: Arc::new(Mutex::new(keys)) }
    }
}

/// Blocks until input is available; `None` if reading failed for good.
fn read_stdin(buffer: &mut [u8]) -> Option<usize> {
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
pub async fn forward_keyboard(
    keyboard: Keyboard,
    key: EscapeKey,
    input: ShellInput,
    input_state: watch::Sender<InputState>,
    requests: mpsc::Sender<KeyboardRequest>,
) -> Result<(), ClientError> {
    let is_terminal = io::stdin().is_terminal();
    let mut keys = keyboard.keys.lock().await;
    let mut escape = EscapeScanner::new(key);
    let mut last_byte = b'\n';
    while let Some(bytes) = keys.recv().await {
        last_byte = bytes.last().copied().unwrap_or(last_byte);
        if !is_terminal {
            input.stdin(&bytes).await?;
            continue;
        }
        for action in escape.scan(&bytes) {
            let request = match action {
                KeyAction::Send(bytes) => send_keys(&input, &input_state, bytes).await?,
                KeyAction::Take => take_control(&input, &input_state).await?,
                KeyAction::Release if *input_state.borrow() == InputState::Observing => Some(KeyboardRequest::InputIgnored),
                KeyAction::Release => {
                    input.control(ControlAction::Release).await?;
                    None
                }
                KeyAction::Help => Some(KeyboardRequest::Help),
                KeyAction::Status => Some(KeyboardRequest::Status),
                KeyAction::Redraw => Some(KeyboardRequest::Redraw),
                KeyAction::Suspend => Some(KeyboardRequest::Suspend),
                KeyAction::Leave => Some(KeyboardRequest::Detach),
            };
            if let Some(request) = request
                && requests.send(request).await.is_err()
            {
                return Ok(());
            }
        }
    }
    if is_terminal {
        // The terminal hung up.
        let _ = requests.send(KeyboardRequest::Detach).await;
        return Ok(());
    }
    if last_byte != b'\n' && last_byte != b'\r' {
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
async fn send_keys(
    input: &ShellInput,
    input_state: &watch::Sender<InputState>,
    bytes: Vec<u8>,
) -> Result<Option<KeyboardRequest>, ClientError> {
    if *input_state.borrow() == InputState::Controlling {
        input.stdin(&bytes).await?;
        return Ok(None);
    }
    let Some(at) = bytes.iter().position(|byte| *byte == TAKE_KEY) else { return Ok(Some(KeyboardRequest::InputIgnored)) };
    let request = take_control(input, input_state).await?;
    if *input_state.borrow() == InputState::Controlling && at + 1 < bytes.len() {
        input.stdin(&bytes[at + 1..]).await?;
    }
    Ok(request)
}

async fn take_control(input: &ShellInput, input_state: &watch::Sender<InputState>) -> Result<Option<KeyboardRequest>, ClientError> {
    if *input_state.borrow() == InputState::Observing {
        return Ok(Some(KeyboardRequest::Join));
    }
    input.control(ControlAction::Take).await?;
    // Input that follows is sent on the same connection after the request; if control is refused, the sandbox reports
    // it.
    input_state.send_replace(InputState::Controlling);
    Ok(Some(KeyboardRequest::ControlRequested))
}
