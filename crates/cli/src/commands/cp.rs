//! `cobox cp`: copies files and folders into and out of a sandbox, with the conventions of `cp -r`.

use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use cobox_client::{ArchiveFormat, Dataplane, PathKind};

use super::{Outcome, TargetArgs};
use crate::{
    context::Context,
    failure::Failure,
    location::{self, Location, RemotePath},
    pack::IgnoreMode,
    target::Target,
    transfer::{TransferTotals, interruptible, receive_file, receive_folder, receive_to_stdout, send_file, send_folder, send_stdin},
};

#[derive(Debug, clap::Args)]
#[command(
    override_usage = "cobox cp [OPTIONS] SRC... DST",
    after_help = "\
One side must be in a sandbox: THREAD:/path, or :/path for the default thread or --sandbox. Relative sandbox paths start in /workspace.
As with cp -r, a source is copied into an existing destination folder; for `.` or DIR/. its contents are. File modes and symbolic
links within a folder are preserved. `-` is standard input or output, for a single file. When a file is copied to a terminal,
escape sequences that affect this machine are removed unless --raw is given. Pipes and files receive every byte.

Examples:
  cobox cp report.pdf demo:/workspace/
  cobox cp -t demo ./src :src
  cobox cp --sandbox build :/workspace/out ./out
  cobox cp . demo:/workspace             the contents of this folder
  cobox cp demo:/workspace/log - | less"
)]
pub struct CpArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Accepted for compatibility with cp: folders are always copied recursively
    #[arg(id = "recursive", short = 'r', long = "recursive", short_alias = 'R')]
    _recursive: bool,
    /// Write all escape sequences when copying to a terminal; by default, sequences that access the clipboard, title,
    /// keyboard, printers, notifications or files of this machine are removed
    #[arg(long)]
    raw: bool,
    /// Sources and destination: local paths, or THREAD:/path; with several sources, the destination must be a folder
    #[arg(value_name = "SRC... DST", required = true, num_args = 1..)]
    paths: Vec<OsString>,
}

pub async fn run(args: CpArgs, context: &Context) -> Outcome {
    let Some(totals) = interruptible(copy(&args, context)).await? else { return Ok(0) };
    context.printer.result(&totals, || format!("copied {}", totals.summary()))?;
    Ok(0)
}

/// Standard input or output. A file with that name is written as `./-`.
const STDIO: &str = "-";

/// A source in a sandbox, to be copied to this machine.
struct Download {
    target: Target,
    from: RemotePath,
    /// Whether to copy the folder's contents instead of the folder.
    copies_contents: bool,
}

/// Copies, and returns the totals; `None` if the file went to standard output, where a summary would mix with it.
async fn copy(args: &CpArgs, context: &Context) -> Result<Option<TransferTotals>, Failure> {
    let parse = |text: &OsString| location::parse(text).map_err(|e| Failure::new(format!("{}: {e}", text.display())));
    let (to, sources) = match args.paths.split_last() {
        Some((to, sources)) if !sources.is_empty() => (parse(to)?, sources),
        _ => {
            return Err(
                Failure::new("cp needs a source and a destination").with_advice("for example `cobox cp report.pdf demo:/workspace/`")
            );
        }
    };
    let is_several = sources.len() > 1;
    let (mut uploads, mut downloads): (Vec<PathBuf>, Vec<Download>) = Default::default();
    for from in sources {
        match (parse(from)?, &to) {
            (Location::Local(from), Location::Remote(_)) => {
                check_upload(&from, is_several)?;
                uploads.push(from);
            }
            (Location::Remote(remote), Location::Local(_)) => {
                let target = remote.resolve_target(&args.target, context).await?;
                downloads.push(Download { target, from: remote, copies_contents: is_contents(from) });
            }
            (Location::Local(_), Location::Local(_)) => {
                return Err(Failure::new("neither the source nor the destination is in a sandbox")
                    .with_advice("write one of them as THREAD:/path, or :/path for the default thread"));
            }
            (Location::Remote(_), Location::Remote(_)) => {
                return Err(Failure::new("the source and the destination are both in a sandbox")
                    .with_advice("copy within a sandbox with `cobox exec -- cp …`; copy between sandboxes through a local path"));
            }
        }
    }
    let mut totals = TransferTotals::default();
    match to {
        Location::Remote(to) => {
            let connection = context.open_sandbox(&to.resolve_target(&args.target, context).await?).await?;
            for from in &uploads {
                totals += upload(context, &connection.dataplane, from, &to, is_several).await?;
            }
        }
        Location::Local(to) if to.as_os_str() == STDIO => {
            print_file(context, &downloads, args.raw).await?;
            return Ok(None);
        }
        Location::Local(to) => {
            if is_several && !to.is_dir() {
                return Err(Failure::new(format!("{} is not a folder; several sources need a destination folder", to.display())));
            }
            for item in &downloads {
                let connection = context.open_existing_sandbox(&item.target).await?;
                totals += download(context, &connection.dataplane, item, &to, args.raw).await?;
            }
        }
    }
    Ok(Some(totals))
}

