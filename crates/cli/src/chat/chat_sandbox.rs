//! The sandbox of a conversation: found or created for its thread, and handed to the agent with a token that has fewer
//! capabilities than the user's.

use cobox_client::{Client, ClientError, EventStream, EventsFrom, Session};
use cobox_protocol::{
    CapabilitySet, ErrorCode,
    session::{Mode, NegotiateRequest},
    token::DelegateRequest,
};
use serde_json::{Value, json};

/// Which sandbox the conversation should use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SandboxChoice {
    /// The thread's sandbox, if it has one.
    Existing,
    /// Created before the first message if the thread has none; with this name if one is given.
    Ensure { name: Option<String> },
    /// This sandbox, by name or id.
    Use { sandbox: String },
}

/// An open session of the thread's sandbox: its token is refreshed as long as this value lives.
pub struct ChatSandbox {
    client: Client,
    session: Session,
}

impl ChatSandbox {
    /// `None` if the thread has no sandbox and none should be created.
    pub async fn open(client: Client, thread: &str, choice: &SandboxChoice) -> Result<Option<Self>, ClientError> {
        let request = match choice {
            SandboxChoice::Existing => NegotiateRequest::new(thread, Mode::Get),
            SandboxChoice::Ensure { name } => NegotiateRequest { name: name.clone(), ..NegotiateRequest::new(thread, Mode::Ensure) },
            SandboxChoice::Use { sandbox } => {
                NegotiateRequest { sandbox_hint: Some(sandbox.clone()), ..NegotiateRequest::new(thread, Mode::Ensure) }
            }
        };
        match client.open(&request).await {
            Ok(session) => Ok(Some(Self { client, session })),
            Err(e) if *choice == SandboxChoice::Existing && (e.is(ErrorCode::SessionNotFound) || e.is(ErrorCode::SessionExpired)) => {
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    pub fn session(&self) -> &Session {
        &self.session
    }

    pub fn events(&self, from: EventsFrom) -> EventStream {
        self.client.events(&self.session.info().session_id, from)
    }

    /// `config.configurable.sandbox` of a run: the session's simple fields, with a token that has an agent's
    /// capabilities and expires on its own. A failed delegation is no error: an agent with its own broker access needs
    /// only the ids.
    pub async fn run_configuration(&self) -> Value {
        let info = self.session.info();
        let mut sandbox = json!({
            "session_id": info.session_id,
            "thread_id": info.thread_id,
            "sandbox": {
                "id": info.sandbox.id,
                "provider": info.sandbox.provider,
                "http_base_url": info.sandbox.http_base_url,
                "ws_base_url": info.sandbox.ws_base_url,
            },
        });
        let capabilities = info.credentials.granted_capabilities.intersection(CapabilitySet::AGENT_DEFAULT).names();
        let request = DelegateRequest { capabilities: Some(capabilities), ..DelegateRequest::default() };
        if let Ok(delegated) = self.client.delegate(&info.session_id, &request).await {
            sandbox["token"] = json!(delegated.token.expose());
            sandbox["expires_at"] = json!(delegated.expires_at);
        }
        sandbox
    }
}
