//! One connection of a stream, from `start` to its end: concurrent reading, writing, input and acknowledgement.

use std::{collections::VecDeque, time::Duration};

use cobox_protocol::{
    frame::{ClientFrame, OutputStream, ServerFrame, close},
    process::SignalName,
};
use futures_util::StreamExt;
use tokio::{sync::watch, time::Instant};
use tokio_tungstenite::tungstenite::Message;

use crate::{
    ApiFailure, ClientError,
    reconnect::ConnectionLoss,
    reconnect_loop::{ConnectionEnd, ReconnectLoop},
    session::Token,
    sleep_detector::SleepAwareInstant,
    socket::{Incoming, Socket, read},
    stream::{Command, ConsumedOffsets, FrameOutcome, Notice, StreamHandler},
};

/// Maximum delay before consumed bytes are acknowledged.
const ACK_WITHIN: Duration = Duration::from_millis(100);
/// How long to read on after a failed write, to receive the server's reason.
const READ_AFTER_WRITE_FAILURE: Duration = Duration::from_secs(1);

/// How long a connection may take to respond after this machine was asleep. Well below the age at which keystrokes are dropped: users
/// type immediately after opening the lid, and an unnecessary reconnect costs little.
const ANSWER_AFTER_SLEEP: Duration = Duration::from_secs(2);

/// State of one connection.
struct ConnectionState {
    is_first: bool,
    is_ready: bool,
    has_exited: bool,
    /// The caller requested to close the stream; the server is expected to close the connection.
    is_closing: bool,
    has_closed_stdin: bool,
    outbox: VecDeque<Message>,
    /// Last error frame of the server; the reason if the server then closes the connection.
    server_error: Option<ClientError>,
    ack_at: Option<Instant>,
    /// Set after a failed write: deadline for receiving the server's reason.
    reads_until: Option<Instant>,
    last_received: Instant,
    has_pinged: bool,
    /// Set after this machine was asleep: deadline for receiving anything.
    answers_until: Option<Instant>,
}

/// Next event in the connection's loop.
enum ConnectionEvent<R> {
    Delivered,
    CallerGone,
    Sent,
    WriteFailed,
    Received(Incoming<R>),
    Requested(Option<(SleepAwareInstant, Command)>),
    Signal(String),
    Consumed,
    AckDue,
    Token(Token),
    ReadTimedOut,
    SilenceTimedOut,
    WokeUp,
    NoAnswerAfterSleep,
}

impl<C: StreamHandler> ReconnectLoop<C> {
    pub(crate) async fn run_connection(&mut self, mut socket: Socket, is_first: bool) -> ConnectionEnd {
        let mut connection = ConnectionState {
            is_first,
            is_ready: false,
            has_exited: false,
            is_closing: false,
            has_closed_stdin: false,
            outbox: VecDeque::from([message::<C>(&ClientFrame::Start(self.handler.start()))]),
            server_error: None,
            ack_at: None,
            reads_until: None,
            last_received: Instant::now(),
            has_pinged: false,
            answers_until: None,
        };
        loop {
            if connection.has_exited && self.pending.is_empty() {
                // The caller has everything that was received, and no reconnect will request it again.
                connection.outbox.extend(self.acks(self.received));
                connection.outbox.push_back(message::<C>(&ClientFrame::Close));
                socket.send_and_close(connection.outbox).await;
                return ConnectionEnd::Over;
            }
            if connection.is_ready && connection.outbox.is_empty() {
                self.fill_outbox(&mut connection);
            }
            match self.next(&mut socket, &mut connection).await {
                ConnectionEvent::Delivered | ConnectionEvent::Sent => {}
                ConnectionEvent::CallerGone => {
                    socket.send_and_close([message::<C>(&ClientFrame::Close)]).await;
                    return ConnectionEnd::Over;
                }
                ConnectionEvent::WriteFailed => connection.reads_until = Some(Instant::now() + READ_AFTER_WRITE_FAILURE),
                ConnectionEvent::Received(incoming) => {
                    (connection.last_received, connection.has_pinged, connection.answers_until) = (Instant::now(), false, None);
                    if let Err(end) = self.handle_incoming(incoming, &mut connection) {
                        return end;
                    }
                }
                ConnectionEvent::Requested(Some((at, command))) => {
                    connection.is_closing |= matches!(command, Command::Close);
                    self.queue(command, at);
                }
                ConnectionEvent::Signal(signal) => {
                    connection.outbox.push_back(message::<C>(&ClientFrame::Signal { signal: SignalName::Name(signal) }))
                }
                ConnectionEvent::Requested(None) => self.has_no_senders = true,
                ConnectionEvent::Consumed => {
                    let consumed = *self.consumed.borrow_and_update();
                    if (0..2).any(|i| consumed[i].saturating_sub(self.acked[i]) >= C::ACK_BYTES) {
                        connection.outbox.extend(self.acks(consumed));
                        connection.ack_at = None;
                    } else {
                        connection.ack_at = connection.ack_at.or(Some(Instant::now() + ACK_WITHIN));
                    }
                }
                ConnectionEvent::AckDue => {
                    let consumed = *self.consumed.borrow_and_update();
                    connection.outbox.extend(self.acks(consumed));
                    connection.ack_at = None;
                }
                ConnectionEvent::Token(token) => connection.outbox.push_back(message::<C>(&ClientFrame::Auth { token: token.secret })),
                ConnectionEvent::ReadTimedOut if connection.is_closing => return ConnectionEnd::Over,
                ConnectionEvent::ReadTimedOut => return ConnectionEnd::Lost(ConnectionLoss::broken("writing to it failed".to_owned())),
                ConnectionEvent::SilenceTimedOut if connection.has_pinged => {
                    let silence = self.dataplane.reconnect.silence.as_secs();
                    return ConnectionEnd::Lost(ConnectionLoss::broken(format!("nothing was received for {silence} s")));
                }
                ConnectionEvent::SilenceTimedOut => {
                    connection.has_pinged = true;
                    connection.outbox.push_back(Message::Ping(bytes::Bytes::new()));
                }
                ConnectionEvent::WokeUp => {
                    connection.answers_until = Some(Instant::now() + ANSWER_AFTER_SLEEP);
                    connection.outbox.push_back(Message::Ping(bytes::Bytes::new()));
                }
                ConnectionEvent::NoAnswerAfterSleep => {
                    return ConnectionEnd::Lost(ConnectionLoss::broken("nothing was received since this machine woke up".to_owned()));
                }
            }
        }
    }

