//! Errors of a deployment, worded for the user.

/// Maximum number of bytes shown of an error response.
pub(crate) const MAX_REFUSAL_BYTES: usize = 1024;

#[derive(Clone, Debug, thiserror::Error)]
pub enum LangGraphError {
    #[error("no response from the deployment {url}: {cause}")]
    Transport { url: String, cause: String },
    #[error("the deployment refused {what} ({status}): {message}")]
    Refused { what: &'static str, status: u16, message: String },
    #[error("{url} sent an invalid response for {what}")]
    Unreadable { url: String, what: &'static str },
    #[error("`{url}` is not a usable deployment URL: {cause}")]
    InvalidUrl { url: String, cause: String },
    #[error("the deployment's key contains characters that are not allowed in a header")]
    InvalidKey,
    #[error("the file has no valid CA certificates: {cause}")]
    InvalidAuthority { cause: String },
    /// The run may continue; its results are in the thread.
    #[error("the run's stream was lost: {cause}")]
    Lost { cause: String },
}

impl LangGraphError {
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// What the user can do next.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Transport { .. } => {
                Some("is the deployment running? start one with `langgraph dev`, or select another with --deployment")
            }
            Self::Refused { status: 401 | 403, .. } => {
                Some("check the deployment's key: COBOX_DEPLOYMENT_KEY, or api_key_file in chat.toml")
            }
            Self::Refused { status: 404, .. } => {
                Some("it doesn't exist or you have no access: /threads and /assistant list what you can use")
            }
            Self::Refused { status: 409 | 422, .. } => Some("a run may still be active in this thread: wait for it or cancel it"),
            Self::Unreadable { .. } => Some("check the URL: is it a LangGraph deployment?"),
            Self::InvalidUrl { .. } => Some("a deployment's URL looks like http://127.0.0.1:2024"),
            Self::Lost { .. } => Some("open the thread again to see its results"),
            Self::Refused { .. } | Self::InvalidKey | Self::InvalidAuthority { .. } => None,
        }
    }
}
