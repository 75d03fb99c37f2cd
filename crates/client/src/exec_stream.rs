//! Command with streamed output that survives lost connections: no byte is lost or repeated, and the command never runs twice.

use bytes::Bytes;
use cobox_protocol::{
    CommandId, ErrorCode, ShellId,
    frame::{BinaryKind, ExecReady, ExecStart, OutputStream, ServerFrame, frame_bytes},
};

use crate::{
    ApiFailure, ClientError, Dataplane,
    cursor::Cursor,
    stream::{self, Command, FrameOutcome, Notice, StreamHandler, StreamInput, StreamOutput},
};

/// A running or finished command.
pub struct ExecStream {
    pub command_id: String,
    pub input: ExecInput,
    pub output: ExecOutput,
}

/// Event of a command or of its connection.
#[derive(Debug)]
pub enum ExecEvent {
    Started {
        command_id: String,
        /// Process id in the sandbox's pid namespace.
        pid: i32,
    },
    Stdout(Bytes),
    Stderr(Bytes),
    /// Bytes that the sandbox no longer keeps, because they were not fetched in time.
    Gap {
        stream: OutputStream,
        from: u64,
        to: u64,
    },
    Reconnecting {
        cause: String,
    },
    Reconnected,
    /// The sandbox refused a frame; the command continues.
    Refused(ApiFailure),
    Exit {
        exit_code: i32,
        signal: Option<i32>,
        timed_out: bool,
    },
}

impl Dataplane {
    /// Runs a command, or joins the one named by `command_id`. Without an id it generates one, so that the command never runs twice: if the
    /// connection is lost during the start, the next connection only joins by id, and fails with [`ClientError::MayHaveRun`] if the sandbox
    /// does not know the command.
    pub async fn exec_stream(&self, mut start: ExecStart) -> Result<ExecStream, ClientError> {
        let command_id = start.command_id.get_or_insert_with(|| CommandId::new().to_string()).clone();
        // The client id can be any unique string.
        start.client.get_or_insert_with(|| ShellId::new().to_string());
        start.binary = true;
        let stdout = Cursor::new(OutputStream::Stdout, Some(start.stdout_from.unwrap_or(0)));
        let stderr = Cursor::new(OutputStream::Stderr, Some(start.stderr_from.unwrap_or(0)));
        let (input, output) =
            stream::open(self, ExecHandler { start, stdout, stderr, has_started: false, sent: CommandSent::NotSent }).await?;
        Ok(ExecStream { command_id, input: ExecInput { input }, output: ExecOutput { output } })
    }
}

/// Input half of a command.
#[derive(Clone)]
pub struct ExecInput {
    input: StreamInput,
}

impl ExecInput {
    /// Waits while the command does not read earlier input.
    pub async fn stdin(&self, bytes: &[u8]) -> Result<(), ClientError> {
        self.input.stdin(bytes).await
    }

    pub async fn close_stdin(&self) -> Result<(), ClientError> {
        self.input.send(Command::CloseStdin).await
    }

    pub async fn resize(&self, cols: u16, rows: u16) -> Result<(), ClientError> {
        self.input.send(Command::Resize { cols, rows }).await
    }

    pub async fn signal(&self, signal: &str) -> Result<(), ClientError> {
        self.input.signal(signal).await
    }

    /// Closes the connection; the command continues.
    pub async fn close(&self) -> Result<(), ClientError> {
        self.input.send(Command::Close).await
    }
}

/// Output half of a command.
pub struct ExecOutput {
    output: StreamOutput<ExecEvent>,
}

impl ExecOutput {
    /// Next event; `None` after the exit or an error. Calling it again marks the previous bytes as consumed.
    pub async fn next(&mut self) -> Option<Result<ExecEvent, ClientError>> {
        self.output.next().await
    }
}

struct ExecHandler {
    start: ExecStart,
    stdout: Cursor,
    stderr: Cursor,
    has_started: bool,
    sent: CommandSent,
}

/// Whether the command itself, not only its id, was sent without a response.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CommandSent {
    NotSent,
    OnThisConnection,
    /// Sent on a connection that was lost.
    OnLostConnection,
}

impl StreamHandler for ExecHandler {
    type Start = ExecStart;
    type Ready = ExecReady;
    type Event = ExecEvent;

    const ROUTE: &'static str = "/exec/ws";
    const IS_KEYS: bool = false;
    const ACK_BYTES: u64 = 256 * 1024;

