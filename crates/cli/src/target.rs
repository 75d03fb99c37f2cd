//! Resolves a thread, session or sandbox from the command line to an open connection to its sandbox.

use cobox_client::{Client, ClientError, Dataplane, Session};
use cobox_protocol::{
    CapabilitySet, ErrorCode, SessionId,
    session::{Mode, NegotiateRequest},
};

use crate::{
    commands::session,
    context::{Context, Environment},
    failure::Failure,
    printer::visible,
};

/// The thread used when neither a flag nor `COBOX_THREAD` names one.
const DEFAULT_THREAD: &str = "default";

/// The target of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Thread(String),
    Session(SessionId),
    /// Name or id of a sandbox.
    Sandbox(String),
}

impl Target {
    /// The thread from `COBOX_THREAD`, or the default one if that is unset or empty.
    pub fn default_thread(env: Environment) -> Self {
        let named = env("COBOX_THREAD").and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty());
        Self::Thread(named.unwrap_or_else(|| DEFAULT_THREAD.to_owned()))
    }

    /// The name as the user wrote it.
    pub fn name(&self) -> &str {
        match self {
            Target::Thread(name) | Target::Sandbox(name) => name,
            Target::Session(id) => id.as_str(),
        }
    }
}

/// An open sandbox, and its name on the command line.
pub struct SandboxConnection {
    pub dataplane: Dataplane,
    pub name: String,
    pub sandbox_id: String,
    /// Capabilities of the token, if this client has its own.
    pub granted: Option<CapabilitySet>,
    /// Principal under which the sandbox knows this client, if the token says so.
    pub principal: Option<String>,
    /// Kept open as long as the sandbox is used: it refreshes the token.
    _session: Option<Session>,
}

impl SandboxConnection {
    fn from_session(session: Session) -> Self {
        Self {
            dataplane: session.dataplane().clone(),
            name: session.info().thread_id.clone(),
            sandbox_id: session.info().sandbox.id.to_string(),
            granted: Some(session.info().credentials.granted_capabilities),
            principal: session.principal(),
            _session: Some(session),
        }
    }
}

pub fn negotiate_request(thread: &str, mode: Mode) -> NegotiateRequest {
    NegotiateRequest::new(thread, mode)
}

/// Replaces the broker's message, which mentions modes that the command line doesn't have.
pub fn no_session_failure(thread: &str, failure: Failure) -> Failure {
    Failure { message: format!("thread `{thread}` has no session"), ..failure }
        .with_advice("list threads with a session with `cobox session list`; create one with `cobox session ensure`")
}

