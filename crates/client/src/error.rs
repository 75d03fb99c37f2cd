//! Errors of the client, with codes for programs and advice for users.

use cobox_protocol::{
    ErrorCode,
    error::{Envelope, ErrorBody},
    frame::{OutputStream, close},
};

/// Maximum error body read from a server, in bytes: an envelope is well below it, and other error pages need not be read completely.
const MAX_ERROR_BODY: usize = 64 * 1024;
/// Maximum excerpt of a response that is not an envelope, in characters: enough to recognize a proxy's error page.
const MAX_EXCERPT: usize = 200;

/// WebSocket code for a connection that ended without a close frame.
pub(crate) const ABNORMAL_CLOSURE: u16 = 1006;

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server refused the request.
    #[error("{0}")]
    Api(Box<ApiFailure>),
    /// No response was received, or only a part of it.
    #[error("no response from {url}: {cause}")]
    Transport { url: String, cause: String },
    /// The response is not from a Cobox server.
    #[error("{url} returned {status} with a body that is not a Cobox response: {excerpt}")]
    NotCobox { url: String, status: u16, excerpt: String },
    #[error("invalid CA certificates: {cause}")]
    InvalidAuthority { cause: String },
    #[error("`{url}` is not a usable broker URL: {cause}")]
    InvalidUrl { url: String, cause: String },
    #[error("`{path}` is not a usable path in a sandbox: {cause}")]
    InvalidPath { path: String, cause: &'static str },
    #[error("the API key contains characters that are not valid in a header")]
    InvalidKey,
    /// The data to upload could not be read locally.
    #[error("reading the data to upload: {0}")]
    Source(#[from] std::io::Error),
    /// The server closed a stream with a reason.
    #[error("the connection was closed ({code}): {reason}")]
    Closed { code: u16, reason: String },
    /// A stream's connection was lost and could not be restored.
    #[error("the connection was lost and could not be restored within {} s: {cause}", .after.as_secs())]
    GaveUp { after: std::time::Duration, cause: String },
    /// The connection was lost while a command was being started, and the sandbox does not know the command: it did not receive it, or was
    /// restarted since.
    #[error(
        "the connection was lost while command {command_id} was being started, and the sandbox does not know the command: it may or may not have run"
    )]
    MayHaveRun { command_id: String },
    /// Output is missing and the sandbox did not report a gap.
    #[error("bytes {from} to {to} of the {} are missing", name_of(*.stream))]
    MissingOutput { stream: OutputStream, from: u64, to: u64 },
}

/// A received error envelope with its HTTP status.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message} ({code})")]
pub struct ApiFailure {
    pub status: u16,
    pub code: String,
    pub message: String,
    pub retryable: bool,
    pub request_id: String,
    /// Seconds, from `Retry-After`.
    pub retry_after: Option<u64>,
    pub details: Option<serde_json::Value>,
}

impl ApiFailure {
    /// From a WebSocket or event stream, which has no status for a single error.
    pub(crate) fn from_frame(error: ErrorBody) -> Self {
        Self {
            status: http::StatusCode::SWITCHING_PROTOCOLS.as_u16(),
            code: error.code,
            message: error.message,
            retryable: error.retryable,
            request_id: error.request_id,
            retry_after: None,
            details: error.details,
        }
    }

    pub fn is(&self, code: ErrorCode) -> bool {
        self.code == code.as_str()
    }

    /// Whether another participant has control, or this one may only observe.
    pub(crate) fn is_about_control(&self) -> bool {
        self.is(ErrorCode::Forbidden) || self.is(ErrorCode::CapabilityDenied)
    }
}

impl ClientError {
    pub fn api(&self) -> Option<&ApiFailure> {
        match self {
            ClientError::Api(failure) => Some(failure),
            _ => None,
        }
    }

    pub fn is(&self, code: ErrorCode) -> bool {
        self.api().is_some_and(|f| f.is(code))
    }

    pub fn request_id(&self) -> Option<&str> {
        self.api().map(|f| f.request_id.as_str()).filter(|id| !id.is_empty())
    }

    pub fn is_retryable(&self) -> bool {
        match self {
            ClientError::Api(failure) => failure.retryable,
            ClientError::Transport { .. } | ClientError::GaveUp { .. } => true,
            _ => false,
        }
    }

