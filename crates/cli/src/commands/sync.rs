//! `cobox sync --once`: uploads a folder as it is now, without what its ignore files name.

use std::{ffi::OsString, path::PathBuf};

use serde_json::json;

use super::{Outcome, Where};
use crate::{
    context::Context,
    failure::Failure,
    pack::Ignoring,
    place::{self, Place, Remote, WORK_DIR},
    transfer::{interruptible, send_folder},
    way_in::Target,
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
What .gitignore and .coboxignore name stays here; links go as links. Files that are only in the sandbox are left alone.
Hidden files go too, .git among them: name it in .coboxignore to leave it here.

Examples:
  cobox sync --once .
  cobox sync --once ~/project demo:/workspace/project")]
pub struct Args {
    #[command(flatten)]
    place: Where,
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
    match std::fs::metadata(&args.from) {
        Ok(meta) if meta.is_dir() => {}
        Ok(_) => return Err(Failure::new(format!("{} is not a folder", args.from.display())).advise("`cobox cp` copies a file")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(Failure::new(format!("{} does not exist", args.from.display())));
        }
        Err(e) => return Err(Failure::new(format!("{}: {e}", args.from.display()))),
    }
    let to = match &args.to {
        None => Remote { target: None, path: WORK_DIR.into(), is_directory: true },
        Some(text) => match place::parse(text) {
            Ok(Place::Remote(remote)) => remote,
            Ok(Place::Local(path)) => {
                return Err(Failure::new(format!("{} is a local path", path.display()))
                    .advise("write the sandbox's as THREAD:/path, or :/path for the default thread"));
            }
            Err(e) => return Err(Failure::new(format!("{}: {e}", text.display()))),
        },
    };
    let target = to.target(&args.place)?;
    let sending = async {
        let way_in = context.enter(&target).await?;
        let moved = send_folder(context, &way_in.dataplane, &args.from, &to.path, Ignoring::IgnoreFiles).await?;
        Ok((moved, way_in.name))
    };
    let (moved, name) = interruptible(sending).await?;
    let path = String::from_utf8_lossy(&to.path).into_owned();
    let key = if matches!(target, Target::Thread(_)) { "thread" } else { "sandbox" };
    let report =
        json!({"files": moved.files, "links": moved.links, "bytes": moved.bytes, "left_out": moved.left_out, key: name, "path": path});
    context.printer.result(&report, || format!("synced {} to {name}:{path}", moved.words()))?;
    Ok(0)
}
