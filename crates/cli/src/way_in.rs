//! From what the command line names, a thread, a session or a sandbox, to a sandbox that can be used.

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

/// The sandbox a command works in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Thread(String),
    Session(SessionId),
    /// By name or id.
    Sandbox(String),
}

impl Target {
    /// `COBOX_THREAD`, where it is set to something.
    pub fn default_thread(env: Environment) -> Self {
        let named = env("COBOX_THREAD").and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty());
        Self::Thread(named.unwrap_or_else(|| DEFAULT_THREAD.to_owned()))
    }

    /// As it was written.
    pub fn name(&self) -> &str {
        match self {
            Target::Thread(name) | Target::Sandbox(name) => name,
            Target::Session(id) => id.as_str(),
        }
    }
}

/// A sandbox that can be used, and what it was called on the command line.
pub struct WayIn {
    pub dataplane: Dataplane,
    pub name: String,
    pub sandbox_id: String,
    /// What the token allows, where there is one of our own.
    pub granted: Option<CapabilitySet>,
    /// Whom the sandbox knows us as, where our token says so.
    pub principal: Option<String>,
    /// Held for as long as the sandbox is used: it keeps the token fresh.
    _session: Option<Session>,
}

impl WayIn {
    fn of(session: Session) -> Self {
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

pub fn asking(thread: &str, mode: Mode) -> NegotiateRequest {
    NegotiateRequest::new(thread, mode)
}

/// The broker's own words speak of modes, which nobody types here.
pub fn no_session(thread: &str, told: Failure) -> Failure {
    Failure { what: format!("thread `{thread}` has no session"), ..told }
        .advise("`cobox session list` shows the threads that have one; `cobox session ensure` makes one")
}

impl Context {
    /// A way into a sandbox, with its token kept fresh. A thread without one gets it, and on a terminal that is told.
    pub async fn enter(&self, target: &Target) -> Result<WayIn, Failure> {
        let Target::Thread(thread) = target else { return self.enter_existing(target).await };
        let client = self.client()?;
        let is_lost = match self.come_back(&client, thread).await? {
            Back::In(session) => return Ok(WayIn::of(*session)),
            Back::Lost => true,
            Back::Unknown => false,
        };
        if self.printer.is_interactive() {
            match client.open(&asking(thread, Mode::Get)).await {
                Ok(session) => return Ok(self.came_in(session)),
                Err(e) if e.is(ErrorCode::SessionNotFound) || e.is(ErrorCode::SessionExpired) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let session = client.open(&asking(thread, Mode::Ensure)).await?;
        if self.printer.is_interactive() {
            let instead = if is_lost { "; the one it had is gone, and its files with it" } else { "" };
            self.printer.note(&format!("made a sandbox for thread {}{instead}", visible(thread)));
        }
        Ok(self.came_in(session))
    }

    /// What a word means that is a thread's or else a sandbox's name: a thread that there is, or was here before, wins.
    pub async fn meant(&self, word: &str) -> Result<Target, Failure> {
        let client = self.client()?;
        let thread = Target::Thread(word.to_owned());
        let is_known = self.thread_cache().is_some_and(|cache| cache.get(word).is_some());
        if is_known || session::of_thread(&client, word).await?.is_some() {
            return Ok(thread);
        }
        match client.get_sandbox(word).await {
            Ok(sandbox) => {
                if self.printer.is_interactive() {
                    self.printer.note(&format!("there is no thread {0}; {0} is sandbox {1}", visible(word), sandbox.id));
                }
                Ok(Target::Sandbox(word.to_owned()))
            }
            // No sandbox, or no name of one: a thread to be made. What else is wrong is said when it is.
            Err(_) => Ok(thread),
        }
    }

    /// As [`Context::enter`], but makes nothing.
    pub async fn enter_existing(&self, target: &Target) -> Result<WayIn, Failure> {
        let client = self.client()?;
        match target {
            Target::Thread(thread) => match client.open(&asking(thread, Mode::Get)).await {
                Ok(session) => Ok(self.came_in(session)),
                Err(e) if e.is(ErrorCode::SessionNotFound) => Err(no_session(thread, e.into())),
                Err(e) => Err(e.into()),
            },
            Target::Session(id) => Ok(WayIn::of(client.attach(id).await?)),
            Target::Sandbox(name) => {
                let sandbox = client.get_sandbox(name).await?;
                let (dataplane, sandbox_id) = (client.sandbox_at(&sandbox), sandbox.id.to_string());
                Ok(WayIn { dataplane, name: name.clone(), sandbox_id, granted: None, principal: None, _session: None })
            }
        }
    }

    /// Into the sandbox that the thread had when it was last used here, without making one.
    async fn come_back(&self, client: &Client, thread: &str) -> Result<Back, Failure> {
        let Some(cache) = self.thread_cache() else { return Ok(Back::Unknown) };
        let Some(known) = cache.get(thread) else { return Ok(Back::Unknown) };
        let hinting = NegotiateRequest { sandbox_hint: Some(known.sandbox_id.to_string()), ..asking(thread, Mode::Ensure) };
        match client.open(&hinting).await {
            Ok(session) => {
                cache.remember(session.info());
                Ok(Back::In(Box::new(session)))
            }
            // The broker knows better: it is asked again without, and says what else is wrong.
            Err(e) if is_stale(&e) => {
                cache.forget(thread);
                Ok(if e.is(ErrorCode::SandboxNotFound) { Back::Lost } else { Back::Unknown })
            }
            Err(e) => Err(e.into()),
        }
    }

    fn came_in(&self, session: Session) -> WayIn {
        if let Some(cache) = self.thread_cache() {
            cache.remember(session.info());
        }
        WayIn::of(session)
    }
}

/// What became of the sandbox that a thread had when it was last used here.
enum Back {
    In(Box<Session>),
    Lost,
    /// There was none, or the thread has another now.
    Unknown,
}

/// Where the server said no: what was remembered may be why.
fn is_stale(e: &ClientError) -> bool {
    let no = [
        ErrorCode::SandboxNotFound,
        ErrorCode::SessionConflict,
        ErrorCode::SandboxConflict,
        ErrorCode::SessionNotFound,
        ErrorCode::SessionExpired,
    ];
    no.into_iter().chain([ErrorCode::Forbidden, ErrorCode::InvalidRequest]).any(|code| e.is(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_thread_in_the_environment_is_none() {
        for (value, thread) in [("", DEFAULT_THREAD), ("demo", "demo")] {
            assert_eq!(Target::default_thread(&|_| Some(value.into())), Target::Thread(thread.to_owned()));
        }
        assert_eq!(Target::default_thread(&|_| None), Target::Thread(DEFAULT_THREAD.to_owned()));
    }
}