    /// What the user can do next.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            // A TLS client connected to plain HTTP; the next case is the opposite.
            ClientError::Transport { url, cause } if url.starts_with("https:") && cause.contains("InvalidContentType") => {
                Some("this address does not use TLS; try http://")
            }
            ClientError::Transport { url, cause } if url.starts_with("http:") && cause.contains("invalid HTTP version") => {
                Some("this address may require TLS; try https://")
            }
            ClientError::Transport { cause, .. } if cause.contains("certificate") => {
                Some("pass the certificate of the broker's certificate authority with --ca-file or COBOX_CA_FILE, or check the host name")
            }
            ClientError::Transport { .. } => {
                Some("is the broker running? start it with `cobox up`, or select another with --url or COBOX_URL")
            }
            ClientError::NotCobox { url, excerpt, .. } if url.starts_with("http:") && excerpt.contains("HTTPS") => {
                Some("this address requires TLS; try https://")
            }
            ClientError::NotCobox { .. } => Some("check the URL: is there a proxy or another service in between?"),
            ClientError::InvalidUrl { .. } => Some("a broker URL looks like http://127.0.0.1:8421"),
            ClientError::Api(failure) => advice_for(&failure.code).filter(|advice| !repeats_server_advice(&failure.message, advice)),
            ClientError::Closed { code, .. } => match *code {
                close::GOING_AWAY | ABNORMAL_CLOSURE => Some("the broker or the sandbox was stopped; try again later"),
                close::ENDED => Some("the session was ended or released, or the key was revoked; the next command creates a new session"),
                _ => None,
            },
            ClientError::GaveUp { .. } => Some("when the broker is reachable again, list running commands with `cobox ps`"),
            ClientError::MayHaveRun { .. } => Some("check whether the command had its effect, and start it again if not"),
            ClientError::MissingOutput { .. } => Some("this is a bug; please report it"),
            ClientError::InvalidAuthority { .. } | ClientError::InvalidPath { .. } | ClientError::InvalidKey | ClientError::Source(_) => {
                None
            }
        }
    }

    pub(crate) fn transport(url: &str, error: &(dyn std::error::Error + 'static)) -> Self {
        ClientError::Transport { url: without_query(url), cause: innermost(error).to_string() }
    }

    /// Converts an unsuccessful response to an error, and reads no more than an envelope needs.
    pub(crate) async fn from_response(url: &str, mut response: reqwest::Response) -> Self {
        let status = response.status().as_u16();
        let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
        let retry_after = header("retry-after").and_then(|v| v.trim().parse().ok());
        let request_id = header("x-request-id");
        let mut body = Vec::new();
        // If the connection breaks after the status, the status is still reported.
        while let Ok(Some(chunk)) = response.chunk().await {
            let capacity = MAX_ERROR_BODY - body.len();
            body.extend_from_slice(&chunk[..chunk.len().min(capacity)]);
            if body.len() == MAX_ERROR_BODY {
                break;
            }
        }
        match serde_json::from_slice::<Envelope>(&body) {
            Ok(Envelope { error }) => ClientError::Api(Box::new(ApiFailure {
                status,
                code: error.code,
                message: error.message,
                retryable: error.retryable,
                request_id: if error.request_id.is_empty() { request_id.unwrap_or_default() } else { error.request_id },
                retry_after,
                details: error.details,
            })),
            Err(_) => ClientError::NotCobox { url: without_query(url), status, excerpt: excerpt(&body) },
        }
    }
}

/// The outermost message of an HTTP error only states that sending failed; the innermost contains the cause.
pub(crate) fn innermost<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost
}

