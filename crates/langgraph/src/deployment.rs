//! The HTTP client of a LangGraph deployment: assistants, threads, runs.

use std::{sync::Once, time::Duration};

use cobox_protocol::{Secret, host::is_loopback};
use http::{HeaderMap, HeaderValue, Method, header};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};

use crate::{
    LangGraphError, RunRequest, RunStream,
    error::MAX_REFUSAL_BYTES,
    text::clean_line,
    thread::{Assistant, Thread, ThreadState},
};

/// To open a connection. A deployment that doesn't answer within this time is considered unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For a complete response that is not a stream; writing a long thread's state takes a while.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// A peer that vanished without closing the connection is detected after a few of these.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);
/// Maximum size of a response: a state contains every message of its thread, and with some agents files too.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;
/// Maximum number of assistants requested: more than a user would choose from.
const MAX_ASSISTANTS: u32 = 100;
/// Maximum size of an error response that is read.
const MAX_ERROR_BODY_BYTES: usize = 64 * 1024;
/// Prefix of LangSmith's own keys, which are sent only in LangSmith's own header.
const LANGSMITH_PREFIX: &str = "lsv2_";

/// A deployment and the credentials for it.
#[derive(Clone)]
pub struct Deployment {
    base: String,
    pub(crate) http: reqwest::Client,
}

impl Deployment {
    /// Trusts the given certificate authorities (PEM) in addition to the system's.
    pub fn new(url: &str, key: Option<&Secret>, authorities: Option<&[u8]>) -> Result<Self, LangGraphError> {
        install_tls();
        let invalid = |cause: String| LangGraphError::InvalidUrl { url: without_secrets(url), cause };
        let parsed = reqwest::Url::parse(url).map_err(|e| invalid(e.to_string()))?;
        if !matches!(parsed.scheme(), "http" | "https") {
            return Err(invalid(format!("`{}` is neither http nor https", parsed.scheme())));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() || parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(invalid("it must have no credentials, query or fragment".to_owned()));
        }
        let roots = match authorities {
            Some(pem) => {
                reqwest::Certificate::from_pem_bundle(pem).map_err(|e| LangGraphError::InvalidAuthority { cause: innermost(&e) })?
            }
            None => Vec::new(),
        };
        let headers = credentials(key)?;
        let builder = || {
            let builder = reqwest::Client::builder()
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_keepalive(TCP_KEEPALIVE)
                .default_headers(headers.clone())
                // A redirect would send the key to another address.
                .redirect(reqwest::redirect::Policy::none())
                .user_agent(concat!("cobox/", env!("CARGO_PKG_VERSION")));
            // A proxy can't reach a deployment on this machine, and must not see its key.
            if is_loopback(parsed.host_str()) { builder.no_proxy() } else { builder }
        };
        // A machine without certificate authorities can still use plain HTTP, and HTTPS with the given authorities.
        let http = match builder().tls_certs_merge(roots.iter().cloned()).build() {
            Err(_) if parsed.scheme() == "http" || !roots.is_empty() => builder().tls_certs_only(roots.iter().cloned()).build(),
            other => other,
        };
        let http = http.map_err(|e| invalid(innermost(&e)))?;
        Ok(Self { base: url.trim_end_matches('/').to_owned(), http })
    }

    pub fn url(&self) -> &str {
        &self.base
    }

    pub async fn assistants(&self) -> Result<Vec<Assistant>, LangGraphError> {
        let found = self.call("its assistants", Method::POST, "/assistants/search", Some(json!({"limit": MAX_ASSISTANTS}))).await?;
        Ok(found.as_array().into_iter().flatten().filter_map(Assistant::read).collect())
    }

    pub async fn create_thread(&self) -> Result<Thread, LangGraphError> {
        let what = "a new thread";
        let made = self.call(what, Method::POST, "/threads", Some(json!({"metadata": {"created_by": "cobox"}}))).await?;
        Thread::read(&made).ok_or_else(|| self.unreadable(what))
    }

    /// Sets the title under which a thread is listed.
    pub async fn name_thread(&self, thread: &str, title: &str) -> Result<(), LangGraphError> {
        let body = json!({"metadata": {"title": title}});
        self.call("a thread's title", Method::PATCH, &format!("/threads/{}", segment(thread)), Some(body)).await.map(drop)
    }

    /// The threads used last, newest first.
    pub async fn threads(&self, limit: u32) -> Result<Vec<Thread>, LangGraphError> {
        let what = "its threads";
        let mut body = json!({"limit": limit, "sort_by": "updated_at", "sort_order": "desc"});
        let all = body.clone();
        body["select"] = json!(["thread_id", "status", "updated_at", "metadata"]);
        let found = match self.call(what, Method::POST, "/threads/search", Some(body)).await {
            // An older server, which can't leave out the threads' contents.
            Err(LangGraphError::Refused { status: 400 | 422, .. }) => self.call(what, Method::POST, "/threads/search", Some(all)).await?,
            other => other?,
        };
        Ok(found.as_array().into_iter().flatten().filter_map(Thread::read).collect())
    }

    pub async fn state(&self, thread: &str) -> Result<ThreadState, LangGraphError> {
        let state = self.call("a thread's state", Method::GET, &format!("/threads/{}/state", segment(thread)), None).await?;
        Ok(ThreadState::read(&state))
    }

    /// A thread's checkpoints, the newest first.
    pub async fn history(&self, thread: &str, limit: u32) -> Result<Vec<ThreadState>, LangGraphError> {
        let path = format!("/threads/{}/history", segment(thread));
        let states = self.call("a thread's history", Method::POST, &path, Some(json!({"limit": limit}))).await?;
        Ok(states.as_array().into_iter().flatten().map(ThreadState::read).collect())
    }

