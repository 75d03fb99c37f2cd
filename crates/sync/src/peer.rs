//! The engine's connection to the sandbox's end: sends requests, and separates their answers from other inputs.

use std::{
    io::{self, Read, Write},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender},
    thread,
    time::{Duration, Instant},
};

use crate::{
    content::MessageSource,
    engine::Command,
    error::SyncError,
    message::{Message, VERSION},
};

/// Timeout of the hello; the other end does little before it answers.
const HELLO_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum silence within an answer: the first scan of a large folder takes minutes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(900);

/// An input of the engine.
pub enum EngineInput {
    /// The local folder has changed.
    LocalChange,
    Command(Command),
    /// A message, with the number of its connection.
    Peer(u64, Result<Message, SyncError>),
}

/// A byte stream in each direction to the other end.
pub struct Connection {
    pub reader: Box<dyn Read + Send>,
    pub writer: Box<dyn Write + Send>,
}

pub struct Inbox {
    pub inputs: Receiver<EngineInput>,
    pub commands: Vec<Command>,
    pub sandbox_is_dirty: bool,
    pub local_is_dirty: bool,
    /// Number of the current connection; messages of earlier ones are dropped.
    pub connection_id: u64,
    pub stopped: bool,
}

impl Inbox {
    /// Records an input; a message that answers a request is returned.
    pub fn dispatch(&mut self, input: EngineInput) -> Option<Result<Message, SyncError>> {
        match input {
            EngineInput::LocalChange => self.local_is_dirty = true,
            EngineInput::Command(Command::Stop) => self.stopped = true,
            EngineInput::Command(command) => self.commands.push(command),
            EngineInput::Peer(connection_id, _) if connection_id != self.connection_id => {}
            EngineInput::Peer(_, Ok(Message::Dirty)) => self.sandbox_is_dirty = true,
            EngineInput::Peer(_, Ok(Message::Fault { fault, reason })) => return Some(Err(SyncError::Sandbox { fault, reason })),
            EngineInput::Peer(_, answer) => return Some(answer),
        }
        None
    }
}

impl Inbox {
    /// An error that makes further sending pointless, if one is received within the timeout.
    pub fn interruption(&mut self, timeout: Duration) -> Option<SyncError> {
        let deadline = Instant::now() + timeout;
        loop {
            if self.stopped {
                return Some(SyncError::Stopped);
            }
            let input = self.inputs.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?;
            match self.dispatch(input) {
                Some(Ok(_)) => return Some(SyncError::Protocol("it sent a response before the request was complete")),
                Some(Err(failure)) => return Some(failure),
                None => {}
            }
        }
    }
}

impl MessageSource for Inbox {
    fn next(&mut self) -> Result<Message, SyncError> {
        loop {
            if self.stopped {
                return Err(SyncError::Stopped);
            }
            let input = self.inputs.recv_timeout(ANSWER_TIMEOUT).map_err(|e| match e {
                RecvTimeoutError::Timeout => SyncError::Lost(io::Error::new(io::ErrorKind::TimedOut, "timed out waiting for a response")),
                // All senders are gone only when the engine itself is gone.
                RecvTimeoutError::Disconnected => SyncError::Stopped,
            })?;
            if let Some(answer) = self.dispatch(input) {
                return answer;
            }
        }
    }
}

/// The sending half of a connection.
pub struct Peer {
    writer: Box<dyn Write + Send>,
    /// A write has failed.
    pub write_failed: bool,
}

impl Peer {
    /// Starts the reader thread and performs the handshake.
    pub fn handshake(
        connection: Connection,
        read_only: bool,
        inbox: &mut Inbox,
        inputs: &SyncSender<EngineInput>,
    ) -> Result<Self, SyncError> {
        inbox.connection_id += 1;
        inbox.sandbox_is_dirty = true;
        let (connection_id, inputs, mut reader) = (inbox.connection_id, inputs.clone(), connection.reader);
        let read_loop = move || {
            loop {
                let message = Message::read(&mut reader);
                let is_over = message.is_err();
                // The engine has ended, or this was the last message.
                if inputs.send(EngineInput::Peer(connection_id, message)).is_err() || is_over {
                    return;
                }
            }
        };
        thread::Builder::new().name("sync-read".to_owned()).spawn(read_loop).map_err(SyncError::Lost)?;
        let mut peer = Self { writer: connection.writer, write_failed: false };
        peer.send(&Message::Hello { version: VERSION, read_only })?;
        let deadline = Instant::now() + HELLO_TIMEOUT;
        loop {
            let input = match inbox.inputs.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(input) => input,
                Err(RecvTimeoutError::Timeout) => return Err(SyncError::Lost(io::ErrorKind::TimedOut.into())),
                Err(RecvTimeoutError::Disconnected) => return Err(SyncError::Stopped),
            };
            match inbox.dispatch(input).transpose()? {
                Some(Message::Welcome { version: VERSION }) => return Ok(peer),
                Some(_) => return Err(SyncError::Protocol("unexpected response to the hello")),
                None if inbox.stopped => return Err(SyncError::Stopped),
                None => {}
            }
        }
    }

    pub fn send(&mut self, message: &Message) -> Result<(), SyncError> {
        self.write(message).map_err(SyncError::Lost)
    }

    pub fn write(&mut self, message: &Message) -> io::Result<()> {
        let written = self.writer.write_all(&message.encode());
        let written = written.and_then(|()| if matches!(message, Message::Content { .. }) { Ok(()) } else { self.writer.flush() });
        self.write_failed |= written.is_err();
        written
    }
}
