//! Why a deployment could not be spoken with, in words for the person who tries.

/// Longest answer shown of a deployment that refuses, in bytes.
pub(crate) const MAX_REFUSAL_BYTES: usize = 1024;

#[derive(Clone, Debug, thiserror::Error)]
pub enum LangGraphError {
    #[error("no answer from the deployment {url}: {cause}")]
    Transport { url: String, cause: String },
    #[error("the deployment refused {what} ({status}): {message}")]
    Refused { what: &'static str, status: u16, message: String },
    #[error("{url} answered {what} with something that LangGraph would not say")]
    Unreadable { url: String, what: &'static str },
    #[error("`{url}` is not a usable deployment URL: {cause}")]
    InvalidUrl { url: String, cause: String },
    #[error("the deployment's key has characters that can't be sent in a header")]
    InvalidKey,
    #[error("not the certificates of authorities: {cause}")]
    InvalidAuthority { cause: String },
    /// The run may go on; its thread has what came of it.
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

    /// What the person in front of it can do next.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Transport { .. } => Some("is the deployment running? `langgraph dev` starts one; name another with --deployment"),
            Self::Refused { status: 401 | 403, .. } => {
                Some("check the deployment's key: COBOX_DEPLOYMENT_KEY, or api_key_file in chat.toml")
            }
            Self::Refused { status: 404, .. } => Some("it is not there, or not yours: see what is with /threads and /assistant"),
            Self::Refused { status: 409 | 422, .. } => Some("a run may still be under way in this thread: wait for it, or cancel it"),
            Self::Unreadable { .. } => Some("check the URL: is it a LangGraph deployment?"),
            Self::InvalidUrl { .. } => Some("a deployment's URL looks like http://127.0.0.1:2024"),
            Self::Lost { .. } => Some("open the thread again to see what came of it"),
            Self::Refused { .. } | Self::InvalidKey | Self::InvalidAuthority { .. } => None,
        }
    }
}
