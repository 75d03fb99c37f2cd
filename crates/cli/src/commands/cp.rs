//! `cobox cp`: files and folders into or out of a sandbox, with the manners of `cp -r`.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use cobox_client::{ArchiveFormat, Dataplane, PathKind};

use super::{Outcome, Where};
use crate::{
    context::Context,
    failure::Failure,
    pack::Ignoring,
    place::{self, Place, Remote},
    transfer::{Moved, interruptible, receive_file, receive_folder, send_file, send_folder},
    way_in::Target,
};

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "cobox cp [OPTIONS] SRC... DST",
    after_help = "\
One side is in a sandbox: THREAD:/path, or :/path for the default thread or --sandbox. A relative path there starts in /workspace.
As with cp -r, what is copied onto an existing folder lands in it. Modes are kept, links stay links inside a folder.

Examples:
  cobox cp report.pdf demo:/workspace/
  cobox cp -t demo ./src :src
  cobox cp --sandbox build :/workspace/out ./out"
)]
pub struct Args {
    #[command(flatten)]
    place: Where,
    /// From and to: local paths, or THREAD:/path; the last one is a folder when there are more than two
    #[arg(value_name = "SRC... DST", required = true, num_args = 1..)]
    paths: Vec<OsString>,
}

pub async fn run(args: Args, context: &Context) -> Outcome {
    let moved = interruptible(copy(&args, context)).await?;
    context.printer.result(&moved, || format!("copied {}", moved.words()))?;
    Ok(0)
}

async fn copy(args: &Args, context: &Context) -> Result<Moved, Failure> {
    let parse = |text: &OsString| place::parse(text).map_err(|e| Failure::new(format!("{}: {e}", text.display())));
    let (to, sources) = match args.paths.split_last() {
        Some((to, sources)) if !sources.is_empty() => (parse(to)?, sources),
        _ => return Err(Failure::new("a copy has a source and a destination").advise("as in `cobox cp report.pdf demo:/workspace/`")),
    };
    let is_several = sources.len() > 1;
    let (mut uploads, mut downloads): (Vec<PathBuf>, Vec<(Target, Remote)>) = Default::default();
    for from in sources {
        match (parse(from)?, &to) {
            (Place::Local(from), Place::Remote(_)) => {
                // Looked at before anything is made for it.
                let meta = std::fs::metadata(&from).map_err(|e| Failure::new(format!("{}: {e}", from.display())))?;
                if !meta.is_file() && !meta.is_dir() {
                    return Err(Failure::new(format!("{} is neither a file nor a folder", from.display())));
                }
                uploads.push(from);
            }
            (Place::Remote(from), Place::Local(_)) => downloads.push((from.target(&args.place)?, from)),
            (Place::Local(_), Place::Local(_)) => {
                return Err(
                    Failure::new("neither side is in a sandbox").advise("write one as THREAD:/path, or :/path for the default thread")
                );
            }
            (Place::Remote(_), Place::Remote(_)) => {
                return Err(Failure::new("both sides are in a sandbox")
                    .advise("copy within one with `cobox exec -- cp …`, or through here in two steps"));
            }
        }
    }
    let mut moved = Moved::default();
    match to {
        Place::Remote(to) => {
            let way_in = context.enter(&to.target(&args.place)?).await?;
            for from in &uploads {
                moved += upload(context, &way_in.dataplane, from, &to, is_several).await?;
            }
        }
        Place::Local(to) => {
            if is_several && !to.is_dir() {
                return Err(Failure::new(format!("{} is not a folder; several things can only be copied into one", to.display())));
            }
            for (target, from) in &downloads {
                let way_in = context.enter_existing(target).await?;
                moved += download(context, &way_in.dataplane, from, &to).await?;
            }
        }
    }
    Ok(moved)
}

async fn upload(context: &Context, dataplane: &Dataplane, from: &Path, to: &Remote, is_several: bool) -> Result<Moved, Failure> {
    let meta = std::fs::metadata(from).map_err(|e| Failure::new(format!("{}: {e}", from.display())))?;
    let kind = dataplane.kind(&to.path).await?;
    if kind == PathKind::File && (is_several || meta.is_dir()) {
        let what = if is_several { "several things" } else { "a folder" };
        return Err(Failure::new(format!("{} is a file; {what} can't be copied onto it", String::from_utf8_lossy(&to.path))));
    }
    let lands_inside = kind == PathKind::Directory || is_several || (to.is_directory && meta.is_file());
    let target = if lands_inside {
        // `.` and `..` have no name of their own but what they stand for has.
        let whole = from.canonicalize()?;
        let name = from.file_name().or_else(|| whole.file_name());
        name.map_or_else(|| to.path.clone(), |name| to.join(name))
    } else {
        to.path.clone()
    };
    if meta.is_dir() {
        send_folder(context, dataplane, from, &target, Ignoring::Nothing).await
    } else {
        send_file(context, dataplane, from, &target).await
    }
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
