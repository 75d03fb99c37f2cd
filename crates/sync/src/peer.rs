//! The other end, as the engine speaks with it: requests and their answers, and everything else that arrives meanwhile.

use std::{
    io::{self, Read, Write},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender},
    thread,
    time::{Duration, Instant},
};

use crate::{
    content::Source,
    engine::Command,
    error::SyncError,
    message::{Message, VERSION},
};

/// Longest wait for an answer to a hello: what the other end does before it is quick.
const HELLO_WITHIN: Duration = Duration::from_secs(30);

/// Longest silence in the middle of an answer: reading a large folder for the first time takes minutes.
const ANSWER_WITHIN: Duration = Duration::from_secs(900);

/// What arrives at the engine.
pub enum Arrival {
    /// Something has changed in the local folder.
    Here,
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
    pub arrivals: Receiver<Arrival>,
    pub commands: Vec<Command>,
    pub there_is_dirty: bool,
    pub here_is_dirty: bool,
    /// The connection that counts.
    pub number: u64,
    pub stopped: bool,
}

impl Inbox {
    /// Sorts what came; a message that answers something is handed back.
    pub fn sort(&mut self, arrival: Arrival) -> Option<Result<Message, SyncError>> {
        match arrival {
            Arrival::Here => self.here_is_dirty = true,
            Arrival::Command(Command::Stop) => self.stopped = true,
            Arrival::Command(command) => self.commands.push(command),
            Arrival::Peer(number, _) if number != self.number => {}
            Arrival::Peer(_, Ok(Message::Dirty)) => self.there_is_dirty = true,
            Arrival::Peer(_, Ok(Message::Fault { fault, words })) => return Some(Err(SyncError::There { fault, words })),
            Arrival::Peer(_, answer) => return Some(answer),
        }
        None
    }
}

impl Inbox {
    /// Why what is being said to the other side is in vain, where that has become known in this time.
    pub fn interruption(&mut self, within: Duration) -> Option<SyncError> {
        let deadline = Instant::now() + within;
        loop {
            if self.stopped {
                return Some(SyncError::Stopped);
            }
            let arrival = self.arrivals.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()?;
            match self.sort(arrival) {
                Some(Ok(_)) => return Some(SyncError::Protocol("it answered before it was asked")),
                Some(Err(failure)) => return Some(failure),
                None => {}
            }
        }
    }
}

impl Source for Inbox {
    fn next(&mut self) -> Result<Message, SyncError> {
        loop {
            if self.stopped {
                return Err(SyncError::Stopped);
            }
            let arrival = self.arrivals.recv_timeout(ANSWER_WITHIN).map_err(|e| match e {
                RecvTimeoutError::Timeout => SyncError::Lost(io::Error::new(io::ErrorKind::TimedOut, "it did not answer")),
                // Nobody can send any more only when the engine itself is gone.
                RecvTimeoutError::Disconnected => SyncError::Stopped,
            })?;
            if let Some(answer) = self.sort(arrival) {
                return answer;
            }
        }
    }
}

/// What can be said to the other end.
pub struct Peer {
    writer: Box<dyn Write + Send>,
    /// It takes no more.
    pub is_broken: bool,
}

impl Peer {
    /// Greets the other end, and has a thread read what it says from now on.
    pub fn greet(connection: Connection, read_only: bool, inbox: &mut Inbox, arrivals: &SyncSender<Arrival>) -> Result<Self, SyncError> {
        inbox.number += 1;
        inbox.there_is_dirty = true;
        let (number, arrivals, mut reader) = (inbox.number, arrivals.clone(), connection.reader);
        let reading = move || {
            loop {
                let message = Message::read(&mut reader);
                let is_over = message.is_err();
                // The engine has gone, or this was the last that can be read.
                if arrivals.send(Arrival::Peer(number, message)).is_err() || is_over {
                    return;
                }
            }
        };
        thread::Builder::new().name("sync-read".to_owned()).spawn(reading).map_err(SyncError::Lost)?;
        let mut peer = Self { writer: connection.writer, is_broken: false };
        peer.send(&Message::Hello { version: VERSION, read_only })?;
        let deadline = Instant::now() + HELLO_WITHIN;
        loop {
            let arrival = match inbox.arrivals.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(arrival) => arrival,
                Err(RecvTimeoutError::Timeout) => return Err(SyncError::Lost(io::ErrorKind::TimedOut.into())),
                Err(RecvTimeoutError::Disconnected) => return Err(SyncError::Stopped),
            };
            match inbox.sort(arrival).transpose()? {
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
        self.is_broken |= written.is_err();
        written
    }
}
