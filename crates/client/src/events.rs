//! Event stream of a session that reconnects automatically and delivers each event once, in order.

use cobox_protocol::{
    SessionId,
    error::Envelope,
    event::{ERROR_NAME, EVENT_NAME, SandboxEvent},
};
use http::{HeaderName, HeaderValue, Method, header};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    ApiFailure, Client, ClientError, Reconnect,
    call::{Call, Credential},
    reconnect::{Backoff, ConnectionLoss},
};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Maximum size of an event, in bytes: events have a few KiB, and a server that sends more does not implement this protocol.
const MAX_EVENT_BYTES: usize = 256 * 1024;

/// Start position of a session's event stream.
#[derive(Clone, Debug, Default)]
pub enum EventsFrom {
    /// All kept events.
    #[default]
    Start,
    Now,
    /// Events after the one with this id.
    After(String),
}

pub struct EventStream {
    client: Client,
    url: String,
    from: EventsFrom,
    policy: Reconnect,
    response: Option<reqwest::Response>,
    connected_at: Instant,
    has_received: bool,
    received: Vec<u8>,
    is_over: bool,
}

impl Client {
    /// Events of a session until it ends. Connects on the first call of [`EventStream::next`].
    pub fn events(&self, id: &SessionId, from: EventsFrom) -> EventStream {
        EventStream {
            url: format!("{}/v1/sandbox/sessions/{id}/events", self.url()),
            client: self.clone(),
            from,
            policy: Reconnect::default(),
            response: None,
            connected_at: Instant::now(),
            has_received: false,
            received: Vec::new(),
            is_over: false,
        }
    }
}

impl EventStream {
    /// Next event; `None` after the session's last. Reconnects and resumes after a lost connection.
    pub async fn next(&mut self) -> Result<Option<SandboxEvent>, ClientError> {
        let (mut backoff, mut lost_at) = (Backoff::new(self.policy), None);
        loop {
            if self.is_over {
                return Ok(None);
            }
            let loss = match self.receive().await {
                Ok(event) => {
                    self.from = EventsFrom::After(event.id.to_string());
                    self.is_over = event.kind.is_last();
                    return Ok(Some(event));
                }
                Err(loss) => loss,
            };
            if self.response.take().is_some() && self.connected_at.elapsed() > self.policy.longest_wait {
                backoff = Backoff::new(self.policy);
            }
            self.received.clear();
            if std::mem::take(&mut self.has_received) {
                // Something was received, if only a keep-alive, so this is a new outage.
                lost_at = None;
            }
            let cause = match loss {
                ConnectionLoss::Transient(cause) => cause,
                ConnectionLoss::Token(error) | ConnectionLoss::Final(error) => return Err(error),
            };
            let since = *lost_at.get_or_insert_with(Instant::now);
            if since.elapsed() >= self.policy.give_up_after {
                return Err(ClientError::GaveUp { after: self.policy.give_up_after, cause });
            }
            sleep(backoff.wait()).await;
        }
    }

    async fn receive(&mut self) -> Result<SandboxEvent, ConnectionLoss> {
        if self.response.is_none() {
            let response = self.connect().await.map_err(ConnectionLoss::refused)?;
            self.response = Some(response);
            self.connected_at = Instant::now();
        }
        loop {
            while let Some(block) = self.take_block() {
                if let Some(id) = position(&block) {
                    self.from = EventsFrom::After(id);
                }
                if let Some(event) = read_block(&self.url, &block)? {
                    return Ok(event);
                }
            }
            let Some(response) = &mut self.response else { return Err(ConnectionLoss::broken("no connection".to_owned())) };
            let chunk = timeout(self.policy.silence, response.chunk()).await;
            let chunk = chunk.map_err(|_| ConnectionLoss::broken("nothing was received for too long".to_owned()))?;
            let chunk = chunk.map_err(|e| ConnectionLoss::broken(ClientError::transport(&self.url, &e).to_string()))?;
            self.has_received |= chunk.is_some();
            match chunk {
                Some(chunk) if self.received.len() + chunk.len() <= MAX_EVENT_BYTES => self.received.extend_from_slice(&chunk),
                Some(_) => return Err(ConnectionLoss::Final(self.not_cobox("the event is incomplete"))),
                None => return Err(ConnectionLoss::broken("the broker ended the stream".to_owned())),
            }
        }
    }

