//! View of a sandbox's files: directory lists and a stream of changes.

use cobox_protocol::{
    error::Envelope,
    fs::{ListRequest, ListResponse},
    watch::{WatchEvent, WatchOverflow},
};
use http::{HeaderName, HeaderValue, Method, header};
use tokio::time::{Duration, Instant, sleep, timeout};

use crate::{
    ApiFailure, ClientError, Dataplane,
    call::{Call, read_json},
    path::encode_segment,
    reconnect::{Backoff, ConnectionLoss},
};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Maximum size of a page of a list: the maximum number of entries, each with the longest name.
const MAX_LIST_BYTES: usize = 64 * 1024 * 1024;
/// Timeout for a page of a list; a directory with a million entries takes a while to sort.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum size of an event, in bytes: more than three times two escaped paths of 4096 bytes.
const MAX_EVENT_BYTES: usize = 256 * 1024;

/// A file change, or the notice that changes were lost.
#[derive(Clone, Debug)]
pub enum FileWatchEvent {
    /// The watch is active: all later changes follow. Earlier state can be listed.
    Watching,
    Created(WatchEvent),
    Modified(WatchEvent),
    Removed(WatchEvent),
    Renamed(WatchEvent),
    /// Changes were lost; list the files again.
    Overflow(WatchOverflow),
}

/// Stream of file changes that reconnects automatically and resumes at its cursor.
pub struct FileWatch {
    dataplane: Dataplane,
    url: String,
    cursor: Option<String>,
    response: Option<reqwest::Response>,
    received: Vec<u8>,
    is_over: bool,
}

impl Dataplane {
    /// Lists one page of a directory.
    pub async fn list_files(&self, request: &ListRequest) -> Result<ListResponse, ClientError> {
        let call = Call::new(Method::POST, self.url("/fs/list")).json(request).timeout(LIST_TIMEOUT);
        let response = self.sender.send(&call, &self.credential).await?;
        read_json(&call.url, response, MAX_LIST_BYTES).await
    }

    /// Watches the files below a directory for changes by any author. Connects on the first call of [`FileWatch::next`].
    pub fn watch_files(&self, path: &[u8]) -> FileWatch {
        let url = self.url(&format!("/watch?path={}", encode_segment(path)));
        FileWatch { dataplane: self.clone(), url, cursor: None, response: None, received: Vec::new(), is_over: false }
    }
}

impl FileWatch {
    /// Next change; `None` when the watched directory is gone.
    pub async fn next(&mut self) -> Result<Option<FileWatchEvent>, ClientError> {
        let policy = self.dataplane.reconnect;
        let (mut backoff, mut lost_at) = (Backoff::new(policy), None);
        loop {
            if self.is_over {
                return Ok(None);
            }
            let cause = match self.receive().await {
                Ok(event) => {
                    self.is_over = matches!(&event, FileWatchEvent::Overflow(o) if o.reason == cobox_protocol::watch::OverflowReason::Gone);
                    return Ok(Some(event));
                }
                Err(ConnectionLoss::Transient(cause)) => cause,
                Err(ConnectionLoss::Token(error) | ConnectionLoss::Final(error)) => return Err(error),
            };
            self.response = None;
            self.received.clear();
            let since = *lost_at.get_or_insert_with(Instant::now);
            if since.elapsed() >= policy.give_up_after {
                return Err(ClientError::GaveUp { after: policy.give_up_after, cause });
            }
            sleep(backoff.wait()).await;
        }
    }

    async fn receive(&mut self) -> Result<FileWatchEvent, ConnectionLoss> {
        if self.response.is_none() {
            let mut call = Call::new(Method::GET, self.url.clone()).header(header::ACCEPT, HeaderValue::from_static("text/event-stream"));
            if let Some(cursor) = &self.cursor {
                let cursor = HeaderValue::from_str(cursor).map_err(|_| self.unreadable())?;
                call = call.header(LAST_EVENT_ID, cursor);
            }
            let response = self.dataplane.sender.send(&call, &self.dataplane.credential).await.map_err(ConnectionLoss::refused)?;
            self.response = Some(response);
        }
        loop {
            while let Some(end) = self.received.windows(2).position(|w| w == b"\n\n") {
                let block: Vec<u8> = self.received.drain(..end + 2).collect();
                if let Some(event) = self.read_block(&block)? {
                    return Ok(event);
                }
            }
            let Some(response) = &mut self.response else { return Err(ConnectionLoss::broken("no connection".to_owned())) };
            let chunk = timeout(self.dataplane.reconnect.silence, response.chunk()).await;
            let chunk = chunk.map_err(|_| ConnectionLoss::broken("nothing was received for too long".to_owned()))?;
            match chunk.map_err(|e| ConnectionLoss::broken(ClientError::transport(&self.url, &e).to_string()))? {
                Some(chunk) if self.received.len() + chunk.len() <= MAX_EVENT_BYTES => self.received.extend_from_slice(&chunk),
                Some(_) => return Err(self.unreadable()),
                None => return Err(ConnectionLoss::broken("the sandbox ended the stream".to_owned())),
            }
        }
    }

    fn read_block(&mut self, block: &[u8]) -> Result<Option<FileWatchEvent>, ConnectionLoss> {
        let text = std::str::from_utf8(block).map_err(|_| self.unreadable())?;
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim_start);
        if let Some(cursor) = field("id:") {
            self.cursor = Some(cursor.to_owned());
        }
        let Some(name) = field("event:") else { return Ok(None) };
        let data = field("data:").unwrap_or("null");
        let change = |of: fn(WatchEvent) -> FileWatchEvent| serde_json::from_str(data).map(|e| Some(of(e))).map_err(|_| self.unreadable());
        match name {
            "ready" => Ok(Some(FileWatchEvent::Watching)),
            "created" => change(FileWatchEvent::Created),
            "modified" => change(FileWatchEvent::Modified),
            "removed" => change(FileWatchEvent::Removed),
            "renamed" => change(FileWatchEvent::Renamed),
            "overflow" => serde_json::from_str(data).map(|o| Some(FileWatchEvent::Overflow(o))).map_err(|_| self.unreadable()),
            "error" => {
                let Envelope { error } = serde_json::from_str(data).map_err(|_| self.unreadable())?;
                // The next connection uses a new token.
                let error = ClientError::Api(Box::new(ApiFailure::from_frame(error)));
                let is_expired = error.is(cobox_protocol::ErrorCode::TokenExpired);
                Err(if is_expired { ConnectionLoss::broken(error.to_string()) } else { ConnectionLoss::refused(error) })
            }
            _ => Ok(None),
        }
    }

    fn unreadable(&self) -> ConnectionLoss {
        let excerpt = "the change can't be parsed".to_owned();
        ConnectionLoss::Final(ClientError::NotCobox { url: self.url.clone(), status: 200, excerpt })
    }
}
