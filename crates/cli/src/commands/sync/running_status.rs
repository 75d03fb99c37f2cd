//! Status of the sync of a sandbox, for views that show it beside other information.

use std::time::Duration;

use serde_json::Value;

use super::{
    control_socket::{Request, query},
    state_dir::{SyncConfig, SyncStateDir},
};

/// A sync that is too busy to answer within this time is shown with its last known status.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Status of the running sync for this sandbox, if there is one: the output of `cobox sync status --json`, or why it is
/// not available. Blocks until the sync answers, so not for async threads.
pub fn running_sync_status(thread: &str, sandbox_id: &str) -> Option<Result<Value, String>> {
    let is_same = |config: &SyncConfig| config.sandbox_id == sandbox_id || config.thread.as_deref() == Some(thread);
    let (state, _) = SyncStateDir::all().into_iter().find(|(state, config)| is_same(config) && state.is_running())?;
    query(&state, &Request::Status, Some(ANSWER_TIMEOUT)).map_err(|failure| failure.message).transpose()
}
