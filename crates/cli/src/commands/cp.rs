//! `cobox cp`: files and folders into or out of a sandbox, with the manners of `cp -r`.

use std::{ffi::OsString, path::Path};

use cobox_client::{ArchiveFormat, Dataplane, PathKind};

use super::{Outcome, Thread};
use crate::{
    context::Context,
    failure::Failure,
    pack::Ignoring,
    place::{self, Place, Remote},
    transfer::{Moved, receive_file, receive_folder, send_file, send_folder},
};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
One side is in a sandbox: THREAD:/path, or :/path for the default thread. A relative path there starts in /workspace.
As with cp -r, what is copied onto an existing folder lands in it. Modes are kept, links stay links inside a folder.

Examples:
  cobox cp report.pdf demo:/workspace/
  cobox cp -t demo ./src :src
  cobox cp demo:/workspace/out ./out")]
pub struct Args {
    #[command(flatten)]
    thread: Thread,
    /// From: a local path, or THREAD:/path
    #[arg(value_name = "SRC")]
    from: OsString,
    /// To: a local path, or THREAD:/path
    #[arg(value_name = "DST")]
    to: OsString,
}

pub async fn run(args: Args, context: &Context) -> Outcome {
    let parse = |text: &OsString| place::parse(text).map_err(|e| Failure::new(format!("{}: {e}", text.display())));
    let moved = match (parse(&args.from)?, parse(&args.to)?) {
        (Place::Local(from), Place::Remote(to)) => {
            let session = context.ensure(to.thread.as_deref().unwrap_or(&args.thread.thread)).await?;
            upload(context, session.dataplane(), &from, &to).await?
        }
        (Place::Remote(from), Place::Local(to)) => {
            let session = context.ensure(from.thread.as_deref().unwrap_or(&args.thread.thread)).await?;
            download(context, session.dataplane(), &from, &to).await?
        }
        (Place::Local(_), Place::Local(_)) => {
            return Err(Failure::new("neither side is in a sandbox").advise("write one as THREAD:/path, or :/path for the default thread"));
        }
        (Place::Remote(_), Place::Remote(_)) => {
            return Err(Failure::new("both sides are in a sandbox")
                .advise("copy within one with `cobox exec -- cp …`, or through here in two steps"));
        }
    };
    context.printer.result(&moved, || format!("copied {}", moved.words()))?;
    Ok(0)
}

async fn upload(context: &Context, dataplane: &Dataplane, from: &Path, to: &Remote) -> Result<Moved, Failure> {
    let meta = std::fs::metadata(from).map_err(|e| Failure::new(format!("{}: {e}", from.display())))?;
    let kind = dataplane.kind(&to.path).await?;
    let lands_inside = to.is_directory || kind == PathKind::Directory;
    let target = if lands_inside && (kind == PathKind::Directory || meta.is_file()) {
        // `.` and `..` have no name of their own but what they stand for has.
        let whole = from.canonicalize()?;
        let name = from.file_name().or_else(|| whole.file_name());
        name.map_or_else(|| to.path.clone(), |name| to.join(name))
    } else {
        to.path.clone()
    };
    if meta.is_file() {
        return send_file(context, dataplane, from, &target).await;
    }
    if meta.is_dir() && kind == PathKind::File {
        return Err(Failure::new(format!("{} is a file; a folder can't be copied onto it", String::from_utf8_lossy(&to.path))));
    }
    send_folder(context, dataplane, from, &target, Ignoring::Nothing).await
}

async fn download(context: &Context, dataplane: &Dataplane, from: &Remote, to: &Path) -> Result<Moved, Failure> {
    let shown = || String::from_utf8_lossy(&from.path).into_owned();
    let target = match from.name() {
        Some(name) if to.is_dir() => to.join(name),
        _ => to.to_owned(),
    };
    match dataplane.kind(&from.path).await? {
        PathKind::File if from.is_directory => Err(Failure::new(format!("{} is a file, not a folder", shown()))),
        PathKind::File => receive_file(context, dataplane.read_file(&from.path).await?, &target).await,
        PathKind::Directory if target.is_file() => {
            Err(Failure::new(format!("{} is a file; a folder can't be copied onto it", target.display())))
        }
        PathKind::Directory => {
            let archive = dataplane.get_archive(&from.path, ArchiveFormat::TarZstd).await?;
            receive_folder(context, archive, &target).await
        }
        PathKind::Missing => Err(Failure::new(format!("there is no {} in the sandbox", shown()))),
    }
}
