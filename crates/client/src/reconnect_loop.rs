//! The task behind a stream: one connection after another, until what it is for has ended.

use std::{collections::VecDeque, time::Duration};

use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use crate::{
    ClientError, Dataplane,
    call::Credential,
    hold::until,
    line::{Command, Conversation, Handed, News, Used},
    nap::{Moment, Naps},
    reconnect::{Backoff, Loss},
    session::Token,
    socket::Socket,
    typing::Typing,
};

/// For one try to dial, a starting sandbox included: the next try goes on waiting for it.
const DIAL_WITHIN: Duration = Duration::from_secs(30);
/// Requests for control that wait for a connection; beyond it whoever sends waits.
const MAX_DEFERRED: usize = 16;

pub(crate) struct Driver<C: Conversation> {
    pub(crate) dataplane: Dataplane,
    pub(crate) conversation: C,
    pub(crate) events: mpsc::Sender<Handed<C::Event>>,
    pub(crate) commands: mpsc::Receiver<(Moment, Command)>,
    pub(crate) signals: mpsc::Receiver<String>,
    pub(crate) used: watch::Receiver<Used>,
    pub(crate) tokens: Option<watch::Receiver<Token>>,
    pub(crate) typing: Typing,
    pub(crate) is_stdin_closed: bool,
    /// Nobody can send commands any more.
    pub(crate) is_mute: bool,
    /// Asked for while there was no connection, or while input before them was not sent yet.
    pub(crate) deferred: VecDeque<Command>,
    pub(crate) acked: Used,
    pub(crate) received: Used,
    /// What the caller has not been told yet.
    pub(crate) pending: VecDeque<Handed<C::Event>>,
    /// Since when no connection has brought anything new.
    pub(crate) lost_since: Option<Instant>,
    /// When the present connection was let in.
    pub(crate) ready_at: Option<Instant>,
    pub(crate) has_retried_token: bool,
    pub(crate) backoff: Backoff,
    pub(crate) naps: Naps,
}

/// How waiting for something else ended.
enum Meanwhile<T> {
    Done(T),
    /// The caller has gone or wants to leave.
    Gone,
    /// This machine was asleep: whatever was under way is of another time.
    Woke,
}

pub(crate) enum End {
    /// The caller has everything, or has gone.
    Over,
    Lost(Loss),
}

impl<C: Conversation> Driver<C> {
    pub fn new(
        dataplane: Dataplane,
        conversation: C,
        events: mpsc::Sender<Handed<C::Event>>,
        (commands, signals): (mpsc::Receiver<(Moment, Command)>, mpsc::Receiver<String>),
        used: watch::Receiver<Used>,
    ) -> Self {
        // Subscribed before the handshake: a refresh during it is then still told.
        let tokens = match &dataplane.credential {
            Credential::Token(keeper) => Some(keeper.subscribe()),
            Credential::ApiKey(_) => None,
        };
        let backoff = Backoff::new(dataplane.reconnect);
        let typing = Typing::new(C::IS_KEYS.then_some(dataplane.reconnect.key_age));
        Self {
            dataplane,
            conversation,
            events,
            commands,
            signals,
            used,
            tokens,
            typing,
            is_stdin_closed: false,
            is_mute: false,
            deferred: VecDeque::new(),
            acked: [0, 0],
            received: [0, 0],
            pending: VecDeque::new(),
            lost_since: None,
            ready_at: None,
            has_retried_token: false,
            backoff,
            naps: Naps::new(),
        }
    }