    /// Starts a run, which continues when the connection is lost or the stream is dropped.
    pub async fn run(&self, thread: &str, request: &RunRequest) -> Result<RunStream, LangGraphError> {
        RunStream::start(self.clone(), thread, request).await
    }

    /// Interrupts a run; its results so far are kept.
    pub async fn cancel(&self, thread: &str, run: &str) -> Result<(), LangGraphError> {
        let path = format!("/threads/{}/runs/{}/cancel?wait=false&action=interrupt", segment(thread), segment(run));
        self.call("the cancellation of a run", Method::POST, &path, Some(json!({}))).await.map(drop)
    }

    async fn call(&self, what: &'static str, method: Method, path: &str, body: Option<Value>) -> Result<Value, LangGraphError> {
        let mut request = self.http.request(method, self.at(path)).timeout(ANSWER_TIMEOUT);
        if let Some(body) = body {
            request = request.json(&body);
        }
        let mut response = self.checked(what, request).await?;
        let bytes = self.read(&mut response, MAX_ANSWER_BYTES).await?.ok_or_else(|| self.unreadable(what))?;
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&bytes).map_err(|_| self.unreadable(what))
    }

    /// Sends a request and turns an error status into an error.
    pub(crate) async fn checked(&self, what: &'static str, request: reqwest::RequestBuilder) -> Result<reqwest::Response, LangGraphError> {
        let no_answer =
            || LangGraphError::Transport { url: self.base.clone(), cause: format!("no response within {} s", ANSWER_TIMEOUT.as_secs()) };
        let sent = tokio::time::timeout(ANSWER_TIMEOUT, request.send()).await.map_err(|_| no_answer())?;
        let mut response = sent.map_err(|e| self.transport(&e))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        // If the body is larger, the status is enough.
        let body = self.read(&mut response, MAX_ERROR_BODY_BYTES).await.ok().flatten().unwrap_or_default();
        let message = match serde_json::from_slice::<Value>(&body) {
            Ok(json) => match json.get("detail").or_else(|| json.get("message")).or_else(|| json.get("error")) {
                Some(Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
                None => json.to_string(),
            },
            Err(_) => String::from_utf8_lossy(&body).into_owned(),
        };
        Err(LangGraphError::Refused { what, status: status.as_u16(), message: clean_line(&message, MAX_REFUSAL_BYTES) })
    }

    /// `None` if the body is longer than the limit.
    async fn read(&self, response: &mut reqwest::Response, max_bytes: usize) -> Result<Option<Vec<u8>>, LangGraphError> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|e| self.transport(&e))? {
            if body.len() + chunk.len() > max_bytes {
                return Ok(None);
            }
            body.extend_from_slice(&chunk);
        }
        Ok(Some(body))
    }

    pub(crate) fn at(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }
    pub(crate) fn transport(&self, error: &reqwest::Error) -> LangGraphError {
        LangGraphError::Transport { url: self.base.clone(), cause: innermost(error) }
    }
    pub(crate) fn unreadable(&self, what: &'static str) -> LangGraphError {
        LangGraphError::Unreadable { url: self.base.clone(), what }
    }
}

/// A rejected URL in a form that may be shown: without user name, password and query.
fn without_secrets(url: &str) -> String {
    let url = url.rsplit_once('@').map_or_else(|| url.to_owned(), |(_, address)| format!("…@{address}"));
    clean_line(url.split(['?', '#']).next().unwrap_or_default(), MAX_REFUSAL_BYTES)
}

/// Encodes any text as one segment of a path.
pub(crate) fn segment(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// LangSmith's keys have their own header; other credentials are sent in the usual one too.
fn credentials(key: Option<&Secret>) -> Result<HeaderMap, LangGraphError> {
    let mut headers = HeaderMap::new();
    let Some(key) = key else { return Ok(headers) };
    let sensitive = |text: &str| {
        let mut value = HeaderValue::from_str(text).map_err(|_| LangGraphError::InvalidKey)?;
        value.set_sensitive(true);
        Ok(value)
    };
    headers.insert("x-api-key", sensitive(key.expose())?);
    if !key.expose().starts_with(LANGSMITH_PREFIX) {
        headers.insert(header::AUTHORIZATION, sensitive(&format!("Bearer {}", key.expose()))?);
    }
    Ok(headers)
}

/// The outermost message of an HTTP error only says that sending failed; the innermost has the reason.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    clean_line(&error.to_string(), MAX_REFUSAL_BYTES)
}

/// The TLS library needs a cryptography provider, chosen once per process.
fn install_tls() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Ignored: it fails only if the program has already chosen one, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_have_no_credentials_and_keys_are_sent_in_the_right_headers() {
        for url in ["ftp://x", "http://a:b@x", "http://x/?key=1", "nonsense"] {
            assert!(matches!(Deployment::new(url, None, None), Err(LangGraphError::InvalidUrl { .. })), "{url}");
        }
        for url in ["http://a:hidden@x", "a:hidden@x", "http://x/?key=hidden", "http://x/#hidden", "http://x@hidden@x?hidden"] {
            assert!(!Deployment::new(url, None, None).err().unwrap().to_string().contains("hidden"), "{url}");
        }
        let of = |key: &str| credentials(Some(&Secret::new(key))).unwrap();
        assert!(of("lsv2_pt_x").get(header::AUTHORIZATION).is_none());
        assert_eq!(of("ann-secret").get(header::AUTHORIZATION).unwrap(), "Bearer ann-secret");
        assert!(credentials(Some(&Secret::new("two\nlines"))).is_err());
        assert_eq!(segment("../x"), "%2E%2E%2Fx");
    }
}
