//! The context of a request: its caller, its id, and how long the caller waits.

use std::time::Duration;

use cobox_protocol::{RequestId, SandboxId, SessionId, Timestamp};
use parking_lot::Mutex;

use crate::domain::model::{AuditRecord, Caller};

/// The context of a request, apart from its parameters.
pub struct RequestContext<'a> {
    pub caller: &'a Caller,
    pub request_id: &'a RequestId,
    /// Maximum time to wait for a sandbox that starts.
    pub wait: Duration,
    /// Name of the client program, as it identifies itself.
    pub client: &'a str,
    pub logged: Option<&'a LoggedIds>,
}

impl RequestContext<'_> {
    /// Records the session and the sandbox that were found or created for the request. Call before anything that can
    /// fail, so that the log line of a failed request has them.
    pub fn about(&self, session: &SessionId, sandbox: &SandboxId) {
        if let Some(logged) = self.logged {
            logged.set_session(session);
            logged.set_sandbox(sandbox);
        }
    }

    /// An audit record of the caller's own workspace.
    pub fn audit(&self, now: Timestamp, action: &'static str, detail: &str) -> AuditRecord {
        AuditRecord::new(now, &self.caller.principal.workspace, action).by(self.caller, self.request_id).detail(detail)
    }
}

/// The session and the sandbox of a request, for its log line; the latest if there are several.
#[derive(Default)]
pub struct LoggedIds {
    session: Mutex<Option<SessionId>>,
    sandbox: Mutex<Option<SandboxId>>,
}

impl LoggedIds {
    pub fn set_session(&self, id: &SessionId) {
        *self.session.lock() = Some(id.clone());
    }

    pub fn set_sandbox(&self, id: &SandboxId) {
        *self.sandbox.lock() = Some(id.clone());
    }

    pub fn session(&self) -> Option<SessionId> {
        self.session.lock().clone()
    }

    pub fn sandbox(&self) -> Option<SandboxId> {
        self.sandbox.lock().clone()
    }
}