/// Checks a local source before anything is created for it.
fn check_upload(from: &Path, is_several: bool) -> Result<(), Failure> {
    if from.as_os_str() == STDIO {
        return match is_several {
            true => {
                Err(Failure::new("standard input has no file name for the destination folder").with_advice("copy it alone, to a file path"))
            }
            false => Ok(()),
        };
    }
    let meta = std::fs::metadata(from).map_err(|e| Failure::new(format!("{}: {e}", from.display())))?;
    match meta.is_file() || meta.is_dir() {
        true => Ok(()),
        false => Err(Failure::new(format!("{} is neither a file nor a folder", from.display())).with_advice("use `-` for standard input")),
    }
}

async fn upload(
    context: &Context,
    dataplane: &Dataplane,
    from: &Path,
    to: &RemotePath,
    is_several: bool,
) -> Result<TransferTotals, Failure> {
    let kind = dataplane.kind(&to.path).await?;
    let shown = || String::from_utf8_lossy(&to.path).into_owned();
    if from.as_os_str() == STDIO {
        if kind == PathKind::Directory || to.is_directory {
            return Err(Failure::new(format!("{} is a folder, and standard input has no file name", shown()))
                .with_advice("write the path of the destination file"));
        }
        return send_stdin(context, dataplane, &to.path).await;
    }
    let meta = std::fs::metadata(from).map_err(|e| Failure::new(format!("{}: {e}", from.display())))?;
    if kind == PathKind::File && (is_several || meta.is_dir()) {
        let what = if is_several { "several sources" } else { "a folder" };
        return Err(Failure::new(format!("{} is a file; {what} can't be copied onto it", shown())));
    }
    let lands_inside = kind == PathKind::Directory || is_several || (to.is_directory && meta.is_file());
    let target = match from.file_name() {
        Some(name) if lands_inside && !is_contents(from.as_os_str()) => to.join(name),
        _ => to.path.clone(),
    };
    if meta.is_dir() {
        send_folder(context, dataplane, from, &target, IgnoreMode::Nothing).await
    } else {
        send_file(context, dataplane, from, &target).await
    }
}

/// Whether the path means the folder's contents: it is `.` or `..`, or ends in one of them.
fn is_contents(path: &OsStr) -> bool {
    let last = path.as_bytes().rsplit(|b| matches!(b, b'/' | b':')).find(|part| !part.is_empty());
    matches!(last, Some(b"." | b".."))
}

async fn download(context: &Context, dataplane: &Dataplane, item: &Download, to: &Path, is_raw: bool) -> Result<TransferTotals, Failure> {
    let Download { from, copies_contents, .. } = item;
    let shown = || String::from_utf8_lossy(&from.path).into_owned();
    let target = match from.file_name() {
        Some(name) if to.is_dir() && !copies_contents => to.join(name),
        _ => to.to_owned(),
    };
    match dataplane.kind(&from.path).await? {
        PathKind::File if from.is_directory => Err(Failure::new(format!("{} is a file, not a folder", shown()))),
        PathKind::File => receive_file(context, dataplane.read_file(&from.path).await?, &target, is_raw).await,
        PathKind::Directory if target.exists() && !target.is_dir() => {
            Err(Failure::new(format!("{} is a file; a folder can't be copied onto it", target.display())))
        }
        PathKind::Directory => {
            let archive = dataplane.get_archive(&from.path, ArchiveFormat::TarZstd).await?;
            receive_folder(context, archive, &target).await
        }
        PathKind::Missing => Err(Failure::new(format!("there is no {} in the sandbox", shown()))),
    }
}

/// Copies one file to standard output.
async fn print_file(context: &Context, downloads: &[Download], is_raw: bool) -> Result<(), Failure> {
    let [Download { target, from, .. }] = downloads else {
        return Err(Failure::new("standard output takes a single file").with_advice("copy the files one by one"));
    };
    if context.printer.is_json() {
        return Err(
            Failure::new("--json can't be used when the destination is standard output").with_advice("copy to a path, or omit --json")
        );
    }
    let dataplane = context.open_existing_sandbox(target).await?.dataplane;
    let shown = String::from_utf8_lossy(&from.path).into_owned();
    match dataplane.kind(&from.path).await? {
        PathKind::File if !from.is_directory => receive_to_stdout(context, dataplane.read_file(&from.path).await?, is_raw).await,
        PathKind::File => Err(Failure::new(format!("{shown} is a file, not a folder"))),
        PathKind::Directory => Err(Failure::new(format!("{shown} is a folder; standard output takes a single file"))
            .with_advice("use `cobox exec -- tar c …` to print an archive")),
        PathKind::Missing => Err(Failure::new(format!("there is no {shown} in the sandbox"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_given_as_a_dot_means_its_contents() {
        for path in [".", "..", "./", "src/.", "src/..", "demo:.", "demo:/workspace/./"] {
            assert!(is_contents(OsStr::new(path)), "{path}");
        }
        for path in ["src", "./src", "src/", ".hidden", "demo:/workspace", "demo:", "/"] {
            assert!(!is_contents(OsStr::new(path)), "{path}");
        }
    }
}
