//! One connection of a stream, from `start` to its end: reading, writing, typing and acknowledging, none of which waits for another.

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
    drive::{Driver, End},
    line::{Command, Conversation, News, Step, Used},
    nap::Moment,
    reconnect::Loss,
    session::Token,
    socket::{Incoming, Socket, read},
};

/// Longest that used bytes stay unacknowledged.
const ACK_WITHIN: Duration = Duration::from_millis(100);
/// Where writing failed, the reading half gets this long to say why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// After this machine was asleep a connection gets this long to show that it is still there. Well below the age at which keys are not
/// sent any more: whoever opens the lid types at once, and a new connection that was not needed costs little.
const ANSWER_AFTER_NAP: Duration = Duration::from_secs(2);

/// What is known of this connection alone.
struct Connection {
    is_first: bool,
    is_ready: bool,
    has_exited: bool,
    /// The caller asked to leave: the other side is to close.
    is_leaving: bool,
    has_closed_stdin: bool,
    outbox: VecDeque<Message>,
    /// What the server said was wrong; if it closes then, that is why.
    told: Option<ClientError>,
    ack_at: Option<Instant>,
    /// Set where writing failed: until when the reading half may say why.
    reads_until: Option<Instant>,
    heard: Instant,
    has_pinged: bool,
    /// Set after a nap: until when something must have come.
    answers_until: Option<Instant>,
}

/// What happened next on it.
enum Now<R> {
    Handed,
    CallerGone,
    Sent,
    WriteFailed,
    Came(Incoming<R>),
    Asked(Option<(Moment, Command)>),
    Signal(String),
    Used,
    AckDue,
    Token(Token),
    NothingMoreToRead,
    Silent,
    Woke,
    NoAnswerAfterNap,
}

impl<C: Conversation> Driver<C> {
    pub(crate) async fn hold(&mut self, mut socket: Socket, is_first: bool) -> End {
        let mut connection = Connection {
            is_first,
            is_ready: false,
            has_exited: false,
            is_leaving: false,
            has_closed_stdin: false,
            outbox: VecDeque::from([message::<C>(&ClientFrame::Start(self.conversation.start()))]),
            told: None,
            ack_at: None,
            reads_until: None,
            heard: Instant::now(),
            has_pinged: false,
            answers_until: None,
        };
        loop {
            if connection.has_exited && self.pending.is_empty() {
                // What was received is the caller's now; nobody else will ask for it.
                connection.outbox.extend(self.acks(self.received));
                connection.outbox.push_back(message::<C>(&ClientFrame::Close));
                socket.farewell(connection.outbox).await;
                return End::Over;
            }
            if connection.is_ready && connection.outbox.is_empty() {
                self.fill(&mut connection);
            }
            match self.next(&mut socket, &mut connection).await {
                Now::Handed | Now::Sent => {}
                Now::CallerGone => {
                    socket.farewell([message::<C>(&ClientFrame::Close)]).await;
                    return End::Over;
                }
                Now::WriteFailed => connection.reads_until = Some(Instant::now() + LAST_WORDS),
                Now::Came(incoming) => {
                    (connection.heard, connection.has_pinged, connection.answers_until) = (Instant::now(), false, None);
                    if let Err(end) = self.take(incoming, &mut connection) {
                        return end;
                    }
                }
                Now::Asked(Some((at, command))) => {
                    connection.is_leaving |= matches!(command, Command::Close);
                    self.note(command, at);
                }
                Now::Signal(signal) => connection.outbox.push_back(message::<C>(&ClientFrame::Signal { signal: SignalName::Name(signal) })),
                Now::Asked(None) => self.is_mute = true,
                Now::Used => {
                    let used = *self.used.borrow_and_update();
                    if (0..2).any(|i| used[i].saturating_sub(self.acked[i]) >= C::ACK_BYTES) {
                        connection.outbox.extend(self.acks(used));
                        connection.ack_at = None;
                    } else {
                        connection.ack_at = connection.ack_at.or(Some(Instant::now() + ACK_WITHIN));
                    }
                }
                Now::AckDue => {
                    let used = *self.used.borrow_and_update();
                    connection.outbox.extend(self.acks(used));
                    connection.ack_at = None;
                }
                Now::Token(token) => connection.outbox.push_back(message::<C>(&ClientFrame::Auth { token: token.secret })),
                Now::NothingMoreToRead if connection.is_leaving => return End::Over,
                Now::NothingMoreToRead => return End::Lost(Loss::broken("it takes no more".to_owned())),
                Now::Silent if connection.has_pinged => {
                    let silence = self.dataplane.reconnect.silence.as_secs();
                    return End::Lost(Loss::broken(format!("nothing came for {silence} s")));
                }
                Now::Silent => {
                    connection.has_pinged = true;
                    connection.outbox.push_back(Message::Ping(bytes::Bytes::new()));
                }
                Now::Woke => {
                    connection.answers_until = Some(Instant::now() + ANSWER_AFTER_NAP);
                    connection.outbox.push_back(Message::Ping(bytes::Bytes::new()));
                }
                Now::NoAnswerAfterNap => return End::Lost(Loss::broken("nothing came since this machine was asleep".to_owned())),
            }
        }
    }

