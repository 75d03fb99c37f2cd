//! Resumable stream to a sandbox that survives lost connections: its input and output halves, and the trait with which a route handles its
//! frames.

use bytes::Bytes;
use cobox_protocol::frame::{BinaryKind, ControlAction, OutputStream, ServerFrame};
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::{mpsc, watch};
use tokio_util::task::AbortOnDropHandle;

use crate::{
    ApiFailure, ClientError, Dataplane,
    error::{ABNORMAL_CLOSURE, close_reason},
    reconnect_loop::ReconnectLoop,
    sleep_detector::SleepAwareInstant,
};

/// Events buffered for a slow caller; when the buffer is full, the connection is not read.
const EVENTS: usize = 8;
/// Commands buffered for a slow connection; when the buffer is full, the sender waits.
const COMMANDS: usize = 16;
/// Maximum bytes of input in one frame. Small, so that even short-lived connections on a bad network make progress.
const MAX_STDIN_CHUNK: usize = 16 * 1024;

/// Route-specific part of a stream: its start frame and the meaning of its frames.
pub(crate) trait StreamHandler: Send + 'static {
    type Start: Serialize + Send;
    type Ready: DeserializeOwned + Send;
    type Event: Send + 'static;

    const ROUTE: &'static str;
    /// Whether input is keystrokes, which are dropped when they are too old.
    const IS_KEYS: bool;
    /// Consumed bytes are acknowledged after this many, or a little later.
    const ACK_BYTES: u64;

    /// Start frame for the next connection; requests only output that was not received before.
    fn start(&mut self) -> Self::Start;
    /// Called when the server refuses a start; returns the error to report.
    fn refused(&mut self, error: ClientError) -> ClientError {
        error
    }
    fn resized(&mut self, cols: u16, rows: u16);
    fn ready(&mut self, ready: Self::Ready) -> Result<FrameOutcome<Self::Event>, ClientError>;
    fn output(&mut self, kind: BinaryKind, offset: u64, bytes: Bytes) -> Result<FrameOutcome<Self::Event>, ClientError>;
    /// Any other frame.
    fn frame(&mut self, frame: ServerFrame<Self::Ready>) -> Result<FrameOutcome<Self::Event>, ClientError>;
    /// Converts a notice about the stream itself to an event.
    fn notice(notice: Notice) -> Self::Event;
}

/// Result of handling a frame.
pub(crate) enum FrameOutcome<E> {
    Nothing,
    Event(E),
    /// An event whose consumption is acknowledged up to this offset.
    Output(E, OutputStream, u64),
    /// The last event.
    Exit(E),
}

pub(crate) enum Notice {
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

/// Offsets up to which the caller has consumed stdout and stderr.
pub(crate) type ConsumedOffsets = [u64; 2];

pub(crate) type Delivery<E> = Result<(E, Option<(OutputStream, u64)>), ClientError>;

/// Connects, and spawns the task that runs the stream.
pub(crate) async fn open<C: StreamHandler>(
    dataplane: &Dataplane,
    handler: C,
) -> Result<(StreamInput, StreamOutput<C::Event>), ClientError> {
    let (commands, requested) = mpsc::channel(COMMANDS);
    let (signals, signalled) = mpsc::channel(COMMANDS);
    let (events_out, events) = mpsc::channel(EVENTS);
    let consumed = watch::Sender::new([0, 0]);
    let reconnect_loop = ReconnectLoop::new(dataplane.clone(), handler, events_out, (requested, signalled), consumed.subscribe());
    let socket = dataplane.dial(C::ROUTE).await?;
    let task = AbortOnDropHandle::new(tokio::spawn(reconnect_loop.run(socket)));
    Ok((StreamInput { commands, signals }, StreamOutput { events, consumed, last: None, is_over: false, _task: task }))
}

/// Sending half of a stream; can be cloned.
#[derive(Clone)]
pub(crate) struct StreamInput {
    /// Sent in order.
    commands: mpsc::Sender<(SleepAwareInstant, Command)>,
    /// Sent ahead of commands: a signal must not wait behind input that the command does not read.
    signals: mpsc::Sender<String>,
}

impl StreamInput {
    pub async fn stdin(&self, bytes: &[u8]) -> Result<(), ClientError> {
        for chunk in bytes.chunks(MAX_STDIN_CHUNK) {
            self.send(Command::Stdin(Bytes::copy_from_slice(chunk))).await?;
        }
        Ok(())
    }

    pub async fn send(&self, command: Command) -> Result<(), ClientError> {
        self.commands.send((SleepAwareInstant::now(), command)).await.map_err(|_| stream_closed())
    }

    pub async fn signal(&self, signal: &str) -> Result<(), ClientError> {
        self.signals.send(signal.to_owned()).await.map_err(|_| stream_closed())
    }
}

fn stream_closed() -> ClientError {
    ClientError::Closed { code: ABNORMAL_CLOSURE, reason: close_reason(ABNORMAL_CLOSURE, "") }
}

/// Receiving half of a stream. Dropping it ends the connection, but not the process in the sandbox.
pub(crate) struct StreamOutput<E> {
    events: mpsc::Receiver<Delivery<E>>,
    consumed: watch::Sender<ConsumedOffsets>,
    /// End offset of the last returned event; the next call of `next` marks it as consumed.
    last: Option<(OutputStream, u64)>,
    is_over: bool,
    _task: AbortOnDropHandle<()>,
}

impl<E> StreamOutput<E> {
    /// Next event; `None` after the last event or the first error. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<E, ClientError>> {
        if let Some((stream, offset)) = self.last.take() {
            self.consumed.send_modify(|consumed| consumed[stream as usize] = offset);
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
