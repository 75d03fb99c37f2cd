//! From what the command line names, a thread or a sandbox, to a sandbox that can be used.

use cobox_client::{Dataplane, Session};
use cobox_protocol::{
    CapabilitySet, ErrorCode,
    session::{Mode, NegotiateRequest},
};

use crate::{
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
    /// By name or id.
    Sandbox(String),
}

impl Target {
    /// `COBOX_THREAD`, where it is set to something.
    pub fn default_thread(env: Environment) -> Self {
        let named = env("COBOX_THREAD").and_then(|v| v.into_string().ok()).filter(|v| !v.is_empty());
        Self::Thread(named.unwrap_or_else(|| DEFAULT_THREAD.to_owned()))
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
        let client = self.client()?;
        let Target::Thread(thread) = target else { return self.enter_existing(target).await };
        if self.printer.is_interactive() {
            match client.open(&asking(thread, Mode::Get)).await {
                Ok(session) => return Ok(WayIn::of(session)),
                Err(e) if e.is(ErrorCode::SessionNotFound) || e.is(ErrorCode::SessionExpired) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let session = client.open(&asking(thread, Mode::Ensure)).await?;
        if self.printer.is_interactive() {
            self.printer.note(&format!("made a sandbox for thread {}", visible(thread)));
        }
        Ok(WayIn::of(session))
    }

    /// As [`Context::enter`], but makes nothing.
    pub async fn enter_existing(&self, target: &Target) -> Result<WayIn, Failure> {
        let client = self.client()?;
        match target {
            Target::Thread(thread) => match client.open(&asking(thread, Mode::Get)).await {
                Ok(session) => Ok(WayIn::of(session)),
                Err(e) if e.is(ErrorCode::SessionNotFound) => Err(no_session(thread, e.into())),
                Err(e) => Err(e.into()),
            },
            Target::Sandbox(name) => {
                let sandbox = client.get_sandbox(name).await?;
                let (dataplane, sandbox_id) = (client.sandbox_at(&sandbox), sandbox.id.to_string());
                Ok(WayIn { dataplane, name: name.clone(), sandbox_id, granted: None, principal: None, _session: None })
            }
        }
    }
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
