//! A shared shell, watched and typed into over as many connections as it takes.

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
    line::{self, Command, Conversation, Input, News, Output, Step},
};

/// Two halves, so that typing never waits for output nor output for typing.
pub struct Shell {
    pub input: ShellInput,
    pub output: ShellOutput,
}

/// What comes out of a shell, and what happens to the connection meanwhile.
#[derive(Debug)]
pub enum ShellEvent {
    /// Once, before anything else.
    Ready(ShellReady),
    Output(Bytes),
    /// The screen, in place of bytes that are no longer kept: to be drawn on an empty terminal of this size.
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
        /// Whether that is us, where the sandbox says so.
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
    /// Something that was sent was not taken; the shell goes on.
    Refused(ApiFailure),
    /// Keys pressed too long ago, while there was no connection, that were not sent.
    InputDropped {
        bytes: usize,
    },
    Exit {
        exit_code: i32,
        signal: Option<i32>,
    },
}

impl Dataplane {
    /// Joins a shell, and makes it where there is none of that name yet. It lives on when this connection goes.
    pub async fn shell(&self, mut start: ShellStart) -> Result<Shell, ClientError> {
        // Any unique word will do for a client's name.
        start.client.get_or_insert_with(|| ShellId::new().to_string());
        start.binary = true;
        let size = (start.cols.unwrap_or(DEFAULT_COLS), start.rows.unwrap_or(DEFAULT_ROWS));
        let stdout = Cursor::new(OutputStream::Stdout, start.from);
        let (input, output) = line::open(self, ShellTalk { start, stdout, size, controller: (None, None), has_started: false }).await?;
        Ok(Shell { input: ShellInput { input }, output: ShellOutput { output } })
    }
}

/// The typing half.
#[derive(Clone)]
pub struct ShellInput {
    input: Input,
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

    /// Everyone hears of the change as [`ShellEvent::Control`].
    pub async fn control(&self, action: ControlAction) -> Result<(), ClientError> {
        self.input.send(Command::Control(action)).await
    }

    /// Leaves the shell, which lives on.
    pub async fn close(&self) -> Result<(), ClientError> {
        self.input.send(Command::Close).await
    }
}

/// The watching half.
pub struct ShellOutput {
    output: Output<ShellEvent>,
}

impl ShellOutput {
    /// What happens next; `None` after the exit, an error, or having left. Coming back for more says that the last bytes have been drawn.
    pub async fn next(&mut self) -> Option<Result<ShellEvent, ClientError>> {
        self.output.next().await
    }
}

struct ShellTalk {
    start: ShellStart,
    stdout: Cursor,
    size: (u16, u16),
    controller: (Option<Controller>, Option<bool>),
    has_started: bool,
}

impl ShellTalk {
    fn keyframe(&mut self, offset: u64, (cols, rows): (u16, u16), bytes: Bytes) -> Step<ShellEvent> {
        self.stdout.jump(offset);
        Step::Output(ShellEvent::Keyframe { cols, rows, bytes }, OutputStream::Stdout, offset)
    }
}

impl Conversation for ShellTalk {
    type Start = ShellStart;
    type Ready = ShellReady;
    type Event = ShellEvent;

    const ROUTE: &'static str = "/shell/ws";
    const IS_KEYS: bool = true;
    /// A quarter of what a shell keeps: its controller is never waited for because an acknowledgement is late.
    const ACK_BYTES: u64 = 64 * 1024;

    fn start(&mut self) -> ShellStart {
        let from = self.start.epoch.as_ref().and(self.stdout.next());
        let start = ShellStart { from, ..self.start.clone() };
        if !self.has_started {
            return start;
        }
        // By now it names the shell by its id: if that has ended, another of its name must not be started in its place.
        ShellStart { command: None, cwd: None, env: None, ..start }
    }

    fn resized(&mut self, cols: u16, rows: u16) {
        (self.start.cols, self.start.rows) = (Some(cols), Some(rows));
    }

    fn ready(&mut self, ready: ShellReady) -> Result<Step<ShellEvent>, ClientError> {
        if self.start.epoch.as_ref() != Some(&ready.epoch) {
            // Offsets of another epoch mean nothing.
            self.stdout.jump(ready.offset);
        }
        self.start.epoch = Some(ready.epoch.clone());
        self.start.shell = Some(ready.shell_id.to_string());
        self.size = (ready.cols, ready.rows);
        let is_first = !std::mem::replace(&mut self.has_started, true);
        let now = (ready.controller.clone(), ready.yours);
        let before = std::mem::replace(&mut self.controller, now.clone());
        Ok(if is_first {
            Step::Event(ShellEvent::Ready(ready))
        } else if before != now {
            Step::Event(ShellEvent::Control { controller: now.0, yours: now.1 })
        } else {
            Step::Nothing
        })
    }

    fn output(&mut self, kind: BinaryKind, offset: u64, bytes: Bytes) -> Result<Step<ShellEvent>, ClientError> {
        match kind {
            BinaryKind::Stdout => {}
            BinaryKind::Stderr => return Ok(Step::Nothing),
            BinaryKind::Keyframe => return Ok(self.keyframe(offset, self.size, bytes)),
        }
        let Some(bytes) = self.stdout.take(offset, bytes)? else { return Ok(Step::Nothing) };
        Ok(Step::Output(ShellEvent::Output(bytes), OutputStream::Stdout, self.stdout.next().unwrap_or_default()))
    }

    fn frame(&mut self, frame: ServerFrame<ShellReady>) -> Result<Step<ShellEvent>, ClientError> {
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
                // Before a binary keyframe this tells its size.
                let was = std::mem::replace(&mut self.size, (cols, rows));
                if was == (cols, rows) { Step::Nothing } else { Step::Event(ShellEvent::Resized { cols, rows }) }
            }
            ServerFrame::Gap { from, to, .. } => {
                self.stdout.skip(from, to).map_or(Step::Nothing, |(from, to)| Step::Event(ShellEvent::Gap { from, to }))
            }
            ServerFrame::Control { controller, yours } => {
                self.controller = (controller.clone(), yours);
                Step::Event(ShellEvent::Control { controller, yours })
            }
            ServerFrame::Exit { exit_code, signal, .. } => Step::Exit(ShellEvent::Exit { exit_code, signal }),
            _ => Step::Nothing,
        })
    }

    fn news(news: News) -> ShellEvent {
        match news {
            News::Reconnecting(cause) => ShellEvent::Reconnecting { cause },
            News::Reconnected => ShellEvent::Reconnected,
            News::Refused(failure) => ShellEvent::Refused(failure),
            News::InputDropped(bytes) => ShellEvent::InputDropped { bytes },
        }
    }
}