    async fn connect(&self) -> Result<reqwest::Response, ClientError> {
        let accept = (header::ACCEPT, HeaderValue::from_static("text/event-stream"));
        let mut call = Call::new(Method::GET, self.url.clone()).header(accept.0, accept.1);
        match &self.from {
            EventsFrom::Start => {}
            EventsFrom::Now => call.url += "?after=now",
            EventsFrom::After(id) => {
                let id = HeaderValue::from_str(id).map_err(|_| self.not_cobox("the event ID is not a valid header value"))?;
                call = call.header(LAST_EVENT_ID, id);
            }
        }
        let Credential::ApiKey(key) = &self.client.key else { return Err(ClientError::InvalidKey) };
        self.client.sender.send_once(&call, key).await
    }

    /// Removes the bytes up to the next empty line.
    fn take_block(&mut self) -> Option<Vec<u8>> {
        let end = self.received.windows(2).position(|w| w == b"\n\n")?;
        let block = self.received.drain(..end + 2).collect();
        Some(block)
    }

    fn not_cobox(&self, excerpt: &str) -> ClientError {
        ClientError::NotCobox { url: self.url.clone(), status: 200, excerpt: excerpt.to_owned() }
    }
}

/// Start position of a stream, which the broker sends before the first event. A client that reconnects before the first event resumes
/// from it.
fn position(block: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(block).ok()?;
    if text.lines().any(|line| line.starts_with("data:")) {
        return None;
    }
    let id = text.lines().find_map(|line| line.strip_prefix("id:"))?.trim();
    (!id.is_empty()).then(|| id.to_owned())
}

/// Parses an event; `None` for a comment or an unknown event type.
fn read_block(url: &str, block: &[u8]) -> Result<Option<SandboxEvent>, ConnectionLoss> {
    let unreadable = || {
        ConnectionLoss::Final(ClientError::NotCobox { url: url.to_owned(), status: 200, excerpt: "the event can't be parsed".to_owned() })
    };
    let text = std::str::from_utf8(block).map_err(|_| unreadable())?;
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim_start);
    let Some(data) = field("data:") else { return Ok(None) };
    match field("event:") {
        Some(EVENT_NAME) => serde_json::from_str(data).map(Some).map_err(|_| unreadable()),
        Some(ERROR_NAME) => {
            let Envelope { error } = serde_json::from_str(data).map_err(|_| unreadable())?;
            Err(ConnectionLoss::refused(ClientError::Api(Box::new(ApiFailure::from_frame(error)))))
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_position_is_read_before_the_first_event() {
        let position = |text: &str| position(text.as_bytes());
        assert_eq!(position("id: evt_7\nretry: 1000\n\n").as_deref(), Some("evt_7"));
        assert_eq!(position("id:\nretry: 1000\n\n"), None);
        assert_eq!(position("retry: 1000\n\n"), None);
        assert_eq!(position("id: evt_7\nevent: sandbox\ndata: {}\n\n"), None, "an event is acknowledged when it was returned");
    }

    #[test]
    fn comments_and_unknown_events_are_ignored_and_errors_are_returned() {
        let read = |text: &str| read_block("http://x", text.as_bytes());
        assert!(matches!(read(":\n\n"), Ok(None)));
        assert!(matches!(read("retry: 1000\n\n"), Ok(None)));
        assert!(matches!(read("event: later\ndata: {}\n\n"), Ok(None)));
        assert!(matches!(read("event: sandbox\ndata: {}\n\n"), Err(ConnectionLoss::Final(ClientError::NotCobox { .. }))));
        let refused = |code: &str, retryable: bool| {
            let error = serde_json::json!({ "code": code, "message": "m", "retryable": retryable, "request_id": "r" });
            read(&format!("event: error\ndata: {}\n\n", serde_json::json!({ "error": error })))
        };
        assert!(matches!(refused("TOKEN_REVOKED", false), Err(ConnectionLoss::Final(ClientError::Api(_)))));
        assert!(matches!(refused("RATE_LIMITED", true), Err(ConnectionLoss::Transient(_))));
    }
}
