//! The other end, as the engine speaks with it: requests and their answers, and everything else that arrives meanwhile.

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

/// Longest wait for an answer to a hello: what the other end does before it is quick.
const HELLO_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest silence in the middle of an answer: reading a large folder for the first time takes minutes.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(900);

/// What arrives at the engine.
pub enum EngineInput {
    /// Something has changed in the local folder.
    LocalChange,
    Command(Command),
    /// From the connection of that number.
    Peer(u64, Result<Message, SyncError>),
}

/// A connection to the other end: bytes both ways.
pub struct Connection {
    pub reader: Box<dyn Read + Send>,
    pub writer: Box<dyn Write + Send>,
}

pub struct Inbox {
    pub inputs: Receiver<EngineInput>,
    pub commands: Vec<Command>,
    pub sandbox_is_dirty: bool,
    pub local_is_dirty: bool,
    /// The connection that counts.
    pub connection_id: u64,
    pub stopped: bool,
}

impl Inbox {
    /// Sorts what came; a message that answers something is handed back.
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
    /// Why what is being said to the other side is in vain, where that has become known in this time.
    pub fn interruption(&mut self, timeout: Duration) -> Option<SyncError> {
        let deadline = Instant::now() + timeout;
        loop {
            if self.stopped {
                return Some(SyncError::Stopped);
            }
            let input = self.inputs.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?;
            match self.dispatch(input) {
                Some(Ok(_)) => return Some(SyncError::Protocol("it answered before it was asked")),
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
                RecvTimeoutError::Timeout => SyncError::Lost(io::Error::new(io::ErrorKind::TimedOut, "it did not answer")),
                // Nobody can send any more only when the engine itself is gone.
                RecvTimeoutError::Disconnected => SyncError::Stopped,
            })?;
            if let Some(answer) = self.dispatch(input) {
                return answer;
            }
        }
    }
}

/// What can be said to the other end.
pub struct Peer {
    writer: Box<dyn Write + Send>,
    /// It takes no more.
    pub write_failed: bool,
}

impl Peer {
    /// Greets the other end, and has a thread read what it says from now on.
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
                // The engine has gone, or this was the last that can be read.
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
                Some(_) => return Err(SyncError::Protocol("it answered a hello with something else")),
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