    async fn next(&mut self, socket: &mut Socket, connection: &mut Connection) -> Now<C::Ready> {
        if !self.typing.has_room() {
            // Sent and not acknowledged in all the time that keys count for: no longer ours to keep.
            self.typing.expire(Moment::now());
        }
        let is_reading = self.pending.is_empty();
        let Connection { outbox, heard, .. } = connection;
        // One after the other: what is asked for after input must not come before it.
        let is_idle = connection.is_ready && outbox.is_empty() && self.typing.is_all_sent() && self.deferred.is_empty();
        let takes_commands = is_idle && !self.is_mute && !connection.is_leaving && self.typing.has_room();
        let silence = self.dataplane.reconnect.silence;
        let silent_at = *heard + if connection.has_pinged { silence } else { silence / 3 };
        tokio::select! {
            permit = self.events.reserve(), if !is_reading => match (permit, self.pending.pop_front()) {
                (Ok(permit), Some(event)) => {
                    permit.send(event);
                    // Silence counts from when we listen again.
                    *heard = Instant::now();
                    Now::Handed
                }
                (Ok(_), None) => Now::Handed,
                (Err(_), _) => Now::CallerGone,
            },
            permit = socket.out.reserve(), if !outbox.is_empty() && connection.reads_until.is_none() => match (permit, outbox.pop_front()) {
                (Ok(permit), Some(message)) => {
                    permit.send(message);
                    Now::Sent
                }
                (Ok(_), None) => Now::Sent,
                (Err(_), _) => Now::WriteFailed,
            },
            incoming = socket.stream.next(), if is_reading && !connection.has_exited => Now::Came(read(incoming)),
            command = self.commands.recv(), if takes_commands => Now::Asked(command),
            Some(signal) = self.signals.recv(), if connection.is_ready && outbox.is_empty() => Now::Signal(signal),
            Ok(()) = self.used.changed() => Now::Used,
            () = until(connection.ack_at), if connection.ack_at.is_some() => Now::AckDue,
            token = fresh(&mut self.tokens) => Now::Token(token),
            () = until(connection.reads_until), if connection.reads_until.is_some() => Now::NothingMoreToRead,
            () = tokio::time::sleep_until(silent_at), if is_reading && !connection.has_exited => Now::Silent,
            () = self.naps.over() => Now::Woke,
            () = until(connection.answers_until), if connection.answers_until.is_some() && is_reading && !connection.has_exited => {
                Now::NoAnswerAfterNap
            }
        }
    }

