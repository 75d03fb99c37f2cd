//! Deleted sandboxes: lists, restores and purges those whose files are still kept, and reports what a deletion would
//! erase.

use std::sync::Arc;

use cobox_protocol::{
    ApiError, ErrorCode, RequestId, SandboxId,
    sandbox::{RestoreResponse, RestoreSandbox, SandboxInfo, SandboxUsage, Uncounted},
    session::{Scope, ScopeType},
    text::{MAX_SHOWN_CHARS, printable},
};

use super::sandboxes::{Sandboxes, check_name, name_taken};
use crate::{
    domain::{
        access::{self, request_context::RequestContext, sandbox_lookup::find},
        context::{BrokerContext, store_error},
        lifecycle::transitions::Lifecycle,
        model::{AuditRecord, Caller, HARD_END, SANDBOX_RESTORED, Sandbox},
    },
    store::{PageParams, RestoredSandbox, Viewer},
};

/// Maximum number of threads shown for a deleted sandbox; few have more than one.
const MAX_THREADS: u32 = 16;

pub struct DeletedSandboxes {
    pub context: Arc<BrokerContext>,
    pub lifecycle: Arc<Lifecycle>,
    pub sandboxes: Arc<Sandboxes>,
}

impl DeletedSandboxes {
    pub async fn list(&self, caller: &Caller, page: &PageParams) -> Result<Vec<SandboxInfo>, ApiError> {
        let context = &self.context;
        let found = context.store.deleted_sandboxes(&Viewer::from(&caller.principal), context.now(), page).await.map_err(store_error)?;
        let mut list = Vec::with_capacity(found.len());
        for sandbox in found {
            let threads = context.store.past_threads(&sandbox.id, MAX_THREADS).await.map_err(store_error)?;
            list.push(SandboxInfo { threads, ..self.sandboxes.info_with_tags(sandbox).await? });
        }
        Ok(list)
    }

    /// Restores a deleted sandbox, suspended and with its files. For its owner and operators. Its former shares and
    /// tokens are not restored.
    pub async fn restore(
        &self,
        request: &RequestContext<'_>,
        id_or_name: &str,
        params: RestoreSandbox,
    ) -> Result<RestoreResponse, ApiError> {
        let context = &self.context;
        let deleted = find_deleted(context, request.caller, id_or_name).await?;
        access::may_end(&request.caller.principal, &deleted)?;
        params.name.as_deref().map_or(Ok(()), check_name)?;
        // The sandbox may not have been stopped yet.
        self.lifecycle.destroy(&deleted.id).await;
        let name = params.name.or(deleted.name.clone());
        let audit =
            AuditRecord::of_sandbox(context.now(), &deleted, "sandbox.restored", "asked for").by(request.caller, request.request_id);
        match context.store.restore_sandbox(&deleted.id, name.as_deref(), context.now(), &audit).await.map_err(store_error)? {
            RestoredSandbox::Restored(restored) => self.restored(*restored).await,
            RestoredSandbox::NameTaken(id) => {
                let conflict = name_taken(&name.unwrap_or_default(), &id);
                Err(ApiError { message: format!("{}; restore it under another name", conflict.message), ..conflict })
            }
            RestoredSandbox::SpecPartMissing(what) => {
                Err(ApiError::new(ErrorCode::InUse, format!("{what}, from which sandbox {} was created, was deleted too", deleted.id)))
            }
            RestoredSandbox::Stopping => Err(ApiError::new(
                ErrorCode::SandboxStarting,
                format!("sandbox {} was deleted a moment ago and is still being stopped; try again", deleted.id),
            )),
            RestoredSandbox::Gone => Err(not_deleted(id_or_name)),
        }
    }

