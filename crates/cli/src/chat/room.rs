//! The sandbox of a conversation: found or made for its thread, and handed to the agent with a token narrower than one's own.

use cobox_client::{Client, ClientError, EventStream, EventsFrom, Session};
use cobox_protocol::{
    CapabilitySet, ErrorCode,
    session::{Mode, NegotiateRequest},
    token::DelegateRequest,
};
use serde_json::{Value, json};

/// What is wanted of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// The one that the thread has, when it has one.
    Existing,
    /// Made if need be, of this name if one is given, before the first message.
    Ready { name: Option<String> },
    /// This one, by name or id.
    Use { sandbox: String },
}

/// A thread's sandbox, held: its token is kept fresh for as long as this lives.
pub struct Room {
    client: Client,
    session: Session,
}

impl Room {
    /// `None` where the thread has no sandbox and none is to be made.
    pub async fn open(client: Client, thread: &str, wish: &Wish) -> Result<Option<Self>, ClientError> {
        let request = match wish {
            Wish::Existing => NegotiateRequest::new(thread, Mode::Get),
            Wish::Ready { name } => NegotiateRequest { name: name.clone(), ..NegotiateRequest::new(thread, Mode::Ensure) },
            Wish::Use { sandbox } => {
                NegotiateRequest { sandbox_hint: Some(sandbox.clone()), ..NegotiateRequest::new(thread, Mode::Ensure) }
            }
        };
        match client.open(&request).await {
            Ok(session) => Ok(Some(Self { client, session })),
            Err(e) if *wish == Wish::Existing && (e.is(ErrorCode::SessionNotFound) || e.is(ErrorCode::SessionExpired)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    pub fn session(&self) -> &Session {
        &self.session
    }

    pub fn events(&self, from: EventsFrom) -> EventStream {
        self.client.events(&self.session.info().session_id, from)
    }

    /// `config.configurable.sandbox` of a run: the session's simple fields, with a token of an agent's capabilities that ends by itself.
    /// A broker that gives none to hand on is no hindrance: an agent with a broker of its own needs only the ids.
    pub async fn for_run(&self) -> Value {
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