    async fn next(&mut self, socket: &mut Socket, connection: &mut ConnectionState) -> ConnectionEvent<C::Ready> {
        if !self.input.has_capacity() {
            // Keystrokes that were sent but not acknowledged within their maximum age need not be kept.
            self.input.expire(SleepAwareInstant::now());
        }
        let is_reading = self.pending.is_empty();
        let ConnectionState { outbox, last_received, .. } = connection;
        // Commands are taken one at a time, because a later command must not overtake input.
        let is_idle = connection.is_ready && outbox.is_empty() && self.input.is_all_sent() && self.deferred.is_empty();
        let takes_commands = is_idle && !self.has_no_senders && !connection.is_closing && self.input.has_capacity();
        let silence = self.dataplane.reconnect.silence;
        let silent_at = *last_received + if connection.has_pinged { silence } else { silence / 3 };
        tokio::select! {
            permit = self.events.reserve(), if !is_reading => match (permit, self.pending.pop_front()) {
                (Ok(permit), Some(event)) => {
                    permit.send(event);
                    // The silence timeout starts again when reading resumes.
                    *last_received = Instant::now();
                    ConnectionEvent::Delivered
                }
                (Ok(_), None) => ConnectionEvent::Delivered,
                (Err(_), _) => ConnectionEvent::CallerGone,
            },
            permit = socket.out.reserve(), if !outbox.is_empty() && connection.reads_until.is_none() => match (permit, outbox.pop_front()) {
                (Ok(permit), Some(message)) => {
                    permit.send(message);
                    ConnectionEvent::Sent
                }
                (Ok(_), None) => ConnectionEvent::Sent,
                (Err(_), _) => ConnectionEvent::WriteFailed,
            },
            incoming = socket.stream.next(), if is_reading && !connection.has_exited => ConnectionEvent::Received(read(incoming)),
            command = self.commands.recv(), if takes_commands => ConnectionEvent::Requested(command),
            Some(signal) = self.signals.recv(), if connection.is_ready && outbox.is_empty() => ConnectionEvent::Signal(signal),
            Ok(()) = self.consumed.changed() => ConnectionEvent::Consumed,
            () = until(connection.ack_at), if connection.ack_at.is_some() => ConnectionEvent::AckDue,
            token = next_token(&mut self.tokens) => ConnectionEvent::Token(token),
            () = until(connection.reads_until), if connection.reads_until.is_some() => ConnectionEvent::ReadTimedOut,
            () = tokio::time::sleep_until(silent_at), if is_reading && !connection.has_exited => ConnectionEvent::SilenceTimedOut,
            () = self.sleep_detector.woke_up() => ConnectionEvent::WokeUp,
            () = until(connection.answers_until), if connection.answers_until.is_some() && is_reading && !connection.has_exited => {
                ConnectionEvent::NoAnswerAfterSleep
            }
        }
    }