fn advice_for(code: &str) -> Option<&'static str> {
    let known = ErrorCode::ALL.iter().find(|c| c.as_str() == code)?;
    Some(match known {
        ErrorCode::Unauthenticated => "check the API key: COBOX_API_KEY, --api-key-file, or the config that `cobox up` wrote",
        ErrorCode::TokenRevoked => "the key or the session was revoked; with a valid key, create a new session with `cobox session ensure`",
        ErrorCode::SessionExpired => "create a new one with `cobox session ensure`",
        ErrorCode::CapabilityDenied => "request a key or a session with this capability",
        ErrorCode::SessionNotFound => "create one for a thread with `cobox session ensure`",
        ErrorCode::SandboxNotFound => "`cobox sandbox list` lists the sandboxes that you can use",
        ErrorCode::SandboxStarting | ErrorCode::RateLimited | ErrorCode::ShellBusy => "try again in a moment",
        ErrorCode::ShellNotFound | ErrorCode::CommandNotFound => {
            "list running processes with `cobox ps`; processes do not survive a sandbox restart"
        }
        ErrorCode::QuotaExceeded => {
            "list your sandboxes with `cobox sandbox list`, and delete one with its files with `cobox sandbox delete`"
        }
        ErrorCode::DiskFull => "delete files in the sandbox and try again",
        ErrorCode::KeyNotFound => "list the existing keys with `cobox keys list`",
        ErrorCode::BackendUnavailable => "try again; the broker's log has the cause under this request ID",
        ErrorCode::Internal => "the broker's log has the cause under this request ID",
        ErrorCode::ProviderUnavailable => "try again; run `cobox doctor` on the broker's machine to check its requirements",
        _ => return None,
    })
}

/// Whether the server's message already contains the advice.
fn repeats_server_advice(message: &str, advice: &str) -> bool {
    advice.starts_with("try again") && ["try again", "ask again", "starts it again"].iter().any(|hint| message.contains(hint))
}

fn name_of(stream: OutputStream) -> &'static str {
    match stream {
        OutputStream::Stdout => "output",
        OutputStream::Stderr => "error output",
    }
}

/// Description of a close code, if the server gave no reason.
pub(crate) fn close_reason(code: u16, reason: &str) -> String {
    if !reason.is_empty() {
        return reason.to_owned();
    }
    match code {
        close::GOING_AWAY => "the broker or the sandbox is going away",
        close::UNAUTHENTICATED => "the token was not accepted",
        close::CAPABILITY => "the token doesn't allow this",
        close::AUTH_TIMEOUT => "no token was received in time",
        close::TAKEN_OVER => "it was replaced by another connection of this client",
        close::ENDED => "the session was ended or released",
        close::INVALID => "the server could not parse a frame",
        close::TOO_BIG => "a frame was too large",
        ABNORMAL_CLOSURE => "the stream has ended",
        _ => "no reason was given",
    }
    .to_owned()
}

fn without_query(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or(url).to_owned()
}

fn excerpt(body: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(body).chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_EXCERPT).collect();
    if text.trim().is_empty() { "nothing".to_owned() } else { text.trim().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn api(code: ErrorCode, message: &str) -> ClientError {
        ClientError::Api(Box::new(ApiFailure {
            status: code.status(),
            code: code.as_str().to_owned(),
            message: message.to_owned(),
            retryable: code.retryable(),
            request_id: String::new(),
            retry_after: None,
            details: None,
        }))
    }

    #[test]
    fn advice_matches_the_error_and_does_not_repeat_the_server() {
        assert!(api(ErrorCode::TokenRevoked, "no").advice().unwrap().contains("the key or the session was revoked"));
        assert_eq!(api(ErrorCode::ProviderUnavailable, "boxd did not answer; try again").advice(), None);
        assert!(api(ErrorCode::ProviderUnavailable, "no").advice().unwrap().contains("doctor"));
        for (code, words) in [(close::GOING_AWAY, "was stopped"), (close::ENDED, "ended or released"), (ABNORMAL_CLOSURE, "was stopped")] {
            let closed = ClientError::Closed { code, reason: "r".to_owned() };
            assert!(closed.advice().unwrap().contains(words), "{code}");
        }
    }

    #[test]
    fn a_wrong_url_scheme_is_detected() {
        let transport = |url: &str, cause: &str| ClientError::Transport { url: url.to_owned(), cause: cause.to_owned() };
        let plain = transport("https://x", "received corrupt message of type InvalidContentType");
        assert!(plain.advice().unwrap().contains("http://"));
        assert!(transport("http://x", "invalid HTTP version parsed").advice().unwrap().contains("https://"));
        assert!(transport("http://x", "refused").advice().unwrap().contains("cobox up"));
    }
}
