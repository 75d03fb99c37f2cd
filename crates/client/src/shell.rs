//! Shared shell with input and output that survive lost connections.

use bytes::Bytes;
use cobox_protocol::{
    ShellId,
    frame::{
        BinaryKind, ControlAction, Controller, DEFAULT_COLS, DEFAULT_ROWS, OutputStream, ServerFrame, ShellReady, ShellStart, frame_bytes,
    },
};

use crate::{
    ApiFailure, ClientError, Dataplane,
    cursor::Cursor,
    stream::{self, Command, FrameOutcome, Notice, StreamHandler, StreamInput, StreamOutput},
};

/// Separate halves, so that input and output never wait for each other.
pub struct Shell {
    pub input: ShellInput,
    pub output: ShellOutput,
}

/// Event of a shell or of its connection.
#[derive(Debug)]
pub enum ShellEvent {
    /// Sent once, as the first event.
    Ready(ShellReady),
    Output(Bytes),
    /// Screen contents that replace output that is no longer kept; to be drawn on an empty terminal of this size.
    Keyframe {
        cols: u16,
        rows: u16,
        bytes: Bytes,
    },
    Resized {
        cols: u16,
        rows: u16,
    },
    Control {
        controller: Option<Controller>,
        /// Whether this connection has control, if the sandbox reports it.
        yours: Option<bool>,
    },
    Gap {
        from: u64,
        to: u64,
    },
    Reconnecting {
        cause: String,
    },
    Reconnected,
    /// The sandbox refused a frame; the shell continues.
    Refused(ApiFailure),
    /// Keystrokes from an outage were dropped because they were too old.
    InputDropped {
        bytes: usize,
    },
    Exit {
        exit_code: i32,
        signal: Option<i32>,
    },
}

impl Dataplane {
    /// Joins a shell, and creates it if no shell has this name. The shell continues when the connection closes.
    pub async fn shell(&self, mut start: ShellStart) -> Result<Shell, ClientError> {
        // The client id can be any unique string.
        start.client.get_or_insert_with(|| ShellId::new().to_string());
        start.binary = true;
        let size = (start.cols.unwrap_or(DEFAULT_COLS), start.rows.unwrap_or(DEFAULT_ROWS));
        let stdout = Cursor::new(OutputStream::Stdout, start.from);
        let (input, output) =
            stream::open(self, ShellHandler { start, stdout, size, controller: (None, None), has_started: false }).await?;
        Ok(Shell { input: ShellInput { input }, output: ShellOutput { output } })
    }
}

/// Input half of a shell.
#[derive(Clone)]
pub struct ShellInput {
    input: StreamInput,
}

impl ShellInput {
    pub async fn stdin(&self, bytes: &[u8]) -> Result<(), ClientError> {
        self.input.stdin(bytes).await
    }

    pub async fn resize(&self, cols: u16, rows: u16) -> Result<(), ClientError> {
        self.input.send(Command::Resize { cols, rows }).await
    }

    pub async fn signal(&self, signal: &str) -> Result<(), ClientError> {
        self.input.signal(signal).await
    }

    /// All participants are notified of the change with [`ShellEvent::Control`].
    pub async fn control(&self, action: ControlAction) -> Result<(), ClientError> {
        self.input.send(Command::Control(action)).await
    }

    /// Leaves the shell, which continues.
    pub async fn close(&self) -> Result<(), ClientError> {
        self.input.send(Command::Close).await
    }
}

/// Output half of a shell.
pub struct ShellOutput {
    output: StreamOutput<ShellEvent>,
}

impl ShellOutput {
    /// Next event; `None` after the exit, an error, or leaving. Calling it again marks the previous bytes as drawn.
    pub async fn next(&mut self) -> Option<Result<ShellEvent, ClientError>> {
        self.output.next().await
    }
}

struct ShellHandler {
    start: ShellStart,
    stdout: Cursor,
    size: (u16, u16),
    controller: (Option<Controller>, Option<bool>),
    has_started: bool,
}

impl ShellHandler {
    fn keyframe(&mut self, offset: u64, (cols, rows): (u16, u16), bytes: Bytes) -> FrameOutcome<ShellEvent> {
        self.stdout.jump(offset);
        FrameOutcome::Output(ShellEvent::Keyframe { cols, rows, bytes }, OutputStream::Stdout, offset)
    }
}

impl StreamHandler for ShellHandler {
    type Start = ShellStart;
    type Ready = ShellReady;
    type Event = ShellEvent;

