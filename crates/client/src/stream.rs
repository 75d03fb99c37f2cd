//! A conversation with a sandbox that outlives its connections: its two ends, and what a route has to know about its own frames.

use bytes::Bytes;
use cobox_protocol::frame::{BinaryKind, ControlAction, OutputStream, ServerFrame};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    ApiFailure, ClientError, Dataplane,
    drive::Driver,
    error::{BROKEN_OFF, closing_words},
    nap::Moment,
};

/// Events between the connection and a caller that is slow to take them; beyond it the connection is not read.
const EVENTS: usize = 8;
/// Things to send that wait for a slow connection; beyond it whoever sends waits.
const COMMANDS: usize = 16;
/// Most bytes of input in one frame: few, so that over a network on which no connection lasts each still brings something.
const MAX_STDIN_CHUNK: usize = 16 * 1024;

/// A route's own part of the conversation: what it starts with, and what its frames mean.
pub(crate) trait Conversation: Send + 'static {
    type Start: Serialize + Send;
    type Ready: DeserializeOwned + Send;
    type Event: Send + 'static;

    const ROUTE: &'static str;
    /// Whether input is keys, which are not sent any more when they are old.
    const IS_KEYS: bool;
    /// Used bytes are acknowledged after this many, or a little later.
    const ACK_BYTES: u64;

    /// For the next connection: what it has seen so far it doesn't ask for again.
    fn start(&mut self) -> Self::Start;
    /// A start was answered by a refusal: the error to tell.
    fn refused(&mut self, error: ClientError) -> ClientError {
        error
    }
    fn resized(&mut self, cols: u16, rows: u16);
    fn ready(&mut self, ready: Self::Ready) -> Result<Step<Self::Event>, ClientError>;
    fn output(&mut self, kind: BinaryKind, offset: u64, bytes: Bytes) -> Result<Step<Self::Event>, ClientError>;
    /// Any other frame.
    fn frame(&mut self, frame: ServerFrame<Self::Ready>) -> Result<Step<Self::Event>, ClientError>;
    /// What happens to the conversation itself, as one of its events.
    fn news(news: News) -> Self::Event;
}

/// What a frame comes to.
pub(crate) enum Step<E> {
    Nothing,
    Event(E),
    /// An event that, once used, may be acknowledged up to this offset.
    Output(E, OutputStream, u64),
    /// The last event.
    Exit(E),
}

pub(crate) enum News {
    Reconnecting(String),
    Reconnected,
    Refused(ApiFailure),
    InputDropped(usize),
}

pub(crate) enum Command {
    Stdin(Bytes),
    CloseStdin,
    Resize { cols: u16, rows: u16 },
    Control(ControlAction),
    Close,
}

/// How far each stream has been used: stdout, stderr.
pub(crate) type Used = [u64; 2];

pub(crate) type Handed<E> = Result<(E, Option<(OutputStream, u64)>), ClientError>;

/// Dials, says `start`, and hands the rest to a task of its own.
pub(crate) async fn open<C: Conversation>(dataplane: &Dataplane, conversation: C) -> Result<(Input, Output<C::Event>), ClientError> {
    let (commands, asked) = mpsc::channel(COMMANDS);
    let (signals, signalled) = mpsc::channel(COMMANDS);
    let (tell, events) = mpsc::channel(EVENTS);
    let used = watch::Sender::new([0, 0]);
    let driver = Driver::new(dataplane.clone(), conversation, tell, (asked, signalled), used.subscribe());
    let socket = dataplane.dial(C::ROUTE).await?;
    let driving = AbortOnDropHandle::new(tokio::spawn(driver.run(socket)));
    Ok((Input { commands, signals }, Output { events, used, last: None, is_over: false, _driving: driving }))
}

/// The sending end; any number of them.
#[derive(Clone)]
pub(crate) struct Input {
    /// In order.
    commands: mpsc::Sender<(Moment, Command)>,
    /// Past everything else: a signal must not wait behind input that the command doesn't read.
    signals: mpsc::Sender<String>,
}

impl Input {
    pub async fn stdin(&self, bytes: &[u8]) -> Result<(), ClientError> {
        for chunk in bytes.chunks(MAX_STDIN_CHUNK) {
            self.send(Command::Stdin(Bytes::copy_from_slice(chunk))).await?;
        }
        Ok(())
    }

    pub async fn send(&self, command: Command) -> Result<(), ClientError> {
        self.commands.send((Moment::now(), command)).await.map_err(|_| over())
    }

    pub async fn signal(&self, signal: &str) -> Result<(), ClientError> {
        self.signals.send(signal.to_owned()).await.map_err(|_| over())
    }
}

fn over() -> ClientError {
    ClientError::Closed { code: BROKEN_OFF, reason: closing_words(BROKEN_OFF, "") }
}

/// The receiving end. Dropping it ends the connection, not what runs in the sandbox.
pub(crate) struct Output<E> {
    events: mpsc::Receiver<Handed<E>>,
    used: watch::Sender<Used>,
    /// Of the event handed out last; coming back for more means that it has been used.
    last: Option<(OutputStream, u64)>,
    is_over: bool,
    _driving: AbortOnDropHandle<()>,
}

impl<E> Output<E> {
    /// `None` after the last event or the first error. May be dropped while it waits.
    pub async fn next(&mut self) -> Option<Result<E, ClientError>> {
        if let Some((stream, offset)) = self.last.take() {
            self.used.send_modify(|used| used[stream as usize] = offset);
        }
        if self.is_over {
            return None;
        }
        match self.events.recv().await? {
            Ok((event, last)) => {
                self.last = last;
                Some(Ok(event))
            }
            Err(error) => {
                self.is_over = true;
                Some(Err(error))
            }
        }
    }
}
