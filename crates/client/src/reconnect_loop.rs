//! Task of a stream: opens one connection after another until the stream ends.

use std::{collections::VecDeque, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use crate::{
    ClientError, Dataplane,
    call::Credential,
    connection::until,
    pending_input::PendingInput,
    reconnect::{Backoff, ConnectionLoss},
    session::Token,
    sleep_detector::{SleepAwareInstant, SleepDetector},
    socket::Socket,
    stream::{Command, ConsumedOffsets, Delivery, Notice, StreamHandler},
};

/// Timeout of one connection attempt, including the wait for a starting sandbox; the next attempt continues to wait for it.
const DIAL_WITHIN: Duration = Duration::from_secs(30);
/// Maximum number of commands queued without a connection; when it is reached, the sender waits.
const MAX_DEFERRED: usize = 16;

pub(crate) struct ReconnectLoop<C: StreamHandler> {
    pub(crate) dataplane: Dataplane,
    pub(crate) handler: C,
    pub(crate) events: mpsc::Sender<Delivery<C::Event>>,
    pub(crate) commands: mpsc::Receiver<(SleepAwareInstant, Command)>,
    pub(crate) signals: mpsc::Receiver<String>,
    pub(crate) consumed: watch::Receiver<ConsumedOffsets>,
    pub(crate) tokens: Option<watch::Receiver<Token>>,
    pub(crate) input: PendingInput,
    pub(crate) is_stdin_closed: bool,
    /// All senders of commands were dropped.
    pub(crate) has_no_senders: bool,
    /// Commands issued without a connection, or behind input that was not sent yet.
    pub(crate) deferred: VecDeque<Command>,
    pub(crate) acked: ConsumedOffsets,
    pub(crate) received: ConsumedOffsets,
    /// Events not delivered to the caller yet.
    pub(crate) pending: VecDeque<Delivery<C::Event>>,
    /// Start of the current outage: set until a connection makes progress.
    pub(crate) lost_since: Option<Instant>,
    /// When the current connection became ready.
    pub(crate) ready_at: Option<Instant>,
    pub(crate) has_retried_token: bool,
    pub(crate) backoff: Backoff,
    pub(crate) sleep_detector: SleepDetector,
}

/// Result of waiting for other work while serving the caller.
enum WaitOutcome<T> {
    Done(T),
    /// The caller dropped or closed the stream.
    Gone,
    /// This machine was asleep; work in progress is outdated.
    WokeUp,
}

pub(crate) enum ConnectionEnd {
    /// The caller has received everything, or dropped the stream.
    Over,
    Lost(ConnectionLoss),
}

impl<C: StreamHandler> ReconnectLoop<C> {
    pub fn new(
        dataplane: Dataplane,
        handler: C,
        events: mpsc::Sender<Delivery<C::Event>>,
        (commands, signals): (mpsc::Receiver<(SleepAwareInstant, Command)>, mpsc::Receiver<String>),
        consumed: watch::Receiver<ConsumedOffsets>,
    ) -> Self {
        // Subscribe before the handshake, so that a refresh during the handshake is not missed.
        let tokens = match &dataplane.credential {
            Credential::Token(refresher) => Some(refresher.subscribe()),
            Credential::ApiKey(_) => None,
        };
        let backoff = Backoff::new(dataplane.reconnect);
        let input = PendingInput::new(C::IS_KEYS.then_some(dataplane.reconnect.key_age));
        Self {
            dataplane,
            handler,
            events,
            commands,
            signals,
            consumed,
            tokens,
            input,
            is_stdin_closed: false,
            has_no_senders: false,
            deferred: VecDeque::new(),
            acked: [0, 0],
            received: [0, 0],
            pending: VecDeque::new(),
            lost_since: None,
            ready_at: None,
            has_retried_token: false,
            backoff,
            sleep_detector: SleepDetector::new(),
        }
    }

    pub async fn run(mut self, mut socket: Socket) {
        let mut is_first = true;
        loop {
            let loss = match self.run_connection(socket, is_first).await {
                ConnectionEnd::Over => return,
                ConnectionEnd::Lost(loss) => loss,
            };
            is_first = false;
            if self.ready_at.take().is_some_and(|at| at.elapsed() > self.dataplane.reconnect.longest_wait) {
                // The connection was idle but stable.
                self.record_progress();
            }
            socket = match self.reconnect(loss).await {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(error) => {
                    self.pending.push_back(Err(error));
                    while let Some(event) = self.pending.pop_front() {
                        if self.events.send(event).await.is_err() {
                            return;
                        }
                    }
                    return;
                }
            };
        }
    }

    pub(crate) fn record_progress(&mut self) {
        self.lost_since = None;
        self.has_retried_token = false;
        self.backoff = Backoff::new(self.dataplane.reconnect);
    }

    pub(crate) fn notify(&mut self, notice: Notice) {
        self.pending.push_back(Ok((C::notice(notice), None)));
    }

    /// Connects repeatedly until it succeeds. `None` if the caller dropped or closed the stream.
    async fn reconnect(&mut self, mut loss: ConnectionLoss) -> Result<Option<Socket>, ClientError> {
        let lost_since = *self.lost_since.get_or_insert_with(Instant::now);
        let deadline = lost_since + self.dataplane.reconnect.give_up_after;
        let mut is_notified = false;
        loop {
            let cause = match loss {
                ConnectionLoss::Final(error) => return Err(error),
                ConnectionLoss::Token(error) if self.has_retried_token => return Err(error),
                ConnectionLoss::Token(error) => {
                    self.has_retried_token = true;
                    self.refresh_token().await?;
                    error.to_string()
                }
                ConnectionLoss::Transient(cause) => cause,
            };
            tracing::debug!(route = C::ROUTE, %cause, "connection lost; reconnecting");
            if !is_notified {
                is_notified = true;
                self.notify(Notice::Reconnecting(cause.clone()));
            }
            let wait = self.backoff.wait();
            if Instant::now() + wait >= deadline {
                return Err(ClientError::GaveUp { after: self.dataplane.reconnect.give_up_after, cause });
            }
            let dataplane = self.dataplane.clone();
            let connecting = async move {
                tokio::time::sleep(wait).await;
                // The handshake's header contains the newest token.
                tokio::time::timeout_at(deadline.min(Instant::now() + DIAL_WITHIN), dataplane.dial(C::ROUTE)).await
            };
            loss = match self.wait_for(connecting).await {
                WaitOutcome::Gone => return Ok(None),
                WaitOutcome::Done(Ok(Ok(socket))) => return Ok(Some(socket)),
                WaitOutcome::Done(Ok(Err(error))) => ConnectionLoss::refused(error),
                WaitOutcome::Done(Err(_)) => ConnectionLoss::broken("no response in time".to_owned()),
                // The user has just opened the lid: reconnect immediately instead of after the previous wait.
                WaitOutcome::WokeUp => {
                    self.backoff = Backoff::new(self.dataplane.reconnect);
                    ConnectionLoss::broken(cause)
                }
            };
        }
    }

    /// Drops keystrokes that are too old, and notifies the caller.
    pub(crate) fn drop_old_keys(&mut self) {
        match self.input.expire(SleepAwareInstant::now()) {
            0 => {}
            dropped => self.notify(Notice::InputDropped(dropped)),
        }
    }

    async fn refresh_token(&mut self) -> Result<(), ClientError> {
        let Credential::Token(refresher) = &self.dataplane.credential else { return Ok(()) };
        let Some(tokens) = &mut self.tokens else { return Ok(()) };
        let refused = tokens.borrow_and_update().secret.clone();
        match refresher.replace(&refused).await {
            // If the broker is unreachable, the next attempts try again.
            Err(error) if !error.is_retryable() => Err(error),
            _ => Ok(()),
        }
    }

    /// Continues to serve the caller while other work is in progress.
    async fn wait_for<T>(&mut self, work: impl Future<Output = T>) -> WaitOutcome<T> {
        let mut work = std::pin::pin!(work);
        loop {
            // Immediately, not after the reconnect, so that the user learns that the input was dropped.
            self.drop_old_keys();
            let has_capacity = self.input.has_capacity() && self.deferred.len() < MAX_DEFERRED;
            let expires_at = self.input.next_expires_at();
            let command = tokio::select! {
                done = &mut work => return WaitOutcome::Done(done),
                () = self.sleep_detector.woke_up() => return WaitOutcome::WokeUp,
                () = until(expires_at), if expires_at.is_some() => continue,
                permit = self.events.reserve(), if !self.pending.is_empty() => match (permit, self.pending.pop_front()) {
                    (Ok(permit), Some(event)) => {
                        permit.send(event);
                        continue;
                    }
                    (Ok(_), None) => continue,
                    (Err(_), _) => return WaitOutcome::Gone,
                },
                command = self.commands.recv(), if !self.has_no_senders && has_capacity => command,
            };
            match command {
                Some((_, Command::Close)) => return WaitOutcome::Gone,
                Some((at, command)) => self.queue(command, at),
                None => self.has_no_senders = true,
            }
        }
    }
}
