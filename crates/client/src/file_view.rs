//! Looking at a sandbox's files as a whole: a list of what is there, and a stream of what changes.

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
    reconnect::{Backoff, Loss},
};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Largest page of a list, in bytes: the most entries a server gives, each with the longest of names.
const MAX_LIST: usize = 64 * 1024 * 1024;
/// For a page of a list; a directory of a million takes a while to sort.
const LIST_WITHIN: Duration = Duration::from_secs(60);
/// Longest event read, in bytes: two paths of 4096 bytes each, escaped, and more than twice that again.
const MAX_EVENT_BYTES: usize = 256 * 1024;

/// One change, or word that some were lost.
#[derive(Clone, Debug)]
pub enum FileNews {
    /// All that follows is told; what was before can be listed.
    Watching,
    Created(WatchEvent),
    Modified(WatchEvent),
    Removed(WatchEvent),
    Renamed(WatchEvent),
    /// Look at the files again.
    Overflow(WatchOverflow),
}

/// Comes back by itself after a lost connection, from where it broke off.
pub struct FileWatch {
    dataplane: Dataplane,
    url: String,
    cursor: Option<String>,
    response: Option<reqwest::Response>,
    received: Vec<u8>,
    is_over: bool,
}

impl Dataplane {
    /// A page of what is in a directory.
    pub async fn list_files(&self, request: &ListRequest) -> Result<ListResponse, ClientError> {
        let call = Call::new(Method::POST, self.url("/fs/list")).json(request).timeout(LIST_WITHIN);
        let response = self.sender.send(&call, &self.credential).await?;
        read_json(&call.url, response, MAX_LIST).await
    }

    /// What happens to the files below a directory, by whomever. The first connection is made when the first change is asked for.
    pub fn watch_files(&self, path: &[u8]) -> FileWatch {
        let url = self.url(&format!("/watch?path={}", encode_segment(path)));
        FileWatch { dataplane: self.clone(), url, cursor: None, response: None, received: Vec::new(), is_over: false }
    }
}

impl FileWatch {
    /// `None` when what was watched is gone.
    pub async fn next(&mut self) -> Result<Option<FileNews>, ClientError> {
        let policy = self.dataplane.reconnect;
        let (mut backoff, mut lost_at) = (Backoff::new(policy), None);
        loop {
            if self.is_over {
                return Ok(None);
            }
            let cause = match self.receive().await {
                Ok(news) => {
                    self.is_over = matches!(&news, FileNews::Overflow(o) if o.reason == cobox_protocol::watch::OverflowReason::Gone);
                    return Ok(Some(news));
                }
                Err(Loss::Passing(cause)) => cause,
                Err(Loss::Token(error) | Loss::Final(error)) => return Err(error),
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

    async fn receive(&mut self) -> Result<FileNews, Loss> {
        if self.response.is_none() {
            let mut call = Call::new(Method::GET, self.url.clone()).header(header::ACCEPT, HeaderValue::from_static("text/event-stream"));
            if let Some(cursor) = &self.cursor {
                let cursor = HeaderValue::from_str(cursor).map_err(|_| self.unreadable())?;
                call = call.header(LAST_EVENT_ID, cursor);
            }
            let response = self.dataplane.sender.send(&call, &self.dataplane.credential).await.map_err(Loss::refused)?;
            self.response = Some(response);
        }
        loop {
            while let Some(end) = self.received.windows(2).position(|w| w == b"\n\n") {
                let block: Vec<u8> = self.received.drain(..end + 2).collect();
                if let Some(news) = self.read_block(&block)? {
                    return Ok(news);
                }
            }
            let Some(response) = &mut self.response else { return Err(Loss::broken("no connection".to_owned())) };
            let chunk = timeout(self.dataplane.reconnect.silence, response.chunk()).await;
            let chunk = chunk.map_err(|_| Loss::broken("nothing was heard for too long".to_owned()))?;
            match chunk.map_err(|e| Loss::broken(ClientError::transport(&self.url, &e).to_string()))? {
                Some(chunk) if self.received.len() + chunk.len() <= MAX_EVENT_BYTES => self.received.extend_from_slice(&chunk),
                Some(_) => return Err(self.unreadable()),
                None => return Err(Loss::broken("the sandbox ended the stream".to_owned())),
            }
        }
    }

    fn read_block(&mut self, block: &[u8]) -> Result<Option<FileNews>, Loss> {
        let text = std::str::from_utf8(block).map_err(|_| self.unreadable())?;
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim_start);
        if let Some(cursor) = field("id:") {
            self.cursor = Some(cursor.to_owned());
        }
        let Some(name) = field("event:") else { return Ok(None) };
        let data = field("data:").unwrap_or("null");
        let change = |of: fn(WatchEvent) -> FileNews| serde_json::from_str(data).map(|e| Some(of(e))).map_err(|_| self.unreadable());
        match name {
            "ready" => Ok(Some(FileNews::Watching)),
            "created" => change(FileNews::Created),
            "modified" => change(FileNews::Modified),
            "removed" => change(FileNews::Removed),
            "renamed" => change(FileNews::Renamed),
            "overflow" => serde_json::from_str(data).map(|o| Some(FileNews::Overflow(o))).map_err(|_| self.unreadable()),
            "error" => {
                let Envelope { error } = serde_json::from_str(data).map_err(|_| self.unreadable())?;
                // A token that ran out is replaced by the next connection.
                let error = ClientError::Api(Box::new(ApiFailure::in_a_frame(error)));
                let is_expired = error.is(cobox_protocol::ErrorCode::TokenExpired);
                Err(if is_expired { Loss::broken(error.to_string()) } else { Loss::refused(error) })
            }
            _ => Ok(None),
        }
    }

    fn unreadable(&self) -> Loss {
        let excerpt = "a change that can't be read".to_owned();
        Loss::Final(ClientError::NotCobox { url: self.url.clone(), status: 200, excerpt })
    }
}
