//! How the sync of a sandbox stands, for whoever shows it beside other things.

use std::time::Duration;

use serde_json::Value;

use super::{
    control::{Request, ask},
    state::{Config, State},
};

/// A sync that is too busy to answer in this time is shown as it was.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Of the one that runs and has this sandbox at its other end, if there is one: what `cobox sync status --json` says, or why it can't be
/// told. Waits for it, so not on a thread that others need.
pub fn running_sync_of(thread: &str, sandbox_id: &str) -> Option<Result<Value, String>> {
    let is_its = |config: &Config| config.sandbox_id == sandbox_id || config.thread.as_deref() == Some(thread);
    let (state, _) = State::all().into_iter().find(|(state, config)| is_its(config) && state.is_running())?;
    ask(&state, &Request::Status, Some(ANSWER_WITHIN)).map_err(|failure| failure.what).transpose()
}
