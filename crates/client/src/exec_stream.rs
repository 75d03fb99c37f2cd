//! A command whose output comes as it is made, over as many connections as it takes: no byte lost or doubled, and never run twice.

use bytes::Bytes;
use cobox_protocol::{
    CommandId, ErrorCode, ShellId,
    frame::{BinaryKind, ExecReady, ExecStart, OutputStream, ServerFrame, frame_bytes},
};

use crate::{
    ApiFailure, ClientError, Dataplane,
    cursor::Cursor,
    line::{self, Command, Conversation, Input, News, Output, Step},
};

/// A command that runs, or has run.
pub struct ExecStream {
    pub command_id: String,
    pub input: ExecInput,
    pub output: ExecOutput,
}

/// What a command does, and what happens to the connection meanwhile.
#[derive(Debug)]
pub enum ExecEvent {
    Started {
        command_id: String,
        /// In the sandbox's own numbering.
        pid: i32,
    },
    Stdout(Bytes),
    Stderr(Bytes),
    /// Bytes that are no longer kept: nobody came for them in time.
    Gap {
        stream: OutputStream,
        from: u64,
        to: u64,
    },
    Reconnecting {
        cause: String,
    },
    Reconnected,
    /// Something that was sent was not taken; the command goes on.
    Refused(ApiFailure),
    Exit {
        exit_code: i32,
        signal: Option<i32>,
        timed_out: bool,
    },
}

impl Dataplane {
    /// Runs a command, or joins the one that `command_id` names. Without one it chooses it, so that no lost answer runs it twice: where
    /// the connection is lost as it is started, it is only asked for, and [`ClientError::MayHaveRun`] if the sandbox doesn't know it.
    pub async fn exec_stream(&self, mut start: ExecStart) -> Result<ExecStream, ClientError> {
        let command_id = start.command_id.get_or_insert_with(|| CommandId::new().to_string()).clone();
        // Any unique word will do for a client's name.
        start.client.get_or_insert_with(|| ShellId::new().to_string());
        start.binary = true;
        let stdout = Cursor::new(OutputStream::Stdout, Some(start.stdout_from.unwrap_or(0)));
        let stderr = Cursor::new(OutputStream::Stderr, Some(start.stderr_from.unwrap_or(0)));
        let (input, output) = line::open(self, ExecTalk { start, stdout, stderr, has_started: false, sent: Sent::Never }).await?;
        Ok(ExecStream { command_id, input: ExecInput { input }, output: ExecOutput { output } })
    }
}

/// What goes into a command.
#[derive(Clone)]
pub struct ExecInput {
    input: Input,
}

impl ExecInput {
    /// Waits while the command doesn't read what it was given before.
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

    /// Ends the connection and leaves the command alone.
    pub async fn close(&self) -> Result<(), ClientError> {
        self.input.send(Command::Close).await
    }
}

/// What comes out of a command.
pub struct ExecOutput {
    output: Output<ExecEvent>,
}

impl ExecOutput {
    /// What happens next; `None` after the exit or an error. Coming back for more says that the last bytes have been used.
    pub async fn next(&mut self) -> Option<Result<ExecEvent, ClientError>> {
        self.output.next().await
    }
}

struct ExecTalk {
    start: ExecStart,
    stdout: Cursor,
    stderr: Cursor,
    has_started: bool,
    sent: Sent,
}

/// Whether the command itself, not only its id, was sent, and nobody said what became of it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    Never,
    Now,
    /// Over a connection that was lost.
    Before,
}

impl Conversation for ExecTalk {
    type Start = ExecStart;
    type Ready = ExecReady;
    type Event = ExecEvent;

    const ROUTE: &'static str = "/exec/ws";
    const IS_KEYS: bool = false;
    const ACK_BYTES: u64 = 256 * 1024;

    fn start(&mut self) -> ExecStart {
        let start = ExecStart { stdout_from: self.stdout.next(), stderr_from: self.stderr.next(), ..self.start.clone() };
        if !self.has_started && self.sent == Sent::Never {
            if start.command.is_some() || start.argv.is_some() {
                self.sent = Sent::Now;
            }
            return start;
        }
        self.sent = Sent::Before;
        // An id alone only joins: in a sandbox that was started anew the command is gone, and must not be run again.
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
            // Nothing runs of it.
            Sent::Now => self.sent = Sent::Never,
            Sent::Before if !self.has_started && error.is(ErrorCode::CommandNotFound) => {
                return ClientError::MayHaveRun { command_id: self.start.command_id.clone().unwrap_or_default() };
            }
            Sent::Before | Sent::Never => {}
        }
        error
    }

    fn resized(&mut self, cols: u16, rows: u16) {
        (self.start.cols, self.start.rows) = (Some(cols), Some(rows));
    }

    fn ready(&mut self, ready: ExecReady) -> Result<Step<ExecEvent>, ClientError> {
        if std::mem::replace(&mut self.has_started, true) {
            return Ok(Step::Nothing);
        }
        self.start.command_id = Some(ready.command_id.clone());
        Ok(Step::Event(ExecEvent::Started { command_id: ready.command_id, pid: ready.pid }))
    }

    fn output(&mut self, kind: BinaryKind, offset: u64, bytes: Bytes) -> Result<Step<ExecEvent>, ClientError> {
        let (stream, cursor) = match kind {
            BinaryKind::Stdout => (OutputStream::Stdout, &mut self.stdout),
            BinaryKind::Stderr => (OutputStream::Stderr, &mut self.stderr),
            BinaryKind::Keyframe => return Ok(Step::Nothing),
        };
        let Some(bytes) = cursor.take(offset, bytes)? else { return Ok(Step::Nothing) };
        let end = cursor.next().unwrap_or_default();
        let event = if stream == OutputStream::Stdout { ExecEvent::Stdout(bytes) } else { ExecEvent::Stderr(bytes) };
        Ok(Step::Output(event, stream, end))
    }

    fn frame(&mut self, frame: ServerFrame<ExecReady>) -> Result<Step<ExecEvent>, ClientError> {
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
                Ok(cursor.skip(from, to).map_or(Step::Nothing, |(from, to)| Step::Event(ExecEvent::Gap { stream, from, to })))
            }
            ServerFrame::Exit { exit_code, signal, timed_out } => Ok(Step::Exit(ExecEvent::Exit { exit_code, signal, timed_out })),
            _ => Ok(Step::Nothing),
        }
    }

    fn news(news: News) -> ExecEvent {
        match news {
            News::Reconnecting(cause) => ExecEvent::Reconnecting { cause },
            News::Reconnected => ExecEvent::Reconnected,
            News::Refused(failure) => ExecEvent::Refused(failure),
            // Input of a command is never too old.
            News::InputDropped(_) => ExecEvent::Reconnected,
        }
    }
}
