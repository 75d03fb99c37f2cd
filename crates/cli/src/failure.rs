//! Why a command failed, as the person who typed it reads it: what happened, what to do, and the request's id.

use cobox_client::ClientError;
use serde_json::json;

/// `cobox` itself failed.
pub const OWN_ERROR: u8 = 1;
/// `cobox exec` failed before the remote command ran, the number docker uses for the same.
pub const EXEC_ERROR: u8 = 125;

#[derive(Debug)]
pub struct Failure {
    pub what: String,
    pub advice: Option<String>,
    pub request_id: Option<String>,
    /// The server's error code, when a server said no.
    pub api_code: Option<String>,
    pub exit_code: u8,
}

impl Failure {
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), advice: None, request_id: None, api_code: None, exit_code: OWN_ERROR }
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
        json!({"error": {"code": self.api_code, "message": self.what, "advice": self.advice, "request_id": self.request_id}})
    }
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        Self {
            what: e.to_string(),
            advice: e.advice().map(str::to_owned),
            request_id: e.request_id().map(str::to_owned),
            api_code: e.api().map(|f| f.code.clone()),
            exit_code: OWN_ERROR,
        }
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
