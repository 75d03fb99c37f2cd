//! A session in use: a background task refreshes its token before it expires and sends heartbeats that keep its sandbox from becoming idle.

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    Secret, SessionId, Timestamp,
    session::{NegotiateResponse, RefreshRequest, RefreshResponse},
};
use tokio::{sync::watch, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use crate::{Client, ClientError, Dataplane, call::Credential};

/// Minimum time between two refreshes, even if this machine's clock is wrong.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_secs(5);
/// Wait after a refresh that failed for a transient reason.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// A token with less remaining lifetime is replaced before a call uses it, because an upload cannot be interrupted for a new token.
const MIN_REMAINING_LIFETIME: Duration = Duration::from_secs(10);
/// Interval for checking the wall clock: tokens expire by wall-clock time, which advances while this machine sleeps, unlike timers.
const CLOCK_CHECK: Duration = Duration::from_secs(10);

/// Heartbeats within the idle timeout of a sandbox: two of them may get lost.
const HEARTBEATS_PER_IDLE_TIMEOUT: u32 = 3;
/// Bounds of the heartbeat interval: the minimum holds for any idle timeout, the maximum allows for a policy that becomes stricter.
const MIN_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
const MAX_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(300);

/// A negotiated session. While it exists, its token is kept fresh and its lease is extended, even without calls. Dropping it stops both,
/// but does not release the session.
pub struct Session {
    info: NegotiateResponse,
    refresher: Arc<TokenRefresher>,
    dataplane: Dataplane,
    _keep_alive: AbortOnDropHandle<()>,
}

impl Session {
    pub(crate) fn new(client: Client, info: NegotiateResponse) -> Self {
        let sender = client.sender.clone();
        let base = info.sandbox.http_base_url.clone();
        let first = Token::new(info.token.clone(), info.expires_at, info.refresh_before);
        let refresher = Arc::new(TokenRefresher {
            client,
            session_id: info.session_id.clone(),
            current: watch::Sender::new(first),
            replacing: tokio::sync::Mutex::new(()),
        });
        let idle_timeout = Duration::from_secs(info.policy.idle_timeout_seconds);
        let heartbeat_interval = (idle_timeout / HEARTBEATS_PER_IDLE_TIMEOUT).clamp(MIN_HEARTBEAT_INTERVAL, MAX_HEARTBEAT_INTERVAL);
        let keep_alive_task = AbortOnDropHandle::new(tokio::spawn(keep_alive(refresher.clone(), heartbeat_interval)));
        let dataplane = Dataplane::new(sender, base, Credential::Token(refresher.clone()));
        Self { info, refresher, dataplane, _keep_alive: keep_alive_task }
    }

    /// The negotiated session; its token may have been replaced since.
    pub fn info(&self) -> &NegotiateResponse {
        &self.info
    }

    pub fn dataplane(&self) -> &Dataplane {
        &self.dataplane
    }

    /// Principal of the token, if the token is a JWT.
    pub fn principal(&self) -> Option<String> {
        #[derive(serde::Deserialize)]
        struct Claims {
            sub: String,
        }
        let token = self.token();
        // The token comes from the broker; its signature is verified by the sandbox.
        let claims = URL_SAFE_NO_PAD.decode(token.expose().split('.').nth(1)?).ok()?;
        serde_json::from_slice::<Claims>(&claims).ok().map(|claims| claims.sub)
    }

    /// Current token.
    pub fn token(&self) -> Secret {
        self.refresher.current.borrow().secret.clone()
    }
}

#[derive(Clone)]
pub(crate) struct Token {
    pub secret: Secret,
    expires: SleepAwareDeadline,
    refresh: SleepAwareDeadline,
}

/// A deadline on the timer clock and on the wall clock; it is reached when either clock reaches it.
#[derive(Clone, Copy)]
struct SleepAwareDeadline {
    timer: Instant,
    wall: Timestamp,
}

impl SleepAwareDeadline {
    fn after(after: Duration) -> Self {
        Self { timer: Instant::now() + after, wall: Timestamp::now().plus(after) }
    }
    fn remaining(self) -> Duration {
        self.timer.saturating_duration_since(Instant::now()).min(self.wall.saturating_since(Timestamp::now()))
    }
    async fn reached(self) {
        while !self.remaining().is_zero() {
            tokio::time::sleep(self.remaining().min(CLOCK_CHECK)).await;
        }
    }
}

impl Token {
    fn new(secret: Secret, expires_at: Timestamp, refresh_before: Timestamp) -> Self {
        let clock = Timestamp::now();
        Self {
            secret,
            expires: SleepAwareDeadline::after(expires_at.saturating_since(clock)),
            refresh: SleepAwareDeadline::after(refresh_before.saturating_since(clock).max(MIN_REFRESH_INTERVAL)),
        }
    }
}

/// Holds the current token of a session and replaces it, one replacement at a time.
pub(crate) struct TokenRefresher {
    client: Client,
    session_id: SessionId,
    current: watch::Sender<Token>,
    replacing: tokio::sync::Mutex<()>,
}

impl TokenRefresher {
    /// Returns a token for a new call.
    pub async fn valid_token(&self) -> Result<Secret, ClientError> {
        let token = self.current.borrow().clone();
        if token.expires.remaining() > MIN_REMAINING_LIFETIME {
            return Ok(token.secret);
        }
        match self.replace(&token.secret).await {
            Ok(fresh) => Ok(fresh),
            // The local clock may be wrong, so a token that has not expired yet is still used.
            Err(_) if !token.expires.remaining().is_zero() => Ok(token.secret),
            Err(e) => Err(e),
        }
    }

    /// Replaces `old`; if another task has just replaced it, returns that token.
    pub async fn replace(&self, old: &Secret) -> Result<Secret, ClientError> {
        let _one_at_a_time = self.replacing.lock().await;
        let current = self.current.borrow().secret.clone();
        if current != *old {
            return Ok(current);
        }
        // Boxed, because a refresh is a call and a call may refresh; a call with an API key never does.
        let refreshing = Box::pin(async { self.client.refresh(&self.session_id, &RefreshRequest::default()).await });
        let RefreshResponse { token, expires_at, refresh_before } = refreshing.await?;
        self.current.send_replace(Token::new(token.clone(), expires_at, refresh_before));
        Ok(token)
    }

    /// Receives each new token.
    pub fn subscribe(&self) -> watch::Receiver<Token> {
        self.current.subscribe()
    }
}

/// Refreshes the token and sends heartbeats until the session ends; later calls then return that error.
async fn keep_alive(refresher: Arc<TokenRefresher>, heartbeat_interval: Duration) {
    let mut heartbeat_at = Some(Instant::now() + heartbeat_interval);
    loop {
        let token = refresher.current.borrow().clone();
        tokio::select! {
            () = token.refresh.reached() => {
                while let Err(error) = refresher.replace(&token.secret).await {
                    if !error.is_retryable() {
                        tracing::debug!(session = %refresher.session_id, %error, "token refresh failed permanently; stopping");
                        return;
                    }
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                // A refresh also counts as activity.
                heartbeat_at = heartbeat_at.map(|_| Instant::now() + heartbeat_interval);
            }
            () = at(heartbeat_at) => {
                heartbeat_at = match refresher.client.heartbeat(&refresher.session_id).await {
                    Err(error) if !error.is_retryable() => {
                        tracing::debug!(session = %refresher.session_id, %error, "heartbeat failed permanently; stopping heartbeats");
                        None
                    }
                    // The next heartbeat compensates for a lost one.
                    _ => Some(Instant::now() + heartbeat_interval),
                };
            }
        }
    }
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
