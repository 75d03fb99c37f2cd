//! `cobox sync --once`: uploads a folder as it is now, without what its ignore files name.

use std::{ffi::OsString, path::PathBuf};

use serde_json::json;

use super::{Outcome, Thread};
use crate::{
    context::Context,
    failure::Failure,
    pack::Ignoring,
    place::{self, Place, Remote, WORK_DIR},
    transfer::send_folder,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
What .gitignore and .coboxignore name stays here; links go as links. Files that are only in the sandbox are left alone.

Examples:
  cobox sync --once .
  cobox sync --once ~/project demo:/workspace/project")]
pub struct Args {
    #[command(flatten)]
    thread: Thread,
    /// Upload once and end
    #[arg(long, required = true)]
    once: bool,
    /// The local folder
    #[arg(value_name = "DIR")]
    from: PathBuf,
    /// Where its contents go: THREAD:/path [default: /workspace of the thread]
    #[arg(value_name = "THREAD:/PATH")]
    to: Option<OsString>,
}

pub async fn run(args: Args, context: &Context) -> Outcome {
    if !args.from.is_dir() {
        return Err(Failure::new(format!("{} is not a folder", args.from.display())));
    }
    let to = match &args.to {
        None => Remote { thread: None, path: WORK_DIR.into(), is_directory: true },
        Some(text) => match place::parse(text) {
            Ok(Place::Remote(remote)) => remote,
            Ok(Place::Local(path)) => {
                return Err(Failure::new(format!("{} is a local path", path.display()))
                    .advise("write the sandbox's as THREAD:/path, or :/path for the default thread"));
            }
            Err(e) => return Err(Failure::new(format!("{}: {e}", text.display()))),
        },
    };
    let session = context.ensure(to.thread.as_deref().unwrap_or(&args.thread.thread)).await?;
    let moved = send_folder(context, session.dataplane(), &args.from, &to.path, Ignoring::IgnoreFiles).await?;
    let path = String::from_utf8_lossy(&to.path).into_owned();
    let report =
        json!({"files": moved.files, "bytes": moved.bytes, "left_out": moved.left_out, "thread": session.info().thread_id, "path": path});
    context.printer.result(&report, || format!("synced {} to {}:{path}", moved.words(), session.info().thread_id))?;
    Ok(0)
}