    fn start(&mut self) -> ExecStart {
        let start = ExecStart { stdout_from: self.stdout.next(), stderr_from: self.stderr.next(), ..self.start.clone() };
        if !self.has_started && self.sent == CommandSent::NotSent {
            if start.command.is_some() || start.argv.is_some() {
                self.sent = CommandSent::OnThisConnection;
            }
            return start;
        }
        self.sent = CommandSent::OnLostConnection;
        // An id alone only joins: after a restart of the sandbox the command is gone and must not run again.
        ExecStart {
            command: None,
            argv: None,
            shell: None,
            cwd: None,
            env: None,
            stdin: None,
            stdin_b64: None,
            timeout_seconds: None,
            ..start
        }
    }

    fn refused(&mut self, error: ClientError) -> ClientError {
        match self.sent {
            // The sandbox refused the start, so the command does not run.
            CommandSent::OnThisConnection => self.sent = CommandSent::NotSent,
            CommandSent::OnLostConnection if !self.has_started && error.is(ErrorCode::CommandNotFound) => {
                return ClientError::MayHaveRun { command_id: self.start.command_id.clone().unwrap_or_default() };
            }
            CommandSent::OnLostConnection | CommandSent::NotSent => {}
        }
        error
    }

    fn resized(&mut self, cols: u16, rows: u16) {
        (self.start.cols, self.start.rows) = (Some(cols), Some(rows));
    }

    fn ready(&mut self, ready: ExecReady) -> Result<FrameOutcome<ExecEvent>, ClientError> {
        if std::mem::replace(&mut self.has_started, true) {
            return Ok(FrameOutcome::Nothing);
        }
        self.start.command_id = Some(ready.command_id.clone());
        Ok(FrameOutcome::Event(ExecEvent::Started { command_id: ready.command_id, pid: ready.pid }))
    }

    fn output(&mut self, kind: BinaryKind, offset: u64, bytes: Bytes) -> Result<FrameOutcome<ExecEvent>, ClientError> {
        let (stream, cursor) = match kind {
            BinaryKind::Stdout => (OutputStream::Stdout, &mut self.stdout),
            BinaryKind::Stderr => (OutputStream::Stderr, &mut self.stderr),
            BinaryKind::Keyframe => return Ok(FrameOutcome::Nothing),
        };
        let Some(bytes) = cursor.take(offset, bytes)? else { return Ok(FrameOutcome::Nothing) };
        let end = cursor.next().unwrap_or_default();
        let event = if stream == OutputStream::Stdout { ExecEvent::Stdout(bytes) } else { ExecEvent::Stderr(bytes) };
        Ok(FrameOutcome::Output(event, stream, end))
    }

    fn frame(&mut self, frame: ServerFrame<ExecReady>) -> Result<FrameOutcome<ExecEvent>, ClientError> {
        let unreadable = |cause: String| ClientError::NotCobox { url: Self::ROUTE.to_owned(), status: 101, excerpt: cause };
        match frame {
            ServerFrame::Stdout { offset, data, data_b64 } => {
                self.output(BinaryKind::Stdout, offset, frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(unreadable)?.into())
            }
            ServerFrame::Stderr { offset, data, data_b64 } => {
                self.output(BinaryKind::Stderr, offset, frame_bytes(data.as_deref(), data_b64.as_deref()).map_err(unreadable)?.into())
            }
            ServerFrame::Gap { from, to, stream } => {
                let stream = stream.unwrap_or(OutputStream::Stdout);
                let cursor = if stream == OutputStream::Stdout { &mut self.stdout } else { &mut self.stderr };
                Ok(cursor
                    .skip(from, to)
                    .map_or(FrameOutcome::Nothing, |(from, to)| FrameOutcome::Event(ExecEvent::Gap { stream, from, to })))
            }
            ServerFrame::Exit { exit_code, signal, timed_out } => Ok(FrameOutcome::Exit(ExecEvent::Exit { exit_code, signal, timed_out })),
            _ => Ok(FrameOutcome::Nothing),
        }
    }

    fn notice(notice: Notice) -> ExecEvent {
        match notice {
            Notice::Reconnecting(cause) => ExecEvent::Reconnecting { cause },
            Notice::Reconnected => ExecEvent::Reconnected,
            Notice::Refused(failure) => ExecEvent::Refused(failure),
            // Unreachable: the input of a command has no maximum age.
            Notice::InputDropped(_) => ExecEvent::Reconnected,
        }
    }
}
