//! Errors as the user of a command reads them: what happened, what to do, and the request's id.

use cobox_client::{ApiFailure, ClientError};
use serde_json::json;

/// Exit code when `cobox` itself fails.
pub const GENERAL_ERROR: u8 = 1;
/// Exit code when `cobox exec` itself fails and the command may not have run; docker uses the same number.
pub const EXEC_ERROR: u8 = 125;
/// Exit code after Ctrl-C, as in a shell.
pub const INTERRUPTED: u8 = 130;
/// Exit code after SIGTERM, as in a shell.
pub const TERMINATED: u8 = 143;

#[derive(Debug)]
pub struct Failure {
    pub message: String,
    pub advice: Option<String>,
    pub request_id: Option<String>,
    /// The server's error response, if the server refused the request.
    pub api: Option<Box<ApiFailure>>,
    /// The same request may succeed later.
    pub is_retryable: bool,
    pub exit_code: u8,
}

impl Failure {
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), advice: None, request_id: None, api: None, is_retryable: false, exit_code: GENERAL_ERROR }
    }
    pub fn with_advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }
    pub fn with_exit_code(mut self, code: u8) -> Self {
        self.exit_code = code;
        self
    }
    pub fn json(&self) -> serde_json::Value {
        let api = self.api.as_deref();
        // The code has its own field, so the message omits it.
        let message = api.and_then(|a| self.message.strip_suffix(&format!(" ({})", a.code))).unwrap_or(&self.message);
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
        let message = match e.api() {
            Some(error) => format!("{} ({})", without_api_hint(&error.message), error.code),
            None => e.to_string(),
        };
        Self {
            message,
            advice: e.advice().map(str::to_owned),
            request_id: e.request_id().map(str::to_owned),
            is_retryable: e.is_retryable(),
            api: e.api().cloned().map(Box::new),
            exit_code: GENERAL_ERROR,
        }
    }
}

/// Removes the broker's hint for programs to ensure a session: the advice names the command for that.
fn without_api_hint(message: &str) -> &str {
    match message.rsplit_once("; ") {
        Some((sentence, hint)) if hint.starts_with("ensure a new") => sentence,
        _ => message,
    }
}

/// Puts the whole chain of causes on one line. A client error within the chain keeps its advice.
impl From<anyhow::Error> for Failure {
    fn from(e: anyhow::Error) -> Self {
        let message = format!("{e:#}");
        match e.downcast::<ClientError>() {
            Ok(client) => Self { message, ..Self::from(client) },
            Err(_) => Self::new(message),
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
    fn json_errors_have_no_duplicates_and_say_whether_to_retry() {
        let refusal = ApiFailure {
            status: 409,
            code: "SANDBOX_CONFLICT".into(),
            message: "the name is taken".into(),
            retryable: false,
            request_id: "req_1".into(),
            retry_after: None,
            details: Some(json!({"sandbox_id": "sb_1"})),
        };
        let error = &Failure::from(ClientError::Api(Box::new(refusal))).json()["error"];
        assert_eq!((&error["code"], &error["message"]), (&json!("SANDBOX_CONFLICT"), &json!("the name is taken")));
        assert_eq!((&error["retryable"], &error["details"]["sandbox_id"]), (&json!(false), &json!("sb_1")));
        assert_eq!(without_api_hint("session x is over: released; ensure a new one"), "session x is over: released");
        assert_eq!(without_api_hint("a; b"), "a; b");
        let lost = ClientError::Transport { url: "http://x".into(), cause: "refused".into() };
        assert_eq!(Failure::from(lost).json()["error"]["retryable"], true);
    }
}
