//! Why a command failed, as the person who typed it reads it: what happened, what to do, and the request's id.

use cobox_client::{ApiFailure, ClientError};
use serde_json::json;

/// `cobox` itself failed.
pub const OWN_ERROR: u8 = 1;
/// `cobox exec` itself failed, and the command may not have run; the number docker uses for the same.
pub const EXEC_ERROR: u8 = 125;
/// Ended by Ctrl-C: the shell's number for it.
pub const INTERRUPTED: u8 = 130;
/// Ended by SIGTERM, likewise.
pub const TERMINATED: u8 = 143;

#[derive(Debug)]
pub struct Failure {
    pub what: String,
    pub advice: Option<String>,
    pub request_id: Option<String>,
    /// What the server said, when a server said no.
    pub api: Option<Box<ApiFailure>>,
    /// The same may succeed later without being changed.
    pub is_retryable: bool,
    pub exit_code: u8,
}

impl Failure {
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), advice: None, request_id: None, api: None, is_retryable: false, exit_code: OWN_ERROR }
    }
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }
    pub fn exit_with(mut self, code: u8) -> Self {
        self.exit_code = code;
        self
    }
    pub fn json(&self) -> serde_json::Value {
        let api = self.api.as_deref();
        // The code has its own field here, and is not said again.
        let message = api.and_then(|a| self.what.strip_suffix(&format!(" ({})", a.code))).unwrap_or(&self.what);
        json!({"error": {
            "code": api.map(|a| &a.code),
            "message": message,
            "retryable": self.is_retryable,
            "details": api.and_then(|a| a.details.as_ref()),
            "advice": self.advice,
            "request_id": self.request_id,
        }})
    }
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        let what = match e.api() {
            Some(told) => format!("{} ({})", without_api_hint(&told.message), told.code),
            None => e.to_string(),
        };
        Self {
            what,
            advice: e.advice().map(str::to_owned),
            request_id: e.request_id().map(str::to_owned),
            is_retryable: e.is_retryable(),
            api: e.api().cloned().map(Box::new),
            exit_code: OWN_ERROR,
        }
    }
}

/// A broker tells programs to ensure a session; people have the advice, which names the command.
fn without_api_hint(message: &str) -> &str {
    match message.rsplit_once("; ") {
        Some((said, hint)) if hint.starts_with("ensure a new") => said,
        _ => message,
    }
}

/// The whole chain of causes on one line. A client's error within it keeps its advice.
impl From<anyhow::Error> for Failure {
    fn from(e: anyhow::Error) -> Self {
        let what = format!("{e:#}");
        match e.downcast::<ClientError>() {
            Ok(client) => Self { what, ..Self::from(client) },
            Err(_) => Self::new(what),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Self {
        Self::new(e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_as_json_says_each_thing_once_and_whether_to_try_again() {
        let told = ApiFailure {
            status: 409,
            code: "SANDBOX_CONFLICT".into(),
            message: "the name is taken".into(),
            retryable: false,
            request_id: "req_1".into(),
            retry_after: None,
            details: Some(json!({"sandbox_id": "sb_1"})),
        };
        let error = &Failure::from(ClientError::Api(Box::new(told))).json()["error"];
        assert_eq!((&error["code"], &error["message"]), (&json!("SANDBOX_CONFLICT"), &json!("the name is taken")));
        assert_eq!((&error["retryable"], &error["details"]["sandbox_id"]), (&json!(false), &json!("sb_1")));
        assert_eq!(without_api_hint("session x is over: released; ensure a new one"), "session x is over: released");
        assert_eq!(without_api_hint("a; b"), "a; b");
        let lost = ClientError::Transport { url: "http://x".into(), cause: "refused".into() };
        assert_eq!(Failure::from(lost).json()["error"]["retryable"], true);
    }
}
