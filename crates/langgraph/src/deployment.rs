//! Asking a LangGraph deployment: assistants, threads, runs.

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

/// To open a connection: a deployment that doesn't pick up in this time is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For a whole answer that is no stream; a long thread's state takes a while to write.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// A peer that vanished without closing is noticed after a few of these.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);
/// Largest answer read, in bytes: a state has every message of its thread, and the files of some agents.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;
/// Assistants that are asked for: more than anybody chooses from.
const ASSISTANTS: u32 = 100;
/// LangSmith's own keys begin so, and are shown in its own header alone.
const LANGSMITH_PREFIX: &str = "lsv2_";

/// A deployment, and what is shown to it.
#[derive(Clone)]
pub struct Deployment {
    base: String,
    pub(crate) http: reqwest::Client,
}

impl Deployment {
    /// Trusts the authorities whose certificates these are (PEM) beside the system's.
    pub fn new(url: &str, key: Option<&Secret>, authorities: Option<&[u8]>) -> Result<Self, LangGraphError> {
        install_tls();
        let invalid = |cause: String| LangGraphError::InvalidUrl { url: without_secrets(url), cause };
        let parsed = reqwest::Url::parse(url).map_err(|e| invalid(e.to_string()))?;
        if !matches!(parsed.scheme(), "http" | "https") {
            return Err(invalid(format!("`{}` is neither http nor https", parsed.scheme())));
        }
        if !parsed.username().is_empty() || parsed.password().is_some() || parsed.query().is_some() || parsed.fragment().is_some() {
            return Err(invalid("it must be an address alone, without credentials or a query".to_owned()));
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
                // A redirect would carry the key to wherever it points.
                .redirect(reqwest::redirect::Policy::none())
                .user_agent(concat!("cobox/", env!("CARGO_PKG_VERSION")));
            // No proxy can reach this machine's own deployment, and none should see its key.
            if is_loopback(parsed.host_str()) { builder.no_proxy() } else { builder }
        };
        // A machine without any certificate authorities can still speak plain HTTP, and to who is named.
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
        let found = self.ask("its assistants", Method::POST, "/assistants/search", Some(json!({"limit": ASSISTANTS}))).await?;
        Ok(found.as_array().into_iter().flatten().filter_map(Assistant::read).collect())
    }

    pub async fn create_thread(&self) -> Result<Thread, LangGraphError> {
        let what = "a new thread";
        let made = self.ask(what, Method::POST, "/threads", Some(json!({"metadata": {"created_by": "cobox"}}))).await?;
        Thread::read(&made).ok_or_else(|| self.unreadable(what))
    }

    /// What it is listed by.
    pub async fn name_thread(&self, thread: &str, title: &str) -> Result<(), LangGraphError> {
        let body = json!({"metadata": {"title": title}});
        self.ask("a thread's title", Method::PATCH, &format!("/threads/{}", segment(thread)), Some(body)).await.map(drop)
    }

    /// The ones last used first.
    pub async fn threads(&self, limit: u32) -> Result<Vec<Thread>, LangGraphError> {
        let what = "its threads";
        let mut body = json!({"limit": limit, "sort_by": "updated_at", "sort_order": "desc"});
        let all = body.clone();
        body["select"] = json!(["thread_id", "status", "updated_at", "metadata"]);
        let found = match self.ask(what, Method::POST, "/threads/search", Some(body)).await {
            // An older server, which sends what each thread holds too.
            Err(LangGraphError::Refused { status: 400 | 422, .. }) => self.ask(what, Method::POST, "/threads/search", Some(all)).await?,
            other => other?,
        };
        Ok(found.as_array().into_iter().flatten().filter_map(Thread::read).collect())
    }

    pub async fn state(&self, thread: &str) -> Result<ThreadState, LangGraphError> {
        let state = self.ask("a thread's state", Method::GET, &format!("/threads/{}/state", segment(thread)), None).await?;
        Ok(ThreadState::read(&state))
    }

    /// Its checkpoints, the last one first.
    pub async fn history(&self, thread: &str, limit: u32) -> Result<Vec<ThreadState>, LangGraphError> {
        let path = format!("/threads/{}/history", segment(thread));
        let states = self.ask("a thread's history", Method::POST, &path, Some(json!({"limit": limit}))).await?;
        Ok(states.as_array().into_iter().flatten().map(ThreadState::read).collect())
    }

    /// Starts a run, which goes on when the connection is lost or this is dropped.
    pub async fn run(&self, thread: &str, request: &RunRequest) -> Result<RunStream, LangGraphError> {
        RunStream::start(self.clone(), thread, request).await
    }

    /// Ends a run where it is; what it did so far stays.
    pub async fn cancel(&self, thread: &str, run: &str) -> Result<(), LangGraphError> {
        let path = format!("/threads/{}/runs/{}/cancel?wait=false&action=interrupt", segment(thread), segment(run));
        self.ask("the end of a run", Method::POST, &path, Some(json!({}))).await.map(drop)
    }

    async fn ask(&self, what: &'static str, method: Method, path: &str, body: Option<Value>) -> Result<Value, LangGraphError> {
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

    /// Sends it, and turns a refusal into an error.
    pub(crate) async fn checked(&self, what: &'static str, request: reqwest::RequestBuilder) -> Result<reqwest::Response, LangGraphError> {
        let no_answer =
            || LangGraphError::Transport { url: self.base.clone(), cause: format!("nothing within {} s", ANSWER_TIMEOUT.as_secs()) };
        let sent = tokio::time::timeout(ANSWER_TIMEOUT, request.send()).await.map_err(|_| no_answer())?;
        let mut response = sent.map_err(|e| self.transport(&e))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        // Of a longer page the status is enough.
        let body = self.read(&mut response, 64 * 1024).await.ok().flatten().unwrap_or_default();
        let message = match serde_json::from_slice::<Value>(&body) {
            Ok(told) => match told.get("detail").or_else(|| told.get("message")).or_else(|| told.get("error")) {
                Some(Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
                None => told.to_string(),
            },
            Err(_) => String::from_utf8_lossy(&body).into_owned(),
        };
        Err(LangGraphError::Refused { what, status: status.as_u16(), message: clean_line(&message, MAX_REFUSAL_BYTES) })
    }

    /// `None` where it is longer than that.
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

/// A URL that is refused, as it may be shown: what stands for somebody's name and password and what is asked of it is left out.
fn without_secrets(url: &str) -> String {
    let url = url.rsplit_once('@').map_or_else(|| url.to_owned(), |(_, address)| format!("…@{address}"));
    clean_line(url.split(['?', '#']).next().unwrap_or_default(), MAX_REFUSAL_BYTES)
}

/// As a step of a path, whatever it is.
pub(crate) fn segment(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// LangSmith's keys have a header of their own; what else people log in with is shown in the usual one too.
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

/// The outermost message of an HTTP error only says that sending failed; the innermost says why.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    clean_line(&error.to_string(), MAX_REFUSAL_BYTES)
}

/// The TLS library wants its cryptography named once per process.
fn install_tls() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // It fails only when the program has already chosen one, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_an_address_alone_and_a_key_is_shown_where_it_belongs() {
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
