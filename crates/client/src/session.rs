//! A session in use: its token is replaced in the background before it runs out.

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use cobox_protocol::{
    Secret, SessionId, Timestamp,
    session::{NegotiateResponse, RefreshRequest, RefreshResponse},
};
use tokio::{sync::watch, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use crate::{Client, ClientError, Dataplane, call::Credential};

/// Never more often than this, however wrong this machine's clock is.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_secs(5);
/// Between two tries of a refresh that failed for a passing reason.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// A token that ends sooner than this is replaced before a call starts with it: an upload can't be stopped half way for a new one.
const MIN_LIFE: Duration = Duration::from_secs(10);
/// A token's life is in wall-clock time, which goes on while this machine sleeps and timers don't; so the clock is looked at this often.
const CLOCK_CHECK: Duration = Duration::from_secs(10);

/// A negotiated session. Dropping it stops the refreshing and releases nothing.
pub struct Session {
    info: NegotiateResponse,
    keeper: Arc<TokenKeeper>,
    dataplane: Dataplane,
    _refreshing: AbortOnDropHandle<()>,
}

impl Session {
    pub(crate) fn new(client: Client, info: NegotiateResponse) -> Self {
        let sender = client.sender.clone();
        let base = info.sandbox.http_base_url.clone();
        let first = Token::new(info.token.clone(), info.expires_at, info.refresh_before);
        let keeper = Arc::new(TokenKeeper {
            client,
            session_id: info.session_id.clone(),
            current: watch::Sender::new(first),
            replacing: tokio::sync::Mutex::new(()),
        });
        let refreshing = AbortOnDropHandle::new(tokio::spawn(keep_fresh(keeper.clone())));
        let dataplane = Dataplane::new(sender, base, Credential::Token(keeper.clone()));
        Self { info, keeper, dataplane, _refreshing: refreshing }
    }

    /// As negotiated; its token may have been replaced since.
    pub fn info(&self) -> &NegotiateResponse {
        &self.info
    }

    pub fn dataplane(&self) -> &Dataplane {
        &self.dataplane
    }

    /// Whom the sandbox knows us as, where the token is one that can be read.
    pub fn principal(&self) -> Option<String> {
        #[derive(serde::Deserialize)]
        struct Claims {
            sub: String,
        }
        let token = self.token();
        // Our own token, told by the broker: its signature is for the sandbox to check.
        let claims = URL_SAFE_NO_PAD.decode(token.expose().split('.').nth(1)?).ok()?;
        serde_json::from_slice::<Claims>(&claims).ok().map(|claims| claims.sub)
    }

    /// The token in use now.
    pub fn token(&self) -> Secret {
        self.keeper.current.borrow().secret.clone()
    }
}

#[derive(Clone)]
pub(crate) struct Token {
    pub secret: Secret,
    expires: Moment,
    refresh: Moment,
}

/// A moment by the timers' clock and by the wall's: it has come when it has by either.
#[derive(Clone, Copy)]
struct Moment {
    timer: Instant,
    wall: Timestamp,
}

impl Moment {
    fn after(after: Duration) -> Self {
        Self { timer: Instant::now() + after, wall: Timestamp::now().plus(after) }
    }
    fn left(self) -> Duration {
        self.timer.saturating_duration_since(Instant::now()).min(self.wall.saturating_since(Timestamp::now()))
    }
    async fn comes(self) {
        while !self.left().is_zero() {
            tokio::time::sleep(self.left().min(CLOCK_CHECK)).await;
        }
    }
}

impl Token {
    fn new(secret: Secret, expires_at: Timestamp, refresh_before: Timestamp) -> Self {
        let clock = Timestamp::now();
        Self {
            secret,
            expires: Moment::after(expires_at.saturating_since(clock)),
            refresh: Moment::after(refresh_before.saturating_since(clock).max(MIN_REFRESH_INTERVAL)),
        }
    }
}

/// Holds the current token of a session and replaces it, one replacement at a time.
pub(crate) struct TokenKeeper {
    client: Client,
    session_id: SessionId,
    current: watch::Sender<Token>,
    replacing: tokio::sync::Mutex<()>,
}

impl TokenKeeper {
    /// A token to start a call with.
    pub async fn usable(&self) -> Result<Secret, ClientError> {
        let token = self.current.borrow().clone();
        if token.expires.left() > MIN_LIFE {
            return Ok(token.secret);
        }
        match self.replace(&token.secret).await {
            Ok(fresh) => Ok(fresh),
            // Our clock may be the one that is wrong: a token not yet past is worth a try.
            Err(_) if !token.expires.left().is_zero() => Ok(token.secret),
            Err(e) => Err(e),
        }
    }

    /// Replaces `old`; when somebody else just did, gives what they got.
    pub async fn replace(&self, old: &Secret) -> Result<Secret, ClientError> {
        let _one_at_a_time = self.replacing.lock().await;
        let current = self.current.borrow().secret.clone();
        if current != *old {
            return Ok(current);
        }
        // Boxed because a refresh is itself a call, and a call may refresh; with an API key it never does.
        let refreshing = Box::pin(async { self.client.refresh(&self.session_id, &RefreshRequest::default()).await });
        let RefreshResponse { token, expires_at, refresh_before } = refreshing.await?;
        self.current.send_replace(Token::new(token.clone(), expires_at, refresh_before));
        Ok(token)
    }

    /// Wakes at each new token.
    pub fn subscribe(&self) -> watch::Receiver<Token> {
        self.current.subscribe()
    }
}

/// Ends when the session has: every later call then says so itself.
async fn keep_fresh(keeper: Arc<TokenKeeper>) {
    loop {
        let token = keeper.current.borrow().clone();
        token.refresh.comes().await;
        while let Err(error) = keeper.replace(&token.secret).await {
            if !error.is_retryable() {
                tracing::debug!(session = %keeper.session_id, %error, "the session's token is not refreshed any more");
                return;
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }
}
