//! `cobox sync --once`: uploads a folder's current contents, without the files that its ignore files exclude.

use serde_json::json;

use super::{super::Outcome, Pair};
use crate::{
    context::Context,
    pack::Ignoring,
    transfer::{interruptible, send_folder},
    way_in::Target,
};

pub async fn run(pair: Pair, context: &Context) -> Outcome {
    let sending = async {
        let way_in = context.enter(&pair.target).await?;
        let moved = send_folder(context, &way_in.dataplane, &pair.folder, &pair.path, Ignoring::IgnoreFiles).await?;
        Ok((moved, way_in.name))
    };
    let (moved, name) = interruptible(sending).await?;
    let path = String::from_utf8_lossy(&pair.path).into_owned();
    let key = if matches!(pair.target, Target::Thread(_)) { "thread" } else { "sandbox" };
    let report =
        json!({"files": moved.files, "links": moved.links, "bytes": moved.bytes, "left_out": moved.left_out, key: name, "path": path});
    context.printer.result(&report, || format!("synced {} to {name}:{path}", moved.words()))?;
    Ok(0)
}