    /// Converts a received message to events for the caller. An error ends this connection.
    fn handle_incoming(&mut self, incoming: Incoming<C::Ready>, connection: &mut ConnectionState) -> Result<(), ConnectionEnd> {
        let step = match incoming {
            Incoming::Nothing => return Ok(()),
            Incoming::Closed { .. } | Incoming::Broken(_) if connection.is_closing => return Err(ConnectionEnd::Over),
            Incoming::Closed { code, reason } => {
                let server_error = connection.server_error.take();
                if server_error.is_none() && !connection.is_ready && code == close::UNAUTHENTICATED {
                    // A close without an error frame is also a refusal.
                    self.handler.refused(ClientError::Closed { code, reason: reason.clone() });
                }
                return Err(ConnectionEnd::Lost(ConnectionLoss::closed(code, &reason, server_error)));
            }
            Incoming::Broken(cause) => return Err(ConnectionEnd::Lost(ConnectionLoss::broken(cause))),
            Incoming::Output { kind, offset, bytes } => {
                self.record_progress();
                self.handler.output(kind, offset, bytes)
            }
            Incoming::Frame(ServerFrame::Ready(ready)) => {
                let step = self.handler.ready(ready);
                if step.is_ok() && !std::mem::replace(&mut connection.is_ready, true) {
                    self.on_ready(connection);
                }
                step
            }
            Incoming::Frame(ServerFrame::StdinAck { seq }) => {
                self.record_progress();
                self.input.acked(seq);
                return Ok(());
            }
            Incoming::Frame(ServerFrame::Error { error }) => {
                let failure = ApiFailure::from_frame(error);
                // An error before `ready` ends the stream and is returned as its error.
                if connection.is_ready {
                    if C::IS_KEYS && failure.is_about_control() {
                        self.input.refused();
                    }
                    self.notify(Notice::Refused(failure.clone()));
                }
                let error = ClientError::Api(Box::new(failure));
                connection.server_error = Some(if connection.is_ready { error } else { self.handler.refused(error) });
                return Ok(());
            }
            Incoming::Frame(ServerFrame::AuthOk { .. } | ServerFrame::Pong { .. }) => return Ok(()),
            Incoming::Frame(frame) => {
                self.record_progress();
                self.handler.frame(frame)
            }
        };
        let (event, consumed) = match step.map_err(|e| ConnectionEnd::Lost(ConnectionLoss::Final(e)))? {
            FrameOutcome::Nothing => return Ok(()),
            FrameOutcome::Event(event) => (event, None),
            FrameOutcome::Output(event, stream, end) => {
                self.received[stream as usize] = end;
                (event, Some((stream, end)))
            }
            FrameOutcome::Exit(event) => {
                connection.has_exited = true;
                (event, None)
            }
        };
        self.pending.push_back(Ok((event, consumed)));
        Ok(())
    }

    /// Handles `ready`: resends input that the server may not have received.
    fn on_ready(&mut self, connection: &mut ConnectionState) {
        if !connection.is_first {
            self.notify(Notice::Reconnected);
        }
        self.ready_at = Some(Instant::now());
        self.drop_old_keys();
        self.input.reset_sent();
    }

    /// Fills the outbox: input within the connection's window first, then the commands issued after it.
    fn fill_outbox(&mut self, connection: &mut ConnectionState) {
        while let Some((seq, bytes)) = self.input.next() {
            connection.outbox.push_back(message::<C>(&ClientFrame::stdin(&bytes, Some(seq))));
        }
        if !self.input.is_all_sent() {
            return;
        }
        if self.is_stdin_closed && !std::mem::replace(&mut connection.has_closed_stdin, true) {
            connection.outbox.push_back(message::<C>(&ClientFrame::CloseStdin));
        }
        for command in std::mem::take(&mut self.deferred) {
            let frame = match command {
                Command::Resize { cols, rows } => ClientFrame::Resize { cols, rows },
                Command::Control(action) => ClientFrame::Control { action },
                Command::Close => ClientFrame::Close,
                // Held in `input` and `is_stdin_closed`.
                Command::Stdin(_) | Command::CloseStdin => continue,
            };
            connection.outbox.push_back(message::<C>(&frame));
        }
    }

    /// Queues a command; it is sent in order.
    pub(crate) fn queue(&mut self, command: Command, at: SleepAwareInstant) {
        match command {
            Command::Stdin(bytes) => self.input.push(bytes, at),
            Command::CloseStdin => self.is_stdin_closed = true,
            Command::Resize { cols, rows } => {
                self.handler.resized(cols, rows);
                // Only the last size matters.
                self.deferred.retain(|c| !matches!(c, Command::Resize { .. }));
                self.deferred.push_back(Command::Resize { cols, rows });
            }
            Command::Control(_) | Command::Close => self.deferred.push_back(command),
        }
    }

    /// Acknowledgements for everything before these offsets.
    fn acks(&mut self, consumed: ConsumedOffsets) -> Vec<Message> {
        let mut acks = Vec::new();
        for (stream, name) in [(0, OutputStream::Stdout), (1, OutputStream::Stderr)] {
            if consumed[stream] > self.acked[stream] {
                self.acked[stream] = consumed[stream];
                acks.push(message::<C>(&ClientFrame::Ack { offset: consumed[stream], stream: Some(name) }));
            }
        }
        acks
    }
}

fn message<C: StreamHandler>(frame: &ClientFrame<C::Start>) -> Message {
    // Frames contain only strings, numbers and maps with string keys, so serialization cannot fail.
    Message::text(serde_json::to_string(frame).expect("frames serialise"))
}

pub(crate) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Waits for the next token; pending forever without a token source.
async fn next_token(tokens: &mut Option<watch::Receiver<Token>>) -> Token {
    if let Some(tokens) = tokens
        && tokens.changed().await.is_ok()
    {
        return tokens.borrow_and_update().clone();
    }
    std::future::pending().await
}