    pub async fn run(mut self, mut socket: Socket) {
        let mut is_first = true;
        loop {
            let loss = match self.hold(socket, is_first).await {
                End::Over => return,
                End::Lost(loss) => loss,
            };
            is_first = false;
            if self.ready_at.take().is_some_and(|at| at.elapsed() > self.dataplane.reconnect.longest_wait) {
                // Nothing had to be said on it, but it stood.
                self.has_progressed();
            }
            socket = match self.come_back(loss).await {
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

    pub(crate) fn has_progressed(&mut self) {
        self.lost_since = None;
        self.has_retried_token = false;
        self.backoff = Backoff::new(self.dataplane.reconnect);
    }

    pub(crate) fn tell(&mut self, news: News) {
        self.pending.push_back(Ok((C::news(news), None)));
    }

    /// Dials until it answers. `None` where the caller doesn't want it any more.
    async fn come_back(&mut self, mut loss: Loss) -> Result<Option<Socket>, ClientError> {
        let lost_since = *self.lost_since.get_or_insert_with(Instant::now);
        let deadline = lost_since + self.dataplane.reconnect.give_up_after;
        let mut is_told = false;
        loop {
            let cause = match loss {
                Loss::Final(error) => return Err(error),
                Loss::Token(error) if self.has_retried_token => return Err(error),
                Loss::Token(error) => {
                    self.has_retried_token = true;
                    self.refresh_token().await?;
                    error.to_string()
                }
                Loss::Passing(cause) => cause,
            };
            tracing::debug!(route = C::ROUTE, %cause, "the connection is lost; dialling again");
            if !is_told {
                is_told = true;
                self.tell(News::Reconnecting(cause.clone()));
            }
            let wait = self.backoff.wait();
            if Instant::now() + wait >= deadline {
                return Err(ClientError::GaveUp { after: self.dataplane.reconnect.give_up_after, cause });
            }
            let dataplane = self.dataplane.clone();
            let dialling = async move {
                tokio::time::sleep(wait).await;
                // The handshake's header carries the newest token.
                tokio::time::timeout_at(deadline.min(Instant::now() + DIAL_WITHIN), dataplane.dial(C::ROUTE)).await
            };
            loss = match self.meanwhile(dialling).await {
                Meanwhile::Gone => return Ok(None),
                Meanwhile::Done(Ok(Ok(socket))) => return Ok(Some(socket)),
                Meanwhile::Done(Ok(Err(error))) => Loss::refused(error),
                Meanwhile::Done(Err(_)) => Loss::broken("no answer in time".to_owned()),
                // Somebody has just opened the lid and looks: at once, not when the last wait is over.
                Meanwhile::Woke => {
                    self.backoff = Backoff::new(self.dataplane.reconnect);
                    Loss::broken(cause)
                }
            };
        }
    }

    /// Keys pressed too long ago are forgotten, and that is said.
    pub(crate) fn drop_old_keys(&mut self) {
        match self.typing.expire(Moment::now()) {
            0 => {}
            dropped => self.tell(News::InputDropped(dropped)),
        }
    }

    async fn refresh_token(&mut self) -> Result<(), ClientError> {
        let Credential::Token(keeper) = &self.dataplane.credential else { return Ok(()) };
        let Some(tokens) = &mut self.tokens else { return Ok(()) };
        let refused = tokens.borrow_and_update().secret.clone();
        match keeper.replace(&refused).await {
            // A broker that can't be reached now is what the coming tries are for.
            Err(error) if !error.is_retryable() => Err(error),
            _ => Ok(()),
        }
    }

    /// Goes on listening to the caller while something else takes its time.
    async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Meanwhile<T> {
        let mut work = std::pin::pin!(work);
        loop {
            // At once, not when there is a connection again: whoever waits for an answer should know.
            self.drop_old_keys();
            let has_room = self.typing.has_room() && self.deferred.len() < MAX_DEFERRED;
            let expires_at = self.typing.next_expires_at();
            let command = tokio::select! {
                done = &mut work => return Meanwhile::Done(done),
                () = self.naps.over() => return Meanwhile::Woke,
                () = until(expires_at), if expires_at.is_some() => continue,
                permit = self.events.reserve(), if !self.pending.is_empty() => match (permit, self.pending.pop_front()) {
                    (Ok(permit), Some(event)) => {
                        permit.send(event);
                        continue;
                    }
                    (Ok(_), None) => continue,
                    (Err(_), _) => return Meanwhile::Gone,
                },
                command = self.commands.recv(), if !self.is_mute && has_room => command,
            };
            match command {
                Some((_, Command::Close)) => return Meanwhile::Gone,
                Some((at, command)) => self.note(command, at),
                None => self.is_mute = true,
            }
        }
    }
}
