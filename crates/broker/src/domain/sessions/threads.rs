//! Threads: finds sessions by thread id, and ends them when the external owner of threads reports that a thread is gone.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SessionId, Timestamp,
    id::is_external_id,
    session::{Scope, ScopeType},
    thread::{ThreadEvent, ThreadNotice},
};

use super::negotiation::session_of_scope;
use crate::domain::{
    access,
    context::{BrokerContext, store_error},
    lifecycle::transitions::Lifecycle,
    model::{AuditRecord, Caller},
};

/// Recorded in the audit as the principal that ends a session by webhook.
const WEBHOOK: &str = "webhook";
const DELETED: &str = "its thread was deleted";
const ARCHIVED: &str = "its thread was archived";

fn scope(thread: &str) -> Scope {
    Scope { kind: ScopeType::Thread.as_str().to_owned(), id: thread.to_owned() }
}

pub struct Threads {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
}

impl Threads {
    /// The live session of a thread.
    pub async fn session_id_of(&self, caller: &Caller, thread: &str) -> Result<SessionId, ApiError> {
        must_be_thread(thread)?;
        Ok(session_of_scope(&self.context, caller, &scope(thread)).await?.session.id)
    }

    /// Ends the session of a deleted thread, if it has one. The broker doesn't store threads, so an unknown thread is not
    /// an error.
    pub async fn end_of_thread(&self, caller: &Caller, thread: &str, request_id: &RequestId) -> Result<(), ApiError> {
        must_be_thread(thread)?;
        let bound = match session_of_scope(&self.context, caller, &scope(thread)).await {
            Ok(bound) => bound,
            Err(e) if e.code == ErrorCode::SessionNotFound => return Ok(()),
            Err(e) => return Err(e),
        };
        access::may_end(&caller.principal, &bound.session)?;
        let audit = AuditRecord::new(self.context.now(), &bound.session.workspace, "session.ended");
        let audit = audit.by(caller, request_id).about(&bound).detail(DELETED);
        self.lifecycle.end_session(&bound, self.context.restorable_ending(&bound.sandbox, DELETED, audit)).await
    }

    /// Applies a signed notice; returns whether there was a session to end. A session created after the notice was sent
    /// is left alone, so that a late or repeated notice doesn't end a session it wasn't about.
    pub async fn end_by_notice(&self, notice: &ThreadNotice, sent_at: Timestamp, request_id: &RequestId) -> Result<bool, ApiError> {
        must_be_thread(&notice.thread_id)?;
        let context = &self.context;
        let workspace = &context.config.workspace;
        let found = context.store.session_of(workspace, ScopeType::Thread.as_str(), &notice.thread_id).await.map_err(store_error)?;
        let Some(bound) = found.filter(|b| b.session.created_at <= sent_at) else { return Ok(false) };
        let reason = match notice.event {
            ThreadEvent::Deleted => DELETED,
            ThreadEvent::Archived => ARCHIVED,
        };
        let mut audit = AuditRecord::new(context.now(), workspace, "session.ended").about(&bound).detail(reason);
        audit.principal = Some(WEBHOOK.to_owned());
        audit.request_id = Some(request_id.clone());
        self.lifecycle.end_session(&bound, context.restorable_ending(&bound.sandbox, reason, audit)).await?;
        Ok(true)
    }
}

fn must_be_thread(thread: &str) -> Result<(), ApiError> {
    if is_external_id(thread) {
        return Ok(());
    }
    Err(ApiError::invalid("thread_id: must have 1 to 256 characters and no control characters"))
}