    const ROUTE: &'static str = "/shell/ws";
    const IS_KEYS: bool = true;
    /// A quarter of the shell's ring buffer, so that a late acknowledgement of the controller never blocks the shell.
    const ACK_BYTES: u64 = 64 * 1024;

    fn start(&mut self) -> ShellStart {
        let from = self.start.epoch.as_ref().and(self.stdout.next());
        let start = ShellStart { from, ..self.start.clone() };
        if !self.has_started {
            return start;
        }
        // The shell is now named by its id: if it has ended, no other shell of its name must be started in its place.
        ShellStart { command: None, cwd: None, env: None, ..start }
    }

    fn resized(&mut self, cols: u16, rows: u16) {
        (self.start.cols, self.start.rows) = (Some(cols), Some(rows));
    }

    fn ready(&mut self, ready: ShellReady) -> Result<FrameOutcome<ShellEvent>, ClientError> {
        if self.start.epoch.as_ref() != Some(&ready.epoch) {
            // Offsets of another epoch are invalid.
            self.stdout.jump(ready.offset);
        }
        self.start.epoch = Some(ready.epoch.clone());
        self.start.shell = Some(ready.shell_id.to_string());
        self.size = (ready.cols, ready.rows);
        let is_first = !std::mem::replace(&mut self.has_started, true);
        let now = (ready.controller.clone(), ready.yours);
        let before = std::mem::replace(&mut self.controller, now.clone());
        Ok(if is_first {
            FrameOutcome::Event(ShellEvent::Ready(ready))
        } else if before != now {
            FrameOutcome::Event(ShellEvent::Control { controller: now.0, yours: now.1 })
        } else {
            FrameOutcome::Nothing
        })
    }

    fn output(&mut self, kind: BinaryKind, offset: u64, bytes: Bytes) -> Result<FrameOutcome<ShellEvent>, ClientError> {
        match kind {
            BinaryKind::Stdout => {}
            BinaryKind::Stderr => return Ok(FrameOutcome::Nothing),
            BinaryKind::Keyframe => return Ok(self.keyframe(offset, self.size, bytes)),
        }
        let Some(bytes) = self.stdout.take(offset, bytes)? else { return Ok(FrameOutcome::Nothing) };
        Ok(FrameOutcome::Output(ShellEvent::Output(bytes), OutputStream::Stdout, self.stdout.next().unwrap_or_default()))
    }

    fn frame(&mut self, frame: ServerFrame<ShellReady>) -> Result<FrameOutcome<ShellEvent>, ClientError> {
        let unreadable = |cause: String| ClientError::NotCobox { url: Self::ROUTE.to_owned(), status: 101, excerpt: cause };
        Ok(match frame {
            ServerFrame::Stdout { offset, data, data_b64 } => {
                let bytes = frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(unreadable)?;
                self.output(BinaryKind::Stdout, offset, bytes.into())?
            }
            ServerFrame::Keyframe { offset, cols, rows, data_b64 } => {
                self.size = (cols, rows);
                let bytes = frame_bytes(None, Some(&data_b64)).map_err(unreadable)?;
                self.keyframe(offset, (cols, rows), bytes.into())
            }
            ServerFrame::Resized { cols, rows, .. } => {
                // Before a binary keyframe, this frame has the keyframe's size.
                let was = std::mem::replace(&mut self.size, (cols, rows));
                if was == (cols, rows) { FrameOutcome::Nothing } else { FrameOutcome::Event(ShellEvent::Resized { cols, rows }) }
            }
            ServerFrame::Gap { from, to, .. } => {
                self.stdout.skip(from, to).map_or(FrameOutcome::Nothing, |(from, to)| FrameOutcome::Event(ShellEvent::Gap { from, to }))
            }
            ServerFrame::Control { controller, yours } => {
                self.controller = (controller.clone(), yours);
                FrameOutcome::Event(ShellEvent::Control { controller, yours })
            }
            ServerFrame::Exit { exit_code, signal, .. } => FrameOutcome::Exit(ShellEvent::Exit { exit_code, signal }),
            _ => FrameOutcome::Nothing,
        })
    }

    fn notice(notice: Notice) -> ShellEvent {
        match notice {
            Notice::Reconnecting(cause) => ShellEvent::Reconnecting { cause },
            Notice::Reconnected => ShellEvent::Reconnected,
            Notice::Refused(failure) => ShellEvent::Refused(failure),
            Notice::InputDropped(bytes) => ShellEvent::InputDropped { bytes },
        }
    }
}