impl Context {
    /// Opens a sandbox, and keeps its token fresh. Creates one for a thread without a sandbox; on a terminal the user
    /// is notified of that.
    pub async fn open_sandbox(&self, target: &Target) -> Result<SandboxConnection, Failure> {
        let Target::Thread(thread) = target else { return self.open_existing_sandbox(target).await };
        let client = self.client()?;
        let is_lost = match self.reopen_previous(&client, thread).await? {
            PreviousSandbox::Open(session) => return Ok(SandboxConnection::from_session(*session)),
            PreviousSandbox::Gone => true,
            PreviousSandbox::Unknown => false,
        };
        if self.printer.is_interactive() {
            match client.open(&negotiate_request(thread, Mode::Get)).await {
                Ok(session) => return Ok(self.remember_and_connect(session)),
                Err(e) if e.is(ErrorCode::SessionNotFound) || e.is(ErrorCode::SessionExpired) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let session = client.open(&negotiate_request(thread, Mode::Ensure)).await?;
        if self.printer.is_interactive() {
            let instead = if is_lost { "; its previous sandbox and files no longer exist" } else { "" };
            self.printer.note(&format!("created a sandbox for thread {}{instead}", visible(thread)));
        }
        Ok(self.remember_and_connect(session))
    }

    /// Resolves a word that is a thread's or a sandbox's name. A thread that exists, or was used here before, takes
    /// precedence.
    pub async fn resolve_name(&self, name: &str) -> Result<Target, Failure> {
        let client = self.client()?;
        let thread = Target::Thread(name.to_owned());
        let is_known = self.thread_cache().is_some_and(|cache| cache.get(name).is_some());
        if is_known || session::session_of_thread(&client, name).await?.is_some() {
            return Ok(thread);
        }
        match client.get_sandbox(name).await {
            Ok(sandbox) => {
                if self.printer.is_interactive() {
                    self.printer.note(&format!("no thread {0}; using sandbox {1}, which has that name", visible(name), sandbox.id));
                }
                Ok(Target::Sandbox(name.to_owned()))
            }
            // Not a sandbox, or not a valid sandbox name: a thread to create. Other errors are reported when it is
            // opened.
            Err(_) => Ok(thread),
        }
    }

    /// Like [`Context::open_sandbox`], but never creates anything.
    pub async fn open_existing_sandbox(&self, target: &Target) -> Result<SandboxConnection, Failure> {
        let client = self.client()?;
        match target {
            Target::Thread(thread) => match client.open(&negotiate_request(thread, Mode::Get)).await {
                Ok(session) => Ok(self.remember_and_connect(session)),
                Err(e) if e.is(ErrorCode::SessionNotFound) => Err(no_session_failure(thread, e.into())),
                Err(e) => Err(e.into()),
            },
            Target::Session(id) => Ok(SandboxConnection::from_session(client.attach(id).await?)),
            Target::Sandbox(name) => {
                let sandbox = client.get_sandbox(name).await?;
                let (dataplane, sandbox_id) = (client.sandbox_at(&sandbox), sandbox.id.to_string());
                Ok(SandboxConnection { dataplane, name: name.clone(), sandbox_id, granted: None, principal: None, _session: None })
            }
        }
    }

    /// Opens the sandbox that the thread had when it was last used here, without creating one.
    async fn reopen_previous(&self, client: &Client, thread: &str) -> Result<PreviousSandbox, Failure> {
        let Some(cache) = self.thread_cache() else { return Ok(PreviousSandbox::Unknown) };
        let Some(known) = cache.get(thread) else { return Ok(PreviousSandbox::Unknown) };
        let request = NegotiateRequest { sandbox_hint: Some(known.sandbox_id.to_string()), ..negotiate_request(thread, Mode::Ensure) };
        match client.open(&request).await {
            Ok(session) => {
                cache.remember(session.info());
                Ok(PreviousSandbox::Open(Box::new(session)))
            }
            // The cache is outdated: the broker is asked again without the hint, and reports any other error.
            Err(e) if is_stale(&e) => {
                cache.forget(thread);
                Ok(if e.is(ErrorCode::SandboxNotFound) { PreviousSandbox::Gone } else { PreviousSandbox::Unknown })
            }
            Err(e) => Err(e.into()),
        }
    }

    fn remember_and_connect(&self, session: Session) -> SandboxConnection {
        if let Some(cache) = self.thread_cache() {
            cache.remember(session.info());
        }
        SandboxConnection::from_session(session)
    }
}

/// Result of an attempt to open a thread's previous sandbox.
enum PreviousSandbox {
    Open(Box<Session>),
    Gone,
    /// There was none, or the thread has another one now.
    Unknown,
}

/// Whether the server's refusal may be due to an outdated cache entry.
fn is_stale(e: &ClientError) -> bool {
    let stale_codes = [
        ErrorCode::SandboxNotFound,
        ErrorCode::SessionConflict,
        ErrorCode::SandboxConflict,
        ErrorCode::SessionNotFound,
        ErrorCode::SessionExpired,
    ];
    stale_codes.into_iter().chain([ErrorCode::Forbidden, ErrorCode::InvalidRequest]).any(|code| e.is(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_thread_variable_means_the_default_thread() {
        for (value, thread) in [("", DEFAULT_THREAD), ("demo", "demo")] {
            assert_eq!(Target::default_thread(&|_| Some(value.into())), Target::Thread(thread.to_owned()));
        }
        assert_eq!(Target::default_thread(&|_| None), Target::Thread(DEFAULT_THREAD.to_owned()));
    }
}
