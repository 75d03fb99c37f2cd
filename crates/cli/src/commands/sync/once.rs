//! `cobox sync --once`: uploads a folder's current contents, without the files that its ignore files exclude.

use serde_json::json;

use super::{super::Outcome, SyncPair};
use crate::{
    context::Context,
    pack::IgnoreMode,
    target::Target,
    transfer::{interruptible, send_folder},
};

pub async fn run(pair: SyncPair, context: &Context) -> Outcome {
    let upload = async {
        let connection = context.open_sandbox(&pair.target).await?;
        let totals = send_folder(context, &connection.dataplane, &pair.folder, &pair.path, IgnoreMode::IgnoreFiles).await?;
        Ok((totals, connection.name))
    };
    let (totals, name) = interruptible(upload).await?;
    let path = String::from_utf8_lossy(&pair.path).into_owned();
    let key = if matches!(pair.target, Target::Thread(_)) { "thread" } else { "sandbox" };
    let report =
        json!({"files": totals.files, "links": totals.links, "bytes": totals.bytes, "left_out": totals.left_out, key: name, "path": path});
    context.printer.result(&report, || format!("synced {} to {name}:{path}", totals.summary()))?;
    Ok(0)
}