    /// What came, as events for the caller; an error is the end of this connection.
    fn take(&mut self, incoming: Incoming<C::Ready>, connection: &mut Connection) -> Result<(), End> {
        let step = match incoming {
            Incoming::Nothing => return Ok(()),
            Incoming::Closed { .. } | Incoming::Broken(_) if connection.is_leaving => return Err(End::Over),
            Incoming::Closed { code, reason } => {
                let told = connection.told.take();
                if told.is_none() && !connection.is_ready && code == close::UNAUTHENTICATED {
                    // A refusal, too, though in fewer words.
                    self.conversation.refused(ClientError::Closed { code, reason: reason.clone() });
                }
                return Err(End::Lost(Loss::closed(code, &reason, told)));
            }
            Incoming::Broken(cause) => return Err(End::Lost(Loss::broken(cause))),
            Incoming::Output { kind, offset, bytes } => {
                self.has_progressed();
                self.conversation.output(kind, offset, bytes)
            }
            Incoming::Frame(ServerFrame::Ready(ready)) => {
                let step = self.conversation.ready(ready);
                if step.is_ok() && !std::mem::replace(&mut connection.is_ready, true) {
                    self.is_back(connection);
                }
                step
            }
            Incoming::Frame(ServerFrame::StdinAck { seq }) => {
                self.has_progressed();
                self.typing.acked(seq);
                return Ok(());
            }
            Incoming::Frame(ServerFrame::Error { error }) => {
                let failure = ApiFailure::in_a_frame(error);
                // Before `ready` a refusal is the end, and is told as that.
                if connection.is_ready {
                    if C::IS_KEYS && failure.is_about_control() {
                        self.typing.refused();
                    }
                    self.tell(News::Refused(failure.clone()));
                }
                let error = ClientError::Api(Box::new(failure));
                connection.told = Some(if connection.is_ready { error } else { self.conversation.refused(error) });
                return Ok(());
            }
            Incoming::Frame(ServerFrame::AuthOk { .. } | ServerFrame::Pong { .. }) => return Ok(()),
            Incoming::Frame(frame) => {
                self.has_progressed();
                self.conversation.frame(frame)
            }
        };
        let (event, used) = match step.map_err(|e| End::Lost(Loss::Final(e)))? {
            Step::Nothing => return Ok(()),
            Step::Event(event) => (event, None),
            Step::Output(event, stream, end) => {
                self.received[stream as usize] = end;
                (event, Some((stream, end)))
            }
            Step::Exit(event) => {
                connection.has_exited = true;
                (event, None)
            }
        };
        self.pending.push_back(Ok((event, used)));
        Ok(())
    }

    /// The other side knows us again: it gets what it may have missed.
    fn is_back(&mut self, connection: &mut Connection) {
        if !connection.is_first {
            self.tell(News::Reconnected);
        }
        self.ready_at = Some(Instant::now());
        self.drop_old_keys();
        self.typing.start_over();
    }

    /// What is to be sent next: input as far as this connection may have it, then what was asked for after it.
    fn fill(&mut self, connection: &mut Connection) {
        while let Some((seq, bytes)) = self.typing.next() {
            connection.outbox.push_back(message::<C>(&ClientFrame::stdin(&bytes, Some(seq))));
        }
        if !self.typing.is_all_sent() {
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
                // Kept elsewhere.
                Command::Stdin(_) | Command::CloseStdin => continue,
            };
            connection.outbox.push_back(message::<C>(&frame));
        }
    }

    /// Remembers what is asked for; it is sent when its turn has come.
    pub(crate) fn note(&mut self, command: Command, at: Moment) {
        match command {
            Command::Stdin(bytes) => self.typing.push(bytes, at),
            Command::CloseStdin => self.is_stdin_closed = true,
            Command::Resize { cols, rows } => {
                self.conversation.resized(cols, rows);
                // Only the last counts.
                self.deferred.retain(|c| !matches!(c, Command::Resize { .. }));
                self.deferred.push_back(Command::Resize { cols, rows });
            }
            Command::Control(_) | Command::Close => self.deferred.push_back(command),
        }
    }

    /// Says that everything before these offsets has been used.
    fn acks(&mut self, used: Used) -> Vec<Message> {
        let mut acks = Vec::new();
        for (stream, name) in [(0, OutputStream::Stdout), (1, OutputStream::Stderr)] {
            if used[stream] > self.acked[stream] {
                self.acked[stream] = used[stream];
                acks.push(message::<C>(&ClientFrame::Ack { offset: used[stream], stream: Some(name) }));
            }
        }
        acks
    }
}

fn message<C: Conversation>(frame: &ClientFrame<C::Start>) -> Message {
    // Frames hold strings, numbers and maps with string keys: they always serialise.
    Message::text(serde_json::to_string(frame).expect("frames serialise"))
}

pub(crate) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The next token; never where there are none to come.
async fn fresh(tokens: &mut Option<watch::Receiver<Token>>) -> Token {
    if let Some(tokens) = tokens
        && tokens.changed().await.is_ok()
    {
        return tokens.borrow_and_update().clone();
    }
    std::future::pending().await
}