    /// Response with the threads that used the sandbox: those whose next session uses it again, and those that have had
    /// another one since.
    async fn restored(&self, sandbox: Sandbox) -> Result<RestoreResponse, ApiError> {
        let store = &self.context.store;
        let (mut returning, mut rebound_threads) = (Vec::new(), Vec::new());
        for thread in store.past_threads(&sandbox.id, MAX_THREADS).await.map_err(store_error)? {
            let scope = Scope { kind: ScopeType::Thread.as_str().to_owned(), id: thread };
            if store.session_of(&sandbox.workspace, &scope.kind, &scope.id).await.map_err(store_error)?.is_some() {
                rebound_threads.push(scope.id);
                continue;
            }
            let Some(last) = store.last_session_of(&sandbox.workspace, &scope).await.map_err(store_error)? else { continue };
            let is_kept = last.session.end_reason.as_deref().is_some_and(|why| [HARD_END, SANDBOX_RESTORED].contains(&why));
            match last.sandbox.id == sandbox.id {
                true if is_kept => returning.push(scope.id),
                // Its session ended before the sandbox was deleted.
                true => {}
                false => rebound_threads.push(scope.id),
            }
        }
        let sandbox = self.sandboxes.info_with_tags(sandbox).await?;
        Ok(RestoreResponse { sandbox, returning_threads: returning, threads_elsewhere: rebound_threads })
    }

    /// Counts the files that a deletion, or the purge of a deleted sandbox, would erase. For its owner and operators.
    pub async fn usage(&self, caller: &Caller, id_or_name: &str, is_deleted: bool) -> Result<SandboxUsage, ApiError> {
        let context = &self.context;
        let sandbox = match is_deleted {
            true => find_deleted(context, caller, id_or_name).await?,
            false => find(context, caller, id_or_name).await?,
        };
        access::may_end(&caller.principal, &sandbox)?;
        let (written, uncounted) = match context.is_here(&sandbox) {
            true => (context.provider.written_files(&sandbox.id).await, Uncounted::Provider),
            false => (None, Uncounted::OtherNode),
        };
        Ok(SandboxUsage {
            files: written.map(|w| w.files),
            bytes: written.map(|w| w.bytes),
            complete: written.is_some_and(|w| w.is_complete),
            uncounted: written.is_none().then_some(uncounted),
            restorable_seconds: if is_deleted { 0 } else { context.keep_deleted(&sandbox).as_secs() },
        })
    }
}

/// Removes the files of a deleted sandbox before their retention time ends.
pub(super) async fn purge(
    context: &BrokerContext,
    lifecycle: &Arc<Lifecycle>,
    caller: &Caller,
    id_or_name: &str,
    request_id: &RequestId,
) -> Result<(), ApiError> {
    let deleted = find_deleted(context, caller, id_or_name).await?;
    access::may_end(&caller.principal, &deleted)?;
    tracing::info!(sandbox = %deleted.id, principal = caller.principal.name, %request_id, "a deleted sandbox is purged");
    lifecycle.destroy(&deleted.id).await;
    let deleted = context.load_sandbox(&deleted.id).await?;
    let audit = AuditRecord::of_sandbox(context.now(), &deleted, "sandbox.purged", "asked for").by(caller, request_id);
    lifecycle.purge(&deleted, &audit).await
}

/// A deleted sandbox of the caller's workspace, by its id or by its former name.
async fn find_deleted(context: &BrokerContext, caller: &Caller, id_or_name: &str) -> Result<Sandbox, ApiError> {
    let found = match id_or_name.parse::<SandboxId>() {
        Ok(id) => context.store.sandbox(&id).await,
        Err(_) => context.store.sandbox_once_named(&caller.principal.workspace, id_or_name).await,
    };
    let is_there = |s: &Sandbox| s.restore_until.is_some_and(|until| until > context.now()) && access::is_visible(&caller.principal, s);
    found.map_err(store_error)?.filter(is_there).ok_or_else(|| not_deleted(id_or_name))
}

fn not_deleted(id_or_name: &str) -> ApiError {
    let id_or_name = printable(id_or_name, MAX_SHOWN_CHARS);
    ApiError::new(ErrorCode::SandboxNotFound, format!("there is no deleted sandbox `{id_or_name}` that can be restored"))
}
